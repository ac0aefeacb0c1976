"""Records and annotations of every style, and helpers that draw prompts of them."""

from data import DataConfig
from records.mixture import rng_for
from records.parse import parse
from text.prompts import turns_of
from text.styles import medium

STAGE1 = DataConfig()
LATER = DataConfig(prefix_all=False, separator=";")

IMAGE = {"image": "a.png"}
IMAGES = {"images": ["a.png", "b.png", "c.png", "d.png"]}
VIDEO = {"video": "a.mp4"}
VIDEO_FROM_30 = {"video": {"path": "a.mp4", "start": 30.0, "end": 75.0}}
TEXT = {}
SIZES = {"image": [(10, 10)], "images": [(10, 10)] * 4, "video": [(10, 10)], "text": []}
N_DRAWS = 1500


def one_form(annotation, record):
    """-> the annotation and its record as they are read from a file."""
    record = parse({**record, "annotations": [annotation]})
    return record["annotations"][0], record


def all_turns(annotation, record=IMAGE, config=LATER, rng=None, sizes=None, **kwargs):
    """[(question, answer), ..] of an annotation."""
    annotation, record = one_form(annotation, record)
    return turns_of(annotation, record, sizes or SIZES[medium(record)], config, rng, **kwargs)


def one_turn(annotation, *args, **kwargs):
    """(question, answer) of an annotation with a single turn."""
    ((question, answer),) = all_turns(annotation, *args, **kwargs)
    return question, answer


def answer_of(*args, **kwargs):
    """The answer of an annotation with a single turn."""
    return one_turn(*args, **kwargs)[1]


def question_of(annotation, record, config):
    """The first question of an annotation, in the form of evaluation."""
    annotation, record = one_form(annotation, record)
    without_points = annotation | ({"points": []} if "points" in annotation else {})
    return turns_of(without_points, record, SIZES[medium(record)], config, None)[0][0]


def draws(annotation, record=IMAGE, config=LATER, n=N_DRAWS, **kwargs):
    """n draws of (question, answer)."""
    return [one_turn(annotation, record, config, rng_for(i), **kwargs) for i in range(n)]


def drawn_questions(*args, **kwargs):
    """The questions of draws()."""
    return [question for question, _ in draws(*args, **kwargs)]


def share(flags):
    return sum(map(bool, flags)) / len(flags)


CAPTION = {"type": "caption", "text": "Words."}
QA = {"type": "qa", "question": "What is it?", "answer": "A cat."}
COUNT = {"type": "count", "label": "Cat", "count": 2}
XY = {"x": 50, "y": 20}
POINT = {
    "type": "point",
    "label": "Cat",
    "coords": "percent",
    "points": [XY, {"x": 10, "y": 90}],
}
POINTS_ON_IMAGES = POINT | {
    "points": [{"image": 0, **XY}, {"image": 0, "x": 10, "y": 90}, {"image": 2, **XY}],
}
POINTS_IN_TIME = POINT | {
    "points": [
        {"t": 33, **XY},
        {"t": 30.5, "x": 91.1, "y": 80},
        {"t": 30.5, "x": 90, "y": 40},
    ],
}
# object "a" is visible from 30.0 to 31.0 s, object 7 once
TRACK = {
    "type": "track",
    "label": "the Duck",
    "coords": "percent",
    "fps": 2,
    "points": [
        {"t": 30.0, "id": "a", "x": 50, "y": 20},
        {"t": 30.5, "id": "a", "x": 60, "y": 20},
        {"t": 31.0, "id": "a", "x": 70, "y": 20},
        {"t": 30.5, "id": 7, "x": 5, "y": 5},
        {"t": 31.0, "id": 7, "x": 6, "y": 6, "occluded": True},
    ],
}
TRACK_FROM_POINT = TRACK | {"mode": "from_point", "query": TRACK["points"][0]}

# {style: (an annotation that has it without naming it, its record)}
UNNAMED = {
    "long_caption": (CAPTION, IMAGE),
    "object_caption": (CAPTION | {"object": "the dog"}, IMAGE),
    "video_long_caption": (CAPTION, VIDEO_FROM_30),
    "video_object_caption": (CAPTION | {"object": "the dog"}, VIDEO_FROM_30),
    "video_clip_caption_start_end": (CAPTION | {"start": 31, "end": 33.25}, VIDEO_FROM_30),
    "video_frame_caption_timestamp": (CAPTION | {"at": 42.5}, VIDEO_FROM_30),
    "user_qa": (QA, IMAGE),
    "text_sft": (QA, TEXT),
    "count": (COUNT, IMAGE),
    "multi_image_count": (COUNT, IMAGES),
    "video_count": (COUNT, VIDEO_FROM_30),
    "pointing": (POINT | {"mode": "point"}, IMAGE),
    "point_count": (POINT | {"mode": "point_count"}, IMAGE),
    "count_point": (POINT | {"mode": "count_point"}, IMAGE),
    "multi_image_point_then_count": (POINTS_ON_IMAGES | {"mode": "point_count"}, IMAGES),
    "multi_image_count_then_point": (POINTS_ON_IMAGES | {"mode": "count_point"}, IMAGES),
    "video_point": (POINTS_IN_TIME | {"mode": "point"}, VIDEO_FROM_30),
    "video_point_count": (POINTS_IN_TIME | {"mode": "point_count"}, VIDEO_FROM_30),
    "video_count_point": (POINTS_IN_TIME | {"mode": "count_point"}, VIDEO_FROM_30),
    "video_point_track_per_frame": (TRACK, VIDEO_FROM_30),
    "video_point_ground_start_end": (TRACK | {"mode": "start_end"}, VIDEO_FROM_30),
    "video_single_point_track_per_frame": (TRACK_FROM_POINT, VIDEO_FROM_30),
}
# styles that an annotation must name
NAMED = {
    "short_caption": (CAPTION, IMAGE),
    "video_short_caption": (CAPTION, VIDEO_FROM_30),
    "video_transcript": (CAPTION, VIDEO_FROM_30),
    "cosyn_point": (POINT, IMAGE),
    "correction_qa": (QA, IMAGES),
    "transcript": (CAPTION, IMAGE),
    "video_merged_caption": (CAPTION, VIDEO_FROM_30),
    "video_short_answer": (QA, VIDEO_FROM_30),
    "vqa2": (QA, IMAGE),
    "chart_qa": (QA, IMAGE),
}
EVERY_STYLE = UNNAMED | {name: (annotation | {"style": name}, record)
                         for name, (annotation, record) in NAMED.items()}

# styles that stand in front of the prompt in stages 2 and 3 too
PREFIXED_LATER = {
    "object_caption",
    "video_object_caption",
    "video_point_ground_start_end",
    "video_single_point_track_per_frame",
    "transcript",
    "video_merged_caption",
    "video_short_answer",
    "vqa2",
    "chart_qa",
}
