"""Composed photographs as records: cut-outs with exact masks on photographic backgrounds.

    python -m tools.prepare stamps CUT_OUTS OUT --kinds toy/stamp_kinds.json --backgrounds PHOTOS

in    a folder of PNG files with an alpha channel, by kind; photographs (toy/photos.py)
out   OUT/train.jsonl        scenes of the cut-outs and backgrounds of training
      OUT/known.jsonl        other scenes of the same
      OUT/stamps.jsonl       held-out cut-outs of known kinds
      OUT/backgrounds.jsonl  held-out backgrounds
      OUT/kinds.jsonl        kinds that training never shows
      OUT/train-videos.jsonl and so on: with --videos, cut-outs that move
      OUT/media/             their images and frames; OUT/masks.npz: of every part but train
      stdout                 {part: records}

A part without cut-outs or backgrounds is left out. The same command gives the same files.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from records.errors import DataError, Unreadable, warn
from toy.photo_records import masks_of, record_of
from toy.photo_videos import Films, read_film, video_masks_of, video_record_of
from toy.photos import MAX_OBJECTS, PARTS, Photos, add_arguments, open_cut_outs, read_backgrounds


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tools.prepare stamps", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_arguments(parser)
    add("out", metavar="OUT")
    add("--n", type=int, default=4000, help="scenes for training (default 4000)")
    add("--held-out", type=int, default=100, metavar="N",
        help="scenes of every other part (default 100)")
    add("--max-objects", type=int, default=MAX_OBJECTS, choices=range(1, MAX_OBJECTS + 1),
        metavar="N", help=f"in a scene (default {MAX_OBJECTS}); a curriculum begins with 1")
    add("--videos", type=int, default=0, metavar="N",
        help="videos for training (default 0), and a quarter of --held-out of every other part")
    add("--film", metavar="FILE", help="a video for their background, of every part but "
        "backgrounds; without it, the camera pans over a photograph")
    add("--size", type=int, default=168, help="pixels along one side (default 168)")
    add("--languages", nargs="+", metavar="CODE", default=["en"],
        help="of captions, each a branch of the tree (default en)")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def write_part(photos, n, languages, out):
    """Scenes 0 .. n-1 as images and records -> their masks."""
    masks = {}
    with open(out / f"{photos.part}.jsonl", "w", encoding="utf-8") as lines:
        for i in tqdm(range(n), desc=photos.part, mininterval=1):
            image, placed = photos.scene(i)
            name = f"{photos.part}-{i}.jpg"
            record = record_of(photos, i, placed, name, languages)
            Image.fromarray(image).save(out / "media" / name, quality=92)
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
            masks |= masks_of(record, placed)
    return masks


def write_videos(films, n, languages, out):
    """Videos 0 .. n-1 as frames and records -> their masks."""
    masks = {}
    with open(out / f"{films.photos.part}-videos.jsonl", "w", encoding="utf-8") as lines:
        for i in tqdm(range(n), desc=f"{films.photos.part} videos", mininterval=1):
            images, moving = films.video(i)
            names = [f"{films.photos.part}-video-{i}-{k}.jpg" for k in range(len(images))]
            for name, image in zip(names, images, strict=True):
                Image.fromarray(image).save(out / "media" / name, quality=92)
            record = video_record_of(films, i, moving, names, languages)
            if record["annotations"]:
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
                masks |= video_masks_of(record, moving)
    return masks


def prepare(args):
    """-> {part: records}. OSError, DataError or ValueError in one sentence."""
    cut_outs, kinds = open_cut_outs(args.source, args.kinds)
    backgrounds = read_backgrounds(args.backgrounds)
    out = Path(args.out)
    (out / "media").mkdir(parents=True, exist_ok=True)
    for path in [out / "masks.npz", *out.glob("*.jsonl")]:       # of an earlier command
        path.unlink(missing_ok=True)
    film = read_film(args.film) if args.film else ()
    counts = {}
    masks = {}
    for part in PARTS:
        photos = Photos(cut_outs, kinds, backgrounds, part, args.size, args.seed,
                        args.max_objects)
        if not photos.by_kind or (part == "backgrounds" and not photos.backgrounds):
            continue
        counts[part] = args.n if part == "train" else args.held_out
        of_part = write_part(photos, counts[part], args.languages, out)
        if args.videos and not (film and part == "backgrounds"):     # there is one film
            n = args.videos if part == "train" else args.held_out // 4
            counts[f"{part}-videos"] = n
            of_part |= write_videos(Films(photos, film), n, args.languages, out)
        masks |= of_part if part != "train" else {}
    draft = out / "masks.draft.npz"
    np.savez_compressed(draft, **masks)
    draft.replace(out / "masks.npz")             # the last file: all of it is there, or it is not
    return counts


def main(argv):
    args = parse(argv)
    try:
        counts = prepare(args)
    except (OSError, DataError, Unreadable, ValueError) as e:
        warn(f"tools.prepare: {e}")
        raise SystemExit(2) from None
    print(json.dumps(counts))
