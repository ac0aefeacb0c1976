"""Miniatures of the published sets, in their column types, against records written out by hand; kills, garbage, no network."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from records import reader as rules
from tools import prepare

ROOT = Path(__file__).parents[2]


def png(colour, kind="png", size=(6, 4)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def sha(value):
    return hashlib.sha256(value if isinstance(value, bytes) else value.encode()).hexdigest()


RED, BLUE, JPEG = png("red"), png("blue"), png("green", "jpeg")
U, V, W = "https://example.org/u.jpg", "https://example.org/v.jpg?a=1&b=2", "http://example.org/w"
HASH = "ab" * 32


def of(url, **more):
    return {"path": sha(url), "url": url, **more}


def file(data, kind="png"):
    return f"{sha(data)}.{kind}"


def cell(data=None, path=None):
    return {"bytes": data, "path": path}


def xy(*pairs):
    return [{"x": x, "y": y} for x, y in pairs]


# column types as published, in the words of `arrow` below: s string, i int64, f float64, g float32, b bool, [x] a list, {..} a struct
XYS, XSYS, PICTURE = ["xy"], {"x": ["g"], "y": ["g"]}, {"bytes": "binary", "path": "s"}
PAIRS = {"question": ["s"], "explanation": ["s"], "answer": ["s"]}
POINTS = {"image_url": "s", "image_sha256": "s", "points": XYS, "count": "i", "label": "s", "collection_method": "s"}
VQA = {"question_id": "i", "question": "s", "answers": ["s"], "image": PICTURE}
TIMED = {"video_id": "s", "video_source": "s", "video_duration": "f", "clip_start": "f", "clip_end": "f", "two_fps_timestamps": ["f"],
         "points": [XYS], "count": "i", "label": "s", "question": "s", "category": "s", "annotator_unsure": "b"}
TIMED_ROWS = [
    {"video_id": "abc", "video_source": "youtube", "video_duration": 40.0, "two_fps_timestamps": [9.0, 1.5], "count": 3, "label": "Bells",
     "points": [xy((40, 22), (71, 24.5)), xy((40, 23))], "question": "How many bells?", "category": "object", "annotator_unsure": False},
    {"video_id": "sora2/x", "video_duration": 90.0, "clip_start": 10.0, "clip_end": 70.0, "two_fps_timestamps": [], "points": [],
     "count": 0,
     "label": "cats", "question": "How many cats?"},
    {"video_id": "abc", "video_duration": 40.0, "two_fps_timestamps": [2.0], "points": [xy((1, 2))], "count": 1, "label": "dogs"},
    {"video_id": "long", "video_duration": 90.0, "two_fps_timestamps": [2.0], "points": [xy((1, 2))], "count": 1, "label": "no clip"},
    {"video_id": "late", "video_duration": 90.0, "clip_start": 0.0, "clip_end": 60.0, "two_fps_timestamps": [61.0], "points": [xy((1, 2))],
     "count": 1, "label": "outside"},
    {"video_id": "abc", "video_duration": 40.0, "two_fps_timestamps": [2.0], "points": [xy((1, 2))], "count": 2, "label": "miscounted"},
]


def timed(mode, asked):
    bells = {"type": "point", "label": "Bells", **({"question": "How many bells?"} if asked else {}), "coords": "percent", "mode": mode,
             "meta": {"category": "object", "annotator_unsure": False}, "count": 3,
             "points": [{"t": 9.0, "x": 40, "y": 22}, {"t": 9.0, "x": 71, "y": 24.5}, {"t": 1.5, "x": 40, "y": 23}]}
    cats = {"type": "point", "label": "cats", **({"question": "How many cats?"} if asked else {}), "coords": "percent", "mode": mode,
            "count": 0, "points": []}
    dogs = {"type": "point", "label": "dogs", "coords": "percent", "mode": mode, "count": 1, "points": [{"t": 2.0, "x": 1, "y": 2}]}
    return [{"video": {"path": "abc_2fps.mp4"}, "annotations": [bells, dogs], "meta": {"video_source": "youtube"}},
            {"video": {"path": "sora2/x_2fps.mp4", "start": 10, "end": 70}, "annotations": [cats]}]


TIMED_SKIPS = {"no clip of at most 63 s": 1, "point outside the clip": 1, "count is not the number of points": 1}
TRACK = {"id": "s", "video": "s", "expression": "s", "fps": "i", "sampling_fps": "i", "height": "i", "width": "i", "n_frames": "i",
         "task": "s",
         "frame_trajectories": [{"frame": "i", "time": "f", "points": [{"id": "i", "point": ["f"], "occluded": "b"}]}],
         "mask_id": ["s"], "obj_id": ["i"]}


def frames(*seen):
    """(time, (id, x, y, occluded), ..), .."""
    return [{"frame": int(t * 12), "time": t, "points": [{"id": i, "point": [x, y], "occluded": o} for i, x, y, o in points]}
            for t, *points in seen]


DUCKS = frames((0.0, (0, 10, 20, False), (1, 50, 20, False)), (0.25, (0, 11, 20, False)), (0.5, (0, 12, 20, True), (1, None, None, True)),
               (1.0, (0, 14, 21, False), (1, math.nan, math.nan, True)))
SCENE = {"width": 640, "height": 360, "fps": 12, "sampling_fps": 2}
CAPQA = {"video_id": "s", "Question": "s", "Answer": "s", "NegativeAnswers": ["s"], "Category": "s"}
CHAT = {"id": "s", "messages": [{"content": "s", "role": "s"}], "source": "s"}


def said(*words):
    return [{"role": role, "content": w} for role, w in zip(["user", "assistant"] * 9, words, strict=False)]


def ask(style, question, **target):
    return {"type": "qa", "style": style, "question": question, **target}


def cap(style, text):
    return {"type": "caption", "style": style, "text": text}


def spot(label, points, count, method):
    return {"type": "point", "label": label, "coords": "percent", "meta": {"collection_method": method}, "count": count, "points": points}


# name -> column types (None: json), rows, the records that come of them (without id), what is left out, more arguments
CASES = {
    "pixmo-cap": ({"image_url": "s", "caption": "s", "transcripts": ["s"]},
                  [{"image_url": U, "caption": " Three boats. ", "transcripts": ["um boats", "boats"]}, {"image_url": None, "caption": "x"},
                   {"image_url": V, "caption": "", "transcripts": None}],
                  [{"image": of(U), "annotations": [cap("long_caption", "Three boats."),
                                                    cap("transcript", "um boats"),
                                                    cap("transcript", "boats")]}],
                  {"no image": 1, "empty caption": 1}),
    "pixmo-cap-only": ({"image_url": "s", "caption": "s", "transcripts": ["s"]}, [{"image_url": U, "caption": "Boats.",
                                                                                   "transcripts": ["um"]}],
                       [{"image": of(U), "annotations": [cap("long_caption", "Boats.")]}], {}),
    "pixmo-points": (POINTS, [
        {"image_url": U, "image_sha256": HASH, "points": xy((21.4, 55.0), (100.3, -5)), "count": 2, "label": "mug",
         "collection_method": "pointing"},
        {"image_url": V, "points": [], "count": 0, "label": "cats", "collection_method": "counting"},
        {"image_url": U, "image_sha256": HASH, "points": xy((1, 2)), "count": 1, "label": "Cat", "collection_method": "counting"},
        {"image_url": U, "points": xy((1, 2)), "count": 2, "label": "torn", "collection_method": "counting"},
        {"image_url": U, "points": xy(*[(1, 2)] * 61), "count": 61, "label": "crowd", "collection_method": "counting"},
        {"image_url": U, "points": xy((1, math.nan)), "count": 1, "label": "nan", "collection_method": "counting"},
        {"image_url": U, "points": xy((1, 2)), "count": 1, "label": " ", "collection_method": "counting"}],
        [{"image": of(U, sha256=HASH), "annotations": [
            spot("mug", xy((21.4, 55.0), (100, 0)), 2, "pointing"),
            spot("Cat", xy((1, 2)), 1, "counting")]},
         {"image": of(V), "annotations": [spot("cats", [], 0, "counting")]}],
        {"count is not the number of points": 1, "more than 60 points": 1, "point outside the picture": 1, "no label": 1}),
    "pixmo-points-basic": (POINTS, [{"image_url": U, "points": xy((1, 2)), "count": 1, "label": "a", "collection_method": "pointing"},
                                    {"image_url": U, "points": xy((3, 4)), "count": 1, "label": "b", "collection_method": "counting"}],
                           [{"image": of(U), "annotations": [spot("a", xy((1, 2)), 1, "pointing")]}],
                           {"another collection_method": 1}),
    "pixmo-points-high-frequency": (POINTS, [{"image_url": U, "points": xy((1, 2)), "count": 1, "label": "a",
                                              "collection_method": "pointing"},
                                             {"image_url": U, "points": xy((3, 4)), "count": 1, "label": "b",
                                              "collection_method": "counting"}],
                                    [{"image": of(U), "annotations": [spot("b", xy((3, 4)), 1, "counting")]}],
                                    {"another collection_method": 1}),
    "pixmo-points-eval": ({"image_url": "s", "points": XYS, "label": "s", "masks": [[["b"]]]},
                          [{"image_url": U, "points": xy((1, 2)), "label": "a", "masks": [[[True]]]}],
                          [{"image": of(U), "annotations": [{"type": "point", "label": "a", "coords": "percent", "points": xy((1, 2))}]}],
                          {}),
    "pixmo-count": ({"image_url": "s", "image_sha256": "s", "count": "i", "points": XSYS, "label": "s"},
                    [{"image_url": U, "image_sha256": HASH, "count": 2, "points": {"x": [112.5, 401.0], "y": [300.0, 287.5]},
                      "label": "sheep"},
                     {"image_url": V, "count": 4, "points": None, "label": "people"},
                     {"image_url": W, "count": 3, "points": {"x": [], "y": []}, "label": "cars"}],
                    [{"image": of(U, sha256=HASH), "annotations": [{"type": "point", "label": "sheep", "coords": "pixel", "count": 2,
                                                                    "points": xy((112.5, 300.0), (401.0, 287.5))}]},
                     {"image": of(V), "annotations": [{"type": "count", "label": "people", "count": 4}]},
                     {"image": of(W), "annotations": [{"type": "count", "label": "cars", "count": 3}]}], {}),
    "pixmo-ask-model-anything": ({"image_url": "s", "image_sha256": "s", "question": "s", "answer": "s"},
                                 [{"image_url": U, "image_sha256": HASH, "question": "What for?", "answer": "It ties."},
                                  {"image_url": U, "image_sha256": HASH, "question": "Why?", "answer": " "},
                                  {"image_url": U, "image_sha256": HASH, "question": "Who?", "answer": "Ann."}],
                                 [{"image": of(U, sha256=HASH), "annotations": [
                                     ask("user_qa", "What for?", answer="It ties."),
                                     ask("user_qa", "Who?", answer="Ann.")]}], {"empty answer": 1}),
    "pixmo-cap-qa": ({"image_url": "s", "question": "s", "answer": "s"},
                     [{"image_url": U, "question": "[USER] What colour? [ASSISTANT] Orange. [USER] Where? [ASSISTANT]",
                       "answer": "On the bow."},
                      {"image_url": U, "question": "[USER] One? [ASSISTANT]", "answer": "Yes."},
                      {"image_url": U, "question": "One? [ASSISTANT]", "answer": "Yes."},
                      {"image_url": U, "question": "[USER] One? [ASSISTANT] Yes. [USER] Two?", "answer": "Yes."},
                      {"image_url": U, "question": "[USER] One? [USER] Two? [ASSISTANT]", "answer": "Yes."}],
                     [{"image": of(U), "annotations": [
                         {"type": "qa", "style": "user_qa", "turns": [{"question": "What colour?", "answer": "Orange."},
                                                                      {"question": "Where?", "answer": "On the bow."}]},
                         {"type": "qa", "style": "user_qa", "turns": [{"question": "One?", "answer": "Yes."}]}]}],
                     {"dialogue that does not parse": 2, "turns that do not alternate": 1}),
    "cosyn-point": ({"id": "s", "image": PICTURE, "questions": ["s"], "answer_points": [XSYS], "names": ["s"]},
                    [{"id": "c1", "image": cell(RED, "c1.png"), "questions": ["Where is the legend?", "Where is it?"], "names": ["legend",
                        None],
                      "answer_points": [{"x": [88.0], "y": [9.5]}, {"x": [400.0], "y": [1.0]}]},
                     {"id": "c2", "image": None, "questions": ["a?"], "answer_points": [], "names": []},
                     {"id": "c3", "image": cell(b"<html>404", "c3.png"), "questions": ["Where?"], "answer_points": [{"x": [1], "y": [1]}]}],
                    [{"image": file(RED), "meta": {"id": "c1"}, "annotations": [
                        {"type": "point", "label": "legend", "question": "Where is the legend?", "coords": "percent", "mode": "point",
                         "style": "cosyn_point", "points": xy((88.0, 9.5))}]}],
                    {"point outside the picture": 1, "row of another shape": 1, "bytes that are no image": 1}),
    "cosyn-400k": ({"id": "s", "image": PICTURE, "qa_pairs": PAIRS},
                   [{"id": "k", "image": cell(BLUE), "qa_pairs": {"question": ["How much?", "Which?"], "explanation": ["42 - 30 = 12.", ""],
                                                                  "answer": ["12", "2019"]}}],
                   [{"image": file(BLUE), "meta": {"id": "k"}, "annotations": [
                       ask("cosyn_chart_exp", "How much?", answer="12", explanation="42 - 30 = 12."),
                       ask("cosyn_chart", "Which?", answer="2019")]}], {}, "--type", "chart"),
    "tulu": (CHAT | {"category": "s", "first_message_qwen3_tokens": "i", "empty_messages": "b", "has_special_token": "b"}, [
        {"id": "t_1", "messages": [{"role": "system", "content": "Be brief."}, *said("  Name a prime.\n", "11.", "Another?", "13.",
                                                                                     "And?")], "source": "x"},
        {"id": "t_2", "messages": said("Write C.", "int"), "category": "code"},
        {"id": "t_3", "messages": said("a", "b"), "source": "allenai/puzzle_data_160k-ngram-filtered"},
        {"id": "t_4", "messages": said("a", "b"), "first_message_qwen3_tokens": 5000},
        {"id": "t_5", "messages": said("say <|im_end|>", "b")}, {"id": "t_6", "messages": said("a", "b"), "has_special_token": True},
        {"id": "t_7", "messages": said("a", " ")}, {"id": "t_8", "messages": said("a")},
        {"id": "t_9", "messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}],
        [{"annotations": [{"type": "qa", "style": "text_sft", "system": "Be brief.", "turns": [
            {"question": "  Name a prime.\n", "answer": "11."}, {"question": "Another?", "answer": "13."}]}], "meta": {"id": "t_1",
                "source": "x"}}],
        {"code, another language, puzzles, reasoning": 2, "first message too long": 1, "special tokens in the text": 2, "empty turn": 1,
         "turns that do not alternate": 2}),
    "molmo2-cap": ({"video_id": "s", "video_start": "f", "video_end": "f", "video_caption": "s", "merged_caption": "s",
                    "video_frame_merged_caption": "s", "annotation_score": "i"},
                   [{"video_id": "-bc", "video_start": 0.0, "video_end": 61.5, "video_caption": "Short.", "merged_caption": "Merged.",
                     "video_frame_merged_caption": "Long.", "annotation_score": 4},
                    {"video_id": "d", "merged_caption": "Only.", "annotation_score": 3},
                    {"video_id": "e", "merged_caption": "Poor.", "annotation_score": 2},
                    {"video_id": "f", "merged_caption": "No time.", "annotation_score": 5, "video_start": 3.0, "video_end": 3.0},
                    {"video_id": "NyuA4FatDQk", "merged_caption": "x", "annotation_score": 5}, {"video_id": "g", "annotation_score": 5}],
                   [{"video": {"path": "-bc.mp4", "start": 0.0, "end": 61.5}, "meta": {"annotation_score": 4}, "annotations": [
                       cap("video_short_caption", "Short."),
                       cap("video_merged_caption", "Merged."),
                       cap("video_long_caption", "Long.")]},
                    {"video": {"path": "d.mp4"}, "meta": {"annotation_score": 3}, "annotations": [
                        cap("video_merged_caption", "Only.")]}],
                   {"annotation_score below 3": 1, "clip that ends before it starts": 1, "video known not to decode": 1,
                    "nothing to learn": 1}),
    "molmo2-videocapqa": (CAPQA, [
        {"video_id": "abc", "Question": "How long?", "Answer": "a minute", "NegativeAnswers": ["an hour", "a minute", "a day"],
         "Category": "time"},
        {"video_id": "x", "Question": "Who?", "Answer": "Ann", "NegativeAnswers": []},
        {"video_id": "abc", "Question": "Who?", "Answer": "Ann", "NegativeAnswers": ["Bob"]}],
        [{"video": {"path": "abc.mp4"}, "annotations": [
            {"type": "qa", "style": "video_multiple_choice", "question": "How long?", "options": ["a minute", "an hour", "a day"],
             "answer_idx": 0, "shuffle_options": True, "meta": {"category": "time"}},
            ask("video_multiple_choice", "Who?", options=["Ann", "Bob"], answer_idx=0, shuffle_options=True)]}],
            {"no right option among 2 to 26": 1}),
    "molmo2-videosubtitleqa": (CAPQA | {"subtitle": [{"start": "f", "end": "f", "text": "s"}]}, [
        {"video_id": "abc", "Question": "How long?", "Answer": "a minute", "NegativeAnswers": ["an hour"],
         "subtitle": [{"start": 41.2, "end": 44.0, "text": "and wait "}, {"start": 1.0, "end": 2.0, "text": "so"},
                      {"start": 5.0, "end": 4.0, "text": "torn"}, {"start": 6.0, "end": 7.0, "text": ""}]}],
        [{"video": {"path": "abc.mp4"}, "subtitles": [{"start": 1.0, "end": 2.0, "text": "so"}, {"start": 41.2, "end": 44.0,
            "text": "and wait"}],
          "annotations": [ask("video_multiple_choice", "How long?", options=["a minute", "an hour"], answer_idx=0,
                              shuffle_options=True)]}], {}),
    "molmo2-ask-model-anything": ({"video_id": "s", "question": "s", "answer": "s"},
                                  [{"video_id": "abc", "question": " Why? ", "answer": "Rain. "}, {"video_id": "abc", "question": "Who?",
                                      "answer": ""},
                                   {"video_id": None, "question": "Who?", "answer": "Ann"}],
                                  [{"video": {"path": "abc.mp4"}, "annotations": [
                                      ask("user_qa", "Why?", answer="Rain.")]}],
                                  {"empty answer": 1, "no video": 1}),
    "molmo2-videopoint": (TIMED, TIMED_ROWS, timed("point_count", True), TIMED_SKIPS),
    "molmo2-videopoint-where": (TIMED, TIMED_ROWS, timed("point", False), TIMED_SKIPS),
    "molmo2-videopointeval": (TIMED | {"points": XYS, "width": "i", "height": "i"},
                              [{"video_id": "abc", "two_fps_timestamps": [0.5, 2.0], "points": xy((320, 180), (0, 359)), "count": 2,
                                "label": "a",
                                "width": 640, "height": 360, "video_duration": 300.0}],
                              [{"video": {"path": "abc_2fps.mp4"}, "annotations": [
                                  {"type": "point", "label": "a", "coords": "pixel", "size": [640, 360], "mode": "point_count", "count": 2,
                                   "points": [{"t": 0.5, "x": 320, "y": 180}, {"t": 2.0, "x": 0, "y": 359}]}]}], {}),
    "molmo2-videocounteval": ({"video_id": "s", "clip_start": "f", "clip_end": "f", "count": "i", "label": "s", "question": "s",
                               "category": "s"},
                              [{"video_id": "abc", "clip_start": 2.0, "clip_end": 90.0, "count": 4, "label": "hops",
                                "question": "How many hops?"},
                               {"video_id": "abc", "count": None, "label": "hops"}],
                              [{"video": {"path": "abc_2fps.mp4", "start": 2.0, "end": 90.0}, "annotations": [
                                  {"type": "count", "label": "hops", "question": "How many hops?", "count": 4}]}], {"no count": 1}),
    "academic-video-points": ({"subset": "s", "video_name": "s", "dataset": "s", "category": "s", "count": "i", "timestamps": ["f"],
                               "points": [XYS], "video_duration": "f", "clip_start_time": "f", "clip_end_time": "f"},
                              [{"subset": "ovis", "video_name": "v1.mp4", "category": "Person", "count": 1, "timestamps": [12.0],
                                "points": [xy((50, 60))], "video_duration": 80.0, "clip_start_time": 10.0, "clip_end_time": 40.0}],
                              [{"video": {"path": "v1_2fps.mp4", "start": 10.0, "end": 40.0}, "annotations": [
                                  {"type": "point", "label": "person", "coords": "percent", "mode": "point_count", "count": 1,
                                   "meta": {"category": "Person"}, "points": [{"t": 12.0, "x": 50, "y": 60}]}]}], {}),
    "track-instruction": (TRACK, [
        {"id": "a", "video": "pond", "expression": "both ducks", **SCENE, "task": "track", "mask_id": ["0", "1"],
         "frame_trajectories": DUCKS},
        {"id": "b", "video": "pond", "expression": "left duck", **SCENE, "task": "single_point_track", "mask_id": ["0"],
         "frame_trajectories": DUCKS},
        {"id": "c", "video": "pond", "expression": "right duck", **SCENE, "task": "ground", "mask_id": ["1"], "frame_trajectories": DUCKS},
        {"id": "d", "video": "pond", "expression": "x", **SCENE | {"fps": 25}, "task": "track", "mask_id": ["0"],
         "frame_trajectories": DUCKS},
        {"id": "e", "video": "pond", "expression": "x", **SCENE, "task": "segment", "mask_id": ["0"], "frame_trajectories": DUCKS},
        {"id": "f", "video": "pond", "expression": "x", **SCENE, "task": "track", "mask_id": ["7"], "frame_trajectories": DUCKS}],
        [{"video": {"path": "pond.mp4"}, "meta": {"id": "a"}, "annotations": [
            {"type": "track", "label": "both ducks", "coords": "pixel", "size": [640, 360], "mode": "per_frame", "fps": 2, "times": [0.0,
                0.5, 1.0],
             "points": [{"t": 0.0, "id": 0, "x": 10, "y": 20}, {"t": 0.0, "id": 1, "x": 50, "y": 20},
                        {"t": 0.5, "id": 0, "x": 12, "y": 20, "occluded": True}, {"t": 1.0, "id": 0, "x": 14, "y": 21}]}]},
         {"video": {"path": "pond.mp4"}, "meta": {"id": "b"}, "annotations": [
             {"type": "track", "label": "left duck", "coords": "pixel", "size": [640, 360], "mode": "from_point", "fps": 2, "times": [0.0,
                 0.5, 1.0],
              "query": {"t": 0.0, "id": 0, "x": 10, "y": 20},
              "points": [{"t": 0.5, "id": 0, "x": 12, "y": 20, "occluded": True}, {"t": 1.0, "id": 0, "x": 14, "y": 21}]}]},
         {"video": {"path": "pond.mp4"}, "meta": {"id": "c"}, "annotations": [
             {"type": "track", "label": "right duck", "coords": "pixel", "size": [640, 360], "mode": "start_end", "fps": 2,
              "times": [0.0, 0.5, 1.0], "points": [{"t": 0.0, "id": 1, "x": 50, "y": 20}]}]}],
        {"fps is no multiple of the sampling rate": 1, "another task": 1, "track without a visible point": 1}),
    "molmo2-videotrack": ({"id": "s", "video": "s", "clip": "s", "video_dataset": "s", "fps": "i", "start_frame": "i", "end_frame": "i",
                           "exp": "s",
                           "w": "i", "h": "i", "mask_id": ["s"], "points": [{"object_id": "s", "points": [["f"]]}]},
                          [{"id": "r", "video": "src", "clip": "src_10_14", "fps": 4, "start_frame": 10, "end_frame": 14, "exp": "the dog",
                            "w": 320, "h": 240, "mask_id": ["o1"], "points": [
                                {"object_id": "o1", "points": [[1, 2], [3, 4], None, [7, 8], [9, 10]]},
                                {"object_id": "o2", "points": [[5, 5]] * 5}]},
                           {"id": "s", "video": "src", "clip": "c", "fps": 25, "start_frame": 0, "end_frame": 1, "exp": "x", "points": []},
                           {"id": "n", "video": "src", "clip": "c", "fps": None, "start_frame": 0, "end_frame": 1, "exp": "x",
                            "points": []}],
                          [{"video": {"path": "src_10_14.mp4"}, "meta": {"id": "r"}, "annotations": [
                              {"type": "track", "label": "the dog", "coords": "pixel", "size": [320, 240], "mode": "per_frame", "fps": 2,
                               "times": [0.0, 0.5, 1.0], "points": [{"t": 0.0, "id": "o1", "x": 1, "y": 2}, {"t": 1.0, "id": "o1", "x": 9,
                                   "y": 10}]}]}],
                          {"track without a visible point": 1, "row of another shape": 1}),
    "multi-image-qa": ({"image_urls": ["s"], "image_sha256s": ["s"], "qa_pairs": {"question": ["s"], "answer": ["s"]}},
                       [{"image_urls": [U, V], "qa_pairs": {"question": ["What changed?", ""], "answer": ["The gate.", "x"]}},
                        {"image_urls": [U], "qa_pairs": {"question": ["a"], "answer": ["b"]}}],
                       [{"images": [of(U), of(V)], "annotations": [
                           ask("correction_qa", "What changed?", answer="The gate.")]}],
                       {"empty question": 1, "not 2 to 5 images": 1}),
    "syn-multi-image-qa": ({"id": "s", "images": [PICTURE], "qa_pairs": PAIRS, "metadata": {"num_images": "i"}},
                           [{"id": "m1", "images": [cell(RED), cell(JPEG)], "qa_pairs": {"question": ["Which?"],
                                                                                         "explanation": ["It peaks."],
                                                                                         "answer": ["the second"]}}],
                           [{"images": [file(RED), file(JPEG, "jpg")], "meta": {"id": "m1"}, "annotations": [
                               ask("cosyn_doc_exp", "Which?", answer="the second", explanation="It peaks.")]}],
                           {}, "--type", "doc"),
    "multi-image-point": ({"image_urls": ["s"], "image_sha256s": ["s"], "points": [XSYS], "counts": ["i"], "labels": ["s"],
                           "collection_method": ["s"]},
                          [{"image_urls": [U, V, W], "image_sha256s": [sha(U), sha(V), sha(W)], "labels": ["Bottle", "bottles", "cap"],
                            "points": [{"x": [12.0], "y": [40.5]}, {"x": [], "y": []}, {"x": [1, 2], "y": [3, 4]}], "counts": [1, 0, 2]}],
                          [{"images": [of(U), of(V), of(W)], "annotations": [
                              {"type": "point", "label": "bottle", "coords": "percent", "count": 1, "points": [{"image": 0, "x": 12.0,
                                  "y": 40.5}]},
                              {"type": "point", "label": "cap", "coords": "percent", "count": 2,
                               "points": [{"image": 2, "x": 1, "y": 3}, {"image": 2, "x": 2, "y": 4}]}]}], {}),
    "vqa2": (VQA | {"image_id": "i", "answers": [{"answer": "s", "answer_confidence": "s", "answer_id": "i"}]},
             [{"question": "What is it?", "image": cell(RED), "answers": [{"answer": "cat"}, {"answer": "dog"}, {"answer": "cat"}]},
              {"question": "Which?", "image": cell(RED), "answers": [{"answer": "this"}]},
              {"question": "Test?", "image": cell(BLUE), "answers": []},
              {"question": "Where?", "image": cell(None, "train2014/COCO_9.jpg"), "answers": [{"answer": "there"}]},
              {"question": "Where?", "image": cell(None, "../secret.jpg"), "answers": [{"answer": "there"}]}],
             [{"image": file(RED), "annotations": [ask("vqa2", "What is it?", answers=["cat", "dog", "cat"]),
                                                   ask("vqa2", "Which?", answers=["this"])]},
              {"image": "train2014/COCO_9.jpg", "annotations": [ask("vqa2", "Where?", answers=["there"])]}],
             {"empty answer": 1, "path that leaves the media folder": 1}),
    "textvqa": (VQA, [{"question": "Brand?", "image": cell(RED), "answers": ["dakota", "dakota digital"]}],
                [{"image": file(RED), "annotations": [ask("text_vqa", "Brand?", answers=["dakota", "dakota digital"])]}], {}),
    "docvqa": (VQA, [{"question": "Date?", "image": cell(RED), "answers": ["1/8/93"]}, {"question": "Who?", "image": cell(RED),
                                                                                        "answers": ["Ann"]}],
               [{"image": file(RED), "annotations": [ask("doc_qa", "Date?", answers=["1/8/93"])]},
                {"image": file(RED), "annotations": [ask("doc_qa", "Who?", answers=["Ann"])]}], {}),
    "chartqa": ({"image": PICTURE, "query": "s", "label": ["s"], "human_or_machine": "i"},
                [{"image": cell(RED), "query": "How many?", "label": ["14"], "human_or_machine": 0},
                 {"image": cell(RED), "query": "Which year?", "label": ["2019"], "human_or_machine": 1}],
                [{"image": file(RED), "weight": pytest.approx(1.47715, abs=1e-5), "annotations": [
                    ask("chart_qa", "How many?", answers=["14"])]},
                 {"image": file(RED), "weight": pytest.approx(0.52285, abs=1e-5), "annotations": [
                     ask("chart_qa", "Which year?", answers=["2019"])]}], {}),
    "ai2d": ({"image": PICTURE, "question": "s", "question_id": "s", "answer_texts": ["s"], "correct_answer": "i", "abc_label": "b",
              "option_is_abc": ["b"], "has_transparent_box": "b"},
             [{"image": cell(RED), "question": "Which is the root?", "question_id": "q1", "answer_texts": ["a", "b", "None of these"],
               "correct_answer": 1, "abc_label": True, "option_is_abc": [True, True, False]},
              {"image": cell(RED), "question": "What eats it?", "answer_texts": ["fox", "owl", "fox"], "correct_answer": 2,
               "abc_label": False,
               "option_is_abc": [False] * 3}],
             [{"image": file(RED), "meta": {"question_id": "q1"}, "annotations": [
                 ask("ai2_diagram_no_letter", "Which is the root?", options=["A", "B", "None of these"], answer_idx=1, letters=False)]},
              {"image": file(RED), "annotations": [ask("ai2_diagram", "What eats it?", options=["fox", "owl"], answer_idx=0)]}], {}),
    "scienceqa": ({"image": PICTURE, "question": "s", "choices": ["s"], "answer": "i", "hint": "s"},
                  [{"image": cell(RED), "question": "Which state?", "choices": ["Ohio", "Utah"], "answer": 1, "hint": "Look at the map."},
                   {"image": None, "question": "Text only?", "choices": ["yes", "no"], "answer": 0, "hint": ""}],
                  [{"image": file(RED), "annotations": [ask("science_qa", "Look at the map.\nWhich state?", options=["Ohio", "Utah"],
                                                            answer_idx=1)]}], {"no image": 1}),
    "a-okvqa": ({"image": PICTURE, "question_id": "s", "question": "s", "choices": ["s"], "correct_choice_idx": "i"},
                [{"image": cell(JPEG), "question_id": "22", "question": "In the mouth?", "choices": ["pick", "cigarette"],
                  "correct_choice_idx": 1}],
                [{"image": file(JPEG, "jpg"), "meta": {"question_id": "22"}, "annotations": [
                    ask("a_okvqa_mc", "In the mouth?", options=["pick", "cigarette"], answer_idx=1)]}], {}),
    "molmo2-mantis": ({"images": ["s"], "mc_question": ["s"], "oe_question": ["s"], "direct_answer": ["s"], "choices": [["s"]],
                       "correct_choice_idx": ["i"]},
                      [{"images": ["n/l.png", "n/r.png"], "mc_question": ["One dog?"], "oe_question": ["One?"], "direct_answer": ["no"],
                        "choices": [["True", "False"]], "correct_choice_idx": [1]}, {"images": ["n/l.png"], "mc_question": ["x"]}],
                      [{"images": ["n/l.png", "n/r.png"], "annotations": [
                          ask("mantis_instruct_mc", "One dog?", options=["True", "False"], answer_idx=1, shuffle_options=True)]}],
                          {"row of another shape": 1}),
    "mantis": ({"id": "s", "images": [PICTURE], "conversation": [{"role": "s", "content": "s"}], "source": "s"},
               [{"images": [cell(None, "l.png"), cell(None, "r.png")], "conversation": said("<image> <image>\nSame?", "No. ", "Sure?",
                   "Yes.")},
                {"images": [cell(None, "l.png"), cell(None, "r.png")], "conversation": said("Left: <image> right: <image>", "No.")},
                {"images": [cell(None, "l.png"), cell(None, "r.png")], "conversation": said("<image> Same?", "No.")}],
               [{"images": ["l.png", "r.png"], "annotations": [{"type": "qa", "style": "user_qa", "turns": [
                   {"question": "Same?", "answer": "No."}, {"question": "Sure?", "answer": "Yes."}]}]},
                {"images": ["l.png", "r.png"], "annotations": [{"type": "qa", "style": "user_qa", "turns": [
                    {"question": ["Left: ", {"image": 0}, " right: ", {"image": 1}], "answer": "No."}]}]}],
               {"placeholders that do not fit the images": 1}),
    "llava-video-178k": (None, [
        {"id": "7", "data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4", "conversations": [
            {"from": "human", "value": "<image>\nWhy?"}, {"from": "gpt", "value": "Rain."}, {"from": "human", "value": "Who?"},
            {"from": "gpt", "value": "Ann."}]},
        {"id": 8, "data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4", "conversations": [
            {"from": "human", "value": "Where?\n<image>"}, {"from": "gpt", "value": "Here."}]},
        {"id": 9, "data_source": "a", "video": "y.mkv", "conversations": [{"from": "gpt", "value": "Here."}]}],
        [{"video": {"path": "0_30_s_nextqa/NExTQA/x.mp4"}, "annotations": [
            ask("video_short_answer", "Why?", answer="Rain."),
            ask("video_short_answer", "Who?", answer="Ann."),
            ask("video_short_answer", "Where?", answer="Here.")]}], {"turns that do not alternate": 1}),
    "llava-video-178k-academic": (None, [
        {"data_source": "0_30_s_perceptiontest", "video": "a.mp4", "conversations": said("<image>\nWhy?", "Rain.")},
        {"data_source": "0_30_s_youtube_v0_1", "video": "b.mp4", "conversations": said("<image>\nWhy?", "Rain.")}],
        [{"video": {"path": "0_30_s_perceptiontest/a.mp4"}, "annotations": [
            ask("video_short_answer", "Why?", answer="Rain.")]}], {"another source": 1}),
}


def arrow(kind):
    import pyarrow as pa
    if isinstance(kind, list):
        return pa.list_(arrow(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, arrow(inner)) for name, inner in kind.items()])
    return {"s": pa.string(), "i": pa.int64(), "f": pa.float64(), "g": pa.float32(), "b": pa.bool_(), "binary": pa.binary(),
            "xy": pa.struct([("x", pa.float64()), ("y", pa.float64())])}[kind]


def published(path, columns, rows, **how):
    """A file as it is published: parquet, or json where there are no column types."""
    if columns is None:
        path = path.with_name(f"{path.name}_oe_qa_processed.json")
        path.write_text(json.dumps(rows))
        return path
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    path = path.with_name(f"{path.name}.parquet")
    table = pa.Table.from_pylist(rows, pa.schema([(name, arrow(kind)) for name, kind in columns.items()]))
    parquet.write_table(table, path, **how)
    return path


def run(name, source, out, *more):
    """The command in this process -> (records, its last line)."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        prepare.main([name, *(map(str, source) if isinstance(source, list) else [str(source)]), str(out), *map(str, more)])
    counts = json.loads(said.getvalue().splitlines()[-1])
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert counts["records"] == len(records)
    assert counts["annotations"] == sum(len(r["annotations"]) for r in records)
    assert not (out / "prepare.sqlite").exists()
    return records, counts


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something was fetched")
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


# ---------------------------------------------------------------------------------------------------------------
# what record.schema.json asks for

TURN = {"question", "answer", "answers", "options", "answer_idx", "shuffle_options", "letters", "explanation"}
COMMON = {"type", "style", "weight", "meta"}
FIELDS = {"caption": {"text"}, "qa": TURN | {"turns", "system"}, "point": {"label", "question", "coords", "size", "points", "count",
                                                                           "mode"},
          "count": {"label", "question", "count"}, "track": {"label", "coords", "size", "mode", "fps", "times", "query", "points"}}


def valid(record):
    """Asserts what the schema says of records of these sets; records.check, which the trainer asks, says it again."""
    assert set(record) <= {"id", "image", "images", "video", "subtitles", "annotations", "weight", "meta"} and record["annotations"]
    assert len({"image", "images", "video"} & set(record)) <= 1 and ("subtitles" not in record or "video" in record)
    media = [record["image"]] if "image" in record else record.get("images") or ([record["video"]] if "video" in record else [])
    for entry in media:
        entry = {"path": entry} if isinstance(entry, str) else entry
        assert not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:|/", entry["path"]) and entry["path"] and ".." not in entry["path"].split("/")
        assert set(entry) <= ({"path", "start", "end"} if "video" in record else {"path", "url", "sha256"})
        assert ("start" in entry) == ("end" in entry) and 0 <= entry.get("start", 0) < entry.get("end", math.inf)
    for t in record.get("subtitles", []):
        assert set(t) == {"start", "end", "text"} and 0 <= t["start"] <= t["end"] and t["text"].strip()
    for a in record["annotations"]:
        assert set(a) <= COMMON | FIELDS[a["type"]] and re.fullmatch(r"[A-Za-z0-9_.-]+", a.get("style", "x"))
        for turn in a.get("turns", [a]) if a["type"] == "qa" else []:
            assert len({"answer", "answers", "options"} & set(turn)) == 1
            q = turn["question"]
            assert q.strip() if isinstance(q, str) else q and all(isinstance(p, str) or p["image"] < len(record["images"]) for p in q)
            assert all(isinstance(x, str) and x.strip() for x in [turn.get("answer", "x"), turn.get("explanation", "x"),
                                                                  *turn.get("answers", "x")])
            if "options" in turn:
                assert 2 <= len(turn["options"]) <= 26 and 0 <= turn["answer_idx"] < len(turn["options"])
        if a["type"] in ("point", "count", "track"):
            assert (a.get("label") or a.get("question")).strip() and a.get("count", 0) >= 0 and isinstance(a.get("count", 0), int)
        if "points" in a:
            w, h = (100, 100) if a["coords"] == "percent" else a.get("size", (math.inf, math.inf))
            keys = {"x", "y"} | ({"t"} if "video" in record else {"image"} if "images" in record else set())
            for p in a["points"] + ([a["query"]] if "query" in a else []):
                assert set(p) - {"occluded"} == keys | ({"id"} if a["type"] == "track" else set())
                assert -w / 100 <= p["x"] <= 1.01 * w and -h / 100 <= p["y"] <= 1.01 * h and p.get("t", 0) >= 0
                assert 0 <= p.get("image", 0) < len(record.get("images", [0]))
            assert a.get("count", len(a["points"])) == len(a["points"]) and a.get("fps", 1) > 0
            assert a["type"] == "point" or len({(p["t"], p["id"]) for p in a["points"]}) == len(a["points"])
    assert rules.check(record, "here") == []


# ---------------------------------------------------------------------------------------------------------------


def test_every_set_has_a_miniature():
    assert set(CASES) == set(prepare.SETS)


@pytest.mark.parametrize("name", CASES)
def test_the_miniature_becomes_these_records(name, tmp_path):
    columns, rows, expected, skipped, *more = CASES[name]
    records, counts = run(name, published(tmp_path / "train-00000-of-00001", columns, rows), tmp_path / "out", *more)
    assert [{k: v for k, v in r.items() if k != "id"} for r in records] == expected
    assert [r["id"] for r in records] == [f"{name}-{n}" for n in range(1, len(expected) + 1)]
    assert counts["skipped"] == skipped
    for record in records:
        valid(record)
    source = rules.Records(tmp_path / "out/records.jsonl")                # the trainer takes them as they are
    assert len(source) == len(expected) and not source.found
    urls = dict(line.split("\t") for line in (tmp_path / "out/urls.txt").read_text().splitlines())
    assert counts["urls"] == len(urls) and all(sha(url) == path for url, path in urls.items())
    for file in (tmp_path / "out/media").glob("*"):
        assert sha(file.read_bytes()) == file.stem
    assert {i["url"] for r in records for i in ([r["image"]] if "image" in r else r.get("images", [])) if "url" in i} <= set(urls)


GARBAGE = [None, 7, -1.5, "x", "", [], {}, [None], ["a", None], [[]], [{}], {"x": [1]}, {"x": [1, 2], "y": [3]}, [{"x": "1", "y": 2}], True,
           "\ud800", "a\0b", "http://", [{"role": "user", "content": None}], float("inf"), [0.5, "t"], {"bytes": "zz", "path": 3}, [[1]],
           10**30]


@pytest.mark.parametrize("name", CASES)
def test_rows_with_garbage_in_any_cell_are_counted_and_never_written_wrong(name, tmp_path):
    columns, rows, _, _, *more = CASES[name]
    plain = json.loads(json.dumps(rows, default=lambda b: sha(b) + ".png"))
    plain = [row | {column: value} for row in plain for column in (columns or row) for value in [*GARBAGE, "gone"]]
    for row in plain:
        for column in [c for c in row if row[c] == "gone"]:
            del row[column]
    source = tmp_path / "a_mc_.jsonl"
    lines = [json.dumps(dict.fromkeys(columns or plain[0]) | row) for row in plain]
    source.write_text("\n".join([json.dumps(rows[0], default=lambda b: "r.png"), *lines, "[1]", '{"torn', "7", "null"]))
    records, counts = run(name, source, tmp_path / "out", *more)
    for record in records:
        valid(record)
    assert records and counts["skipped"]["row of another shape"] >= 4


def test_an_image_with_many_points_becomes_several_records_of_sixty_at_most(tmp_path):
    sizes = [30, 30, 1, 0, 59, 60, 61, 2]
    rows = [{"image_url": U, "points": xy(*[(i, k) for i in range(n)]), "count": n, "label": f"l{k}", "collection_method": "counting"}
            for k, n in enumerate(sizes)]
    records, counts = run("pixmo-points", published(tmp_path / "p", POINTS, rows), tmp_path / "out")
    assert [[len(a["points"]) for a in r["annotations"]] for r in records] == [[30, 30], [1, 0, 59], [60], [2]]
    assert [r["id"] for r in records] == ["pixmo-points-1", "pixmo-points-1.1", "pixmo-points-1.2", "pixmo-points-1.3"]
    assert counts["skipped"] == {"more than 60 points": 1} and counts["urls"] == 1


def test_fetched_images_are_found_with_or_without_extension_and_give_pixels_their_size(tmp_path):
    fetched = tmp_path / "fetched"
    (fetched / "deep").mkdir(parents=True)
    (fetched / f"deep/{sha(U)}.jpg").write_bytes(png("red", "jpeg", (640, 480)))
    (fetched / sha(V)).write_bytes(b"<html>gone</html>")
    columns, rows, *_ = CASES["pixmo-count"]
    rows = [rows[0], rows[0] | {"points": {"x": [700, 1], "y": [1, 1]}}, rows[0] | {"image_url": V}, rows[0] | {"image_url": W}]
    records, counts = run("pixmo-count", published(tmp_path / "p", columns, rows), tmp_path / "out", "--media", fetched)
    assert [r["image"]["path"] for r in records] == [f"deep/{sha(U)}.jpg", sha(V), sha(W)]
    assert [[a.get("size") for a in r["annotations"]] for r in records] == [[[640, 480]], [None], [None]]
    assert counts["skipped"] == {"point outside the picture": 1} and counts["missing_media"] == 1 and counts["urls"] == 3
    assert not (tmp_path / "out/media").exists()


def test_videos_are_found_by_their_id_wherever_they_lie(tmp_path):
    films = tmp_path / "films"
    for path in ("kw/abc/any name.webm", "a/v_act.mkv", "a/ytb_you.mp4", "d/flat.MOV", "d/flat.txt", "generated/sora2-2fps/x_2fps.mp4",
                 "generated/veo/x_2fps.mp4", "kw/abc/any name.json"):
        (films / path).parent.mkdir(parents=True, exist_ok=True)
        (films / path).touch()
    rows = [{"video_id": name, "merged_caption": "c", "annotation_score": 5} for name in ("abc", "act", "you", "flat", "none", "a_")]
    records, counts = run("molmo2-cap", published(tmp_path / "c", CASES["molmo2-cap"][0], rows), tmp_path / "out", "--videos", films)
    assert [r["video"]["path"] for r in records] == ["kw/abc/any name.webm", "a/v_act.mkv", "a/ytb_you.mp4", "d/flat.MOV", "none.mp4"]
    assert counts["missing_media"] == 1
    rows = [TIMED_ROWS[1], TIMED_ROWS[1] | {"video_id": "veo/x"}, TIMED_ROWS[1] | {"video_id": "kling/x"}]
    records, _ = run("molmo2-videopoint", published(tmp_path / "v", TIMED, rows), tmp_path / "out", "--videos", films)
    assert [r["video"]["path"] for r in records] == ["generated/sora2-2fps/x_2fps.mp4", "generated/veo/x_2fps.mp4", "kling/x_2fps.mp4"]


def test_tracks_on_the_source_video_are_shifted_and_clipped(tmp_path):
    columns, rows, *_ = CASES["molmo2-videotrack"]
    [record], _ = run("molmo2-videotrack", published(tmp_path / "t", columns, rows[:1]), tmp_path / "out", "--full-video")
    assert record["video"] == {"path": "src.mp4", "start": 2.5, "end": 3.75}
    assert record["annotations"][0]["times"] == [2.5, 3.0, 3.5] and [p["t"] for p in record["annotations"][0]["points"]] == [2.5, 3.5]


def test_images_of_another_set_can_be_held_out_and_points_chosen_by_their_number(tmp_path):
    columns, rows, *_ = CASES["pixmo-points"]
    source = published(tmp_path / "p", columns, rows)
    held = tmp_path / "urls.txt"
    held.write_text(f"{U}\t{sha(U)}\n")
    records, counts = run("pixmo-points", source, tmp_path / "out", "--exclude", held)
    assert [r["image"]["url"] for r in records] == [V] and counts["skipped"]["excluded"] == 6
    records, counts = run("pixmo-points", source, tmp_path / "out", "--counts", 1, 1)
    assert [[a["label"] for a in r["annotations"]] for r in records] == [["Cat"]]


@pytest.mark.parametrize(("kind", "style"), [("oe", "video_short_answer"), ("mc", "video_multiple_choice"), ("cap", "video_long_caption")])
def test_llava_video_knows_its_style_by_the_name_of_the_file(kind, style, tmp_path):
    source = tmp_path / f"0_30_s_academic_{kind}_v0_1_qa_processed.json"
    source.write_text(json.dumps(CASES["llava-video-178k"][1][1:2]))
    [record], _ = run("llava-video-178k", source, tmp_path / "out")
    assert record["annotations"][0]["style"] == style
    assert record["annotations"][0].get("text", record["annotations"][0].get("answer")) == "Here."


def test_a_folder_is_read_whole_its_type_is_its_folder_and_json_may_lie_in_an_object(tmp_path):
    columns, rows, *_ = CASES["cosyn-400k"]
    for kind in ("chart", "document"):
        (tmp_path / "set" / kind).mkdir(parents=True)
        published(tmp_path / "set" / kind / "train-00000-of-00001", columns, rows)
        published(tmp_path / "set" / kind / "validation-00000-of-00001", columns, rows)
    records, _ = run("cosyn-400k", tmp_path / "set", tmp_path / "out", "--split", "train")
    assert [a["style"] for r in records for a in r["annotations"]] == ["cosyn_chart_exp", "cosyn_chart", "cosyn_document", "cosyn_document"]
    assert len(list((tmp_path / "out/media").iterdir())) == 1
    (tmp_path / "train_v1.0.json").write_text(json.dumps({"dataset_name": "docvqa", "data": [
        {"questionId": 1, "question": "Date?", "image": "documents/a.png", "answers": ["1/8/93"], "data_split": "train"}]}))
    [record], _ = run("docvqa", tmp_path / "train_v1.0.json", tmp_path / "out")
    assert record["image"] == "documents/a.png"


def many(tmp_path):
    """pixmo-points in two files of two row groups; every image has rows in both."""
    rows = [{"image_url": f"https://example.org/{i % 7}", "points": xy((i, i)), "count": 1 if i % 5 else 2, "label": f"l{i}",
             "collection_method": "counting"} for i in range(40)]
    return [published(tmp_path / f"train-{k}", POINTS, rows[k::2], row_group_size=11) for k in range(2)]


def everything(out):
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("stop", [0, 1, 7, 11, 12, 19, 20, 33, 39, "write"])
def test_a_run_that_is_broken_off_anywhere_ends_as_if_it_had_not_been(stop, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 4)
    source = many(tmp_path)
    run("pixmo-points", source, tmp_path / "whole")
    done, real = [], prepare.convert
    with monkeypatch.context() as broken:
        def convert(row, *rest):
            if len(done) == stop:
                raise MemoryError
            done.append(row)
            return real(row, *rest)

        broken.setattr(prepare, "convert", convert)
        if stop == "write":
            broken.setattr(prepare, "shares", None)
        with pytest.raises((MemoryError, TypeError)):
            run("pixmo-points", source, tmp_path / "broken")
    done.clear()
    monkeypatch.setattr(prepare, "convert", lambda row, *rest: done.append(row) or real(row, *rest))
    run("pixmo-points", source, tmp_path / "broken")
    assert everything(tmp_path / "broken") == everything(tmp_path / "whole")
    assert stop == "write" or stop < 12 or len(done) < 40 - stop + 4      # and what was done was not done again
    assert stop != "write" or not done


def test_a_killed_process_leaves_nothing_that_the_next_one_stumbles_over(tmp_path):
    source = tmp_path / "big.jsonl"
    with open(source, "w") as lines:
        for i in range(12_000):
            lines.write(json.dumps({"image_url": f"https://example.org/{i * 7919 % 3001}", "question": f"q{i}?",
                                    "answer": "a" * (i % 50)}) + "\n")
    command = [sys.executable, "-m", "tools.prepare", "pixmo-ask-model-anything", str(source), str(tmp_path / "killed")]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        log = tmp_path / "killed/prepare.sqlite-wal"
        while child.poll() is None and not (log.exists() and log.stat().st_size > 1 << 19):
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.wait()
    assert child.returncode == -signal.SIGKILL and not (tmp_path / "killed/records.jsonl").exists()
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    _, counts = run("pixmo-ask-model-anything", source, tmp_path / "whole")
    assert counts["skipped"] == {"empty answer": 240} and counts["records"] > 2500
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")


def test_another_command_does_not_go_on_from_what_one_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "BATCH", 4)
    source = many(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(prepare, "shares", None)
        with pytest.raises(TypeError):
            run("pixmo-points", source, tmp_path / "out")
    records, counts = run("pixmo-points-high-frequency", source[:1], tmp_path / "out")
    assert counts["annotations"] == 16 and all(r["id"].startswith("pixmo-points-high-frequency-") for r in records)
    assert "begun anew" in capsys.readouterr().err


MISTAKES = [
    (["pixmo-point", "rows.jsonl"], "did you mean 'pixmo-points'"),
    (["zzz", "rows.jsonl"], "no set is called 'zzz'"),
    (["tulu", "nowhere"], "nowhere: no such file"),
    (["tulu", "empty"], "no .parquet, .json or .jsonl file"),
    (["pixmo-cap", "rows.jsonl"], "has no column image_url, caption: expected image_url, caption; found instruction, output"),
    (["pixmo-cap", "torn.parquet"], "not a parquet file"),
    (["pixmo-cap", "torn.json"], "not JSON"),
    (["tulu", "object.json"], "not an array"),
    (["tulu", "split"], "holds the splits train, validation"),
    (["tulu", "split", "--split", "dev"], "of the split 'dev'"),
    (["cosyn-400k", "rows.jsonl"], "say --type"),
    (["tulu", "rows.jsonl", "--media", "nowhere"], "nowhere: no such"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_told_in_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    if "torn.parquet" in arguments:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"instruction": "hi", "output": "yo"}\n')
    Path("torn.parquet").write_bytes(b"PAR1 and no more")
    Path("torn.json").write_text('[{"a": 1}')
    Path("object.json").write_text('{"a": 1}')
    for folder in ("empty", "split"):
        Path(folder).mkdir()
    for split in ("train", "validation"):
        Path(f"split/{split}-00000-of-00001.jsonl").write_text("{}")
    with pytest.raises(SystemExit) as stopped:
        prepare.main([*arguments[:2], "out", *arguments[2:]])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and words in said.err and said.err.count("\n") == 1 and not said.out


def test_without_pyarrow_json_is_read_and_parquet_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = tmp_path / "t.jsonl"
    source.write_text(json.dumps({"messages": said("a", "b")}))
    [record], _ = run("tulu", source, tmp_path / "out")
    assert record["annotations"][0]["turns"] == [{"question": "a", "answer": "b"}]
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(SystemExit) as stopped:
        prepare.main(["tulu", str(tmp_path / "t.parquet"), str(tmp_path / "out")])
    assert stopped.value.code == 2 and "pip install pyarrow" in capsys.readouterr().err


def test_every_source_that_is_read_has_a_row_in_data_md():
    table = (ROOT / "docs/datasets.md").read_text()
    assert not [name for name in prepare.SETS if f"`{name}`" not in table]
