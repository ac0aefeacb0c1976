"""Writes images of the toy world with their records and masks.

    python -m tools.toy runs/toy --n 20 --split test
"""

import json

import numpy as np
from PIL import Image

from records.errors import plural
from tools.command import make_parser, own_folder, positive, report_errors, whole_number
from toy.images import World
from toy.shapes import KINDS_BY_NAME


def export(folder, source, n):
    """The first n records of a source as files that tools.evaluate reads: images, records.jsonl,
    and masks.npz with the masks of points."""
    masks = {}
    with open(folder / "records.jsonl", "w", encoding="utf-8") as out:
        for i in range(n):
            record = source[i]
            line = {key: record[key] for key in ("id", "images")}
            line["annotations"] = [as_in_a_file(annotation) for annotation in record["annotations"]]
            out.write(json.dumps(line) + "\n")
            images = source.images(record)
            for entry, image in zip(record["images"], images, strict=True):
                Image.fromarray(image).save(folder / entry["path"])
            for k, annotation in enumerate(record["annotations"]):
                if annotation["type"] == "point":
                    masks[f"{record['id']}/{k}"] = source.masks(record, annotation)
    np.savez_compressed(folder / "masks.npz", **masks)


def as_in_a_file(annotation):
    """An annotation without what records.parse fills in and no file has."""
    filled_in = {"labels", "mode"} if annotation["type"] == "count" else {"labels"}
    kept = {key: annotation[key] for key in annotation if key not in filled_in}
    if "points" in kept:
        kept["points"] = [{key: point[key] for key in point if key != "scale"}
                          for point in kept["points"]]
    return kept


@report_errors
def main(argv=None):
    parser = make_parser("toy", __doc__)
    add = parser.add_argument
    add("out", help="new folder for records.jsonl, masks.npz, and images")
    add("--n", type=positive, default=100, help="how many records (default 100)")
    add("--split", choices=("train", "test", "unseen"), default="test",
        help="which scenes (default test)")
    add("--seed", type=whole_number(0), default=0, help="seed of the scenes (default 0)")
    add("--kinds", choices=KINDS_BY_NAME, default="few", help=(
        "combinations of colour and shape: few (default) 24, many 54"))
    args = parser.parse_args(argv)
    with own_folder(args.out, "tools.toy") as out:
        export(out, World(args.split, args.seed, kinds_name=args.kinds), args.n)
    print(f"{plural(args.n, 'record')}, the media and masks.npz were written to {args.out}.")


if __name__ == "__main__":
    main()
