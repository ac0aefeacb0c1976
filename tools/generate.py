"""Ask a model about images or a video, once or in a conversation (evaluation/generate.py).

    python -m tools.generate --model runs/stage1-tiny --image cat.png --draw out.png \\
        --prompt "pointing: red circle"
    python -m tools.generate --model Molmo2-4B --images a.jpg b.jpg --prompt "What has changed?" \\
        --dtype bfloat16
    python -m tools.generate --model Molmo2-4B --video match.mp4 --subtitles match.srt \\
        --prompt "Point to every goal." --draw goals.png
    python -m tools.generate --model Molmo2-4B --image cat.png --chat
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import torch

import data
import vision
from evaluation.generate import KVCache, evaluation_config, generate
from evaluation.pictures import draw_answer
from evaluation.scoring import parse_places
from records import media
from records.errors import warn
from records.media import Unreadable
from records.visual import clip_times, open_clip
from text.styles import TASK_OF_STYLE, TRACK_TASKS
from weights.open_model import open_model_folder

# -------------------------------------------------------------------------------------------------
# command line


def argument_parser():
    parser = argparse.ArgumentParser(description="Ask a model about images or a video.")
    add = parser.add_argument
    add("--model", required=True, help="run directory, or a folder with a released checkpoint")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--image", help=(
        "an image; without image and video the prompt is text alone"))
    source.add_argument("--images", nargs="+", metavar="F", help="several images, at most 20")
    source.add_argument("--video", help="a video file")
    talk = parser.add_mutually_exclusive_group(required=True)
    talk.add_argument("--prompt", help=(
        'worded as in training; for the toy "long_caption:", "pointing: red circle", '
        '"count: any shape"'))
    talk.add_argument("--chat", action="store_true", help=(
        "a conversation: a question per line, an empty line ends it"))
    add("--frames", type=int, metavar="N", help=(
        "frames of the video at most (default 384), at most two per second"))
    add("--track", action="store_true", help=(
        "take the frames of a tracking question, on a grid without the last instant; the default "
        "for a prompt that begins with a tracking style, like video_point_track_per_frame:"))
    add("--start", type=float, default=0.0, help="second of the video to begin at (default 0)")
    add("--end", type=float, default=math.inf, help=(
        "second of the video to end at (default: its end)"))
    add("--subtitles", metavar="F", help=".srt, .vtt or .json, in seconds of the video")
    add("--max-crops", type=int, metavar="N", help=(
        "crops of an image at most (default 24; for the toy as in training)"))
    add("--max-new", type=int, default=256, help="tokens of an answer at most (default 256)")
    add("--temperature", type=float, default=0.0, help="0: greedy (default)")
    add("--seed", type=int, default=0, help="of the sampling (default 0)")
    add("--draw", metavar="PNG", help="write the images, or frames, with the predicted points")
    add("--json", action="store_true", help="one JSON object instead of text")
    add("--device", default="cpu", help="default cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the weights (default float32)")
    return parser


def parse(argv):
    """ValueError in one sentence for values that cannot be used."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    limits = {"max_new": (1, 65536), "temperature": (0, 100), "frames": (1, media.MAX_FRAMES),
              "max_crops": (1, 1000), "seed": (0, 2**63 - 1)}
    for name, (least, most) in limits.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be from {least} to {most}, not {value}")
    if 0 < args.temperature < 0.001:
        raise ValueError(f"--temperature {args.temperature}: below 0.001 it is greedy; use 0")
    if args.prompt:
        check_utf8(args.prompt, "--prompt")
    for flag in ("frames", "track", "subtitles", "start", "end"):
        if getattr(args, flag) != parser.get_default(flag) and not args.video:
            raise ValueError(f"--{flag} needs --video")
    if args.draw and not (args.image or args.images or args.video):
        raise ValueError("--draw needs --image, --images or --video")
    if args.chat and (args.draw or args.json):
        raise ValueError("--draw and --json go with --prompt")
    if args.draw:
        path = Path(args.draw)
        if path.suffix.lower() not in (".png", ".jpg") or not path.parent.is_dir() or path.is_dir():
            raise ValueError(f"--draw {args.draw}: name a .png or .jpg in a folder that exists")
    return args


def check_utf8(text, where):
    """The text; ValueError if UTF-8 cannot hold it: no tokenizer takes half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: not UTF-8") from None
    return text


# -------------------------------------------------------------------------------------------------
# videos


def read_subtitles(path):
    """An .srt or .vtt file, or .json with [{"start": s, "end": s, "text": ..}, ..]
    -> [(start, end, text), ..] in seconds. ValueError in one sentence otherwise."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"--subtitles {path}: not UTF-8 at byte {e.start}") from None
    if Path(path).suffix.lower() == ".json":
        try:
            entries = []
            for entry in json.loads(content):
                text = check_utf8(str(entry["text"]), path)
                entries.append((float(entry["start"]), float(entry["end"]), text))
            return entries
        except (ValueError, KeyError, TypeError) as e:
            wanted = "a list of objects with start, end and text"
            raise ValueError(f"--subtitles {path}: not {wanted}: {e!r}") from None
    clock = r"(?:(\d+):)?(\d+):(\d+)[.,](\d{3})"
    entries = []
    for block in re.split(r"\n\s*\n", content.replace("\r\n", "\n")):
        timing = re.search(rf"{clock} *--> *{clock}[^\n]*\n(.*)", block, re.S)
        if timing:
            *clocks, text = timing.groups()
            text = " ".join(re.sub(r"<[^>]*>", "", text).split())
            entries.append((to_seconds(*clocks[:4]), to_seconds(*clocks[4:]), text))
    if not entries:
        raise ValueError(f"--subtitles {path}: no subtitle in it (.srt, .vtt or .json)")
    return entries


def to_seconds(hours, minutes, seconds, milliseconds):
    """Digits -> seconds; hours may be None."""
    whole = int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds)
    return whole + int(milliseconds) / 1000


def is_tracking(prompt):
    """Does the prompt begin with a tracking style?"""
    return TASK_OF_STYLE.get(prompt.partition(":")[0]) in TRACK_TASKS


def tracking_times(video, config, start, end):
    """Seconds of the clip to look at for a tracking question, as records.visual.read_headers
    chooses them for tracks with 2 points per second: a grid of the highest multiple of this rate
    that divides the video's, if it reaches the end (docs/molmo2.md 3.1)."""
    _, end = clip_times(video.duration, config, start, end)
    frame_rate = round(len(video.times) / video.duration) if video.duration else 0
    rates = [rate for rate in range(2, 11, 2) if frame_rate % rate == 0] or [2]
    return vision.track_times(end - start, config.max_frames, rates) or [0.0]


def open_video(args, config):
    """-> VideoClip with its frames decoded, and the video (media.Video)."""
    subtitles = read_subtitles(args.subtitles) if args.subtitles else None
    clip, video = open_clip(args.video, config, subtitles, args.start, args.end)
    if args.track or is_tracking(args.prompt or ""):
        clip.times = tracking_times(video, config, args.start, args.end)
        clip.frames = media.frames(video, [args.start + t for t in clip.times])
    # as small as the ViT takes them: 384 frames of 11 MB would be 4 GB
    crop = config.vision.crop
    clip.frames = [vision.resize(frame, crop, crop) for frame in clip.frames]
    return clip, video


# -------------------------------------------------------------------------------------------------
# answers


class StreamPrinter:
    """Prints an answer as it grows. A character waits until all of its bytes are there."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.printed = ""

    def __call__(self, ids):
        text = self.tokenizer.decode(ids).rstrip("\ufffd")
        if text.startswith(self.printed):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text

    def finish(self, answer):
        """Prints the rest of the answer, or all of it where its beginning was printed
        otherwise."""
        if answer.startswith(self.printed):
            print(answer[len(self.printed) :], flush=True)
        else:
            print(f"\n{answer}", flush=True)
        self.printed = ""


def chat(model, tokenizer, config, images, clip, args):
    """A question per line of standard input, until an empty one; the KV cache keeps earlier
    turns."""
    cache = KVCache(model, 1, 0)
    printer = StreamPrinter(tokenizer)
    turns = []
    while True:
        print("> ", end="", flush=True, file=sys.stderr)
        question = check_utf8(sys.stdin.readline().strip(), "standard input")
        if not question:
            return
        asked = [*turns, (question, None)]
        prompt = data.encode_prompt(images, asked, tokenizer, config, clip)
        (ids,) = generate(
            model, [prompt], tokenizer.stops, args.max_new, args.temperature, args.seed, printer,
            cache,
        )
        answer = tokenizer.decode(ids)
        printer.finish(answer)
        turns.append((question, answer))


def points_in_pixels(answer, sizes):
    """The points of an answer -> [Place, ..] in pixels of the image that each is on. sizes:
    (width, height) of every image, or of the video; points on other images are left out."""
    points = []
    for place in parse_places(answer):
        if len(sizes) == 1:
            w, h = sizes[0]
        elif 1 <= place.frame <= len(sizes):
            w, h = sizes[int(place.frame) - 1]
        else:
            continue
        points.append(place._replace(x=place.x * w, y=place.y * h))
    return points


def run(args):
    dtype = getattr(torch, args.dtype)
    model, tokenizer, config = open_model_folder(args.model, args.device, dtype)
    config = evaluation_config(config, args.max_crops, args.frames)
    files = [args.image] if args.image else args.images or []
    if len(files) > config.max_images:
        raise ValueError(f"--images: {len(files)} images; at most {config.max_images} are possible")
    images = [media.read_image(file) for file in files]
    clip, video = open_video(args, config) if args.video else (None, None)
    if args.chat:
        chat(model, tokenizer, config, images, clip, args)
        return
    prompt = data.encode_prompt(images, [(args.prompt, None)], tokenizer, config, clip)
    printer = None if args.json else StreamPrinter(tokenizer)
    (ids,) = generate(
        model, [prompt], tokenizer.stops, args.max_new, args.temperature, args.seed, printer
    )
    answer = tokenizer.decode(ids)
    if printer:
        printer.finish(answer)
    sizes = [image.shape[1::-1] for image in images]
    if video:
        sizes = [(video.width, video.height)]
    points = points_in_pixels(answer, sizes)
    if args.draw:
        if not points:
            warn("tools.generate: the answer has no points to draw")
        draw_answer(points, images, video, args.start).save(args.draw)
    if args.json:
        result = {"prompt": args.prompt, "text": answer, "tokens": len(ids), "points": points}
        print(json.dumps(result))


def main(argv=None):
    try:
        run(parse(argv))
    except (OSError, ValueError, Unreadable) as e:
        warn(f"tools.generate: {e}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
