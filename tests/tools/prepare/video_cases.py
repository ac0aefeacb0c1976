"""Miniatures of the video sets, with their expected records."""

import math

from tests.tools.prepare.cases import Case, caption, messages, point, question, record, xy

ONE = {"video_id": "abc", "video_duration": 40.0, "two_fps_timestamps": [2.0],
       "points": [xy((1, 2))], "count": 1}
TIMED_ROWS = [
    {"video_id": "abc", "video_duration": 40.0,
     "two_fps_timestamps": [9.0, 1.5], "count": 3, "label": "Bells",
     "points": [xy((40, 22), (71, 24.5)), xy((40, 23))], "question": "How many bells?"},
    {"video_id": "sora2/x", "video_duration": 90.0, "clip_start": 10.0, "clip_end": 70.0,
     "two_fps_timestamps": [], "points": [], "count": 0, "label": "cats",
     "question": "How many cats?"},
    ONE | {"label": "dogs", "clip_start": 1.0, "clip_end": 20.0},  # a short video has no clip
    ONE | {"label": "no clip", "video_duration": 90.0},
    ONE | {"label": "outside", "clip_start": 0.0, "clip_end": 60.0, "two_fps_timestamps": [61.0]},
    ONE | {"label": "miscounted", "count": 2},
]
TIMED_SKIPS = {"no clip of at most 63 s": 1, "point outside the clip": 1, "wrong record": 1}


BOTH = {"mode": ["point_count", "point"]}
TIMED_RECORDS = [
    record(point("Bells", [{"t": 9.0, "x": 40, "y": 22}, {"t": 9.0, "x": 71, "y": 24.5},
                           {"t": 1.5, "x": 40, "y": 23}],
                 question="How many bells?", count=3, **BOTH),
           point("dogs", [{"t": 2.0, "x": 1, "y": 2}], count=1, **BOTH),
           video={"path": "abc_2fps.mp4"}),
    record(point("cats", [], question="How many cats?", count=0, **BOTH),
           video={"path": "sora2/x_2fps.mp4", "start": 10, "end": 70}),
]


DUCKS = {                            # {time: [(id, x, y, occluded), ..]}
    0.0: [(0, 10, 20, False), (1, 50, 20, False)],
    0.25: [(0, 11, 20, False)],
    0.5: [(0, 12, 20, True), (1, None, None, True)],
    1.0: [(0, 14, 21, False), (1, math.nan, math.nan, True)],
}


def track_row(expression, task, *mask_id, fps=12):
    """-> a row with tracks of two ducks in a pond."""
    frames = [{"time": t, "points": [{"id": i, "point": [x, y], "occluded": hidden}
                                     for i, x, y, hidden in points]}
              for t, points in DUCKS.items()]
    return {"video": "pond", "expression": expression, "width": 640, "height": 360,
            "fps": fps, "sampling_fps": 2, "task": task, "mask_id": mask_id,
            "frame_trajectories": frames}


def track(label, size, mode, *points, **more):
    """-> a track of 1 s at two frames per second. points: (t, id, x, y), or with occluded."""
    names = ("t", "id", "x", "y", "occluded")
    entries = [dict(zip(names, values, strict=False)) for values in points]
    return {"type": "track", "label": label, "coords": "pixel", "size": size, "mode": mode,
            "fps": 2, "times": [0.0, 0.5, 1.0], "points": entries, **more}


def pond(*args, path="pond.mp4", **more):
    return record(track(*args, **more), video={"path": path})


def choices(words, *options):
    return question("video_multiple_choice", words, options=list(options), answer_idx=0,
                    shuffle_options=True)


CASES = {
    "molmo2-cap": Case(
        rows=[
            {"video_id": "-bc", "video_start": 0.0, "video_end": 61.5, "video_caption": "Short.",
             "merged_caption": "Merged.", "video_frame_merged_caption": "Long.",
             "annotation_score": 4},
            {"video_id": "d", "merged_caption": "Only.", "annotation_score": 3},
            {"video_id": "e", "merged_caption": "Poor.", "annotation_score": 2},
            {"video_id": "f", "merged_caption": "No time.", "annotation_score": 5,
             "video_start": 3.0, "video_end": 3.0},
            {"video_id": "NyuA4FatDQk", "merged_caption": "x", "annotation_score": 5},
            {"video_id": "", "merged_caption": "x", "annotation_score": 5},
        ],
        records=[
            record(caption("video_short_caption", "Short."),
                   caption("video_merged_caption", "Merged."),
                   caption("video_long_caption", "Long."),
                   video={"path": "-bc.mp4", "start": 0.0, "end": 61.5}),
            record(caption("video_merged_caption", "Only."), video={"path": "d.mp4"}),
        ],
        skipped={"annotation_score below 3": 1, "clip that ends before it starts": 1,
                 "video known not to decode": 1, "no video": 1},
    ),
    "molmo2-videocapqa": Case(
        rows=[
            {"video_id": "abc", "Question": "How long?", "Answer": "a minute",
             "NegativeAnswers": ["an hour", "a minute", "a day"]},
            {"video_id": "abc", "Question": "Who?", "Answer": "Ann", "NegativeAnswers": ["Bob"]},
        ],
        records=[record(
            choices("How long?", "a minute", "an hour", "a day"),
            choices("Who?", "Ann", "Bob"), video={"path": "abc.mp4"})],
    ),
    "molmo2-videosubtitleqa": Case(
        rows=[
            {"video_id": "abc", "Question": "How long?", "Answer": "a minute",
             "NegativeAnswers": ["an hour"],
             "subtitle": [{"start": 41.2, "end": 44.0, "text": "and wait "},
                          {"start": 1.0, "end": 2.0, "text": "so"},
                          {"start": 5.0, "end": 4.0, "text": "torn"},
                          {"start": 6.0, "end": 7.0, "text": ""}]},
        ],
        records=[record(
            choices("How long?", "a minute", "an hour"), video={"path": "abc.mp4"},
            subtitles=[{"start": 1.0, "end": 2.0, "text": "so"},
                       {"start": 41.2, "end": 44.0, "text": "and wait"}])],
    ),
    "molmo2-ask-model-anything": Case(
        rows=[{"video_id": "abc", "question": " Why? ", "answer": "Rain. "}],
        records=[record(question("user_qa", "Why?", answer="Rain."), video={"path": "abc.mp4"})],
    ),
    "molmo2-videopoint": Case(TIMED_ROWS, TIMED_RECORDS, TIMED_SKIPS),
    "academic-video-points": Case(
        rows=[
            {"subset": "burst", "dataset": "LaSOT", "video_name": "v1.mp4",
             "category": "Person", "count": 1, "timestamps": [9.8], "points": [xy((50, 60))],
             "video_duration": 80.0, "clip_start_time": 10.0, "clip_end_time": 40.0},
        ],
        records=[record(
            point("person", [{"t": 9.8, "x": 50, "y": 60}], count=1, **BOTH),
            video={"path": "burst/LaSOT/v1_2fps.mp4", "start": 10.0, "end": 40.0})],
    ),
    "track-instruction": Case(
        rows=[
            track_row("both ducks", "track", "0", "1"),
            track_row("left duck", "single_point_track", "0"),
            track_row("right duck", "ground", "1") | {"clip": "pond_part3", "video_dataset": "sav"},
            track_row("x", "track", "0", fps=25),
            track_row("x", "track", "7"),
        ],
        records=[
            pond("both ducks", [640, 360], "per_frame",
                 (0.0, 0, 10, 20), (0.0, 1, 50, 20), (0.5, 0, 12, 20, True), (1.0, 0, 14, 21)),
            pond("left duck", [640, 360], "from_point",
                 (0.5, 0, 12, 20, True), (1.0, 0, 14, 21),
                 query={"t": 0.0, "id": 0, "x": 10, "y": 20}),
            pond("right duck", [640, 360], "start_end", (0.0, 1, 50, 20),
                 path="sav/pond_part3.mp4"),
        ],
        skipped={"fps is no multiple of the sampling rate": 1,
                 "track without a visible point": 1},
    ),
    "molmo2-videotrack": Case(
        rows=[
            {"video": "src", "clip": "src_10_14", "video_dataset": "bft", "fps": 4,
             "exp": "the dog", "w": 320, "h": 240, "mask_id": ["o1"],
             "points": [{"object_id": "o1", "points": [[1, 2], [3, 4], None, [7, 8], [9, 10]]},
                        {"object_id": "o2", "points": [[5, 5]] * 5}]},
        ],
        records=[record(
            track("the dog", [320, 240], "per_frame", (0.0, "o1", 1, 2), (1.0, "o1", 9, 10)),
            video={"path": "bft/src_10_14.mp4"})],
    ),
    "llava-video-178k": Case(
        is_json=True,
        rows=[
            {"data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4",
             "conversations": [{"from": "human", "value": "<image>\nWhy?"},
                               {"from": "gpt", "value": "Rain."}]},
            {"data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4",
             "conversations": messages("Where?\n<image>", "Here.", "Who?", "Ann.")},
            {"data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4",
             "conversations": messages("<image><video> What?", "A cat.")},
        ],
        records=[record(
            question("video_short_answer", "Why?", answer="Rain."),
            question("video_short_answer", "Where?", answer="Here."),
            question("video_short_answer", "Who?", answer="Ann."),
            video={"path": "0_30_s_nextqa/NExTQA/x.mp4"})],
        skipped={"placeholders that do not fit the video": 1},
    ),
    "llava-video-178k-academic": Case(
        is_json=True,
        rows=[
            {"data_source": source, "video": "a.mp4", "conversations": messages("Why?", "Rain.")}
            for source in ("0_30_s_perceptiontest", "0_30_s_youtube_v0_1")],
        records=[record(question("video_short_answer", "Why?", answer="Rain."),
                        video={"path": "0_30_s_perceptiontest/a.mp4"})],
        skipped={"another source": 1},
    ),
}
