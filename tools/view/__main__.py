"""A packed row to look at: one HTML page that opens offline (paper: message trees, packing).

    python -m tools.view my.jsonl --stage 2 --media photos --out page.html     # first row of a plan
    python -m tools.view --stage 1 --tiny --row 7 --out page.html              # of the toy world
    python -m tools.view --run runs/mine --step 812 --row 3 --out page.html    # of a step of a run

The page shows the row as a ribbon of tokens and the mask in blocks; for each example its message
tree, its crops with the windows that visual tokens pool, and the points of its record. It holds
example, visible_until and bidir of every token, and applies the mask rule itself to show what a
token may attend to and what may attend to it.

Text is tinted where it is learned: such a run shows the targets of the positions that it names. The
page does not show what a model makes of the row.
"""

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

from records.errors import Unreadable, warn
from records.mixture import Mixture
from text.tokenizer import load_tokenizer
from tools.view.page import page
from tools.view.row_data import PackedRow, batch_of
from training.config import Parser, UserError, config_from_json, parse
from training.loader import Decoder
from training.log import read_log, read_skips
from training.planner import PlanFile, StepPlanner, record_at
from training.setup import open_tokenizer
from training.sources import fingerprint, open_sources

# --------------------------------------------------------------------------------------------------
# rows


def planned_row(args, config, number):
    """The row of that number as training plans it, in steps of one row -> PackedRow."""
    tokenizer, config = open_tokenizer(args, config)
    config = replace(config, batch=1, micro_batch=1, steps=number + 1)
    plans, decoder = open_plans(args, config, tokenizer)
    plan = next(islice(plans, number, None))
    return decode_row(decoder, plan.packs[0])


def row_of_run(run, step, row):
    """A row of a step of a run -> PackedRow. Records that the run masked are masked here too."""
    run = Path(run)
    args, config = read_run(run)
    if not 1 <= step <= config.steps:
        raise UserError(f"--step {step}: the run has steps 1 to {config.steps}")
    if (run / "model" / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(run / "model", config.model.n_vocab)
    else:
        tokenizer, _ = open_tokenizer(args, config)
    plans, decoder = open_plans(args, config, tokenizer)
    plan = next(islice(plans, step - 1, None))
    logged = [line["ids"] for line in read_log(run / "log.jsonl")
              if line.get("step") == step and "ids" in line]
    if logged and logged[-1] != plan.hash:
        raise UserError(f"--run {run}: step {step} had other records; the data, or the code that "
                        "draws them, has changed since")
    if row >= len(plan.packs):
        raise UserError(f"--row {row}: the step has rows 0 to {len(plan.packs) - 1}")
    masked = {skip["index"]: skip["reason"] for skip in read_skips(run)}
    return decode_row(decoder, plan.packs[row], masked)


def read_run(run):
    """A run directory -> train.py's arguments, Config."""
    try:
        head = json.loads((run / "config.json").read_text())
        return argparse.Namespace(**head["command"]), config_from_json(head["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--run {run}: no run directory: {error!r}") from None


def open_plans(args, config, tokenizer):
    """-> an iterator over the StepPlans of a run, and the Decoder of their packs."""
    sources, rates, _ = open_sources(args, config)
    mixture = Mixture(sources, rates, config.seed)
    if args.plan:
        plans = PlanFile(args.plan, fingerprint(sources, rates, tokenizer, config), config)
    else:
        plans = StepPlanner(mixture, tokenizer, config)
    return plans, Decoder(mixture, tokenizer, config)


def decode_row(decoder, items, masked=None):
    """A pack of packing.Items, as it is trained on -> PackedRow. masked: {index: reason}."""
    examples = []
    records = []
    for item in items:
        examples.append(decoder.decode(item, reason=(masked or {}).get(item.index, "")))
        records.append(record_at(decoder.mixture, item.index)[0])
    return PackedRow(examples, records, decoder.tokenizer, decoder.config)


# --------------------------------------------------------------------------------------------------
# the command


def parser_of_command():
    parser = Parser(
        prog="python -m tools.view", description=__doc__.split("\n\n")[0], allow_abbrev=False,
        epilog="Any field of the config can be set as --a.b=value, as for train.py.")
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE",
        help="records (.jsonl), as train.py --data takes them; none: the toy world")
    add("--stage", help="recipe from stages/: 1, 2 or 3")
    add("--run", metavar="DIR", help="instead of records: a run directory of train.py")
    add("--step", type=int, metavar="N", help="with --run: the step whose rows to look at")
    add("--tiny", action="store_true", help="the toy's settings")
    add("--media", metavar="DIR", help="where the paths in the records start")
    add("--init", metavar="DIR", help="shape and tokenizer of this model (default: the preset's "
        "shape, and bytes as tokens)")
    add("--preset", help="model shape (default: 4b, with --tiny toy)")
    add("--seed", help="of the run (default 0)")
    add("--row", type=int, default=0, metavar="N",
        help="which row of the plan, or of the step (default 0, the first)")
    add("--out", required=True, metavar="HTML", help="the page to write")
    return parser


def check_together(own, rest):
    """UserError where this tool's own arguments contradict each other."""
    if own.row < 0:
        raise UserError(f"--row {own.row}: must be at least 0")
    out = Path(own.out)
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out {out}: name a file in a folder that exists")
    if own.run:
        complete = own.step is not None and own.stage is None and not own.file and not rest
    else:
        complete = own.stage is not None and own.step is None
    if not complete:
        raise UserError("name records and --stage N, or --run DIR and --step N")


def train_arguments(own, rest):
    """This tool's arguments as train.py's command line."""
    flags = {"stage": own.stage, "data": own.file, "media": own.media, "preset": own.preset,
             "seed": own.seed, "init": own.init}
    words = ["--tiny"] if own.tiny else []
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", value]
    return [*words, *rest]


def main(argv=None):
    try:
        own, rest = parser_of_command().parse_known_intermixed_args(argv)
        check_together(own, rest)
        if own.run:
            packed = row_of_run(own.run, own.step, own.row)
        else:
            packed = planned_row(*parse(train_arguments(own, rest)), own.row)
        out = Path(own.out)
        out.write_text(page(packed, batch_of(packed)), encoding="utf-8")
    except (UserError, Unreadable, OSError, ValueError) as error:
        warn(f"tools.view: {error}")
        raise SystemExit(2) from None
    megabytes = out.stat().st_size / 1e6
    print(f"{out}: row {own.row}, {len(packed.examples)} examples, {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
