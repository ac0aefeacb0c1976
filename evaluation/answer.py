"""Loads a model and gets its answers about images, a video or a text. tools.generate and tools.play
call these functions.

    from evaluation.answer import load
    model = load("toy")
    answer = model.answer("pointing: any shape", image="scene.png")
"""

import math
import os
import re
from typing import NamedTuple

import torch

import data
from evaluation.generate import GREEDY, evaluation_config, generate
from evaluation.prompts import VideoClip, encode_prompt, resized
from records import media
from records.errors import UserError, warn
from records.parse import meant_style
from records.subtitles import read_subtitles
from records.visual import clip_times, tracking_times
from text.points import parse_points
from text.prompts import SYSTEM
from text.styles import TASK_OF_STYLE, TRACK_TASKS
from text.visual_tokens import shift_subtitles
from weights.files import open_model_folder

STYLED = re.compile(r"\w+( \d+)?:\s?")  # every prompt of stage 1 and of the toy starts like this


class Answer(NamedTuple):
    text: str
    points: list  # [text.points.Place, ..]: (image number or time, id, x, y) in pixels
    tokens: int  # length of the answer
    cut: bool  # did the answer end at max_new tokens?


class Shown(NamedTuple):
    """The visual input of a prompt."""
    images: list  # (H,W,3) uint8
    clip: VideoClip | None
    sizes: list  # (width, height) of every image, or of the video
    frames_at: object = None  # of a video: a function, times in seconds of the clip -> frames


class Loaded(NamedTuple):
    """A model with all that it needs to answer."""
    model: object
    tokenizer: object
    config: data.DataConfig  # of inference

    def answer(self, prompt, image=None, video=None, max_new=256, **clip):
        """-> the Answer about an image, a list of images, a video, or the text alone. image, video:
        paths. clip: start, end and subtitles of open_video. Raises UserError, Unreadable, OSError
        or ValueError with the sentence that a command would print."""
        if video is not None:
            shown = open_video(video, prompt, self.config, self.model.config.vision, **clip)
        else:
            paths = image
            if image is None:
                paths = []
            elif not isinstance(image, list | tuple):
                paths = [image]
            if not all(isinstance(path, str | os.PathLike) for path in paths):
                raise UserError("image: give the path of a file, or a list of paths")
            shown = open_images(paths, self.config)
        if hint := style_hint(prompt, self.config):
            warn(hint)
        return self.reply(shown, [(prompt, None)], max_new)

    def reply(self, shown, turns, max_new=256, sampling=GREEDY, system=None, on_token=None):
        """-> the Answer to the last question. turns: [(question, answer), ..], where the last
        answer is None. system: a text before the first question. on_token: as in generate."""
        if system:  # as in training, the system text follows the style of stage 1
            question, answer = turns[0]
            style = STYLED.match(question) if self.config.prefix_all else None
            start = style[0] if style else ""
            turns = [(start + SYSTEM.format(system) + question[len(start):], answer), *turns[1:]]
        prompt = encode_prompt(shown.images, turns, self.tokenizer, self.config,
                               self.model.config.vision, shown.clip)
        (ids,) = generate(self.model, [prompt], self.tokenizer.stops, max_new, sampling, on_token)
        text = self.tokenizer.decode(ids)
        is_cut = len(ids) >= max_new
        return Answer(text, points_in_pixels(text, shown.sizes), len(ids), is_cut)


def load(name, device="cpu", dtype=torch.float32):
    """-> Loaded. name: "toy", a run directory or a released folder. Raises OSError or ValueError
    with one sentence."""
    model, tokenizer, config = open_model_folder(name, device, dtype)
    return Loaded(model, tokenizer, evaluation_config(config))


def open_images(files, config):
    if len(files) > config.max_images:
        raise UserError(f"--images: give at most {config.max_images} images, not {len(files)}")
    images = [media.read_image(file) for file in files]
    return Shown(images, None, [image.shape[1::-1] for image in images])


def open_video(path, prompt, config, vision_config, start=0.0, end=math.inf, subtitles=None):
    """-> Shown with decoded frames. For a tracking prompt, they are the frames that training uses
    for a track with 2 points per second."""
    subtitles = read_subtitles(subtitles) if subtitles else None
    video = media.probe(path)
    times, end = clip_times(video.duration, config, start, end)
    if asks_for_tracks(prompt):
        frame_rate = round(len(video.times) / video.duration) if video.duration else 0
        times = tracking_times(end - start, frame_rate, 2, config)

    def frames_at(times):
        return media.frames(video, [start + t for t in times])

    small = resized(frames_at(times), vision_config.crop)
    clip = VideoClip(times, small, shift_subtitles(subtitles, start))
    return Shown([], clip, [(video.width, video.height)], frames_at)


def asks_for_tracks(prompt):
    style = (prompt or "").partition(":")[0]
    return TASK_OF_STYLE.get(style) in TRACK_TASKS


def style_hint(prompt, config):
    """-> a sentence if the prompt has no style, or a misspelled one, but the model was trained only
    on prompts with a style; otherwise ""."""
    if not config.prefix_all:
        return ""
    if STYLED.match(prompt):
        style = re.match(r"\w+", prompt)[0]
        meant = meant_style(style)
        return f"unknown style '{style}' - did you mean '{meant}'?" if meant else ""
    return ("this model was trained on prompts that begin with a style, such as long_caption:, "
            "pointing:, count: or user_qa: (docs/own_data.md)")


def points_in_pixels(answer, sizes):
    """The points of an answer -> [Place, ..] in pixels of their image. sizes: (width, height) of
    every image, or of the video. Points on an image that does not exist are skipped."""
    points = []
    for place in parse_points(answer, 1, 1, open_end=True):
        image = 1 if len(sizes) == 1 else place.frame
        if image in range(1, len(sizes) + 1):
            w, h = sizes[int(image) - 1]
            points.append(place._replace(x=place.x * w, y=place.y * h))
    return points
