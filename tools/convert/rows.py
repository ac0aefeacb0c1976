"""The rows of a file, or of the files in a folder; their formats, told by their fields; and what is
said about them."""

import csv
import json
import re
from collections import Counter
from contextlib import contextmanager

from records.check import short
from records.errors import DataError, Unreadable, plural, warn
from records.reader import CHAT_KEYS, FORM_ERRORS

MAX_PRINTED = 20  # rows, without --all
FORMATS = ("records", "chats", "questions", "captions", "coco", "labelme", "yolo")
ANSWERS = {  # field of a question: field of its answer
    "query": "response", "instruction": "output", "question": "answer", "prompt": "completion"}
CAPTIONS = ("text", "caption")
TABLES = ("metadata.jsonl", "metadata.csv")  # of an imagefolder
MIXTURE = "a mixture; give it a name that ends in mix.json, and name it with --data"
TRACKS = "write its tracks as records (docs/records.md)"
# Fields of a row, or the end of a file's name -> one of FORMATS, or what it is that is not read,
# and what to do. The first that fits decides.
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
    ({".yaml"}, "of YOLO; name its folder"),
    *(({end}, "subtitles; name the file of their videos, and this folder with --subtitles")
      for end in (".srt", ".vtt")),
]
NOTHING = (None, "", [], {}, [""], [None], "[]")  # in tables, the fields that other rows have
# a word in the name of a field that may change what is trained
TELLING = re.compile(
    "(?<![a-z])(?i:(?:image|img|picture|photo|video|audio|file|keypoint)[a-z]*|path|pixel|vid|frame"
    "|media|sound|speech|clip|pdf|depth|point|box|bbox|object|region|mask|segmentation|polygon"
    "|annotation|label|weight|loss|train|answer|response|output|completion|chosen|reject|rejected"
    "|target|solution|(?:ground)?truth|reasoning|thinking|tool|function|option|choice|correct"
    "|preferred|caption|prompt|context|input|history|(?:question|query|instruction)(?!_id|_type))"
    "(?:e?s)?(?![a-z])")


class Report:
    """Counts what was read, by its format, and what was skipped, by the kind of mistake. args: the
    flags of the command."""

    def __init__(self, args):
        self.args = args
        self.read = Counter()
        self.skipped = Counter()
        self.subtitles = set()  # files that were read
        self.not_read = {}  # name of a field of a row: [number of rows, its first value]

    def known_fields(self, fields, names, place=None):
        """The fields of a row, or of an object at a place in it, without those that are empty or
        in --ignore. Unreadable for one that is not in names; fields of a row that can hardly
        change what is trained are only counted, but with --strict."""
        known = {}
        for key, value in fields.items():
            if value in NOTHING or key in self.args.ignore:
                continue
            if key in names:
                known[key] = value
            elif place or self.args.strict or TELLING.search(key):
                raise Unreadable(
                    "unknown field", f"{place or 'the row'}: the field '{key}' is not read: rename "
                    f"it to one that is (docs/convert.md), or leave it out with --ignore {key}")
            else:
                self.not_read.setdefault(key, [0, value])[0] += 1
        return known

    @contextmanager
    def skipping(self, where):
        """Ends the block where something cannot become a record."""
        try:
            yield
            return
        except Unreadable as error:
            kind, sentence = error.args
        except FORM_ERRORS as error:
            kind = "wrong record"
            sentence = f"it cannot be read as one: {type(error).__name__}: {error}"
        self.skipped[kind] += 1
        if self.args.all or self.skipped.total() <= MAX_PRINTED:
            warn(f"{where}: {kind}: {sentence}; skipped")

    def end(self, path):
        """Says how many skipped rows were not printed, and what was read."""
        rest = self.skipped.total() - MAX_PRINTED
        if rest > 0 and not self.args.all:
            warn(f"{rest} more were skipped; --all prints them")
        for key, (n, value) in self.not_read.items():
            warn(f"the field '{key}' is not read: in {plural(n, 'row')}, such as {short(value)}")
        kinds = ", ".join(f"{kind} ({n:,})" for kind, n in self.read.items())
        warn(f"{path}: read as {kinds or 'an empty file'}")


def known_format(signs, default):
    return next((name for needed, name in SIGNS if needed <= signs), default)


def kind_of(row):
    """-> one of FORMATS, or what else the row is."""
    if not isinstance(row, dict):
        return "records"
    signs = {key for key, value in row.items() if value is not None}  # tables have all fields
    annotations = row.get("annotations")
    if isinstance(annotations, list) and annotations and isinstance(annotations[0], dict):
        signs |= {f"annotations.{key}" for key in annotations[0]}
    fields = short(", ".join(row))
    return known_format(signs, f"an unknown format; its fields are {fields} (docs/own_data.md "
                        "lists the formats)")


def read_rows(path):
    """Yields (where, row): "file:line", "file", or "file[number]" from 0, with the id of a row. A
    line that cannot be read is an Unreadable."""
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    tables = [file for file in entries if file.name in TABLES]
    known = [".json"] if path.is_dir() else READERS
    files = tables[:1] or [file for file in entries if file.suffix.lower() in known]
    if not files:
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        inner = [str(file) for file in below if file.suffix in READERS][:3]
        what = known_format({file.suffix for file in below}, "no known format; --help lists them")
        if inner:
            what = f"no known format; below it are {', '.join(inner)}"
        raise DataError(f"{path}: this is {what}")
    for file in files:
        for where, row in READERS[file.suffix.lower()](file):
            if len(files) > 1 and kind_of(row) != "labelme":
                raise DataError(f"{where}: of several .json files only LabelMe's are read; name "
                                "one file in place of the folder")
            has_id = isinstance(row, dict) and "id" in row
            yield where + (f" id {row['id']!s:.60}" if has_id else ""), row


def unique(pairs):
    """A dict of these keys and values. ValueError if one key is there twice."""
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{short(twice)} is there twice")
    return found


def read_lines(path):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                # in bytes a byte order mark is read, in a text it is an error
                row = json.loads(line, object_pairs_hook=unique)
            except (ValueError, RecursionError) as error:
                row = Unreadable("not JSON", str(error))
            yield f"{path}:{number}", row


def read_json(path):
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the file is not JSON: {error}; a file with one row per line "
                        "ends in .jsonl") from None
    if isinstance(content, list):
        yield from ((f"{path}[{k}]", row) for k, row in enumerate(content))
    else:
        yield str(path), content


def read_csv(path):
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            names = file.readline()
            file.seek(0)
            table = csv.reader(file, delimiter=max(",;\t", key=names.count))
            names = [name.strip() for name in next(table, ())]
            for cells in filter(None, table):
                row = unique(zip(names, cells, strict=False))
                if len(cells) > len(names):
                    row = Unreadable("wrong record", f"it has {len(cells)} cells, and the first "
                                     f"line names {plural(len(names), 'column')}")
                yield f"{path}:{table.line_num}", row
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: the table cannot be read; save it as CSV UTF-8 ({error})"
                        ) from None


READERS = {".jsonl": read_lines, ".ndjson": read_lines, ".json": read_json,
           ".csv": read_csv, ".tsv": read_csv}
