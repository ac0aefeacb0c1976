"""The layout of YOLO: a folder of label files, with the names of the classes, and the images."""

import re
from collections import Counter
from pathlib import Path

from records.check import require, short
from records.errors import DataError, explained, import_extra, plural
from records.parse import BOX_FORMS
from tools.convert.boxes import around, located
from tools.convert.make import UNIT
from tools.convert.media import Media

CLASSES = ("classes.txt", "obj.names", "data.yaml", "dataset.yaml")  # files with class names


def label_files(rows, job):
    """The rows of a folder, one for each label file -> the same rows with the images, the names of
    the classes, and a counter. DataError if most of the longer lines may not be polygons."""
    longer = Counter()  # {(length, may it begin with a box?): number of longer lines}
    images = None
    for where, row in rows:
        folder = job.path.parent
        if images is None:
            images, names = open_folder(folder, job.args.media)
        if job.path.name not in CLASSES:
            yield where, {**row, "folder": (images, names, longer)}
    for (length, is_doubtful), n in longer.most_common(1):
        if is_doubtful and 2 * n > longer.total() and job.args.kind != "yolo-polygons":
            raise DataError(f"{folder}: {plural(n, 'line')} with {length} numbers after the class "
                            "may be polygons, or boxes with key points or with a score and an id; "
                            "if they are polygons, add --as yolo-polygons; if not, keep only the "
                            "class and the first four numbers of each line")


def open_folder(folder, media):
    """A folder of label files -> (Media of their images, {number: name of a class})."""
    # labels/train/a.txt belongs to images/train/a.jpg
    place = Path(media or re.sub("^(.*/)labels(?=/|$)", r"\1images", str(folder.absolute())))
    images = Media(place)
    texts = [path for path in folder.glob("*.txt") if path.name not in CLASSES]
    above = [folder, *folder.absolute().parents[:3]]
    classes = [path / name for path in above for name in CLASSES if (path / name).is_file()]
    if not classes or not any(images.images_here(path.stem) for path in texts):
        others = sorted({str(path.parent) for path in folder.rglob("*.txt")} - {str(folder)})
        raise DataError(f"{folder}: YOLO needs .txt files in this folder, one of the files "
                        f"{', '.join(CLASSES)} there or above, and images with the same names in "
                        f"{place} (or set --media DIR); folders below it with .txt files: "
                        f"{others[:4] or 'none'}")
    return images, read_classes(classes[0])


def read_labels(row, job):
    images, names, longer = row["folder"]
    path = images.only_image(job.path.stem)
    found = []
    for line in row.get("lines", ()):
        number, numbers = yolo_numbers(line)
        place = BOX_FORMS["cxcywh"](*numbers[:4])
        if len(numbers) > 4:
            longer[len(numbers), may_begin_with(place, numbers[4:])] += 1
            place = around(numbers)
        found.append((names.get(number, number), place))
    return located(job, path, UNIT, found)


def yolo_numbers(line):
    """-> number of the class, [x, y, width, height] or the corners x, y, x, y, .. of a polygon."""
    require(re.fullmatch(r"\s*\d+\s[-+.\deE\s]+", line), short(line),
            "a line must contain only numbers, and the first must be the number of a class")
    number, *numbers = map(float, line.split())
    is_whole = len(numbers) >= 4 and len(numbers) % 2 == 0
    require(is_whole and min(numbers) >= -0.01 and max(numbers) <= 1.01, short(line),
            "after the class, a line must contain x, y, width and height, or a polygon, as "
            "fractions of the image's sides from 0 to 1; scores, key points and ids are not read")
    return int(number), numbers


def may_begin_with(box, rest):
    """May a line contain this box, and then key points, or a score and the id of a track?

    Such a box is inside the image. It overlaps the area of its key points, or the last number is a
    whole number, the id. This is also true of some polygons.
    """
    left, top, right, bottom = around(rest)
    is_near = left <= box[2] and top <= box[3] and right >= box[0] and bottom >= box[1]
    is_track = len(rest) == 2 and bottom.is_integer()
    return min(box) >= -0.01 and max(box) <= 1.01 and (is_near or is_track)


def read_classes(path):
    """A file with one name per line, or a data.yaml with `names` -> {number: name}."""
    with explained(path):
        text = path.read_text(encoding="utf-8-sig")
        return read_yaml(text) if path.suffix == ".yaml" else dict(enumerate(text.split("\n")))


def read_yaml(text):
    """The text of a data.yaml -> {number: name}. ValueError if it cannot be used."""
    yaml = import_extra("yaml")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or "kpt_shape" in content:
        raise ValueError("it must contain 'names', and no key points ('kpt_shape')")
    for number, name in names.items():
        if not isinstance(name, str) or not str(number).isdecimal():
            raise ValueError(f"class {short(number)} in 'names' must be a number with a text; put "
                             "quotes around a name that YAML does not read as text, such as 7, yes "
                             "or null")
    return {int(number): name for number, name in names.items()}
