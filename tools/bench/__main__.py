"""Measured side by side in one run: this project and others at the same work.

    python -m tools.bench pack                              # packers, on a stream like stage 1, 2 and 3 (tools/pack_bench.py)
    python -m tools.bench load                              # decoders, from a video to model input (tools/load_bench.py)
    python -m tools.bench attend                            # attention in packed rows (tools/attend_bench.py)
    python -m tools.bench step                              # a training step beside transformers' Molmo2 (tools/step_bench.py)
    python -m tools.bench run runs/x --peak 989             # MFU of a run of train.py, its loader and all (tools/run_bench.py)
    python -m tools.bench generate                          # transformers' Molmo2: a small random model on this machine's CPU
    python -m tools.bench generate --preset 4b --device cuda --dtype bfloat16

Prints a table, then one JSON line that also says on what, when and of which commit. `generate`: same weights, same inputs; a ratio above
1 says that this project is faster. Ours and theirs take turns, so that what else the machine does meets both; the ratio is the median over
the rounds, with the smallest and the largest beside it.
"""

import argparse
import json
import statistics
import sys
import time
from datetime import date
from itertools import pairwise

import numpy as np
import torch

import data
import model as models
from evaluation.generate import generate
from tools.bench import attend as attend_bench
from tools.bench import load as load_bench
from tools.bench import pack as pack_bench
from tools.bench import run as run_bench
from tools.bench import step as step_bench
from tools.bench.peers import SMALL, Numbers, inputs_of, peers, reach, spread
from training.log import commit, hardware


def ticks(run):
    """run(told), told called after every token -> its result, seconds to the first token, median seconds from one to the next."""
    times = [time.perf_counter()]
    result = run(lambda *_: times.append(time.perf_counter()))
    gaps = [b - a for a, b in pairwise(times)]
    return result, gaps[0], statistics.median(gaps[1:])


def bench_generate(args):
    """Prefill (vision included) and decoding, greedy; the answers must be the same."""
    if args.tokens < 2 or args.rounds < 1:
        raise ValueError("--tokens must be at least 2 and --rounds at least 1")
    reach(args.device)
    config = SMALL if args.preset == "small" else models.PRESETS[args.preset]
    device, dtype = args.device, getattr(torch, args.dtype)
    ours, theirs = peers(config, device, dtype)
    rng, numbers, settings = np.random.default_rng(0), Numbers(config.n_vocab), data.DataConfig(vision=config.vision)
    picture = rng.integers(0, 256, (1000, 1800, 3), np.uint8)
    frames = [rng.integers(0, 256, (90, 160, 3), np.uint8) for _ in range(16)]
    clip = data.Clip([k / 2 for k in range(16)], frames)
    cases = {"text": ([], None), "image of 9 crops": ([picture], None), "video of 16 frames": ([], clip)}
    results, n = {}, args.tokens

    def pair(prompt):
        """Two functions of `told` -> an answer of n tokens."""
        given, length = inputs_of(prompt, config.vision, device, dtype), len(prompt.tokens)

        def their_answer(told):
            def never(ids, scores):      # looks at the token, as a streamer would: on a GPU this waits for it
                told(ids[0, -1].item())
                return torch.zeros(1, dtype=torch.bool, device=device)

            fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "stopping_criteria": [never]}
            return theirs.generate(**given, max_new_tokens=n, **fixed)[0, length:].tolist()

        return {"ours": lambda told: generate(ours, [prompt], -1, n, on_token=told)[0], "theirs": their_answer}

    print("case                  tokens |  prefill: ours    theirs  ratio |  a token: ours     theirs  ratio")
    for name, (images, clip) in cases.items():
        prompt = data.encode_prompt(images, [("x" * 280, None)], numbers, settings, clip)
        sides, rounds = pair(prompt), []
        answers = {side: ticks(run)[0] for side, run in sides.items()}       # also warms both up
        # of a random model in half precision, rounding decides between words that are as likely
        same = next((i for i, (a, b) in enumerate(zip(*answers.values(), strict=True)) if a != b), n)
        if dtype == torch.float32 and same < n:
            raise RuntimeError(f"{name}: the answers part at token {same}")
        for k in range(args.rounds):
            rounds.append({side: ticks(sides[side])[1:] for side in list(sides)[:: 1 if k % 2 else -1]})
        case = {"tokens": len(prompt.tokens), "crops": 0 if prompt.images is None else len(prompt.images), "same_tokens": same}
        for i, part in enumerate(("prefill", "decode")):
            case[part] = {side: statistics.median(line[side][i] for line in rounds) for side in sides}
            case[part]["ratio"] = spread(line["theirs"][i] / line["ours"][i] for line in rounds)
        results[name], p, d = case, case["prefill"], case["decode"]
        print(f"{name:20s} {case['tokens']:7d} | {p['ours']:12.3f} s {p['theirs']:7.3f} s {p['ratio']['median']:6.2f} | "
              f"{d['ours'] * 1000:11.2f} ms {d['theirs'] * 1000:7.2f} ms {d['ratio']['median']:6.2f}")
    return results


def short(found):
    """The same with four digits of every float: more were noise."""
    if isinstance(found, dict):
        return {name: short(value) for name, value in found.items()}
    if isinstance(found, list):
        return list(map(short, found))
    return float(f"{found:.4g}") if isinstance(found, float) else found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("generate", help="prefill and decoding beside transformers")
    add.add_argument("--preset", choices=("small", *models.PRESETS), default="small")
    add.add_argument("--device", default="cpu")
    add.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add.add_argument("--tokens", type=int, default=64, help="of an answer (default 64)")
    add.add_argument("--rounds", type=int, default=7, help="default 7")
    pack_bench.add_arguments(commands.add_parser("pack", help="packers beside each other, and what message trees and packing save"))
    load_bench.add_arguments(commands.add_parser("load", help="a video to model input: time and memory beside other decoders"))
    attend_bench.add_arguments(commands.add_parser("attend", help="attention in packed rows beside a dense mask and a loop over examples"))
    step_bench.add_arguments(commands.add_parser("step", help="a training step beside transformers: time, memory, useful FLOPs"))
    run_bench.add_arguments(commands.add_parser("run", help="a run of train.py, from its log: tokens per second and MFU of whole steps"))
    args = parser.parse_args()
    runs = {"generate": bench_generate, "pack": pack_bench.run, "load": load_bench.run, "attend": attend_bench.run,
            "step": step_bench.run, "run": run_bench.run}
    try:
        results = runs[args.command](args)
    except ValueError as e:
        print(f"tools.bench: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    where = {"hardware": hardware(getattr(args, "device", "cpu")), "threads": torch.get_num_threads(), "torch": torch.__version__,
             "commit": commit(), "date": str(date.today())}
    print(json.dumps({"bench": args.command, **vars(args), **where, "cases": short(results)}))


if __name__ == "__main__":
    main()
