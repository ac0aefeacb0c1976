"""The toy world: coloured shapes on textured grounds, with captions, counts and points. No download, no end.

Image i of a split is a function of (seed, split, i). A scene's hash decides its side: every scene whose hash is
0 modulo 8 is held out, so training and held-out images cannot coincide; and four of the 24 combinations of colour
and shape exist in the split `unseen` only.

    python -m toy.world OUT --n 100 --split test      # the same as files: images, records.jsonl, masks.npz
    python -m toy.world OUT --n 100 --what films      # ... of the world over time (toy/videos.py)
"""

import argparse
import json
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from data import rng_for

VERSION = 2                          # of how it is drawn and asked about: another world is other data to --resume, --plan and --cache
LESSONS = 4000                       # images of a source until they are as hard as the held-out ones
SINGLE = 0.2                         # share of the lessons with one object alone

SIZE = 100                           # pixels: one crop of the toy's ViT, 10 patches of 10
LATTICE = 5                          # pixels: centres lie on multiples of it, so that a coordinate is one of a few words
COLOURS = {"red": (235, 80, 70), "green": (70, 215, 90), "blue": (80, 130, 255), "yellow": (250, 225, 60),
           "purple": (200, 90, 235), "white": (245, 245, 245)}
SHAPES = ("circle", "square", "triangle", "cross")
UNSEEN = {("red", "cross"), ("green", "triangle"), ("blue", "square"), ("yellow", "circle")}
SEEN = [(c, s) for c in COLOURS for s in SHAPES if (c, s) not in UNSEEN]
NUMBERS = ("one", "two", "three")

# what the toy's tokenizer spells as one id: the markup of chats and points, the words and the coordinates of this world
WORDS = ("user\n", "assistant\n", "pointing: ", "count: ", "long_caption", "text_sft", "There are none.",
         '<points coords="1', '">', "</points>", ", ", "nothing", "any", " shape", *(n + " " for n in NUMBERS),
         *COLOURS, *(f" {s}" for s in SHAPES), *(f" {10 * v:03d}" for v in range(LATTICE, SIZE, LATTICE)),
         # and of films and series of pictures (toy/videos.py)
         "video_point: ", "video_count: ", "video_point_track_per_frame: ", "multi_image_pointing: ", "multi_image_count: ", "user_qa",
         "video_long_caption", "video_multiple_choice", '<points coords="', '<tracks coords="', "</tracks>", "No tracks available.",
         "Image ", "subtitle\n", "Only return the correct answer option.\n", *(f"\n{letter}. " for letter in "ABC"), "which", " comes",
         " leaves", " becomes", " moves", " first", "the named", " there at the end", " image shows ", " at ", "from", " to", " Answer: ",
         "left", "right", "up", "down", "nowhere", *(f" {k}" for k in range(1, 7)), *(f"{k / 2:.1f}" for k in range(18)))


def draw_scene(rng, split, least=0, most=6, extra=0):
    """-> dict of plain numbers and words: what is where, and what lies behind it. Objects in a crowd are smaller;
    `extra` pixels are added to every radius."""
    objects, n = [], int(rng.integers(least, most + 1))
    smallest, largest = ((14, 22), (14, 22), (14, 21), (13, 19), (12, 17), (11, 16), (10, 15))[n]
    for _ in range(300):
        if len(objects) == n:
            break
        rare = split == "unseen" and (not objects or rng.random() < 0.5)
        choices = sorted(UNSEEN) if rare else SEEN
        colour, shape = choices[int(rng.integers(len(choices)))]
        r = int(rng.integers(smallest, largest + 1)) + extra
        x, y = (LATTICE * int(v) for v in rng.integers(-(-r // LATTICE), (SIZE - r) // LATTICE + 1, 2))
        if all((x - o["x"]) ** 2 + (y - o["y"]) ** 2 > (1.13 * (r + o["r"]) + 2) ** 2 for o in objects):
            objects.append({"colour": colour, "shape": shape, "x": x, "y": y, "r": r, "light": int(rng.integers(-25, 26))})
    return {"objects": objects, "slope": [int(v) for v in rng.integers(-40, 41, 2)], "texture": int(rng.integers(4)),
            "period": int(rng.integers(3, 9)), "noise": int(rng.integers(1 << 30))}


Y, X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32) + 0.5           # centres of pixels


def mask_of(o, box=...):
    """(SIZE,SIZE) bool: the pixels of one object; or that of it which lies in a box (two slices)."""
    x, y, r = X[box] - o["x"], Y[box] - o["y"], o["r"]
    return {"circle": x * x + y * y <= r * r,
            "square": np.maximum(abs(x), abs(y)) <= 0.82 * r,
            "triangle": (y <= 0.7 * r) & (y >= 2 * abs(x) - r),
            "cross": (np.minimum(abs(x), abs(y)) <= 0.36 * r) & (np.maximum(abs(x), abs(y)) <= r)}[o["shape"]]


def render(scene):
    """Scene -> (SIZE,SIZE,3) uint8. The ground is shaded, and stripes or checks of two tints cover it; objects are shaded
    too: a colour alone does not say what is an object. But every object is, over its three channels, brighter than the
    mean of its ground, and all grounds have the same mean. Both matter to a ViT that starts from nothing: an edge with
    the light on one side is one feature and not six, and a ground of any mean would hide its objects (RESULTS.md)."""
    rng = np.random.default_rng(scene["noise"])
    tints = rng.normal(0, 1, (2, 3))
    slope = (scene["slope"][0] * (X - SIZE / 2) + scene["slope"][1] * (Y - SIZE / 2)) / SIZE
    along, down, across = (np.sin(v * np.pi / scene["period"]) for v in (X, Y, X + Y))
    texture = np.sign((0 * along, along, across, along * down)[scene["texture"]])          # plain, stripes, stripes aslant, checks
    light = slope[..., None] * (1 + 0.3 * tints[0]) + 24 * texture[..., None] * tints[1] + rng.normal(0, 6, (SIZE, SIZE, 1))
    image = 75 + light
    for o in scene["objects"]:
        shade = o["light"] + 14 * (X - o["x"] + Y - o["y"]) / o["r"] + rng.normal(0, 6, (SIZE, SIZE))
        image = np.where(mask_of(o)[..., None], np.array(COLOURS[o["colour"]], np.float32) + shade[..., None], image)
    return image.clip(0, 255).astype(np.uint8)


def caption_of(objects):
    """'red circle, green square, red circle': from left to right, as points are listed, so that one scene has one caption."""
    return ", ".join(f"{o['colour']} {o['shape']}" for o in sorted(objects, key=lambda o: (o["x"], o["y"]))) or "nothing"


def those(objects, colour, shape):
    """Which objects a label means; 'any' and 'shape' stand for every colour and every shape."""
    return [k for k, o in enumerate(objects) if colour in ("any", o["colour"]) and shape in ("shape", o["shape"])]


def count_of(objects, colour, shape):
    return {"type": "count", "label": f"{colour} {shape}", "count": len(those(objects, colour, shape))}


def point_at(objects, colour, shape):
    hits = those(objects, colour, shape)
    points = [{"x": objects[k]["x"], "y": objects[k]["y"]} for k in hits]
    return {"type": "point", "label": f"{colour} {shape}", "coords": "pixel", "size": [SIZE, SIZE], "mode": "point",
            "points": points, "meta": {"objects": hits}}


def is_rare(a):
    """Does a pointing annotation ask for a combination that only the split `unseen` shows, and is one there?"""
    return a["type"] == "point" and bool(a["points"]) and tuple(a["label"].split(" ", 1)) in UNSEEN


class World:
    """A source without files (see data.Records): split train, test or unseen.

    An image's annotations: points for every kind of object in it, for a kind that is not there, for everything, for
    one whole colour and for one whole shape; and, where asks is 'all', a caption and the count of everything. In
    the lessons of one object there are fewer, so that a row holds more images.
    """

    def __init__(self, split, seed=0, asks="all", lessons=0, most=6):
        self.split, self.seed, self.asks, self.lessons, self.most = split, seed, asks, lessons, most
        self.name, self.ordered = f"tiny-{split}-{asks}", True
        self.fingerprint = f"{self.name} seed {seed} lessons {lessons} most {most} version {VERSION}"

    def __len__(self):
        return 1 << 40

    def lesson(self, i):
        """How many objects image i has at least and at most, and how much larger they are: one object first, then more."""
        if i >= self.lessons:
            return int(self.split == "unseen"), self.most, 0
        part = i / self.lessons
        if part < SINGLE:
            return 1, 1, round(4 * (1 - part / SINGLE))
        return 1, 2 + int(5 * (part - SINGLE) / (1 - SINGLE)), 0

    @lru_cache(maxsize=4096)                             # noqa: B019  a world lives as long as its run
    def scene(self, i):
        for attempt in range(1000):
            scene = draw_scene(rng_for(self.seed, "scene", self.split, self.asks, i, attempt), self.split, *self.lesson(i))
            if (zlib.crc32(json.dumps(scene).encode()) % 8 == 0) == (self.split != "train"):
                return scene
        raise AssertionError(f"no scene for {self.name} {i}")

    def __getitem__(self, i):
        objects = self.scene(i)["objects"]
        rng = rng_for(self.seed, "questions", self.split, self.asks, i)
        kinds = sorted({(o["colour"], o["shape"]) for o in objects})
        pool = SEEN if self.split != "unseen" else [(c, s) for c in COLOURS for s in SHAPES]
        absent = [kind for kind in pool if kind not in kinds]
        absent = absent[int(rng.integers(len(absent)))]
        asked = [*kinds, absent, ("any", "shape")]
        if objects:
            one, other = (objects[int(k)] for k in rng.integers(len(objects), size=2))
            asked += [(one["colour"], "shape"), ("any", other["shape"])]
        single = i < SINGLE * self.lessons
        if single:
            asked = [asked[int(k)] for k in rng.permutation(len(asked))[:1 + (self.asks != "all")]]
        annotations = [point_at(objects, *kind) for kind in asked]
        if self.asks == "all":
            annotations.append({"type": "caption", "text": caption_of(objects)})
            if not single:
                annotations.append(count_of(objects, "any", "shape"))
        name = f"{self.name}-{i}"
        return {"id": name, "where": name, "source": self, "index": i, "annotations": annotations,
                "image": {"path": f"{name}.png", "width": SIZE, "height": SIZE}}

    def image_sizes(self, record):
        return [(SIZE, SIZE)]

    def images(self, record, only=(0,)):
        return [self.image(record)] * len(only)

    def image(self, record):
        return render(self.scene(record["index"]))

    def masks(self, record, annotation):
        """(n,SIZE,SIZE) bool, one for each point of a pointing annotation, in its order."""
        objects = self.scene(record["index"])["objects"]
        return np.array([mask_of(objects[k]) for k in annotation["meta"]["objects"]]).reshape(-1, SIZE, SIZE)


class Sums:
    """The tenth of text without pictures: 'two circles, one cross' -> '3'."""
    name, n = "tiny-text", 10_000

    def __init__(self, seed=0):
        self.seed, self.fingerprint = seed, f"{self.name} seed {seed}"

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = rng_for(self.seed, "sums", i)
        a, b = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        first, second = (SHAPES[int(k)] for k in rng.permutation(4)[:2])
        question = f"{NUMBERS[a - 1]} {first}{'s' * (a > 1)}, {NUMBERS[b - 1]} {second}{'s' * (b > 1)}"
        return {"id": f"{self.name}-{i}", "where": f"{self.name}-{i}", "source": self,
                "annotations": [{"type": "qa", "question": question, "answer": str(a + b)}]}


def mixture(seed, stage=1):
    """Sources and rates of the toy's stages; of stage 1: captions with everything else, pointing, text (spec 9.2)."""
    if stage > 1:
        from toy import videos as films

        return films.mixture(seed, stage)
    return [World("train", seed, lessons=LESSONS), World("train", seed, asks="points", lessons=LESSONS), Sums(seed)], [0.6, 0.3, 0.1]


def held_out(stage, seed, n):
    """{part: records} to be scored on, n of each kind of a part or fewer: pictures; of stages 2 and 3 also series and films, and long films
    as a part of their own; pictures with combinations that were never seen."""
    first = lambda source, n: [source[i] for i in range(max(n, 1))]      # noqa: E731
    parts = {"test": first(World("test", seed), n)}
    if stage > 1:
        from toy.videos import KINDS, Series

        parts["test"] += first(Series("test", seed), n // 4)
        parts["test"] += [record for kind in ("films", "tracks") for record in first(KINDS[kind]("test", seed), n // 2)]
        parts["long"] = [record for kind in ("long-films", "long-tracks") for record in first(KINDS[kind]("test", seed), n // 2)]
    return parts | {"unseen": first(World("unseen", seed), n)}


def export(folder, source, n):
    """The first n records of a source of this world as files: pictures, or the frames of films; records.jsonl; and masks.npz with an array
    for every annotation with points, as tools.evaluate reads them."""
    folder, masks = Path(folder), {}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "records.jsonl", "w") as out:
        for i in range(n):
            record = source[i]
            shown = {key: value for key, value in record.items() if key not in ("where", "source", "index")}
            if "video" in record:
                _, _, end = source.video_of(record)
                times = source.steps_of(record)
                shown["video"] = {"frames": [f"{record['id']}-{k}.png" for k in range(len(times))], "fps": 2, "start": 0, "end": end}
                pictures, names = source.frames(record, times), shown["video"]["frames"]
            else:
                pictures = source.images(record)
                names = [entry["path"] for entry in record.get("images", [record.get("image")])]
            for name, picture in zip(names, pictures, strict=True):
                Image.fromarray(picture).save(folder / name)
            for k, a in enumerate(record["annotations"]):
                if a["type"] in ("point", "track"):
                    found, name = source.masks(record, a), f"{record['id']}/{k}"
                    masks |= {name: found["masks"], f"{name}/times": found["times"]} if "video" in record else {name: found}
            out.write(json.dumps(shown) + "\n")
    np.savez_compressed(folder / "masks.npz", **masks)


def main():
    from toy import videos as films

    parser = argparse.ArgumentParser(description="Write a part of the toy world as files.")
    parser.add_argument("out")
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--what", choices=("pictures", "series", *films.KINDS), default="pictures")
    parser.add_argument("--split", choices=("train", "test", "unseen"), default="test", help="unseen: of pictures only")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.split == "unseen" and args.what != "pictures":
        parser.error("--split unseen: there are pictures only")
    of = {"pictures": World, "series": films.Series}.get(args.what) or films.KINDS[args.what]
    export(args.out, of(args.split, args.seed), args.n)


if __name__ == "__main__":
    main()
