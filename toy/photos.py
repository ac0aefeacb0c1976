"""Composed photographs: cut-outs with exact masks on photographic backgrounds.

in    a folder of cut-outs (PNG files with an alpha channel, in folders by kind; beside cat.png may
      lie cat.txt with a sentence that names it, and with the same in other languages, and cat.dat
      with the word nomirror), and photographs for the background
out   a scene: image (S,S,3) uint8, its objects with their visible masks

Masks follow from the alpha channel, kinds from the folders; photo_records.py makes a record of a
scene. These are composed photographs, not natural scenes: lighting, scale and context are random.
"""

import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from records.errors import DataError, warn
from records.mixture import rng_for

LARGEST = 256                        # pixels of the longer side of a cut-out in memory
LARGEST_BACKGROUND = 1024
VISIBLE = 128                        # alpha from which a pixel belongs to the mask
MIN_VISIBLE = 0.5                    # share of each object's pixels that no other object hides
MIN_SIDE = 0.06                      # the smallest object has MIN_SIDE**2 of the image's pixels
MAX_OBJECTS = 6
PHOTOGRAPHS = (".jpg", ".jpeg", ".png", ".webp")
TRANSLATION = re.compile(r"(\w+)\.utf8=(.+)")


class Kind(NamedTuple):
    names: dict                      # {language: noun}, "en" among them
    held_out: bool                   # only in the part "kinds"


@dataclass(frozen=True, eq=False)
class CutOut:
    name: str                        # path below the folder, without .png
    kind: str                        # English
    sentences: dict                  # {language: sentence}
    held_out: bool                   # only in the part "stamps"
    may_mirror: bool                 # left to right; no signs with letters
    pixels: Image.Image              # RGBA, cropped to what is visible


class Placed(NamedTuple):
    cut_out: CutOut
    mask: np.ndarray                 # (S,S) bool, what is visible
    n_pixels: int                    # of the mask before other objects hid a part of it

    @property
    def centre(self):
        return centre_of(self.mask)


def centre_of(mask):
    """x, y: the pixel of a mask that is nearest to its centre of mass."""
    rows, columns = mask.nonzero()
    distance = (rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2
    nearest = distance.argmin()
    return int(columns[nearest]), int(rows[nearest])


# ------------------------------------------------------------------------------------------------
# files


def add_arguments(parser):
    """The arguments of a command that draws composed photographs: from which files."""
    parser.add_argument("source", metavar="CUT_OUTS", help="folder of PNG files with an alpha "
                        "channel, in folders by kind")
    parser.add_argument("--kinds", metavar="FILE", help="names of the folders in several languages "
                        "(toy/stamp_kinds.json); without it each folder is a kind by its name")
    parser.add_argument("--backgrounds", nargs="+", default=[], metavar="FILE",
                        help="photographs, or folders of them; without them, smooth noise")


def read_kinds(path):
    """A file of kinds -> {folder: Kind}, names of folders that are left out.

    Its JSON is {"languages": ["en", ..], "kinds": {folder: [noun in each language]}, "held_out":
    [English nouns], "without": [names of folders]}; the last two may be absent. ValueError.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        languages = found["languages"]
        kinds = {}
        held_out = found.get("held_out", [])
        for folder, nouns in found["kinds"].items():
            names = dict(zip(languages, nouns, strict=True))
            kinds[folder] = Kind(names, names["en"] in held_out)
        unknown = set(held_out) - {kind.names["en"] for kind in kinds.values()}
        without = set(found.get("without", []))
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"{path}: not a file of kinds: {e!r}") from None
    if unknown:
        raise ValueError(f"{path}: held_out names no kind: {', '.join(sorted(unknown))}")
    return kinds, without


def kinds_of_folders(source):
    """Without a file of kinds: every folder with PNG files is a kind, by its name."""
    folders = {path.parent for path in png_files(source)}
    return {folder.relative_to(source).as_posix(): Kind({"en": folder.name}, False)
            for folder in sorted(folders)}


def png_files(source):
    """Sorted. Without cat_mirror.png where there is a cat.png: it could be held out, and cat.png
    not."""
    paths = sorted(p for p in Path(source).rglob("*") if p.suffix.lower() == ".png")
    without_suffix = {path.with_suffix("") for path in paths}

    def is_copy(path):
        original = path.with_name(path.stem.removesuffix("_mirror"))
        return path.stem.endswith("_mirror") and original in without_suffix

    return [path for path in paths if not is_copy(path)]


def read_cut_outs(source, kinds, without):
    """The cut-outs of a folder, sorted by name. One in five of a kind is held out, by a hash of its
    name; none of a kind with fewer. DataError for a file that is no visible cut-out."""
    source = Path(source)
    paths_of = {}
    for path in png_files(source):
        inside = path.relative_to(source)
        above = [folder.as_posix() for folder in inside.parents]         # the nearest first
        known = [folder for folder in above if folder in kinds]
        if known and not without & set(inside.parts):
            paths_of.setdefault(known[0], []).append(path)
    cut_outs = []
    for folder, paths in sorted(paths_of.items()):
        kind = kinds[folder]
        names = [path.relative_to(source).with_suffix("").as_posix() for path in paths]
        held_out = set(sorted(names, key=hash_of)[: len(names) // 5])
        for name, path in zip(names, paths, strict=True):
            settings = path.with_suffix(".dat")
            may_mirror = not (settings.is_file() and "nomirror" in settings.read_text())
            cut_outs.append(CutOut(name, kind.names["en"], read_sentences(path), name in held_out,
                                   may_mirror, read_pixels(path)))
    return cut_outs


def open_cut_outs(source, kinds_file=None):
    """-> the cut-outs of a folder, {folder: Kind}. ValueError if it has none."""
    kinds, without = read_kinds(kinds_file) if kinds_file else (kinds_of_folders(source), set())
    cut_outs = read_cut_outs(source, kinds, without)
    if not cut_outs:
        raise ValueError(f"{source}: no PNG files in folders of a known kind")
    opaque = [c.name for c in cut_outs if is_opaque(c.pixels)]
    if opaque:
        warn(f"{source}: {len(opaque)} cut-outs are whole rectangles, nothing in them is "
             f"transparent: {', '.join(opaque[:3])}")
    return cut_outs, kinds


def hash_of(name):
    return zlib.crc32(name.encode())


def read_pixels(path):
    """RGBA, cropped to what is visible, its longer side LARGEST pixels at most."""
    try:
        with Image.open(path) as image:
            pixels = image.convert("RGBA")
    except (OSError, SyntaxError, ValueError) as e:
        raise DataError(f"cannot decode {path}: {e}") from None
    box = pixels.getchannel("A").point(lambda a: 255 * (a >= VISIBLE)).getbbox()
    if box is None:
        raise DataError(f"{path}: nothing in it is visible")
    pixels = pixels.crop(box)
    pixels.thumbnail((LARGEST, LARGEST))
    return pixels


def is_opaque(pixels):
    return pixels.getchannel("A").getextrema() == (255, 255)


def read_sentences(path):
    """{language: sentence}: the first line of cat.txt is English, then lines such as
    de.utf8=Eine Katze. Without a first line, the words of the file's name."""
    sentences = {"en": re.sub(r"[\W_]+", " ", path.stem).strip() or "thing"}
    words = path.with_suffix(".txt")
    if words.is_file():
        first, *others = [*words.read_text("utf-8-sig", errors="replace").splitlines(), ""]
        sentences["en"] = first.strip() or sentences["en"]
        for line in others:
            found = TRANSLATION.match(line)
            if found and found[2].strip():
                sentences[found[1]] = found[2].strip()
    return sentences


def read_backgrounds(paths):
    """Files and folders -> [(held out, RGB image)]; one in five is held out, at least one of two or
    more. Without paths there are none, and scenes have grounds of smooth noise."""
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            files += [p for p in sorted(path.rglob("*")) if p.suffix.lower() in PHOTOGRAPHS]
        else:
            files.append(path)
    if paths and not files:
        raise ValueError(f"{', '.join(map(str, paths))}: no photographs ({' '.join(PHOTOGRAPHS)})")
    n_held_out = max(len(files) // 5, 1) if len(files) > 1 else 0
    held_out = set(sorted(files, key=lambda path: hash_of(path.name))[:n_held_out])
    backgrounds = []
    for path in files:
        try:
            with Image.open(path) as image:
                image.draft("RGB", (LARGEST_BACKGROUND, LARGEST_BACKGROUND))
                pixels = image.convert("RGB")
        except (OSError, SyntaxError, ValueError) as e:
            raise DataError(f"cannot decode {path}: {e}") from None
        pixels.thumbnail((LARGEST_BACKGROUND, LARGEST_BACKGROUND))
        backgrounds.append((path in held_out, pixels))
    return backgrounds


# ------------------------------------------------------------------------------------------------
# scenes

PARTS = ("train", "known", "stamps", "backgrounds", "kinds")


class Photos:
    """Scene i of a part is a function of (seed, part, i).

    part          cut-outs                     backgrounds
    train         of training                  of training
    known         of training, other scenes    of training
    stamps        held out, of known kinds     of training
    backgrounds   of training                  held out
    kinds         of the kinds held out        of training

    No other part asks for a kind that is held out: it would be learned that there never is one.
    """

    def __init__(self, cut_outs, kinds, backgrounds, part, size, seed=0, max_objects=MAX_OBJECTS):
        held_out_kinds = {kind.names["en"] for kind in kinds.values() if kind.held_out}
        self.part = part
        self.size = size
        self.seed = seed
        self.max_objects = max_objects
        self.names = {kind.names["en"]: kind.names for kind in kinds.values()
                      if part == "kinds" or not kind.held_out}
        self.by_kind = {}
        for c in cut_outs:
            if part == "kinds":
                is_of_part = c.kind in held_out_kinds
            else:
                is_of_part = c.held_out == (part == "stamps") and c.kind not in held_out_kinds
            if is_of_part:
                self.by_kind.setdefault(c.kind, []).append(c)
        self.backgrounds = []
        for held_out, pixels in backgrounds:
            if held_out == (part == "backgrounds"):
                self.backgrounds.append(pixels)

    def scene(self, i):
        """-> image (S,S,3) uint8, [Placed, ..]"""
        rng = rng_for(self.seed, "photos", self.part, i)
        canvas = self.ground(rng, self.size)
        n = int(rng.integers(1, self.max_objects + 1))
        placed = []
        for cut_out, pixels in self.objects(rng, n):
            if len(placed) == n:
                break
            layer = self.layer(pixels, *self.place(rng))
            mask = np.asarray(layer.getchannel("A")) >= VISIBLE
            left = [Placed(p.cut_out, p.mask & ~mask, p.n_pixels) for p in placed]
            hides_little = all(p.mask.sum() >= MIN_VISIBLE * p.n_pixels for p in left)
            if hides_little and mask.sum() >= (MIN_SIDE * self.size) ** 2:
                canvas = paste(canvas, layer, Shadow.draw(rng))
                placed = [*left, Placed(cut_out, mask, int(mask.sum()))]
        return np.asarray(canvas), placed

    def objects(self, rng, n):
        """Candidates for n objects, of one to three kinds: cut-outs, each with its pixels scaled,
        turned and in other light. Some will hide too much of another."""
        kinds = sorted(self.by_kind)
        kinds = [kinds[int(k)] for k in rng.permutation(len(kinds))[: int(rng.integers(1, 4))]]
        largest = self.size * (0.7 if n == 1 else 0.55 if n < 4 else 0.45)
        for _ in range(8 * n):
            of_kind = self.by_kind[kinds[int(rng.integers(len(kinds)))]]
            cut_out = of_kind[int(rng.integers(len(of_kind)))]
            yield cut_out, changed_pixels(cut_out, largest * rng.uniform(0.6, 1), rng)

    def ground(self, rng, size):
        """A random part of a background, (size,size) RGB; without backgrounds, smooth noise."""
        if not self.backgrounds:
            noise = rng.integers(40, 216, (5, 5, 3)).astype(np.uint8)
            return Image.fromarray(noise).resize((size, size), Image.BICUBIC)
        image = self.backgrounds[int(rng.integers(len(self.backgrounds)))]
        side = min(image.size) * rng.uniform(0.4, 1)
        left = rng.uniform(0, image.width - side)
        top = rng.uniform(0, image.height - side)
        box = (left, top, left + side, top + side)
        ground = image.resize((size, size), Image.BILINEAR, box, reducing_gap=2)
        if rng.random() < 0.5:
            ground = ground.transpose(Image.FLIP_LEFT_RIGHT)
        return ImageEnhance.Brightness(ground).enhance(rng.uniform(0.7, 1.2))

    def place(self, rng):
        """x, y of the middle of an object, in pixels."""
        return rng.uniform(0.12, 0.88, 2) * self.size

    def layer(self, pixels, x, y):
        """An otherwise transparent image (S,S) RGBA with the middle of the pixels at x, y."""
        layer = Image.new("RGBA", (self.size, self.size))
        layer.paste(pixels, (int(x - pixels.width / 2), int(y - pixels.height / 2)))
        return layer


def changed_pixels(cut_out, length, rng):
    """The cut-out scaled to a longer side of `length` pixels, turned, in other light; RGBA."""
    pixels = cut_out.pixels
    scale = length / max(pixels.size)
    size = [max(round(side * scale), 2) for side in pixels.size]
    pixels = pixels.resize(size, Image.BILINEAR, reducing_gap=2)
    if cut_out.may_mirror and rng.random() < 0.5:
        pixels = pixels.transpose(Image.FLIP_LEFT_RIGHT)
    pixels = pixels.rotate(rng.uniform(-20, 20), Image.BILINEAR, expand=True)
    alpha = pixels.getchannel("A")
    pixels = ImageEnhance.Brightness(pixels.convert("RGB")).enhance(rng.uniform(0.7, 1.25))
    pixels = ImageEnhance.Color(pixels).enhance(rng.uniform(0.7, 1.3))
    pixels.putalpha(alpha)
    return pixels


class Shadow(NamedTuple):
    shift: tuple                     # pixels to the right and down
    strength: float                  # 1: black

    @classmethod
    def draw(cls, rng):
        return cls((int(rng.integers(-4, 5)), int(rng.integers(1, 6))), rng.uniform(0.1, 0.6))


def paste(canvas, layer, shadow):
    """The layer over the canvas, and below it its blurred shadow."""
    alpha = layer.getchannel("A")
    dark = alpha.filter(ImageFilter.BoxBlur(2)).point(lambda a: int(a * shadow.strength))
    canvas = canvas.copy()
    canvas.paste((0, 0, 0), shadow.shift, dark)
    canvas.paste(layer.convert("RGB"), (0, 0), alpha)
    return canvas
