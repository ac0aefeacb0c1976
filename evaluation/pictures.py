"""Pictures of predictions: rings where a model points, crosses where the truth is (paper: pointing, tracking).

in    predictions {"id", "annotation", "type", "medium", "prompt", "text", "predicted", "true", "times"}, points as [frame, id, x, y]:
      pixels of the picture; frame is 1 for an image, the number of one of several, or seconds of a video
out   a PNG each: the image; several side by side; a strip of a video's frames with the time below each. Of tracks also the path of
      every object up to each frame, and x and y over time

A point at a time that was not shown lies on the nearest frame that was: its ring is dashed and says its own time.
"""

import re
import sys
from bisect import bisect_right
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import data
from evaluation import charts

# bright, for photographs; the charts' colours are for white paper
COLOURS = ((255, 0, 80), (0, 150, 255), (255, 170, 0), (0, 200, 90), (170, 80, 255), (0, 200, 200), (255, 90, 220), (150, 110, 60))
FINE = 4                                 # marks are drawn this much larger and reduced: Pillow's circles have steps
WIDTH, LARGEST = 288, 1024               # of an image, at least; of the file's longer side, at most
HEIGHT, COLUMNS, FRAMES = 240, 4, 12     # of the frames of a strip
SHOWN = 0.05                             # seconds between a point's time and its frame's that are the same time: answers have one decimal


def colour_of(name):
    """Of a track by its id, so that it keeps its colour; ids are numbers from 1, but a model may write anything."""
    return COLOURS[(int(name) - 1 if str(name).isdecimal() else sum(map(ord, str(name)))) % len(COLOURS)]


# ---------------------------------------------------------------------------------------------------------------
# marks on a picture


def mark(picture, x, y, r, draw):
    """Pastes what draw(pen, at, k) draws around (x, y), within 2r: at(dx, dy) is a place on the pen's canvas, k of its pixels are one."""
    left, top, side = int(x - 2 * r), int(y - 2 * r), int(4 * r) + 2
    tile = picture.crop((left, top, left + side, top + side)).resize((side * FINE, side * FINE), Image.NEAREST)
    draw(ImageDraw.Draw(tile), lambda dx, dy: ((x - left + dx) * FINE, (y - top + dy) * FINE), FINE)
    picture.paste(tile.reduce(FINE), (left, top))


def ring(picture, x, y, r, colour, dashed=False):
    def draw(pen, at, k):
        wide = max(2, 0.28 * r)
        for grow, fill, width in ((wide / 2, (255, 255, 255), 2 * wide), (0, colour, wide)):         # white around it, for dark ground
            box = [*at(-r - grow, -r - grow), *at(r + grow, r + grow)]
            for start in range(0, 360, 60):
                pen.arc(box, start, start + (35 if dashed else 61), fill=fill, width=round(width * k))

    mark(picture, x, y, r, draw)


def cross(picture, x, y, r, colour=(0, 0, 0)):
    def draw(pen, at, k):
        wide = max(3, 0.34 * r)
        for more, fill, width in ((wide / 3, (255, 255, 255), wide * 5 / 3), (0, colour, wide)):
            for a, b in (((-r - more, 0), (r + more, 0)), ((0, -r - more), (0, r + more))):
                pen.line([at(*a), at(*b)], fill=fill, width=round(width * k))

    mark(picture, x, y, r, draw)


def draw_points(image, points, colour=COLOURS[0], truth=(), numbers=None, dashed=(), trails=()):
    """(H,W,3) uint8 and (x, y) in pixels -> PIL image, at least 288 wide: rings for points, crosses for truth.

    numbers: what stands beside the rings, 1, 2, .. unless given; given ones (of tracks) also choose the colour, by their first word.
    dashed: which rings are, by their place in points. trails: [(colour, [(x, y), ..]), ..] lines below all marks.
    """
    scale = max(1, -(-WIDTH // image.shape[1]))
    picture = Image.fromarray(image).resize((image.shape[1] * scale, image.shape[0] * scale), Image.NEAREST)
    r = max(picture.size) // 60 + 3
    pen = ImageDraw.Draw(picture)
    for stroke, path in trails:
        places = [(x * scale, y * scale) for x, y in path]
        for fill, width in (((255, 255, 255), r // 2), (stroke, r // 3)):
            pen.line(places, fill=fill, width=width, joint="curve")
    for x, y in truth:
        cross(picture, x * scale, y * scale, r)
    for k, (x, y) in enumerate(points):
        fill = colour_of(str(numbers[k]).split()[0]) if numbers else colour
        ring(picture, x * scale, y * scale, r, fill, k in dashed)
    font = ImageFont.load_default(max(11, r * 1.7))
    for k, (x, y) in enumerate(points):
        x, y = x * scale, y * scale
        words = str(numbers[k] if numbers else k + 1)
        left = x + r + 3 if x + r + 3 + font.getlength(words) < picture.width else x - r - 3 - font.getlength(words)
        pen.text((left, max(y - 1.6 * r, 0)), words, fill=(255, 255, 255), font=font, stroke_width=max(2, r // 6), stroke_fill=(0, 0, 0))
    return picture


def strip(pictures, labels, height=HEIGHT, columns=COLUMNS):
    """Pictures of any sizes, scaled to one height, in rows of `columns`, each with its label below -> PIL image."""
    scaled = [p.resize((max(1, round(p.width * height / p.height)), height), Image.LANCZOS) for p in pictures]
    width, band = max(p.width for p in scaled), height // 10
    columns = min(columns, len(scaled))
    page = Image.new("RGB", (columns * width + (columns - 1) * 4, (height + band) * -(-len(scaled) // columns)), "white")
    for k, (picture, label) in enumerate(zip(scaled, labels, strict=True)):
        left, top = k % columns * (width + 4), k // columns * (height + band)
        page.paste(picture, (left, top))
        ImageDraw.Draw(page).text((left + picture.width / 2, top + height + band / 2), label, fill=charts.INK,
                                  font=ImageFont.load_default(band * 0.75), anchor="mm")
    return page


def titled(picture, lines):
    """A picture with lines of text below it, each cut to its width."""
    width = max(picture.width, WIDTH)
    size = max(12, width // 80)
    font = ImageFont.load_default(size)
    page = Image.new("RGB", (width, picture.height + round(len(lines) * size * 1.35) + 6), "white")
    page.paste(picture, (0, 0))
    for k, line in enumerate(lines):
        line = " ".join(line.split())[:width]            # no letter is narrower than a pixel; an answer may be very long
        if font.getlength(line) > width - 8:
            while line and font.getlength(line + " ..") > width - 8:
                line = line[:-1]
            line += " .."
        ImageDraw.Draw(page).text((4, picture.height + 3 + k * size * 1.35), line, fill=charts.INK, font=font)
    return page


# ---------------------------------------------------------------------------------------------------------------
# of predictions


def nearest(times, t):
    return min(range(len(times)), key=lambda k: abs(times[k] - t))


def chosen(times, points, n=FRAMES):
    """Which frames of `times` to show, n at most: those that points [frame, ..] lie on, evenly taken where there are more, else filled
    up evenly with others -> their numbers, ascending."""
    every = range(len(times))
    wanted = sorted({nearest(times, t) for t, *_ in points})
    pool = wanted if len(wanted) >= n else every
    spread = [pool[round(k * (len(pool) - 1) / max(min(n, len(pool)) - 1, 1))] for k in range(min(n, len(pool)))]
    if pool is every:
        more = [k for k in spread if k not in wanted]
        room = n - len(wanted)
        spread = wanted + (more if len(more) <= room else [more[k * len(more) // room] for k in range(room)])
    return sorted(set(spread))


def paths(points):
    """[[t, id, x, y], ..] -> {id: [(t, x, y), ..] in order of time}; ids as text, since 1 and "1" are one object."""
    found = sorted(((str(i), t, x, y) for t, i, x, y in points), key=lambda p: p[:2])
    return {i: [p[1:] for p in group] for i, group in groupby(found, lambda p: p[0])}


def draw_images(images, predicted, true):
    """Points on the image, or on several side by side. Points on an image that is not there are told, not drawn."""
    on = lambda points, k: [(x, y) for frame, _, x, y in points if int(frame) == k]              # noqa: E731
    shown = [draw_points(image, on(predicted, k), truth=on(true, k)) for k, image in enumerate(images, 1)]
    outside = sorted({int(frame) for frame, *_ in predicted if not 1 <= frame <= len(images)})
    told = [f"also points on image {', '.join(map(str, outside))}, which there is not"] * bool(outside)
    if len(shown) > 1:
        return strip(shown, [f"image {k}" for k in range(1, len(shown) + 1)]), told
    shown[0].thumbnail((LARGEST, LARGEST))
    return shown[0], told


def draw_frames(frames_at, times, predicted, true, tracks):
    """A strip of frames; frames_at(times) yields them; tracks: with the paths up to each. -> PIL image, what has to be told."""
    here = chosen(times, [*predicted, *true])
    at = {k: [[p for p in points if nearest(times, p[0]) == k] for points in (predicted, true)] for k in here}
    shown = []
    for k, frame in zip(here, frames_at([times[k] for k in here]), strict=True):
        mine, truth = at[k]
        late = [n for n, (t, *_) in enumerate(mine) if abs(t - times[k]) > SHOWN]
        numbers = [f"{i}  {t:.1f} s" if n in late else str(i) for n, (t, i, *_) in enumerate(mine)]
        trails = [(colour_of(i), part) for i, path in paths(predicted).items()
                  if len(part := [p[1:] for p in path[: bisect_right(path, times[k] + SHOWN, key=lambda p: p[0])]]) > 1] if tracks else []
        shown.append(draw_points(frame, [(x, y) for *_, x, y in mine], truth=[(x, y) for *_, x, y in truth], numbers=numbers or None,
                                 dashed=late, trails=trails))
    told = [f"{len(here)} of {len(times)} frames"] * (len(here) < len(times))
    told += ["dashed: at a time that was not shown"] * any(abs(p[0] - times[k]) > SHOWN for k in here for p in at[k][0])
    return strip(shown, [f"{times[k]:.1f} s" for k in here]), told


def draw_tracks(predicted, true, width):
    """x and y of every object over time, side by side: predicted with dots, true pale -> PIL image, 400 high; None without points."""
    mine, truth = paths(predicted), paths(true)
    panels = []
    for axis, ylabel in ((1, "x, in pixels from the left"), (2, "y, in pixels from the top")):
        series = {i: [(p[0], p[axis]) for p in path] for i, path in mine.items()}
        pale = {f"{i} (true)": [(p[0], p[axis]) for p in path] for i, path in truth.items()}
        colours = {i: colour_of(i) for i in series} | {f"{i} (true)": colour_of(i) for i in truth}
        panels.append(charts.chart({**series, **pale}, "seconds", (max(width // 4, 240), 200), ylabel=ylabel, dots=True, faint=tuple(pale),
                                   colours=colours))
    if panels[0] is None:
        return None
    page = Image.new("RGB", (sum(p.width for p in panels), panels[0].height), "white")
    for k, panel in enumerate(panels):
        page.paste(panel, (k * panels[0].width, 0))
    return page


def below(upper, lower):
    page = Image.new("RGB", (max(upper.width, lower.width), upper.height + lower.height + 8), "white")
    page.paste(upper, (0, 0))
    page.paste(lower, (0, upper.height + 8))
    return page


def picture_of(p, record):
    """One prediction and its record -> PIL image: what was seen with its marks, the question and the answer below."""
    source, tracks = record["source"], p["type"] == "track"
    if p["medium"] == "video":
        picture, told = draw_frames(lambda times: source.frames(record, times), p["times"], p["predicted"], p["true"], tracks)
        panels = draw_tracks(p["predicted"], p["true"], picture.width) if tracks else None
        picture = below(picture, panels) if panels else picture
    else:
        picture, told = draw_images(source.images(record), p["predicted"], p["true"])
    told = ["rings: predicted; crosses: true" + "; charts: dark predicted, pale true" * tracks, *told]
    return titled(picture, [p["prompt"], f"-> {p['text']}", ". ".join(told)])


def draw(predictions, records, folder, n=24):
    """A picture each for n questions that ask for points, named id-annotation-label.png; kinds and media take turns, each in the order of
    ids. A record that cannot be read, or whose id is not the only one of that name, is named on stderr instead."""
    folder, by_id, names = Path(folder), {}, set()
    for record in records:
        by_id.setdefault(record["id"], []).append(record)
    folder.mkdir(parents=True, exist_ok=True)
    pointing = sorted((p for p in predictions if "true" in p), key=lambda p: (p["medium"], p["type"], p["id"], p["annotation"]))
    turns = [(k, p) for _, group in groupby(pointing, lambda p: (p["medium"], p["type"])) for k, p in enumerate(group)]
    for _, p in sorted(turns, key=lambda turn: turn[0])[:n]:
        record, *others = by_id[p["id"]]
        if others:
            print(f"{p['id']}: {len(others) + 1} records have this id; no picture", file=sys.stderr)
            continue
        try:
            picture = picture_of(p, record)
        except data.Unreadable as e:
            print(f"{record['where']}: {e}; no picture", file=sys.stderr)
            continue
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{p['id'][-80:]}-{p['annotation']}-{p['prompt'].split(': ')[-1][:80]}").lstrip(".")
        while name in names:             # two ids that differ only in what a file's name cannot hold
            name += "~"
        names.add(name)
        picture.save(folder / f"{name}.png")
