"""The page in a browser: it shows what attention allows, fits its window, runs no other script."""

import base64
import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.tools.view.pages import (
    ROWS,
    PageReader,
    allowed_by_attention,
    pairs_per_block,
    shown_row,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="no browser is installed (chromium, google-chrome)")]

# What a reader does, done by a script: walks through the row with arrow keys, points at runs of
# text, and notes what the page shows.
VISITOR = """
    const row = unpack(JSON.parse(document.getElementById("data").textContent));
    const n = Math.ceil(row.T / row.block);
    const press = (id, key) => document.getElementById(id).dispatchEvent(
        new KeyboardEvent("keydown", { key, bubbles: true }));
    const words = () => document.getElementById("words").textContent;
    const packBits = (n, bit) => {
        const bytes = new Uint8Array(Math.ceil(n / 8));
        for (let i = 0; i < n; i++) if (bit(i)) bytes[i >> 3] |= 1 << (i & 7);
        return btoa(Array.from(bytes, b => String.fromCharCode(b)).join(""));
    };
    const seen = { walked: [], runs: [] };
    const canvas = document.getElementById("mask"), edge = canvas.width - n;
    const pixels = canvas.getContext("2d").getImageData(edge, edge, n, n).data;
    seen.blocks = packBits(n * n, i => pixels[4 * i + 3] > 0);
    const allowed = packBits(row.T * row.T, i => allow(row, Math.floor(i / row.T), i % row.T));
    const reached = Array.from({ length: row.T }, (_, q) => reach(row, q));
    for (const name of ["attends", "attendedBy"]) {
        seen[name] = packBits(row.T * row.T, i => reached[Math.floor(i / row.T)][name][i % row.T]);
    }
    seen.same = allowed === seen.attends;
    press("ribbon", "Home");
    for (let q = 0; q < row.T; q++) { seen.walked.push(words()); press("ribbon", "ArrowRight"); }
    press("ribbon", "Escape");
    const runs = [...document.querySelectorAll(".run")];
    for (const run of runs) {
        const box = run.getBoundingClientRect();
        run.dispatchEvent(new PointerEvent("pointermove", {
            clientX: box.x + 1, clientY: box.y + 1, pointerType: "mouse", bubbles: true }));
        seen.runs.push(runs.map(({ classList: c }) => [
            c.contains("attends"), c.contains("attended-by"), c.contains("unrelated")]));
    }
    press("mask", "ArrowDown");
    seen.block = words();
    document.body.innerHTML = "<pre id=seen></pre>";
    document.getElementById("seen").textContent = JSON.stringify(seen);"""


def opened(page, folder):
    """The document after a browser has run the page's scripts, as HTML."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--dump-dom",
             f"--user-data-dir={folder / 'browser'}"]
    done = subprocess.run([BROWSER, *flags, path.as_uri()], capture_output=True, text=True,
                          timeout=120, check=True)
    return done.stdout


def visit(page, folder):
    """-> what VISITOR notes. Without the page's policy, which would stop this script."""
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy".*?>', re.DOTALL)
    page = policy.sub("", page).replace("</body>", f"<script>{VISITOR}</script></body>")
    seen = re.search(r'<pre id="seen">(.*?)</pre>', opened(page, folder), re.DOTALL)
    return json.loads(html.unescape(seen[1]))


def bits(text, n):
    """What packBits made of n x n numbers -> (n,n) of 0 and 1."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    return np.unpackbits(packed, bitorder="little")[: n * n].reshape(n, n)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_browser_shows_what_attention_allows(number, tmp_path):
    """Both ways round: for every token, walked to by keys; for the runs of text, pointed at; and in
    the pixels of the mask."""
    shown = shown_row(*ROWS[number])
    seen = visit(shown.page, tmp_path)
    allowed = allowed_by_attention(shown.batch)
    T = len(allowed)
    size = shown.facts["block"]
    counts = pairs_per_block(allowed, size)
    assert seen["same"]
    assert np.array_equal(bits(seen["attends"], T), allowed)
    assert np.array_equal(bits(seen["attendedBy"], T), allowed.T)
    assert np.array_equal(bits(seen["blocks"], len(counts)), counts > 0)
    share = float(re.search(r"([0-9.]+) % allowed", seen["block"])[1])
    assert share == pytest.approx(100 * counts[0, 0] / size**2, abs=0.05 + 1e-9)
    n_tokens = sum(len(example.tokens) for example in shown.packed.examples)
    for q, words in enumerate(seen["walked"]):
        assert words.startswith(f"token {q} ")
        if q < n_tokens:
            assert f"may attend to {allowed[q].sum()} of {T} tokens" in words
            assert f" {allowed[:, q].sum()} may attend to it" in words
    check_runs(PageReader(shown.page).runs, seen["runs"], allowed)


def check_runs(runs, seen, allowed):
    """A run pointed at marks the runs of which it attends to a token, and those that attend to one
    of its last token's."""
    spans = [(int(run["data-a"]), int(run["data-a"]) + int(run["data-n"])) for run in runs]
    for (_, stop), marks in zip(spans, seen, strict=True):
        for (a, b), mark in zip(spans, marks, strict=True):
            attends = bool(allowed[stop - 1, a:b].any())
            attended_by = bool(allowed[a:b, stop - 1].any())
            assert mark == [attends, attended_by, not attends and not attended_by]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("number", [0, 4])
def test_the_page_is_as_wide_as_its_window(number, width, tmp_path):
    """A telephone's and a desk's: a frame in a page, since windows of a browser without a screen
    cannot be as narrow."""
    page = shown_row(*ROWS[number]).page
    measure = ("document.title = [f.contentWindow.innerWidth, "
               "f.contentDocument.documentElement.scrollWidth]")
    frame = (f'<iframe id="f" style="width:{width}px;height:900px;border:0" '
             f'onload="{measure}" srcdoc="{html.escape(page)}"></iframe>')
    dom = opened(f"<!doctype html><title></title><body>{frame}", tmp_path)
    inside, wide = map(int, re.search(r"<title>(\d+),(\d+)</title>", dom).groups())
    assert inside == width
    assert wide <= width


def test_no_script_runs_but_the_pages_own(tmp_path):
    """If a record's text became markup after all, its script would still do nothing."""
    change = "document.title = 'changed'"
    attack = f'<script>{change}</script><img src=x onerror="{change}"><h1>'
    dom = opened(shown_row(*ROWS[1]).page.replace("<h1>", attack), tmp_path)
    assert "<title>A packed row of stage 1</title>" in dom
    assert re.search(r'<p id="about">\d+ x \d+ blocks', dom)
