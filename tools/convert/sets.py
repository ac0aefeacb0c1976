"""The layouts of published sets (docs/data_sets.md); images.py and videos.py have the functions."""

from functools import partial

from tools.convert import images, videos
from tools.convert.layout import Layout, rows_in
from tools.convert.make import MAX_POINTS
from tools.convert.rows import BATCH


def by_input(convert, columns, **more):
    """more: fields of the layout, and arguments of `convert` that are the same for all rows."""
    fields = {"group": True, "batch": 256}
    if {"image", "images"} & {*columns.split()}:  # a row may be an image of some megabytes
        fields["batch"] = BATCH
    fields |= {key: more.pop(key) for key in Layout.__annotations__ if key in more}
    return Layout(partial(convert, **more), columns, published=True, many=True, **fields)


def pixmo_points(columns="image_sha256? count? -collection_method", method=None):
    """PixMo-Points. The coordinates are percent of the image, although its page says pixels.
    method: rows with another collection_method are skipped."""
    columns = f"image_url points label {columns}"
    return by_input(images.label_points, columns, max_points=MAX_POINTS, flags=("counts",),
                    coords="percent", clip=True, method=method)


by_row = partial(by_input, group=False)
# Ai2's own copies, which the official code reads: a row for each image, with a list of questions
by_messages = partial(by_row, images.messages, "image message_list")
DATA = partial(rows_in, "data")  # a .json file may have its rows in this field
BY_METHOD = "image_sha256? count? collection_method"
CROWD = "image question answers"
CAPTION_QA = "video_id Question Answer NegativeAnswers"
CLIP = "video_duration? clip_start? clip_end? question?"
TIMED_POINTS = f"video_id two_fps_timestamps points count label {CLIP}"
BOTH_MODES = ["point_count", "point"]  # training draws one of them each time
MAX_S = 63  # longest clip in seconds, in sets to train on

SETS = {
    # images
    "pixmo-cap": by_input(images.captions, "image_url caption transcripts?"),
    "pixmo-cap-only": by_input(images.captions, "image_url caption"),
    "pixmo-points": pixmo_points(),
    "pixmo-points-basic": pixmo_points(BY_METHOD, "pointing"),
    "pixmo-points-high-frequency": pixmo_points(BY_METHOD, "counting"),
    "pixmo-points-eval": pixmo_points("image_sha256? -masks"),
    "pixmo-count": by_input(
        images.label_points, "image_url label count image_sha256? points?",
        max_points=MAX_POINTS, flags=("counts",), coords="pixel"),
    "pixmo-clocks": by_row(images.clocks, "example_id text"),
    "pixmo-ask-model-anything": by_input(
        images.questions, "image_url question answer image_sha256?"),
    "pixmo-cap-qa": by_input(images.tagged_dialogues, "image_url question answer"),
    "cosyn-point": by_row(images.pointing_questions, "image questions answer_points names?"),
    "cosyn-400k": by_row(images.qa_pairs, "image qa_pairs", flags=("image_type",)),
    "multi-image-qa": by_input(images.qa_pairs, "image_urls qa_pairs", style="correction_qa"),
    "syn-multi-image-qa": by_row(images.qa_pairs, "images qa_pairs", flags=("image_type",)),
    "multi-image-point": by_row(
        images.points_of_images, "image_urls labels points counts? normalized_labels?"),
    "vqa2": by_input(images.crowd_questions, CROWD, style="vqa2"),
    "textvqa": by_row(images.crowd_questions, CROWD, style="text_vqa", regroup=DATA),
    "docvqa": by_row(images.crowd_questions, CROWD, style="doc_qa", regroup=DATA),
    "chartqa": by_row(images.chart_questions, "image query label human_or_machine"),
    "ai2d": by_row(
        images.image_choices,
        "image question answer_texts correct_answer abc_label option_is_abc",
        style="ai2_diagram", options="answer_texts", right="correct_answer"),
    "scienceqa": by_row(
        images.image_choices, "image question choices answer hint?",
        style="science_qa", right="answer"),
    "a-okvqa": by_row(
        images.image_choices, "image question choices correct_choice_idx",
        style="a_okvqa_mc"),
    "molmo2-vqa2": by_messages(read=images.crowd_questions, style="vqa2"),
    "molmo2-text-vqa": by_messages(read=images.crowd_questions, style="text_vqa"),
    "molmo2-a-ok-vqa": by_messages(
        read=images.image_choices, style="a_okvqa_mc", right="answer_idx"),
    "molmo2-a-ok-vqa-da": by_messages(
        read=images.crowd_questions, style="a_okvqa_da", column="direct_answers"),
    "molmo2-mantis": by_row(
        images.image_set_choices, "images mc_question choices correct_choice_idx"),
    "mantis": by_row(images.conversations, "images conversation"),
    # videos
    "molmo2-cap": by_row(
        videos.video_captions,
        "video_id annotation_score merged_caption video_caption? video_frame_merged_caption? "
        "video_start? video_end?", flags=("min_score",)),
    "molmo2-videocapqa": by_input(videos.negative_answers, CAPTION_QA),
    "molmo2-videosubtitleqa": by_input(
        videos.negative_answers, f"{CAPTION_QA} subtitle"),
    "molmo2-ask-model-anything": by_input(images.questions, "video_id question answer"),
    "molmo2-videopoint": by_input(
        videos.video_points, TIMED_POINTS, flags=("counts",), mode=BOTH_MODES,
        max_seconds=MAX_S),
    "academic-video-points": by_row(
        videos.video_points,
        "video_name category count timestamps points subset? dataset? video_duration? "
        "clip_start_time? clip_end_time?", flags=("counts",), mode=BOTH_MODES, max_seconds=MAX_S),
    "track-instruction": by_row(
        videos.trajectories,
        "video expression fps sampling_fps task frame_trajectories clip? video_dataset? width? "
        "height? mask_id? -start_frame -end_frame"),
    "molmo2-videotrack": by_row(
        videos.positions, "video fps exp points clip? video_dataset? w? h? mask_id?"),
    "llava-video-178k": by_input(videos.conversations, "conversations video data_source?"),
    "llava-video-178k-academic": by_input(
        videos.conversations, "conversations video data_source",
        source="(?i)activitynetqa|nextqa|perceptiontest"),
    # text
    "tulu": by_row(
        images.text_dialogue,
        "messages source? category? first_message_qwen3_tokens? has_special_token?",
        flags=("first_tokens",), regroup=DATA),
}
