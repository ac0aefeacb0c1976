"""python -m tools.check: its output and its exit status."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from records.media import probe
from records.reader import Records
from tests.records.numbered import make_video
from tests.records.samples import CAPTION, GOOD, POINT, QA, VIDEO_POINT, image, turn, video, write
from tests.tools.command import run_main
from tools import check

MEDIA = Path(__file__).parents[1] / "media"
ROW = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


def run(*words):
    """-> exit status, lines of stdout, stderr"""
    status, out, err = run_main(check.main, *words)
    return status, out.splitlines(), err


def test_check_tells_line_kind_and_reason_then_the_sum(tmp_path):
    small = image({**POINT, "points": [{"x": 0.5, "y": 0.5}]})
    path = write(tmp_path / "r.jsonl", GOOD, "{", image(CAPTION, image="no.png"), small, ROW)
    shutil.copy(MEDIA / "coins.png", tmp_path / "a.png")
    status, out, _ = run(path)
    assert status == 1
    assert [line.split(": ")[:2] for line in out[:-2]] == [
        [f"{path}:2", "wrong record"], [f"{path}:3", "missing file"],
        [f"{path}:4", "unlikely unit"], [f"{path}:5", "wrong record"]]
    assert out[-2:] == [
        f"Paths are relative to {tmp_path}; use --media DIR for another folder.",
        f"{path}: 5 records; missing file 1, unlikely unit 1, wrong record 2"]
    write(path, *["{}"] * 30)
    assert [len(run(path, *flags)[1]) for flags in ([], ["--all"])] == [21, 31]
    write(path, GOOD)                                # a text without an image or a video
    for flags in ([], ["--decode"]):
        assert run(path, *flags) == (0, [f"{path}: 1 record; nothing is wrong"], "")


def test_a_record_whose_weights_are_all_0_has_nothing_to_train_on(tmp_path):
    context = turn(weight=0)
    context["annotations"].append({**QA, "weight": 0})
    path = write(tmp_path / "r.jsonl", context, turn(weight=0), {"annotations": [
        {**QA, "weight": 0}, QA]})
    status, out, _ = run(path)
    assert status == 1
    assert [line.split(": ")[:2] for line in out[:2]] == [
        [f"{path}:1", "nothing to train on"], [f"{path}:2", "nothing to train on"]]
    assert out[2:] == [f"{path}: 3 records; nothing to train on 2"]


def test_a_misspelled_style_is_told_and_a_style_of_another_name_is_not(tmp_path, capsys):
    styles = ["long_captoin", "long_caption", "chart_qa", "video_clip_caption_start", "vqa"]
    rows = [{"annotations": [{**QA, "style": s}]} for s in styles]
    path = write(tmp_path / "r.jsonl", *rows, image({"type": "qa", "turns": [
        {**POINT, "style": "pointting"}]}, image=str(MEDIA / "coins.png")))
    assert run(path)[:2] == (1, [
        f"{path}:1: unlikely style: annotations[0]: unknown style 'long_captoin' - did you "
        "mean 'long_caption'?",
        f"{path}:6: unlikely style: annotations[0].turns[0]: unknown style 'pointting' - did you "
        "mean 'pointing'?", f"{path}: 6 records; unlikely style 2"])
    Records(path)                                    # training warns once
    assert capsys.readouterr().err.count("did you mean 'long_caption'?") == 1


@pytest.mark.parametrize(("x", "side", "decode", "is_wrong"), [
    (1000, 1001, False, True), (1000, 1001, True, True), (1001, 1001, False, False),
    (1000, 1000, False, False),
])
def test_thousandths_are_found_by_the_headers_of_the_images(tmp_path, x, side, decode, is_wrong):
    Image.new("L", (1200, side)).save(tmp_path / "a.png")
    box = {"type": "box", "label": "l", "coords": "pixel", "form": "xyxy",
           "boxes": [{"box": [10, 20, x, 900]}]}
    path = write(tmp_path / "r.jsonl", image(CAPTION), image(box),
                 image({**POINT, "coords": "pixel"}))
    status, out, _ = run(path, *["--decode"] * decode)
    assert status == is_wrong
    assert [f"{path}: unlikely unit: every coordinate is at most 1,000" in line
            for line in out] == [True, False][not is_wrong :]
    assert out[-1].endswith("unlikely unit 1" if is_wrong else "nothing is wrong")


def test_a_letter_that_the_locale_lacks_costs_its_record(tmp_path, monkeypatch):
    path = write(tmp_path / "r.jsonl", image(CAPTION, image="\x1b\xe9.png"))
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    status, out, err = run(path)
    assert out[0].endswith("\\x1b\\xe9.png; your locale is not UTF-8: set PYTHONUTF8=1")
    assert out[0].isascii()
    assert (status, err) == (1, "")


def test_images_of_two_files_are_counted(tmp_path):
    """Also if their paths are spelled differently. Invalid records do not count."""
    (tmp_path / "a.png").touch()
    train = write(tmp_path / "train.jsonl", image(CAPTION))
    test = write(tmp_path / "test.jsonl", image(CAPTION, image=str(tmp_path / "a.png")),
                 image(CAPTION, image="./a.png"), image({**QA, "weight": -1}))
    status, out, err = run(train, test)
    assert (status, err) == (1, "")
    assert out[0] == f"{train}: 1 record; nothing is wrong"
    assert out[2:] == [f"{test}: 3 records; wrong record 1",
                       f"{test}: 1 of its images and videos are also in {train}"]


@pytest.mark.parametrize("decode", [False, True])
def test_check_opens_the_files_only_when_told_to(tmp_path, decode):
    for name in ("coins.png", "bigbuckbunny.mp4"):
        shutil.copy(MEDIA / name, tmp_path / name)
    coins = (tmp_path / "coins.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(coins[:9000])
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "bigbuckbunny.mp4").read_bytes()[:9000])
    (tmp_path / "folder.png").mkdir()
    sha256 = hashlib.sha256(coins).hexdigest()
    bunny = {"path": "bigbuckbunny.mp4"}
    bunny_s = probe(MEDIA / "bigbuckbunny.mp4").duration
    late = {**VIDEO_POINT, "points": [{"x": 4, "y": 2, "t": 8}]}

    def pixel(y, t=1):
        return {**VIDEO_POINT, "coords": "pixel", "points": [{"x": 4, "y": y, "t": t}]}

    frames = [("coins.png", 300), ("coins.png", 310)]
    rows = [
        ("", image(CAPTION, image={"path": "coins.png", "width": 384, "height": 303,
                                   "sha256": sha256})),
        ("missing file", image(CAPTION, image="folder.png")),
        ("missing file", video(CAPTION, video={"frames": ["coins.png", "gone.png"], "fps": 2})),
        ("damaged image", image(CAPTION, image="cut.png")),
        ("damaged image", video(CAPTION, video={"frames": ["coins.png", "cut.png"], "fps": 2})),
        ("damaged video", video(CAPTION, video="cut.mp4")),
        ("outside the clip", video(late, video=bunny)),
        ("other than declared", image(CAPTION, image={"path": "coins.png", "sha256": "0" * 64})),
        ("other than declared", image(CAPTION, image={"path": "coins.png", "width": 3,
                                                      "height": 3})),
        ("other than declared", video(CAPTION, video={**bunny, "duration": 9})),
        ("", video(CAPTION, video={**bunny, "duration": bunny_s + 0.4})),
        ("wrong record", video(pixel(730), video=bunny)),
        ("", video(pixel(715), video=bunny)),
        *(("wrong record" if y > 303 else "", video(pixel(y, t=0), video={
            "frames": [name], "fps": 1})) for name, y in frames),
    ]
    path = write(tmp_path / "r.jsonl", *(row for _, row in rows))
    status, out, _ = run(path, "--all", *["--decode"] * decode)
    assert status == 1
    found = {int(line.split(":")[1]): line.split(": ")[1] for line in out[:-2]}
    expected = {k: kind for k, (kind, _) in enumerate(rows, 1) if kind}
    if not decode:
        expected = {k: kind for k, kind in expected.items() if kind == "missing file"}
    assert found == expected


def test_check_decodes_the_frames_that_training_uses(tmp_path):
    """A video is damaged at 1.5 s, so a run that uses two frames per second cannot read it."""
    path = make_video(tmp_path / "a.mp4", "-c:v libx264 -g 1", n=40)
    content = path.read_bytes()
    at = content.find(b"mdat") + 4 + (len(content) - content.find(b"mdat")) * 15 // 40
    path.write_bytes(content[:at] + bytes(range(60)) + content[at + 60 :])
    path = write(tmp_path / "r.jsonl", video(CAPTION, video="a.mp4"))
    assert run(path, "--decode")[1][0].startswith(f"{path}:1: damaged video: ")
    assert run(path)[0] == 0
    assert run(path, "--decode", "--max-frames", 1)[0] == 0      # only the first frame


def test_check_of_a_mixture_checks_every_file_that_it_names(tmp_path):
    """Also files of groups, with their own media folders. A file of chats is rejected."""
    (tmp_path / "sub/photos").mkdir(parents=True)
    shutil.copy(MEDIA / "coins.png", tmp_path / "sub/photos/a.png")
    good = write(tmp_path / "good.jsonl", GOOD)
    in_folder = write(tmp_path / "sub/images.jsonl", image(CAPTION))
    chats = write(tmp_path / "sub/chats.jsonl", ROW)
    group = [{"path": "sub/images.jsonl", "media": "sub/photos"}, {"path": "sub/chats.jsonl"}]
    mix = tmp_path / "mix.json"
    mix.write_text(json.dumps([
        {"path": "good.jsonl", "rate": 0.5}, {"group": "pixmo", "rate": 0.5, "data": group}]))
    status, out, err = run(mix)
    assert status == 2
    assert err == (f"tools.check: {chats}: this is not a .jsonl file of records; convert it with: "
                   f"python -m tools.convert {chats} {tmp_path}/sub/chats.records.jsonl\n")
    assert [line.split(": ")[0] for line in out] == [str(good), str(in_folder)]
    assert out[1].endswith("1 record; nothing is wrong")
    (tmp_path / "sub/photos/a.png").unlink()
    assert "missing file" in "".join(run(mix)[1])
