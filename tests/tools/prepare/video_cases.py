"""Miniatures of the video sets of Ai2, with the records expected of them."""

import math

from tests.tools.prepare.cases import XYS, Case, caption, question, xy

TIMED = {"video_id": "s", "video_source": "s", "video_duration": "f", "clip_start": "f",
         "clip_end": "f", "two_fps_timestamps": ["f"], "points": [XYS], "count": "i", "label": "s",
         "question": "s", "category": "s", "annotator_unsure": "b"}
TIMED_ROWS = [
    {"video_id": "abc", "video_source": "youtube", "video_duration": 40.0,
     "two_fps_timestamps": [9.0, 1.5], "count": 3, "label": "Bells",
     "points": [xy((40, 22), (71, 24.5)), xy((40, 23))], "question": "How many bells?",
     "category": "object", "annotator_unsure": False},
    {"video_id": "sora2/x", "video_duration": 90.0, "clip_start": 10.0, "clip_end": 70.0,
     "two_fps_timestamps": [], "points": [], "count": 0, "label": "cats",
     "question": "How many cats?"},
    {"video_id": "abc", "video_duration": 40.0, "two_fps_timestamps": [2.0],
     "points": [xy((1, 2))], "count": 1, "label": "dogs"},
    {"video_id": "long", "video_duration": 90.0, "two_fps_timestamps": [2.0],
     "points": [xy((1, 2))], "count": 1, "label": "no clip"},
    {"video_id": "late", "video_duration": 90.0, "clip_start": 0.0, "clip_end": 60.0,
     "two_fps_timestamps": [61.0], "points": [xy((1, 2))], "count": 1, "label": "outside"},
    {"video_id": "abc", "video_duration": 40.0, "two_fps_timestamps": [2.0],
     "points": [xy((1, 2))], "count": 2, "label": "miscounted"},
]
TIMED_SKIPS = {"no clip of at most 63 s": 1, "point outside the clip": 1,
               "count is not the number of points": 1}


def timed_records(mode, asked):
    """The records of TIMED_ROWS; asked: with the questions of the set."""
    bells = {"type": "point", "label": "Bells", "coords": "percent", "mode": mode,
             "meta": {"category": "object", "annotator_unsure": False}, "count": 3,
             "points": [{"t": 9.0, "x": 40, "y": 22}, {"t": 9.0, "x": 71, "y": 24.5},
                        {"t": 1.5, "x": 40, "y": 23}]}
    cats = {"type": "point", "label": "cats", "coords": "percent", "mode": mode, "count": 0,
            "points": []}
    dogs = {"type": "point", "label": "dogs", "coords": "percent", "mode": mode, "count": 1,
            "points": [{"t": 2.0, "x": 1, "y": 2}]}
    if asked:
        bells["question"] = "How many bells?"
        cats["question"] = "How many cats?"
    return [{"video": {"path": "abc_2fps.mp4"}, "annotations": [bells, dogs],
             "meta": {"video_source": "youtube"}},
            {"video": {"path": "sora2/x_2fps.mp4", "start": 10, "end": 70}, "annotations": [cats]}]


TRACK = {"id": "s", "video": "s", "expression": "s", "fps": "i", "sampling_fps": "i", "height": "i",
         "width": "i", "n_frames": "i", "task": "s",
         "frame_trajectories": [{"frame": "i", "time": "f",
                                 "points": [{"id": "i", "point": ["f"], "occluded": "b"}]}],
         "mask_id": ["s"], "obj_id": ["i"]}


def track_frames(*frames):
    """(time, (id, x, y, occluded), ..), .. -> frame_trajectories at 12 frames a second."""
    rows = []
    for t, *points in frames:
        points = [{"id": i, "point": [x, y], "occluded": hidden} for i, x, y, hidden in points]
        rows.append({"frame": int(t * 12), "time": t, "points": points})
    return rows


DUCKS = track_frames(
    (0.0, (0, 10, 20, False), (1, 50, 20, False)),
    (0.25, (0, 11, 20, False)),
    (0.5, (0, 12, 20, True), (1, None, None, True)),
    (1.0, (0, 14, 21, False), (1, math.nan, math.nan, True)))
SCENE = {"width": 640, "height": 360, "fps": 12, "sampling_fps": 2}
CAPQA = {"video_id": "s", "Question": "s", "Answer": "s", "NegativeAnswers": ["s"], "Category": "s"}

CASES = {
    "molmo2-cap": Case(
        columns={"video_id": "s", "video_start": "f", "video_end": "f", "video_caption": "s",
                 "merged_caption": "s", "video_frame_merged_caption": "s", "annotation_score": "i"},
        rows=[
            {"video_id": "-bc", "video_start": 0.0, "video_end": 61.5, "video_caption": "Short.",
             "merged_caption": "Merged.", "video_frame_merged_caption": "Long.",
             "annotation_score": 4},
            {"video_id": "d", "merged_caption": "Only.", "annotation_score": 3},
            {"video_id": "e", "merged_caption": "Poor.", "annotation_score": 2},
            {"video_id": "f", "merged_caption": "No time.", "annotation_score": 5,
             "video_start": 3.0, "video_end": 3.0},
            {"video_id": "NyuA4FatDQk", "merged_caption": "x", "annotation_score": 5},
            {"video_id": "g", "annotation_score": 5},
        ],
        records=[
            {"video": {"path": "-bc.mp4", "start": 0.0, "end": 61.5},
             "meta": {"annotation_score": 4},
             "annotations": [caption("video_short_caption", "Short."),
                             caption("video_merged_caption", "Merged."),
                             caption("video_long_caption", "Long.")]},
            {"video": {"path": "d.mp4"}, "meta": {"annotation_score": 3},
             "annotations": [caption("video_merged_caption", "Only.")]},
        ],
        skipped={"annotation_score below 3": 1, "clip that ends before it starts": 1,
                 "video known not to decode": 1, "nothing to learn": 1},
    ),
    "molmo2-videocapqa": Case(
        columns=CAPQA,
        rows=[
            {"video_id": "abc", "Question": "How long?", "Answer": "a minute",
             "NegativeAnswers": ["an hour", "a minute", "a day"], "Category": "time"},
            {"video_id": "x", "Question": "Who?", "Answer": "Ann", "NegativeAnswers": []},
            {"video_id": "abc", "Question": "Who?", "Answer": "Ann", "NegativeAnswers": ["Bob"]},
        ],
        records=[
            {"video": {"path": "abc.mp4"},
             "annotations": [{"type": "qa", "style": "video_multiple_choice",
                              "question": "How long?", "options": ["a minute", "an hour", "a day"],
                              "answer_idx": 0, "shuffle_options": True,
                              "meta": {"category": "time"}},
                             question("video_multiple_choice", "Who?", options=["Ann", "Bob"],
                                      answer_idx=0, shuffle_options=True)]},
        ],
        skipped={"no right option among 2 to 26": 1},
    ),
    "molmo2-videosubtitleqa": Case(
        columns=CAPQA | {"subtitle": [{"start": "f", "end": "f", "text": "s"}]},
        rows=[
            {"video_id": "abc", "Question": "How long?", "Answer": "a minute",
             "NegativeAnswers": ["an hour"],
             "subtitle": [{"start": 41.2, "end": 44.0, "text": "and wait "},
                          {"start": 1.0, "end": 2.0, "text": "so"},
                          {"start": 5.0, "end": 4.0, "text": "torn"},
                          {"start": 6.0, "end": 7.0, "text": ""}]},
        ],
        records=[
            {"video": {"path": "abc.mp4"},
             "subtitles": [{"start": 1.0, "end": 2.0, "text": "so"},
                           {"start": 41.2, "end": 44.0, "text": "and wait"}],
             "annotations": [question("video_multiple_choice", "How long?",
                                      options=["a minute", "an hour"], answer_idx=0,
                                      shuffle_options=True)]},
        ],
    ),
    "molmo2-ask-model-anything": Case(
        columns={"video_id": "s", "question": "s", "answer": "s"},
        rows=[
            {"video_id": "abc", "question": " Why? ", "answer": "Rain. "},
            {"video_id": "abc", "question": "Who?", "answer": ""},
            {"video_id": None, "question": "Who?", "answer": "Ann"},
        ],
        records=[
            {"video": {"path": "abc.mp4"},
             "annotations": [question("user_qa", "Why?", answer="Rain.")]},
        ],
        skipped={"empty answer": 1, "no video": 1},
    ),
    "molmo2-videopoint": Case(
        columns=TIMED,
        rows=TIMED_ROWS,
        records=timed_records("point_count", True),
        skipped=TIMED_SKIPS,
    ),
    "molmo2-videopoint-where": Case(
        columns=TIMED,
        rows=TIMED_ROWS,
        records=timed_records("point", False),
        skipped=TIMED_SKIPS,
    ),
    "molmo2-videopointeval": Case(
        columns=TIMED | {"points": XYS, "width": "i", "height": "i"},
        rows=[
            {"video_id": "abc", "two_fps_timestamps": [0.5, 2.0],
             "points": xy((320, 180), (0, 359)), "count": 2, "label": "a", "width": 640,
             "height": 360, "video_duration": 300.0},
        ],
        records=[
            {"video": {"path": "abc_2fps.mp4"},
             "annotations": [{"type": "point", "label": "a", "coords": "pixel", "size": [640, 360],
                              "mode": "point_count", "count": 2,
                              "points": [{"t": 0.5, "x": 320, "y": 180},
                                         {"t": 2.0, "x": 0, "y": 359}]}]},
        ],
    ),
    "molmo2-videocounteval": Case(
        columns={"video_id": "s", "clip_start": "f", "clip_end": "f", "count": "i", "label": "s",
                 "question": "s", "category": "s"},
        rows=[
            {"video_id": "abc", "clip_start": 2.0, "clip_end": 90.0, "count": 4, "label": "hops",
             "question": "How many hops?"},
            {"video_id": "abc", "count": None, "label": "hops"},
        ],
        records=[
            {"video": {"path": "abc_2fps.mp4", "start": 2.0, "end": 90.0},
             "annotations": [{"type": "count", "label": "hops", "question": "How many hops?",
                              "count": 4}]},
        ],
        skipped={"no count": 1},
    ),
    "academic-video-points": Case(
        columns={"subset": "s", "video_name": "s", "dataset": "s", "category": "s", "count": "i",
                 "timestamps": ["f"], "points": [XYS], "video_duration": "f",
                 "clip_start_time": "f", "clip_end_time": "f"},
        rows=[
            {"subset": "ovis", "video_name": "v1.mp4", "category": "Person", "count": 1,
             "timestamps": [12.0], "points": [xy((50, 60))], "video_duration": 80.0,
             "clip_start_time": 10.0, "clip_end_time": 40.0},
        ],
        records=[
            {"video": {"path": "v1_2fps.mp4", "start": 10.0, "end": 40.0},
             "annotations": [{"type": "point", "label": "person", "coords": "percent",
                              "mode": "point_count", "count": 1, "meta": {"category": "Person"},
                              "points": [{"t": 12.0, "x": 50, "y": 60}]}]},
        ],
    ),
    "track-instruction": Case(
        columns=TRACK,
        rows=[
            {"id": "a", "video": "pond", "expression": "both ducks", **SCENE, "task": "track",
             "mask_id": ["0", "1"], "frame_trajectories": DUCKS},
            {"id": "b", "video": "pond", "expression": "left duck", **SCENE,
             "task": "single_point_track", "mask_id": ["0"], "frame_trajectories": DUCKS},
            {"id": "c", "video": "pond", "expression": "right duck", **SCENE, "task": "ground",
             "mask_id": ["1"], "frame_trajectories": DUCKS},
            {"id": "d", "video": "pond", "expression": "x", **SCENE | {"fps": 25}, "task": "track",
             "mask_id": ["0"], "frame_trajectories": DUCKS},
            {"id": "e", "video": "pond", "expression": "x", **SCENE, "task": "segment",
             "mask_id": ["0"], "frame_trajectories": DUCKS},
            {"id": "f", "video": "pond", "expression": "x", **SCENE, "task": "track",
             "mask_id": ["7"], "frame_trajectories": DUCKS},
        ],
        records=[
            {"video": {"path": "pond.mp4"}, "meta": {"id": "a"},
             "annotations": [{"type": "track", "label": "both ducks", "coords": "pixel",
                              "size": [640, 360], "mode": "per_frame", "fps": 2,
                              "times": [0.0, 0.5, 1.0],
                              "points": [{"t": 0.0, "id": 0, "x": 10, "y": 20},
                                         {"t": 0.0, "id": 1, "x": 50, "y": 20},
                                         {"t": 0.5, "id": 0, "x": 12, "y": 20, "occluded": True},
                                         {"t": 1.0, "id": 0, "x": 14, "y": 21}]}]},
            {"video": {"path": "pond.mp4"}, "meta": {"id": "b"},
             "annotations": [{"type": "track", "label": "left duck", "coords": "pixel",
                              "size": [640, 360], "mode": "from_point", "fps": 2,
                              "times": [0.0, 0.5, 1.0],
                              "query": {"t": 0.0, "id": 0, "x": 10, "y": 20},
                              "points": [{"t": 0.5, "id": 0, "x": 12, "y": 20, "occluded": True},
                                         {"t": 1.0, "id": 0, "x": 14, "y": 21}]}]},
            {"video": {"path": "pond.mp4"}, "meta": {"id": "c"},
             "annotations": [{"type": "track", "label": "right duck", "coords": "pixel",
                              "size": [640, 360], "mode": "start_end", "fps": 2,
                              "times": [0.0, 0.5, 1.0],
                              "points": [{"t": 0.0, "id": 1, "x": 50, "y": 20}]}]},
        ],
        skipped={"fps is no multiple of the sampling rate": 1, "another task": 1,
                 "track without a visible point": 1},
    ),
    "molmo2-videotrack": Case(
        columns={"id": "s", "video": "s", "clip": "s", "video_dataset": "s", "fps": "i",
                 "start_frame": "i", "end_frame": "i", "exp": "s", "w": "i", "h": "i",
                 "mask_id": ["s"], "points": [{"object_id": "s", "points": [["f"]]}]},
        rows=[
            {"id": "r", "video": "src", "clip": "src_10_14", "fps": 4, "start_frame": 10,
             "end_frame": 14, "exp": "the dog", "w": 320, "h": 240, "mask_id": ["o1"],
             "points": [{"object_id": "o1", "points": [[1, 2], [3, 4], None, [7, 8], [9, 10]]},
                        {"object_id": "o2", "points": [[5, 5]] * 5}]},
            {"id": "s", "video": "src", "clip": "c", "fps": 25, "start_frame": 0, "end_frame": 1,
             "exp": "x", "points": []},
            {"id": "n", "video": "src", "clip": "c", "fps": None, "start_frame": 0, "end_frame": 1,
             "exp": "x", "points": []},
        ],
        records=[
            {"video": {"path": "src_10_14.mp4"}, "meta": {"id": "r"},
             "annotations": [{"type": "track", "label": "the dog", "coords": "pixel",
                              "size": [320, 240], "mode": "per_frame", "fps": 2,
                              "times": [0.0, 0.5, 1.0],
                              "points": [{"t": 0.0, "id": "o1", "x": 1, "y": 2},
                                         {"t": 1.0, "id": "o1", "x": 9, "y": 10}]}]},
        ],
        skipped={"track without a visible point": 1, "row of another shape": 1},
    ),
}
