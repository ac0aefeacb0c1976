"""Writes a packed row as an HTML page that shows its mask, message trees and crops.

    python -m tools.view --stage 1 --tiny --init toy --data tests/media/records.jsonl \\
        --media tests/media --out runs/row.html

The page needs no network. If you point at a piece of text or at the mask, the page marks the
text to which this piece may attend. Text with loss has a pink background. It shows the targets at
its positions, not the tokens.
"""

import argparse
import base64
import html
import io
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

import attention
import packing
from records.errors import UserError, draft, explained, plural
from records.visual import read_headers
from text.points import since_start, unit
from text.styles import parts_of
from text.tokenizer import token_text
from tools.command import make_parser, output_file, report_errors
from tools.plan import open_training
from training.config import Config, parse
from training.loader import Decoder
from training.log import read_log
from training.planner import StepPlanner
from weights.files import config_from_dict

TEMPLATE = Path(__file__).with_suffix(".html")
MAX_BLOCKS = 256  # along one side of the mask
MAX_PIXELS = 6_000_000  # of all crops together; a page with 384 crops has about 12 MB
# colours of tokens and of their pairs in the mask: padding, text without loss, visual, with loss
COLOURS = np.array([(200, 196, 186), (128, 116, 96), (60, 124, 168), (200, 30, 90)])


class Row(NamedTuple):
    """One row, exactly as in training."""
    examples: list  # of data.Example, in the order of the row
    records: list  # the record of each example
    tokenizer: object
    config: Config
    batch: packing.Batch  # the examples as one row


def plan_row(args, config, step, number, log=()):
    """Plans and decodes as training does -> the Row with this number, from 0, in a step, from 1.
    log: lines of log.jsonl. UserError if the records of this step are not those of the log."""
    mixture, tokenizer, config = open_training(args, config)
    plan = next(islice(StepPlanner(mixture, tokenizer, config), step - 1, None))
    hashes = [line["ids"] for line in log if line.get("step") == step and "ids" in line]
    if hashes and hashes[-1] != plan.hash:
        raise UserError(f"step {step} of the run had other records; the data, or the code "
                        "that samples them, has changed since then")
    decoder = Decoder(mixture, tokenizer, config)
    examples = [decoder.decode(item) for item in plan.packs[number]]
    places = [mixture[item.index] for item in plan.packs[number]]
    records = [source[i] for source, i, _ in places]
    batch = packing.collate([examples], config.data.max_tokens, config.model.vision)
    return Row(examples, records, tokenizer, config, batch)


def read_row_of_run(run, step, number):
    """A run directory -> the Row with this number in a step."""
    with explained(f"--run {run}"):
        head = json.loads((run / "config.json").read_bytes())
        args = argparse.Namespace(**head["command"])
        head["config"]["data"].pop("vision", None)  # older runs have a copy of model.vision there
        config = config_from_dict(head["config"], Config())
    if not (1 <= step <= config.steps and number < config.batch):
        raise UserError(f"--step {step} --row {number}: the run has steps 1 to "
                        f"{config.steps} and rows 0 to {config.batch - 1}")
    # a finished run has its own tokenizer
    if (run / "model").is_dir():
        args.init = run
    return plan_row(args, config, step, number, read_log(run / "log.jsonl"))


def draw_mask(row):
    """-> the attention mask as an image of blocks, the number of tokens along its side, the number
    of allowed pairs.

    A block has the colour of its first query. It is darker if more of its pairs are allowed.
    """
    batch = row.batch
    T = batch.tokens.shape[1]
    size = -(-T // MAX_BLOCKS)
    counts = []
    for start in range(0, T, size):
        queries = slice(start, start + size)
        allowed = attention.allow(batch.visible_until, batch.bidir, queries=queries)[0]
        counts.append(np.add.reduceat(allowed.sum(0).numpy(), np.arange(0, T, size)))
    counts = np.array(counts)
    colour_of = 1 + (batch.bidir[0] > 0)
    colour_of[batch.weights[0] > 0] = 3
    colour_of[batch.example[0] == len(row.examples)] = 0
    pixels = 255 - counts[..., None] / size**2 * (255 - COLOURS[colour_of[::size], None])
    return Image.fromarray(pixels.astype(np.uint8)), len(counts) * size, int(counts.sum())


def find_visible(batch, places):
    """Positions in the row -> for each one, the tokens to which it may attend, as "0-15 42-51"."""
    allowed = attention.allow(batch.visible_until, batch.bidir, queries=torch.tensor(places))[0]
    texts = []
    for line in allowed.numpy().astype(np.int8):
        edges = np.diff(line, prepend=0, append=0).nonzero()[0].reshape(-1, 2)
        texts.append(" ".join(f"{start}-{stop - 1}" for start, stop in edges))
    return texts


class TextRun(NamedTuple):
    ids: list  # ids of the tokens to show
    first: int  # position in the example, as is last
    last: int
    weight: float  # loss weight; 0: no loss
    visual: bool  # are these tokens of an image or a frame


def split_runs(example, start, stop):
    """Splits positions start to stop of an example into pieces with the same loss weight and kind
    -> [TextRun, ..]. All text is shown once and in order:

        position    52  53  54  55        weight 0: shows the token
        token        :  \n  red  cat      weight > 0: shows the target
        target      \n red  cat EOS
        weight       0   w   w   w        (": \n", 52, 53, 0)  ("red cat EOS", 53, 55, w)
    """
    visual = example.bidir > 0
    shown = [(example.tokens[start], start, 0.0, False)]
    for t in range(start, stop):
        if example.weights[t] > 0:
            shown.append((example.targets[t], t, float(example.weights[t]), False))
        elif t + 1 < stop:
            shown.append((example.tokens[t + 1], t + 1, 0.0, bool(visual[t + 1])))
    runs = []
    for (weight, is_visual), group in groupby(shown, lambda item: item[2:]):
        ids, places, *_ = zip(*group, strict=True)
        runs.append(TextRun(list(map(int, ids)), places[0], places[-1], weight, is_visual))
    return runs


def write_words(ids, tokenizer):
    """Token ids -> HTML with their text. Special tokens appear as <i> with name and count."""
    names = {id_: token_text(name) for name, id_ in tokenizer.special.items()}
    names |= {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}
    names |= {tokenizer.chat_start: "<|im_start|>", tokenizer.chat_end: "<|im_end|>"}
    words = ""
    for special, group in groupby(ids, lambda id_: id_ in names):
        if special:
            for id_, n in Counter(group).items():
                words += f"<i>{html.escape(names[id_])}{f' x{n}' if n > 1 else ''}</i>"
        else:
            words += html.escape(tokenizer.decode(list(group)))
    return words


def write_run(tokenizer, start, run, sees):
    """A TextRun -> a <span>. start: position of the example in the row. sees: the tokens to which
    the last token of the run may attend, from find_visible."""
    first = start + run.first
    last = start + run.last
    words = write_words(run.ids, tokenizer)
    kind = "visual" if run.visual else "read"
    if run.weight > 0:
        kind = "learned"
        words += f"<sup>{run.weight:.4g}</sup>"
    return (f'<span class="run {kind}" data-first="{first}" data-last="{last}" '
            f'data-sees="{sees}">{words}</span>')


def find_parts(example):
    """-> [(start, stop), ..] of the prefix and of each branch. If the example has only one branch,
    this branch is part of the prefix."""
    n = len(example.tokens)
    starts = [0, int((example.visible_until < n).argmax()) or n]
    while starts[-1] < n:
        starts.append(int(example.visible_until[starts[-1]]))
    return list(pairwise(starts))


def write_tree(row, number, start):
    """-> HTML with the message tree of an example: the prefix, and below it the branches."""
    example = row.examples[number]
    nodes = []
    for k, (a, b) in enumerate(find_parts(example)):
        runs = split_runs(example, a, b)
        visible = find_visible(row.batch, [start + run.last for run in runs])
        text = "".join(write_run(row.tokenizer, start, run, sees)
                       for run, sees in zip(runs, visible, strict=True))
        kind = "branch" if k else "prefix"
        name = f"branch {k}" if k else "prefix"
        about = f"tokens {start + a} to {start + b - 1}, positions from {example.pos[a]}"
        nodes.append(f'<div class="{kind}"><b>{name}: {about}</b><p>{text}</p></div>')
    return "".join(nodes)


def write_crops(row, number):
    """-> HTML with the crops of an example as <figure>s, and the points of its record on them."""
    example = row.examples[number]
    record = row.records[number]
    info = read_headers(record, row.config.data)
    side = int((MAX_PIXELS / len(row.batch.images)) ** 0.5)
    figures = []
    for k, image in enumerate(example.image_id.tolist()):
        # the first crop of an image is the whole image, and the others are parts of its mosaic
        is_whole = k == 0 or example.image_id[k - 1] != image
        name = f"image {image + 1}: {'whole' if is_whole else 'crop'}"
        if info.times is not None:
            name = f"frame at {info.times[image]:.1f} s"
        marks = ""
        for label, (x, y) in find_points(record, info, image) if is_whole else ():
            marks += (f'<circle cx="{100 * x:.2f}" cy="{100 * y:.2f}" r="2">'
                      f"<title>{html.escape(label)}</title></circle>")
        picture = join_patches(example.images[k], row.config.model.vision)
        picture.thumbnail((side, side))
        svg = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{marks}</svg>'
        figures.append(f'<figure><div><img alt="" src="{data_uri(picture)}">{svg}</div>'
                       f"<figcaption>{name}</figcaption></figure>")
    return "".join(figures)


def find_points(record, info, image):
    """Yields (label, (x, y)) for each point of one image or frame. x and y are from 0 to 1."""
    size = info.sizes[min(image, len(info.sizes) - 1)]
    here = image if info.times is None else f"{info.times[image]:.1f}"
    for _, annotation in parts_of(record):
        label = annotation.get("label", annotation.get("question", ""))
        for p in annotation["points"] if annotation["type"] in ("point", "track") else ():
            place = p.get("image", 0) if "t" not in p else f"{since_start(p['t'], record):.1f}"
            if place == here and not p.get("occluded"):
                yield label, unit(p, size)


def join_patches(patches, config):
    """(P,F) -> PIL image of crop x crop pixels. The inverse of vision.patchify."""
    size = config.patch
    pixels = patches.reshape(config.grid, config.grid, size, size, 3).transpose(0, 2, 1, 3, 4)
    return Image.fromarray(pixels.reshape(config.crop, config.crop, 3))


def data_uri(image, kind="png", **options):
    """A PIL image -> data: URI in this format."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return f"data:image/{kind};base64," + base64.b64encode(out.getvalue()).decode()


def write_example(row, number, start):
    example = row.examples[number]
    weight = example.weights.sum(dtype="f8")
    facts = (f"{plural(len(example.tokens), 'token')}, "
             f"{plural(example.n_branches, 'annotation')}, {example.dropped_branches} skipped, "
             f"loss weight {weight:.4g}")
    crops = ""
    if example.unreadable:
        reason = html.escape(example.unreadable)
        tree = f"<p>{reason}. The row contains zeros without loss instead of this record.</p>"
    else:
        tree = write_tree(row, number, start)
        crops = write_crops(row, number) if example.images is not None else ""
    title = f"<h2>example {number} <code>{html.escape(example.id)}</code></h2><p>{facts}</p>"
    body = f'<div>{tree}</div><div class="crops">{crops}</div>'
    return f'{title}<div class="example">{body}</div>'


def write_page(row):
    """Row -> the page as text."""
    batch = row.batch
    config = row.config
    lengths = [len(x.tokens) for x in row.examples]
    starts = np.cumsum([0, *lengths]).tolist()
    n_crops = sum(len(x.images) for x in row.examples if x.images is not None)
    n_annotations = sum(x.n_branches for x in row.examples)
    mask, n_tokens, n_pairs = draw_mask(row)
    T = batch.tokens.shape[1]
    numbers = {
        "tokens": f"{sum(lengths)} of {T}, {sum(lengths) / T:.1%} of the row",
        "crops": f"{n_crops} of {config.pack_crops}; {len(batch.images)} encoded",
        "annotations": f"{n_annotations} of {plural(len(lengths), 'example')}",
        "tokens with loss": f"{len(batch.labelled)}",
        "sum of loss weights": f"{batch.weights.sum(dtype=torch.float64):.6g}",
        "allowed pairs": f"{n_pairs / T**2:.2%}; a causal mask allows {(T + 1) / (2 * T):.1%}"}
    parts = {
        "TITLE": f"A packed row of stage {config.stage}",
        "NUMBERS": "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in numbers.items()),
        "MASK": data_uri(mask),
        "TOKENS": str(n_tokens),
        "EXAMPLES": "\n".join(write_example(row, k, starts[k]) for k in range(len(lengths)))}
    # in one pass, so that a {{NAME}} in the text of a record is not replaced
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub("{{([A-Z]+)}}", lambda match: parts[match[1]], template)


@report_errors
def main(argv=None):
    parser = make_parser(
        "view", __doc__, epilog="Without --run, all other flags are those of train.py.")
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="show a row of this run (without --stage)")
    add("--step", type=int, metavar="N", help="with --run: the step that contains the row")
    add("--row", type=int, default=0, metavar="N", help="number of the row (default 0, the first)")
    add("--out", type=output_file(".html", b"<title>A packed row"), required=True, metavar="HTML",
        help="the page to write")
    own, rest = parser.parse_known_args(argv)
    if own.row < 0 or (own.run and (own.step is None or rest)):
        parser.error("--row must be at least 0; --run DIR needs --step N and no flags of train.py")
    if own.step is not None and not own.run:
        parser.error("--step N needs --run DIR; without --run, --row N selects a row")
    if own.run:
        row = read_row_of_run(own.run, own.step, own.row)
    else:
        args, config = parse(rest)
        config = replace(config, batch=1, micro_batch=1, steps=own.row + 1)
        row = plan_row(args, config, own.row + 1, 0)
    page = write_page(row)
    with draft(own.out) as path:
        path.write_text(page, encoding="utf-8")
    print(f"{own.out}: row {own.row}, {plural(len(row.examples), 'example')}")


if __name__ == "__main__":
    main()
