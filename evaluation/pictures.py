"""Predictions drawn on images and frames: rings where the model points, crosses at the
true points (paper: pointing, tracking).

A picture shows images side by side, or at most 12 frames of a video with their times and
the path of every object of a track. Points are [frame, id, x, y] in pixels. A point at a
time that was not shown is drawn on the nearest frame, with its time.
"""

import re
from functools import partial
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from records.errors import Unreadable, warn

# bright, for photographs; the colours of charts are for white paper
COLOURS = (
    (255, 0, 80), (0, 150, 255), (255, 170, 0), (0, 200, 90), (170, 80, 255), (0, 200, 200),
    (255, 90, 220), (150, 110, 60),
)
BLACK = (0, 0, 0)
WHITE = (255, 255, 255)
MIN_WIDTH = 288  # pixels of a drawn image
MAX_SIDE = 1024
GRID_COLUMNS = 4
MAX_FRAMES = 12  # of a video, in one picture
GIF_FRAMES = 60
GIF_SIDE = 480  # pixels
# in every file that this module writes: by it tools.generate knows a picture that it may replace
MARK = b"drawn by Molmo2 in plain PyTorch"
MARKS = {"comment": MARK, "xmp": MARK, "pnginfo": PngInfo()}  # of JPEG and GIF, WebP, PNG
MARKS["pnginfo"].add_text("Comment", MARK.decode())
GIF_COLOURS = 200  # of the frames; those of the marks are kept exactly
SAME_TIME = 0.05  # seconds: answers have one decimal


class Mark(NamedTuple):
    """A predicted point: a ring with a label beside it."""
    x: float
    y: float
    label: str
    colour: tuple = COLOURS[0]


def colour_of(object_id):
    """The colour of a track; ids are numbers from 1, as text in an answer."""
    return COLOURS[(int(object_id) - 1) % len(COLOURS)]


def draw_marks(image, marks, true=(), trails=()):
    """(H,W,3) uint8 -> PIL image, at least MIN_WIDTH wide where that makes no side longer
    than MAX_SIDE, with a ring for each Mark, a cross for each true (x, y), and a line for
    each trail (colour, [(x, y), ..])."""
    scale = max(1, min(-(-MIN_WIDTH // image.shape[1]), MAX_SIDE // max(image.shape)))
    size = image.shape[1] * scale, image.shape[0] * scale
    picture = Image.fromarray(image).resize(size, Image.NEAREST)
    # marks are drawn twice as large and reduced, because Pillow's lines are jagged
    overlay = Image.new("RGBA", (2 * picture.width, 2 * picture.height))
    pen = ImageDraw.Draw(overlay)
    k = 2 * scale
    r = 2 * (max(size) // 60 + 3)
    # each mark has a white edge, to be seen on dark ground
    for width, is_edge in ((r // 2 + 2, True), (r // 3, False)):
        for colour, points in trails:
            path = [(x * k, y * k) for x, y in points]
            pen.line(path, WHITE if is_edge else colour, width, joint="curve")
        for x, y in true:
            reach = r + 3 * is_edge
            for dx, dy in ((reach, 0), (0, reach)):
                ends = [x * k - dx, y * k - dy, x * k + dx, y * k + dy]
                pen.line(ends, WHITE if is_edge else BLACK, width)
        for mark in marks:
            pen.circle((mark.x * k, mark.y * k), r + width / 2, width=width,
                       outline=WHITE if is_edge else mark.colour)
    font = ImageFont.load_default(max(22, 1.7 * r))
    for mark in marks:
        length = font.getlength(mark.label)
        left = mark.x * k + 1.3 * r
        if left + length >= overlay.width:
            left = mark.x * k - 1.3 * r - length
        pen.text((left, max(mark.y * k - 1.6 * r, 0)), mark.label, WHITE, font,
                 stroke_width=max(4, r // 6), stroke_fill=BLACK)
    overlay = overlay.reduce(2)
    picture.paste(overlay, (0, 0), overlay)
    return picture


def image_grid(images, labels, height=240):
    """PIL images, scaled to one height, in rows, each with its lines of text below."""
    scaled = []
    for image in images:
        width = max(1, round(image.width * height / image.height))
        scaled.append(image.resize((width, height), Image.LANCZOS))
    width = max(image.width for image in scaled)
    n_lines = 1 + max(label.count("\n") for label in labels)
    label_height = n_lines * (height // 10)
    font = ImageFont.load_default(height // 10 * 0.75)
    columns = min(GRID_COLUMNS, len(scaled))
    n_rows = -(-len(scaled) // columns)
    size = (columns * (width + 4) - 4, n_rows * (height + label_height))
    page = Image.new("RGB", size, "white")
    for k, (image, label) in enumerate(zip(scaled, labels, strict=True)):
        left = k % columns * (width + 4)
        top = k // columns * (height + label_height)
        page.paste(image, (left, top))
        middle = (left + image.width / 2, top + height + label_height / 2)
        ImageDraw.Draw(page).text(middle, label, BLACK, font, "mm")
    return page


def with_text(image, lines):
    """An image with lines of text below it, each cut at the edge."""
    width = max(image.width, MIN_WIDTH)
    size = max(12, width // 80)
    font = ImageFont.load_default(size)
    height = image.height + round(len(lines) * size * 1.35) + 6
    page = Image.new("RGB", (width, height), "white")
    page.paste(image, (0, 0))
    for k, line in enumerate(lines):
        # no letter is narrower than a pixel
        text = " ".join(line.split())[:width]
        top = image.height + 3 + k * size * 1.35
        ImageDraw.Draw(page).text((4, top), text, BLACK, font)
    return page


def draw_images(images, predicted, true, height=240):
    """Points on an image, or on several side by side -> PIL image."""
    drawn = []
    for number, image in enumerate(images, 1):
        here = [(x, y) for frame, _, x, y in predicted if frame == number]
        marks = [Mark(x, y, str(label)) for label, (x, y) in enumerate(here, 1)]
        crosses = [(x, y) for frame, _, x, y in true if frame == number]
        drawn.append(draw_marks(image, marks, crosses))
    if len(drawn) == 1:
        return drawn[0]
    return image_grid(drawn, [f"image {k + 1}" for k in range(len(drawn))], height)


def nearest(times, t):
    """The index of the time that is nearest to t."""
    return min(range(len(times)), key=lambda k: abs(times[k] - t))


def evenly(items, n):
    """n of the items, or all: the first, the last, and others at equal distances."""
    n = min(n, len(items))
    return [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


def select_frames(times, points, most=MAX_FRAMES):
    """-> ascending indices of at most `most` times to draw: those that points [frame, ..]
    are on, and others evenly while there is room."""
    with_points = evenly(sorted({nearest(times, t) for t, *_ in points}), most)
    others = [k for k in evenly(range(len(times)), most) if k not in with_points]
    return sorted([*with_points, *evenly(others, most - len(with_points))])


def trails_until(points, t):
    """[[t, id, x, y], ..] -> paths until t, [(colour, [(x, y), ..]), ..]"""
    paths = {}
    for time, object_id, x, y in sorted(points, key=lambda point: point[0]):
        if time <= t + SAME_TIME:
            paths.setdefault(object_id, []).append((x, y))
    return [(colour_of(name), path) for name, path in paths.items() if len(path) > 1]


def draw_frames(frames_at, times, predicted, true, with_trails, height=240):
    """Frames of a video with points, and the tracks up to each if with_trails -> PIL
    image. frames_at(times) yields the frames at these times."""
    selected = select_frames(times, [*predicted, *true])
    drawn = mark_frames(frames_at, times, selected, predicted, true, with_trails)
    return image_grid(drawn, [f"{times[k]:.1f} s" for k in selected], height)


def mark_frames(frames_at, times, selected, predicted, true, with_trails):
    """Yields the frames at times[k], k in selected, with points and trails, as PIL images."""
    for k, frame in zip(selected, frames_at([times[k] for k in selected]), strict=True):
        marks = []
        for t, object_id, x, y in predicted:
            if nearest(times, t) == k:
                other = f"  {t:.1f} s" if abs(t - times[k]) > SAME_TIME else ""
                marks.append(Mark(x, y, f"{object_id}{other}", colour_of(object_id)))
        here = [(x, y) for t, _, x, y in true if nearest(times, t) == k]
        trails = trails_until(predicted, times[k]) if with_trails else []
        yield draw_marks(frame, marks, here, trails)


def draw_prediction(prediction, record):
    """-> PIL image: the marked image or frames, and below them question and answer."""
    source = record["source"]
    points = (prediction["predicted"], prediction["true"])
    if prediction["medium"] == "video":
        frames_at = partial(source.frames, record)
        is_track = prediction["type"] == "track"
        image = draw_frames(frames_at, prediction["times"], *points, is_track)
    else:
        image = draw_images(source.images(record), *points)
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    return with_text(image, [prediction["prompt"], f"-> {prediction['text']}",
                             "rings: predicted; crosses: true"])


def round_robin(predictions):
    """Predictions with points, alternating between media and annotation types."""
    groups = {}
    for p in predictions:
        if "true" in p:
            groups.setdefault((p["medium"], p["type"]), []).append(p)
    rounds = zip_longest(*(groups[key] for key in sorted(groups)))
    return [p for one_of_each in rounds for p in one_of_each if p]


def draw(predictions, records, folder, n=24):
    """A PNG file, id-annotation-label.png, for each of the first n questions about points.
    A record that cannot be read, or whose id is not unique, is named on stderr."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    by_id = {}
    for record in records:
        by_id.setdefault(record["id"], []).append(record)
    for prediction in round_robin(predictions)[:n]:
        record, *others = by_id[prediction["id"]]
        if others:
            warn(f"{record['id']}: {len(others) + 1} records have this id; no picture")
            continue
        try:
            image = draw_prediction(prediction, record)
        except Unreadable as e:
            warn(f"{record['where']}: {e}; no picture")
            continue
        label = prediction["prompt"].split(": ")[-1][:80]
        number = "-".join(str(prediction[key]) for key in ("annotation", "turn")
                          if key in prediction)
        name = f"{prediction['id'][-80:]}-{number}-{label}"
        image.save(folder / f"{as_file_name(name)}.png")


def as_file_name(text):
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).lstrip(".")


def folder_of_set(folder, k, name):
    """Where the pictures of set number k go: those of the first into the folder, those of
    another into a folder of its own in it. The name may hold a path."""
    return Path(folder, f"{k + 1}-{as_file_name(name[-80:])}") if k else Path(folder)


def draw_answer(path, points, images, clip_times, frames_at, with_trails):
    """Writes the points of an answer: on its images, on the frames that they are on, or,
    in a .gif, on the frames at clip_times, at most GIF_FRAMES of them."""
    if not clip_times:
        draw_images(images, points, [], 360).save(path, **MARKS)
    elif not path.lower().endswith(".gif"):
        times = sorted({frame for frame, *_ in points}) or clip_times[:1]
        draw_frames(frames_at, times, points, [], with_trails, 360).save(path, **MARKS)
    else:
        selected = select_frames(clip_times, points, GIF_FRAMES)
        frames = []
        for frame in mark_frames(frames_at, clip_times, selected, points, [], with_trails):
            frame.thumbnail((GIF_SIDE, GIF_SIDE))
            frames.append(frame)
        begins = [clip_times[k] for k in selected]
        save_gif(frames, path, [b - a for a, b in pairwise([*begins, begins[-1] + 1])])


def save_gif(frames, path, seconds):
    """Writes PIL images of one size as an endless animation, each for its `seconds`.

    All have one palette, so that a pixel that does not change costs nothing.
    """
    palette = Image.new("P", (1, 1))
    all_small = image_grid(frames, [""] * len(frames), height=60)
    of_frames = all_small.quantize(GIF_COLOURS).getpalette()
    palette.putpalette([*of_frames, *chain(*COLOURS, WHITE, BLACK)])
    no_dither = Image.Dither.NONE
    first, *others = (f.quantize(palette=palette, dither=no_dither) for f in frames)
    first.save(path, save_all=True, append_images=others, loop=0, **MARKS,
               duration=[round(1000 * s) for s in seconds])
