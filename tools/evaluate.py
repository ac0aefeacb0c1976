"""Asks a model about all records of one or more files and scores its answers.

    python -m tools.evaluate --model toy --data tests/media/films.jsonl --media tests/media \\
        --frames 2 4 --max-new 20 --draw runs/pictures --out runs/pictures --overwrite

The last line is a JSON object: the metrics of the first file stand at the top, those of
each other file under its name. With torchrun, each rank evaluates its share of the records.
"""

import io
import json
import tempfile
from contextlib import nullcontext, redirect_stderr
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from evaluation import pictures
from evaluation.evaluate import SCORES, evaluate
from evaluation.generate import evaluation_config
from evaluation.masks import open_masks
from records.errors import plural
from records.media import MAX_FRAMES
from records.reader import Records
from tools import benchmarks, command
from training.config import UserError
from training.ranks import join_ranks
from training.sources import unique_names


def parse(argv):
    parser = command.make_parser("evaluate", __doc__)
    add = parser.add_argument
    command.add_model(parser)
    add("--data", required=True, nargs="+", action="extend", help=(
        "record files (.jsonl), each scored apart, or the folder of a benchmark"))
    add("--benchmark", choices=benchmarks.BENCHMARKS, help=(
        "a published benchmark; its published scores are printed beside ours"))
    add("--media", metavar="DIR", help="where the paths in the records start")
    add("--masks", nargs="+", action="extend", metavar="NPZ", help=(
        'arrays "record id/annotation number" (evaluation/masks.py): one file for each of --data, '
        "in their order; files beyond the last are scored without masks"))
    add("--frames", type=command.whole_number(1, MAX_FRAMES), nargs="+", action="extend",
        metavar="N", help="frames of a video at most (default 384, or more if trained with more); "
        "several numbers give a table of scores, and the metrics of the last one in full")
    add("--draw", metavar="DIR", help="write pictures of predicted and true points here")
    add("--out", default=".", help="folder for predictions.jsonl (default: here)")
    add("--overwrite", action="store_true", help="replace predictions.jsonl and the pictures")
    add("--read-answers", choices=("official", "plain"), default="official", help=(
        'plain: also read "Answer: D", "**B**", "three", "1,234", "No cats." (default official)'))
    add("--max-new", type=command.positive, help=(
        "tokens of an answer at most (default: by its kind, 12 to 4096)"))
    args = parser.parse_args(argv)
    args.sampling = command.sampling(args)
    if args.benchmark and (len(args.data) > 1 or args.frames or args.masks):
        parser.error("--benchmark takes one folder, and neither --frames nor --masks")
    if len(args.masks or []) > len(args.data):
        parser.error(f"--masks names {len(args.masks)} files, --data {len(args.data)}: "
                     "the first belongs to the first, and so on")
    drawn = Path(args.draw).glob("*.png") if args.draw else ()
    for path in (Path(args.out, "predictions.jsonl"), *drawn):
        if path.exists() and not args.overwrite:
            parser.error(f"{path} exists; name another folder, or add --overwrite")
    return args


class Results(NamedTuple):
    """Of one file of records."""
    name: str
    records: list
    by_frames: dict  # {number of frames: metrics}
    predictions: list  # of the last number of frames
    metrics: dict  # of the last number of frames, and by_frames where there are several
    lines: list  # of predictions.jsonl


def open_sets(args):
    """-> [(name, records, masks_of or None), ..] of the files of --data."""
    readers = [Records(path, args.media) for path in args.data]
    unique_names(readers)
    return [(reader.name, list(reader), open_masks(path) if path else None)
            for reader, path in zip_longest(readers, args.masks or [])]


def evaluate_set(args, loaded, name, records, masks_of, ranks):
    """One file of records -> its Results. A benchmark has no answers, so no nll."""
    model, tokenizer, config = loaded
    by_frames = {}
    lines = []
    for n in dict.fromkeys(args.frames or [None]):
        asked = evaluation_config(config, n)
        metrics, predictions = evaluate(
            model, tokenizer, asked, records, masks_of, max_new=args.max_new,
            ranks=ranks, with_nll=not args.benchmark, plain=args.read_answers == "plain",
            sampling=args.sampling)
        if metrics["skipped"] == len(records):
            raise UserError(f"{name}: {plural(len(records), 'record')}, and none could be used")
        by_frames[str(n)] = metrics
        more = {"set": name} if len(args.data) > 1 else {}
        more |= {"frames": n} if args.frames else {}
        lines += [p | more for p in predictions]
    several = {"by_frames": by_frames} if len(by_frames) > 1 else {}
    return Results(name, records, by_frames, predictions, metrics | several, lines)


def report(args, results, benchmark):
    """predictions.jsonl, pictures and a table; metrics as JSON on the last line."""
    with open(Path(args.out) / "predictions.jsonl", "w", encoding="utf-8") as out:
        for line in chain.from_iterable(of_file.lines for of_file in results):
            out.write(json.dumps(line) + "\n")
    for k, of_file in enumerate(results):
        if args.draw:
            folder = pictures.folder_of_set(args.draw, k, of_file.name)
            pictures.draw(of_file.predictions, of_file.records, folder)
        if len(of_file.by_frames) > 1:
            by_frames = of_file.by_frames.items()
            rows = {name: {n: metrics.get(name) for n, metrics in by_frames}
                    for name in SCORES if name in of_file.metrics}
            rows["nll"] = {n: metrics["nll"].get("all") for n, metrics in by_frames}
            command.print_table(f"{of_file.name}, frames", rows)
    first, *others = results
    last_line = first.metrics | {of_file.name: of_file.metrics for of_file in others}
    if benchmark:
        last_line = benchmarks.summary(benchmark, first.metrics, first.predictions)
        benchmarks.print_scores(last_line)
    if args.read_answers == "plain":  # not to be taken for scores by the official rules
        last_line |= {"read_answers": "plain"}
    command.print_line(last_line)


@command.report_errors
def main(argv=None):
    args = parse(argv)
    ranks = join_ranks(1, command.open_device(args.device))
    # every rank reads the records; the first one alone says what is wrong with them
    quiet = nullcontext() if ranks.first else redirect_stderr(io.StringIO())
    # `work` holds the records of a benchmark
    with quiet, tempfile.TemporaryDirectory() as work:
        benchmark = None
        if name := args.benchmark:
            benchmark = benchmarks.load(name, args.data[0], args.media, work)
            args.max_new = args.max_new or benchmarks.BENCHMARKS[name].max_new
        loaded = command.open_model(args)
        if benchmark:
            sets = [(benchmark.name, benchmark.records, benchmark.masks_of)]
        else:
            sets = open_sets(args)
        for folder in filter(None, (args.out, args.draw)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        results = [evaluate_set(args, loaded, *of_file, ranks) for of_file in sets]
        if ranks.world > 1:
            dist.destroy_process_group()
        if ranks.first:
            report(args, results, benchmark)


if __name__ == "__main__":
    main()
