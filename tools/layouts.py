"""Layouts: what a row of a published set becomes (paper: data; the sets: DATA.md; files, media and the command: tools/prepare.py).

in    a row in the columns of its set, the settings s (those of SETS, the command's flags, the file), the folder of media
out   the head of a record (visual input, weight, meta), and its annotations as (function, arguments) still to be called, so that
      one that is Bad costs no other

    pixmo-points  {"image_url": u, "label": "mug", "points": [{"x": 21.4, "y": 55.0}], "count": 1}
    head          {"image": {"path": sha256 of u, "url": u}}
    annotations   [{"type": "point", "label": "mug", "coords": "percent", "count": 1, "points": [{"x": 21.4, "y": 55.0}]}]

The order of options, the choice of a transcript, of pointing or counting are left to the trainer.
Left out: clip and frame captions of Molmo2-Cap, masks, the boxes that Molmo2 draws into AI2D.
"""

import json
import math
import re
from contextlib import suppress

# left out by Molmo2 too: videos that do not decode; sources of Tulu that are puzzles, long reasoning, or about the model itself
CORRUPT = {"0OfUqrbRa2Y", "mTXBQzptWAg", "NyuA4FatDQk", "a_", "gsfIHiBB6xE", "bXApJtAf6Qo", "N8BlpYSpgg4"}
NOT_CHAT = re.compile("puzzle_data|verifiable-reasoning|dino-hardcodes|hardcoded-olmo")
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


class Bad(Exception):
    """Why a row, or one annotation of it, is left out."""


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
    pairs = zip(cell["x"], cell["y"], strict=True) if isinstance(cell, dict) else ((p["x"], p["y"]) for p in cell or [])
    return [{"x": x, "y": y} for x, y in pairs]


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
    more |= {} if count is None else {"count": len(points)}
    return {"type": "point", **names, "coords": coords, **(size or {}), **more, "points": points}


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


def dialogue(turns, style, system=None):
    system = {"system": system} if system else {}
    return {"type": "qa", "style": style, **system, "turns": [{"question": q, "answer": a} for q, a in turns]}


def group_of(images):
    if not 2 <= len(images) <= 5:
        raise Bad("not 2 to 5 images")
    return images


# ---------------------------------------------------------------------------------------------------------------
# rows to heads and annotations


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
        from records.media import Unreadable, header  # here, since torch comes with it
        with suppress(Unreadable):                                        # not an image at all: the trainer counts it
            size = scale(*header(media.root / image["path"]))
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
    steps = (style.endswith("_exp") and pairs.get("explanation")) or [None] * len(pairs["question"])

    def pair(question, answer, why):
        why = {"explanation": text(why)} if text(why) else {}
        return qa(question, style if why else style.removesuffix("_exp"), answer, **why)

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
    return kept(id=row.get("id"), source=row.get("source")), [(dialogue, turns, "text_sft", system)]


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
    head = media.video(name, suffix="_2fps", start=start, end=end, video_source=row.get("video_source"))
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
    answers, head = row[s.get("answers", "answers")], {"image": media.cell(row["image"])}
    answers = [a["answer"] if isinstance(a, dict) else a for a in ([answers] if isinstance(answers, str) else answers or [])]
    if "human_or_machine" in row:
        head["weight"] = 2 * (20901 if row["human_or_machine"] in (0, "human") else 7398) / 28299
    return head, [(qa, row[s.get("question", "question")], s["style"], None, answers)]


def choices(row, s, media):
    options, style, more, letters = row[s.get("options", "choices")], s["style"], {}, row.get("option_is_abc") or []
    if row.get("abc_label") and sum(letters) >= len(options) - 1:         # AI2D: the options are letters in the picture
        options = [o.upper() if letter else o for o, letter in zip(options, letters, strict=True)]
        style, more = "ai2_diagram_no_letter", {"letters": False}
    question = "\n".join(filter(None, (text(row.get("hint")), text(row["question"]))))
    head = {"image": media.cell(row["image"]), **kept(question_id=row.get("question_id"))}
    return head, [(lambda: qa(question, style, options=options, right=row[s.get("right", "correct_choice_idx")], **more),)]


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
    kind = (re.search(r"_(oe|mc|cap)(?=[_.-])", s["file"].name) or " ?")[1]
    style = {"oe": "video_short_answer", "mc": "video_multiple_choice"}.get(kind, "user_qa")
    folder = row.get("data_source") or ""
    if not re.search(s.get("only", ""), folder):
        raise Bad("another source")

    def pair(question, answer):
        question, marks = re.subn(r"\s*<(image|video)>\s*", "", question)
        if marks > 1:
            raise Bad("placeholders that do not fit the video")
        return caption(answer, "video_long_caption") if kind == "cap" else qa(question, style, answer)

    return media.video(f"{folder}/{row['video']}".lstrip("/"), row["video"]), [(pair, *turn) for turn in chat(row["conversations"])[1]]


# name: (layout, its columns, settings). A column with a ? may be absent; group: rows of one visual input are one record.
POINTS = "image_url points label image_sha256? count? collection_method?"
CLIPS = " video_source? video_duration? clip_start? clip_end? question? category? annotator_unsure?"
TIMED = "video_id two_fps_timestamps points count label" + CLIPS
CHOSEN = "video_id Question Answer NegativeAnswers Category?"
PERCENT, EACH = {"coords": "percent", "clip": True}, {"group": False}
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
    "vqa2": (people, "image question answers", {"style": "vqa2"}),
    "textvqa": (people, "image question answers", {"style": "text_vqa"}),
    "docvqa": (people, "image question answers", {**EACH, "style": "doc_qa"}),
    "chartqa": (people, "image query label human_or_machine", {**EACH, "question": "query", "answers": "label", "style": "chart_qa"}),
    "ai2d": (choices, "image question answer_texts correct_answer abc_label option_is_abc question_id?",
             {**EACH, "options": "answer_texts", "right": "correct_answer", "style": "ai2_diagram"}),
    "scienceqa": (choices, "image question choices answer hint?", {**EACH, "right": "answer", "style": "science_qa"}),
    "a-okvqa": (choices, "image question choices correct_choice_idx question_id?", {**EACH, "style": "a_okvqa_mc"}),
    "molmo2-mantis": (lists_of_choices, "images mc_question choices correct_choice_idx", EACH),
    "mantis": (image_conversations, "images conversation", EACH),
    "llava-video-178k": (video_conversations, "conversations video data_source?", {}),
    "llava-video-178k-academic": (video_conversations, "conversations video data_source",
                                  {"only": "(?i)activitynetqa|nextqa|perceptiontest"}),
}
