"""The page of a packed row: it shows what the batch holds, and text cannot become markup."""

import base64
import html
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import data
import vision
from records.visual import VideoClip
from tests.tools.view.pages import (
    PHOTOS,
    ROWS,
    TOY,
    PageReader,
    allowed_by_attention,
    annotations_of,
    byte_tokenizer,
    expand,
    facts_of,
    pairs_per_block,
    show,
    shown_row,
)
from text.points import unit_points
from tools.view import row_data
from training.config import parse

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\"'<!--DATA-->"

# --------------------------------------------------------------------------------------------------
# the mask


@pytest.mark.parametrize("flags", ROWS)
def test_the_page_allows_what_attention_allows(flags):
    shown = shown_row(*flags)
    facts = shown.facts
    visible_until = expand(facts["visible_until"])
    bidir = expand(facts["bidir"])
    q, k = np.indices((facts["T"], facts["T"]))
    allowed = (k <= q) & (q < visible_until[k]) | (bidir[q] == bidir[k]) & (bidir[q] != 0)
    assert np.array_equal(allowed, allowed_by_attention(shown.batch))


RUN_BY_NODE = """
    const fs = require("fs");
    const row = unpack(JSON.parse(fs.readFileSync("page.json")));
    const bits = new Uint8Array(row.T * row.T);
    const words = [];
    for (let q = 0; q < row.T; q++) {
        for (let k = 0; k < row.T; k++) bits[q * row.T + k] = allow(row, q, k);
        words.push(describe(row, q, reach(row, q), ""));
    }
    fs.writeFileSync("bits", bits);
    console.log(JSON.stringify({ row, words }));"""


@pytest.fixture(params=ROWS[1:], ids=str)
def run_by_node(request, tmp_path):
    """-> Shown, the row as the page's own script unpacks it, (T,T) bool, words about each token."""
    if not shutil.which("node"):
        pytest.skip("node runs the page's own script; it is not installed")
    shown = shown_row(*request.param)
    script = re.search(r'<script id="code">(.*?)</script>', shown.page, re.DOTALL)[1]
    (tmp_path / "page.json").write_text(json.dumps(shown.facts))
    (tmp_path / "page.js").write_text(script + RUN_BY_NODE)
    done = subprocess.run(["node", "page.js"], cwd=tmp_path, capture_output=True, text=True,
                          check=True)
    printed = json.loads(done.stdout)
    T = shown.facts["T"]
    allowed = np.fromfile(tmp_path / "bits", np.uint8).reshape(T, T).astype(bool)
    return shown, printed["row"], allowed, printed["words"]


def test_the_pages_own_script_reads_the_row_and_allows_what_attention_allows(run_by_node):
    shown, row, allowed, words = run_by_node
    batch = shown.batch
    assert np.array_equal(allowed, allowed_by_attention(batch))
    for name in ("tokens", "targets", "pos"):
        assert row[name] == getattr(batch, name)[0].tolist(), name
    assert torch.equal(torch.tensor(row["weights"], dtype=torch.float32), batch.weights[0])
    assert row["pool_src"] == batch.pool_src.tolist()
    assert row["pool_dst"] == batch.pool_dst.tolist()
    check_words(shown, row, allowed, words)


def check_words(shown, row, allowed, words):
    """Each token shows its example, its annotation, how many tokens it sees and until where it is
    seen."""
    T = row["T"]
    start = 0
    for number, example in enumerate(shown.packed.examples):
        stop = start + len(example.tokens)
        for t, annotation in enumerate(annotations_of(example), start):
            part = f"annotation {annotation}" if annotation else "shared part"
            first, second = words[t]
            assert first.startswith(f"token {t} · example {number} {example.id} · {part} · "
                                    f"position {row['pos'][t]} · ")
            assert f"may attend to {allowed[t].sum()} of {T} tokens" in second
            assert f"{allowed[:, t].sum()} may attend to it" in second
            last = np.flatnonzero(allowed[:, t])[-1]
            end = "annotation" if annotation else "example"
            assert f"visible until token {last + 1}, where its {end} ends" in second
            assert ("see each other both ways" in second) == (example.bidir[t - start] > 0)
        start = stop
    for t in range(start, T):
        assert words[t][0] == f"token {t} · padding"


@pytest.mark.parametrize("flags", ROWS)
def test_the_blocks_of_the_mask_count_what_attention_allows(flags):
    shown = shown_row(*flags)
    facts = shown.facts
    allowed = allowed_by_attention(shown.batch)
    expected = pairs_per_block(allowed, facts["block"])
    assert len(expected) <= row_data.MAX_BLOCKS
    assert np.array_equal(expand(facts["counts"]).reshape(expected.shape), expected)
    assert f"<dd>{allowed.mean():.2%}</dd>" in shown.page


def test_annotations_are_found_from_visible_until():
    example = np.array([0] * 8 + [1] * 5 + [2] * 2)
    visible_until = np.array([8, 8, 8, 8, 6, 6, 8, 8, 13, 13, 13, 13, 13, 15, 15])
    expected = [0, 0, 0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0, 0]
    assert row_data.annotation_numbers(example, visible_until).tolist() == expected


# --------------------------------------------------------------------------------------------------
# crops


@pytest.mark.parametrize("flags", ROWS)
def test_the_windows_of_the_page_are_those_of_the_batch(flags):
    shown = shown_row(*flags)
    columns = [np.cumsum(expand(column)) for column in shown.facts["pool_src"]]
    assert np.array_equal(np.stack(columns, 1), shown.batch.pool_src.numpy())
    pool_dst = np.cumsum(expand(shown.facts["pool_dst"]))
    assert np.array_equal(pool_dst, shown.batch.pool_dst.numpy())


@pytest.mark.parametrize("flags", ROWS[2:4])
def test_the_images_are_the_crops_and_the_circles_the_points(flags):
    shown = shown_row(*flags)
    config = shown.packed.config.data.vision
    figures = PageReader(shown.page).figures
    assert sorted(int(f["data-crop"]) for f in figures) == list(range(len(shown.batch.images)))
    circles = []
    for figure in figures:
        png = base64.b64decode(figure["src"].partition(",")[2])
        patches = vision.patchify(np.array(Image.open(io.BytesIO(png)))[None], config)[0]
        assert np.array_equal(patches, shown.batch.images[int(figure["data-crop"])].numpy())
        circles += [(round(float(c["cx"]), 2), round(float(c["cy"]), 2)) for c in figure["circles"]]
    expected = []
    for record in shown.packed.records:
        for annotation in record["annotations"]:
            if annotation["type"] == "point":
                expected += unit_points(annotation, None)
    grid = config.grid
    expected = sorted((round(x * grid, 2), round(y * grid, 2)) for x, y in expected)
    assert len(circles) > 0
    assert np.allclose(sorted(circles), expected, atol=0.011)


def test_frames_of_a_video_have_windows_of_nine_and_the_points_of_their_time():
    config = parse(TOY)[1]
    tokenizer = byte_tokenizer(config)
    frames = [np.full((100, 100, 3), shade, np.uint8) for shade in (10, 120, 240)]
    clip = VideoClip([0.0, 0.5, 1.0], frames)
    turns = [("where?", "here"), ("there?", None)]
    example = data.encode_prompt([], turns, tokenizer, config.data, clip)
    annotation = {"type": "point", "label": "ball", "coords": "percent",
                  "points": [{"x": 20, "y": 30, "t": 0.5}]}
    record = {"id": "clip", "where": "clip", "video": "clip.mp4", "annotations": [annotation]}
    shown = show([replace(example, id="clip")], [record], tokenizer, config)
    assert shown.batch.pool_src.shape[1] == len(shown.facts["pool_src"]) == 9
    circles = [[(c["cx"], c["cy"]) for c in figure["circles"]]
               for figure in PageReader(shown.page).figures]
    assert circles == [[], [("2.000", "3.000")], []]
    captions = shown.page.split("<figcaption>")[1:]
    assert [re.search(r"frame, ([0-9.]+)", caption)[1] for caption in captions] == [
        "0.0", "0.5", "1.0"]


# --------------------------------------------------------------------------------------------------
# text


def texts_of_parts(shown):
    """The text of each part of the trees: of the shared part and of each annotation."""
    texts = []
    for example in shown.packed.examples:
        annotation = annotations_of(example)
        for k in range(annotation.max() + 1):
            ids = example.tokens[annotation == k]
            texts.append(shown.packed.tokenizer.decode(ids.tolist()))
    return texts


@pytest.mark.parametrize("flags", ROWS)
def test_every_annotation_is_there_word_for_word_and_every_weight_at_its_place(flags):
    shown = shown_row(*flags)
    reader = PageReader(shown.page)
    texts = ["".join(run["text"] for run in runs if "visual" not in run["class"].split())
             for _, runs in reader.nodes]
    assert texts == texts_of_parts(shown)

    expected = shown.batch.weights[0].numpy()
    weights = np.zeros_like(expected)
    for run in reader.runs:
        if "data-w" in run:
            weight = np.float32(run["data-w"])
            place = slice(int(run["data-a"]), int(run["data-a"]) + int(run["data-n"]))
            assert run["printed"] == f"{weight:.4g}"
            assert (weights[place] == 0).all()
            weights[place] = weight
    assert np.array_equal(weights, expected)
    assert f"<dd>{expected.sum(dtype='float64'):.6g}</dd>" in shown.page
    n_tokens = sum(len(example.tokens) for example in shown.packed.examples)
    assert f"<dd>{n_tokens} of {len(expected)}</dd>" in shown.page


def test_text_cannot_become_markup(tmp_path):
    Image.new("RGB", (100, 100)).save(tmp_path / "a.png")
    annotations = [
        {"type": "caption", "text": HOSTILE},
        {"type": "qa", "question": HOSTILE, "answer": HOSTILE},
        {"type": "point", "label": HOSTILE, "coords": "unit", "points": [{"x": 0.5, "y": 0.5}]}]
    record = {"id": HOSTILE, "image": "a.png", "annotations": annotations}
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    page = shown_row(*TOY, "--data", str(tmp_path / "r.jsonl"), "--media", str(tmp_path),
                     "--data.max_tokens=2000").page
    plain = shown_row(*TOY, *PHOTOS).page
    # no element, and no attribute, that a harmless page does not have
    assert PageReader(page).tags <= PageReader(plain).tags
    assert page.count("</script>") == plain.count("</script>") == 2
    assert "<img src=x" not in page
    assert set(facts_of(page)["ids"]) == {HOSTILE}
    assert html.unescape(page).count(HOSTILE) >= 5       # all of it is shown as text


def test_a_damaged_image_is_named_and_has_no_weight(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    (tmp_path / "a.png").write_bytes(out.getvalue()[:9000])
    record = {"image": "a.png", "annotations": [{"type": "caption", "text": "Noise."}]}
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    shown = shown_row(*TOY, "--data", str(tmp_path / "r.jsonl"), "--media", str(tmp_path))
    reader = PageReader(shown.page)
    assert shown.page.count("S21 cannot decode") == len(shown.packed.examples)
    assert reader.figures == []
    assert "<dd>0</dd><dd>sum of the loss weights" in shown.page
    assert shown.batch.weights.sum() == 0
    assert not any("data-w" in run for run in reader.runs)


def test_a_row_of_text_alone_has_no_crops(tmp_path):
    lines = []
    for n in range(9):
        annotations = [{"type": "qa", "question": f"{n}?", "answer": "Yes."},
                       {"type": "text", "text": "Plain."}]
        lines.append(json.dumps({"annotations": annotations}))
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    shown = shown_row(*TOY, "--data", str(tmp_path / "r.jsonl"))
    reader = PageReader(shown.page)
    assert reader.figures == []
    assert len(reader.nodes) == 3 * len(shown.packed.examples)
    example = shown.packed.examples[0]
    first = int((annotations_of(example) == 1).sum())
    last = len(example.tokens) - 1
    assert [title for title, _ in reader.nodes[:3]] == [
        "the shared part, which every annotation sees: tokens 0 to 0",
        f"annotation 1: tokens 1 to {first}, positions from 1",
        f"annotation 2: tokens {first + 1} to {last}, positions from 1"]
    assert shown.batch.pool_src.tolist() == [[-1] * 4]


def test_the_longest_row_without_images_stays_below_five_megabytes():
    config = parse(["--stage", "3"])[1]
    tokenizer = byte_tokenizer(config)
    words = np.random.default_rng(0).integers(32, 127, (9, 4, 900))
    examples = []
    for parts in words:
        branches = [data.Branch([(part[:500].tolist(), 0), (part[500:].tolist(), 1)], weight=0.3)
                    for part in parts]
        examples.append(data.layout([tokenizer.bos], [False], branches, config.data))
    page = show(examples, [{"annotations": []}] * len(examples), tokenizer, config).page
    assert sum(expand(facts_of(page)["example"]) < len(examples)) > 30_000
    assert len(page) < 5e6
