"""Score a model on records: metrics as JSON on the last line, predictions.jsonl
(evaluation/evaluate.py).

    python -m tools.evaluate --model runs/stage1-tiny --data records.jsonl --masks masks.npz
    python -m tools.evaluate --model runs/stage3 --data videos.jsonl --frames 8 16 32 --draw drawn
    torchrun --nproc-per-node 8 -m tools.evaluate --model Molmo2-8B --data videos.jsonl \
        --device cuda --dtype bfloat16       # questions are dealt out, the scores are the same
"""

import argparse
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import parallel
from evaluation import charts, pictures
from evaluation.evaluate import SCORES, evaluate
from evaluation.generate import evaluation_config
from evaluation.masks import open_masks
from records import media
from records.errors import warn
from records.reader import Records
from training.open_model import open_model_folder

CURVES = (
    "caption_exact", "caption_recall", "video_point_f1", "count_accuracy", "track_f1", "hota",
    "qa_accuracy", "choice_accuracy",
)


def parse(argv):
    """ValueError in one sentence for values out of range."""
    parser = argparse.ArgumentParser(description="Score a model on records.")
    add = parser.add_argument
    add("--model", required=True, help="run directory, or a folder with a released checkpoint")
    add("--data", required=True, help="records (.jsonl)")
    add("--media", help="folder of their images and videos")
    add("--masks", help=(
        'an .npz with an array (n,h,w) for each pointing annotation, named "record id/annotation '
        'number"; of videos (n,t,h,w), also for each tracking annotation, and another array '
        '"record id/annotation number/times"'))
    add("--frames", type=int, nargs="+", metavar="N", help=(
        "frames of a video at most (default 384, or more if the model was trained with more); "
        "several numbers give a table of scores, and the metrics of the last one in full"))
    add("--draw", metavar="DIR", help=(
        "draw predicted and true points; frames.png for several --frames"))
    add("--out", default=".", help="folder for predictions.jsonl (default: here)")
    add("--max-new", type=int, help=(
        "tokens of an answer at most (default: by its kind, 12 to 4096)"))
    add("--device", default="cpu", help="default cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the weights (default float32)")
    args = parser.parse_args(argv)
    if args.max_new is not None and args.max_new < 1:
        raise ValueError("--max-new must be at least 1")
    if args.frames and not all(1 <= n <= media.MAX_FRAMES for n in args.frames):
        given = " ".join(map(str, args.frames))
        raise ValueError(f"--frames must be from 1 to {media.MAX_FRAMES}, not {given}")
    return args


def table(by_frames):
    """{frames: metrics} -> text: a line per score, a column per number of frames."""
    rows = [["frames", *by_frames]]
    for name in SCORES:
        if any(name in metrics for metrics in by_frames.values()):
            rows.append([name, *(cell(metrics.get(name)) for metrics in by_frames.values())])
    rows.append(["nll", *(cell(metrics["nll"].get("all")) for metrics in by_frames.values())])
    return "\n".join(f"{name:<24}" + "".join(f"{c:>9}" for c in cells) for name, *cells in rows)


def cell(value):
    return "-" if value is None else f"{value:.4f}"


def draw_curves(by_frames, path):
    """Scores against the number of frames."""
    series = {}
    for name in CURVES:
        points = [(int(n), metrics[name]) for n, metrics in by_frames.items() if name in metrics]
        if points:
            series[name] = points
    charts.save_line_chart(series, path, "frames", ylimits=(0, 1), dots=True)


class Results(NamedTuple):
    by_frames: dict                      # {number of frames: metrics}
    predictions: list                    # of the last number of frames
    records: list


def run(args, device, ranks):
    """Asks the model; the first rank writes predictions.jsonl -> Results."""
    model, tokenizer, config = open_model_folder(args.model, device, getattr(torch, args.dtype))
    records = list(Records(args.data, args.media))
    if args.frames and not any("video" in record for record in records):
        raise ValueError(f"--frames: no video in {args.data}")
    masks_of = open_masks(args.masks, records) if args.masks else None
    for folder in (args.out, args.draw):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
    by_frames, lines = {}, []
    for n in dict.fromkeys(args.frames or [None]):
        asked = evaluation_config(config, max_frames=n)
        metrics, predictions = evaluate(
            model, tokenizer, asked, records, masks_of, max_new=args.max_new, ranks=ranks
        )
        if metrics["skipped"] == len(records):
            raise ValueError(f"{args.data}: none of its {len(records)} records could be used")
        by_frames[str(n)] = metrics
        lines += [{**p, "frames": n} if args.frames else p for p in predictions]
    if ranks.first:
        with open(Path(args.out) / "predictions.jsonl", "w") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    return Results(by_frames, predictions, records)


def device_of_rank(name):
    """Under torchrun each process of a machine has a GPU of its own."""
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    try:
        return torch.device(name)
    except RuntimeError as e:
        raise ValueError(f"--device {name}: {str(e).splitlines()[0]}") from None


def main(argv=None):
    try:
        args = parse(argv)
        device = device_of_rank(args.device)
        ranks = parallel.join(1, device)
        results = run(args, device, ranks)
    except (OSError, ValueError) as e:
        warn(f"tools.evaluate: {e}")
        raise SystemExit(2) from None
    if ranks.world > 1:
        dist.destroy_process_group()
    if ranks.first:
        report(args, results)


def report(args, results):
    """Pictures, curves and a table; metrics as JSON on the last line."""
    if args.draw:
        pictures.draw(results.predictions, results.records, args.draw)
    *_, metrics = results.by_frames.values()
    if len(results.by_frames) > 1:
        print(table(results.by_frames))
        if args.draw:
            draw_curves(results.by_frames, Path(args.draw) / "frames.png")
        metrics = {**metrics, "by_frames": results.by_frames}
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
