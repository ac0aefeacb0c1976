"""Answers beside transformers' Molmo2: seconds of the prefill, vision included, and of each token.

    python -m tools.bench generate            # a small random model on this machine's CPU
    python -m tools.bench generate --preset 4b --device cuda --dtype bfloat16

Both models have the same random weights, get the same prompts and decode greedily. In float32 the
answers must be the same; in bfloat16 rounding decides between tokens that a random model finds
equally likely, so the table only counts how many tokens agree.
"""

import statistics
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

import data
import model as models
from evaluation.generate import generate
from records.visual import VideoClip
from tools.bench.measure import check_device, in_turn, spread
from tools.bench.peers import IdTokenizer, model_config, model_inputs, model_pair

QUESTION = "x" * 280
NEVER = -1  # no id: an answer does not end before its last token


class Timing(NamedTuple):
    tokens: list
    prefill: float  # seconds to the first token
    decode: float  # median seconds from one token to the next


def time_answer(answer):
    """answer: a function that calls its argument after every token and returns the tokens."""
    times = [time.perf_counter()]
    tokens = answer(lambda *_: times.append(time.perf_counter()))
    seconds = [end - start for start, end in pairwise(times)]
    return Timing(tokens, seconds[0], statistics.median(seconds[1:]))


def our_answer(model, prompt, n_tokens):
    return lambda on_token: generate(model, [prompt], NEVER, n_tokens, on_token=on_token)[0]


def their_answer(model, prompt, n_tokens, vision_config, device, dtype):
    inputs = model_inputs(prompt, vision_config, device, dtype)
    settings = {
        "max_new_tokens": n_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def answer(on_token):
        def stopping_criterion(ids, scores):
            on_token(ids[0, -1].item())  # reads the token, so on a GPU it waits for it
            return torch.zeros(1, dtype=torch.bool, device=device)

        ids = model.generate(**inputs, **settings, stopping_criteria=[stopping_criterion])
        return ids[0, len(prompt.tokens) :].tolist()

    return answer


def agreeing_tokens(a, b):
    """How many tokens two answers have in common before they differ."""
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            return n
    return len(a)


def prompts(config):
    """{case: data.Example}: text alone, one image and one video, with random pixels."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (1000, 1800, 3), np.uint8)
    frames = [rng.integers(0, 256, (90, 160, 3), np.uint8) for _ in range(16)]
    clip = VideoClip([k / 2 for k in range(16)], frames)
    tokenizer = IdTokenizer(config.n_vocab)
    settings = data.DataConfig(vision=config.vision)
    turns = [(QUESTION, None)]
    return {
        "text": data.encode_prompt([], turns, tokenizer, settings),
        "image of 9 crops": data.encode_prompt([image], turns, tokenizer, settings),
        "video of 16 frames": data.encode_prompt([], turns, tokenizer, settings, clip),
    }


def bench_prompt(name, prompt, sides, rounds, must_agree):
    """One prompt -> its row. sides: {"ours", "theirs": function to time}. RuntimeError if the
    answers must agree and do not."""
    answers = {side: time_answer(answer).tokens for side, answer in sides.items()}  # warms up too
    same_tokens = agreeing_tokens(answers["ours"], answers["theirs"])
    if must_agree and same_tokens < len(answers["ours"]):
        raise RuntimeError(f"{name}: the answers differ from token {same_tokens} on.")
    timings = []
    for k in range(rounds):
        timings.append({side: time_answer(sides[side]) for side in in_turn(sides, k)})
    row = {
        "tokens": len(prompt.tokens),
        "crops": 0 if prompt.images is None else len(prompt.images),
        "same_tokens": same_tokens,
    }
    for phase in ("prefill", "decode"):
        seconds = {side: [getattr(t[side], phase) for t in timings] for side in sides}
        row[phase] = {side: statistics.median(seconds[side]) for side in sides}
        pairs = zip(seconds["theirs"], seconds["ours"], strict=True)
        row[phase]["ratio"] = spread(theirs / ours for theirs, ours in pairs)
    return row


def add_arguments(parser):
    presets = ("small", *models.PRESETS)
    parser.add_argument("--preset", choices=presets, default="small", help="shape of the model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ..")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each prompt")


def run(args):
    """Prints the table -> {case: its row}. ValueError for flags that nothing can be measured with,
    RuntimeError where the answers differ in float32."""
    if args.tokens < 2 or args.rounds < 1:
        raise ValueError("--tokens must be at least 2 and --rounds at least 1.")
    check_device(args.device)
    config = model_config(args.preset)
    device = args.device
    dtype = getattr(torch, args.dtype)
    ours, theirs = model_pair(config, device, dtype)
    print(
        "case                  tokens |  prefill: ours    theirs  ratio |"
        "  a token: ours     theirs  ratio"
    )
    rows = {}
    for name, prompt in prompts(config).items():
        sides = {
            "ours": our_answer(ours, prompt, args.tokens),
            "theirs": their_answer(theirs, prompt, args.tokens, config.vision, device, dtype),
        }
        row = bench_prompt(name, prompt, sides, args.rounds, dtype == torch.float32)
        rows[name] = row
        prefill = row["prefill"]
        decode = row["decode"]
        print(
            f"{name:20s} {row['tokens']:7d} | {prefill['ours']:12.3f} s {prefill['theirs']:7.3f} s "
            f"{prefill['ratio']['median']:6.2f} | {decode['ours'] * 1e3:11.2f} ms "
            f"{decode['theirs'] * 1e3:7.2f} ms {decode['ratio']['median']:6.2f}",
            flush=True,
        )
    return rows
