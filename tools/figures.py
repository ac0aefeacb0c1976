"""Draws the pictures in docs/images/ that show what runs of the toy learned.

    python train.py --stage 1 --tiny --eval-every 800
    STAGE1=runs/stage1-tiny bash stages/tiny.sh
    python -m tools.figures runs/stage1-tiny runs/tiny/stage2

Of stage 1: samples.png, progress.png. Of stage 2: film.png, curves.png, frames.png. From
docs/bench/ablate.jsonl: ablate.png. The videos are held out, those of seed 0.
"""

import argparse
import json
import shutil
from pathlib import Path

from evaluation import pictures, report
from evaluation.evaluate import evaluate
from evaluation.generate import evaluation_config
from records.errors import warn
from tools import ablate
from tools.evaluate import draw_curves, table
from toy import world
from training.log import read_log
from weights.open_model import open_model_folder

ROOT = Path(__file__).parent.parent
FRAMES = (3, 6, 9, 12, 18)
MAX_NEW = 384


def draw_film(loaded, records, path):
    """The best answer that tracks several objects: most points hit, then the highest HOTA."""
    model, tokenizer, config = loaded
    metrics, predictions = evaluate(model, tokenizer, evaluation_config(config), records,
                                    report.toy_masks, max_new=MAX_NEW)
    several = [prediction for prediction in predictions if prediction["type"] == "track"
               and len({name for _, name, _, _ in prediction["true"]}) > 1]
    best = max(several, key=lambda found: (round(found["track_f1"], 3), found["hota"]))
    by_id = {record["id"]: record for record in records}
    pictures.draw_prediction(best, by_id[best["id"]]).save(path)
    for name in ("track_f1", "hota"):
        print(f"film.png: {name} {best[name]:.2f}; mean of all tracks {metrics[name]:.2f}")


def draw_scores_by_frames(loaded, records, path):
    """Scores on long videos against the number of frames that the model is shown."""
    model, tokenizer, config = loaded
    by_frames = {}
    for n in FRAMES:
        asked = evaluation_config(config, max_frames=n)
        by_frames[n], _ = evaluate(model, tokenizer, asked, records, report.toy_masks,
                                   max_new=MAX_NEW)
    draw_curves(by_frames, path)
    print(table(by_frames))


def draw_ablations(path):
    lines = (ROOT / "docs/bench/ablate.jsonl").read_text().splitlines()
    ablate.draw([ablate.Comparison(**json.loads(line)) for line in lines], path)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Draw the pictures in docs/images/ that show what runs of the toy learned.")
    parser.add_argument("stage1", type=Path, help="a run of stage 1 with --eval-every")
    parser.add_argument("stage2", type=Path, help="a run of stage 2")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    parser.add_argument("--videos", type=int, default=30, help="of each kind (default 30)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        loaded = open_model_folder(args.stage2)
        shutil.copy(args.stage1 / "samples.png", args.out)
        shutil.copy(args.stage1 / "eval.png", args.out / "progress.png")
        report.draw_losses(read_log(args.stage2 / "log.jsonl"), args.out / "curves.png")
        draw_ablations(args.out / "ablate.png")
        held_out = world.held_out(2, 0, 2 * args.videos)
        tracks = [record for record in held_out["test"]
                  if any(annotation["type"] == "track" for annotation in record["annotations"])]
        draw_film(loaded, tracks, args.out / "film.png")
        draw_scores_by_frames(loaded, held_out["long"][: args.videos], args.out / "frames.png")
    except (OSError, ValueError) as e:
        warn(f"tools.figures: {e}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
