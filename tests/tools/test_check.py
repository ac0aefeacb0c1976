"""python -m tools.check: what it prints, and its exit status."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.records.samples import (
    CAPTION,
    CLIP,
    GOOD,
    POINT,
    VIDEO_POINT,
    image,
    turn,
    video,
    write,
)
from tools import check

MEDIA = Path(__file__).parents[1] / "media"
ROW = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": " "}]}


@pytest.fixture
def run(capsys):
    """Runs the command -> exit status, lines of stdout, stderr."""
    def command(*argv):
        status = check.main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return command


def test_check_tells_line_code_and_reason_then_the_sum(tmp_path, run):
    path = write(
        tmp_path / "r.jsonl", GOOD, {**GOOD, "id": "a"}, "{", image(CAPTION, image="no.png"),
        image({**POINT, "count": 2}, image="no.png"), {**GOOD, "id": "a"}, turn(answer="<image>"))
    status, out, _ = run(path)
    assert status == 1
    assert [line.split(" ", 2)[:2] for line in out[:-1]] == [
        [f"{path}:3:", "E01"], [f"{path}:4:", "S20"], [f"{path}:5:", "S11"], [f"{path}:7:", "W05"],
        [f"{path}:6:", "E08"]]
    assert out[-1] == (f"{path}: 7 records; E01 1, E08 1, S11 1, S20 1, W05 1; "
                       "1 of 1 media files are missing")


def test_check_leaves_with_0_unless_something_is_wrong(tmp_path, run):
    path = write(tmp_path / "r.jsonl", GOOD)
    assert run(path) == (0, [f"{path}: 1 records; nothing is wrong"], "")
    write(path, *[turn(answer="<image>")] * 30)
    status, out, _ = run(path)
    assert status == 0
    assert len(out) == 2                         # a warning is told once
    assert out[-1].endswith("30 records; W05 30")
    write(path, ROW, GOOD)
    status, out, _ = run(path)
    assert status == 1
    assert out[0].endswith("; skipped")


def test_check_prints_twenty_lines_or_all(tmp_path, run):
    path = write(tmp_path / "r.jsonl", *["{}"] * 30)
    assert len(run(path)[1]) == 21
    assert len(run(path, "--all")[1]) == 31


def test_a_missing_file_and_a_missing_folder_are_the_users_mistake(tmp_path, run):
    path = write(tmp_path / "r.jsonl", GOOD)
    cases = [[tmp_path / "none.jsonl"], [tmp_path], [path, "--media", tmp_path / "none"]]
    for argv in cases:
        status, out, err = run(*argv)
        assert status == 2
        assert out == []
        assert err.count("\n") == 1


def write_media(folder):
    """Good, damaged and odd files; returns the sha256 of coins.png."""
    for name in ("coins.png", "bigbuckbunny.mp4"):
        shutil.copy(MEDIA / name, folder / name)
    coins = (folder / "coins.png").read_bytes()
    (folder / "cut.png").write_bytes(coins[:9000])
    (folder / "cut.mp4").write_bytes((folder / "bigbuckbunny.mp4").read_bytes()[:9000])
    (folder / "folder.png").mkdir()
    Image.new("CMYK", (40, 30)).save(folder / "inks.tif")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(folder / "turned.jpg", exif=exif)
    second = Image.new("RGB", (40, 30), "red")
    Image.new("RGB", (40, 30)).save(folder / "moving.gif", save_all=True, append_images=[second])
    return hashlib.sha256(coins).hexdigest()


@pytest.mark.parametrize("decode", [False, True])
def test_check_opens_the_files_only_when_told_to(tmp_path, run, decode):
    sha256 = write_media(tmp_path)
    bunny = {"path": "bigbuckbunny.mp4"}
    late = {**VIDEO_POINT, "points": [{"x": 4, "y": 2, "t": 8}]}

    def pixel(y, t=1):
        return {**VIDEO_POINT, "coords": "pixel", "points": [{"x": 4, "y": y, "t": t}]}

    rows = [
        ("", image(CAPTION, image={"path": "coins.png", "width": 384, "height": 303,
                                   "sha256": sha256})),
        ("E10", image(CAPTION, image="folder.png")),
        ("S20", image(CAPTION, image="gone.png")),
        ("S24", video(CAPTION, video={"frames": ["coins.png", "gone.png"], "fps": 2})),
        ("S21", image(CAPTION, image="cut.png")),
        ("S21", image(CAPTION, image={"path": "coins.png", "sha256": "0" * 64})),
        ("S23", video(CAPTION, video="cut.mp4")),
        ("S23", video(CAPTION, video={**bunny, "start": 60, "end": 70})),
        ("W02", image(CAPTION, image={"path": "coins.png", "width": 38, "height": 30})),
        ("W02", video(CAPTION, video={**bunny, "duration": 9})),
        ("W06", image(CAPTION, image="inks.tif")),
        ("W06", image(CAPTION, image="turned.jpg")),
        ("W06", image(CAPTION, image="moving.gif")),
        ("S10", video(late, video=bunny)),
        ("E62", video(pixel(730), video=bunny)),
        ("", video(pixel(715), video=bunny)),
        ("E62", video(pixel(310, t=0), video={"frames": ["coins.png"], "fps": 1})),
    ]
    path = write(tmp_path / "r.jsonl", *(row for _, row in rows))
    status, out, _ = run(path, "--all", *["--decode"] * decode)
    assert status == 1
    found = {int(line.split(":")[1]): line.split(" ")[1] for line in out[:-1]}
    expected = {k: code for k, (code, _) in enumerate(rows, 1) if code}
    if not decode:
        expected = {k: code for k, code in expected.items() if code in ("E10", "S20", "S24")}
    assert found == expected


# --------------------------------------------------------------------------------------------------
# mixtures


def write_mix(folder, *entries):
    path = folder / "mix.json"
    path.write_text(json.dumps(entries))
    return path


def test_check_of_a_mixture_checks_every_file_that_it_names(tmp_path, run):
    """Also those of groups, each in its own folder of media and with its own options."""
    (tmp_path / "sub/photos").mkdir(parents=True)
    shutil.copy(MEDIA / "coins.png", tmp_path / "sub/photos/a.png")
    good = write(tmp_path / "good.jsonl", GOOD)
    in_folder = write(tmp_path / "sub/images.jsonl", image(CAPTION))
    lenient = write(tmp_path / "sub/lenient.jsonl", GOOD, image(CAPTION, image="/a.png"))
    mix = write_mix(
        tmp_path, {"path": "good.jsonl", "rate": 0.5},
        {"group": "pixmo", "rate": 0.5, "data": [
            {"path": "sub/images.jsonl", "media": "sub/photos"},
            {"path": "sub/lenient.jsonl", "lenient": True}]})
    status, out, err = run(mix)
    assert status == 1
    assert err == ""
    assert [line.split(": ")[0] for line in out] == [
        str(good), str(in_folder), f"{lenient}:2", str(lenient)]
    assert out[2].endswith("; skipped")
    assert out[1].endswith("1 records; nothing is wrong")
    (tmp_path / "sub/photos/a.png").unlink()
    assert "S20" in "".join(run(mix)[1])


def test_a_mixture_of_good_files_leaves_with_0(tmp_path, run):
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b.jsonl", video(CAPTION, video={**CLIP, "path": "a.mp4"}))
    shutil.copy(MEDIA / "bigbuckbunny.mp4", tmp_path / "a.mp4")
    status, out, _ = run(write_mix(tmp_path, {"path": "a.jsonl"}, {"path": "b.jsonl"}))
    assert status == 0
    assert len(out) == 2


def test_a_file_that_a_mixture_names_and_that_is_missing_is_named(tmp_path, run):
    write(tmp_path / "a.jsonl", GOOD)
    mix = write_mix(tmp_path, {"path": "gone.jsonl"}, {"path": "a.jsonl"})
    status, out, err = run(mix)
    assert status == 2
    assert err == f"{tmp_path}/gone.jsonl: there is no such file\n"
    assert len(out) == 1                         # the other one is checked all the same


@pytest.mark.parametrize("content", ["{", "{}", "[]", '[{"path": 3}]', '[{"rate": 1}]'])
def test_what_is_no_mixture_is_refused_with_a_sentence(tmp_path, run, content):
    (tmp_path / "mix.json").write_text(content)
    status, out, err = run(tmp_path / "mix.json")
    assert status == 2
    assert out == []
    assert err.startswith(f"{tmp_path}/mix.json: ")
    assert err.count("\n") == 1
    assert run(tmp_path / "no-mix.json")[0] == 2
