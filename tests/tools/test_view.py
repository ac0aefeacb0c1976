"""python -m tools.view: the page shows the contents of the batch, and text cannot become markup."""

import base64
import hashlib
import html
import io
import json
import re
from functools import cache

import numpy as np
import pytest
from PIL import Image

import attention
import data
import train
import vision
from records.errors import plural
from tests.test_layout import ROOT
from tests.tools.command import run_main
from tools import view
from training.config import parse
from training.log import read_log

MEDIA = ROOT / "tests/media"
PHOTOS = ("--data", str(MEDIA / "records.jsonl"), "--media", str(MEDIA))
TOY = ("--stage", "1", "--tiny")
ROWS = [("--stage", "2", "--tiny"),
        ("--stage", "2", *PHOTOS, "--data.max_tokens=2600", "--pack_crops=12")]
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\"'{{MASK}}"


@cache
def make_row(*flags):
    """Flags of train.py -> view.Row of the first row of a plan, (T,T) bool allowed, its page."""
    args, config = parse([*flags, "--batch", "1", "--micro-batch", "1"])
    row = view.plan_row(args, config, 1, 0)
    allowed = attention.allow(row.batch.visible_until, row.batch.bidir)[0].numpy()
    return row, allowed, view.write_page(row)


def read_runs(page):
    """-> [(kind, first, last, sees, HTML of the run), ..]"""
    found = re.findall(r'<span class="run (\w+)" data-first="(\d+)" data-last="(\d+)" '
                       r'data-sees="([-\d ]+)">(.*?)</span>', page, re.DOTALL)
    assert len(found) == page.count("data-sees=")
    return [(kind, int(first), int(last), *rest) for kind, first, last, *rest in found]


def read_circles(figure):
    return [(float(x), float(y)) for x, y in re.findall('cx="([0-9.]+)" cy="([0-9.]+)"', figure)]


def read_image(text):
    """HTML -> its first image, (H,W,3)."""
    png = re.search('src="data:image/png;base64,([^"]+)"', text)[1]
    return np.array(Image.open(io.BytesIO(base64.b64decode(png))))


@pytest.mark.parametrize("flags", ROWS)
def test_runs_and_blocks_allow_what_attention_allows(flags):
    _, allowed, page = make_row(*flags)
    T = len(allowed)
    for _, _, token, sees, _ in read_runs(page):
        seen = np.zeros(T, bool)
        for pair in sees.split():
            first, last = map(int, pair.split("-"))
            seen[first : last + 1] = True
        assert np.array_equal(seen, allowed[token])
    assert f"<dd>{allowed.mean():.2%};" in page
    mask = read_image(page)
    size = -(-T // len(mask))
    padded = np.pad(allowed, (0, len(mask) * size - T))
    blocks = padded.reshape(len(mask), size, len(mask), size).any((1, 3))
    assert np.array_equal((mask < 255).any(2), blocks)


@pytest.mark.parametrize("flags", ROWS)
def test_every_part_is_there_word_for_word_with_its_weights(flags):
    row, _, page = make_row(*flags)
    expected = ""
    for example in row.examples:
        for start, stop in view.find_parts(example):
            tokens = example.tokens[start:stop]
            expected += row.tokenizer.decode(tokens[example.bidir[start:stop] == 0].tolist())
    weights = row.batch.weights[0].numpy()
    text = ""
    shown = np.zeros_like(weights)
    for kind, first, last, _, inner in read_runs(page):
        assert {*row.batch.bidir[0, first : last + 1].gt(0).tolist()} == {kind == "visual"}
        text += html.unescape(re.sub("<(i|sup)>.*?</(i|sup)>", "", inner))
        shown[first : last + 1] = float((re.findall("<sup>(.*)</sup>", inner) or [0])[0])
    assert text == expected
    assert np.allclose(shown, weights, rtol=1e-3, atol=0)
    for example in row.examples:
        annotations = plural(example.n_branches, "annotation")
        assert f"{annotations}, {example.dropped_branches} skipped, loss weight" in page
    assert f"<dd>{weights.sum(dtype='f8'):.6g}</dd>" in page
    assert f"<dd>{sum(len(x.tokens) for x in row.examples)} of {len(weights)}, " in page


def test_figures_are_the_crops():
    row, _, page = make_row(*ROWS[1])
    figures = page.split("<figure")[1:]
    crops = np.concatenate([x.images for x in row.examples if x.images is not None])
    assert len(figures) == len(crops)
    for figure, crop in zip(figures, crops, strict=True):
        pixels = read_image(figure)
        assert np.array_equal(vision.patchify(pixels[None], row.config.model.vision)[0], crop)


def test_frames_show_the_points_of_their_time(tmp_path):
    track = [{"x": 20, "y": 30, "t": 1.0, "id": 0},
             {"x": 60, "y": 70, "t": 1.5, "id": 0, "occluded": True}]
    points = [{"x": 5, "y": 6, "t": 1.5}]
    annotations = [{"type": "point", "label": "ear", "coords": "percent", "points": points},
                   {"type": "track", "label": "rabbit", "coords": "percent", "points": track}]
    record = {"video": "bigbuckbunny.mp4", "annotations": annotations}
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    row, _, page = make_row("--stage", "2", "--tiny", "--data", str(tmp_path / "r.jsonl"),
                            "--media", str(MEDIA), "--data.max_tokens=2000", "--data.max_frames=8")
    n_frames = len(row.examples[0].images)
    times = re.findall(r"frame at ([0-9.]+) s", page)[:n_frames]
    circles = [read_circles(figure) for figure in page.split("<figure")[1 : n_frames + 1]]
    found = {time: points for time, points in zip(times, circles, strict=True) if points}
    assert found == {"1.0": [(20, 30)], "1.5": [(5, 6)]}


def test_text_cannot_become_markup(tmp_path):
    annotations = [{"type": "caption", "text": HOSTILE},
                   {"type": "qa", "question": HOSTILE, "answer": HOSTILE}]
    Image.new("RGB", (100, 100)).save(tmp_path / "a.png")
    record = {"id": HOSTILE, "image": "a.png", "annotations": annotations}
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    page = make_row(*TOY, "--data", str(tmp_path / "r.jsonl"), "--data.max_tokens=2000")[2]
    assert "<img src=x" not in page
    assert page.count("</script>") == 1
    assert html.unescape(page).count(HOSTILE) >= 4       # it is all shown as text


def test_the_page_needs_no_other_file_and_little_script():
    page = make_row(*TOY, *PHOTOS)[2]
    assert not re.search(r'(?:src|href)="(?!data:image/png;base64,)|url\(|@import|https?:', page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    assert len(script.splitlines()) <= 60


@pytest.mark.extras("selenium")
def test_the_page_says_which_tokens_are_below_the_pointer(tmp_path):
    from tests.tools.play.browser import Window  # skips this test if Chromium is not installed
    page = tmp_path / "row.html"
    page.write_text(make_row(*ROWS[0])[2], encoding="utf-8")
    window = Window()
    try:
        window.driver.get(page.as_uri())
        run = window.find(".run")[1]
        window.actions().move_to_element(run).perform()
        first, last = run.get_attribute("data-first"), run.get_attribute("data-last")
        assert window.find("#words")[0].text == f"Tokens {first} to {last}."
        assert window.driver.get_log("browser") == []
    finally:
        window.driver.quit()


def test_a_step_of_a_run_is_shown_as_it_was_trained_on(tmp_path):
    """The ids of its rows have the hash in the log, and records that the run could not read have no
    loss. Data that has changed since is rejected."""
    captions = [{"type": "caption", "text": "an object"}] * 2
    lines = []
    for name, n_bytes in (("coffee.png", None), ("cut.png", 90_000), ("chelsea.png", None)):
        lines.append(json.dumps({"image": name, "annotations": captions}))
        (tmp_path / name).write_bytes(
            (MEDIA / name.replace("cut", "coffee")).read_bytes()[:n_bytes])
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    run = tmp_path / "run"
    train.main(["--stage", "1", "--tiny", "--batch", "2", "--steps", "3", "--data",
                str(tmp_path / "r.jsonl"), "--model.n_layer=1", "--device", "cpu",
                "--pool_size=3", "--out", str(run)])
    log = read_log(run / "log.jsonl")
    steps = {line["step"]: line for line in log if "loss" in line}
    head = json.loads((run / "config.json").read_text())    # as earlier versions wrote it
    head["config"]["data"]["vision"] = head["config"]["model"]["vision"]
    (run / "config.json").write_text(json.dumps(head))
    unreadable = 0
    for step, line in steps.items():
        rows = [view.read_row_of_run(run, step, number) for number in (0, 1)]
        ids = "\n".join(record["id"] for row in rows for record in row.records)
        assert hashlib.sha256(ids.encode()).hexdigest()[:16] == line["ids"]
        unreadable += sum(len(x.tokens) for row in rows for x in row.examples if x.unreadable)
    assert unreadable == sum(line["unreadable_tokens"] for line in steps.values()) > 0

    command = ["--run", str(run), "--out", str(tmp_path / "page.html")]
    view.main([*command, "--step", "2", "--row", "1"])
    shown = view.read_row_of_run(run, 2, 1).records[0]["id"]
    assert f"<code>{shown}</code>" in (tmp_path / "page.html").read_text()
    _, _, err = run_main(view.main, *command, "--step", 9)
    assert "--step 9 --row 0: the run has steps 1 to 3" in err
    changed = (run / "log.jsonl").read_text().replace(steps[2]["ids"], "0" * 16)
    (run / "log.jsonl").write_text(changed)
    status, _, err = run_main(view.main, *command, "--step", 2)
    assert (status, "step 2 of the run had other records" in err) == (2, True)


@pytest.mark.parametrize(("lengths", "parts"), [
    ([], [(0, 4)]), ([3], [(0, 7)]), ([2, 3, 1], [(0, 4), (4, 6), (6, 9), (9, 10)]),
])
def test_the_parts_of_an_example_are_its_prefix_and_its_branches(lengths, parts):
    branches = [data.Branch([([5] * n, False), ([0], False)]) for n in lengths]
    example = data.layout([1] * 4, [False] * 4, branches, data.DataConfig())
    assert view.find_parts(example) == parts
