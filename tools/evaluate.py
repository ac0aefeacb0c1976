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
from itertools import zip_longest
from pathlib import Path

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


def open_sets(args):
    """-> [(name, records, masks_of or None), ..] of the files of --data."""
    readers = [Records(path, args.media) for path in args.data]
    unique_names(readers)
    return [(reader.name, list(reader), open_masks(path) if path else None)
            for reader, path in zip_longest(readers, args.masks or [])]


def evaluate_set(args, loaded, name, records, masks_of, ranks):
    """One file of records -> {number of frames: (metrics, predictions)}. A benchmark has no
    answers, so no nll."""
    model, tokenizer, config = loaded
    found = {}
    for n in dict.fromkeys(args.frames or [None]):
        found[n] = evaluate(
            model, tokenizer, evaluation_config(config, n), records, masks_of,
            max_new=args.max_new, ranks=ranks, with_nll=not args.benchmark,
            plain=args.read_answers == "plain", sampling=args.sampling)
        if found[n][0]["skipped"] == len(records):
            raise UserError(f"{name}: {plural(len(records), 'record')}, and none could be used")
    return found


def report_set(args, k, name, records, found):
    """What evaluate_set gives of file k -> its metrics, those of the last number of frames. Writes
    to predictions.jsonl, draws, and prints a table if there are several numbers."""
    of_set = {"set": name} if len(args.data) > 1 else {}
    with open(Path(args.out, "predictions.jsonl"), "a" if k else "w", encoding="utf-8") as out:
        for n, (_, predictions) in found.items():
            more = of_set | ({"frames": n} if args.frames else {})
            out.writelines(json.dumps(line | more) + "\n" for line in predictions)
    metrics, predictions = [*found.values()][-1]
    if args.draw:
        pictures.draw(predictions, records, pictures.folder_of_set(args.draw, k, name))
    if len(found) == 1:
        return metrics
    by_frames = {str(n): metrics for n, (metrics, _) in found.items()}
    rows = {score: {n: of_n.get(score) for n, of_n in by_frames.items()}
            for score in SCORES if score in metrics}
    rows["nll"] = {n: of_n["nll"].get("all") for n, of_n in by_frames.items()}
    command.print_table(f"{name}, frames", rows)
    return metrics | {"by_frames": by_frames}


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
        sets = open_sets(args) if not benchmark else [
            (benchmark.name, benchmark.records, benchmark.masks_of)]
        for folder in filter(None, (args.out, args.draw)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        found = [evaluate_set(args, loaded, *one_set, ranks) for one_set in sets]
        if ranks.world > 1:
            dist.destroy_process_group()
    if ranks.first:  # nothing is written if a file could not be used
        last_line = {}
        for k, (name, records, _) in enumerate(sets):
            metrics = report_set(args, k, name, records, found[k])
            if k:
                last_line[name] = metrics
            else:
                last_line.update(metrics)
        if benchmark:
            last_line = benchmarks.summary(benchmark, *found[0][None])
            benchmarks.print_scores(last_line)
        if args.read_answers == "plain":  # not to be taken for scores by the official rules
            last_line |= {"read_answers": "plain"}
        command.print_line(last_line)


if __name__ == "__main__":
    main()
