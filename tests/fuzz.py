"""Rubbish in, a sentence out: mutated records, images and videos through check, size and encode;
odd flags, answers of a model, turned images.

    python -m tests.fuzz --records 10000 --images 2000 --videos 300 --seed 0
    python -m tests.fuzz --flags 3000 --answers 10000 --orientations 1000
    python -m tests.fuzz --seed 0 --case image 17          one case again, with its traceback

A case is a function of (seed, kind, number): see tests/mutations.py. Each must end as a sound
example or with a declared error, Unreadable or DataError, whose message is one line, within
SECONDS; what check refuses, opening refuses. The last line is JSON: how many cases ended with which
code, the slowest, the most memory.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tqdm import tqdm

import data
import model
from records.reader import DataError, Records, Unreadable
from tests import fuzz_inputs, mutations
from text.tokenizer import ByteTokenizer
from tools import check

TESTS = Path(__file__).parent
SECONDS = 30                         # of one case; a hundred times what a sound one takes
CONFIGS = [data.DataConfig(max_tokens=4096, max_crops=2, max_frames=4, vision=model.TOY_VISION,
                           prefix_all=not later, sqrt_length=later, sqrt_branches=later)
           for later in (False, True)]
TOKENIZER = ByteTokenizer()
KINDS = ("record", "image", "video")
INPUTS = tuple(fuzz_inputs.CHECKS)   # flags, answers, turned images (tests/fuzz_inputs.py)


class Late(BaseException):
    """A case takes longer than SECONDS. Not an Exception: no handler of errors may catch it."""


# --------------------------------------------------------------------------------------------------
# one case


class Stage:
    """A folder with sound media and odd ones beside the file of records that a case writes."""

    def __init__(self, folder, kinds):
        self.media = folder / "media"
        self.file = folder / "r.jsonl"
        self.media.mkdir()
        images = mutations.sound_images()
        for name, content in images.items():
            (self.media / name).write_bytes(content)
        videos = mutations.sound_videos(self.media) if {"record", "video"} & set(kinds) else {}
        self.sound = {"record": mutations.sound_records(), "image": images, "video": videos}
        links = {"out.png": TESTS / "media/coins.png", "up": "..", "in.png": "a.png",
                 "round": "round", "zero": "/dev/zero"}
        for name, target in links.items():
            (self.media / name).symlink_to(target)
        for name in mutations.PLAYLISTS:
            (self.media / name).write_bytes(videos.get(name, b""))
        (self.media / "folder").mkdir()
        os.mkfifo(self.media / "pipe")

    def write(self, seed, kind, number):
        """Lays out a case; returns the file that it made besides r.jsonl, or None."""
        rng = random.Random(f"{seed} {kind} {number}")
        if kind == "record":
            self.file.write_bytes(mutations.mutated_record(rng, self.sound[kind]))
            return None
        mutate = {"image": mutations.mutated_image, "video": mutations.mutated_video}[kind]
        name, content = mutate(rng, self.sound[kind])
        # a name of its own, since what was found of a file is remembered by its name
        path = self.media / f"case{number}-{name}"
        path.write_bytes(content)
        caption = {"type": "caption", "text": "x"}
        self.file.write_text(json.dumps({kind: path.name, "annotations": [caption]}))
        return path


def code_of(message):
    """The code of a declared error; AssertionError if the message is no sentence."""
    control = re.search("[\0-\x1f\x7f-\x9f]", message)
    assert len(message) < 3000 and not control, f"no sentence: {message!r}"
    code = re.search(r"\b([ES]\d\d)\b", message)
    assert code, f"no code: {message}"
    return code[1]


def read_and_encode(records, i, config, epoch):
    """The code that a record ends with, "sound" or "too long"."""
    try:
        record = records[i]
        n_tokens, n_crops = data.size(record, TOKENIZER, config, 0, epoch)
        example = data.encode(record, TOKENIZER, config, 0, epoch)
    except Unreadable as error:
        return code_of(str(error))
    assert all(map(math.isfinite, example.weights)), "a weight that is not finite"
    encoded = len(example.tokens), 0 if example.images is None else len(example.images)
    planned = int(n_tokens), int(n_crops)
    assert planned in ((0, 0), encoded), f"size {planned}, encode {encoded}"
    return "sound" if n_tokens else "too long"


# Check knows neither the settings of a run (S03, S12) nor what only decoding shows (S23).
UNKNOWN_TO_CHECK = {"sound", "too long", "S03", "S12", "S23"}


def run_case(stage, config, epoch):
    """The code that the case ends with, or "sound"; any exception is a find."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = check.main([str(stage.file), "--decode", "--all"])
    assert status in (0, 1), f"check left with {status}"
    try:
        records = Records(stage.file, stage.media)
        codes = [read_and_encode(records, i, config, epoch) for i in range(len(records))]
    except DataError as error:
        codes = [code_of(line) for line in str(error).split("\n")]
    agreed = status == 1 or set(codes) <= UNKNOWN_TO_CHECK
    assert agreed, f"{codes}, but check said: {printed.getvalue()}"
    return next((code for code in codes if code != "sound"), "sound")


# --------------------------------------------------------------------------------------------------
# all cases


def peak_mebibytes():
    """The most memory so far: of this process, of its children (no less than this one had then)."""
    unit = 1 << (20 if sys.platform == "darwin" else 10)
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return [resource.getrusage(process).ru_maxrss // unit for process in who]


@contextlib.contextmanager
def deadline():
    """Raises Late in a block that takes longer than SECONDS."""
    def late(*_):
        raise Late(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    # for code that does not come back to Python at all
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def run(counts, seed=0, only=None):
    """{kind: how many} -> what the last line says, and [(kind, number, traceback), ..] of finds.

    only: (kind, number) of the one case to run.
    """
    cases = [(kind, number) for kind in counts for number in range(counts[kind])]
    if only:
        cases = [only]
    outcomes = {kind: Counter() for kind in counts}
    slowest = (0, "")
    finds = []
    largest = ""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        stage = Stage(Path(folder), counts)
        peak = at_first = peak_mebibytes()[0]
        for kind, number in tqdm(cases, disable=only or None):
            made = stage.write(seed, kind, number) if kind in KINDS else None
            began = time.monotonic()
            try:
                with deadline(), contextlib.redirect_stderr(nowhere):
                    if kind in KINDS:
                        code = run_case(stage, CONFIGS[number % 2], number)
                    else:
                        rng = random.Random(f"{seed} {kind} {number}")
                        code = fuzz_inputs.CHECKS[kind](rng, Path(folder))
            except (Exception, Late):
                code = "find"
                finds.append((kind, number, traceback.format_exc()))
            outcomes[kind][code] += 1
            slowest = max(slowest, (round(time.monotonic() - began, 2), f"{kind} {number}"))
            if peak_mebibytes()[0] > peak:
                peak = peak_mebibytes()[0]
                largest = f"{kind} {number}"
            if made:
                made.unlink()
    own, children = peak_mebibytes()
    memory = {"at first": at_first, "at most": own, "children at most": children}
    codes = {kind: dict(sorted(outcome.items())) for kind, outcome in outcomes.items()}
    result = {"seed": seed, **codes, "slowest": slowest, "MiB": memory, "largest": largest,
              "finds": len(finds)}
    return result, finds


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="tests.fuzz",
        description="Mutated records, images and videos through check, size and encode.")
    for kind in (*KINDS, *INPUTS):
        parser.add_argument(f"--{kind}s", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", nargs=2, metavar=("KIND", "NUMBER"),
                        help=f"this one alone: {', '.join((*KINDS, *INPUTS))}, and its number")
    args = parser.parse_args(argv)
    only = None
    counts = {kind: getattr(args, f"{kind}s") for kind in (*KINDS, *INPUTS)}
    if args.case:
        only = (args.case[0], int(args.case[1]))
        counts = {only[0]: 1}
    result, finds = run(counts, args.seed, only)
    for kind, number, what in finds[:20]:
        print(f"--case {kind} {number} --seed {args.seed}\n{what}", file=sys.stderr)
    print(json.dumps(result))
    return int(bool(finds))


if __name__ == "__main__":
    sys.exit(main())
