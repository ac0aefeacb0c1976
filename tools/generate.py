"""Runs a model on images, a video or a text, and prints its answer.

    python -m tools.generate --model toy --prompt "pointing: any shape" --draw points.png
"""

import json
import math
import os
import re
import sys
from functools import partial
from operator import itemgetter
from pathlib import Path

from tqdm import tqdm

from evaluation.answer import Shown, asks_for_tracks, open_images, open_video, style_hint
from evaluation.generate import evaluation_config
from evaluation.pictures import MARK, draw_answer
from evaluation.prompts import VideoClip
from records.errors import Unreadable, UserError, draft, lock, plural, visible, warn
from records.media import MAX_FRAMES
from records.reader import FORM_ERRORS
from tools import command, model_flags
from toy import world

TOY_VIDEO = ""  # --video without a file
# characters other than tab and newline that a terminal would obey
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")
LINE_START = b'{"file": '  # of each line of --out
of_line = itemgetter("file", "model", "prompt")


def parse(argv):
    parser = command.make_parser("generate", __doc__)
    add = parser.add_argument
    model_flags.add_model(parser, "the sampling, and of the toy's image or video")
    source = parser.add_mutually_exclusive_group()
    extend = partial(source.add_argument, action="extend", metavar="F")
    extend("--image", nargs=1, dest="images", help=(
        "an image file, or a folder of them, which needs --out (default without --video: for the "
        "toy a toy image, else text only)"))
    extend("--images", nargs="+", help="several image files, at most 20")
    source.add_argument("--video", nargs="?", const=TOY_VIDEO, metavar="F", help=(
        "a video file, or a folder of them, which needs --out; with --model toy, --video without "
        "a file uses a toy video"))
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
    add("--out", metavar="FILE.jsonl", help=(
        "for a folder: add one JSON line per file to FILE.jsonl; files with a line are skipped"))
    args = parser.parse_args(argv)
    args.sampling = model_flags.sampling(args)
    check_flags(parser, args)
    return args


def check_flags(parser, args):
    """Adds what follows from the flags. UserError if they contradict each other."""
    is_file = args.images or args.video not in (None, TOY_VIDEO)
    args.folder = find_folder(parser, args)
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


def find_folder(parser, args):
    """-> the folder of --image or --video, or None. UserError if other flags do not fit."""
    given = [*(args.images or ()), args.video or ""]
    folder = next((Path(path) for path in given if os.path.isdir(path)), None)
    of_one_file = args.draw or args.json or args.chat or args.subtitles or len(given) > 2
    if folder and (of_one_file or not args.out):
        parser.error(f"{folder} is a folder: give only this one, --prompt, and --out FILE.jsonl, "
                     "without --draw, --json and --subtitles")
    if args.out and not folder:
        parser.error("--out needs a folder in --image or --video; --json prints one answer")
    return folder


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


def warn_if_cut(answer):
    if answer.cut:
        warn(f"the answer is cut at --max-new {answer.tokens} tokens; a larger number allows more")


def chat(loaded, shown, options):
    """Reads questions from standard input, one per line, and prints the answers."""
    turns = []
    print("> ", end="", flush=True, file=sys.stderr)
    while question := sys.stdin.readline().strip():
        if not turns:
            warn(style_hint(question, loaded.config))
        answer = loaded.reply(shown, [*turns, (question, None)], **options,
                              on_token=make_printer(loaded.tokenizer))
        print(flush=True)
        warn_if_cut(answer)
        turns.append((question, answer.text))
        print("> ", end="", flush=True, file=sys.stderr)


def answer_folder(loaded, open_one, args, options):
    """Adds a line to the file --out for each file of a folder. A file that has a line there already
    is skipped, and so is one that cannot be read. open_one: path -> Shown."""
    out = Path(args.out)
    with lock(out.parent, f"--out {out.name} in", out.name) as file:
        written = out.read_bytes()
        end = written.rfind(b"\n") + 1
        rest = written[end:]  # a kill may have cut off the last line
        is_cut = LINE_START.startswith(rest[: len(LINE_START)]) and rest[-1:] != b"}"
        try:
            done = {of_line(json.loads(line)) for line in written[:end].splitlines()}
            if not is_cut:
                of_line(json.loads(rest))
        except FORM_ERRORS:
            raise UserError(f"--out {out}: this command has not made this file; give another name"
                            ) from None
        os.truncate(out, end)
        unreadable = []
        paths = sorted(p for p in args.folder.iterdir() if p.is_file() and p.name[0] != "."
                       and not p.samefile(out))
        for path in tqdm(paths, desc=visible(args.folder.name), unit="file"):
            about = {"file": str(path), "model": args.model, "prompt": args.prompt}
            if tuple(about.values()) in done:
                continue
            try:
                answer = loaded.reply(open_one(path), [(args.prompt, None)], **options)
            except KeyboardInterrupt:
                warn(f"interrupted; the same command continues {out}")
                raise
            except Unreadable as error:
                warn(f"{error}; skipped")
                unreadable.append(path)
                continue
            file.write(json.dumps(about | answer._asdict()).encode() + b"\n")
            file.flush()
    n_lines = out.read_bytes().count(b"\n")
    print(f"{out}: {plural(n_lines, 'answer')}; "
          f"{plural(len(unreadable), 'file')} could not be read")


@command.report_errors
def main(argv=None):
    args = parse(argv)
    loaded = model_flags.open_model(args)
    config = evaluation_config(loaded.config, args.frames)
    loaded = loaded._replace(config=config)
    options = {"max_new": args.max_new, "sampling": args.sampling, "system": args.system}

    def open_one(path):
        if args.video:
            return open_video(path, args.prompt, config, loaded.model.config.vision,
                              args.start, args.end, args.subtitles)
        return open_images([path], config)

    if args.prompt:
        warn(style_hint(args.prompt, config))
    if args.folder:
        answer_folder(loaded, open_one, args, options)
        return
    if args.is_toy_scene:
        shown, _ = open_toy_scene(args.seed, args.video is not None)
    elif args.video:
        shown = open_one(args.video)
    else:
        shown = open_images(args.images or [], config)
    if args.chat:
        chat(loaded, shown, options)
        return
    printer = None if args.json else make_printer(loaded.tokenizer)
    answer = loaded.reply(shown, [(args.prompt, None)], **options, on_token=printer)
    if args.draw:
        times = shown.clip.times if shown.clip else []
        with draft(args.draw) as path:
            draw_answer(str(path), answer.points, shown.images, times, shown.frames_at,
                        asks_for_tracks(args.prompt))
    if args.json:
        drawn = {"drawn": args.draw} if args.draw else {}
        command.print_line({"prompt": args.prompt} | answer._asdict() | drawn)
        return
    print(flush=True)
    warn_if_cut(answer)
    if args.draw:
        note = "" if answer.points else " (no point could be read in the answer)"
        print(f"-> {args.draw}{note}")


if __name__ == "__main__":
    main()
