"""Inputs of tests/fuzz.py that are no records: flags of train.py, answers, turned images.

Each function makes one case from a random.Random, checks what must hold of it, and returns how it
ended; an exception is a find.
"""

import math
from types import SimpleNamespace

import numpy as np
from PIL import Image

from evaluation.scoring import predicted_places
from records.image import EXIF_ORIENTATION, read_image
from text.points import parse_points
from training.config import Config, UserError, field_values, parse
from training.resume import Checkpoint
from training.setup import open_model

FIELDS = field_values(Config())
VALUES = ("-1", "0", "1", "2", "0.5", "-0.5", "nan", "inf", "-inf", "1e308", "-1e308", "1e-320",
          str(2**63), str(2**64), "-" + "9" * 30, "9" * 400, "", "x", "true", "1,2", "-1,-1", ",")


def numbers_of(value):
    each = value if isinstance(value, tuple) else (value,)
    return [part for part in each if isinstance(part, int | float)]


def flags(rng, folder):
    """One field of the recipe with an odd value: refused in a sentence, or no harm."""
    name, text = rng.choice(sorted(FIELDS)), rng.choice(VALUES)
    try:
        args, config = parse(["--stage", "1", "--tiny", "--device", "cpu", f"--{name}={text}"])
        if name.startswith("model."):
            open_model(args, config, Checkpoint())
    except UserError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert "\n" not in refusal, refusal
    if refusal:
        return "refused"
    values = field_values(config)
    wrong = [key for key in values for n in numbers_of(values[key]) if not 0 <= n < math.inf]
    assert not wrong, f"--{name}={text} is taken: {wrong}"
    return "sound"


def random_tag(rng):
    """Text like that of points, seldom as it should be."""
    frames = ("1", "2", "0.5", "12.0", "9" * 309, "9" * 4000, "-1", "1e9", ".", "")
    groups = []
    for _ in range(rng.randrange(1, 4)):
        triples = [f"{rng.choice((1, 1, 2, '9' * 50, 'x'))} {rng.randrange(1200):03d} "
                   f"{rng.randrange(1200):03d}" for _ in range(rng.randrange(4))]
        groups.append(" ".join([rng.choice(frames), *triples]))
    name = rng.choice(("points", "tracks"))
    return f'<{name} coords="{rng.choice((";", chr(9))).join(groups)}">cat</{name}>'


def answer(rng, folder):
    """Tags of a model's answer: each is read by itself, and places are finite numbers."""
    tags = [random_tag(rng) for _ in range(rng.randrange(1, 4))]
    alone = [point for tag in tags for point in parse_points(tag, 100, 50)]
    assert parse_points(" and ".join(tags), 100, 50) == alone, tags
    record = rng.choice(({"image": "a"}, {"images": ["a", "b"]}, {"video": "a"}))
    info = SimpleNamespace(sizes=[(100, 50)] * len(record.get("images", "a")))
    places = predicted_places(SimpleNamespace(record=record, info=info), "".join(tags))
    assert len(places) == len(alone)
    for place in places:
        assert math.isfinite(place.frame), tags
        assert 0 <= place.x <= 100, tags
        assert 0 <= place.y <= 50, tags
    return "sound" if places else "no points"


TURN = Image.Transpose
TURNS = (None, TURN.FLIP_LEFT_RIGHT, TURN.ROTATE_180, TURN.FLIP_TOP_BOTTOM, TURN.TRANSPOSE,
         TURN.ROTATE_270, TURN.TRANSVERSE, TURN.ROTATE_90)          # of EXIF orientations 1 to 8
MODES = {"RGB": "png", "L": "png", "I;16": "png", "RGBA": "webp", "P": "png", "CMYK": "tif"}


def orientation(rng, folder):
    """An image of any mode with an EXIF orientation is read as it is displayed."""
    mode, tag = rng.choice(sorted(MODES)), rng.randrange(1, 9)
    levels = np.zeros((rng.randrange(8, 30), rng.randrange(8, 30)), np.uint8)
    levels[: len(levels) // 2, : levels.shape[1] // 2] = 255             # one bright quarter
    stored = Image.fromarray(levels)
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = tag
    path = folder / f"turned.{MODES[mode]}"
    options = {"lossless": True} if path.suffix == ".webp" else {}
    as_mode = (Image.fromarray(levels.astype(np.uint16) * 257) if mode == "I;16"
               else stored.convert("RGB").convert(mode))
    as_mode.save(path, exif=exif, **options)
    turn = TURNS[tag - 1]
    expected = np.array((stored if turn is None else stored.transpose(turn)).convert("RGB"))
    read = read_image(path)
    assert read.shape == expected.shape, (mode, tag)
    assert np.abs(read.astype(int) - expected).max() < 9, (mode, tag)
    return mode


CHECKS = {"flag": flags, "answer": answer, "orientation": orientation}
