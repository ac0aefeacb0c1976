"""Line charts and error bars, drawn with Pillow alone.

in    series {name: [(x, y), ..]}
out   PIL images or PNG files of twice the stated size in pixels, so that text is sharp

Every line is labelled at its end, in its own colour; labels that would overlap are moved apart. Of
more than seven lines the first seven have colours, the others are grey and labelled together.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

INK, SOFT, GRID = (40, 38, 36), (120, 116, 110), (228, 226, 221)
# colours of Okabe and Ito, which colour-blind readers can tell apart, without yellow: pale on
# white
COLOURS = (
    (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233),
    (90, 70, 60),
)
OTHERS = (185, 182, 176)
SCALE = 2                                # pixels per unit of size
OVERSAMPLING = 2                         # lines are drawn larger and reduced: Pillow's are jagged
PEN = SCALE * OVERSAMPLING               # pixels per unit of size while lines are drawn
TEXT, LINE_HEIGHT = 12, 15               # of letters, of a line of text: units of size
ROW_HEIGHT = 26                          # of a bar


@dataclass
class Axis:
    """One side of a chart: values from low to high, drawn from `start` to `stop` (in units of
    size)."""
    low: float
    high: float
    ticks: list
    labels: list                         # of the ticks
    start: float
    stop: float
    log: bool = False

    def place(self, value):
        """A value -> where it is drawn."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (self.stop - self.start) * (value - low) / (high - low)


def log_axis(values, start, stop):
    """Positive values -> Axis with ticks at powers of ten, and at 2 and 5 times these if they are
    few."""
    low, high = min(values), max(values)
    first = math.floor(math.log10(low) + 1e-9)
    last = math.ceil(math.log10(high) - 1e-9)
    factors = (1,) if last - first > 3 else (1, 2, 5)
    ticks = []
    for exponent in range(first, last + 1):
        ticks += [factor * 10.0**exponent for factor in factors]
    below = [k for k, tick in enumerate(ticks) if tick <= low * (1 + 1e-9)]
    above = [k for k, tick in enumerate(ticks) if tick >= high * (1 - 1e-9)]
    first = max(below, default=0)
    last = max(min(above, default=len(ticks) - 1), first + 1)
    ticks = ticks[first : last + 1]
    labels = []
    for tick in ticks:
        short = f"{tick:.0e}".replace("e-0", "e-").replace("e+0", "e")
        labels.append(short if tick < 0.001 or tick > 9999 else f"{tick:g}")
    return Axis(ticks[0], ticks[-1], ticks, labels, start, stop, log=True)


def linear_axis(values, start, stop, limits=None, n_ticks=6):
    """Values -> Axis with about n_ticks round ticks, at both ends too.

    It begins at 0 where that costs less than half of it, so that heights can be compared. limits:
    (low, high) of the axis in place of those of the values; then its ends need not be ticks.
    """
    low, high = limits or (min(values), max(values))
    if not limits and 0 <= low < high / 2:
        low = 0
    if high - low <= 1e-12 * max(abs(high), abs(low)):                   # all values are equal
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    rough = (high - low) / n_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [k * step for k in range(first, last + 1)]
    if limits:
        ticks = [t for t in ticks if low - step / 1e6 <= t <= high + step / 1e6]
    else:
        low, high = ticks[0], ticks[-1]
    decimals = -math.floor(math.log10(step) + 1e-9)
    if abs(step / power - 2.5) < 1e-6:
        decimals += 1
    labels = [f"{t:,.{max(0, decimals)}f}" if abs(t) >= step / 2 else "0" for t in ticks]
    return Axis(low, high, ticks, labels, start, stop)


@cache
def font():
    return ImageFont.load_default(TEXT * SCALE)


def text_width(text):
    """In units of size."""
    return font().getlength(text) / SCALE


def write(image, x, y, text, colour, anchor):
    """Text at a place in units of size; the two letters of `anchor` are Pillow's."""
    place = x * SCALE, y * SCALE
    ImageDraw.Draw(image).text(place, text, fill=colour, font=font(), anchor=anchor)


def shorten(name, width):
    """A name that fits `width`, without its middle where it is too long: names of sources are
    paths, and differ at both ends."""
    kept = len(name)
    short = name
    while kept > 2 and font().getlength(short) > width * SCALE:
        kept -= 1
        short = name[: kept // 2] + ".." + name[len(name) - (kept - kept // 2) :]
    return short


def spread(wanted, gap, low, high):
    """Heights close to the wanted ones and in their order, at least `gap` apart, from low to high
    if they fit there."""
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    heights = [0.0] * len(wanted)
    previous = low - gap
    for k in order:
        previous = max(wanted[k], previous + gap)
        heights[k] = previous
    following = max(high, low + gap * (len(wanted) - 1)) + gap
    for k in reversed(order):
        following = min(heights[k], following - gap)
        heights[k] = following
    return heights


# -------------------------------------------------------------------------------------------------
# line charts


@dataclass(frozen=True)
class LineChart:
    """Everything that is drawn, after points that cannot be drawn were left out."""
    series: dict
    faint: tuple                         # names of series drawn thin and pale, without a label
    dots: bool
    colours: dict                        # of the others
    labels: dict                         # {name: text at the end of its line}
    x: Axis
    y: Axis
    size: tuple


def drawable(points, log):
    """Points whose values are finite, and above 0 on a log axis."""
    points = [(x, y) for x, y in points if x is not None and y is not None]
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return [(x, y) for x, y in points if y > 0 or not log]


def line_chart(
    series, xlabel, size=(720, 360), log=False, ylabel="", ylimits=None, dots=False, faint=(),
    colours=None,
):
    """{name: [(x, y), ..]} -> PIL image with axes; None where there is not one point.

    Points that are not finite, or not above 0 on a log axis, are left out. ylimits: (low, high).
    faint: names of series drawn thin and pale, without a label. colours: {name: colour} of some
    series.
    """
    series = {name: drawable(points, log) for name, points in series.items()}
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    width, height = size
    clear = [name for name in series if name not in faint]
    palette = dict.fromkeys(clear, OTHERS) | dict(zip(clear, COLOURS, strict=False))
    palette |= colours or {}
    labels = {name: shorten(str(name), width / 3) for name in clear if palette[name] != OTHERS}
    others = [name for name in clear if palette[name] == OTHERS]
    if others:
        labels[others[0]] = f"{len(others)} other{'s' if len(others) > 1 else ''}"

    xs, ys = [], []
    for points in series.values():
        xs += [x for x, _ in points]
        ys += [y for _, y in points]
    right = width - 20 - max((text_width(label) for label in labels.values()), default=0)
    bottom = height - 40
    top = 12 + (LINE_HEIGHT if ylabel else 0)
    y = log_axis(ys, bottom, top) if log else linear_axis(ys, bottom, top, ylimits)
    left = 14 + max(text_width(label) for label in y.labels)
    x = x_axis(xs, left, right)

    chart = LineChart(series, faint, dots, palette, labels, x, y, size)
    ends = [y.place(series[name][-1][1]) for name in labels]
    heights = spread(ends, LINE_HEIGHT, y.stop, y.start)
    label_heights = dict(zip(labels, heights, strict=True))
    image = draw_plot(chart, label_heights)
    draw_text(image, chart, label_heights, xlabel, ylabel)
    return image


def x_axis(values, left, right):
    """The horizontal axis ends where the values end, and begins at 0 unless they are all far from
    it."""
    limits = None
    if min(values) < max(values):
        far = min(values) > max(values) / 2
        limits = (min(values) if far else min(0, *values), max(values))
    n_ticks = max(2, round((right - left) / 80))
    return linear_axis(values, left, right, limits, n_ticks)


def draw_plot(chart, label_heights):
    """Grid, lines, and the connections from lines to their labels -> PIL image."""
    x, y = chart.x, chart.y
    k = PEN
    canvas = Image.new("RGB", (chart.size[0] * k, chart.size[1] * k), "white")
    pen = ImageDraw.Draw(canvas)
    for tick in y.ticks:
        height = y.place(tick) * k
        pen.line([(x.start * k, height), (x.stop * k, height)], fill=GRID, width=k)
    for tick in x.ticks:
        place = x.place(tick) * k
        pen.line([(place, y.start * k), (place, (y.start + 4) * k)], fill=SOFT, width=k)
    pen.line([(x.start * k, y.start * k), (x.stop * k, y.start * k)], fill=SOFT, width=k)

    pale = [name for name in chart.series if name in chart.faint]
    clear = [name for name in chart.series if name not in chart.faint]
    others = [name for name in clear if chart.colours[name] == OTHERS]
    coloured = [name for name in clear if name not in others]
    for name in [*pale, *others, *reversed(coloured)]:       # the first series is drawn on top
        draw_line(pen, chart, name)
    for name, height in label_heights.items():
        last_x, last_y = chart.series[name][-1]
        end, end_height = x.place(last_x), y.place(last_y)
        if abs(height - end_height) > 2 or x.stop - end > 2:
            line = [(end * k, end_height * k), ((x.stop + 6) * k, height * k)]
            pen.line(line, fill=chart.colours[name], width=k // 2)
    return canvas.reduce(OVERSAMPLING)


def draw_line(pen, chart, name):
    """One series as a line; with dots if the chart has them, or if it is a single point."""
    pale = name in chart.faint
    colour = chart.colours.get(name, COLOURS[0])
    if pale:
        colour = tuple(round(255 - (255 - c) * 0.35) for c in colour)
    places = [(chart.x.place(x) * PEN, chart.y.place(y) * PEN) for x, y in chart.series[name]]
    if len(places) > 1:
        width, joint = (PEN, None) if pale else (2 * PEN, "curve")
        pen.line(places, fill=colour, width=width, joint=joint)
    if chart.dots or len(places) == 1:
        r = (1.5 if pale else 3) * PEN
        for x, y in places:
            pen.ellipse([x - r, y - r, x + r, y + r], fill=colour)


def draw_text(image, chart, label_heights, xlabel, ylabel):
    """Tick labels, names of axes, labels of lines, drawn into the image."""
    x, y = chart.x, chart.y
    width, height = chart.size
    for tick, label in zip(y.ticks, y.labels, strict=True):
        write(image, x.start - 6, y.place(tick), label, SOFT, "rm")
    for tick, label in zip(x.ticks, x.labels, strict=True):
        half = text_width(label) / 2
        write(image, min(max(x.place(tick), half), width - half), y.start + 7, label, SOFT, "ma")
    write(image, (x.start + x.stop) / 2, height - 4, xlabel, INK, "md")
    write(image, 4, 4, ylabel, INK, "la")
    for name, label_height in label_heights.items():
        colour = chart.colours[name] if chart.colours[name] != OTHERS else SOFT
        write(image, x.stop + 9, label_height, chart.labels[name], colour, "lm")


def save_line_chart(series, path, xlabel, **options):
    """line_chart as a PNG file; no file where there is not one point."""
    image = line_chart(series, xlabel, **options)
    if image:
        image.save(path)


# -------------------------------------------------------------------------------------------------
# error bars


class Bar(NamedTuple):
    label: str
    mean: float
    low: float
    high: float


def save_bars(rows, path, xlabel="", baseline=None, width=720):
    """[(label, mean, low, high), ..] -> a PNG file with a row each: a dot, its error bar, the
    numbers.

    baseline: a value to compare with, drawn through all rows. The axis need not begin at 0,
    because only differences matter here.
    """
    rows = [Bar(*row) for row in rows]
    assert rows and all(row.low <= row.mean <= row.high for row in rows), rows
    values = [value for row in rows for value in row[1:]]
    if baseline is not None:
        values.append(baseline)
    extent = max(values) - min(values)
    # two digits of the differences
    decimals = max(0, 1 - math.floor(math.log10(extent))) if extent > 0 else 3
    labels = [shorten(row.label, width / 3) for row in rows]
    numbers = [f"{row.mean:.{decimals}f}  ({row.low:.{decimals}f} to {row.high:.{decimals}f})"
               for row in rows]
    left = 20 + max(text_width(label) for label in labels)
    right = width - 24 - max(text_width(text) for text in numbers)
    x = linear_axis([min(values) - extent / 20, max(values) + extent / 20], left, right, n_ticks=5)
    image = draw_bars(rows, x, baseline, width)
    bottom = 12 + ROW_HEIGHT * len(rows)

    for n, (label, text) in enumerate(zip(labels, numbers, strict=True)):
        middle = 12 + ROW_HEIGHT * (n + 0.5)
        write(image, left - 12, middle, label, INK, "rm")
        write(image, width - 8, middle, text, SOFT, "rm")
    for tick, label in zip(x.ticks, x.labels, strict=True):
        write(image, x.place(tick), bottom + 5, label, SOFT, "ma")
    write(image, (left + right) / 2, bottom + 40, xlabel, INK, "md")
    image.save(path)


def draw_bars(rows, x, baseline, width):
    """Grid, baseline, dots and error bars of save_bars -> PIL image."""
    k = PEN
    top, bottom = 12, 12 + ROW_HEIGHT * len(rows)
    canvas = Image.new("RGB", (width * k, (bottom + 44) * k), "white")
    pen = ImageDraw.Draw(canvas)

    def vertical(value, colour, line_width):
        place = x.place(value) * k
        pen.line([(place, top * k), (place, bottom * k)], fill=colour, width=line_width)

    for tick in x.ticks:
        vertical(tick, GRID, k)
    if baseline is not None:
        vertical(baseline, COLOURS[1], 2 * k)
    for n, row in enumerate(rows):
        y = (top + ROW_HEIGHT * (n + 0.5)) * k
        low, mean, high = x.place(row.low) * k, x.place(row.mean) * k, x.place(row.high) * k
        pen.line([(low, y), (high, y)], fill=COLOURS[0], width=2 * k)
        for end in (low, high):
            pen.line([(end, y - 5 * k), (end, y + 5 * k)], fill=COLOURS[0], width=2 * k)
        r = 5 * k
        pen.ellipse([mean - r, y - r, mean + r, y + r], fill=COLOURS[0])
    return canvas.reduce(OVERSAMPLING)
