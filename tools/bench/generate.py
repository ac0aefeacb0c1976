"""Times prefill and decoding of an answer, compared with the Molmo2 of transformers or alone.

    python -m tools.bench generate --preset toy --rounds 1 --tokens 8

Both models have the same random weights, get the same prompts and decode greedily. In
float32 the answers must be the same. In bfloat16 they may differ, because rounding can
change the order of two tokens with almost equal logits. With --alone, only our model is
timed, and transformers is not needed.
"""

import statistics
import time
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from evaluation.generate import generate
from tools.bench.measure import run_rounds, spread
from tools.bench.peers import PRESETS, model_pair, random_model, reference_inputs
from tools.bench.step_cases import Plain, plain_example
from tools.command import positive, print_table, whole_number

NEVER = -1  # not the id of a token, so no answer ends early


class Timing(NamedTuple):
    tokens: list
    prefill: float  # seconds to the first token
    decode: float  # median seconds from one token to the next


def time_answer(answer):
    """-> Timing. answer: a function that returns tokens and calls its argument after each one."""
    times = [time.perf_counter()]
    tokens = answer(lambda *_: times.append(time.perf_counter()))
    seconds = [end - start for start, end in pairwise(times)]
    return Timing(tokens, seconds[0], statistics.median(seconds[1:]))


def our_answer(model, prompt, n_tokens, on_token):
    return generate(model, [prompt], NEVER, n_tokens, on_token=on_token)[0]


def reference_answer(model, inputs, n_tokens, on_token):
    """The same as our_answer, with the generate method of transformers."""

    def stopping_criterion(ids, scores):
        # .item() waits until the GPU has computed the token, so the time is right
        on_token(ids[0, -1].item())
        return torch.zeros(1, dtype=torch.bool, device=ids.device)

    ids = model.generate(
        **inputs, max_new_tokens=n_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        stopping_criteria=[stopping_criterion])
    return ids[0, -n_tokens:].tolist()


def bench_prompt(name, prompt, answers, rounds, must_agree):
    """Times one prompt -> its row of the table. answers: {"ours", and perhaps "reference": a
    function for time_answer}. RuntimeError if the answers must agree but differ."""
    # the first answers are also the warm-up
    first = {side: time_answer(answer).tokens for side, answer in answers.items()}
    if must_agree and first["ours"] != first.get("reference", first["ours"]):
        raise RuntimeError(f"{name}: the answers differ: ours {first['ours']}, "
                           f"transformers {first['reference']}.")
    runs = {side: partial(time_answer, answer) for side, answer in answers.items()}
    timings = run_rounds(runs, rounds)
    row = {"tokens": len(prompt.tokens)}
    for phase in ("prefill", "decode"):
        seconds = {side: [getattr(t[side], phase) for t in timings] for side in answers}
        for side in answers:
            row[f"{phase}_{side}"] = statistics.median(seconds[side])
        if "reference" in seconds:
            pairs = zip(seconds["reference"], seconds["ours"], strict=True)
            row[f"{phase}_ratio"] = spread([reference / ours for reference, ours in pairs])
    return row


def add_arguments(parser):
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="shape of the model")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of both models")
    add("--tokens", type=whole_number(2), default=64, help="tokens of an answer")
    add("--frames", type=positive, default=16, help="frames of the video")
    add("--rounds", type=positive, default=7, help="measurements of each prompt")
    add("--alone", action="store_true", help="do not compare with transformers")


def run(args):
    """Prints the table -> {case: its row}. RuntimeError if answers differ in float32."""
    config = PRESETS[args.preset]
    dtype = getattr(torch, args.dtype)
    if args.alone:
        ours = random_model(config, args.device, dtype)
    else:
        ours, reference = model_pair(config, args.device, dtype)
    rng = np.random.default_rng(0)
    rows = {}
    prompts = {
        "text": Plain(299),
        "image of 9 crops": Plain(299, (2, 4)),
        f"video of {args.frames} frames": Plain(299, frames=args.frames),
    }
    for name, plain in prompts.items():
        prompt = plain_example(config, rng, plain)
        answers = {"ours": partial(our_answer, ours, prompt, args.tokens)}
        if not args.alone:
            inputs = reference_inputs([prompt], config, args.device, dtype)
            del inputs["labels"]
            answers["reference"] = partial(reference_answer, reference, inputs, args.tokens)
        rows[name] = bench_prompt(name, prompt, answers, args.rounds, dtype == torch.float32)
    print_table("seconds per prompt and per token", rows)
    return rows
