"""The layout of MOT: tracks of objects in a video that is stored as images.

    seqinfo.ini     frameRate, seqLength, imWidth, imHeight, imDir, imExt
    img1/000001.jpg
    gt/gt.txt       lines of frame, id, left, top, width, height, used, class, visibility
    gt/labels.txt   one name per line; sequences of MOTChallenge (MOT16, MOT17, MOT20) need no file
"""

import csv
from configparser import ConfigParser

from records.check import require
from records.errors import explained
from tools.convert import make
from tools.convert.make import skip_unless

CLASSES = (  # of MOTChallenge; its other classes are no objects to track
    "pedestrian", "person on a vehicle", "car", "bicycle", "motorbike", "non-motorized vehicle",
    "static person")
RATES = (2, 1)  # frames per second of a track: the first that divides the frame rate
MAX_POINTS = 600  # of a track with several objects


def read_sequence(row, job):
    """The frames at 2 or 1 frames per second become a video, and each class a track that follows
    the centres of its boxes. If this track has more than MAX_POINTS points, each object becomes a
    track that starts at its first point."""
    folder = job.path.absolute().parent
    if folder.name == "gt":
        folder = folder.parent
    info, images, (fps, length, *size) = read_info(folder / "seqinfo.ini")
    rate = next((rate for rate in RATES if fps > 0 and fps % rate == 0), None)
    skip_unless(rate, "no frame rate", f"frameRate is {info['frameRate']}")
    files = {int(path.stem): str(path) for path in images.glob(f"*{info['imExt']}")}
    frames = range(1, length + 1, fps // rate)
    missing = [frame for frame in frames if frame not in files]
    skip_unless(not missing, "missing file", f"{images} has no frame {missing[:1]}")
    times = {frame: (frame - 1) / fps for frame in frames}
    tracks = {}  # {name of a class: points}
    for cells in csv.reader(row["lines"]):
        require(8 <= len(cells) <= 10, "gt.txt", "each line must have 8 to 10 numbers")
        frame, number = (int(float(cells[k])) for k in (0, 1))
        if frame in frames and float(cells[6]):
            name = class_name(int(float(cells[7])), job.path.parent, info.get("name", ""))
            place = centre(*map(float, cells[2:6]), *size)
            if name and place:
                is_hidden = len(cells) > 8 and float(cells[8]) == 0
                tracks.setdefault(name, []).append({"t": times[frame], "id": number, **place,
                                                    **({"occluded": True} if is_hidden else {})})
    skip_unless(tracks, "no annotation", "no line of gt.txt is used")
    video = {"frames": [files[frame] for frame in frames], "fps": rate,
             "width": size[0], "height": size[1]}
    return {"video": video}, [
        lambda name=name, points=points, mode=mode: make.track(
            name, points, [*times.values()], rate, mode, size)
        for name, found in tracks.items() for points, mode in parts_of(found)]


def read_info(path):
    """seqinfo.ini -> its fields, the folder of the images, and a list of four numbers: frame rate,
    number of frames, width and height."""
    with explained(path):
        info = ConfigParser(interpolation=None)
        info.read_string(path.read_text(encoding="utf-8-sig"))
        info = info["Sequence"]
        numbers = []
        for name in ("frameRate", "seqLength", "imWidth", "imHeight"):
            number = float(info[name])
            whole = round(number)  # 29.97 frames per second are 30
            require(abs(number - whole) <= 0.01 * number, str(path), f"{name} is {info[name]}, "
                    "but must be a whole number")
            numbers.append(whole)
        return info, path.parent / info["imDir"], numbers


def class_name(number, labels, sequence):
    """-> the name of a class, or None for a class that is no object. Classes count from 1, and -1
    means the first."""
    number = 1 if number == -1 else number
    path = labels / "labels.txt"
    if path.is_file():
        names = path.read_text(encoding="utf-8-sig").rstrip().split("\n")
        require(1 <= number <= len(names), str(path), f"it has no line for the class {number} of "
                "gt.txt; classes count from 1, and -1 means the first")
    else:
        require(sequence.startswith("MOT"), str(path), "it is missing; write the names of the "
                "classes into it, one per line (one name if all classes are -1)")
        names = CLASSES
    return names[number - 1].strip() if 1 <= number <= len(names) else None


def centre(left, top, width, height, image_width, image_height):
    """-> the centre of the part of a box that is in the image, or None if there is none."""
    left, right = max(left, 0), min(left + width, image_width)
    top, bottom = max(top, 0), min(top + height, image_height)
    if left >= right or top >= bottom:
        return None
    return {"x": (left + right) / 2, "y": (top + bottom) / 2}


def parts_of(points):
    """The points of a class -> [(points of a track, its mode), ..]."""
    if len(points) <= MAX_POINTS:
        return [(points, "per_frame")]
    by_object = {}
    for point in points:
        by_object.setdefault(point["id"], []).append(point)
    return [(found, "from_point") for found in by_object.values()]
