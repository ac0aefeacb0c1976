"""Prompts for generation, encoded as in training.

in    images (H,W,3) uint8 or a VideoClip, and the turns of a chat
out   data.Example, whose last turn is a question without an answer
"""

from contextlib import closing
from dataclasses import dataclass

import data
import vision
from records import visual
from records.errors import encodable
from text.tokenizer import Segment, chat


@dataclass
class VideoClip:
    times: list  # of the frames, in seconds from the start of the clip
    frames: object  # yields (H,W,3) uint8 for each time
    subtitles: object = None  # as in records.visual.MediaInfo


def resized(frames, size):
    """Frames (H,W,3), one at a time -> [(size,size,3), ..]. 384 frames of 11 MB would need 4 GB."""
    with closing(frames):  # stops ffmpeg after an error, even if the traceback is kept
        return [vision.resize(frame, size, size) for frame in frames]


@encodable()  # Unreadable if the tokenizer cannot encode a text (records/errors.py)
def encode_prompt(images, turns, tokenizer, config, vision_config, clip=None):
    """images: [(H,W,3) uint8, ..], may be empty; clip: a VideoClip instead of images; turns:
    [(question, answer), .., (question, None)]. config: a data.DataConfig -> data.Example."""
    assert not (images and clip), "a prompt contains images or a video, not both"
    info = visual.MediaInfo([(image.shape[1], image.shape[0]) for image in images])
    if clip:
        info = visual.MediaInfo([], clip.times, clip.subtitles)
    prefix, is_visual = data.encode_prefix(info, tokenizer, config, vision_config)
    # layout drops the last id of a branch from the inputs: the 0 keeps the whole prompt
    segments = [*chat(turns, tokenizer), Segment([0], 0)]
    example = data.layout(prefix, is_visual, [data.Branch(segments)], config)
    if clip:
        example.images = visual.frame_crops(clip.frames, len(clip.times), vision_config)
    elif images:
        example.images = visual.image_crops(images, config.max_crops, vision_config)
    if clip or images:
        data.place_visual_tokens(example, info, tokenizer, config.max_crops, vision_config)
    return example
