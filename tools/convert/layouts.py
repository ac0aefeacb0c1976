"""All layouts by name, in the order in which they are looked for, and formats that are not read.

The columns of an entry show its layout. In a folder, the names of its files show which of them are
read. Published sets and benchmarks are chosen with --as.
"""

from functools import partial

from records.check import check_fields, short
from records.errors import DataError, plural
from records.reader import CHAT_KEYS
from tools.convert import box_rows, boxes, chats, choices, studio, tables, tracks, yolo
from tools.convert.benchmarks import BENCHMARKS
from tools.convert.layout import Layout
from tools.convert.make import MAX_POINTS
from tools.convert.media import MEDIA_SUFFIXES
from tools.convert.rows import ANSWERS, CAPTIONS, READERS, published_files
from tools.convert.sets import SETS

MIXTURE = "a mixture; give it a name that ends in mix.json, and use it with --data of train.py"
TRACKS = "write its tracks as records (docs/records.md)"
CHAT = "? ".join([*chats.ROW_FIELDS, ""])
TABLE = CHAT.removeprefix("? ".join([*CHAT_KEYS, ""])) + "file_name? history? input?"
PLAIN = TABLE.replace("? ".join([*chats.RESIZED, ""]), "")  # without boxes in the answers
located = partial(Layout, max_points=MAX_POINTS)
by_time = partial(Layout, regroup=chats.name_times)


def any_of(names):
    return " | ".join(names)


def as_it_is(row, job):
    check_fields(row, "record", "the record")
    return {key: row[key] for key in row if key != "annotations"}, row["annotations"]


PEOPLE = {
    "coco": located(boxes.read_coco, "image? annotations? names? is_lvis",
                    "images annotations.image_id", regroup=boxes.coco_images),
    "label-studio": located(
        studio.read_task, " -".join(["data annotations? completions? -id", *studio.UNUSED]),
        "data annotations | data completions"),
    "labelme": located(
        boxes.read_labelme, "imagePath shapes? imageWidth? imageHeight? -imageData -version",
        "shapes imagePath", many=True),
    "voc": located(box_rows.read_voc, "filename size object? -folder -path -source -segmented "
                   "-owner", "filename size", many=True),
    "records": Layout(as_it_is, "*", "annotations"),
    "chats": by_time(chats.read_chats, CHAT, any_of(CHAT_KEYS)),
    "choices": by_time(
        choices.read_choices, f"{PLAIN} question {'? '.join([*choices.FIELDS, ''])}",
        "question options | question choices | question candidates | question A B"
        " | question a0 a1 | question choice_a choice_b | question option_a option_b"),
    "questions": by_time(
        tables.read_questions,
        f"{TABLE} answers? {'? '.join([*ANSWERS, *ANSWERS.values(), ''])}", any_of(ANSWERS)),
    "captions": by_time(tables.read_captions, f"{PLAIN} {'? '.join([*CAPTIONS, ''])}",
                        any_of(CAPTIONS)),
    "csv-boxes": located(box_rows.read_boxes, "boxes", box_rows.SIGN, regroup=box_rows.by_image),
    "mot": Layout(tracks.read_sequence, "lines"),
    "yolo": located(yolo.read_labels, "lines? folder", regroup=yolo.label_files, many=True),
}
PEOPLE["yolo-polygons"] = PEOPLE["yolo"]
LAYOUTS = PEOPLE | SETS | BENCHMARKS
# Columns of an entry, or the end of a file name -> a format that is not read and what to do, or the
# layout of entries that have none of the signs above. FIRST comes before the signs above.
FIRST = [
    ("videos annotations", f"TAO or YouTube-VIS; {TRACKS}"),
    ("masklet", f"SA-V, whose masks have no names; {TRACKS}, in the mode from_point"),
    ("annotator annotation_id", "JSON-MIN or CSV of Label Studio; export JSON"),
    ("annotations.coordinates", "CreateML; export COCO or YOLO"),
    ("QA", "a list of questions in 'QA'; write them as messages (docs/convert.md)"),
    ("audio | audios", "an entry with sound, for which Molmo2 has no input; --ignore audio,audios "
     "uses the rest of the entry"),
]
OTHERS = [
    ("chosen rejected", "chats"),
    ("assets | asset regions", "VoTT; export COCO with another tool"),
    ("_via_img_metadata", "VGG Image Annotator; export COCO"),
    ("path | group data", MIXTURE),
    ("meta image | meta track", "XML of CVAT; export COCO for boxes, or MOT for tracks"),
    (".ini", "MOT; give each folder that contains seqinfo.ini"),
    (".xlsx", "Excel; save it as CSV UTF-8"),
    (".yaml", "a file of YOLO; give its folder"),
    (".srt | .vtt", "subtitles; convert the file with their videos, and give --subtitles this "
     "folder"),
]
# A name or an end of a name in a folder, the layout that it shows (""; the columns decide), and the
# files that are read. The first match decides.
FOLDERS = [
    ("seqinfo.ini", "mot", "gt/gt.txt"),
    ("seqinfo.ini", "mot", "gt.txt"),
    ("labels/", "yolo", "labels/*.txt"),
    *((name, "yolo", "*.txt") for name in yolo.CLASSES),
    ("metadata.jsonl", "captions", "metadata.*"),
    ("metadata.csv", "captions", "metadata.*"),
    (".json", "", "*.json"),
    ("Annotations/", "voc", "Annotations/*.xml"),
    (".xml", "voc", "*.xml"),
    (".txt", "yolo", "*.txt"),
]


def shows(sign, signs):
    """Does one of the alternatives of a sign match?"""
    return any({*words.split()} <= signs for words in sign.split("|") if words.strip())


def find(signs):
    """-> the name of a layout, or of a format that is not read and what to do, or None."""
    named = [(text, sign) for sign, text in FIRST]
    named += [(name, layout.sign) for name, layout in PEOPLE.items()]
    named += [(text, sign) for sign, text in OTHERS]
    return next((name for name, sign in named if shows(sign, signs)), None)


def layout_of(row):
    """An entry -> the name of its layout, or what it is and what to do."""
    if not isinstance(row, dict):
        return "records"
    signs = {key for key, value in row.items() if value is not None}  # None counts as absent
    signs -= {key for key in ("audio", "audios") if not row.get(key)}  # as does [] here
    annotations = row.get("annotations")
    if isinstance(annotations, list) and annotations and isinstance(annotations[0], dict):
        signs |= {f"annotations.{key}" for key in annotations[0]}
    return find(signs) or (f"an unknown format; its fields are {short(', '.join(row))} "
                           "(docs/own_data.md lists the formats)")


def files_of(source, kind, split):
    """A file or a folder -> (its files, the layout of text files or ""). kind: from --as, or None.
    DataError if it has no file that can be read."""
    if kind and LAYOUTS[kind].published:
        return published_files(source, split or LAYOUTS[kind].split), kind
    if not source.is_dir():
        if source.suffix.lower() in READERS and (kind or source.suffix != ".txt"):
            return [source], ""
    else:
        entries = [path for path in source.iterdir() if not path.name.startswith("README")]
        signs = {path.suffix.lower() for path in entries}
        signs |= {f"{path.name}/" if path.is_dir() else path.name for path in entries}
        for sign, name, pattern in FOLDERS:
            is_wanted = sign in signs and (not kind or name in ("", kind.partition("-")[0]))
            files = sorted(source.glob(pattern)) if is_wanted else []
            if files:
                return files, name
    below = sorted(source.rglob("*")) if source.is_dir() else [source]
    inner = [path for path in below if path.suffix in READERS]
    what = find({path.suffix for path in below} - ({".yaml"} if source.is_dir() else set()))
    if source.is_dir() and inner and not (what and inner[0].suffix == ".txt"):
        what = f"not a known format; files below it: {', '.join(map(str, inner[:3]))}"
    media = sum(path.suffix.lower() in MEDIA_SUFFIXES for path in below)
    if source.is_dir() and media and not inner:
        what = (f"a folder with {plural(media, 'photograph')} or videos and no annotations; make a "
                f"table to fill in: python -m tools.convert {source} captions.csv --template")
    raise DataError(f"{source}: this is {what or 'not a known format; --help lists the formats'}")
