"""Runs a model on images, a video or a text, and prints its answer.

    python -m tools.generate --model toy --prompt "pointing: any shape" --draw points.png
"""

import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import data
from evaluation.generate import evaluation_config, generate
from evaluation.pictures import MARK, draw_answer
from records import media
from records.errors import UserError, warn
from records.media import MAX_FRAMES
from records.subtitles import read_subtitles
from records.visual import VideoClip, clip_times, resized, tracking_times
from text.points import parse_points
from text.prompts import SYSTEM
from text.styles import TASK_OF_STYLE, TRACK_TASKS
from text.visual_tokens import shift_subtitles
from tools import command, model_flags
from toy import world

TOY_VIDEO = ""  # --video without a file
# characters other than tab and newline that a terminal would obey
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")
STYLED = re.compile(r"\w+( \d+)?:\s?")  # every prompt of stage 1 and of the toy starts like this


def parse(argv):
    parser = command.make_parser("generate", __doc__)
    add = parser.add_argument
    model_flags.add_model(parser, "the sampling, and of the toy's image or video")
    source = parser.add_mutually_exclusive_group()
    extend = partial(source.add_argument, action="extend", metavar="F")
    extend("--image", nargs=1, dest="images", help=(
        "an image file (default without --video: for the toy a toy image, else text only)"))
    extend("--images", nargs="+", help="several image files, at most 20")
    source.add_argument("--video", nargs="?", const=TOY_VIDEO, metavar="F", help=(
        "a video file; with --model toy, --video without a file uses a toy video"))
    talk = parser.add_mutually_exclusive_group(required=True)
    talk.add_argument("--prompt", help=(
        'a prompt with the wording of the training data; for the toy "long_caption:", '
        '"pointing: red circle" or "count: any shape"'))
    talk.add_argument("--chat", action="store_true", help=(
        "read one question per line from standard input; an empty line ends the conversation"))
    add("--system", metavar="TEXT", help="a system text, which is put before the first question")
    add("--frames", type=command.whole_number(1, MAX_FRAMES), metavar="N", help=(
        "use at most N frames of the video (default 384), and at most two per second"))
    add("--start", type=float, default=0.0, help="start of the clip in seconds (default 0)")
    add("--end", type=float, default=math.inf, help=(
        "end of the clip in seconds (default: the end of the video)"))
    add("--subtitles", metavar="F", help=(
        "an .srt or .vtt file; its times count from the start of the video, not of the clip"))
    add("--max-new", type=command.positive, default=256,
        help="maximum number of tokens in the answer (default 256)")
    add("--draw", metavar="FILE", help=(
        "draw the predicted points on the images or frames, and write them to FILE "
        "(.png, .jpg, .jpeg, .webp; for a video also .gif)"))
    add("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    args.sampling = model_flags.sampling(args)
    is_file = args.images or args.video not in (None, TOY_VIDEO)
    args.is_toy_scene = args.model == "toy" and not is_file
    if args.video == TOY_VIDEO and not args.is_toy_scene:
        parser.error("--video without a file needs --model toy")
    for flag in ("frames", "subtitles", "start", "end"):
        if getattr(args, flag) != parser.get_default(flag) and not args.video:
            parser.error(f"--{flag} needs --video F")
    if args.chat and (args.draw or args.json):
        parser.error("--draw and --json need --prompt; they cannot be used with --chat")
    if args.draw and not (args.images or args.video or args.is_toy_scene):
        parser.error("--draw needs --image, --images or --video")
    if args.draw:
        check_drawing(parser, Path(args.draw), args)
    return args


def check_drawing(parser, path, args):
    """UserError if the file of --draw cannot be written, or if it is an input of the model."""
    suffixes = [".png", ".jpg", ".jpeg", ".webp"]
    if args.video is not None:
        suffixes.append(".gif")
    if path.suffix.lower() not in suffixes or not path.parent.is_dir():
        parser.error(f"--draw {path}: give a {', '.join(suffixes)} file in an existing folder")
    command.refuse_input(parser, path, filter(None, [*(args.images or ()), args.video]))
    if path.exists() and MARK not in path.read_bytes():
        parser.error(f"--draw {path}: this command has not made this file; give another name")


class Shown(NamedTuple):
    """The visual input of a prompt."""
    images: list  # (H,W,3) uint8
    clip: VideoClip | None
    sizes: list  # (width, height) of every image, or of the video
    frames_at: object = None  # of a video: a function, times in seconds of the clip -> frames


def open_images(files, config):
    if len(files) > config.max_images:
        raise UserError(f"--images: give at most {config.max_images} images, not {len(files)}")
    images = [media.read_image(file) for file in files]
    return Shown(images, None, [image.shape[1::-1] for image in images])


def open_video(path, prompt, config, start=0.0, end=math.inf, subtitles=None):
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

    small = resized(frames_at(times), config.vision.crop)
    clip = VideoClip(times, small, shift_subtitles(subtitles, start))
    return Shown([], clip, [(video.width, video.height)], frames_at)


def open_toy_scene(seed, is_video):
    """-> Shown, record: a held-out image or video of the toy world."""
    if not is_video:
        (record,) = world.held_out_images("test", seed, 1, (2, 3, 4))
        source = record["source"]
        return Shown(source.images(record), None, source.image_sizes(record)), record
    source = world.SOURCES["tracks"]("test", seed)
    record = source[0]
    frames_at = partial(source.frames, record)
    times = source.step_times(record)
    clip = VideoClip(times, list(frames_at(times)))
    return Shown([], clip, [source.video_size(record)[:2]], frames_at), record


def asks_for_tracks(prompt):
    style = (prompt or "").partition(":")[0]
    return TASK_OF_STYLE.get(style) in TRACK_TASKS


def make_printer(tokenizer):
    """-> a function that gets all ids of the answer so far and prints the new part of the text.
    It prints a character when all of its bytes are generated. Control characters become escapes."""
    printed = ""

    def print_more(ids):
        nonlocal printed
        text = tokenizer.decode(ids).rstrip("\ufffd")
        part = CONTROL.sub(lambda found: ascii(found[0])[1:-1], text[len(printed) :])
        print(part, end="", flush=True)
        printed = text

    return print_more


def style_hint(prompt, config):
    """-> a sentence if the prompt has no style, but the model was trained only on prompts with a
    style; otherwise ""."""
    if not config.prefix_all or STYLED.match(prompt):
        return ""
    return ("this model was trained on prompts that begin with a style, such as long_caption:, "
            "pointing:, count: or user_qa: (docs/own_data.md)")


def answer_ids(loaded, shown, turns, args, printer=None):
    """-> the ids of an answer. loaded: (model, tokenizer, data config). turns:
    [(question, answer), ..], where the last answer is None."""
    model, tokenizer, config = loaded
    if len(turns) == 1 and (hint := style_hint(turns[0][0], config)):
        warn(hint)
    if args.system:  # as in training, the system text follows the style of stage 1
        question, answer = turns[0]
        style = STYLED.match(question) if config.prefix_all else None
        start = style[0] if style else ""
        turns = [(start + SYSTEM.format(args.system) + question[len(start):], answer), *turns[1:]]
    prompt = data.encode_prompt(shown.images, turns, tokenizer, config, shown.clip)
    (ids,) = generate(model, [prompt], tokenizer.stops, args.max_new, args.sampling, printer)
    return ids


def warn_if_cut(ids, max_new):
    if len(ids) >= max_new:
        warn(f"the answer is cut at --max-new {max_new} tokens; a larger number allows more")


def chat(loaded, shown, args):
    """Reads questions from standard input, one per line, and prints the answers."""
    _, tokenizer, _ = loaded
    turns = []
    print("> ", end="", flush=True, file=sys.stderr)
    while question := sys.stdin.readline().strip():
        printer = make_printer(tokenizer)
        ids = answer_ids(loaded, shown, [*turns, (question, None)], args, printer)
        print(flush=True)
        warn_if_cut(ids, args.max_new)
        turns.append((question, tokenizer.decode(ids)))
        print("> ", end="", flush=True, file=sys.stderr)


def points_in_pixels(answer, sizes, is_cut=False):
    """The points of an answer -> [Place, ..] in pixels of their image. sizes: (width, height) of
    every image, or of the video. Points on an image that does not exist are skipped."""
    points = []
    for place in parse_points(answer, 1, 1, is_cut):
        image = 1 if len(sizes) == 1 else place.frame
        if image in range(1, len(sizes) + 1):
            w, h = sizes[int(image) - 1]
            points.append(place._replace(x=place.x * w, y=place.y * h))
    return points


@command.report_errors
def main(argv=None):
    args = parse(argv)
    model, tokenizer, config = model_flags.open_model(args)
    config = evaluation_config(config, args.frames)
    loaded = model, tokenizer, config
    if args.is_toy_scene:
        shown, _ = open_toy_scene(args.seed, args.video is not None)
    elif args.video:
        shown = open_video(args.video, args.prompt, config, args.start, args.end, args.subtitles)
    else:
        shown = open_images(args.images or [], config)
    if args.chat:
        chat(loaded, shown, args)
        return
    printer = None if args.json else make_printer(tokenizer)
    ids = answer_ids(loaded, shown, [(args.prompt, None)], args, printer)
    answer = tokenizer.decode(ids)
    is_cut = len(ids) >= args.max_new
    points = points_in_pixels(answer, shown.sizes, is_cut)
    if args.draw:
        times = shown.clip.times if shown.clip else []
        with command.draft(args.draw) as path:
            draw_answer(str(path), points, shown.images, times, shown.frames_at,
                        asks_for_tracks(args.prompt))
    if args.json:
        drawn = {"drawn": args.draw} if args.draw else {}
        command.print_line({"prompt": args.prompt, "text": answer, "tokens": len(ids),
                            "cut": is_cut, "points": points, **drawn})
        return
    print(flush=True)
    warn_if_cut(ids, args.max_new)
    if args.draw:
        note = "" if points else " (no point could be read in the answer)"
        print(f"-> {args.draw}{note}")


if __name__ == "__main__":
    main()
