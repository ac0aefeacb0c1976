"""The toy's data sources without video: single images, several images, and sums in words.

Image i of a split depends only on (seed, split, i). A scene is held out if its hash is 0 modulo 8.
A source has the same methods as a file of records (records/reader.py). `questions` is the kind of
questions about its scenes. It is part of the random seed, so sources do not share scenes.
"""

import json
import zlib
from functools import lru_cache

import numpy as np

from records.mixture import rng_for
from records.parse import parse
from toy.shapes import KINDS, SIZE, VERSION, draw_scene, mask_of, name_of, render

CURRICULUM = 2000  # the first images of a source are easier; this is their number
SINGLE = 0.2  # fraction of the curriculum with only one object per image
MAX_OBJECTS = 4  # in a training image
NUMBERS = ("one", "two", "three")


def is_held_out(scene):
    return zlib.crc32(json.dumps(scene).encode()) % 8 == 0


def point_annotation(label, points, indices):
    """points: in pixels. indices: the object of the scene under each point, for the masks."""
    return {
        "type": "point",
        "label": label,
        "coords": "pixel",
        "size": [SIZE, SIZE],
        "mode": "point",
        "points": points,
        "meta": {"objects": indices},
    }


def make_record(source, i, annotations, **media):
    """Record i of a source, in the same form as records.reader returns."""
    name = f"{source.name}-{i}"
    record = parse({"id": name, "annotations": annotations, **media})
    return {**record, "key": name, "where": name, "source": source, "index": i}


def find_named(objects, label):
    """The indices of the objects that fit a label: "red circle", "any circle", "red shape"."""
    colour, _, shape = label.partition(" ")
    return [k for k, o in enumerate(objects)
            if colour in ("any", o["colour"]) and shape in ("shape", o["shape"])]


def caption_of(objects):
    """The names of the objects, in the order of points. So every scene has exactly one caption."""
    ordered = sorted(objects, key=lambda o: (o["x"], o["y"]))
    return ", ".join(map(name_of, ordered)) or "nothing"


def image_entry(name):
    return {"path": f"{name}.png", "width": SIZE, "height": SIZE}


class World:
    """Single images. split: train, test or unseen.

    An image has point annotations for every kind of object in it, for a kind that is absent, for
    all objects, for all objects of one colour, and for all objects of one shape. With
    questions="all" it also has a caption and the count of all objects. Easy images with one object
    have fewer annotations, so that more of them fit into a row.
    """

    def __init__(self, split, seed=0, questions="all", curriculum=0, max_objects=6):
        self.split = split
        self.seed = seed
        self.questions = questions
        self.curriculum = curriculum  # the number of easier images at the start
        self.max_objects = max_objects
        self.name = f"tiny-{split}-{questions}"
        self.ordered = True  # endless, so it cannot be shuffled
        self.fingerprint = (f"{self.name} seed {seed} lessons {curriculum} most {max_objects} "
                            f"version {VERSION}")

    def __len__(self):
        return 1 << 40

    def difficulty(self, i):
        """-> minimum and maximum number of objects, and how many pixels to add to their radius."""
        if i >= self.curriculum:
            min_objects = 1 if self.split == "unseen" else 0
            return min_objects, self.max_objects, 0
        progress = i / self.curriculum
        if progress < SINGLE:
            return 1, 1, round(4 * (1 - progress / SINGLE))
        harder = (progress - SINGLE) / (1 - SINGLE)  # from 0 to 1
        return 1, 2 + int((self.max_objects - 1) * harder), 0

    @lru_cache(maxsize=4096)  # noqa: B019 - a source lives as long as its run
    def scene(self, i):
        for attempt in range(1000):
            rng = rng_for(self.seed, "scene", self.split, self.questions, i, attempt)
            scene = draw_scene(rng, self.split, *self.difficulty(i))
            if is_held_out(scene) == (self.split != "train"):
                return scene
        raise AssertionError(f"no scene for {self.name} {i}")

    def __getitem__(self, i):
        objects = self.scene(i)["objects"]
        rng = rng_for(self.seed, "questions", self.split, self.questions, i)
        kinds = self.kinds_to_name(objects, rng)
        is_single = i < SINGLE * self.curriculum
        if is_single:
            n_asked = 1 if self.questions == "all" else 2
            kinds = [kinds[int(k)] for k in rng.permutation(len(kinds))[:n_asked]]
        annotations = []
        for label in map(" ".join, kinds):
            indices = find_named(objects, label)
            points = [{"x": objects[k]["x"], "y": objects[k]["y"]} for k in indices]
            annotations.append(point_annotation(label, points, indices))
        if self.questions == "all":
            annotations.append({"type": "caption", "text": caption_of(objects)})
        if self.questions == "all" and not is_single:
            annotations.append({"type": "count", "label": "any shape", "count": len(objects)})
        return make_record(self, i, annotations, image=image_entry(f"{self.name}-{i}"))

    def kinds_to_name(self, objects, rng):
        present = sorted({(o["colour"], o["shape"]) for o in objects})
        pool = KINDS.all if self.split == "unseen" else KINDS.seen
        absent = [kind for kind in pool if kind not in present]
        kinds = [*present, absent[int(rng.integers(len(absent)))], ("any", "shape")]
        if objects:
            one, other = rng.integers(len(objects), size=2).tolist()
            kinds.append((objects[one]["colour"], "shape"))
            kinds.append(("any", objects[other]["shape"]))
        return kinds

    def image_sizes(self, record):
        return [(SIZE, SIZE)]

    def images(self, record, only=(0,)):
        return [render(self.scene(record["index"]))] * len(only)

    def masks(self, record, annotation):
        """(n,SIZE,SIZE) bool, one mask for each point of a point annotation, in the same order."""
        objects = self.scene(record["index"])["objects"]
        masks = [mask_of(objects[k]) for k in annotation["meta"]["objects"]]
        return np.array(masks).reshape(-1, SIZE, SIZE)


class ImageSeries:
    """Records of two or three images with at most three objects each. The annotations are points on
    all images, a count, and questions such as "which image shows red circle"."""

    def __init__(self, split, seed=0):
        self.world = World(split, seed, questions="series", max_objects=3)
        self.split = split
        self.seed = seed
        self.name = f"series-{split}"
        self.ordered = True
        self.fingerprint = f"{self.name} seed {seed} version {VERSION}"

    def __len__(self):
        return 1 << 38

    def scenes(self, i):
        """The objects of each image."""
        return [self.world.scene(3 * i + k)["objects"] for k in range(2 + i % 2)]

    def __getitem__(self, i):
        scenes = self.scenes(i)
        rng = rng_for(self.seed, "series", self.split, i)
        images_of = {}  # {name: the image of each object with this name}
        for k, objects in enumerate(scenes):
            for o in objects:
                images_of.setdefault(name_of(o), []).append(k)
        labels = [label for label in sorted(images_of) if len(images_of[label]) < 5]
        chosen = rng.permutation(len(labels))[:2]
        annotations = [self.points_on_images(scenes, labels[int(k)]) for k in chosen]
        unique = [label for label in labels if len(set(images_of[label])) == 1]
        for k in rng.permutation(len(unique))[:2]:
            label = unique[int(k)]
            answer = str(images_of[label][0] + 1)
            question = f"which image shows {label}"
            annotations.append({"type": "qa", "question": question, "answer": answer})
        shape = KINDS.shapes[int(rng.integers(len(KINDS.shapes)))]
        count = sum(o["shape"] == shape for objects in scenes for o in objects)
        annotations.append({"type": "count", "label": f"any {shape}", "count": count})

        images = [image_entry(f"{self.name}-{i}-{k}") for k in range(len(scenes))]
        return make_record(self, i, annotations, images=images)

    def points_on_images(self, scenes, label):
        points = []
        indices = []
        for k, objects in enumerate(scenes):
            for j, o in enumerate(objects):
                if name_of(o) == label:
                    points.append({"image": k, "x": o["x"], "y": o["y"]})
                    indices.append((k, j))
        return point_annotation(label, points, indices)

    def image_sizes(self, record):
        return [(SIZE, SIZE)] * len(record["images"])

    def images(self, record, only=None):
        only = range(len(record["images"])) if only is None else only
        return [render(self.world.scene(3 * record["index"] + int(k))) for k in only]

    def masks(self, record, annotation):
        """See World.masks."""
        scenes = self.scenes(record["index"])
        masks = [mask_of(scenes[k][j]) for k, j in annotation["meta"]["objects"]]
        return np.array(masks).reshape(-1, SIZE, SIZE)


class Sums:
    """Sums as text, without images: 'two circles, one cross' -> '3'. Every stage has some."""

    name = "tiny-text"

    def __init__(self, seed=0):
        self.seed = seed
        self.fingerprint = f"{self.name} seed {seed}"

    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        rng = rng_for(self.seed, "sums", i)
        a = int(rng.integers(1, 4))
        b = int(rng.integers(1, 4))
        first, second = rng.permutation(KINDS.shapes)[:2].tolist()
        question = ", ".join(f"{NUMBERS[n - 1]} {shape}{'s' * (n > 1)}"
                             for n, shape in ((a, first), (b, second)))
        answer = {"type": "qa", "question": question, "answer": str(a + b)}
        return make_record(self, i, [answer])
