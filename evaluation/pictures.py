"""Draws predictions or annotations on images and frames (paper: pointing, tracking). Rings mark
predicted points, and crosses mark true points.

A picture shows images side by side, or at most 12 frames of a video with their times. For tracks it
also shows the path of every object. Points are [frame, id, x, y] in pixels. If the frame at the
time of a point is not in the picture, the point is drawn on the nearest frame with its time.
"""

import re
from contextlib import closing
from functools import partial
from itertools import chain, islice, pairwise, repeat, zip_longest
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from records.errors import Unreadable, draft, warn
from text.styles import parts_of

# Bright colours for photographs. Those in charts.py are for a white background.
COLOURS = (
    (255, 0, 80), (0, 150, 255), (255, 170, 0), (0, 200, 90), (170, 80, 255), (0, 200, 200),
    (255, 90, 220), (150, 110, 60),
)
RIGHT = (20, 115, 60)  # of the text of an answer, as on the page of tools.play
WRONG = (179, 38, 30)
BLACK = (0, 0, 0)
WHITE = (255, 255, 255)
MIN_WIDTH = 288  # pixels; a smaller image is enlarged
MAX_SIDE = 1024
GRID_COLUMNS = 4
MAX_FRAMES = 12  # frames of a video in one picture
GIF_FRAMES = 60
GIF_SIDE = 480  # pixels
# This comment is in every file that draw_answer writes. tools.generate replaces only such files.
MARK = b"drawn by Molmo2 in plain PyTorch"
MARKS = {"comment": MARK, "xmp": MARK, "pnginfo": PngInfo()}  # for JPEG and GIF, WebP, PNG
MARKS["pnginfo"].add_text("Comment", MARK.decode())
GIF_COLOURS = 200  # colours of the frames; the exact colours of the marks are added
SAME_TIME = 0.05  # seconds; times in answers have one decimal


class Mark(NamedTuple):
    """A predicted point, drawn as a ring with a label."""
    x: float
    y: float
    label: str
    colour: tuple = COLOURS[0]


def colour_of(object_id):
    """The colour of a track. object_id: a number from 1, or this number as text."""
    return COLOURS[(int(object_id) - 1) % len(COLOURS)]


def draw_marks(image, marks, true=(), trails=()):
    """(H,W,3) uint8 -> PIL image with a ring for each Mark, a cross for each true (x, y), and a
    line for each trail (colour, [(x, y), ..]). A small image is enlarged by a whole factor until
    it is MIN_WIDTH wide, if no side becomes longer than MAX_SIDE."""
    scale = max(1, min(-(-MIN_WIDTH // image.shape[1]), MAX_SIDE // max(image.shape)))
    size = image.shape[1] * scale, image.shape[0] * scale
    picture = Image.fromarray(image).resize(size, Image.NEAREST)
    # Pillow's lines are jagged, so the marks are drawn in double size and then reduced.
    overlay = Image.new("RGBA", (2 * picture.width, 2 * picture.height))
    pen = ImageDraw.Draw(overlay)
    k = 2 * scale
    r = 2 * (max(size) // 60 + 3)
    # a white edge makes each mark visible on a dark background
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


def image_grid(images, labels, height, columns=GRID_COLUMNS, colours=None):
    """Arranges PIL images in rows. All have the same height, and each has its label below. colours:
    of the labels."""
    scaled = []
    for image in images:
        width = max(1, round(image.width * height / image.height))
        scaled.append(image.resize((width, height), Image.LANCZOS))
    width = max(image.width for image in scaled)
    n_lines = 1 + max(label.count("\n") for label in labels)
    label_height = n_lines * (height // 10)
    font = ImageFont.load_default(height // 10 * 0.75)
    columns = min(columns, len(scaled))
    n_rows = -(-len(scaled) // columns)
    size = (columns * (width + 4) - 4, n_rows * (height + label_height))
    page = Image.new("RGB", size, "white")
    colours = colours or [BLACK] * len(labels)
    for k, (image, label, colour) in enumerate(zip(scaled, labels, colours, strict=True)):
        left = k % columns * (width + 4)
        top = k // columns * (height + label_height)
        page.paste(image, (left, top))
        middle = (left + image.width / 2, top + height + label_height / 2)
        ImageDraw.Draw(page).text(middle, label, colour, font, "mm")
    return page


def with_text(image, lines):
    """Adds lines of text below an image. A line that is too long is cut at the edge."""
    width = max(image.width, MIN_WIDTH)
    size = max(12, width // 80)
    font = ImageFont.load_default(size)
    height = image.height + round(len(lines) * size * 1.35) + 6
    page = Image.new("RGB", (width, height), "white")
    page.paste(image, (0, 0))
    for k, line in enumerate(lines):
        # every letter is at least one pixel wide
        text = " ".join(line.split())[:width]
        top = image.height + 3 + k * size * 1.35
        ImageDraw.Draw(page).text((4, top), text, BLACK, font)
    return page


def draw_images(images, predicted, true, height=240):
    """Draws points on one image, or on several images side by side -> PIL image."""
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
    """At most n items: the first, the last, and others at equal distances between them."""
    n = min(n, len(items))
    return [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


def select_frames(times, points, most=MAX_FRAMES):
    """-> ascending indices of at most `most` times to draw. Times with points [frame, ..] come
    first. If there are fewer than `most`, other times at equal distances are added."""
    with_points = evenly(sorted({nearest(times, t) for t, *_ in points}), most)
    others = [k for k in evenly(range(len(times)), most) if k not in with_points]
    return sorted([*with_points, *evenly(others, most - len(with_points))])


def trails_until(points, t):
    """[[t, id, x, y], ..] -> the paths up to time t, [(colour, [(x, y), ..]), ..]."""
    paths = {}
    for time, object_id, x, y in sorted(points, key=lambda point: point[0]):
        if time <= t + SAME_TIME:
            paths.setdefault(object_id, []).append((x, y))
    return [(colour_of(name), path) for name, path in paths.items() if len(path) > 1]


def draw_frames(frames_at, times, predicted, true, with_trails, height=240):
    """Draws points on frames of a video -> PIL image. If with_trails, each frame also shows the
    tracks up to its time. frames_at(times) yields the frames at these times."""
    selected = select_frames(times, [*predicted, *true])
    with closing(mark_frames(frames_at, times, selected, predicted, true, with_trails)) as drawn:
        return image_grid(drawn, [f"{times[k]:.1f} s" for k in selected], height)


def mark_frames(frames_at, times, selected, predicted, true, with_trails):
    """Yields the frame at times[k] for each k in selected, with points and trails, as PIL image."""
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
    """-> PIL image: the images or frames with points, and the question and answer below."""
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
                             "rings: predicted points; crosses: true points"])


def round_robin(predictions):
    """The predictions of points and tracks, ordered so that media and types alternate."""
    groups = {}
    for p in predictions:
        if "true" in p:
            groups.setdefault((p["medium"], p["type"]), []).append(p)
    rounds = zip_longest(*(groups[key] for key in sorted(groups)))
    return [p for one_of_each in rounds for p in one_of_each if p]


def draw(predictions, records, folder, n=24):
    """Writes a PNG file, id-annotation-label.png, for each of the first n questions about points.
    If a record cannot be read or its id is not unique, a warning is printed instead."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    by_id = {}
    for record in records:
        by_id.setdefault(record["id"], []).append(record)
    for prediction in round_robin(predictions)[:n]:
        record, *others = by_id[prediction["id"]]
        if others:
            warn(f"{record['id']}: {len(others) + 1} records have this id, so no picture is drawn")
            continue
        try:
            image = draw_prediction(prediction, record)
        except Unreadable as e:
            warn(f"{record['where']}: {e}; no picture is drawn")
            continue
        label = prediction["prompt"].split(": ")[-1][:80]
        number = "-".join(str(prediction[key]) for key in ("annotation", "turn")
                          if key in prediction)
        name = f"{prediction['id'][-80:]}-{number}-{label}"
        with draft(folder / f"{as_file_name(name)}.png") as path:
            image.save(path)


def draw_records(records, n, height=360):
    """Draws the points, boxes and tracks of the first n records that have images or a video -> PIL
    image, or None if there is nothing to draw. Warns about a record that cannot be read."""
    drawn = []
    with_media = (record for record in records if "images" in record or "video" in record)
    for record in islice(with_media, n):
        try:
            drawn += draw_record(record, height)
        except Unreadable as e:
            warn(f"{record['where']}: {e}; no picture is drawn")
    return image_grid(*zip(*drawn, strict=True), height) if drawn else None


def draw_record(record, height):
    """-> [(PIL image, file name), ..], one for each image, or one for the frames of the video."""
    source = record["source"]
    names = [path.name for path in source.paths_of(record)]
    if "video" in record:
        objects = {}  # {(annotation, id): number}
        points = []
        for k, _, point, (x, y), _ in places(record, [source.video_size(record)[:2]]):
            number = objects.setdefault((k, point.get("id")), len(objects) + 1)
            points.append([point["t"] - record["video"]["start"], number, x, y])
        times = sorted({t for t, *_ in points}) or [0.0]
        frames_at = partial(source.frames, record)
        return [(draw_frames(frames_at, times, points, [], True, height), names[0])]
    images = source.images(record)
    marks = [[] for _ in images]
    outlines = [[] for _ in images]
    for k, annotation, point, middle, corners in places(record, [i.shape[1::-1] for i in images]):
        colour = COLOURS[k % len(COLOURS)]
        image = point.get("image", 0)
        marks[image].append(Mark(*middle, annotation.get("label", ""), colour))
        if "box" in point:
            outlines[image].append((colour, corners))
    drawn = map(draw_marks, images, marks, repeat(()), outlines)
    return list(zip(drawn, names, strict=True))


def places(record, sizes):
    """Yields (number of the annotation, annotation, point, (x, y), corners of the box) for each
    point. Coordinates are in pixels. sizes: (width, height) of every image, or of the video."""
    for k, (_, annotation) in enumerate(parts_of(record)):
        for point in annotation.get("points", ()):
            size = sizes[point.get("image", 0)]
            scale = point["scale"] or size
            left, top, right, bottom = point.get("box", [point["x"], point["y"]] * 2)
            corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
            middle, *corners = [(x * size[0] / scale[0], y * size[1] / scale[1])
                                for x, y in [(point["x"], point["y"]), *corners]]
            yield k, annotation, point, middle, corners


def as_file_name(text):
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).lstrip(".")


def folder_of_set(folder, k, name):
    """-> the folder for the pictures of set number k. The first set uses `folder`. Every other set
    has a subfolder. `name` may contain a path."""
    return Path(folder, f"{k + 1}-{as_file_name(name[-80:])}") if k else Path(folder)


def draw_answer(path, points, images, clip_times, frames_at, with_trails):
    """Draws the points of an answer and writes the file `path`. For images, it shows all of them.
    For a video, it shows the frames with points. A .gif shows the frames at clip_times, at most
    GIF_FRAMES of them."""
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
    """Writes PIL images of one size as an endless animation. seconds: how long each is shown.

    All images have the same palette, so that pixels that do not change need no space in the file.
    """
    palette = Image.new("P", (1, 1))
    all_small = image_grid(frames, [""] * len(frames), height=60)
    of_frames = all_small.quantize(GIF_COLOURS).getpalette()
    palette.putpalette([*of_frames, *chain(*COLOURS, RIGHT, WRONG, WHITE, BLACK)])
    no_dither = Image.Dither.NONE
    first, *others = (f.quantize(palette=palette, dither=no_dither) for f in frames)
    first.save(path, save_all=True, append_images=others, loop=0, **MARKS,
               duration=[round(1000 * s) for s in seconds])
