"""The published sets: the layout of each, its columns, and its settings
(docs/datasets.md).

A column with a ? may be absent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.prepare import images, videos

POINTS_PER_RECORD = 60               # an image with more becomes several records


@dataclass(frozen=True)
class Settings:
    # of a set
    group: bool = True               # annotations of one visual input become one record
    points_per_record: float = math.inf
    coords: str = ""                 # "percent" or "pixel"
    clip: bool = False               # points outside an image are moved to its border
    method: str | None = None        # collection_method of the rows to take
    transcripts: bool = False
    style: str = ""                  # {type} stands for --type, or the name of the file's folder
    question_column: str = "question"
    answers_column: str = "answers"
    options_column: str = "choices"
    right_column: str = "correct_choice_idx"
    mode: str = ""                   # of points in videos
    max_seconds: float = math.inf    # longest clip
    ask: bool = True                 # with the set's own question
    source: str = ""                 # regular expression that data_source must match
    # of the command
    counts: tuple | None = None      # (lowest, highest) number of points
    min_score: float = 3
    first_tokens: int = 4096
    type: str | None = None
    full_video: bool = False
    # of the file that is read
    file: Path | None = None


class PublishedSet(NamedTuple):
    layout: Callable
    columns: str
    settings: Settings = Settings()


EACH_ROW = Settings(group=False)


def pixmo_points(columns="image_sha256? count? collection_method?", **settings):
    """PixMo-Points: percent of the image, although its page says pixels."""
    settings = Settings(coords="percent", clip=True, points_per_record=POINTS_PER_RECORD,
                        **settings)
    return PublishedSet(images.points, "image_url points label " + columns, settings)


def video_points(columns="", **settings):
    """Molmo2-VideoPoint in its three forms."""
    settings = {"coords": "percent", "max_seconds": 63, **settings}
    columns = ("video_id two_fps_timestamps points count label video_source? video_duration? "
               "clip_start? clip_end? question? category? annotator_unsure? " + columns)
    return PublishedSet(videos.video_points, columns, Settings(**settings))


def crowd_answers(style, **settings):
    return PublishedSet(images.questions_with_crowd_answers, "image question answers",
                        Settings(style=style, **settings))


IMAGE_SETS = {
    "pixmo-cap": PublishedSet(
        images.captions, "image_url caption transcripts?", Settings(transcripts=True)),
    "pixmo-cap-only": PublishedSet(images.captions, "image_url caption"),
    "pixmo-points": pixmo_points(),
    "pixmo-points-basic": pixmo_points(
        "image_sha256? count? collection_method", method="pointing"),
    "pixmo-points-high-frequency": pixmo_points(
        "image_sha256? count? collection_method", method="counting"),
    "pixmo-points-eval": pixmo_points("image_sha256?"),
    "pixmo-count": PublishedSet(
        images.points, "image_url label count image_sha256? points?",
        Settings(coords="pixel", points_per_record=POINTS_PER_RECORD)),
    "coco": PublishedSet(images.boxes, "image width height label boxes",
                         Settings(points_per_record=POINTS_PER_RECORD)),
    "pixmo-ask-model-anything": PublishedSet(
        images.image_questions, "image_url question answer image_sha256?"),
    "pixmo-cap-qa": PublishedSet(images.tagged_dialogues, "image_url question answer"),
    "cosyn-point": PublishedSet(
        images.questions_with_points, "image questions answer_points id? names?", EACH_ROW),
    "cosyn-400k": PublishedSet(
        images.qa_pairs, "image qa_pairs id?", Settings(group=False, style="cosyn_{type}_exp")),
    "multi-image-qa": PublishedSet(
        images.qa_pairs, "image_urls qa_pairs id?", Settings(style="correction_qa")),
    "syn-multi-image-qa": PublishedSet(
        images.qa_pairs, "images qa_pairs id?", Settings(group=False, style="cosyn_{type}_exp")),
    "multi-image-point": PublishedSet(
        images.points_of_images, "image_urls labels points counts? normalized_labels?", EACH_ROW),
    "vqa2": crowd_answers("vqa2"),
    "textvqa": crowd_answers("text_vqa"),
    "docvqa": crowd_answers("doc_qa", group=False),
    "chartqa": PublishedSet(
        images.questions_with_crowd_answers, "image query label human_or_machine",
        Settings(group=False, style="chart_qa", question_column="query", answers_column="label")),
    "ai2d": PublishedSet(
        images.image_multiple_choice,
        "image question answer_texts correct_answer abc_label option_is_abc question_id?",
        Settings(group=False, style="ai2_diagram", options_column="answer_texts",
                 right_column="correct_answer")),
    "scienceqa": PublishedSet(
        images.image_multiple_choice, "image question choices answer hint?",
        Settings(group=False, style="science_qa", right_column="answer")),
    "a-okvqa": PublishedSet(
        images.image_multiple_choice, "image question choices correct_choice_idx question_id?",
        Settings(group=False, style="a_okvqa_mc")),
    "molmo2-mantis": PublishedSet(
        images.multi_image_multiple_choice, "images mc_question choices correct_choice_idx",
        EACH_ROW),
    "mantis": PublishedSet(
        images.multi_image_conversations, "images conversation", EACH_ROW),
}

VIDEO_SETS = {
    "molmo2-cap": PublishedSet(
        videos.video_captions,
        "video_id annotation_score merged_caption video_caption? video_frame_merged_caption? "
        "video_start? video_end?", EACH_ROW),
    "molmo2-videocapqa": PublishedSet(
        videos.negative_answers, "video_id Question Answer NegativeAnswers Category?"),
    "molmo2-videosubtitleqa": PublishedSet(
        videos.negative_answers, "video_id Question Answer NegativeAnswers Category? subtitle"),
    "molmo2-ask-model-anything": PublishedSet(
        videos.video_questions, "video_id question answer"),
    "molmo2-videopoint": video_points(mode="point_count"),
    "molmo2-videopoint-where": video_points(mode="point", ask=False),
    "molmo2-videopointeval": video_points(
        "width height", mode="point_count", coords="pixel", max_seconds=math.inf),
    "molmo2-videocounteval": PublishedSet(
        videos.video_points,
        "video_id count label video_source? video_duration? clip_start? clip_end? question? "
        "category? annotator_unsure?"),
    "academic-video-points": PublishedSet(
        videos.video_points,
        "video_name category count timestamps points video_duration? clip_start_time? "
        "clip_end_time?",
        Settings(group=False, coords="percent", mode="point_count", max_seconds=63)),
    "track-instruction": PublishedSet(
        videos.trajectories,
        "video expression fps sampling_fps task frame_trajectories id? width? height? mask_id? "
        "video_source?", EACH_ROW),
    "molmo2-videotrack": PublishedSet(
        videos.positions,
        "video fps exp points start_frame end_frame id? clip? w? h? mask_id?", EACH_ROW),
    "llava-video-178k": PublishedSet(
        videos.video_conversations, "conversations video data_source?"),
    "llava-video-178k-academic": PublishedSet(
        videos.video_conversations, "conversations video data_source",
        Settings(source="(?i)activitynetqa|nextqa|perceptiontest")),
}

TEXT_SETS = {
    "tulu": PublishedSet(
        images.messages,
        "messages id? source? category? first_message_qwen3_tokens? has_special_token?", EACH_ROW),
}

SETS = IMAGE_SETS | VIDEO_SETS | TEXT_SETS
