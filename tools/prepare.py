"""Published data sets to records (paper: data; what each set is, its size and its licence: DATA.md).

    python -m tools.prepare pixmo-points downloads/pixmo-points data/points
    python -m tools.prepare molmo2-cap downloads/Molmo2-Cap data/cap --videos youtube-cc

in    a set's parquet or json/jsonl files as they are published, or a folder of them; of media only what was fetched before
out   OUT/records.jsonl   a record per visual input, its annotations the branches of a message tree
      OUT/media/          images that were embedded in the files, named by the sha256 of their bytes
      OUT/urls.txt        url TAB path below the media folder, for you to fetch: nothing here opens a connection
      stdout              {"records":, "annotations":, "skipped": {reason: n}, "urls":, "missing_media":}

What cannot become a record is left out and counted by its reason. A record whose file is absent is written all the same.

Rows of one image lie anywhere in millions of them. They meet in a database on disk, OUT/prepare.sqlite: a row's annotations go
under the key of its visual input, and records are written in the order in which keys came up. In memory there are a batch of
rows, 256 MB of the database at most, and the names of the files that were fetched.

    row 0  u1  mug      heads  1 u1   2 u2               records  u1 [mug, cat]
    row 1  u2  dog      notes  u1 mug   u2 dog   u1 cat            u2 [dog]
    row 2  u1  cat

Every batch is a transaction together with the place where it ends: after a kill the same command goes on there, and the result
is the same to the byte. The order of options, the choice of a transcript, of pointing or counting are left to the trainer.

Left out: clip and frame captions of Molmo2-Cap, masks, the boxes that Molmo2 draws into AI2D, folders of frames as videos.
"""

import argparse
import difflib
import hashlib
import json
import math
import os
import re
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path

TYPES = ("chart", "chemical", "circuit", "diagram", "doc", "document", "graphic", "math", "music", "nutrition", "table")
VIDEO = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n": "png", b"GIF8": "gif", b"BM": "bmp", b"II*\0": "tiff", b"MM\0*": "tiff"}
# left out by Molmo2 too: videos that do not decode; sources of Tulu that are puzzles, long reasoning, or about the model itself
CORRUPT = {"0OfUqrbRa2Y", "mTXBQzptWAg", "NyuA4FatDQk", "a_", "gsfIHiBB6xE", "bXApJtAf6Qo", "N8BlpYSpgg4"}
NOT_CHAT = re.compile("puzzle_data|verifiable-reasoning|dino-hardcodes|hardcoded-olmo")
BATCH, PICTURES = 2000, 32           # rows in memory at a time; with pictures in them they take a megabyte each, or more
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


class Usage(Exception):
    """A user's mistake, told in one sentence; exit status 2."""


class Bad(Exception):
    """Why a row, or one annotation of it, is left out."""


# ---------------------------------------------------------------------------------------------------------------
# files to rows


def source_files(sources, split):
    """The files to read, in order: those named, or all below a folder (parquet before json), of one split."""
    files = []
    for source in map(Path, sources):
        if not source.exists():
            raise Usage(f"{source}: no such file or folder")
        jsons = (p for p in source.rglob("*.json*") if p.suffix in (".json", ".jsonl"))
        files += [source] if source.is_file() else sorted(source.rglob("*.parquet")) or sorted(jsons)
    splits = {path: re.sub(r"-\d{5}-of-\d{5}.*", "", path.stem) for path in files}         # train-00000-of-00002.parquet
    if split:
        files = [path for path in files if splits[path] == split]
    elif len(found := {"train", "validation", "val", "test"} & {*splits.values()}) > 1:
        raise Usage(f"{sources[0]} holds the splits {', '.join(sorted(found))}: choose with --split")
    if not files:
        raise Usage(f"{' '.join(sources)}: no .parquet, .json or .jsonl file" + (f" of the split '{split}'" if split else ""))
    return files


def read_json(path):
    """The rows of a .jsonl, or of a .json that holds an array or (DocVQA, TextVQA) an object around one; of a broken line, None."""
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8-sig", errors="replace") as lines:
            for line in filter(str.strip, lines):
                try:
                    yield json.loads(line)
                except ValueError:
                    yield None
        return
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as e:
        raise Usage(f"{path}: not JSON: {e}") from None
    if isinstance(rows, dict):
        rows = next((inner for inner in rows.values() if isinstance(inner, list)), None)
    if rows is None:
        raise Usage(f"{path}: not an array of rows")
    yield from rows


def batches(path, columns, size, start):
    """(row number, [row, ..]) from the row `start`, at which a batch begins. columns: "name", or "name?" where it may be absent."""

    def check(found):
        needed = [name for name in columns if not name.endswith("?")]
        if missing := [name for name in needed if name not in found]:
            raise Usage(f"{path} has no column {', '.join(missing)}: expected {', '.join(needed)}; found {', '.join(found) or 'none'}")

    at = 0
    if path.suffix != ".parquet":
        rows = read_json(path)
        while batch := list(islice(rows, size)):
            if at == 0:
                check(next((list(row) for row in batch if isinstance(row, dict)), []))
            if at >= start:
                yield at, batch
            at += len(batch)
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise Usage(f"{path} is a parquet file, which needs pyarrow: pip install pyarrow") from None
    try:
        table = parquet.ParquetFile(path)
        check(table.schema_arrow.names)
        names = [name.rstrip("?") for name in columns if name.rstrip("?") in table.schema_arrow.names]
        for group in range(table.num_row_groups):
            n = table.metadata.row_group(group).num_rows
            if at + n <= start:
                at += n
                continue
            for batch in table.iter_batches(size, [group], names):
                if at >= start:
                    yield at, batch.to_pylist()
                at += len(batch)
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise Usage(f"{path}: not a parquet file that can be read: {e}") from None


# ---------------------------------------------------------------------------------------------------------------
# media: found, written, or listed to be fetched


def stem(name):
    """The name of a video without its extension: "a.b" has none."""
    return os.path.splitext(name)[0] if name.lower().endswith(VIDEO) else name


class Media:
    """The folder that the paths of records start from, and what the batch in hand names in it."""

    def __init__(self, root):
        self.root, self.files, self.named = Path(root), None, {}          # named: path -> its URL, or None

    def find(self, name, video=False):
        """Path of the file called `name`, whatever its extension, or else of a video in a folder of that name; None if there is
        none. "sora2/clip" must lie in a folder sora2, or sora2-2fps. The disk is searched once."""
        if self.files is None:
            self.files, self.folders = {}, {}
            for folder, inside, files in os.walk(self.root, followlinks=True):
                inside.sort()
                for file in sorted(files):
                    path = Path(folder, file).relative_to(self.root).as_posix()
                    self.files.setdefault(os.path.splitext(file)[0], []).append(path)
                    if file.lower().endswith(VIDEO):
                        self.folders.setdefault(os.path.basename(folder), []).append(path)
        above, _, last = f"/{name}".rpartition("/")
        for path in self.files.get(last, []) + (self.folders.get(last, []) if video else []):
            beside = f"/{os.path.dirname(path)}"
            if (not video or path.lower().endswith(VIDEO)) and beside.endswith((above, above + "-2fps")):
                return path
        return None

    def path(self, path, url=None):
        """Notes down that a record names this path, which must stay below the folder."""
        if not text(path) or re.match(r"[A-Za-z][A-Za-z0-9+.-]+:|/", path) or ".." in Path(path).parts:
            raise Bad("path that leaves the media folder")
        self.named[path] = url
        return path

    def url(self, url, sha256=None):
        """An image known by its URL. Its file is called by the sha256 of the URL; the argument is that of its bytes."""
        if not text(url) or re.search(r"[\t\r\n]", url):
            raise Bad("no image")
        name = hashlib.sha256(url.encode()).hexdigest()
        entry = {"path": self.path(self.find(name) or name, url), "url": url}
        return entry | ({"sha256": sha256} if re.fullmatch("[0-9a-f]{64}", sha256 or "") else {})

    def cell(self, cell):
        """An image cell: {bytes, path}, bytes, a path or a URL. Bytes become a file, once."""
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, cell)
        if data and isinstance(data, bytes):
            kind = "webp" if data[8:12] == b"WEBP" else next((k for magic, k in MAGIC.items() if data.startswith(magic)), None)
            if kind is None:
                raise Bad("bytes that are no image")
            name = f"{hashlib.sha256(data).hexdigest()}.{kind}"
            if not (self.root / name).exists():
                self.root.mkdir(parents=True, exist_ok=True)
                (self.root / f"{name}.draft").write_bytes(data)
                (self.root / f"{name}.draft").replace(self.root / name)
            return self.path(name)
        if not path:
            raise Bad("no image")
        return self.url(path) if path.startswith(("http:", "https:")) else self.path(path)

    def video(self, *names, start=None, end=None, **meta):
        """The head of a record on the video that goes by one of these names; by the first, with .mp4, where none is found."""
        if not all(names):
            raise Bad("no video")
        found = (self.find(stem(name), video=True) for name in names)
        path = next(filter(None, found), names[0] if stem(names[0]) != names[0] else names[0] + ".mp4")
        video = {"path": self.path(path)}
        if number(start) is not None and number(end) is not None:
            if not 0 <= start < end:
                raise Bad("clip that ends before it starts")
            video |= {"start": start, "end": end}
        return {"video": video, **kept(**meta)}


# ---------------------------------------------------------------------------------------------------------------
# cells to parts of annotations


def text(value):
    """A string without the space around it; None if nothing is left, or if no file could hold it."""
    return (value.strip() or None) if isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value) else None


def number(value):
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def kept(**meta):
    """{"meta": {..}} of what is not null: arrow fills in nulls wherever rows differ."""
    meta = {k: v for k, v in meta.items() if text(v) or number(v) is not None or isinstance(v, bool)}
    return {"meta": meta} if meta else {}


def named(label, question):
    names = {k: text(v) for k, v in (("label", label), ("question", question)) if text(v)}
    if not names:
        raise Bad("no label")
    return names


def scale(w, h):
    return {"size": [int(w), int(h)]} if min(number(w) or 0, number(h) or 0) >= 1 else {}


def places(cell):
    """[{"x":, "y":}, ..] from a list of structs or a struct of lists."""
    if isinstance(cell, dict):
        cell = [{"x": x, "y": y} for x, y in zip(cell["x"], cell["y"], strict=True)]
    return [{"x": p["x"], "y": p["y"]} for p in cell or []]


def inside(points, w, h):
    """The trainer clips up to 1 % (and refuses more); NaN, which no record can hold, is outside as well."""
    if not all(-w / 100 <= p["x"] <= 1.01 * w and -h / 100 <= p["y"] <= 1.01 * h and math.isfinite(p["x"] + p["y"]) for p in points):
        raise Bad("point outside the picture")


def point(points, coords, label, question=None, size=None, count=None, clip=False, most=math.inf, counts=None, **more):
    """A point annotation. points: [{"x":, "y":, "t" or "image"}, ..]; clip: what lies outside is moved to the border, else it costs
    the annotation; most, counts: bounds on how many there are."""
    names, (w, h) = named(label, question), (100, 100) if coords == "percent" else (size or {}).get("size", (math.inf, math.inf))
    if clip:
        points = [{**p, "x": min(max(p["x"], 0), w), "y": min(max(p["y"], 0), h)} for p in points]
    inside(points, w, h)
    if len(points) > most:
        raise Bad(f"more than {most} points")
    if counts and not counts[0] <= len(points) <= counts[1]:
        raise Bad(f"not {counts[0]} to {counts[1]} points")
    if count not in (None, len(points)):
        raise Bad("count is not the number of points")
    count = {} if count is None else {"count": len(points)}
    return {"type": "point", **names, "coords": coords, **(size or {}), **more, **count, "points": points}


def counted(count, label, question=None):
    if number(count) is None or count < 0:
        raise Bad("no count")
    return {"type": "count", **named(label, question), "count": int(count)}


def caption(value, style):
    if not text(value):
        raise Bad("empty caption")
    return {"type": "caption", "style": style, "text": text(value)}


def qa(question, style, answer=None, answers=(), options=None, right=None, **more):
    """A question with an answer, several people's answers, or options of which number `right` is the right one."""
    if not text(question):
        raise Bad("empty question")
    if options is not None:
        options = [option.strip() for option in options]
        unlike = list(dict.fromkeys(options))                             # of an option given twice no letter would be right
        if not 2 <= len(unlike) <= 26 or right not in range(len(options)):
            raise Bad("no right option among 2 to 26")
        target = {"options": unlike, "answer_idx": unlike.index(options[right])}
    else:
        answers = [text(a) for a in answers if text(a)]
        target = {"answers": answers} if answers else {"answer": text(answer)} if text(answer) else None
        if target is None:
            raise Bad("empty answer")
    return {"type": "qa", "style": style, "question": text(question), **target, **more}


def chat(messages):
    """Messages of any dialect -> (system or None, [(question, answer), ..]); a last question without an answer is dropped."""
    said = [(str(m.get("role") or m.get("from")).lower(), m.get("content") or m.get("value")) for m in messages]
    system = text(said.pop(0)[1]) if said and said[0][0] == "system" else None
    turns = list(zip(said[::2], said[1::2], strict=False))
    if not turns or any((ROLES.get(a, a), ROLES.get(b, b)) != ("user", "assistant") for (a, _), (b, _) in turns):
        raise Bad("turns that do not alternate")
    if not all(text(words) for turn in turns for _, words in turn):
        raise Bad("empty turn")
    return system, [(q, a) for (_, q), (_, a) in turns]


def dialogue(turns, style, **more):
    return {"type": "qa", "style": style, **more, "turns": [{"question": q, "answer": a} for q, a in turns]}


def group_of(images):
    if not 2 <= len(images) <= 5:
        raise Bad("not 2 to 5 images")
    return images


# ---------------------------------------------------------------------------------------------------------------
# layouts: (row, s, media) -> the head of a record, and its annotations as (function, arguments) still to be called, so that one
# that is Bad costs no other. s: the set's settings, the flags of the command, and the file.


def captions(row, s, media):
    spoken = row.get("transcripts") or [] if s["transcripts"] else []
    written = [(caption, row["caption"], "long_caption"), *((caption, t, "transcript") for t in spoken)]
    return {"image": media.url(row["image_url"])}, written


def points(row, s, media):
    """A label per row; points as a list of structs, or (PixMo-Count, in pixels of the original image) as a struct of lists."""
    image, cell, count, size = media.url(row["image_url"], row.get("image_sha256")), places(row.get("points")), row.get("count"), None
    if s.get("method") not in (None, row.get("collection_method")):
        raise Bad("another collection_method")
    if s["coords"] == "pixel" and (media.root / image["path"]).is_file():
        from media import Unreadable, header  # here, since torch comes with it
        try:
            size = scale(*header(media.root / image["path"]))
        except Unreadable:
            size = None                                                   # not an image at all: the trainer counts it
    if count and not cell:                                                # evaluation says how many and not where
        return {"image": image}, [(counted, count, row["label"])]
    return {"image": image}, [(lambda: point(cell, s["coords"], row["label"], None, size, count, s.get("clip"), 60, s["counts"],
                                             **kept(collection_method=row.get("collection_method"))),)]


def questions(row, s, media):
    head = media.video(row["video_id"]) if "video_id" in row else {"image": media.url(row["image_url"], row.get("image_sha256"))}
    return head, [(qa, row["question"], "user_qa", row["answer"])]


def tagged_dialogues(row, s, media):
    """[USER] q1 [ASSISTANT] a1 [USER] q2 [ASSISTANT]; the last answer has a column of its own."""
    before, *tags = re.split(r"\[(USER|ASSISTANT)\]", row["question"])
    if before.strip() or tags[-2:-1] != ["ASSISTANT"] or tags[-1].strip():
        raise Bad("dialogue that does not parse")
    tags[-1] = row["answer"]
    _, turns = chat([{"role": role, "content": words} for role, words in zip(tags[::2], tags[1::2], strict=True)])
    return {"image": media.url(row["image_url"])}, [(dialogue, [(q.strip(), a.strip()) for q, a in turns], "user_qa")]


def questions_with_points(row, s, media):
    names = row.get("names") or [None] * len(row["questions"])
    made = [(lambda q=q, cell=cell, name=name: point(places(cell), "percent", name, q, mode="point", style="cosyn_point"),)
            for q, cell, name in zip(row["questions"], row["answer_points"], names, strict=True)]
    return {"image": media.cell(row["image"]), **kept(id=row.get("id"))}, made


def qa_pairs(row, s, media):
    """qa_pairs{question[], explanation[], answer[]} on one image, or on two to five."""
    images = row["images"] if "images" in row else row.get("image_urls")
    head = {"image": media.cell(row["image"])} if "image" in row else {"images": group_of([media.cell(cell) for cell in images])}
    pairs, style = row["qa_pairs"], s["style"]
    if "{type}" in style:
        kind = s["type"] or s["file"].absolute().parent.name
        style = "cosyn_document" if kind == "document" else style.format(type=kind)
    steps = pairs.get("explanation") if style.endswith("_exp") else None

    def pair(question, answer, why):
        why = {"explanation": text(why)} if text(why) else {}
        return qa(question, style if why else style.removesuffix("_exp"), answer, **why)

    steps = steps or [None] * len(pairs["question"])
    return head | kept(id=row.get("id")), [(pair, *each) for each in zip(pairs["question"], pairs["answer"], steps, strict=True)]


def messages(row, s, media):
    """Text alone, word for word. Molmo2 filters by source and by the columns of its classified copy."""
    if row.get("category") in ("code", "non-english") or NOT_CHAT.search(row.get("source") or ""):
        raise Bad("code, another language, puzzles, reasoning")
    if (row.get("first_message_qwen3_tokens") or 0) > s["first_tokens"]:
        raise Bad("first message too long")
    system, turns = chat(row["messages"])
    if row.get("has_special_token") or re.search(r"<\|\w+\|>", json.dumps([system, turns])):
        raise Bad("special tokens in the text")
    system = {"system": system} if system else {}
    return kept(id=row.get("id"), source=row.get("source")), [(lambda: dialogue(turns, "text_sft", **system),)]


def video_captions(row, s, media):
    name, score = row["video_id"], row["annotation_score"]
    if name in CORRUPT:
        raise Bad("video known not to decode")
    if (score or 0) < s["min_score"]:
        raise Bad(f"annotation_score below {s['min_score']:g}")
    head = media.video(name, f"v_{name}", f"ytb_{name}", start=row.get("video_start"), end=row.get("video_end"), annotation_score=score)
    styles = {"video_caption": "short", "merged_caption": "merged", "video_frame_merged_caption": "long"}
    return head, [(caption, row[c], f"video_{style}_caption") for c, style in styles.items() if row.get(c)]


def negatives(row, s, media):
    """The right answer first: the trainer shuffles. All rows of a video have the same subtitle."""
    head = media.video(row["video_id"])
    lines = [{"start": t["start"], "end": t["end"], "text": text(t["text"])} for t in row.get("subtitle") or []
             if text(t["text"]) and 0 <= t["start"] <= t["end"]]
    options = [row["Answer"], *(row["NegativeAnswers"] or [])] if text(row["Answer"]) else []
    head |= {"subtitles": sorted(lines, key=lambda t: t["start"])} if lines else {}
    more = {"shuffle_options": True, **kept(category=row.get("Category"))}
    return head, [(lambda: qa(row["Question"], "video_multiple_choice", options=options, right=0, **more),)]


def video_points(row, s, media):
    """points[i] at time i: a list of points, one point (evaluation), or no such column (counts). Times are seconds of the whole
    video, of which the clip is a window."""
    name = row.get("video_id") or row["video_name"]
    start, end = (row.get(k, row.get(f"{k}_time")) for k in ("clip_start", "clip_end"))
    first, last = (0, row.get("video_duration") or math.inf) if start is None or end is None else (start, end)
    if last - first > s["seconds"] and last < math.inf:
        raise Bad(f"no clip of at most {s['seconds']} s")
    head = media.video(stem(name) + "_2fps", name, start=start, end=end, video_source=row.get("video_source"))
    label = row["label"] if "label" in row else row["category"].lower()
    question = row.get("question") if s.get("asked", True) else None
    if "points" not in row:
        return head, [(counted, row["count"], label, question)]

    def annotation():
        times = row["two_fps_timestamps"] if "two_fps_timestamps" in row else row["timestamps"]
        cells = [cell if isinstance(cell, list) else [cell] for cell in row["points"]]
        timed = [{"t": t, **p} for t, cell in zip(times, cells, strict=True) for p in places(cell)]
        if not all(max(first - 0.25, 0) <= p["t"] <= last + 0.25 for p in timed):
            raise Bad("point outside the clip")                           # by more than half a frame
        size = scale(row["width"], row["height"]) if s["coords"] == "pixel" else None
        return point(timed, s["coords"], label, question, size, row["count"], most=60, counts=s["counts"], mode=s["mode"],
                     **kept(category=row.get("category"), annotator_unsure=row.get("annotator_unsure")))

    return head, [(annotation,)]


def seen_at(place):
    """Is there a position? What is hidden has none: null, or a pair of nulls or NaN."""
    return bool(place) and None not in map(number, place)


def track(label, points, times, rate, mode, size):
    """points: [{"t":, "id":, "x":, "y":, "occluded"}, ..] in pixels, at `times` seconds, `rate` per second."""
    more, seen = {}, [p for p in points if "occluded" not in p]
    inside(points, *size.get("size", (math.inf, math.inf)))
    if mode == "from_point" and seen:                                     # the first sight is given, what follows is the answer
        more = {"query": seen[0]}
        points = [p for p in points if p["id"] == seen[0]["id"] and p["t"] > seen[0]["t"]]
        seen = [p for p in points if "occluded" not in p]
    if not seen:
        raise Bad("track without a visible point")
    about = {"coords": "pixel", **size, "mode": mode, "fps": rate, "times": times, **more}
    return {"type": "track", **named(label, None), **about, "points": points}


def trajectories(row, s, media):
    """The instruction form: points of objects per frame, in seconds of the clip's own file."""
    fps, rate, ids = row["fps"], number(row["sampling_fps"]), {*map(str, row.get("mask_id") or [])}
    mode = {"track": "per_frame", "ground": "start_end", "single_point_track": "from_point"}.get(row["task"])
    if not mode or (rate or 0) <= 0 or fps % rate:
        raise Bad("fps is no multiple of the sampling rate" if mode else "another task")
    frames = {f["time"]: f["points"] or [] for f in row["frame_trajectories"] if abs(f["time"] - round(f["time"] * rate) / rate) <= 0.01}
    seen = {}                                                             # yt-vis has every native frame: those sampled are kept
    for t in sorted(frames):
        for p in frames[t]:
            if seen_at(p["point"]) and (not ids or str(p["id"]) in ids):
                hidden = {"occluded": True} if p.get("occluded") else {}
                seen.setdefault((t, p["id"]), {"t": t, "id": p["id"], "x": p["point"][0], "y": p["point"][1], **hidden})
    head = media.video(row["video"], video_source=row.get("video_source"), id=row.get("id"))
    return head, [(track, row["expression"], [*seen.values()], sorted(frames), rate, mode, scale(row.get("width"), row.get("height")))]


def positions(row, s, media):
    """The raw form: of every object a position, or null, per frame of the clip; --full-video shifts that into the source video."""
    fps, ids = row["fps"], {*map(str, row.get("mask_id") or [])}
    rate = next((r for r in (2, 1) if fps % r == 0), None)
    if rate is None:
        raise Bad("fps is no multiple of the sampling rate")
    begin = row["start_frame"] / fps if s["full_video"] else 0
    window = {"start": begin, "end": (row["end_frame"] + 1) / fps} if s["full_video"] else {}
    head = media.video(row["video"] if s["full_video"] else row.get("clip") or row["video"], id=row.get("id"), **window)
    paths = {o["object_id"]: o["points"] for o in row["points"] if not ids or str(o["object_id"]) in ids}
    frames = range(0, max(map(len, paths.values()), default=0), int(fps) // rate)
    seen = [{"t": begin + f / fps, "id": i, "x": path[f][0], "y": path[f][1]} for f in frames for i, path in paths.items()
            if f < len(path) and seen_at(path[f])]
    return head, [(track, row["exp"], seen, [begin + f / fps for f in frames], rate, "per_frame", scale(row.get("w"), row.get("h")))]


def points_of_images(row, s, media):
    """A label per image; images whose labels differ in a plural at most share an annotation."""
    images = group_of([media.url(url) for url in row["image_urls"]])
    labels = row.get("normalized_labels") or [label.strip().lower() for label in row["labels"]]
    each, groups = list(zip(row["points"], row.get("counts") or [None] * len(images), strict=True)), {}
    for i, label in zip(range(len(images)), labels, strict=True):
        same = next((n for n in groups if label in (n, n + "s", n + "es") or n in (label + "s", label + "es")), label)
        groups.setdefault(same, []).append(i)

    def annotation(label, members):
        count = None if any(each[i][1] is None for i in members) else sum(each[i][1] for i in members)
        return point([{"image": i, **p} for i in members for p in places(each[i][0])], "percent", label, count=count, clip=True)

    return {"images": images}, [(annotation, *group) for group in groups.items()]


def people(row, s, media):
    """Several people's answers. ChartQA: questions that people wrote weigh more, by their share (spec 7.1)."""
    answers, head = row[s["answers"]], {"image": media.cell(row["image"])}
    answers = [a["answer"] if isinstance(a, dict) else a for a in ([answers] if isinstance(answers, str) else answers or [])]
    if "human_or_machine" in row:
        head["weight"] = 2 * (20901 if row["human_or_machine"] in (0, "human") else 7398) / 28299
    return head, [(qa, row[s["question"]], s["style"], None, answers)]


def choices(row, s, media):
    options, style, more, letters = row[s["options"]], s["style"], {}, row.get("option_is_abc") or []
    if row.get("abc_label") and sum(letters) >= len(options) - 1:         # AI2D: the options are letters in the picture
        options = [o.upper() if letter else o for o, letter in zip(options, letters, strict=True)]
        style, more = "ai2_diagram_no_letter", {"letters": False}
    question = "\n".join(filter(None, (text(row.get("hint")), text(row["question"]))))
    head = {"image": media.cell(row["image"]), **kept(question_id=row.get("question_id"))}
    return head, [(lambda: qa(question, style, options=options, right=row[s["right"]], **more),)]


def lists_of_choices(row, s, media):
    each = zip(row["mc_question"], row["choices"], row["correct_choice_idx"], strict=True)
    return {"images": group_of([media.cell(cell) for cell in row["images"]])}, [
        (lambda q=q, o=o, r=r: qa(q, "mantis_instruct_mc", options=o, right=r, shuffle_options=True),) for q, o, r in each]


def image_conversations(row, s, media):
    """Mantis: placeholders as a block in front, or inside the questions; all turns are one dialogue."""
    images, (_, turns) = group_of([media.cell(cell) for cell in row["images"]]), chat(row["conversation"])
    parts = [q.split("<image>") for q, _ in turns]
    if sum(map(len, parts)) - len(parts) not in (0, len(images)) or any("<image>" in a for _, a in turns):
        raise Bad("placeholders that do not fit the images")
    if len(parts[0]) > len(images) and not "".join(parts[0][:-1]).strip():
        parts[0] = parts[0][-1:]                                          # images come first anyway
    k, said = iter(range(len(images))), []
    for first, *rest in parts:
        question = [first, *(part for words in rest for part in ({"image": next(k)}, words))]
        said.append([part for part in question if part] if rest else first.strip())
    if not all(said):
        raise Bad("empty question")
    return {"images": images}, [(dialogue, zip(said, (a.strip() for _, a in turns), strict=True), "user_qa")]


def video_conversations(row, s, media):
    """LLaVA-Video: the video is marked <image> and lies in data_source/video; every pair is a question of its own."""
    kind = re.search(r"_(oe|mc|cap)(?=[_.-])", s["file"].name)
    style = {"oe": "video_short_answer", "mc": "video_multiple_choice"}.get(kind and kind[1], "user_qa")
    folder = row.get("data_source") or ""
    if not re.search(s.get("only", ""), folder):
        raise Bad("another source")

    def pair(question, answer):
        question, marks = re.subn(r"\s*<(image|video)>\s*", "", question)
        if marks > 1:
            raise Bad("placeholders that do not fit the video")
        return caption(answer, "video_long_caption") if kind and kind[1] == "cap" else qa(question, style, answer)

    return media.video(f"{folder}/{row['video']}".lstrip("/"), row["video"]), [(pair, *turn) for turn in chat(row["conversations"])[1]]


# name: (layout, its columns, settings). A column with a ? may be absent; group: rows of one visual input are one record.
POINTS = "image_url points label image_sha256? count? collection_method?"
CLIPS = " video_source? video_duration? clip_start? clip_end? question? category? annotator_unsure?"
TIMED = "video_id two_fps_timestamps points count label" + CLIPS
CHOSEN = "video_id Question Answer NegativeAnswers Category?"
PERCENT, EACH = {"coords": "percent", "clip": True}, {"group": False}
VQA = {"question": "question", "answers": "answers"}
CLIPPED = {"coords": "percent", "mode": "point_count", "seconds": 63}
SETS = {
    "pixmo-cap": (captions, "image_url caption transcripts?", {"transcripts": True}),
    "pixmo-cap-only": (captions, "image_url caption", {"transcripts": False}),
    "pixmo-points": (points, POINTS, PERCENT),
    "pixmo-points-basic": (points, POINTS.replace("method?", "method"), {**PERCENT, "method": "pointing"}),
    "pixmo-points-high-frequency": (points, POINTS.replace("method?", "method"), {**PERCENT, "method": "counting"}),
    "pixmo-points-eval": (points, "image_url points label image_sha256?", PERCENT),
    "pixmo-count": (points, "image_url label count image_sha256? points?", {"coords": "pixel"}),
    "pixmo-ask-model-anything": (questions, "image_url question answer image_sha256?", {}),
    "pixmo-cap-qa": (tagged_dialogues, "image_url question answer", {}),
    "cosyn-point": (questions_with_points, "image questions answer_points id? names?", EACH),
    "cosyn-400k": (qa_pairs, "image qa_pairs id?", {**EACH, "style": "cosyn_{type}_exp"}),
    "tulu": (messages, "messages id? source? category? first_message_qwen3_tokens? has_special_token?", EACH),
    "molmo2-cap": (video_captions, "video_id annotation_score merged_caption video_caption? video_frame_merged_caption? video_start? "
                                   "video_end?", EACH),
    "molmo2-videocapqa": (negatives, CHOSEN, {}),
    "molmo2-videosubtitleqa": (negatives, CHOSEN + " subtitle", {}),
    "molmo2-ask-model-anything": (questions, "video_id question answer", {}),
    "molmo2-videopoint": (video_points, TIMED, CLIPPED),
    "molmo2-videopoint-where": (video_points, TIMED, {**CLIPPED, "mode": "point", "asked": False}),
    "molmo2-videopointeval": (video_points, TIMED + " width height", {**CLIPPED, "coords": "pixel", "seconds": math.inf}),
    "molmo2-videocounteval": (video_points, "video_id count label" + CLIPS, {"seconds": math.inf}),
    "academic-video-points": (video_points, "video_name category count timestamps points video_duration? clip_start_time? clip_end_time?",
                              {**CLIPPED, **EACH}),
    "track-instruction": (trajectories, "video expression fps sampling_fps task frame_trajectories id? width? height? mask_id? "
                                        "video_source?", EACH),
    "molmo2-videotrack": (positions, "video fps exp points start_frame end_frame id? clip? w? h? mask_id?", EACH),
    "multi-image-qa": (qa_pairs, "image_urls qa_pairs id?", {"style": "correction_qa"}),
    "syn-multi-image-qa": (qa_pairs, "images qa_pairs id?", {**EACH, "style": "cosyn_{type}_exp"}),
    "multi-image-point": (points_of_images, "image_urls labels points counts? normalized_labels?", EACH),
    "vqa2": (people, "image question answers", {**VQA, "style": "vqa2"}),
    "textvqa": (people, "image question answers", {**VQA, "style": "text_vqa"}),
    "docvqa": (people, "image question answers", {**VQA, **EACH, "style": "doc_qa"}),
    "chartqa": (people, "image query label human_or_machine", {**EACH, "question": "query", "answers": "label", "style": "chart_qa"}),
    "ai2d": (choices, "image question answer_texts correct_answer abc_label option_is_abc question_id?",
             {**EACH, "options": "answer_texts", "right": "correct_answer", "style": "ai2_diagram"}),
    "scienceqa": (choices, "image question choices answer hint?", {**EACH, "options": "choices", "right": "answer", "style": "science_qa"}),
    "a-okvqa": (choices, "image question choices correct_choice_idx question_id?",
                {**EACH, "options": "choices", "right": "correct_choice_idx", "style": "a_okvqa_mc"}),
    "molmo2-mantis": (lists_of_choices, "images mc_question choices correct_choice_idx", EACH),
    "mantis": (image_conversations, "images conversation", EACH),
    "llava-video-178k": (video_conversations, "conversations video data_source?", {}),
    "llava-video-178k-academic": (video_conversations, "conversations video data_source",
                                  {"only": "(?i)activitynetqa|nextqa|perceptiontest"}),
}


# ---------------------------------------------------------------------------------------------------------------
# rows into the database, the database into records

TABLES = ("heads(n integer primary key, key blob unique, head text)", "notes(n integer primary key, head integer, annotations text)",
          "media(n integer primary key, path text unique, url text)", "skipped(reason text primary key, n integer)",
          "done(file text primary key, rows integer)")


def open_database(path, job):
    """The database of this very job, as far as it got; that of another job is begun anew. job: what the records follow from."""
    mark = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") >> 1 | 1
    db = sqlite3.connect(path, timeout=1, isolation_level=None)
    for setting in ("journal_mode=wal", "synchronous=normal", "cache_size=-262144", "locking_mode=exclusive"):
        db.execute(f"pragma {setting}")                                   # wal: a commit appends, what a kill leaves is whole
    db.execute("begin immediate")
    before = db.execute("pragma user_version").fetchone()[0]
    if before != mark:
        if before:
            print(f"{path} is from another command or another version of the files: begun anew", file=sys.stderr)
        for table in TABLES:
            db.execute(f"drop table if exists {table.partition('(')[0]}")
            db.execute(f"create table {table}")
        db.execute(f"pragma user_version={mark}")
    db.execute("commit")
    return db


SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError)      # a null, a list for a text, lists of different lengths


def as_json(value):
    """One line; ValueError for what no record may hold: NaN, half a surrogate pair, NUL."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    line.encode()
    if "\\u0000" in line and re.search(r"(?<!\\)(\\\\)*\\u0000", line):
        raise ValueError("NUL")
    return line


def convert(row, layout, s, media, exclude, skipped):
    """One row -> (head, the same as JSON, annotations as JSON), or None; what is left out is counted in `skipped`."""
    lines = []
    try:
        if exclude and not exclude.isdisjoint([row.get("image_url"), *(row.get("image_urls") or [])]):
            raise Bad("excluded")
        head, made = layout(row, s, media)
        if not made:
            raise Bad("nothing to learn")
        known = as_json(head)
    except Bad as e:
        skipped[str(e)] += 1
        return None
    except SHAPE:
        skipped["row of another shape"] += 1
        return None
    for function, *arguments in made:
        try:
            lines.append(as_json(function(*arguments)))
        except Bad as e:
            skipped[str(e)] += 1
        except SHAPE:
            skipped["annotation of another shape"] += 1
    return (head, known, f"[{', '.join(lines)}]") if lines else None


def collect(path, layout, columns, s, media, exclude, db):
    """Every batch of a file into the database, a transaction each, from where the last run ended."""
    size = PICTURES if {"image", "images"} & {*columns} else BATCH
    start = (db.execute("select rows from done where file = ?", [str(path)]).fetchone() or [0])[0]
    for at, rows in batches(path, columns, size, start):
        heads, notes, skipped, media.named = [], [], Counter(), {}
        for i, row in enumerate(rows, at):
            if made := convert(row, layout, s, media, exclude, skipped):
                head, known, lines = made
                visual = head.get("image") or head.get("images") or head.get("video")
                visual = visual["path"] if "url" in (visual or ()) else visual
                key = json.dumps(visual) if s.get("group", True) else f"{path}:{i}"
                key = hashlib.blake2b(key.encode(), digest_size=16).digest()
                heads.append((key, known))
                notes.append((lines, key))
        db.execute("begin")
        db.executemany("insert or ignore into heads(key, head) values (?, ?)", heads)
        db.executemany("insert into notes(annotations, head) select ?, n from heads where key = ?", notes)
        db.executemany("insert or ignore into media(path, url) values (?, ?)", media.named.items())
        db.executemany("insert into skipped values (?, ?) on conflict do update set n = n + excluded.n", skipped.items())
        db.execute("insert or replace into done values (?, ?)", [str(path), at + len(rows)])
        db.execute("commit")


def shares(annotations, most):
    """Annotations of one input, in order, for records of at most `most` points each."""
    share, total = [], 0
    for a in annotations:
        n = len(a.get("points", ()))
        if share and total + n > most:
            yield share
            share, total = [], 0
        share.append(a)
        total += n
    yield share


def write(db, out, name, most, media):
    """records.jsonl and urls.txt, whole or not at all -> the counts of the last line."""
    db.execute("create index if not exists notes_of on notes(head)")
    counts = {"records": 0, "annotations": 0, "skipped": dict(db.execute("select reason, n from skipped order by reason")),
              "urls": 0, "missing_media": 0}
    with open(out / "records.jsonl.draft", "w", encoding="utf-8", newline="\n") as lines:
        for n, head in db.execute("select n, head from heads order by n"):
            rows = db.execute("select annotations from notes where head = ? order by n", [n])
            head = json.loads(head)
            tail = {"meta": head.pop("meta")} if "meta" in head else {}
            for k, share in enumerate(shares([a for row in rows for a in json.loads(row[0])], most)):
                record = {"id": f"{name}-{n}" + (f".{k}" if k else ""), **head, "annotations": share, **tail}
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
                counts["records"] += 1
                counts["annotations"] += len(share)
    with open(out / "urls.txt.draft", "w", encoding="utf-8", newline="\n") as lines:
        for path, url in db.execute("select path, url from media order by n"):
            lines.write(f"{url}\t{path}\n" if url else "")
            counts["urls"] += bool(url)
            counts["missing_media"] += not (media.root / path).exists()
    for file in ("urls.txt", "records.jsonl"):
        (out / f"{file}.draft").replace(out / file)
    return counts


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.prepare", description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     epilog="names: " + ", ".join(SETS))
    add = parser.add_argument
    add("name", help="which published set: see below")
    add("source", nargs="+", help="its files, or a folder of them")
    add("out", help="folder for records.jsonl, urls.txt and media/")
    add("--media", metavar="DIR", help="fetched images, named by the sha256 of their URL, and where those inside go (default OUT/media)")
    add("--videos", metavar="DIR", help="the same for videos, which are found by their id wherever they lie in it")
    add("--split", help="only the files of this split: train, validation, ..")
    add("--exclude", metavar="FILE", help="leave out images by URL, a line each, as in the urls.txt of another set")
    add("--counts", nargs=2, type=int, metavar=("MIN", "MAX"), help="pointing: only annotations with so many points")
    add("--min-score", type=float, default=3, help="molmo2-cap: annotation_score at least (default 3)")
    add("--first-tokens", type=int, default=4096, help="tulu: longest first message (default 4096; stage 1 of Molmo2: 2304)")
    add("--type", choices=TYPES, help="cosyn-400k, syn-multi-image-qa: type of the files (default: the name of their folder)")
    add("--full-video", action="store_true", help="molmo2-videotrack: on the source videos, not on clips cut from them")
    args = parser.parse_args(argv)
    try:
        if args.name not in SETS:
            near = difflib.get_close_matches(args.name, SETS, 1)
            raise Usage(f"no set is called '{args.name}'" + (f" - did you mean '{near[0]}'?" if near else "; --help lists them"))
        layout, columns, settings = SETS[args.name]
        for path in filter(None, (args.media, args.videos, args.exclude)):
            if not Path(path).exists():
                raise Usage(f"{path}: no such file or folder")
        files, out = source_files(args.source, args.split), Path(args.out)
        nameless = [path for path in files if path.absolute().parent.name not in TYPES]
        if "{type}" in settings.get("style", "") and not args.type and nameless:
            raise Usage(f"{nameless[0]} does not lie in a folder named for its type ({', '.join(TYPES)}): say --type")
        media = Media(args.videos or args.media or out / "media")
        s = settings | {k: getattr(args, k) for k in ("counts", "min_score", "first_tokens", "type", "full_video")}
        exclude = {line.split("\t")[0].strip() for line in open(args.exclude, encoding="utf-8")} if args.exclude else set()
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        out.mkdir(parents=True, exist_ok=True)
        with closing(open_database(out / "prepare.sqlite", repr((args.name, str(media.root), s, sorted(exclude), states)))) as db:
            for path in files:
                collect(path, layout, columns.split(), s | {"file": path}, media, exclude, db)
            counts = write(db, out, args.name, 60 if layout is points else math.inf, media)
        (out / "prepare.sqlite").unlink()
    except Usage as e:
        print(f"tools.prepare: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except (OSError, sqlite3.Error) as e:
        print(f"tools.prepare: {e}; what is done is kept, the same command goes on from there", file=sys.stderr)
        raise SystemExit(1) from None
    if media.root != out / "media":
        print(f"paths in the records start at {media.root}: train with --media {media.root}", file=sys.stderr)
    if counts["missing_media"]:
        print(f"{counts['missing_media']} media files are not in {media.root}; the trainer leaves their records out", file=sys.stderr)
    print(json.dumps(counts, ensure_ascii=False))


if __name__ == "__main__":
    main()
