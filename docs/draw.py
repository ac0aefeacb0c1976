"""Draws the diagrams of README.md and docs/walk as SVG, from the project's own functions.

    python -m docs.draw            # a test compares its output with the committed files

A diagram is 360 units wide and its text is 12 units high, so that it is readable on a phone. Each
kind of part (prefix, caption, ..) has the same colour in all diagrams. Dark text is readable on
these colours. The other colours follow the light or dark mode of the reader. All colours are in the
template, docs/diagram.svg. docs/photos.py draws predictions of trained models.
"""

from itertools import groupby
from pathlib import Path

import attention
import packing
from docs.svg import box, cells, line, page, write
from docs.visual import crops, frames
from docs.whole import kind_of, kinds_of, row, whole
from tools.walk import examples, experiments

DOCS = Path(__file__).parent
SHORT = {"im_patch": "I", "frame_start": "[fr", "frame_end": "]", "<|im_start|>": "<s>",
         "<|im_end|>": "</s>", "assistant": "asst", "": "\\n", '<points coords="': "<points",
         "</points>": "</points"}
STREAM = [(52, 2), (36, 2), (16, 0), (32, 2), (32, 3), (68, 2), (48, 2), (28, 2), (64, 3),
          (28, 1), (64, 0)]  # (tokens, crops) of the examples A to K
CHANGES = {23: "a word of the caption", 44: "a word of the question",
           14: "the marker that ends the second frame"}


def name_tokens(ids):
    """Token ids -> short names, such as I for an image patch and <s> for <|im_start|>."""
    tokenizer = examples.TOKENIZER
    names = {number: name for name, number in tokenizer.special.items()}
    names |= {tokenizer.chat_start: "<|im_start|>", tokenizer.chat_end: "<|im_end|>"}
    texts = [names.get(token) or tokenizer.decode([token]).strip() for token in ids]
    return [SHORT.get(text, text) for text in texts]


def tree():
    video = row()[0][0]
    names = name_tokens(video.tokens.tolist())
    out = [write(8, 262, "The number below\na token is pos.\n\nA frame around\nit: bidir is 1.\n"
                 "Else bidir is 0.", "soft")]
    y = 22
    for part in examples.find_parts([video]):
        is_prefix = kind_of(part) == "prefix"
        x, columns, cell = (8, 3, 40) if is_prefix else (158, 4, 49)
        (until,) = set(video.visible_until[part.start : part.stop].tolist())
        out += [write(x, y, kind_of(part), "title"),
                write(x, y + 15, f"visible_until {until}", "soft")]
        for t in range(part.start, part.stop):
            down, right = divmod(t - part.start, columns)
            left = x + right * cell
            top = y + 24 + 36 * down
            out += [box(left, top, cell - 3, 18, kind_of(part)),
                    write(left + cell / 2 - 1.5, top + 13, names[t], "on", "middle"),
                    write(left + cell / 2 - 1.5, top + 30, str(video.pos[t]), "soft", "middle")]
            if video.bidir[t]:
                out.append(box(left + 1, top + 1, cell - 5, 16, "frame"))
        if not is_prefix:
            out.append(line("arrow", (125, 199), (140, 199), (140, y + 33), (155, y + 33)))
            y += 76 + 36 * down
    return page(y - 8, "The message tree of the video", out)


def squares(name, batch, parts, labels, notes):
    """Draws an attention mask. labels: {name: (start, stop)}. notes: arguments of `write`."""
    n = batch.tokens.shape[1]
    x = 64
    y = 44
    cell = 291 / n
    out = [write(x, 18, f"key: a column for each of the {n} tokens"), write(6, 18, "query:\na row"),
           box(x, y, 291, 291, "empty")]
    for q, allowed in enumerate(attention.allow(batch.visible_until, batch.bidir)[0].tolist()):
        kinds = [kind if a else None for kind, a in zip(kinds_of(parts), allowed, strict=True)]
        out += cells(x, y + q * cell, cell, cell - 0.5, kinds)
    for label, (start, stop) in labels.items():
        middle = (start + stop) / 2 * cell
        above = label if len(label) * 5 < (stop - start) * cell else ""
        out += [write(x + middle, y - 6, above, "", "middle"),
                write(x - 5, y + middle + 4, label, "", "end")]
    return page(346, f"The attention mask of {name}", out + [write(*note) for note in notes])


def mask():
    video = row()[0][0]
    parts = examples.find_parts([video])
    batch = examples.collate([video], tokens=len(video.tokens))
    return squares("the video", batch, parts, {kind_of(p): p[1:] for p in parts}, [
        (106, 108, "visual tokens:\nboth ways", "on halo", "middle"),
        (106, 154, "each branch\nattends to\nthe prefix", "on halo", "middle"),
        (244, 84, "only visual tokens\nattend to later ones", "soft"),
        (156, 299, "no branch attends\nto another branch", "soft")])


def packed_mask():
    _, batch, parts = row()
    of_example = groupby(parts, key=lambda part: part.name.split(":")[0])
    runs = {name: list(run) for name, run in of_example}
    return squares("the packed row", batch, parts,
                   {name: (run[0].start, run[-1].stop) for name, run in runs.items()},
                   [(224, 84, "no example attends\nto another example", "soft"),
                    (76, 299, "padding attends\nto padding", "soft")])


def moved():
    video = row()[0][0]
    parts = examples.find_parts([video])
    x, cell = 8, 6.6
    out = []
    for y, (place, what) in zip((18, 110, 202), CHANGES.items(), strict=True):
        differ = experiments.find_changed_outputs(video, place)
        out.append(write(x, y, f"Changed: {what}", "title"))
        kinds = kinds_of(parts)
        for k, kind in enumerate(kinds):
            out.append(box(x + k * cell, y + 8, cell - 1, 20, kind if k in differ else "empty"))
        out += cells(x, y + 31, cell, 5, kinds)
        out.append(box(x + place * cell - 1, y + 7, cell + 1, 22, "frame"))
        for part in parts:
            middle = x + (part.start + part.stop) / 2 * cell
            out.append(write(middle, y + 48, kind_of(part), "soft", "middle"))
        words = f"{len(differ)} outputs changed: {differ[0]} to {differ[-1]} of 0 to 51"
        out.append(write(x, y + 64, words, "soft"))
    return page(276, "The outputs that differ after one token was changed", out)


def draw_items(x, bottom, items, scale, chosen, stairs):
    """Draws examples side by side. Width: their tokens. Height: their crops."""
    for item in items:
        kind = "old" if item not in chosen else "red" if item == chosen[0] else "blue"
        width = item.tokens * scale
        height = max(item.crops * 9 * scale, 3)  # text has no crops
        inside = height > 12
        yield box(x, bottom - height, width - 1, height - 1, kind)
        yield write(x + width / 2, bottom - height / 2 + 4 if inside else bottom - height - 3,
                    "ABCDEFGHIJK"[item.index], "on" if inside else "", "middle")
        x += width + (0 if stairs else 2)
        bottom -= item.crops * 9 * scale if stairs else 0


def rows():
    planner = packing.Planner(STREAM, examples.ROW, examples.MAX_CROPS, pool_size=6)
    planner.fill_pool()
    scale = 150 / examples.ROW
    y = 34
    out = [write(8, 18, "waiting examples: the pool", "title"),
           write(202, 18, "the packed row", "title")]
    while planner.pool:
        pool = list(planner.pool)
        chosen = next(planner)
        planner.fill_pool()
        tokens = sum(item.tokens for item in chosen)
        crops = sum(item.crops for item in chosen)
        wide = tokens * scale
        free = 60.3 - crops * 9 * scale
        out += [*draw_items(8, y + 46, pool, scale * 0.45, chosen, False),
                line("arrow", (180, y + 30), (198, y + 30)), box(202, y, 150, 60.3, "empty"),
                box(202 + wide, y, 150 - wide, 60.3, "waste"), box(202, y, wide, free, "waste"),
                *draw_items(202, y + 60.3, chosen, scale, chosen, True),
                box(202, y, 150, 60.3, "line"), write(8, y + 76, f"row {planner.n_packs}"),
                write(352, y + 76, f"{tokens} of 112 tokens, {crops} of 5 crops", "soft", "end")]
        y += 96
    out.append(write(8, y, "Width: tokens. Height: crops. Hatched: unused.\n"
                     "Red: the anchor, the largest example of the pool.\n"
                     "Blue: the others that fill the row best.", "soft"))
    return page(y + 38, "Eleven examples are packed into five rows", out)


def shares(title, names, panels):
    """Draws two bars per annotation. panels: [(x, unit, marks, label, values, values), ..]."""
    out = []
    for x, unit, marks, label, *pair in panels:
        pair = [experiments.share_by_part(values, row()[2]) for values in pair]
        for y, part in zip(range(12, 252, 40), pair[0], strict=True):
            out.append(write(8, y + 19, part if x == panels[0][0] else ""))
            for down, kind, name, share in zip((0, 15), ("old", "new"), names, pair, strict=True):
                words = f"{share[part]:.0%} {name if y == 12 else ''}".strip()
                out += [box(x, y + down, share[part] * unit, 13, kind),
                        write(x + share[part] * unit + 3, y + down + 11, words)]
        out += [line("line", (x, 254), (x + marks[-1] * unit, 254)), write(x, 285, label, "soft")]
        for mark in marks:
            out.append(write(x + mark * unit, 270, f"{mark:.0%}", "soft", "middle"))
    return page(292, title, out)


def weights():
    nll, norms = experiments.measure_tokens(row()[1])
    w = row()[1].weights[0].double()
    marks = (0, 0.2, 0.4)
    return shares("The share of each annotation with equal and with released weights",
                  ("equal", "released"),
                  [(110, 210, marks, "share of the loss", nll, nll * w),
                   (238, 210, marks, "share of the gradient", norms, norms * w)])


def step():
    once = row()[1].weights[0].double()
    n = len(row()[0][0].tokens)
    each = once.clone()
    for half in (each[:n], each[n:]):
        half /= half.sum()
    return shares("How much each annotation counts in the update",
                  ("divided in each micro-batch", "divided once"),
                  [(110, 470, (0, 0.1, 0.2, 0.3, 0.4), "share of the update", each, once)])


def heads():
    found = experiments.run_two()
    out = []
    titles = {"outside": "Before attention: all heads, half of the tokens",
              "inside": "Inside attention: half of the heads, all tokens",
              "returned": "After attention: as before"}
    cell = 142 / examples.ROW
    for y, (state, title) in zip((36, 192, 348), titles.items(), strict=True):
        out.append(write(8, y - 20, title, "title"))
        for rank, x in enumerate((54, 208)):
            out.append(write(x, y - 4, f"process {rank}", "soft"))
            for h, held in enumerate(getattr(found[rank], state).T.tolist()):
                of_0 = found[0].outside[:, h].tolist()  # red: its q, k, v come from process 0
                kinds = [("red" if a else "blue") if b else None
                         for a, b in zip(of_0, held, strict=True)]
                top = y + 15 * h
                out += [box(x, top, 142, 14, "empty"), *cells(x, top, cell, 14, kinds)]
                if rank == 0:
                    out.append(write(48, top + 11, f"head {h}", "soft", "end"))
            out += cells(x, y + 62, cell, 5, kinds_of(row()[2]))
    for y, what, sent in ((264, "q, k, v", found[::-1]), (420, "outputs", found)):
        for start, stop in ((74, 74), (150, 250), (250, 150), (330, 330)):
            out.append(line("arrow", (start, y - 156), (stop, y - 116)))
        for x, anchor, rank in ((145, "end", sent[0]), (256, "start", sent[1])):
            which = ", ".join(map(str, rank.inside.any(0).nonzero()[:, 0].tolist()))
            out.append(write(x, y - 144, f"{what}\nheads {which}", "", anchor))
    out.append(write(8, 436, "Red: q, k, v of tokens of process 0. Blue: of process 1.\n"
                     "Below each grid: the parts of tokens 0 to 111.", "soft"))
    return page(460, "The two exchanges of Ulysses", out)


DIAGRAMS = {
    "images/whole.svg": whole, "images/crops.svg": crops,
    "images/frames.svg": frames, "walk/tree.svg": tree, "walk/mask.svg": mask,
    "walk/moved.svg": moved, "walk/rows.svg": rows, "walk/row.svg": packed_mask,
    "walk/weights.svg": weights, "walk/heads.svg": heads, "walk/step.svg": step,
}

if __name__ == "__main__":
    for path, draw in DIAGRAMS.items():
        (DOCS / path).write_text(draw(), encoding="utf-8")
        print(f"docs/{path}")
