"""Writes images or videos of the toy world with their records and masks.

    python -m tools.toy runs/toy --n 20 --split test
"""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from records.errors import draft, plural
from tools.command import make_parser, own_folder, positive, report_errors, whole_number
from toy.world import SOURCES


def export(folder, source, n):
    """Writes the first n records of a source as files for tools.evaluate: images or frames of
    videos, then masks.npz and records.jsonl."""
    records = Path(folder, "records.jsonl")
    records.unlink(missing_ok=True)  # it would not fit the new images
    masks = {}
    with (draft(records) as part, draft(records.with_name("masks.npz")) as masks_part,
          open(part, "w", encoding="utf-8") as out):
        for i in range(n):
            record = source[i]
            out.write(json.dumps(export_media(records.parent, source, record)) + "\n")
            for k, annotation in enumerate(record["annotations"]):
                if annotation["type"] in ("point", "track"):
                    name = f"{record['id']}/{k}"
                    found = source.masks(record, annotation)
                    if "video" in record:
                        masks[f"{name}/times"] = found["times"]
                        found = found["masks"]
                    masks[name] = found
        np.savez_compressed(masks_part, **masks)


def as_in_a_file(annotation):
    """An annotation without the fields that records.parse adds."""
    filled_in = {"labels", "mode"} if annotation["type"] == "count" else {"labels"}
    kept = {key: annotation[key] for key in annotation if key not in filled_in}
    if "points" in kept:
        kept["points"] = [{key: point[key] for key in point if key != "scale"}
                          for point in kept["points"]]
    return kept


def export_media(folder, source, record):
    """Writes the images or frames of a record; returns the record as a line of the file."""
    fields = ("id", "images", "subtitles", "annotations")
    line = {key: record[key] for key in fields if key in record}
    line["annotations"] = [as_in_a_file(annotation) for annotation in record["annotations"]]
    if "video" in record:
        _, _, end, _ = source.video_size(record)
        times = source.step_times(record)
        images = source.frames(record, times)
        names = [f"{record['id']}-{k}.png" for k in range(len(times))]
        line["video"] = {"frames": names, "fps": 2, "start": 0, "end": end}
    else:
        images = source.images(record)
        names = [entry["path"] for entry in record["images"]]
    for name, image in zip(names, images, strict=True):
        Image.fromarray(image).save(folder / name)
    return line


@report_errors
def main(argv=None):
    parser = make_parser("toy", __doc__)
    add = parser.add_argument
    add("out", help="new folder for records.jsonl, masks.npz, and images or frames")
    add("--n", type=positive, default=100, help="number of records (default 100)")
    add("--what", choices=SOURCES, default="images", help="kind of records (default images)")
    add("--split", choices=("train", "test", "unseen"), default="test",
        help="split of the scenes (default test); unseen needs --what images")
    add("--seed", type=whole_number(0), default=0, help="seed of the scenes (default 0)")
    args = parser.parse_args(argv)
    if args.what != "images" and args.split == "unseen":
        parser.error("--split unseen needs --what images")
    with own_folder(args.out, "tools.toy"):
        export(args.out, SOURCES[args.what](args.split, args.seed), args.n)
    print(f"{plural(args.n, 'record')}, the media and masks.npz were written to {args.out}.")


if __name__ == "__main__":
    main()
