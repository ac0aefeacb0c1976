"""Charts of a run, drawn with Pillow alone: loss by source, learning rates, scores against minutes, an ablation's table.

in    series {name: [(x, y), ..]}, or the lines of a log.jsonl as dicts
out   PNG files of twice the stated size in pixels, so that text is crisp

Every line is named at its end, in its own colour; names that would cover each other are moved apart. Of more than seven lines
the first seven have colours, the others are grey and named together.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

from PIL import Image, ImageDraw, ImageFont

INK, SOFT, GRID = (40, 38, 36), (120, 116, 110), (228, 226, 221)
# Okabe and Ito's, told apart by colour-blind readers; without the yellow, which is too pale on white
COLOURS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233), (90, 70, 60))
OTHERS = (185, 182, 176)
SCALE, FINE = 2, 2                       # pixels per unit of size; lines are drawn finer still and reduced, since Pillow's have steps
TEXT, TALL = 12, 15                      # height of letters and of a line of text


@dataclass
class Axis:
    """One side of a chart: from low to high, with ticks at round numbers, placed from `start` to `stop` (in units of size)."""
    low: float
    high: float
    ticks: list
    names: list
    start: float
    stop: float
    log: bool = False

    def __call__(self, value):
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (self.stop - self.start) * (value - low) / (high - low)


def axis(values, start, stop, log=False, ends=None, most=6):
    """values -> Axis that holds them all, ends at ticks and has `most` of them or few more; ends: (low, high) instead of the values'.

    A linear one begins at 0 where that costs less than half of it, so that heights can be compared.
    """
    low, high = ends or (min(values), max(values))
    if log:
        exponents = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
        within = (1,) if len(exponents) > 4 else (1, 2, 5)
        ticks = [m * 10.0**e for e in exponents for m in within]
        first = max((k for k, t in enumerate(ticks) if t <= low * (1 + 1e-9)), default=0)
        last = min((k for k, t in enumerate(ticks) if t >= high * (1 - 1e-9)), default=len(ticks) - 1)
        ticks = ticks[first : max(last, first + 1) + 1]
        return Axis(ticks[0], ticks[-1], ticks, [f"{t:.0e}".replace("e-0", "e-").replace("e+0", "e") if t < 0.001 or t > 9999 else f"{t:g}"
                                                 for t in ticks], start, stop, True)
    if not ends and 0 <= low < high / 2:
        low = 0
    if high - low <= 1e-12 * max(abs(high), abs(low)):                   # all of them are equal
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    ticks = [k * step for k in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]
    if ends:
        ticks = [t for t in ticks if low - step / 1e6 <= t <= high + step / 1e6]
    else:
        low, high = ticks[0], ticks[-1]
    places = max(0, -math.floor(math.log10(step) + 1e-9) + (abs(step / power - 2.5) < 1e-6))
    return Axis(low, high, ticks, [f"{t:,.{places}f}" if abs(t) >= step / 2 else "0" for t in ticks], start, stop)


def font(size=TEXT):
    return ImageFont.load_default(size * SCALE)


def short(name, width, size=TEXT):
    """A name that fits `width`, its middle left out where it is too long: sources are paths, and differ at both ends."""
    kept = len(name)
    cut = name
    while kept > 2 and font(size).getlength(cut) > width * SCALE:
        kept -= 1
        cut = name[: kept // 2] + ".." + name[len(name) - (kept - kept // 2) :]
    return cut


def apart(wanted, gap, low, high):
    """Heights as near to the wanted ones as may be, in their order, at least `gap` from each other, from low to high if they fit there."""
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    found = [0.0] * len(wanted)
    above = low - gap
    for k in order:
        found[k] = above = max(wanted[k], above + gap)
    below = max(high, low + gap * (len(wanted) - 1)) + gap
    for k in reversed(order):
        found[k] = below = min(found[k], below - gap)
    return found


def chart(series, xlabel, size=(720, 360), log=False, ylabel="", y=None, dots=False, faint=(), colours=None):
    """{name: [(x, y), ..]} -> PIL image with axes; None where there is not a point.

    Points that are not finite, or not above 0 on a log axis, are left out. y: (low, high) of its axis. faint: series drawn thin and
    pale, without a name. colours: {name: colour} for series that have theirs already.
    """
    usable = lambda p: None not in p and all(map(math.isfinite, p)) and (p[1] > 0 or not log)           # noqa: E731
    series = {name: kept for name, points in series.items() if (kept := [p for p in points if usable(p)])}
    if not series:
        return None
    w, h = size
    clear = [name for name in series if name not in faint]
    colour = {name: COLOURS[k] if k < len(COLOURS) else OTHERS for k, name in enumerate(clear)} | (colours or {})
    names = {name: short(str(name), w / 3) for name in clear if colour[name] != OTHERS}
    others = [name for name in clear if colour[name] == OTHERS]
    if others:
        names[others[0]] = f"{len(others)} other{'s' * (len(others) > 1)}"
    ruler = font()
    right = w - 20 - max((ruler.getlength(name) / SCALE for name in names.values()), default=0)
    up = axis([v for points in series.values() for _, v in points], h - 40, 12 + TALL * bool(ylabel), log, y)
    left = 14 + max(ruler.getlength(name) / SCALE for name in up.names)
    xs = [x for points in series.values() for x, _ in points]
    across = axis(xs, left, right, ends=(min(xs) if min(xs) > max(xs) / 2 else min(0, *xs), max(xs)) if min(xs) < max(xs) else None,
                  most=max(2, round((right - left) / 80)))

    big = Image.new("RGB", (w * SCALE * FINE, h * SCALE * FINE), "white")
    pen, k = ImageDraw.Draw(big), SCALE * FINE
    for tick in up.ticks:
        pen.line([(left * k, up(tick) * k), (right * k, up(tick) * k)], fill=GRID, width=k)
    for tick in across.ticks:
        pen.line([(across(tick) * k, up.start * k), (across(tick) * k, (up.start + 4) * k)], fill=SOFT, width=k)
    pen.line([(left * k, up.start * k), (right * k, up.start * k)], fill=SOFT, width=k)
    for name in [*(n for n in series if n in faint), *others, *(n for n in reversed(clear) if n not in others)]:      # the first on top
        pale = name in faint
        fill = colour.get(name, COLOURS[0])
        fill = tuple(round(255 - (255 - c) * 0.35) for c in fill) if pale else fill
        places = [(across(x) * k, up(v) * k) for x, v in series[name]]
        if len(places) > 1:
            pen.line(places, fill=fill, width=k if pale else 2 * k, joint=None if pale else "curve")
        if dots or len(places) == 1:
            r = (1.5 if pale else 3) * k
            for x, v in places:
                pen.ellipse([x - r, v - r, x + r, v + r], fill=fill)
    ends = {name: up(series[name][-1][1]) for name in names}
    heights = dict(zip(names, apart([*ends.values()], TALL, up.stop, up.start), strict=True))
    for name, height in heights.items():                                 # from a line's end to its name
        end = across(series[name][-1][0])
        if abs(height - ends[name]) > 2 or right - end > 2:
            pen.line([(end * k, ends[name] * k), ((right + 6) * k, height * k)], fill=colour[name], width=k // 2)
    picture = big.reduce(FINE)

    pen = ImageDraw.Draw(picture)
    write = lambda x, at, words, fill, anchor: pen.text((x * SCALE, at * SCALE), words, fill=fill, font=ruler, anchor=anchor)      # noqa: E731
    for tick, words in zip(up.ticks, up.names, strict=True):
        write(left - 6, up(tick), words, SOFT, "rm")
    for tick, words in zip(across.ticks, across.names, strict=True):
        half = ruler.getlength(words) / SCALE / 2
        write(min(max(across(tick), half), w - half), up.start + 7, words, SOFT, "ma")
    write((left + right) / 2, h - 4, xlabel, INK, "md")
    write(4, 4, ylabel, INK, "la")
    for name, height in heights.items():
        write(right + 9, height, names[name], colour[name] if colour[name] != OTHERS else SOFT, "lm")
    return picture


def lines(series, path, xlabel, **how):
    """{name: [(x, y), ..]} -> a PNG, as `chart` draws it; no file where there is not a point."""
    picture = chart(series, xlabel, **how)
    if picture:
        picture.save(path)


# ---------------------------------------------------------------------------------------------------------------
# of a run


def steps_of(log):
    """The lines of a log.jsonl -> those of steps, in order; of a step that stands there twice, after a resume, the later."""
    return [line for _, line in sorted({line["step"]: line for line in log if "lr" in line}.items())]


def running_mean(points):
    """[(x, y), ..] -> the mean of each point and its neighbours, a fiftieth of all: a long run is as smooth as a short one, and the line
    does not lag behind where the loss falls quickly."""
    sums, half = [0.0, *accumulate(value for _, value in points)], len(points) // 100
    spans = [(max(k - half, 0), min(k + half + 1, len(points))) for k in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, spans, strict=True)]


def losses(log, path):
    """Loss against steps, on a log axis (so 0 is left out): every step pale, over it the running mean, and that of each source where
    steps have nll_by_source.

    Sources that are in most steps come first; where there are more than the chart has colours, the others are grey."""
    steps, by_source = steps_of(log), {}
    for line in steps:
        for source, value in (line.get("nll_by_source") or {}).items():
            by_source.setdefault(source, []).append((line["step"], value))
    every = [(line["step"], line["loss"]) for line in steps]
    order = [("loss", every), *sorted(by_source.items(), key=lambda item: (-len(item[1]), item[0]))]
    finite = [(name, kept) for name, points in order if (kept := [p for p in points if p[1] is not None and math.isfinite(p[1])])]
    means = {f"{name} {mean[-1][1]:.3f}": mean for name, mean in ((name, running_mean(points)) for name, points in finite)}
    palette = [INK, *COLOURS] + [OTHERS] * len(means)
    lines({**means, "": every}, path, "step", log=True, ylabel="loss: pale every step, dark the running mean", faint=("",),
          colours=dict(zip(means, palette, strict=False)) | {"": INK})


def rates(log, path):
    """Learning rates by group against steps, on a log axis: the ViT's is a small part of the connector's."""
    steps = steps_of(log)
    groups = dict.fromkeys(group for line in steps for group in line["lr"])
    lines({group: [(line["step"], line["lr"].get(group)) for line in steps] for group in groups}, path, "step", log=True,
          ylabel="learning rate")


PROGRESS = ("point_f1", "count_accuracy", "caption_exact", "video_point_f1", "track_f1", "qa_accuracy")


def progress(log, path, begun=0.0, names=PROGRESS):
    """The lines of a log.jsonl -> scores against minutes of training; no file where fewer than two were taken. begun: seconds of
    training before the first line."""
    minutes, series = begun / 60, {name: [] for name in names}
    for line in log:
        minutes += line.get("seconds", 0) / 60 if "loss" in line else 0
        for name in names:
            if name in line.get("eval", {}):
                series[name].append((minutes, line["eval"][name]))
    lines({name: points for name, points in series.items() if len(points) > 1}, path, "minutes", y=(0, 1), dots=True, ylabel="score")


# ---------------------------------------------------------------------------------------------------------------
# of several runs, and of pictures


def bars(rows, path, xlabel="", baseline=None, width=720):
    """[(label, mean, low, high), ..] -> a PNG with a row each: a dot and its error bar, beside the numbers.

    baseline: a value to compare with, drawn through all rows. The axis need not begin at 0: what counts are differences.
    """
    ruler, tall = font(), 26
    values = [v for _, *numbers in rows for v in numbers] + [baseline] * (baseline is not None)
    assert rows and all(low <= mean <= high for _, mean, low, high in rows), rows
    labels = [short(label, width / 3) for label, *_ in rows]
    left = 20 + max(ruler.getlength(label) / SCALE for label in labels)
    spread = max(values) - min(values)
    places = max(0, 1 - math.floor(math.log10(spread))) if spread > 0 else 3         # two digits of what they differ by
    said = [f"{mean:.{places}f}  ({low:.{places}f} to {high:.{places}f})" for _, mean, low, high in rows]
    right = width - 24 - max(ruler.getlength(words) / SCALE for words in said)
    across = axis([min(values) - spread / 20, max(values) + spread / 20], left, right, most=5)
    top, bottom = 12, 12 + tall * len(rows)
    picture = Image.new("RGB", (width * SCALE * FINE, (bottom + 44) * SCALE * FINE), "white")
    pen, k = ImageDraw.Draw(picture), SCALE * FINE
    for tick in across.ticks:
        pen.line([(across(tick) * k, top * k), (across(tick) * k, bottom * k)], fill=GRID, width=k)
    if baseline is not None:
        pen.line([(across(baseline) * k, top * k), (across(baseline) * k, bottom * k)], fill=COLOURS[1], width=2 * k)
    for n, (_, mean, low, high) in enumerate(rows):
        y = (top + tall * (n + 0.5)) * k
        pen.line([(across(low) * k, y), (across(high) * k, y)], fill=COLOURS[0], width=2 * k)
        for end in (low, high):
            pen.line([(across(end) * k, y - 5 * k), (across(end) * k, y + 5 * k)], fill=COLOURS[0], width=2 * k)
        x, r = across(mean) * k, 5 * k
        pen.ellipse([x - r, y - r, x + r, y + r], fill=COLOURS[0])
    picture = picture.reduce(FINE)
    pen = ImageDraw.Draw(picture)
    for n, (label, words) in enumerate(zip(labels, said, strict=True)):
        y = (top + tall * (n + 0.5)) * SCALE
        pen.text(((left - 12) * SCALE, y), label, fill=INK, font=ruler, anchor="rm")
        pen.text(((width - 8) * SCALE, y), words, fill=SOFT, font=ruler, anchor="rm")
    for tick, words in zip(across.ticks, across.names, strict=True):
        pen.text((across(tick) * SCALE, (bottom + 5) * SCALE), words, fill=SOFT, font=ruler, anchor="ma")
    pen.text(((left + right) / 2 * SCALE, (bottom + 40) * SCALE), xlabel, fill=INK, font=ruler, anchor="md")
    picture.save(path)


def sheet(pictures, path, columns=4):
    """Picture files side by side in one PNG, each in a cell of the largest one's size."""
    images = [Image.open(p) for p in pictures]
    if not images:
        return
    w, h = (max(side) for side in zip(*(image.size for image in images), strict=True))
    page = Image.new("RGB", (columns * (w + 4) - 4, -(-len(images) // columns) * (h + 4) - 4), "white")
    for k, image in enumerate(images):
        page.paste(image, (k % columns * (w + 4), k // columns * (h + 4)))
    page.save(path)
