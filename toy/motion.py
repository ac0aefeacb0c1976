"""Generates random videos of moving shapes, and renders them at any time.

The positions of all objects are computed by a formula. A step is half a second. At every step, the
centres of objects lie on the lattice of coordinates.

    step      0     1     2     3     4     5
    object 1  .     red   red   red   blue  blue      comes at 0.5 s, becomes blue at 2.0 s
    object 2  on    behind the pole   on    .         leaves at 2.0 s, is hidden for 1 s

A video is a dict like a scene (shapes.py). It also contains the number of `steps` and the x of a
vertical `pole` in front of all objects (0: no pole). Every object also has these fields:

    way, speed         the direction, and lattice points per step; reflected at LOW and HIGH
    come, gone         the first step with the object, and the first step after it has left
    becomes, change    the second colour ("": none), and the first step with this colour
"""

import numpy as np

from toy.shapes import KINDS, LATTICE, SIZE, draw_ground, mask_of, paint, render

STEP = 0.5  # seconds between two frames, as in data.fps
LOW, HIGH = 20, 80  # pixels: range of the centres
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "nowhere": (0, 0)}
# (minimum, maximum + 1) of the radius in a video with 1, 2, .. 5 objects
RADII = (17, 23), (15, 20), (13, 18), (12, 15), (12, 14)
POLE_GREY = 12
POLE_HALF_WIDTH = 7  # pixels


def reflect(v):
    """A coordinate without limits -> the coordinate after reflection at LOW and HIGH."""
    span = HIGH - LOW
    return LOW + span - abs((v - LOW) % (2 * span) - span)


def object_at(o, time):
    """An object with its colour and position at a time in seconds, or None if it is absent."""
    step = time / STEP
    if not o["come"] <= step < o["gone"]:
        return None
    dx, dy = WAYS[o["way"]]
    distance = (step - o["come"]) * o["speed"] * LATTICE
    colour = o["becomes"] if o["becomes"] and step >= o["change"] else o["colour"]
    x = reflect(o["x"] + dx * distance)
    y = reflect(o["y"] + dy * distance)
    return {**o, "colour": colour, "x": x, "y": y}


def draw_video(rng, steps, max_objects):
    n = 1 + int(rng.integers(max_objects))
    kinds = [KINDS.seen[int(k)] for k in rng.permutation(len(KINDS.seen))[:n]]
    if n > 1 and rng.random() < 0.3:
        kinds[1] = kinds[0]  # two objects of the same kind
    objects = [draw_object(rng, kind, kinds, steps) for kind in kinds]
    objects.sort(key=lambda o: o["come"])
    pole = int(rng.integers(30, 71)) if rng.random() < 0.4 else 0
    return {"objects": objects, "steps": steps, "pole": pole, **draw_ground(rng)}


def draw_object(rng, kind, kinds, steps):
    colour, shape = kind
    # if the model gets few frames, it would miss an object that stays for fewer steps
    stay = int(rng.integers(min(3, steps), min(steps, 8) + 1))
    come = int(rng.integers(0, steps - stay + 1)) if rng.random() < 0.7 else 0
    way = list(WAYS)[int(rng.integers(5))]
    # after a change of colour, two kinds must not be the same, because names would be ambiguous
    others = [c for c in KINDS.colours if (c, shape) in KINDS.seen and (c, shape) not in kinds]
    changes = stay > 3 and others and rng.random() < 0.35
    r = int(rng.integers(*RADII[len(kinds) - 1]))
    light = int(rng.integers(-25, 26))
    x = LATTICE * int(rng.integers(LOW // LATTICE, HIGH // LATTICE + 1))
    y = LATTICE * int(rng.integers(LOW // LATTICE, HIGH // LATTICE + 1))
    speed = int(rng.integers(2, 4))
    return {
        "colour": colour, "shape": shape, "r": r, "light": light, "x": x, "y": y,
        "way": way, "speed": speed, "come": come, "gone": come + stay,
        "becomes": others[int(rng.integers(len(others)))] if changes else "",
        "change": come + 1 + int(rng.integers(1, stay - 1)) if changes else 0,
    }


def visible_masks(video, time):
    """(n,SIZE,SIZE) bool: the visible pixels of each object at a time in seconds.

    The pole hides all objects, and later objects hide earlier ones. If more than half of an object
    is hidden, it counts as not visible, and its mask is empty.
    """
    masks = np.zeros((len(video["objects"]), SIZE, SIZE), bool)
    free = np.ones((SIZE, SIZE), bool)
    if video["pole"]:
        free[:, find_pole(video)] = False
    for k in reversed(range(len(masks))):
        o = object_at(video["objects"][k], time)
        if o:
            mask = mask_of(o)
            masks[k] = mask & free
            free &= ~mask
            if 2 * masks[k].sum() < mask.sum():
                masks[k] = False
    return masks


def find_pole(video):
    return slice(video["pole"] - POLE_HALF_WIDTH, video["pole"] + POLE_HALF_WIDTH)


def render_frames(video, times):
    """Yields a frame (SIZE,SIZE,3) uint8 for each time in seconds. Frames look like scenes of
    shapes.render, but background and noise are computed only once, because this is faster."""
    ground = render({**video, "objects": []})
    noise = np.random.default_rng([video["noise"], 1]).normal(0, 6, (SIZE, SIZE))
    for time in times:
        image = ground.copy()
        for o in video["objects"]:
            if now := object_at(o, time):
                paint(image, now, noise)
        if video["pole"]:
            image[:, find_pole(video)] = POLE_GREY
        yield image
