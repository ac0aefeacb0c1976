"""Computes the scores of an answer to a question (paper: evaluation; docs/molmo2.md 13).

This file chooses the score for each type of annotation, and converts true points to pixels. The
formulas of the scores are in metrics.py and text_metrics.py.
"""

from dataclasses import dataclass

from evaluation import metrics, official, text_metrics
from records.visual import MediaInfo
from text.points import (
    Place,
    TrackFrames,
    frame_time,
    nearest_frame,
    parse_points,
    seconds,
    track_frames,
    unit,
)
from text.styles import UNNAMED_STYLE, medium

# {style: its score, a function of text_metrics.py}. Other styles use vqa_score if a question has a
# list of answers.
STYLE_SCORE = dict.fromkeys(("doc_qa", "info_qa", "st_qa"), "anls")
STYLE_SCORE |= dict.fromkeys(("chart_qa", "chart_qa_weighted", "plot_qa"), "relaxed_accuracy")


@dataclass(frozen=True)
class Question:
    """One turn of one annotation, with the prompt for the model."""
    record: dict
    index: int  # number of the annotation in the record
    turn: int  # number of the turn in a conversation, else 0
    turns: list  # [(question, answer), .., (question, None)]
    info: MediaInfo
    max_new: int  # maximum number of tokens of the answer

    @property
    def annotation(self):
        return annotation_of(self.record["annotations"][self.index], self.turn)

    @property
    def is_turn(self):
        """Is it a turn of a conversation? Such turns have no masks (masks.py)."""
        return self.record["annotations"][self.index]["type"] == "qa"


def annotation_of(annotation, turn):
    """The annotation with the true answer of a turn. If the turn has points or a count, this is the
    turn itself."""
    part = annotation.get("turns", [annotation])[turn]
    return annotation if part["type"] == "qa" else part


def has_published_style(annotation):
    """Is this a question in the style of a published data set? Questions of users have no style in
    their prompt."""
    return annotation["type"] == "qa" and not UNNAMED_STYLE.fullmatch(annotation["style"])


def score(question, text, masks, reading=None):
    """The text of an answer -> {name: score}. For points and tracks, the dict also contains
    `predicted`, `true` and `hits` (evaluate.py). masks: the true masks of a point or track
    annotation (masks.py), or None. reading: "official" for the rules of official.py, "plain" for
    the rules of text_metrics.py, None for official rules in the styles of published sets and plain
    ones elsewhere."""
    annotation = question.annotation
    plain = reading == "plain"
    if reading is None:
        plain = not has_published_style(annotation)
    if annotation["type"] == "caption":
        recall, precision = text_metrics.score_statements(text, annotation["text"])
        exact = text_metrics.exact_match(text, [annotation["text"]])
        return {"caption_exact": exact, "caption_recall": recall, "caption_precision": precision}
    if annotation["type"] == "count":
        count = metrics.count_from_text(text_metrics.plain_number(text) if plain else text)
        video = medium(question.record) == "video"
        exact, close = metrics.score_count(count, annotation["count"], video)
        valid = float(count is not None)
        return {"count_accuracy": exact, "count_close": close, "count_valid": valid}
    if annotation["type"] == "qa":
        return score_qa(annotation["turns"][question.turn], annotation["style"], text, plain)
    true = true_places(question)
    predicted = predicted_places(question, text)
    score_places = score_tracks if annotation["type"] == "track" else score_points
    rule = "box" if has_boxes(annotation) else "within 5 % of the diagonal"
    return {
        **score_places(question, predicted, true, masks),
        "predicted": [list(place) for place in predicted],
        "true": [list(place) for place in true],
        "hits": rule if masks is None else "mask",
    }


def score_qa(turn, style, text, plain):
    """If the true answer has an explanation, only the text after "Answer:" is scored
    (docs/molmo2.md 4.3). If several options are correct, the answer must list all, one per line."""
    rules = text_metrics if plain else official
    if plain and "explanation" in turn:
        text = text.rpartition("Answer:")[2]
    lines = [text]
    if len(turn.get("answer_idx", ())) > 1:
        lines = text.strip().splitlines()
    if not plain:
        lines = [official.clean(line) for line in lines]
    if "options" in turn:
        letters = turn.get("letters", True)
        chosen = {rules.select_option(line, turn["options"], letters) for line in lines}
        accuracy = float(chosen == set(turn["answer_idx"]))
        return {"qa_accuracy": accuracy, "choice_accuracy": accuracy}
    answers = turn.get("answers") or [turn["answer"]]
    scores = {"qa_accuracy": rules.exact_match(lines[0], answers)}
    name = STYLE_SCORE.get(style, "vqa_score" if "answers" in turn else None)
    if style == "a_okvqa_da" and not plain:
        scores["vqa_score"] = official.a_okvqa_score(lines[0], answers)
    elif name:
        scores[name] = getattr(rules, name)(lines[0], answers)
    return scores


def object_ids(annotation):
    """The ids of a track in the order of its masks: first numbers, then names, both sorted."""
    ids = {p["id"] for p in annotation["points"]}
    return sorted(ids, key=lambda i: (isinstance(i, str), i))


def true_places(question):
    """The true points of an annotation -> [Place, ..] in pixels. Points have the ids 1, 2, .."""
    annotation = question.annotation
    record = question.record
    sizes = question.info.sizes
    places = []
    if annotation["type"] == "track":
        w, h = sizes[0]
        query = annotation["query"] if annotation["mode"] == "from_point" else None
        frames = track_frames(annotation, record, sizes[0], question.info.times, query)
        for t, objects in frames.items():
            places += [Place(t, name, x * w, y * h) for name, (x, y) in objects.items()]
        return places
    for number, p in enumerate(annotation["points"], 1):
        image = p.get("image", 0)
        w, h = sizes[image]
        x, y = unit(p, sizes[image])
        frame = frame_time(p["t"], record, question.info.times) if "t" in p else image + 1
        places.append(Place(frame, number, x * w, y * h))
    return places


def has_boxes(annotation):
    return any("box" in point for point in annotation["points"])


def true_boxes(question):
    """-> [(left, top, right, bottom) in pixels, ..], one for each point of a box annotation."""
    boxes = []
    for p in question.annotation["points"]:
        w, h = question.info.sizes[p.get("image", 0)]
        box = []
        for x, y in (p["box"][:2], p["box"][2:]):
            x, y = unit(p | {"x": x, "y": y}, (w, h))
            box += [x * w, y * h]
        boxes.append(box)
    return boxes


def predicted_places(question, text):
    """The points of an answer -> [Place, ..] in pixels. A point on an image that does not exist is
    scaled with the size of the first image. It counts as a prediction and is never a hit."""
    sizes = question.info.sizes
    kind = medium(question.record)
    places = []
    for frame, object_id, x, y in parse_points(text, 1, 1):
        exists = frame.is_integer() and 1 <= frame <= len(sizes)
        w, h = sizes[int(frame) - 1 if exists else 0]
        if kind == "video":
            frame = round(frame, 1)
        elif kind == "image":
            frame = 1
        elif exists:
            frame = int(frame)
        places.append(Place(frame, int(object_id), x * w, y * h))
    return places


def index_of_masks(question, times):
    """The times of masks, in seconds of the file -> {time in the text: number of a mask}. For
    points, every frame has the nearest mask, and every mask also has its own time."""
    record = question.record
    if question.annotation["type"] == "track":
        asked = TrackFrames(question.annotation, record, question.info.times)
        return {asked.text_time(t): i for i, t in enumerate(times)}
    own = {seconds(t, record): i for i, t in enumerate(times)}
    frames = [frame_time(t, record, question.info.times) for t in times]
    nearest = {frame: own[nearest_frame(frame, sorted(own))] for frame in frames}
    return nearest | own


def score_points(question, predicted, true, masks):
    """Predicted and true points -> {name: score}. Names may start with "images_" or "video_"."""
    kind = medium(question.record)
    sizes = question.info.sizes
    points = [(p.frame, p.x, p.y) for p in predicted]
    true_points = [(p.frame, p.x, p.y) for p in true]
    if masks is None and has_boxes(question.annotation):
        hit = metrics.hit_in_box(true_points, true_boxes(question))
    elif masks is None:
        of_point = [sizes[p.frame - 1 if kind == "images" else 0] for p in true]
        hit = metrics.hit_nearby(true_points, of_point)
    elif kind == "video":
        index_of = index_of_masks(question, masks["times"])
        hit = metrics.hit_in_video_mask(index_of, masks["masks"], sizes[0])
    else:
        hit = metrics.hit_in_mask(masks)
    if kind == "video":
        size = (question.info.times[-1], *sizes[0])
        scores = metrics.score_video(points, true_points, hit, size)
    else:
        scores = metrics.score_images(points, true_points, hit)
    prefix = "" if kind == "image" else f"{kind}_"
    values = {**scores._asdict(), "valid": float(bool(predicted))}
    return {f"{prefix}point_{name}": value for name, value in values.items()}


def score_tracks(question, predicted, true, masks):
    """Predicted and true points of tracks -> {name: score}."""
    tracks = {}
    true_tracks = {}
    for frames, places in ((tracks, predicted), (true_tracks, true)):
        for frame, object_id, x, y in places:
            frames.setdefault(frame, {}).setdefault(object_id, (x, y))
    ids = object_ids(question.annotation)
    sizes = question.info.sizes
    if masks is not None:
        index_of = index_of_masks(question, masks["times"])
        in_mask = metrics.hit_in_video_mask(index_of, masks["masks"], sizes[0])

    def hit(frame, object_id, point):
        point = (frame, *point)
        if masks is not None:
            return in_mask(ids.index(object_id), point)
        true_point = (frame, *true_tracks[frame][object_id])
        return metrics.hit_nearby([true_point], sizes)(0, point)

    scores = metrics.score_tracks(tracks, true_tracks, hit)
    names = {name: f"track_{name}" for name in metrics.PointScores._fields}
    return {names.get(name, name): value for name, value in scores.items()}
