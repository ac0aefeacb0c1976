"""Reads the entries (in code: rows) of a file or a folder. The fields of an entry determine its
format. Report counts what was read and what was skipped, and prints it."""

import csv
import json
import re
from collections import Counter
from contextlib import contextmanager

from records.check import short
from records.errors import DataError, Unreadable, plural, warn
from records.reader import CHAT_KEYS, FORM_ERRORS

MAX_PRINTED = 20  # messages about skipped entries, without --all
FORMATS = ("records", "chats", "questions", "captions", "coco", "labelme", "yolo",
           "yolo-polygons")
ANSWERS = {  # field of a question: field of its answer
    "query": "response", "instruction": "output", "question": "answer", "prompt": "completion"}
CAPTIONS = ("text", "caption")
TEXTS = {*ANSWERS, *ANSWERS.values(), *CAPTIONS, "input", "system", "chosen", "rejected"}
TABLES = ("metadata.jsonl", "metadata.csv")  # of an imagefolder
MIXTURE = "a mixture; give it a name that ends in mix.json, and use it with --data of train.py"
TRACKS = "write its tracks as records (docs/records.md)"
# Fields of an entry, or the end of a file name -> one of FORMATS, or a format that is not supported
# and what to do. The first match decides.
SIGNS = [
    ({"images", "annotations.image_id"}, "coco"),
    ({"videos", "annotations"}, f"TAO or YouTube-VIS; {TRACKS}"),
    ({"annotations.result"}, "Label Studio; export COCO or YOLO"),
    ({"annotations.coordinates"}, "CreateML; export COCO or YOLO"),
    ({"annotations"}, "records"),
    *(({key}, "chats") for key in CHAT_KEYS),
    *(({key}, "questions") for key in ANSWERS),
    ({"chosen", "rejected"}, "chats"),
    ({"shapes", "imagePath"}, "labelme"),
    *(({key}, "captions") for key in CAPTIONS),
    ({"assets"}, "VoTT; export COCO with another tool"),
    ({"asset", "regions"}, "VoTT; export COCO with another tool"),
    ({"_via_img_metadata"}, "VGG Image Annotator; export COCO"),
    ({"path"}, MIXTURE), ({"group", "data"}, MIXTURE),
    ({".xml"}, f"XML of Pascal VOC or CVAT; export COCO or YOLO, or {TRACKS}"),
    ({".ini"}, f"MOT; {TRACKS}"),
    ({".parquet"}, "Parquet; write a .jsonl file, for example with pandas"),
    ({".xlsx"}, "Excel; save it as CSV UTF-8"),
    ({".yaml"}, "a file of YOLO; give its folder"),
    *(({end}, "subtitles; convert the file with their videos, and give --subtitles this folder")
      for end in (".srt", ".vtt")),
]
NOTHING = (None, "", [], {}, [""], [None])  # values of fields that count as absent
# Names of fields that may change what the model is trained on. They contain one of these words, or
# are one of the names at the end: columns of options (A, B, .. or a0, a1, ..), and predictions.
TELLING = re.compile(
    "(?<![a-z])(?i:(?:image|img|picture|photo|video|audio|file|keypoint)[a-z]*|path|pixel|vid|frame"
    "|media|sound|speech|clip|pdf|depth|point|box|bbox|object|region|mask|segmentation|polygon"
    "|annotation|label|weight|loss|train|answer|response|output|completion|chosen|reject|rejected"
    "|target|solution|(?:ground)?truth|reasoning|thinking|tool|function|option|choice|correct"
    "|preferred|caption|prompt|context|input|history|hint|lecture|passage|candidate|distractor"
    "|subtitle|(?:question|query|instruction)(?!_?id|_?type))(?:e?s)?(?![a-z])"
    r"|^(?:[A-Z]|[a-e]|[aA]\d|scores?|confidence|ignored?|attributes)$")
# cells of CSV that are not broken, each with the comma after it
CELLS = r'(?:(?:"[^"]*(?:""[^"]*)*"|[^",\n][^,\n]*)?,)*'
# words in names of fields that may select a part of a video
TIMES = re.compile("(?<![a-z])(?i:time|timestamp|ts|start|end|begin|moment|span|segment|interval"
                   "|second|sec)s?(?![a-z])")


class Report:
    """Counts the entries that were read by their format, and the mistakes by their kind. args: the
    flags of the command."""

    def __init__(self, args):
        self.args = args
        self.read = Counter()
        self.skipped = Counter()
        self.not_read = {}  # name of an unknown field: [how often it occurs, its first value]

    def known_fields(self, fields, names, place=None, owner="the entry"):
        """-> the fields that are in `names`. Fields that are empty or in --ignore are ignored.

        place: None for the fields of an entry, or the object in it, such as "turn 1". An unknown
        field is an error in such an object, with --strict, and if `is_telling`. Else it is only
        counted. owner: what messages name if `place` is None.
        """
        known = {}
        for key, value in fields.items():
            if value in NOTHING or key in self.args.ignore:
                continue
            if key in names:
                known[key] = value
            elif place or self.args.strict or is_telling(key, fields):
                raise Unreadable(
                    "unknown field", f"{place or owner}: the field {short(key)} is not "
                    "supported; rename it (docs/convert.md), or ignore it with --ignore "
                    f"{short(key)}")
            else:
                self.not_read.setdefault(key, [0, value])[0] += 1
        return known

    @contextmanager
    def skipping(self, where):
        """If an error ends the block, counts and prints the reason. The caller continues."""
        try:
            yield
            return
        except Unreadable as error:
            kind, sentence = error.args
        except FORM_ERRORS as error:
            kind = "wrong record"
            sentence = f"it cannot be read as a record: {type(error).__name__}: {error}"
        self.skipped[kind] += 1
        if self.args.all or self.skipped.total() <= MAX_PRINTED:
            warn(f"{where}: {kind}: {sentence}; skipped")

    def end(self, path):
        """Prints the number of other mistakes, the fields that were not used, and what was read."""
        rest = self.skipped.total() - MAX_PRINTED
        if rest > 0 and not self.args.all:
            warn(f"{rest} more were skipped; --all prints them")
        for key, (n, value) in self.not_read.items():
            warn(f"the field {short(key)} is not used; it occurs {plural(n, 'time')}, for example "
                 f"with the value {short(value)}")
        kinds = ", ".join(f"{kind} ({n:,})" for kind, n in self.read.items())
        warn(f"{path}: read as {kinds or 'an empty file'}")


def is_telling(key, fields):
    """May this field of an entry change what the model is trained on?"""
    if key == "attributes" and isinstance(fields[key], dict):
        return any(fields[key].values())  # CVAT writes {"occluded": false} for every box
    # without a video, a time may be the time of a chat; the video may be inside a turn
    return TELLING.search(key) or (TIMES.search(key) and "video" in str(fields))


def known_format(signs, default):
    return next((name for needed, name in SIGNS if needed <= signs), default)


def kind_of(row):
    """-> one of FORMATS, or a format that is not supported and what to do."""
    if not isinstance(row, dict):
        return "records"
    signs = {key for key, value in row.items() if value is not None}  # None counts as absent
    annotations = row.get("annotations")
    if isinstance(annotations, list) and annotations and isinstance(annotations[0], dict):
        signs |= {f"annotations.{key}" for key in annotations[0]}
    fields = short(", ".join(row))
    return known_format(signs, f"an unknown format; its fields are {fields} (docs/own_data.md "
                        "lists the formats)")


def read_rows(path):
    """Yields (where, row). `where` is "file:line", "file" or "file[number]" (from 0), followed by
    the id of the entry. For a line that cannot be read, `row` is an Unreadable."""
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    tables = [file for file in entries if file.name in TABLES]
    if len(tables) > 1:
        raise DataError(f"{path}: it contains both {' and '.join(TABLES)}; give one of these files "
                        "instead of the folder")
    known = [".json"] if path.is_dir() else READERS
    files = tables or [file for file in entries if file.suffix.lower() in known]
    if not files:
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        inner = [str(file) for file in below if file.suffix in READERS][:3]
        what = known_format({file.suffix for file in below},
                            "not a known format; --help lists the known formats")
        if inner:
            what = f"not a known format; files below it: {', '.join(inner)}"
        raise DataError(f"{path}: this is {what}")
    for file in files:
        for where, row in READERS[file.suffix.lower()](file):
            if len(files) > 1 and kind_of(row) != "labelme":
                raise DataError(f"{where}: a folder with several .json files must contain files of "
                                "LabelMe; give one file instead of the folder")
            has_id = isinstance(row, dict) and "id" in row
            yield where + (f" id {short(row['id'])}" if has_id else ""), row


def unique(pairs):
    """[(key, value), ..] -> a dict. ValueError if a key occurs twice."""
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{short(twice)} occurs twice")
    return found


def read_lines(path):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                # json.loads accepts a byte order mark in bytes, but not in a str
                row = json.loads(line, object_pairs_hook=unique)
            except (ValueError, RecursionError) as error:
                row = Unreadable("not JSON", str(error))
            yield f"{path}:{number}", row


def read_json(path):
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the file is not JSON: {error}; if it has one entry per line, "
                        "its name must end in .jsonl") from None
    if isinstance(content, list):
        yield from ((f"{path}[{k}]", row) for k, row in enumerate(content))
    else:
        yield str(path), content


def read_csv(path):
    end = 0  # the last line of the entries that were read
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            names = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=names.count)
            table = csv.reader(file, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(table, ())]
            end = table.line_num
            for cells in table:
                end = table.line_num
                row = unique(zip(names, cells, strict=False))
                # programs write an empty list as []; a text may be [] itself
                row |= {name: [] for name in row.keys() - TEXTS if row[name] == "[]"}
                if len(cells) > len(names):
                    row = Unreadable("wrong record", f"it has {len(cells)} cells, but the first "
                                     f"line has {plural(len(names), 'column')}")
                if cells:
                    yield f"{path}:{end}", row
    except ValueError as error:
        raise DataError(f"{path}: the table cannot be read; save it as CSV UTF-8 ({error})"
                        ) from None
    except csv.Error as error:
        # line breaks may be \n, \r\n or \r in the file, and are \n in this text
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        before = re.match(CELLS.replace(",", delimiter), "\n".join(lines[end:]))
        line = end + 1 + before[0].count("\n")
        raise DataError(f"{path}:{line}: a cell of this line cannot be read ({error}); if a cell "
                        'begins with ", it must end with ", and each " inside it must be doubled; '
                        "if your program does not write cells in this way, make a .jsonl file "
                        "(docs/convert.md)") from None


READERS = {".jsonl": read_lines, ".ndjson": read_lines, ".json": read_json,
           ".csv": read_csv, ".tsv": read_csv}
