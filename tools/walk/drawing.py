"""Pictures of tokens: cells, strips, masks, bars, drawn with Pillow alone.

Lengths are units; a unit is two pixels of the PNG, so that text is sharp. Every run of tokens, a
trunk or a branch (examples.Part), has one colour in all pictures.
"""

from functools import cache

from PIL import Image, ImageDraw, ImageFont

from evaluation.charts import GRID, INK, SOFT

SCALE = 2
WIDTH = 760                          # of most pictures
# the hues of evaluation.charts; the runs of one example share a hue or stand side by side
COLOURS = {
    "video: trunk": (0, 114, 178), "video: caption": (230, 159, 0),
    "video: points": (0, 158, 115), "video: question": (204, 121, 167),
    "photo: trunk": (86, 180, 233), "photo: caption": (213, 94, 0),
    "photo: question": (150, 120, 80), "text": (120, 94, 240), "padding": (200, 198, 193),
}
WHITE = (255, 255, 255)
EMPTY = (240, 239, 235)
RANKS = ((90, 88, 86), (240, 210, 60))                 # no hue of a run of tokens


@cache
def font(size):
    return ImageFont.load_default(size * SCALE)


def tint(colour, part):
    """The colour mixed with white: part 1 is the colour, 0 is white."""
    return tuple(round(255 - (255 - c) * part) for c in colour)


class Canvas:
    """A white picture that is drawn on in units."""

    def __init__(self, width, height):
        self.image = Image.new("RGB", (width * SCALE, height * SCALE), WHITE)
        self.pen = ImageDraw.Draw(self.image)

    def box(self, x, y, width, height, fill=None, outline=None, line=1):
        if width <= 0 or height <= 0:
            return
        corner = (x + width) * SCALE - 1, (y + height) * SCALE - 1
        self.pen.rectangle([(x * SCALE, y * SCALE), corner], fill, outline, line * SCALE)

    def line(self, points, colour=SOFT, width=1):
        self.pen.line([(x * SCALE, y * SCALE) for x, y in points], colour, width * SCALE)

    def text(self, x, y, text, colour=INK, anchor="la", size=12):
        """Text of one line; the two letters of `anchor` are Pillow's."""
        self.pen.text((x * SCALE, y * SCALE), text, colour, font(size), anchor)

    def arrow(self, x0, y0, x1, y1, colour=SOFT):
        """A straight arrow, horizontal or vertical, of 2 units."""
        self.line([(x0, y0), (x1, y1)], colour, 2)
        across, along = (4, 0) if x0 == x1 else (0, 4)
        back = 7 if (x1 - x0) + (y1 - y0) > 0 else -7
        base = (x1, y1 - back) if x0 == x1 else (x1 - back, y1)
        tip = [(x1, y1), (base[0] - across, base[1] - along), (base[0] + across, base[1] + along)]
        self.pen.polygon([(x * SCALE, y * SCALE) for x, y in tip], colour)

    def above(self, y):
        """-> the picture down to y, where its legend ends."""
        return self.image.crop((0, 0, self.image.width, round(y) * SCALE))

    def paste(self, image, x, y, width, height):
        """An image enlarged without smoothing, so that its pixels can be seen."""
        small = image.resize((width * SCALE, height * SCALE), Image.Resampling.NEAREST)
        self.image.paste(small, (x * SCALE, y * SCALE))


def text_width(text, size=12):
    return font(size).getlength(text) / SCALE


def colour_at(parts, place):
    return next(COLOURS[part.name] for part in parts if part.start <= place < part.stop)


def legend(canvas, x, y, entries, size=12):
    """[(colour, text), ..] side by side, in as many lines as WIDTH needs -> the height below it."""
    left = x
    for colour, text in entries:
        needed = 18 + text_width(text, size) + 16
        if left + needed > WIDTH and left > x:
            left = x
            y += 20
        canvas.box(left, y, 12, 12, colour)
        canvas.text(left + 18, y + 6, text, anchor="lm", size=size)
        left += needed
    return y + 20


def parts_legend(canvas, x, y, parts):
    return legend(canvas, x, y, [(COLOURS[part.name], part.name) for part in parts])


def cells(labels, parts, fields, per_line=14):
    """Tokens as coloured cells, with the integers of `fields` {name: (T,)} under each."""
    left = 8 + round(max(text_width(name) for name in ("token", *fields)))
    width = (WIDTH - left) // per_line
    height = 24 + 15 * len(fields)
    n_lines = -(-len(labels) // per_line)
    canvas = Canvas(WIDTH, n_lines * (height + 12) + 50)
    for line in range(n_lines):
        y = line * (height + 12)
        canvas.text(0, y + 12, "token", SOFT, "lm")
        for row, name in enumerate(fields):
            canvas.text(0, y + 32 + 15 * row, name, SOFT, "lm")
    for place, text in enumerate(labels):
        line, column = divmod(place, per_line)
        x, y = left + column * width, line * (height + 12)
        colour = colour_at(parts, place)
        canvas.box(x, y, width - 2, 22, tint(colour, 0.35))
        size = 12 if text_width(text) < width - 4 else 10
        canvas.text(x + (width - 2) / 2, y + 11, text, anchor="mm", size=size)
        for row, values in enumerate(fields.values()):
            value = str(int(values[place]))
            canvas.text(x + (width - 2) / 2, y + 32 + 15 * row, value, SOFT, "mm", 11)
    return canvas.above(parts_legend(canvas, left, n_lines * (height + 12) + 2, parts))


def mask(allowed, parts, labels=None):
    """(T,T) bool: a row for every query, a column for every key, coloured by the run of the key."""
    n = len(allowed)
    left = 60 if labels else 12
    cell = (WIDTH - left) // n
    canvas = Canvas(WIDTH, 22 + n * cell + 60)
    canvas.text(left, 0, "keys: the tokens that are attended to", SOFT)
    for k in range(n):
        colour = colour_at(parts, k)
        canvas.box(left + k * cell, 15, cell, 5, colour)
        canvas.box(left - 6, 22 + k * cell, 5, cell, colour)
        if labels:
            canvas.text(left - 9, 22 + (k + 0.5) * cell, labels[k], INK, "rm", 10)
    canvas.box(left, 22, n * cell, n * cell, EMPTY)
    for q, row in enumerate(allowed.tolist()):
        for k, seen in enumerate(row):
            if seen:
                canvas.box(left + k * cell, 22 + q * cell, cell, cell, WHITE)
                canvas.box(left + k * cell, 22 + q * cell, cell - 0.5, cell - 0.5,
                           tint(colour_at(parts, k), 0.8))
    y = 22 + n * cell + 6
    words = "every line is a query; a coloured square: it may attend to this key"
    canvas.text(left, y, words, SOFT)
    return canvas.above(parts_legend(canvas, left, y + 18, parts))


def moved(strips, parts):
    """{title: (changed place, (T,) bool)}: which outputs differ after one token was changed."""
    n = parts[-1].stop
    cell = WIDTH // n
    canvas = Canvas(WIDTH, 58 * len(strips) + 62)
    for line, (title, (place, differs)) in enumerate(strips.items()):
        y = 58 * line
        canvas.text(0, y, title)
        for k in range(n):
            colour = colour_at(parts, k)
            canvas.box(k * cell, y + 19, cell - 1, 20, tint(colour, 0.9) if differs[k] else EMPTY)
            canvas.box(k * cell, y + 41, cell - 1, 4, colour)
        canvas.box(place * cell - 1, y + 18, cell + 1, 22, None, INK, 2)
    y = legend(canvas, 0, 58 * len(strips), [(EMPTY, "the same output, bit for bit"),
                                             (SOFT, "coloured: another output")])
    return canvas.above(parts_legend(canvas, 0, y, parts))


def bars(rows, parts):
    """{title: (T,) shares that sum to 1}: a bar for every token, all rows on one scale."""
    n = parts[-1].stop
    cell = WIDTH // n
    top, height = 20, 90
    highest = max(float(max(shares)) for shares in rows.values())
    canvas = Canvas(WIDTH, len(rows) * (top + height + 16) + 46)
    for line, (title, shares) in enumerate(rows.items()):
        y = line * (top + height + 16)
        canvas.text(0, y, title)
        for k, share in enumerate(shares):
            tall = round(height * float(share) / highest)
            colour = colour_at(parts, k)
            canvas.box(k * cell, y + top + height - tall, cell - 1, tall, colour)
            canvas.box(k * cell, y + top + height + 2, cell, 3, colour)
        canvas.line([(0, y + top + height), (n * cell, y + top + height)], GRID)
    return canvas.above(parts_legend(canvas, 0, len(rows) * (top + height + 16), parts))


def stacks(rows):
    """{title: {part name: share}}: one bar for every row, divided by the shares."""
    canvas = Canvas(WIDTH, 56 * len(rows) + 50)
    names = []
    for line, (title, shares) in enumerate(rows.items()):
        y = 56 * line
        canvas.text(0, y, title)
        x = 0
        for name, share in shares.items():
            width = round(WIDTH * float(share))
            canvas.box(x, y + 18, width - 1, 26, tint(COLOURS[name], 0.8))
            if width > 36:
                canvas.text(x + width / 2, y + 31, f"{float(share):.0%}", anchor="mm")
            x += width
            names += [name] * (name not in names)
    entries = [(tint(COLOURS[name], 0.8), name) for name in names]
    return canvas.above(legend(canvas, 0, 56 * len(rows), entries))


def holders(panels, parts):
    """{title: (T,H) rank}: which rank holds each head of each token; -1: none."""
    n = parts[-1].stop
    left, cell = 52, (WIDTH - 52) // n
    n_heads = len(next(iter(panels.values()))[0])
    tall = 14
    each = 22 + n_heads * tall + 18
    canvas = Canvas(WIDTH, len(panels) * each + 64)
    for line, (title, ranks) in enumerate(panels.items()):
        y = line * each
        canvas.text(0, y, title)
        for h in range(n_heads):
            canvas.text(left - 6, y + 20 + (h + 0.5) * tall, f"head {h}", SOFT, "rm", 11)
            for k in range(n):
                colour = tint(RANKS[int(ranks[k][h])], 0.75)
                canvas.box(left + k * cell, y + 20 + h * tall, cell - 0.5, tall - 1, colour)
        for k in range(n):
            canvas.box(left + k * cell, y + 22 + n_heads * tall, cell, 4, colour_at(parts, k))
    y = legend(canvas, left, len(panels) * each, [(tint(c, 0.75), f"process {rank}")
                                                  for rank, c in enumerate(RANKS)])
    return canvas.above(parts_legend(canvas, left, y, parts))
