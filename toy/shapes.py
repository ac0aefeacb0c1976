"""Generates and renders random scenes of coloured shapes on textured backgrounds.

A scene is a dict of numbers and strings, so that its JSON can be hashed:

    objects    [{"colour", "shape", "x", "y", "r", "light"}, ..], centre and radius in pixels
    slope      change of the background's brightness from left to right and from top to bottom
    texture    0 plain, 1 vertical stripes, 2 diagonal stripes, 3 checks
    period     period of the texture in pixels
    noise      random seed of everything else
"""

from typing import NamedTuple

import numpy as np

VERSION = 3  # version of the drawing, in the fingerprints of the sources

SIZE = 100  # pixels; one crop of the toy's ViT has 10 x 10 patches of 10 x 10 pixels
LATTICE = 5  # pixels; centres lie on multiples of it, so that few words express all coordinates
COLOURS = {
    "red": (235, 80, 70),
    "green": (70, 215, 90),
    "blue": (80, 130, 255),
    "yellow": (250, 225, 60),
    "purple": (200, 90, 235),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "cross")


class Kinds(NamedTuple):
    """Combinations of colour and shape. Those in `unseen` occur in the split "unseen" only."""
    colours: tuple
    shapes: tuple
    all: tuple
    seen: tuple
    unseen: tuple


# Scenes are sampled by index into these tuples. A different order would change every scene.
UNSEEN = (("blue", "square"), ("green", "triangle"), ("red", "cross"), ("yellow", "circle"))
ALL = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
KINDS = Kinds(tuple(COLOURS), SHAPES, ALL, tuple(k for k in ALL if k not in UNSEEN), UNSEEN)
# (minimum, maximum) of the radius in a scene with 0, 1, .. 6 objects
RADII = ((14, 22), (14, 22), (14, 21), (13, 19), (12, 17), (11, 16), (10, 15))

# coordinates of the centres of all pixels
Y, X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32) + 0.5


def draw_scene(rng, split, min_objects=0, max_objects=6, extra_radius=0):
    """Generates a random scene. Every radius is extra_radius pixels larger than in RADII."""
    n = int(rng.integers(min_objects, max_objects + 1))
    smallest, largest = RADII[n]
    objects = []
    for _ in range(300):  # attempts, because objects must not overlap
        if len(objects) == n:
            break
        unseen = split == "unseen" and (not objects or rng.random() < 0.5)
        possible = KINDS.unseen if unseen else KINDS.seen
        colour, shape = possible[int(rng.integers(len(possible)))]
        r = int(rng.integers(smallest, largest + 1)) + extra_radius
        x, y = rng.integers(-(-r // LATTICE), (SIZE - r) // LATTICE + 1, 2).tolist()
        x *= LATTICE
        y *= LATTICE
        if all(are_apart(x, y, r, other) for other in objects):
            light = int(rng.integers(-25, 26))
            objects.append(
                {"colour": colour, "shape": shape, "x": x, "y": y, "r": r, "light": light})
    return {"objects": objects, **draw_ground(rng)}


def are_apart(x, y, r, other):
    distance2 = (x - other["x"]) ** 2 + (y - other["y"]) ** 2
    return distance2 > (1.13 * (r + other["r"]) + 2) ** 2


def draw_ground(rng):
    return {
        "slope": rng.integers(-40, 41, 2).tolist(),
        "texture": int(rng.integers(4)),
        "period": int(rng.integers(3, 9)),
        "noise": int(rng.integers(1 << 30)),
    }


def mask_of(o, box=...):
    """The pixels of an object, (SIZE,SIZE) bool. box: two slices, to compute only this part."""
    x = abs(X[box] - o["x"])
    y = Y[box] - o["y"]
    r = o["r"]
    if o["shape"] == "circle":
        return x * x + y * y <= r * r
    if o["shape"] == "square":
        return np.maximum(x, abs(y)) <= 0.82 * r
    if o["shape"] == "triangle":
        return (y <= 0.7 * r) & (y >= 2 * x - r)
    return (np.minimum(x, abs(y)) <= 0.36 * r) & (np.maximum(x, abs(y)) <= r)


def render(scene):
    """Renders a scene -> (SIZE,SIZE,3) uint8.

    The background has a shade, and stripes or checks in random colours. Objects have a shade too,
    so colour alone does not separate an object from the background. But the mean of an object's
    three channels is above the mean of the background, and all backgrounds have the same mean. A
    ViT that starts from random weights needs both properties (docs/log.md).
    """
    rng = np.random.default_rng(scene["noise"])
    tints = rng.standard_normal((2, 3, 1, 1), np.float32)
    slope_x, slope_y = scene["slope"]
    slope = (slope_x * (X - SIZE / 2) + slope_y * (Y - SIZE / 2)) / SIZE
    noise = 6 * rng.standard_normal((SIZE, SIZE), np.float32)
    texture = 24 * tints[1] * draw_texture(scene)
    light = slope * (1 + 0.3 * tints[0]) + texture + noise  # (3,SIZE,SIZE)
    light += 75
    image = np.ascontiguousarray(light.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
    for o in scene["objects"]:
        paint(image, o, noise)
    return image


def paint(image, o, noise):
    """Draws an object into image (SIZE,SIZE,3) uint8. Only the box around it is computed."""
    x, y, r = o["x"], o["y"], o["r"]
    rows = slice(max(int(y - r) - 1, 0), int(y + r) + 2)
    columns = slice(max(int(x - r) - 1, 0), int(x + r) + 2)
    box = rows, columns
    shade = o["light"] + 14 * (X[box] - x + Y[box] - y) / r + noise[box]
    colour = np.array(COLOURS[o["colour"]], np.float32)
    pixels = (colour + shade[..., None]).clip(0, 255).astype(np.uint8)
    np.copyto(image[box], pixels, where=mask_of(o, box)[..., None])


def draw_texture(scene):
    """(SIZE,SIZE) with values -1, 0 and 1. The texture 0 is 0 at every pixel."""
    frequency = np.float32(np.pi / scene["period"])
    if scene["texture"] == 0:
        return np.zeros_like(X)
    if scene["texture"] == 1:
        return np.sign(np.sin(X * frequency))
    if scene["texture"] == 2:
        return np.sign(np.sin((X + Y) * frequency))
    return np.sign(np.sin(X * frequency) * np.sin(Y * frequency))


def name_of(o):
    """The name of an object, such as "red circle"."""
    return f"{o['colour']} {o['shape']}"
