"""The page of a packed row as HTML: the trees of its examples, their crops, a few numbers.

page.html is the frame, page.css its style. row.js, canvases.js and page.js are its script, which
draws the row, the mask and the windows of visual tokens from the JSON of row_data.page_numbers.
"""

import base64
import hashlib
import html
import io
import json
import re
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from tools.view import row_data
from tools.view.row_data import KIND_OF_OPENER, Tokens, spans

MAX_PIXELS = 6_000_000                   # of all crops; with 384 crops the page has about 12 MB
N_OPEN = 6                               # examples that are unfolded at first
N_COLOURS = 6                            # of points; page.css has as many
SCRIPTS = ("row.js", "canvases.js", "page.js")
CROP_NAMES = {"view": "view of the whole image", "mosaic": "crop of the mosaic", "frame": "frame"}


class Writer(NamedTuple):
    """What every part of the page is written from."""
    row: Tokens
    batch: object
    tokenizer: object
    names: dict                          # row_data.token_names
    places: dict                         # row_data.crop_places
    heaviest: float                      # the largest loss weight of a token: the full tint
    config: object


def page(packed, batch):
    """PackedRow and its Batch -> the page as text."""
    assert len(batch.tokens) == 1, batch.tokens.shape
    assert len(packed.examples) == len(packed.records)
    row = row_data.tokens_of(batch)
    writer = Writer(row, batch, packed.tokenizer, row_data.token_names(packed.tokenizer),
                    row_data.crop_places(batch, row, packed.tokenizer),
                    float(row.weights.max()) or 1.0, packed.config)
    blocks = row_data.mask_blocks(batch)
    numbers = row_data.page_numbers(batch, row, blocks, packed.tokenizer, packed.config)
    folder = Path(__file__).parent
    code = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # the browser runs this script only: text of a record that became markup would still do nothing
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    parts = {
        "TITLE": f"A packed row of stage {packed.config.stage}",
        "HASH": f"sha256-{digest}",
        "STYLE": (folder / "page.css").read_text(encoding="utf-8"),
        "CODE": code,
        "NUMBERS": numbers_html(writer, packed, blocks),
        "EXAMPLES": examples_html(writer, packed),
        "DATA": json.dumps(numbers, separators=(",", ":")).replace("<", "\\u003c")}
    template = (folder / "page.html").read_text(encoding="utf-8")
    # one pass: text that was put in is not searched again
    return re.sub(r"<!--([A-Z]+)-->", lambda match: parts[match[1]], template)


# --------------------------------------------------------------------------------------------------
# numbers of the row


def numbers_html(writer, packed, blocks):
    row = writer.row
    T = len(row.tokens)
    config = writer.config
    tokens = int((row.example < len(packed.examples)).sum())
    annotations = sum(example.n_branches for example in packed.examples)
    crops = sum(len(example.images) for example in packed.examples if example.images is not None)
    crops_note = f"{crops / config.pack_crops:.1%} full"
    encoded = len(writer.batch.images)
    if encoded < crops:
        crops_note += f", {encoded} encoded: a mosaic that repeats its view is read once"
    weight = float(row.weights.sum(dtype="float64"))
    numbers = [
        ("tokens", f"{tokens} of {T}", f"{tokens / T:.1%} of the row is full"),
        ("crops", f"{crops} of {config.pack_crops}", crops_note),
        ("examples", len(packed.examples), f"{annotations} annotations"),
        ("with loss", int((row.weights > 0).sum()), "tokens that are learned"),
        ("weight", f"{weight:.6g}", "sum of the loss weights"),
        ("mask", f"{blocks.counts.sum() / T**2:.2%}",
         f"of {T} x {T} pairs is allowed; a causal triangle has {(T + 1) / (2 * T):.0%}")]
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd><dd>{note}</dd></div>"
                   for name, value, note in numbers)


# --------------------------------------------------------------------------------------------------
# examples


def examples_html(writer, packed):
    found = []
    row_spans = spans(writer.row.example)            # the last one may be padding
    for number, (example, record) in enumerate(zip(packed.examples, packed.records, strict=True)):
        crops = sorted(n for n, place in writer.places.items() if place.example == number)
        start, stop = row_spans[number]
        if example.mask_reason:                           # the row holds zeros, not the record
            tree = (f'<p class="masked">{html.escape(example.mask_reason)}: '
                    "zeros stand in its place, without loss</p>")
        else:
            tree = tree_html(writer, start, stop)
        figures = "".join(figure_html(writer, n, record) for n in crops)
        beside = f'<div class="crops">{figures}</div>' if crops else ""
        about = ", ".join(example_facts(writer, example, start, stop, len(crops)))
        found.append(
            f'<details{" open" if number < N_OPEN else ""}><summary><b>example {number}</b> '
            f'<code>{html.escape(example.id)}</code> <span>{about}</span></summary>'
            f'<div class="body"><div>{tree}</div>{beside}</div></details>')
    return "\n".join(found)


def example_facts(writer, example, start, stop, n_crops):
    weight = writer.row.weights[start:stop].sum(dtype="float64")
    facts = [f"{stop - start} tokens", plural(example.n_branches, "annotation"),
             f"weight {weight:.4g}"]
    if example.dropped_branches:
        facts.append(f"{example.dropped_branches} left out")
    if n_crops:
        facts.append(plural(n_crops, "crop"))
    return facts


def plural(n, word):
    return f"{n} {word}{'s' if n > 1 else ''}"


def tree_html(writer, start, stop):
    """The message tree of the example at tokens start to stop."""
    row = writer.row
    (_, shared_stop), *branches = spans(row.annotation[start:stop], start)
    if not branches:
        title = f"a single annotation, with all that it sees: tokens {start} to {stop - 1}"
        return node_html("div", title, text_html(writer, start, stop, ends=True))
    title = f"the shared part, which every annotation sees: tokens {start} to {shared_stop - 1}"
    shared = node_html("div", title, text_html(writer, start, shared_stop, ends=False))
    nodes = []
    for first, last in branches:
        title = (f"annotation {row.annotation[first]}: tokens {first} to {last - 1}, "
                 f"positions from {row.pos[first]}")
        nodes.append(node_html("li", title, text_html(writer, first, last, ends=True)))
    return f"{shared}<ul>{''.join(nodes)}</ul>"


def node_html(tag, title, text):
    return f'<{tag} class="node"><b>{title}</b><p>{text}</p></{tag}>'


def text_html(writer, start, stop, ends):
    """Tokens start to stop, one <span class="run"> for each row_data.TextRun."""
    row = writer.row
    spans_html = []
    for run in row_data.text_runs(row, start, stop, ends):
        if run.weight == 0 and row.bidir[run.first]:
            spans_html += visual_html(writer, run)
            continue
        words = words_html(writer, run.ids)
        if row.pos[run.first] == 0 and run.first == start and run.weight == 0:
            words = words.replace("</i>", " BOS</i>", 1)
        class_name = "run"
        tint = ""
        if run.weight > 0:
            class_name = "run learned"
            tint = f' style="--w:{run.weight / writer.heaviest:.3f}" data-w="{run.weight!s}"'
            words += f"<sup>{run.weight:.4g}</sup>"
        spans_html.append(f'<span class="{class_name}" data-a="{run.first}" '
                          f'data-n="{run.last - run.first + 1}"{tint}>{words}</span>')
    return "".join(spans_html)


def words_html(writer, ids):
    """Text, and the names of tokens that decode to nothing as <i>."""
    words = ""
    for special, group in groupby(ids, lambda id_: id_ in writer.names):
        if special:
            words += "".join(f"<i>{html.escape(writer.names[id_])}</i>" for id_ in group)
        else:
            words += html.escape(writer.tokenizer.decode(list(group)))
    return words


def visual_html(writer, run):
    """A run of visual tokens: one span for each view, mosaic or frame, with how many of which
    tokens it has."""
    openers = {writer.tokenizer.special[name] for name in KIND_OF_OPENER}
    starts = [k for k, id_ in enumerate(run.ids) if id_ in openers]
    for a, b in pairwise(sorted({0, *starts, len(run.ids)})):
        part = run.ids[a:b]
        words = []
        for id_ in dict.fromkeys(part):
            n = part.count(id_)
            words.append(f"{n} {writer.names[id_]}" if n > 1 else writer.names[id_])
        yield (f'<span class="run visual" data-a="{run.first + a}" data-n="{b - a}">'
               f'{html.escape(" ".join(words))}</span>')


# --------------------------------------------------------------------------------------------------
# crops


def figure_html(writer, crop, record):
    """One crop: its pixels, the points of its record, and paths in which page.js draws windows."""
    place = writer.places[crop]
    grid = writer.config.data.vision.grid
    marks = ""
    legend = ""
    for label, annotation, points in row_data.points_at(record, place):
        label = html.escape(label)
        colour = annotation % N_COLOURS
        radius = grid * (0.02 + 0.008 * (annotation % 4))        # circles on one place differ
        for x, y in points:
            marks += (f'<circle class="p{colour}" cx="{x * grid:.3f}" cy="{y * grid:.3f}" '
                      f'r="{radius:.3f}"><title>{label}</title></circle>')
        if points or place.kind != "frame":          # most frames of a video have no points
            legend += f' <span class="p{colour}">{label} ({len(points)})</span>'
    before = f", {html.escape(place.text_before)}" if place.text_before else ""
    return (f'<figure data-crop="{crop}"><div>'
            f'<img alt="crop {crop}" src="{crop_uri(writer, crop)}">'
            f'<svg viewBox="0 0 {grid} {grid}" preserveAspectRatio="none">'
            f'<path class="unused"/><path class="lines"/><path class="hit"/>{marks}</svg></div>'
            f"<figcaption>crop {crop}: {CROP_NAMES[place.kind]}{before}{legend}</figcaption>"
            "</figure>")


def crop_uri(writer, crop):
    """A crop as a data: URI of a PNG, smaller where the page has many."""
    config = writer.config.data.vision
    side = min(config.crop, int((MAX_PIXELS / max(len(writer.places), 1)) ** 0.5))
    image = Image.fromarray(unpatchify(writer.batch.images[crop].numpy(), config))
    if image.width > side:
        image = image.resize((side, side))
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def unpatchify(patches, config):
    """(P,F) -> (crop,crop,3), the inverse of vision.patchify."""
    grid = config.grid
    size = config.patch
    pixels = patches.reshape(grid, grid, size, size, 3).transpose(0, 2, 1, 3, 4)
    return pixels.reshape(grid * size, grid * size, 3)
