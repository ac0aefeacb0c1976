"""The page of a packed row: what it shows is what the batch holds, and text cannot leave its place."""

import base64
import hashlib
import html
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import attention
import data
import packing
import train
import vision
from text.points import unit_points
from tools import view
from toy import world as tiny

ROOT = Path(__file__).parents[2]
MEDIA = ROOT / "tests" / "media"
PHOTOS = ("--data", str(MEDIA / "records.jsonl"), "--media", str(MEDIA))
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\"'<!--DATA-->"


def laid(rows, records, tokenizer, config):
    batch = packing.collate([rows], config.data.max_tokens, config.data.vision)
    return view.page(rows, batch, records, tokenizer, config), batch, rows, records, tokenizer, config


@cache
def row_of(*flags, number=0):
    """-> page, batch, its examples, their records, tokenizer, config"""
    args, config = train.parse(flags)
    tokenizer = data.ByteTokenizer(tiny.WORDS, config.model.n_vocab)
    return laid(*view.plan(args, config, tokenizer, number), tokenizer, config)


TOY = ("--stage", "1", "--tiny")
ROWS = [TOY, (*TOY, "--data.max_tokens=331"), (*TOY, *PHOTOS), ("--stage", "2", *PHOTOS, "--data.max_tokens=2600", "--pack_crops=12"),
        ("--stage", "2", "--tiny")]                      # films


def facts_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def unroll(runs):
    return np.repeat(runs[::2], runs[1::2])


class Reader(HTMLParser):
    """What stands in the nodes of the trees: [(name of the node, [{attributes of a run, its text, its weight as printed}, ..]), ..]"""

    def __init__(self, page):
        super().__init__()
        self.nodes, self.inside, self.figures, self.circles, self.tags = [], [], [], [], set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        self.tags.add((tag, *sorted(a)))
        if a.get("class") == "node":
            self.nodes.append(["", []])
        if "run" in a.get("class", "").split():
            self.nodes[-1][1].append({**a, "text": "", "printed": ""})
        if tag == "figure":
            self.figures.append({**a, "circles": []})
        if tag == "circle":
            self.figures[-1]["circles"].append(a)
        if tag == "img":
            self.figures[-1]["src"] = a["src"]
        if tag not in ("meta", "img", "path"):
            self.inside.append((tag, a))

    def handle_startendtag(self, tag, attributes):
        self.tags.add((tag, *sorted(dict(attributes))))

    def handle_endtag(self, tag):
        assert self.inside.pop()[0] == tag

    def handle_data(self, words):
        place = [tag for tag, _ in self.inside] or [""]
        if any("run" in a.get("class", "").split() for _, a in self.inside):
            run = self.nodes[-1][1][-1]
            if place[-1] == "sup":
                run["printed"] += words
            elif place[-1] != "i":                       # marks such as <|im_end|>, which decode to nothing
                run["text"] += words
        elif place[-1] == "b" and self.nodes and not self.nodes[-1][1]:
            self.nodes[-1][0] += words


@pytest.mark.parametrize("flags", ROWS)
def test_the_page_allows_what_attention_allows(flags):
    page, batch, *_ = row_of(*flags)
    facts = facts_of(page)
    doc, branch, bidir = (unroll(facts[name]) for name in ("doc", "branch", "bidir"))
    q, k = np.indices((facts["T"],) * 2)
    told = (doc[q] == doc[k]) & ((branch[k] == 0) | (branch[k] == branch[q])) & ((k <= q) | ((bidir[q] > 0) & (bidir[q] == bidir[k])))
    assert np.array_equal(told, attention.allow(batch.doc, batch.branch, batch.bidir)[0].numpy())


@pytest.mark.skipif(not shutil.which("node"), reason="node runs the page's own script; it is not installed")
def test_the_pages_own_script_allows_what_attention_allows(tmp_path):
    for n, flags in enumerate(ROWS[1:]):
        page, batch, *_ = row_of(*flags)
        script = re.search(r'<script id="code">(.*?)</script>', page, re.DOTALL)[1]
        (tmp_path / "page.json").write_text(json.dumps(facts_of(page)))
        (tmp_path / "page.js").write_text(script + """
            const fs = require("fs"), row = unpack(JSON.parse(fs.readFileSync(process.argv[2])));
            const bits = new Uint8Array(row.T * row.T);
            for (let q = 0; q < row.T; q++) for (let k = 0; k < row.T; k++) bits[q * row.T + k] = allow(row, q, k);
            fs.writeFileSync(process.argv[3], bits);
            console.log(JSON.stringify(row));""")
        ran = subprocess.run(["node", "page.js", "page.json", "bits"], cwd=tmp_path, capture_output=True, text=True, check=True)
        T = batch.doc.shape[1]
        told = np.fromfile(tmp_path / "bits", np.uint8).reshape(T, T).astype(bool)
        assert np.array_equal(told, attention.allow(batch.doc, batch.branch, batch.bidir)[0].numpy()), n
        row = json.loads(ran.stdout)
        for name in ("tokens", "targets", "pos", "doc", "branch", "bidir"):
            assert row[name] == getattr(batch, name)[0].tolist(), name
        assert torch.equal(torch.tensor(row["weights"], dtype=torch.float32), batch.weights[0])
        assert row["pool_src"] == batch.pool_src.tolist() and row["pool_dst"] == batch.pool_dst.tolist()


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
# What a reader does, done by a script: goes through the row with arrow keys, points at runs of text, and notes what the page shows.
VISITOR = """
    const row = unpack(JSON.parse(document.getElementById("data").textContent)), n = Math.ceil(row.T / row.block);
    const press = (id, key) => document.getElementById(id).dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    const words = () => document.getElementById("words").textContent;
    const pack = (n, bit) => {
        const bytes = new Uint8Array(Math.ceil(n / 8));
        for (let i = 0; i < n; i++) if (bit(i)) bytes[i >> 3] |= 1 << (i & 7);
        return btoa(Array.from(bytes, b => String.fromCharCode(b)).join(""));
    };
    const told = { walked: [], runs: [] };
    const canvas = document.getElementById("mask"), edge = canvas.width - n;
    const ink = canvas.getContext("2d").getImageData(edge, edge, n, n).data;
    told.blocks = pack(n * n, i => ink[4 * i + 3] > 0);
    const mine = pack(row.T * row.T, i => allow(row, Math.floor(i / row.T), i % row.T));
    const reached = Array.from({ length: row.T }, (_, q) => reach(row, q));
    told.mine = pack(row.T * row.T, i => reached[Math.floor(i / row.T)].mine[i % row.T]);
    told.theirs = pack(row.T * row.T, i => reached[Math.floor(i / row.T)].theirs[i % row.T]);
    told.same = mine === told.mine;
    press("ribbon", "Home");
    for (let q = 0; q < row.T; q++) { told.walked.push(words()); press("ribbon", "ArrowRight"); }
    press("ribbon", "Escape");
    const runs = [...document.querySelectorAll(".run")];
    for (const run of runs) {
        const box = run.getBoundingClientRect();
        run.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + 1, clientY: box.y + 1, pointerType: "mouse", bubbles: true }));
        told.runs.push(runs.map(({ classList: c }) => c.contains("to") + 2 * c.contains("by") + 4 * c.contains("away")));
    }
    press("mask", "ArrowDown");
    told.block = words();
    document.body.innerHTML = "<pre id=told></pre>";
    document.getElementById("told").textContent = JSON.stringify(told);"""


def browsed(page, folder):
    """What the document is after a browser has run the page's scripts, as HTML."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--window-size=1280,900", "--dump-dom"]
    ran = subprocess.run([BROWSER, *flags, (folder / "page.html").as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="a browser shows the page; none is installed (chromium, google-chrome)")
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_browser_shows_what_attention_allows(number, tmp_path):
    """Both ways round, for every token, walked to by keys; on the runs of text, pointed at; and in the pixels of the mask."""
    page, batch, *_ = row_of(*ROWS[number])
    free = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page)                   # or the reader's script may not run
    dom = browsed(free.replace("</body>", f"<script>{VISITOR}</script></body>"), tmp_path)
    told = json.loads(html.unescape(re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)[1]))
    whole = attention.allow(batch.doc, batch.branch, batch.bidir)[0].numpy()
    T, size = len(whole), facts_of(page)["block"]
    n = -(-T // size)
    bits = lambda name, n: np.unpackbits(np.frombuffer(base64.b64decode(told[name]), np.uint8), bitorder="little")[: n * n].reshape(n, n)  # noqa: E731
    assert told["same"] and np.array_equal(bits("mine", T), whole) and np.array_equal(bits("theirs", T), whole.T)
    padded = np.zeros((n * size, n * size), bool)
    padded[:T, :T] = whole
    blocks = padded.reshape(n, size, n, size).sum((1, 3))
    assert np.array_equal(bits("blocks", n), blocks > 0)
    assert float(re.search(r"([0-9.]+) % allowed", told["block"])[1]) == pytest.approx(100 * blocks[0, 0] / size**2, abs=0.05 + 1e-9)
    for q, said in enumerate(told["walked"]):
        assert said.startswith(f"token {q} ")
        if batch.doc[0, q] >= 0:
            assert f"may attend to {whole[q].sum()} of {T} tokens" in said and f" {whole[:, q].sum()} may attend to it" in said
    runs = [(int(run["data-a"]), int(run["data-a"]) + int(run["data-n"])) for _, runs in Reader(page).nodes for run in runs]
    for (_, end), shown in zip(runs, told["runs"], strict=True):
        to, by = ([bool(row[a:b].any()) for a, b in runs] for row in (whole[end - 1], whole[:, end - 1]))
        assert shown == [t + 2 * b + 4 * (not t and not b) for t, b in zip(to, by, strict=True)]


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="a browser lays the page out; none is installed (chromium, google-chrome)")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("number", [0, 4])
def test_the_page_is_as_wide_as_its_window(number, width, tmp_path):
    """A telephone's and a desk's, which browsers without a screen do not make as narrow: a frame in a page."""
    page = row_of(*ROWS[number])[0]
    measure = "document.title = [f.contentWindow.innerWidth, f.contentDocument.documentElement.scrollWidth]"
    frame = f'<iframe id="f" style="width:{width}px;height:900px;border:0" onload="{measure}" srcdoc="{html.escape(page)}"></iframe>'
    dom = browsed(f"<!doctype html><title></title><body>{frame}", tmp_path)
    inside, wide = map(int, re.search(r"<title>(\d+),(\d+)</title>", dom).groups())
    assert inside == width and wide <= width


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="a browser obeys the page's policy; none is installed (chromium, google-chrome)")
def test_no_script_runs_but_the_pages_own(tmp_path):
    """Were a record's text to leave its place after all, its script would still do nothing."""
    taken = "document.title = 'taken'"
    page = row_of(*ROWS[1])[0].replace("<h1>", f'<script>{taken}</script><img src=x onerror="{taken}"><h1>')
    dom = browsed(page, tmp_path)
    assert "<title>A packed row of stage 1</title>" in dom and re.search(r'<p id="about">\d+ x \d+ blocks', dom)


@pytest.mark.parametrize("flags", ROWS)
def test_the_blocks_of_the_mask_count_what_attention_allows(flags):
    page, batch, *_ = row_of(*flags)
    facts = facts_of(page)
    T, size = facts["T"], facts["block"]
    n = -(-T // size)
    whole = attention.allow(batch.doc, batch.branch, batch.bidir)[0].numpy()
    padded = np.zeros((n * size, n * size), bool)
    padded[:T, :T] = whole
    assert n <= view.BLOCKS and np.array_equal(unroll(facts["counts"]).reshape(n, n), padded.reshape(n, size, n, size).sum((1, 3)))
    assert f"<dd>{whole.mean():.2%}</dd>" in page


@pytest.mark.parametrize("flags", ROWS)
def test_the_windows_of_the_page_are_those_of_the_batch(flags):
    page, batch, *_ = row_of(*flags)
    facts = facts_of(page)
    assert np.array_equal(np.stack([np.cumsum(unroll(column)) for column in facts["pool_src"]], 1), batch.pool_src.numpy())
    assert np.array_equal(np.cumsum(unroll(facts["pool_dst"])), batch.pool_dst.numpy())


@pytest.mark.parametrize("flags", ROWS[2:4])
def test_the_pictures_are_the_crops_and_the_rings_the_points(flags):
    page, batch, _, records, _, config = row_of(*flags)
    figures = Reader(page).figures
    assert sorted(int(f["data-crop"]) for f in figures) == list(range(len(batch.unit)))
    for f in figures:
        pixels = np.array(Image.open(io.BytesIO(base64.b64decode(f["src"].partition(",")[2]))))
        assert np.array_equal(vision.patchify(pixels[None], config.data.vision)[0], batch.images[int(f["data-crop"])].numpy())
    drawn = sorted((round(float(c["cx"]), 2), round(float(c["cy"]), 2)) for f in figures for c in f["circles"])
    grid = config.data.vision.grid
    wanted = [(x * grid, y * grid) for r in records for a in r["annotations"] if a["type"] == "point" for x, y in unit_points(a, None)]
    assert len(drawn) > 0 and np.allclose(drawn, sorted((round(x, 2), round(y, 2)) for x, y in wanted), atol=0.011)


def test_the_frames_of_a_video_are_drawn_with_windows_of_nine_and_the_points_of_their_time():
    config = train.parse(TOY)[1]
    tokenizer = data.ByteTokenizer(tiny.WORDS, config.model.n_vocab)
    frames = [np.full((100, 100, 3), shade, np.uint8) for shade in (10, 120, 240)]
    clip = data.Clip([0.0, 0.5, 1.0], frames)
    example = data.encode_prompt([], [("where?", "here"), ("there?", None)], tokenizer, config.data, clip)
    record = {"id": "film", "where": "film", "video": "film.mp4",
              "annotations": [{"type": "point", "label": "ball", "coords": "percent", "points": [{"x": 20, "y": 30, "t": 0.5}]}]}
    page, batch, *_ = laid([replace(example, id="film")], [record], tokenizer, config)
    facts, figures = facts_of(page), Reader(page).figures
    assert batch.pool_src.shape[1] == len(facts["pool_src"]) == 9
    assert [[(c["cx"], c["cy"]) for c in f["circles"]] for f in figures] == [[], [("2.000", "3.000")], []]
    assert [re.search(r"frame, ([0-9.]+)", part)[1] for part in page.split("<figcaption>")[1:]] == ["0.0", "0.5", "1.0"]


@pytest.mark.parametrize("flags", ROWS)
def test_every_branch_is_there_word_for_word_and_every_weight_at_its_place(flags):
    page, batch, rows, _, tokenizer, _ = row_of(*flags)
    nodes, row = Reader(page).nodes, {f: getattr(batch, f)[0].numpy() for f in ("tokens", "targets", "weights", "branch", "doc")}
    wanted = [tokenizer.decode(x.tokens[x.branch == j].tolist()) for x in rows for j in range(int(x.branch.max()) + 1)]
    assert ["".join(run["text"] for run in runs if "see" not in run["class"].split()) for _, runs in nodes] == wanted

    weights = np.zeros_like(row["weights"])
    for run in (run for _, runs in nodes for run in runs if "data-w" in run):
        a, n, w = int(run["data-a"]), int(run["data-n"]), np.float32(run["data-w"])
        assert run["printed"] == f"{w:.4g}" and (weights[a : a + n] == 0).all()
        weights[a : a + n] = w
    assert np.array_equal(weights, row["weights"])
    assert f"<dd>{row['weights'].sum(dtype='float64'):.6g}</dd>" in page
    assert f"<dd>{(row['doc'] >= 0).sum()} of {len(row['doc'])}</dd>" in page


def test_text_cannot_leave_its_place(tmp_path):
    Image.new("RGB", (100, 100)).save(tmp_path / "a.png")
    annotations = [{"type": "caption", "text": HOSTILE}, {"type": "qa", "question": HOSTILE, "answer": HOSTILE},
                   {"type": "point", "label": HOSTILE, "coords": "unit", "points": [{"x": 0.5, "y": 0.5}]}]
    (tmp_path / "r.jsonl").write_text(json.dumps({"id": HOSTILE, "image": "a.png", "annotations": annotations}))
    page, *_ = row_of(*TOY, "--data", str(tmp_path / "r.jsonl"), "--media", str(tmp_path), "--data.max_tokens=2000")
    plain = row_of(*TOY, *PHOTOS)[0]
    assert Reader(page).tags <= Reader(plain).tags       # no element, and no attribute, that an innocent page does not have
    assert page.count("</script>") == plain.count("</script>") == 2 and "<img src=x" not in page
    assert set(facts_of(page)["ids"]) == {HOSTILE}
    assert html.unescape(page).count(HOSTILE) >= 5       # it is shown all the same


def test_a_picture_that_is_damaged_is_named_and_has_no_weight(tmp_path):
    picture = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)).save(picture, "PNG")
    (tmp_path / "a.png").write_bytes(picture.getvalue()[:9000])
    (tmp_path / "r.jsonl").write_text(json.dumps({"image": "a.png", "annotations": [{"type": "caption", "text": "Noise."}]}))
    page, batch, rows, *_ = row_of(*TOY, "--data", str(tmp_path / "r.jsonl"), "--media", str(tmp_path))
    reader = Reader(page)
    assert page.count("S21 cannot decode") == len(rows) and reader.figures == [] and "<dd>0</dd><dd>sum of the loss weights" in page
    assert batch.weights.sum() == 0 and not any("data-w" in run for _, runs in reader.nodes for run in runs)


def test_a_row_of_text_alone_has_no_pictures(tmp_path):
    lines = [{"annotations": [{"type": "qa", "question": f"{n}?", "answer": "Yes."}, {"type": "text", "text": "Bare."}]} for n in range(9)]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, batch, rows, *_ = row_of(*TOY, "--data", str(tmp_path / "r.jsonl"))
    reader = Reader(page)
    assert reader.figures == [] and len(reader.nodes) == 3 * len(rows)
    first, last = int((rows[0].branch == 1).sum()), len(rows[0].tokens) - 1
    assert [name for name, _ in reader.nodes[:3]] == ["trunk, tokens 0 to 0", f"branch 1, tokens 1 to {first}, from pos 1",
                                                      f"branch 2, tokens {first + 1} to {last}, from pos 1"]
    assert batch.pool_src.tolist() == [[-1] * 4]


def test_the_longest_row_without_images_stays_below_five_megabytes():
    config = train.parse(["--stage", "3"])[1]
    tokenizer = data.ByteTokenizer(tiny.WORDS, config.model.n_vocab)
    words = np.random.default_rng(0).integers(32, 127, (9, 4, 900))
    rows = [data.layout([tokenizer.bos], [False], [data.Branch([(part[:500].tolist(), False), (part[500:].tolist(), True)], 0.3, True)
                                                   for part in parts]) for parts in words]
    page = laid(rows, [{"annotations": []}] * len(rows), tokenizer, config)[0]
    assert sum(unroll(facts_of(page)["doc"]) >= 0) > 30_000 and len(page) < 5e6


def test_the_command_writes_a_page_that_needs_nothing_else(tmp_path):
    command = [sys.executable, "-m", "tools.view", "--stage", "1", *PHOTOS[1:], "--tiny", "--row", "1", "--out", str(tmp_path / "p.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert done.returncode == 0 and done.stderr == "" and page == row_of(*TOY, *PHOTOS, number=1)[0]
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r'(?:src|href)="(?!data:image/png;base64,)|url\(|@import|https?:', outside)


@pytest.mark.parametrize(("flags", "told"), [
    (["nowhere.jsonl", "--stage", "1"], "nowhere.jsonl: no such file"),
    (["--stage", "1"], "--data"),
    (["--stage", "1", "--tiny", "--row", "-1"], "--row -1: must be at least 0"),
    (["--stage", "1", "--tiny", "--rows", "1"], "--rows"),
    (["--stage", "7", "--tiny"], "--stage"),
    (["--stage", "1", "--tiny", "--init", "nowhere"], "nowhere"),
    (["--stage", "1", "--tiny", "--out", "no/such/folder.html"], "no/such/folder.html"),
    (["--stage", "1", *PHOTOS[1:], "--tiny", "--data.max_tokens=20"], "of the last 100 draws"),
])
def test_a_mistake_is_told_in_one_sentence(flags, told, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        view.main(["--out", str(tmp_path / "p.html"), *flags])
    said = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("skipped")]
    assert stop.value.code == 2 and len(said) == 1 and said[0].startswith("tools.view: ") and told in said[0]
    assert not (tmp_path / "p.html").exists()


def test_a_step_of_a_run_is_shown_as_it_was_trained_on(tmp_path):
    """The rows of --run and --step have the ids that the log hashed, and what the run masked is masked."""
    media = Path(__file__).parents[1] / "media"
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps({"image": name, "annotations": [{"type": "caption", "text": "a thing"}] * 2})
                                                for name in ("coffee.png", "cut.png", "chelsea.png")))
    for name in ("coffee.png", "chelsea.png"):
        (tmp_path / name).write_bytes((media / name).read_bytes())
    (tmp_path / "cut.png").write_bytes((media / "coffee.png").read_bytes()[:90_000])
    flags = ["--stage", "1", "--tiny", "--batch", "2", "--steps", "3", "--data", str(tmp_path / "r.jsonl"), "--model.n_layer=1",
             "--device", "cpu", "--vit_steps=0", "--pool_size=3"]
    train.main([*flags, "--out", str(tmp_path / "run")])
    (tmp_path / "cut.png").write_bytes((media / "coffee.png").read_bytes())          # mended since: the run saw it cut
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    masked = 0
    for step in (1, 2, 3):
        ids = []
        for row in (0, 1):
            rows, records, _, _ = view.replay(tmp_path / "run", step, row)
            ids += [record["id"] for record in records]
            masked += sum(len(e.tokens) for e in rows if e.bad)
        assert hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16] == next(line["ids"] for line in lines if line.get("step") == step)
    assert masked == sum(line["masked_tokens"] for line in lines if "loss" in line) > 0
    view.main(["--run", str(tmp_path / "run"), "--step", "2", "--row", "1", "--out", str(tmp_path / "page.html")])
    assert records[0]["id"] in (tmp_path / "page.html").read_text()
    for wrong in (["--step", "4"], ["--step", "1", "--row", "2"], ["--step", "1", "--stage", "1"]):
        with pytest.raises(SystemExit) as refused:
            view.main(["--run", str(tmp_path / "run"), *wrong, "--out", str(tmp_path / "page.html")])
        assert refused.value.code == 2


def test_a_run_whose_data_have_changed_since_is_not_shown_as_it_was_not(tmp_path, capsys):
    """The log has a hash of the ids of every step."""
    out = tmp_path / "run"
    train.main(["--stage", "1", "--tiny", "--steps", "2", "--batch", "2", "--vit_steps=0", "--eval_images=1", "--model.n_layer=1",
                "--device", "cpu", "--out", str(out)])
    view.main(["--run", str(out), "--step", "2", "--out", str(tmp_path / "page.html")])
    with open(out / "skips.jsonl", "w") as skips:
        skips.write('{"draw": 99999, "reason": "S21"}\n{"dra')            # of a run that was killed
    view.main(["--run", str(out), "--step", "2", "--out", str(tmp_path / "again.html")])
    log = (out / "log.jsonl").read_text()
    ids = [json.loads(line)["ids"] for line in log.splitlines()[1:3]]
    (out / "log.jsonl").write_text(log.replace(ids[1], "0" * 16))
    with pytest.raises(SystemExit):
        view.main(["--run", str(out), "--step", "2", "--out", str(tmp_path / "page.html")])
    assert "step 2 had other records" in capsys.readouterr().err
