"""Draws all steps from a record to the loss. `row` is the packed row of all diagrams."""

from functools import cache

from docs.svg import box, cells, line, page, write
from tools.walk import examples

BOXES = {  # {name: (the function that makes this object, its content)}
    "record": ("", "frames,\nannotations"),
    "pack": ("packing.Planner", "(tokens, crops)\nof each example"),
    "message tree": ("data.encode", "tokens, weights,\nmask (T,)"),
    "batch": ("packing.collate", "fields (B,T)\nimages (N,P,F)"),
    "model": ("model(batch)", "features (M,C)\nhidden (B,T,C)"),
    "loss": ("Molmo2.nll", "nll, lse (B,T)\nΣ w·nll / Σ w"),
}


@cache
def row():
    """-> the examples, the Batch and the parts of the packed row in docs/walk."""
    encoded = examples.encode()
    return encoded, examples.collate(encoded), examples.find_parts(encoded, examples.ROW)


def kind_of(part):
    return part.name.split(": ")[-1]


def kinds_of(parts):
    return [kind_of(part) for part in parts for _ in range(part.start, part.stop)]


def whole():
    out = []
    for number, (name, (function, shapes)) in enumerate(BOXES.items()):
        down, right = divmod(number, 3)
        x, y = 8 + 118 * right, 40 + 190 * down
        out += [box(x, y, 108, 134, "empty"), write(x + 8, y + 18, name, "title"),
                write(x + 8, y + 112, shapes, "soft"), *draw_inside(name, x + 8, y + 28)]
        if right:
            out += [line("arrow", (x - 58, y - 2), (x - 58, y - 14), (x + 48, y - 14), (x + 48, y)),
                    write(x - 5, y - 19, function, "", "middle")]
    out += [line("arrow", (298, 174), (298, 192), (22, 192), (22, 228)),
            write(180, 187, BOXES["batch"][0], "", "middle"),
            write(8, 382, "B rows, T tokens, N crops, P patches, F pixel values\nof a "
                  "patch, M visual tokens, C width, w loss weights", "soft")]
    return page(406, "From the record to the loss", out)


def draw_inside(name, x, y):
    """Yields the small drawing inside a box of `whole`."""
    parts = row()[2]
    kinds = kinds_of(parts)
    cell = 92 / examples.ROW
    if name == "record":
        for left, square in ((x, x + 2), (x + 48, x + 70)):
            yield from (box(left, y, 44, 44, "grass"), box(square, y + 16, 12, 12, "square"))
        yield from (box(x + 32 * k, y + 50, 28, 12, kind_of(parts[k + 1])) for k in range(3))
    elif name == "message tree":
        yield box(x, y + 22, 34, 12, "prefix")
        for k, part in enumerate(parts[1:4]):
            yield line("line", (x + 34, y + 28), (x + 46, y + 8 + 20 * k))
            yield box(x + 46, y + 2 + 20 * k, 2.5 * (part.stop - part.start), 12, kind_of(part))
    elif name == "pack":  # a rectangle for each example: its tokens across, its crops up
        left = x
        for example in row()[0]:
            width = len(example.tokens) * cell
            n_crops = 0 if example.images is None else len(example.images)
            height = 6 + 16 * n_crops
            yield box(left, y + 62 - height, width - 1, height, "old")
            left += width
    elif name == "batch":
        yield write(x, y + 10, "tokens", "soft")
        yield from cells(x, y + 14, cell, 14, kinds)
        yield write(x, y + 42, "loss weights", "soft")
        yield from bars(x, y + 66, cell, 10)
    elif name == "model":
        for k, text in enumerate(["ViT, pooling", "+ embeddings", "decoder"]):
            yield box(x, y + 22 * k, 92, 18, "paper")
            yield write(x + 46, y + 13 + 22 * k, text, "", "middle")
    else:
        yield write(x, y + 10, "w of each token", "soft")
        yield from bars(x, y + 64, cell, 34)


def bars(x, bottom, cell, scale):
    """Yields a bar for the loss weight of each token of the row."""
    _, batch, parts = row()
    kinds = kinds_of(parts)
    for t, weight in enumerate(batch.weights[0].tolist()):
        kind = kinds[t]
        yield box(x + t * cell, bottom - scale * weight, 2, scale * weight, kind)
