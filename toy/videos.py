"""The toy world over time: films of moving shapes, and several pictures at once (stages 2 and 3 of --tiny).

Film i of a split is a function of (seed, split, i), as pictures are; what happens in it is known at every instant in closed form, so a
film can be looked at whenever one likes. Half a second is a step. At a step, centres lie on the lattice of coordinates.

    step      0     1     2     3     4     5
    object 1  .     red   red   red   blue  blue      comes at 0.5, becomes blue at 2.0
    object 2  on    behind the pole   on    .         leaves at 2.0; not to be seen for a second
"""

import json
import zlib
from functools import lru_cache

import numpy as np

from records import mixture as mix
from toy import world as tiny
from toy.world import COLOURS, LATTICE, SEEN, SHAPES, SIZE

STEP = 0.5                           # seconds, as far apart as frames are at most (data.fps)
LOW, HIGH = 20, 80                   # pixels: where centres may be
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "nowhere": (0, 0)}
RADII = (17, 23), (15, 20), (13, 18), (12, 15), (12, 14)      # of one object, two, ..: in a crowd they are smaller
DARK = 12                            # grey value of the pole
HALF = 7                             # of its width, in pixels
FEW, MANY = 600, 1800                # films of a source with one object alone, and until there are as many as in those held out


def bounced(v):
    """A coordinate that goes on for ever -> one between LOW and HIGH, thrown back at both."""
    span = HIGH - LOW
    return LOW + span - abs((v - LOW) % (2 * span) - span)


def at(o, t):
    """An object at a time in seconds -> {"colour", "shape", "x", "y", "r", "light"}, or None where it is not there."""
    k = t / STEP
    if not o["come"] <= k < o["gone"]:
        return None
    (dx, dy), steps = WAYS[o["way"]], (k - o["come"]) * o["speed"] * LATTICE
    colour = o["becomes"] if o["becomes"] and k >= o["change"] else o["colour"]
    return {**o, "colour": colour, "x": bounced(o["x"] + dx * steps), "y": bounced(o["y"] + dy * steps)}


def draw_film(rng, steps, most):
    """-> dict of plain numbers and words, as tiny.draw_scene: what comes, moves, changes and leaves within so many steps."""
    n = 1 + int(rng.integers(most))
    kinds = [SEEN[int(k)] for k in rng.permutation(len(SEEN))[:n]]
    if n > 1 and rng.random() < 0.3:
        kinds[1] = kinds[0]                                               # two of a kind
    actors = []
    for colour, shape in kinds:
        stay = int(rng.integers(min(3, steps), min(steps, 8) + 1))       # steps it is there: brief ones are missed by few frames
        come = int(rng.integers(0, steps - stay + 1)) if rng.random() < 0.7 else 0
        way = list(WAYS)[int(rng.integers(5))]
        others = [c for c in COLOURS if (c, shape) in SEEN and (c, shape) not in kinds]         # or a name would mean two things
        change = stay > 3 and others and rng.random() < 0.35
        actors.append({"colour": colour, "shape": shape, "r": int(rng.integers(*RADII[n - 1])),
                       "light": int(rng.integers(-25, 26)),
                       "x": LATTICE * int(rng.integers(LOW // LATTICE, HIGH // LATTICE + 1)),
                       "y": LATTICE * int(rng.integers(LOW // LATTICE, HIGH // LATTICE + 1)),
                       "way": way, "speed": int(rng.integers(2, 4)), "come": come, "gone": come + stay,
                       "becomes": others[int(rng.integers(len(others)))] if change else "",
                       "change": come + 1 + int(rng.integers(1, stay - 1)) if change else 0})
    actors.sort(key=lambda o: o["come"])
    return {"objects": actors, "steps": steps, "pole": int(rng.integers(30, 71)) if rng.random() < 0.4 else 0,
            "slope": [int(v) for v in rng.integers(-40, 41, 2)], "texture": int(rng.integers(4)),
            "period": int(rng.integers(3, 9)), "noise": int(rng.integers(1 << 30))}


def visible(film, t):
    """(n,SIZE,SIZE) bool: the pixels of each object that nothing hides at a time; the pole is before all, later objects before earlier."""
    masks, free = np.zeros((len(film["objects"]), SIZE, SIZE), bool), np.ones((SIZE, SIZE), bool)
    if film["pole"]:
        free[:, film["pole"] - HALF : film["pole"] + HALF] = False
    for k in reversed(range(len(masks))):
        if now := at(film["objects"][k], t):
            mask = tiny.mask_of(now)
            masks[k] = mask & free
            free &= ~mask
            if 2 * masks[k].sum() < mask.sum():          # more than half of it is hidden: it cannot be seen
                masks[k] = False
    return masks


def shown(film, times):
    """A film at each of these seconds -> (SIZE,SIZE,3) uint8, one after the other. As tiny.render draws a scene, but that ground and grain
    are drawn once, and objects where they are: films have many frames."""
    ground = tiny.render({**film, "objects": []})
    grain = np.random.default_rng([film["noise"], 1]).normal(0, 6, (SIZE, SIZE))
    for t in times:
        image = ground.copy()
        for o in filter(None, (at(o, t) for o in film["objects"])):
            (top, bottom), (left, right) = ((max(int(v - o["r"]) - 1, 0), int(v + o["r"]) + 2) for v in (o["y"], o["x"]))
            box = slice(top, bottom), slice(left, right)
            light = o["light"] + 14 * (tiny.X[box] - o["x"] + tiny.Y[box] - o["y"]) / o["r"] + grain[box]
            paint = (light[..., None] + np.array(COLOURS[o["colour"]], np.float32)).clip(0, 255).astype(np.uint8)
            np.copyto(image[box], paint, where=tiny.mask_of(o, box)[..., None])
        if film["pole"]:
            image[:, film["pole"] - HALF : film["pole"] + HALF] = DARK
        yield image


def whole(film, k, t):
    """Is nearly nothing of an object hidden at a time?"""
    return visible(film, t)[k].sum() > 0.9 * tiny.mask_of(at(film["objects"][k], t)).sum()


def kind(o):
    """What an object is called: by the colour it comes with."""
    return f"{o['colour']} {o['shape']}"


class Films:
    """A source without files (see tiny.World): films of `steps` half seconds, from the first to the last of that range.

    What is asked: where each kind of object comes first, its path (asks='tracks': in films of their own, which are looked at on the grid
    of the tracks), how many there are, what happens, in one word or several.
    """

    def __init__(self, split, seed=0, asks="all", steps=(4, 6), most=3, lessons=False):
        self.split, self.seed, self.asks, self.steps, self.most, self.lessons = split, seed, asks, steps, most, lessons
        self.name, self.ordered = f"films-{split}-{asks}-{steps[1]}", True
        self.fingerprint = f"{self.name} seed {seed} steps {steps} most {most} lessons {lessons and (FEW, MANY)} version {tiny.VERSION}"

    def __len__(self):
        return 1 << 40

    @lru_cache(maxsize=1024)                             # noqa: B019  a world lives as long as its run
    def film(self, i):
        most = 1 if self.lessons and i < FEW else min(self.most, 2) if self.lessons and i < MANY else self.most
        for attempt in range(1000):
            rng = mix.rng_for(self.seed, "film", self.split, self.asks, self.steps[1], i, attempt)
            film = draw_film(rng, int(rng.integers(self.steps[0], self.steps[1] + 1)), most)
            if (zlib.crc32(json.dumps(film).encode()) % 8 == 0) != (self.split != "train"):
                continue
            sights = np.array([visible(film, step * STEP).any((1, 2)) for step in range(film["steps"])])         # (steps, n)
            for o, seen in zip(film["objects"], sights.T, strict=True):
                o["seen"] = np.flatnonzero(seen).tolist()
            # what is asked can be answered: every object is there as a whole when it comes, and seen when it changes and before it goes
            fair = all(len(o["seen"]) > 1 and o["gone"] - 1 in o["seen"] and (not o["becomes"] or o["change"] in o["seen"])
                       and whole(film, k, o["come"] * STEP) for k, o in enumerate(film["objects"]))
            if fair:
                return film
        raise AssertionError(f"no film for {self.name} {i}")

    def __getitem__(self, i):
        film, name = self.film(i), f"{self.name}-{i}"
        rng = mix.rng_for(self.seed, "questions", self.split, self.asks, self.steps[1], i)
        if self.asks == "tracks":
            asked = sorted({kind(o) for o in film["objects"]})
            asked = [asked[int(k)] for k in rng.permutation(len(asked))[:2]]
            annotations = [self.track(film, label) for label in asked + ["any shape"] * (len(film["objects"]) < 4)]
            annotations += deeds(film["objects"])
        else:
            annotations = self.questions(film, rng)
        said = {}
        if names := [a.pop("says") for a in annotations if "says" in a]:
            start = float(rng.integers(film["steps"])) * STEP
            said = {"subtitles": [{"start": start, "end": start + STEP, "text": names[0]}]}
        return {"id": name, "where": name, "source": self, "index": i, "annotations": annotations, **said,
                "video": {"path": f"{name}.mp4", "width": SIZE, "height": SIZE}}

    def questions(self, film, rng):
        objects, steps = film["objects"], film["steps"]
        kinds = sorted({kind(o) for o in objects})
        become = {f"{o['becomes']} {o['shape']}" for o in objects if o["becomes"]}
        absent = [f"{c} {s}" for c, s in SEEN if f"{c} {s}" not in {*kinds, *become}]
        absent = [absent[int(k)] for k in rng.permutation(len(absent))]
        out = [self.point(film, label) for label in kinds[:3] + [("any shape", absent[0])[int(rng.random() < 0.3)]]]
        out.append({"type": "count", "label": "any shape", "count": len(objects)})
        if rng.random() < 0.5:
            out.append({"type": "caption", "text": story(film)})
        alone = only_ones(objects)
        out += deeds(objects)
        qa = []
        if len(objects) == 1 or objects[0]["come"] < objects[1]["come"]:
            qa.append(("which comes first", kind(objects[0])))
        late = [o for o in alone if o["come"] and [p["come"] for p in objects].count(o["come"]) == 1]
        qa += [(f"which comes at {o['come'] * STEP:.1f}", kind(o)) for o in late]
        out += [{"type": "qa", "question": q, "answer": a} for q, a in qa]
        if straight := [o for o in alone if went_straight(o)]:            # the subtitle alone says which is meant
            named = straight[int(rng.integers(len(straight)))]
            out.append({**way_of(named, "the named"), "says": kind(named)})
        there = [o for o in objects if o["gone"] >= steps]
        gone = [kind(o) for o in objects if o["gone"] < steps and kind(o) not in {kind(p) for p in there} and not o["becomes"]]
        if len(there) == 1 and not there[0]["becomes"]:
            wrong = list(dict.fromkeys([*gone, *absent]))[:2]
            options = [kind(there[0]), *wrong]
            order = [int(k) for k in rng.permutation(3)]
            out.append({"type": "qa", "style": "video_multiple_choice", "question": "which there at the end", "letters": False,
                        "options": [options[k] for k in order], "answer_idx": order.index(0)})
        return out

    def point(self, film, label):
        """Where and when each of them comes."""
        hits = [k for k, o in enumerate(film["objects"]) if label in ("any shape", kind(o))]
        points = [{"t": o["come"] * STEP, "x": now["x"], "y": now["y"]}
                  for o in (film["objects"][k] for k in hits) for now in [at(o, o["come"] * STEP)]]
        return {"type": "point", "label": label, "coords": "pixel", "size": [SIZE, SIZE], "mode": "point", "points": points,
                "meta": {"objects": hits}}

    def track(self, film, label):
        hits = [k for k, o in enumerate(film["objects"]) if label in ("any shape", kind(o))]
        points = [{"t": step * STEP, "id": k, "x": now["x"], "y": now["y"]} for k in hits for step in film["objects"][k]["seen"]
                  for now in [at(film["objects"][k], step * STEP)]]
        return {"type": "track", "label": label, "fps": 2, "coords": "pixel", "size": [SIZE, SIZE], "points": points,
                "meta": {"objects": hits}}

    def duration(self, i):
        """Seconds: films with tracks end half a second after their last step, since a grid leaves the very end out (vision.track_times)."""
        return (self.film(i)["steps"] - (self.asks != "tracks")) * STEP

    def video_size(self, record):
        return SIZE, SIZE, self.duration(record["index"]), STEP / 2

    def video_of(self, record):
        return record["video"]["path"], 0.0, self.duration(record["index"])

    def steps_of(self, record):
        """The seconds of its steps."""
        return [step * STEP for step in range(self.film(record["index"])["steps"])]

    def frames(self, record, times):
        return shown(self.film(record["index"]), times)

    def masks(self, record, annotation):
        """{"times": (t,), "masks": (n,t,SIZE,SIZE) bool}: of each point's, or each track's, object at every step."""
        film = self.film(record["index"])
        times = np.array(self.steps_of(record))
        masks = np.array([visible(film, t) for t in times])[:, annotation["meta"]["objects"]]
        return {"times": times, "masks": masks.swapaxes(0, 1)}


def only_ones(objects):
    """Those that share their name with no other."""
    return [o for o in objects if [kind(p) for p in objects].count(kind(o)) == 1]


def deeds(objects):
    """Questions about what single objects do, with their answers."""
    alone = only_ones(objects)
    changes = [{"type": "qa", "question": f"{kind(o)} becomes", "answer": o["becomes"]} for o in alone if o["becomes"]]
    return changes + [way_of(o, kind(o)) for o in alone if went_straight(o)]


def way_of(o, name):
    """Which way it moves. Asked for the word alone, a model of this size learns nothing in the time there is; it says first from where to
    where, and the answer follows from that (RESULTS.md)."""
    places = [at(o, step * STEP) for step in (o["come"], o["gone"] - 1)]
    ends = [" ".join(f"{round(10 * now[axis]):03d}" for axis in "xy") for now in places]
    return {"type": "qa", "question": f"{name} moves", "explanation": f"from {ends[0]} to {ends[1]}", "answer": o["way"]}


def went_straight(o):
    """Does it move in one direction all the time, and for long enough to tell?"""
    (dx, dy), far = WAYS[o["way"]], (o["gone"] - 1 - o["come"]) * o["speed"] * LATTICE
    return all(LOW <= v + d * far <= HIGH for v, d in ((o["x"], dx), (o["y"], dy))) and len(o["seen"]) > 2


def story(film):
    """What happens, in the order of time: '0.5 red circle comes, 2.0 red circle becomes blue, 3.0 red circle leaves'."""
    told = []
    for o in film["objects"]:
        told.append((o["come"], f"{kind(o)} comes"))
        if o["becomes"]:
            told.append((o["change"], f"{kind(o)} becomes {o['becomes']}"))
        if o["gone"] < film["steps"]:
            told.append((o["gone"], f"{kind(o)} leaves"))
    return ", ".join(f"{step * STEP:.1f} {what}" for step, what in sorted(told))


class Series:
    """Two or three pictures at once, of at most three objects each: points on all of them, counts, and which of them shows something."""

    def __init__(self, split, seed=0):
        self.world, self.split, self.seed = tiny.World(split, seed, asks="series", most=3), split, seed
        self.name, self.ordered = f"series-{split}", True
        self.fingerprint = f"{self.name} seed {seed} version {tiny.VERSION}"

    def __len__(self):
        return 1 << 38

    def scenes(self, i):
        return [self.world.scene(3 * i + k)["objects"] for k in range(2 + i % 2)]

    def __getitem__(self, i):
        name, scenes, rng = f"{self.name}-{i}", self.scenes(i), mix.rng_for(self.seed, "series", self.split, i)
        where = {}
        for k, objects in enumerate(scenes):
            for o in objects:
                where.setdefault(kind(o), set()).add(k)
        labels = [label for label in sorted(where) if sum(kind(o) == label for objects in scenes for o in objects) < 5]
        annotations = [self.point(scenes, labels[int(k)]) for k in rng.permutation(len(labels))[:2]]
        only = [label for label in labels if len(where[label]) == 1]
        annotations += [{"type": "qa", "question": f"which image shows {label}", "answer": str(min(where[label]) + 1)}
                        for label in (only[int(k)] for k in rng.permutation(len(only))[:2])]
        shape = SHAPES[int(rng.integers(4))]
        count = sum(o["shape"] == shape for objects in scenes for o in objects)
        annotations.append({"type": "count", "label": f"any {shape}", "count": count})
        return {"id": name, "where": name, "source": self, "index": i, "annotations": annotations,
                "images": [{"path": f"{name}-{k}.png", "width": SIZE, "height": SIZE} for k in range(len(scenes))]}

    def point(self, scenes, label):
        hits = [(k, j) for k, objects in enumerate(scenes) for j, o in enumerate(objects) if kind(o) == label]
        points = [{"image": k, "x": scenes[k][j]["x"], "y": scenes[k][j]["y"]} for k, j in hits]
        return {"type": "point", "label": label, "coords": "pixel", "size": [SIZE, SIZE], "mode": "point",
                "points": points, "meta": {"objects": hits}}

    def image_sizes(self, record):
        return [(SIZE, SIZE)] * len(record["images"])

    def images(self, record, only=None):
        shown = range(len(record["images"])) if only is None else only
        return [tiny.render(self.world.scene(3 * record["index"] + int(k))) for k in shown]

    def masks(self, record, annotation):
        scenes = self.scenes(record["index"])
        return np.array([tiny.mask_of(scenes[k][j]) for k, j in annotation["meta"]["objects"]]).reshape(-1, SIZE, SIZE)


# short ones, which stage 2 sees whole, and long ones, of which it sees every third frame
KINDS = {"films": lambda split, seed=0, lessons=False: Films(split, seed, lessons=lessons),
         "tracks": lambda split, seed=0, lessons=False: Films(split, seed, "tracks", lessons=lessons),
         "long-films": lambda split, seed=0: Films(split, seed, steps=(7, 18), most=5),
         "long-tracks": lambda split, seed=0: Films(split, seed, "tracks", steps=(7, 18), most=4)}


def mixture(seed, stage, lessons=True, moving=None):
    """Sources and rates of the toy's stages 2 and 3: groups as in stages/stage2.py, whose members share by the square root of sizes that
    the toy, which has no end, only pretends to have. Stage 3 has long films besides, and more films for a picture; moving: their share."""
    lessons = lessons and stage == 2
    films = [(KINDS["films"]("train", seed, lessons), 30_000), (KINDS["tracks"]("train", seed, lessons), 10_000)]
    if stage == 3:
        films += [(KINDS["long-films"]("train", seed), 60_000), (KINDS["long-tracks"]("train", seed), 20_000)]
    stills = [(tiny.World("train", seed), 5_000), (Series("train", seed), 9_000), (tiny.Sums(seed), 400)]
    moving = moving or {2: 0.7, 3: 0.85}[stage]
    groups = [(moving, films), (round(1 - moving, 2), stills)]
    rates = mix.group_rates([(rate, [mix.sqrt_size(size) for _, size in members]) for rate, members in groups])
    return [source for _, members in groups for source, _ in members], [r for group in rates for r in group]
