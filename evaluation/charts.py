"""Draws line charts with Pillow: losses on a logarithmic axis, scores from 0 to 1."""

import math
from itertools import chain

from PIL import Image, ImageDraw, ImageFont

INK = (40, 38, 36)
SOFT = (120, 116, 110)
PALE = (215, 212, 206)
# Colour-blind readers can distinguish the first seven colours (Okabe and Ito).
COLOURS = (
    INK, (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0),
    (86, 180, 233), (90, 70, 60), (120, 60, 160), (150, 140, 0), (0, 90, 80),
)
WIDTH = 1440  # size of the image in pixels
HEIGHT = 720
LEFT = 90  # edges of the plot in pixels
RIGHT = 1000
TOP = 50
BOTTOM = 640


def round_steps(high):
    """About five round numbers from 0 to `high`. `high` must be above 0."""
    power = 10.0 ** math.floor(math.log10(high / 4))
    step = next(m * power for m in (1, 2, 5, 10) if 5 * m * power >= high)
    return [k * step for k in range(int(high / step + 1e-9) + 1)]


def powers_of_ten(low, high):
    """[10^a, 10^(a+1), .., 10^b], at least two numbers; low and high lie between them."""
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high)), first + 1)
    return [10.0**k for k in range(first, last + 1)]


def finite(points, log):
    """The points that can be drawn. y must be finite, and above 0 on a logarithmic axis."""
    points = [(x, y) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y)]
    return [(x, y) for x, y in points if y > 0 or not log]


def spread(heights, least=30):
    """Moves labels apart: ascending heights -> heights `least` or more apart, up to BOTTOM."""
    free = []
    for y in heights:
        free.append(max(y, free[-1] + least) if free else y)
    below = BOTTOM
    for k in reversed(range(len(free))):
        free[k] = min(free[k], below)
        below = free[k] - least
    return free


def shorten(text, font):
    """The text, with ".." in place of its middle if it is too wide for the right edge. A label
    contains the name of a file, and ends with a number."""
    short = text
    half = len(text) // 2
    while font.getlength(short) > WIDTH - RIGHT - 32:
        half -= 1
        short = f"{text[:half]}..{text[-half:]}"
    return short


def line_chart(series, path, xlabel, ylabel, log=False, pale=()):
    """Draws {name: [(x, y), ..]} into the PNG file `path`. The x axis starts at 0.

    With log, the y axis is logarithmic. Without log, it goes from 0 to 1, and points are dots.
    pale: [(x, y), ..] of a pale line under the others. Without points, no file is written.
    """
    series = {name: finite(points, log) for name, points in series.items()}
    series = {name: points for name, points in series.items() if points}
    pale = finite(pale, log)
    points = list(chain(pale, *series.values()))
    if not points:
        return
    x_high = max(x for x, _ in points)
    heights = [y for _, y in points]
    x_ticks = round_steps(max(x_high, 1e-9))
    y_ticks = powers_of_ten(min(heights), max(heights)) if log else [k / 5 for k in range(6)]
    x_high = max(x_high, x_ticks[-1])

    def place(x, y):
        """-> (left, top) in pixels of the large image. It has twice the final size."""
        share = math.log(y / y_ticks[0], y_ticks[-1] / y_ticks[0]) if log else y
        left = LEFT + (RIGHT - LEFT) * x / x_high
        return 2 * left, 2 * (BOTTOM - (BOTTOM - TOP) * share)

    image = Image.new("RGB", (2 * WIDTH, 2 * HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    for y in y_ticks:
        pen.line([place(0, y), place(x_high, y)], PALE, 2)
    pen.line([place(*point) for point in pale], PALE, 3)
    colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(series)}
    for name in reversed(series):  # the first line is drawn last, on top of the others
        places = [place(*point) for point in series[name]]
        pen.line(places, colours[name], 8, joint="curve")
        for x, y in places if not log or len(places) == 1 else ():
            pen.ellipse([x - 12, y - 12, x + 12, y + 12], colours[name])
    image = image.reduce(2)

    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(24)
    for y in y_ticks:
        pen.text((LEFT - 12, place(0, y)[1] / 2), f"{y:g}", SOFT, font, "rm")
    for x in x_ticks:
        pen.text((place(x, y_ticks[0])[0] / 2, BOTTOM + 12), f"{x:,g}", SOFT, font, "ma")
    pen.text(((LEFT + RIGHT) / 2, HEIGHT - 6), xlabel, INK, font, "md")
    pen.text((8, 8), ylabel, INK, font, "la")
    ends = {name: place(*points[-1])[1] / 2 for name, points in series.items()}
    names = sorted(ends, key=ends.get)
    for name, y in zip(names, spread([ends[name] for name in names]), strict=True):
        pen.text((RIGHT + 16, y), shorten(name, font), colours[name], font, "lm")
    image.save(path)
