"""A packed row to look at: one page of HTML that opens offline (paper: message trees, packing).

    python -m tools.view my.jsonl --stage 2 --media photos --out page.html       # the first row that training would plan
    python -m tools.view --stage 1 --tiny --row 7 --out page.html                # the eighth of the toy world
    python -m tools.view --run runs/mine --step 812 --row 3 --out page.html      # the fourth row of a step that was trained on

in    a Batch of one row, its examples and their records
out   the row as a ribbon of tokens, the mask in blocks, and for each example its message tree, and its crops with the
      windows that visual tokens pool and the points of its record

The page holds doc, branch and bidir of every token, run-length encoded, and asks the one rule itself to show what a
token may attend to and what may attend to it; the blocks of the mask are counted from attention.allow. The text shows
what is learned where it is predicted: a tinted run is the targets of the positions that it names. Style and script stand
in view.html beside this file.
Left out: what a model makes of the row.
"""

import argparse
import base64
import hashlib
import html
import io
import json
import re
import sys
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from PIL import Image

import attention
import data
import loader as loaders
import packing
import train
from text import tokenizer as text
from text.points import unit
from text.prompts import scales
from text.tracks import since_start
from training.log import read_log, read_skips

BLOCKS = 256                             # blocks along a side of the mask, at most
PIXELS = 6_000_000                       # of all crops of a page; more are shrunk, so that a row of 384 crops stays near 12 MB
OPEN = 6                                 # examples that are unfolded from the start
KINDS = {"low_res_im_start": "view", "im_start": "mosaic", "frame_start": "frame"}           # what a run of visual tokens opens with


# ---------------------------------------------------------------------------------------------------------------
# numbers for the page's script


def runs(values):
    """[5, 5, 5, 0] -> [5, 3, 0, 1]: each value with the number of times it comes in a row."""
    values = np.asarray(values)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    lengths = np.diff(starts, append=len(values))
    # the shortest decimals that read back as the same float32
    numbers = [float(str(v)) for v in values[starts]] if values.dtype.kind == "f" else values[starts].tolist()
    return [n for pair in zip(numbers, lengths.tolist(), strict=True) for n in pair]


def steps(values):
    """Runs of the differences, from 0: positions and windows climb evenly, so these are few."""
    return runs(np.diff(np.asarray(values), prepend=0))


def spans(values, start=0):
    """[(start, end), ..] of the runs of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(start + a, start + b) for a, b in pairwise(edges)]


def block_counts(batch, size):
    """(n,n) int64: how many pairs of query and key are allowed in each block of size x size tokens, from attention.allow.

    One document at a time, since the rule allows nothing else, and `size` queries at a time: T x T is never held at once.
    """
    T = batch.doc.shape[1]
    counts = np.zeros((-(-T // size),) * 2, np.int64)
    for a, b in spans(batch.doc[0].numpy()):
        fields = [f[:, a:b] for f in (batch.doc, batch.branch, batch.bidir)]
        of_key = np.arange(a, b) // size
        for i in range(a // size, -(-b // size)):
            mask = attention.allow(*fields, rows=slice(max(i * size, a) - a, min((i + 1) * size, b) - a))
            counts[i] += np.bincount(of_key, mask[0].sum(0).numpy(), minlength=len(counts)).astype(np.int64)
    return counts


def names_of(tokenizer):
    """{id: what to show} of the tokens that decode to nothing."""
    chat = {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>", tokenizer.chat_start: "<|im_start|>", tokenizer.chat_end: "<|im_end|>"}
    return {i: text.token_text(name) for name, i in tokenizer.special.items()} | chat


def facts(row, batch, tokenizer, config, counts, size):
    """What the script reads: every field of the row, told briefly."""
    names, windows = names_of(tokenizer), batch.pool_src.numpy()
    known = sorted({*row["tokens"].tolist(), *row["targets"].tolist()})
    return {
        "T": len(row["doc"]), **{name: (steps if name == "pos" else runs)(values) for name, values in row.items()},
        "pieces": {i: names.get(i) or tokenizer.decode([i]) for i in known}, "ids": batch.ids, "patch": tokenizer.special["im_patch"],
        "grid": config.data.vision.grid, "pool_src": [steps(column) for column in windows.T], "pool_dst": steps(batch.pool_dst.numpy()),
        "block": size, "counts": runs(counts.flatten())}


# ---------------------------------------------------------------------------------------------------------------
# text


def told(row, a, b, ends):
    """Tokens a to b of a row -> [(ids, first position, last position, weight), ..]: what stands there, and what is learned there.

        position    52  53  54  55          weight 0: the token that stands at the position
        token        :  \\n  red  cat        weight > 0: the target of the position, so that text is read once and in order:
        target      \\n red  cat EOS            (": \\n", 52, 53, 0)  ("red cat EOS", 53, 55, w)
        weight       0   w   w   w          ends: the span ends with a target of its own, EOS
    """
    said = [(int(row["tokens"][a]), a, 0.0)]
    for t in range(a, b):
        if row["weights"][t] > 0 or (ends and t == b - 1):
            said.append((int(row["targets"][t]), t, row["weights"][t]))
        elif t + 1 < b:
            said.append((int(row["tokens"][t + 1]), t + 1, 0.0))
    key = lambda s: (float(s[2]), s[2] == 0 and bool(row["bidir"][s[1]]))                       # noqa: E731
    return [([s[0] for s in part], part[0][1], part[-1][1], part[0][2]) for part in (list(group) for _, group in groupby(said, key))]


def visual_chips(ids, first, tokenizer, names):
    """A run of visual tokens as a chip for each view, mosaic or frame of it: what it opens with, then how many of what."""
    openers = {tokenizer.special[name] for name in KINDS}
    cuts = sorted({0, *(k for k, i in enumerate(ids) if i in openers), len(ids)})
    for a, b in pairwise(cuts):
        part = list(dict.fromkeys(ids[a:b]))
        words = " ".join(f"{n} {names[i]}" if (n := ids[a:b].count(i)) > 1 else names[i] for i in part)
        yield f'<span class="run see" data-a="{first + a}" data-n="{b - a}">{html.escape(words)}</span>'


def told_html(row, a, b, ends, tokenizer, heaviest):
    names, out = names_of(tokenizer), []
    for ids, first, last, weight in told(row, a, b, ends):
        if weight == 0 and row["bidir"][first]:
            out += visual_chips(ids, first, tokenizer, names)
            continue
        words = ""
        for special, group in groupby(ids, lambda i: i in names):
            group = list(group)
            words += ("".join(f"<i>{html.escape(names[i])}</i>" for i in group) if special else html.escape(tokenizer.decode(group)))
        if row["pos"][first] == 0 and first == a and weight == 0:
            words = words.replace("</i>", " BOS</i>", 1)
        tint = f' style="--w:{weight / heaviest:.3f}" data-w="{weight!s}"' if weight > 0 else ""
        sup = f"<sup>{weight:.4g}</sup>" if weight > 0 else ""
        out.append(f'<span class="run{" learn" * bool(sup)}" data-a="{first}" data-n="{last - first + 1}"{tint}>{words}{sup}</span>')
    return "".join(out)


def tree_html(row, a, b, tokenizer, heaviest):
    """The message tree of the example at tokens a to b."""
    (_, end), *branches = spans(row["branch"][a:b], a)
    note = f"trunk, tokens {a} to {end - 1}" if branches else f"one annotation: no tree, all of it is trunk, tokens {a} to {end - 1}"
    out = [f'<div class="node"><b>{note}</b><p>{told_html(row, a, end, not branches, tokenizer, heaviest)}</p></div>']
    for c, d in branches:
        label = f"branch {row['branch'][c]}, tokens {c} to {d - 1}, from pos {row['pos'][c]}"
        out.append(f'<li class="node"><b>{label}</b><p>{told_html(row, c, d, True, tokenizer, heaviest)}</p></li>')
    return f"{out[0]}<ul>{''.join(out[1:])}</ul>" if branches else out[0]


# ---------------------------------------------------------------------------------------------------------------
# pictures


def pictures(batch, row, tokenizer):
    """{crop: (doc, kind, number of its image or frame in the example, text in front of it)}, from who pools it."""
    openers = {tokenizer.special[name]: kind for name, kind in KINDS.items()}
    opens = np.flatnonzero(np.isin(row["tokens"], list(openers)) & (row["bidir"] > 0))
    seen, count = {}, {}
    P = batch.images.shape[1]
    for source, t in zip(batch.pool_src.numpy(), batch.pool_dst.numpy(), strict=True):
        for crop in dict.fromkeys((source[source >= 0] // P).tolist()):
            if crop in seen:
                continue                 # a mosaic that is the view once more, or the next window
            doc, kind = int(row["doc"][t]), openers[int(row["tokens"][opens[np.searchsorted(opens, t, "right") - 1]])]
            if kind != "mosaic":
                count[doc] = count.get(doc, -1) + 1
            start = np.flatnonzero(row["bidir"][:t] == 0)[-1] + 1         # of the run of visual tokens; text stands in front
            before = np.flatnonzero((row["bidir"][:start] > 0) | (row["doc"][:start] != doc))
            words = row["tokens"][before[-1] + 1 if len(before) else 0 : start].tolist()
            seen[crop] = doc, kind, count[doc], tokenizer.decode(words).strip()[-24:]
    return seen


def pixels_of(patches, config):
    """(P,F) -> (crop,crop,3), the way back from vision.patchify."""
    g, p = config.grid, config.patch
    return patches.reshape(g, g, p, p, 3).transpose(0, 2, 1, 3, 4).reshape(g * p, g * p, 3)


def png(pixels, side):
    picture, out = Image.fromarray(pixels), io.BytesIO()
    (picture if picture.width <= side else picture.resize((side, side))).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def sizes_of(record):
    """The scale of points in pixels, for each image or for the video."""
    source = record["source"]
    return scales(record, [source.video_size(record)[:2]] if "video" in record else source.image_sizes(record))


def pointed(record, kind, number, words):
    """[(label, number of the annotation, [(x, y), ..] as fractions of the sides)] of what the record points at in one view or frame."""
    out, here = [], None
    for k, a in enumerate(record["annotations"]):
        if a["type"] not in ("point", "track") or kind == "mosaic":
            continue
        if kind == "frame":
            points = [p for p in a["points"] if "t" in p and f"{since_start(p['t'], record):.1f}" == words and not p.get("occluded")]
        else:
            points = [p for p in a["points"] if p.get("image", 0) == number]
        if a["coords"] == "pixel" and "size" not in a:
            here = here or sizes_of(record)
        out.append((a.get("label", a.get("question", "")), k, [unit(p, a, here[min(number, len(here) - 1)] if here else None)
                                                               for p in points]))
    return out


def figure(n, source, place, record, config):
    """One crop: its pixels, the windows over it (drawn by the script), the points of the record."""
    _, kind, number, words = place
    g = config.data.vision.grid
    groups = pointed(record, kind, number, words)
    marks, legend = "", ""
    for label, k, points in groups:
        label = html.escape(label)
        for x, y in points:
            radius = g * (0.02 + 0.008 * (k % 4))    # of several annotations on one place, all can be seen
            marks += f'<circle class="p{k % 6}" cx="{x * g:.3f}" cy="{y * g:.3f}" r="{radius:.3f}"><title>{label}</title></circle>'
        if kind == "frame" and not points:               # of a video's many frames only those are worth saying
            continue
        legend += f' <span class="p{k % 6}">{label} ({len(points)})</span>'
    name = {"view": "view of all of it", "mosaic": "a crop of the mosaic", "frame": "frame"}[kind]
    return (f'<figure data-crop="{n}"><div><img alt="crop {n}" src="{source}"><svg viewBox="0 0 {g} {g}" preserveAspectRatio="none">'
            f'<path class="unused"/><path class="lines"/><path class="hit"/>{marks}</svg></div>'
            f'<figcaption>crop {n}: {name}{f", {html.escape(words)}" if words else ""}{legend}</figcaption></figure>')


# ---------------------------------------------------------------------------------------------------------------
# the page


def page(rows, batch, records, tokenizer, config):
    """The page as text. rows: the data.Example of the batch's one row, records: theirs, in the same order; config: train.Config."""
    assert len(batch.tokens) == 1 and len(rows) == len(records), (batch.tokens.shape, len(rows), len(records))
    row = {name: getattr(batch, name)[0].numpy() for name in ("doc", "branch", "bidir", "tokens", "targets", "weights", "pos")}
    T, vision, heaviest = len(row["doc"]), config.data.vision, float(row["weights"].max()) or 1.0
    size = 1
    while BLOCKS * size < T:
        size *= 2
    counts = block_counts(batch, size)
    seen = pictures(batch, row, tokenizer)
    side = min(vision.crop, int((PIXELS / max(len(seen), 1)) ** 0.5))
    examples, annotations, planned = [], 0, 0
    for e, (example, record, (a, b)) in enumerate(zip(rows, records, spans(row["doc"]), strict=False)):
        crops = sorted(n for n, place in seen.items() if place[0] == e)
        kept = max(int(example.branch.max(initial=0)), 1)
        annotations, planned = annotations + kept, planned + (0 if example.images is None else len(example.images))
        about = [f"{b - a} tokens", f"{kept} annotation{'s' * (kept > 1)}", f"weight {row['weights'][a:b].sum(dtype='float64'):.4g}"]
        about += [f"{example.dropped} left out"] * bool(example.dropped) + [f"{len(crops)} crop{'s' * (len(crops) > 1)}"] * bool(crops)
        tree = tree_html(row, a, b, tokenizer, heaviest)
        if example.bad:                  # what lies in the row is not what the record says
            tree = f'<p class="bad">{html.escape(example.bad)}: zeros stand in its place, without loss</p>'
        figures = "".join(figure(n, png(pixels_of(batch.images[n].numpy(), vision), side), seen[n], record, config) for n in crops)
        beside = f'<div class="crops">{figures}</div>' if crops else ""
        examples.append(f'<details{" open" * (e < OPEN)}><summary><b>example {e}</b> <code>{html.escape(example.id)}</code> '
                        f'<span>{", ".join(about)}</span></summary>'
                        f'<div class="body"><div>{tree}</div>{beside}</div></details>')
    tokens, total = int((row["doc"] >= 0).sum()), float(row["weights"].sum(dtype="float64"))
    encoded = len(batch.unit)
    encoded = f", {encoded} encoded: a mosaic that repeats its view is read once" if encoded < planned else ""
    numbers = [("tokens", f"{tokens} of {T}", f"{tokens / T:.1%} of the row is full"),
               ("crops", f"{planned} of {config.pack_crops}", f"{planned / config.pack_crops:.1%} full{encoded}"),
               ("examples", len(rows), f"{annotations} annotations"),
               ("with loss", int((row["weights"] > 0).sum()), "tokens that are learned"),
               ("weight", f"{total:.6g}", "sum of the loss weights"),
               ("mask", f"{counts.sum() / T**2:.2%}", f"of {T} x {T} pairs is allowed; a causal triangle has {(T + 1) / (2 * T):.0%}")]
    template = (Path(__file__).parent / "view.html").read_text(encoding="utf-8")
    # of all that the page holds, the browser runs this one script: text of a record that got out of its place would still do nothing
    code = re.search(r'<script id="code">(.*?)</script>', template, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    parts = {"HASH": f"sha256-{digest}", "TITLE": f"A packed row of stage {config.stage}", "EXAMPLES": "\n".join(examples),
             "NUMBERS": "".join(f"<div><dt>{name}</dt><dd>{value}</dd><dd>{note}</dd></div>" for name, value, note in numbers),
             "DATA": json.dumps(facts(row, batch, tokenizer, config, counts, size), separators=(",", ":")).replace("<", "\\u003c")}
    return re.sub(r"<!--([A-Z]+)-->", lambda m: parts[m[1]], template)       # once: what was put in is not read again


# ---------------------------------------------------------------------------------------------------------------
# the command


def step_after(loader, skipped):
    """The step that a loader plans after `skipped` others."""
    for _ in range(skipped):
        loader.next_step()
    return loader.next_step()


def taken(loader, step, row):
    """Row number `row`, in plan order, of a step, as it is trained on -> its data.Example and their records."""
    planned = step.packs
    if row >= len(planned):
        raise train.UserError(f"--row {row}: the step has rows 0 to {len(planned) - 1}")
    return ([loaders.encode(loader.setup, e, None, loader.known_bad.get(e[0], "")) for e in planned[row]],
            [loaders.record_of(loader.setup, e[0])[0] for e in planned[row]])


def plan(args, config, tokenizer, number):
    """The row of that number as training plans it, steps of one row -> its data.Example and their records."""
    sources, rates, _ = train.open_sources(args, config)
    config = replace(config, batch=1, micro_batch=1, steps=number + 1)
    loader = loaders.Loader(sources, rates, tokenizer, config, plan=args.plan)
    return taken(loader, step_after(loader, number), 0)


def replay(run, step, row):
    """A row of a step of a run -> its data.Example and records, tokenizer, config. What that run found bad is blank here too."""
    run = Path(run)
    try:
        head = json.loads((run / "config.json").read_text())
        args, config = argparse.Namespace(**head["command"]), train.config_from_json(head["config"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise train.UserError(f"--run {run}: no run directory: {e!r}") from None
    if not 1 <= step <= config.steps:
        raise train.UserError(f"--step {step}: the run has steps 1 to {config.steps}")
    if (run / "model" / "tokenizer.json").is_file():
        tokenizer = text.load_tokenizer(run / "model", config.model.n_vocab)
    else:
        tokenizer, _ = train.open_tokenizer(args, config)
    sources, rates, _ = train.open_sources(args, config)
    loader = loaders.Loader(sources, rates, tokenizer, config, plan=args.plan)
    loader.known_bad = {bad["draw"]: bad["reason"] for bad in read_skips(run)}
    planned = step_after(loader, step - 1)
    told = [line["ids"] for line in read_log(run / "log.jsonl") if line.get("step") == step and "ids" in line]
    if told and told[-1] != train.digest(planned):
        raise train.UserError(f"--run {run}: step {step} had other records; the data, or the code that draws them, has changed since")
    return *taken(loader, planned, row), tokenizer, config


def main(argv=None):
    parser = train.Parser(prog="python -m tools.view", description=__doc__.split("\n\n")[0], allow_abbrev=False,
                          epilog="Any field of the config can be set as --a.b=value, as for train.py.")
    parser.add_argument("file", nargs="?", metavar="FILE", help="records (.jsonl), as train.py --data takes them; none: the toy world")
    parser.add_argument("--stage", help="recipe from stages/: 1, 2 or 3")
    parser.add_argument("--run", metavar="DIR", help="instead of records: a run directory of train.py")
    parser.add_argument("--step", type=int, metavar="N", help="with --run: the step whose rows to look at")
    parser.add_argument("--tiny", action="store_true", help="the toy's settings")
    parser.add_argument("--media", metavar="DIR", help="where the paths in the records start")
    parser.add_argument("--init", metavar="DIR", help="take shape and tokenizer of this model (default: the preset's, and bytes)")
    parser.add_argument("--preset", help="model shape (default: 4b, with --tiny toy)")
    parser.add_argument("--seed", help="of the run (default 0)")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="which row of the plan, or of the step (default 0, the first)")
    parser.add_argument("--out", required=True, metavar="HTML", help="the page to write")
    try:
        own, rest = parser.parse_known_intermixed_args(argv)
        if own.row < 0:
            raise train.UserError(f"--row {own.row}: must be at least 0")
        out = Path(own.out)
        if out.is_dir() or not out.parent.is_dir():
            raise train.UserError(f"--out {out}: name a file in a folder that exists")
        if (own.run is None) == (own.stage is None) or (own.run is None) != (own.step is None) or (own.run and (own.file or rest)):
            raise train.UserError("name records and --stage N, or --run DIR and --step N")
        if own.run:
            rows, records, tokenizer, config = replay(own.run, own.step, own.row)
        else:
            flags = {"stage": own.stage, "data": own.file, "media": own.media, "preset": own.preset, "seed": own.seed, "init": own.init}
            given = [word for name, value in flags.items() if value is not None for word in (f"--{name}", value)]
            args, config = train.parse([*given, *["--tiny"] * own.tiny, *rest])
            tokenizer, config = train.open_tokenizer(args, config)
            rows, records = plan(args, config, tokenizer, own.row)
        batch = packing.collate([rows], config.data.max_tokens, config.data.vision)
        out.write_text(page(rows, batch, records, tokenizer, config), encoding="utf-8")
    except (train.UserError, data.Unreadable, OSError, ValueError) as e:
        print(f"tools.view: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{out}: row {own.row}, {len(rows)} examples, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
