"""Pictures of packing.Planner at work: the pool, and rows as boxes of tokens and crops.

An example is a rectangle, as wide as its tokens and as high as its crops. In a box, each stands
where the one before it ends in both directions: the row is full where the staircase meets a side.
"""

import io
from dataclasses import dataclass

from PIL import Image

from evaluation.charts import GRID, INK, SOFT
from packing import Planner
from tools.walk.drawing import COLOURS, EMPTY, WIDTH, Canvas, tint
from tools.walk.examples import MAX_CROPS, POOL, ROW, STREAM

HUES = [COLOURS["video: trunk"], COLOURS["photo: trunk"], COLOURS["text"], (0, 158, 115),
        (230, 159, 0), (213, 94, 0), (204, 121, 167), (150, 120, 80), (140, 140, 60),
        (90, 150, 150), (170, 90, 90)]
SECONDS = 1.2                        # of a frame of the animation


@dataclass
class Pack:
    """One row as it was planned."""
    pool: list                       # of packing.Item, when the row was begun
    chosen: list                     # of packing.Item, the anchor first
    n: int                           # how many rows had been made before


def plan(sizes=STREAM, tokens=ROW, crops=MAX_CROPS, pool_size=POOL):
    """-> [Pack, ..] of packing.Planner over a stream of (tokens, crops)."""
    planner, packs = Planner(sizes, tokens, crops, pool_size), []
    planner.fill_pool()
    while planner.pool:
        pool = list(planner.pool)
        next(planner)
        packs.append(Pack(pool, planner.last, len(packs)))
        planner.fill_pool()
    return packs


def name(item):
    return chr(ord("A") + item.index)


def draw_box(canvas, x, y, width, height, items):
    """The box of a row with these items as a staircase; x, y its lower left corner."""
    per_token, per_crop = width / ROW, height / MAX_CROPS
    canvas.box(x, y - height, width, height, EMPTY)
    for crop in range(1, MAX_CROPS):
        canvas.line([(x, y - crop * per_crop), (x + width, y - crop * per_crop)], GRID)
    tokens = crops = 0
    for item in items:
        left, bottom = round(x + tokens * per_token), round(y - crops * per_crop)
        wide = round(x + (tokens + item.tokens) * per_token) - left
        high = max(bottom - round(y - (crops + item.crops) * per_crop), 3)    # text has no crop
        canvas.box(left, bottom - high, wide, high, tint(HUES[item.index], 0.75))
        place = bottom - high / 2 if high > 12 else bottom - high - 8
        canvas.text(left + wide / 2, place, name(item), anchor="mm", size=13)
        tokens += item.tokens
        crops += item.crops
    canvas.box(x, y - height, width, height, None, INK, 1)


def rows_picture(packs):
    """All rows that were planned, side by side, with what they hold."""
    columns, width, height = 3, 220, 110
    lines = -(-len(packs) // columns)
    canvas = Canvas(WIDTH, lines * (height + 64))
    for pack in packs:
        line, column = divmod(pack.n, columns)
        x, y = 10 + column * (width + 30), line * (height + 64)
        tokens, crops = (sum(item[k] for item in pack.chosen) for k in (1, 2))
        canvas.text(x, y, f"row {pack.n + 1}: {', '.join(map(name, pack.chosen))}")
        draw_box(canvas, x, y + 20 + height, width, height, pack.chosen)
        canvas.text(x, y + 24 + height, f"{tokens} of {ROW} tokens", SOFT)
        canvas.text(x + width, y + 24 + height, f"{crops} of {MAX_CROPS} crops", SOFT, "ra")
    return canvas.image


def draw_pool(canvas, pack, shown):
    """The list of the examples that wait, on the left: a bar as wide as the tokens."""
    canvas.text(10, 34, "the pool: waiting examples", SOFT)
    for line, item in enumerate(pack.pool):
        y = 60 + 42 * line
        taken = item in shown
        canvas.text(10, y + 10, name(item), SOFT if taken else INK, "lm", 14)
        fill = EMPTY if taken else tint(HUES[item.index], 0.75)
        canvas.box(30, y, round(2.4 * item.tokens), 20, fill)
        crops = "crop" if item.crops == 1 else "crops"
        words = f"{item.tokens} tokens, {item.crops} {crops}"
        if taken:
            words += ": in the row"
        elif pack.n > item.arrived:
            waited = pack.n - item.arrived
            words += f", has waited for {waited} row{'s' * (waited > 1)}"
        canvas.text(30, y + 29, words, SOFT, "lm", 11)


def frame(pack, n_shown):
    """One frame of the animation: the pool, and the row with the first n_shown of its examples."""
    canvas = Canvas(WIDTH, 330)
    shown = pack.chosen[:n_shown]
    tokens, crops = (sum(item[k] for item in shown) for k in (1, 2))
    canvas.text(10, 6, f"row {pack.n + 1}", size=16)
    draw_pool(canvas, pack, shown)
    draw_box(canvas, 320, 290, 420, 220, shown)
    canvas.text(320, 50, f"{crops} of {MAX_CROPS} crops, upwards", SOFT)
    canvas.text(740, 296, f"{tokens} of {ROW} tokens, to the right", SOFT, "ra")
    words = ["the box of the row is empty", "the anchor: the largest example that waits",
             "the others: the subset that fills the rest best"][min(n_shown, 2)]
    canvas.text(320, 10, words, size=13)
    return canvas.image


class Animation:
    """Frames of one size as a GIF that repeats; Jupyter shows it too."""

    def __init__(self, frames, seconds=SECONDS):
        self.frames = frames
        self.seconds = seconds

    def data(self):
        """-> the bytes of the GIF. One palette for all frames, so that colours do not flicker."""
        width, height = self.frames[0].size
        everything = Image.new("RGB", (width // 4, height // 4 * len(self.frames)))
        for k, image in enumerate(self.frames):
            small = image.resize((width // 4, height // 4), Image.Resampling.NEAREST)
            everything.paste(small, (0, k * (height // 4)))
        palette = everything.quantize(128)
        frames = [image.quantize(palette=palette, dither=0) for image in self.frames]
        file = io.BytesIO()
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], loop=0,
                       duration=round(1000 * self.seconds))
        return file.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/gif": self.data()}


def animation(packs):
    """All rows being packed, one example after the other."""
    frames = [frame(pack, shown) for pack in packs for shown in range(len(pack.chosen) + 1)]
    return Animation(frames)
