"""Runs a model on all records of one or more files and scores its answers.

    python -m tools.evaluate --model toy --data tests/media/films.jsonl --media tests/media \\
        --frames 2 4 --max-new 20 --draw runs/pictures --out runs/pictures --overwrite

The last line is a JSON object. The metrics of the first file are at the top level. The metrics of
each other file are under the name of that file. With torchrun, each rank evaluates its share of
the records.
"""

import io
import json
import os
from contextlib import nullcontext, redirect_stderr
from itertools import zip_longest
from pathlib import Path

from evaluation import pictures
from evaluation.evaluate import SCORES, evaluate
from evaluation.generate import evaluation_config
from evaluation.masks import open_masks
from records.errors import RunError, UserError, draft, plural
from records.media import MAX_FRAMES
from records.reader import Records
from tools import benchmarks, command, model_flags
from training.ranks import join_ranks
from training.sources import unique_names


def parse(argv):
    parser = command.make_parser("evaluate", __doc__)
    add = parser.add_argument
    model_flags.add_model(parser)
    add("--data", required=True, nargs="+", action="extend", help=(
        "record files (.jsonl), which are scored separately"))
    add("--benchmark", choices=benchmarks.BENCHMARKS, help=(
        "a published benchmark, whose records tools.convert has made; its published scores are "
        "printed beside ours"))
    add("--media", metavar="DIR", help="the paths in the records are relative to this folder")
    add("--masks", nargs="+", action="extend", metavar="NPZ", help=(
        "files with true masks (evaluation/masks.py), one for each file of --data in the same "
        "order; if there are fewer, the last files of --data are scored without masks"))
    add("--frames", type=command.whole_number(1, MAX_FRAMES), nargs="+", action="extend",
        metavar="N", help="maximum number of frames of a video (default 384, or more if the model "
        "was trained with more); several numbers also give a table of scores, and the last line "
        "has the full metrics of the last number")
    add("--draw", metavar="DIR", help="write pictures of predicted and true points to this folder")
    add("--out", default=".", help="folder for predictions.jsonl (default: here)")
    add("--overwrite", action="store_true", help="replace predictions.jsonl and the pictures")
    add("--read-answers", choices=("official", "plain"), help=(
        'plain also accepts answers such as "**B**", "The answer is D", "three", "1,234", "No '
        'cats." (default: official for --benchmark and for questions in the styles of published '
        "sets, plain for others)"))
    add("--max-new", type=command.positive, help=(
        "maximum number of tokens in an answer (default: 12 to 4096, by the kind of answer)"))
    args = parser.parse_args(argv)
    args.sampling = model_flags.sampling(args)
    if args.benchmark and (len(args.data) > 1 or args.frames):
        parser.error("--benchmark needs one file in --data, and no --frames")
    if args.benchmark and os.path.isdir(args.data[0]):  # the command of earlier versions
        parser.error(f"{args.data[0]}: make records of this folder first: python -m tools.convert "
                     f"{args.data[0]} OUT.jsonl --as benchmark-{args.benchmark}")
    if len(args.masks or []) > len(args.data):
        parser.error(f"--masks has {len(args.masks)} files, but --data has {len(args.data)}: "
                     "give one masks file per data file, in the same order")
    if args.benchmark and not args.read_answers:
        args.read_answers = "official"
    args.predictions = Path(args.out, "predictions.jsonl")
    drawn = Path(args.draw).glob("*.png") if args.draw else ()
    for path in (args.predictions, *drawn):
        if os.path.lexists(path) and not args.overwrite:
            parser.error(f"{path} exists; give another folder, or add --overwrite")
    command.refuse_input(parser, args.predictions, args.data)
    return args


def open_sets(args):
    """-> [(name, records, masks_of or None), ..], one entry for each file of --data."""
    readers = [Records(path, args.media) for path in args.data]
    unique_names(readers)
    return [(reader.name, list(reader), open_masks(path) if path else None)
            for reader, path in zip_longest(readers, args.masks or [])]


def evaluate_set(args, loaded, name, records, masks_of, ranks):
    """Evaluates one file of records -> {number of frames: (metrics, predictions)}. The nll of a
    benchmark is not computed."""
    model, tokenizer, config = loaded
    found = {}
    for n in dict.fromkeys(args.frames or [None]):
        found[n] = evaluate(
            model, tokenizer, evaluation_config(config, n), records, masks_of,
            max_new=args.max_new, ranks=ranks, with_nll=not args.benchmark,
            reading=args.read_answers, sampling=args.sampling, name=name)
        if found[n][0]["skipped"] == len(records):
            raise UserError(f"{name}: {plural(len(records), 'record')}, but none can be evaluated")
    return found


def write_predictions(args, path, sets, found):
    """Writes the predictions of all results of evaluate_set to the file `path`."""
    with open(path, "w", encoding="utf-8") as out:
        for (name, *_), by_frames in zip(sets, found, strict=True):
            of_set = {"set": name} if len(args.data) > 1 else {}
            for n, (_, predictions) in by_frames.items():
                more = of_set | ({"frames": n} if args.frames else {})
                out.writelines(json.dumps(line | more) + "\n" for line in predictions)


def report_set(name, found):
    """The result of evaluate_set -> its metrics for the last number of frames. Prints a table if
    there are several numbers of frames."""
    metrics, _ = [*found.values()][-1]
    if len(found) == 1:
        return metrics
    by_frames = {str(n): metrics for n, (metrics, _) in found.items()}
    entries = {score: {n: of_n.get(score) for n, of_n in by_frames.items()}
               for score in SCORES if score in metrics}
    entries["nll"] = {n: of_n["nll"].get("all") for n, of_n in by_frames.items()}
    command.print_table(f"{name}, frames", entries)
    return metrics | {"by_frames": by_frames}


def draw_pictures(args, sets, found):
    """Draws the predictions of the last number of frames. It comes last, so that a full disk costs
    no scores."""
    try:
        for k, (name, records, _) in enumerate(sets):
            _, predictions = [*found[k].values()][-1]
            pictures.draw(predictions, records, pictures.folder_of_set(args.draw, k, name))
    except OSError as error:
        raise RunError(f"--draw {args.draw}: {error}; {args.predictions} and the scores above are "
                       "complete") from None


@command.report_errors
def main(argv=None):
    args = parse(argv)
    ranks = join_ranks(1, model_flags.open_device(args.device))
    # every rank reads the records, but only the first rank prints warnings about them
    quiet = nullcontext() if ranks.first else redirect_stderr(io.StringIO())
    # made before the evaluation, so that a file that cannot be written costs no time
    hidden = draft(args.predictions) if ranks.first else nullcontext()
    with quiet, hidden as path:
        if args.benchmark:
            args.max_new = args.max_new or benchmarks.BENCHMARKS[args.benchmark].max_new
        loaded = model_flags.open_model(args)
        sets = open_sets(args)
        if args.benchmark:
            benchmarks.check_records(args.benchmark, sets[0][1])
        if args.draw:
            Path(args.draw).mkdir(parents=True, exist_ok=True)
        found = [evaluate_set(args, loaded, *one_set, ranks) for one_set in sets]
        if ranks.first:  # nothing is written if a file could not be used
            write_predictions(args, path, sets, found)
    if ranks.first:
        last_line = {}
        for k, (name, *_) in enumerate(sets):
            metrics = report_set(name, found[k])
            if k:
                last_line[name] = metrics
            else:
                last_line.update(metrics)
        if args.benchmark:
            last_line = benchmarks.summary(args.benchmark, sets[0][1], *found[0][None])
            benchmarks.print_scores(last_line)
        if args.read_answers:
            last_line |= {"read_answers": args.read_answers}
        command.print_line(last_line)
        if args.draw:
            draw_pictures(args, sets, found)
    ranks.leave()


if __name__ == "__main__":
    main()
