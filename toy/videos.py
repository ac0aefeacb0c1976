"""The toy's data source of videos, with questions about them (stages 2 and 3 of --tiny).

Video i of a split depends only on (seed, split, i). The frames contain the answers to all
questions: see `is_fair`.
"""

from functools import lru_cache

import numpy as np

from records.mixture import rng_for
from toy.images import find_named, is_held_out, make_record, point_annotation
from toy.motion import (
    HIGH,
    LOW,
    STEP,
    WAYS,
    draw_video,
    object_at,
    render_frames,
    visible_masks,
)
from toy.shapes import KINDS, LATTICE, SIZE, VERSION, mask_of, name_of

# Videos before the first number have one object. Those before the second have at most two.
CURRICULUM = (600, 1800)


class MovingShapes:
    """Videos with steps[0] to steps[1] steps of half a second.

    questions="all": at which point and time each kind of object comes, the number of objects, what
    happens, and which object does it. questions="tracks": the paths of objects. Tracks have their
    own videos, because the frames for a track lie on a grid of times.
    """

    def __init__(self, split, seed=0, questions="all", steps=(4, 6), max_objects=3,
                 curriculum=False):
        self.split = split
        self.seed = seed
        self.questions = questions
        self.steps = steps
        self.max_objects = max_objects
        self.curriculum = curriculum
        # The name is part of record ids, which seed random choices: a new name changes all examples
        self.name = f"films-{split}-{questions}-{steps[1]}"
        self.ordered = True  # endless, so it cannot be shuffled
        self.fingerprint = (f"{self.name} seed {seed} steps {steps} most {max_objects} "
                            f"lessons {curriculum and CURRICULUM} version {VERSION}")

    def __len__(self):
        return 1 << 40

    def most_objects(self, i):
        if self.curriculum and i < CURRICULUM[0]:
            return 1
        if self.curriculum and i < CURRICULUM[1]:
            return min(self.max_objects, 2)
        return self.max_objects

    @lru_cache(maxsize=1024)  # noqa: B019 - a source lives as long as its run
    def video(self, i):
        """-> a video of motion.py. `seen` of each object contains the steps where it is visible."""
        key = ("film", self.split, self.questions, self.steps[1], i)
        for attempt in range(1000):
            rng = rng_for(self.seed, *key, attempt)
            steps = int(rng.integers(self.steps[0], self.steps[1] + 1))
            video = draw_video(rng, steps, self.most_objects(i))
            if is_held_out(video) != (self.split != "train"):
                continue
            masks = [visible_masks(video, step * STEP) for step in range(steps)]
            is_visible = np.array(masks).any((2, 3))  # (steps, n)
            for k, o in enumerate(video["objects"]):
                o["seen"] = np.flatnonzero(is_visible[:, k]).tolist()
            if is_fair(video):
                return video
        raise AssertionError(f"no video for {self.name} {i}")

    def __getitem__(self, i):
        video = self.video(i)
        rng = rng_for(self.seed, "questions", self.split, self.questions, self.steps[1], i)
        subtitles = {}
        if self.questions == "tracks":
            annotations = track_annotations(video, rng)
        else:
            annotations, named = annotations_of(video, rng)
            if named:
                start = float(rng.integers(video["steps"])) * STEP
                entry = {"start": start, "end": start + STEP, "text": named}
                subtitles = {"subtitles": [entry]}
        path = f"{self.name}-{i}.mp4"
        video = {"path": path, "width": SIZE, "height": SIZE}
        return make_record(self, i, annotations, **subtitles, video=video)

    def video_size(self, record):
        """-> (width, height, seconds, half the time of a frame). A grid does not contain the end of
        the video (vision.track_times), so videos with tracks end one step later."""
        steps = self.video(record["index"])["steps"]
        duration = (steps if self.questions == "tracks" else steps - 1) * STEP
        return SIZE, SIZE, duration, STEP / 2

    def step_times(self, record):
        """The times of all steps in seconds."""
        return [step * STEP for step in range(self.video(record["index"])["steps"])]

    def frames(self, record, times):
        return render_frames(self.video(record["index"]), times)

    def masks(self, record, annotation):
        """{"times": (t,), "masks": (n,t,SIZE,SIZE) bool} for the objects of an annotation."""
        video = self.video(record["index"])
        times = np.array(self.step_times(record))
        masks = np.array([visible_masks(video, time) for time in times])
        masks = masks[:, annotation["meta"]["objects"]]
        return {"times": times, "masks": masks.swapaxes(0, 1)}


def is_fair(video):
    """Is every object more than 90 % visible when it comes, and visible when it changes its colour
    and in its last step?"""
    for k, o in enumerate(video["objects"]):
        seen = o["seen"]
        if len(seen) < 2 or o["gone"] - 1 not in seen:
            return False
        if o["becomes"] and o["change"] not in seen:
            return False
        come = o["come"] * STEP
        mask = mask_of(object_at(o, come))
        if visible_masks(video, come)[k].sum() <= 0.9 * mask.sum():
            return False
    return True


def track_annotations(video, rng):
    objects = video["objects"]
    names = sorted({name_of(o) for o in objects})
    labels = [names[int(k)] for k in rng.permutation(len(names))[:2]]
    if len(objects) < 4:
        labels.append("any shape")
    return [track_annotation(video, label) for label in labels] + behaviour_questions(objects)


def annotations_of(video, rng):
    """-> (annotations, name). A subtitle must contain the name, because one annotation needs it;
    None if no subtitle is needed."""
    objects = video["objects"]
    names = sorted({name_of(o) for o in objects})
    later_names = {f"{o['becomes']} {o['shape']}" for o in objects if o["becomes"]}
    kinds = [f"{colour} {shape}" for colour, shape in KINDS.seen]
    absent = [kind for kind in kinds if kind not in {*names, *later_names}]
    absent = [absent[int(k)] for k in rng.permutation(len(absent))]

    last_label = absent[0] if rng.random() < 0.3 else "any shape"
    annotations = [coming_annotation(video, label) for label in [*names[:3], last_label]]
    annotations.append({"type": "count", "label": "any shape", "count": len(objects)})
    if rng.random() < 0.5:
        annotations.append({"type": "caption", "text": story(video)})
    annotations += behaviour_questions(objects)
    annotations += order_questions(objects)

    named = None
    movers = [o for o in with_unique_name(objects) if moves_straight(o)]
    if movers:
        # the question needs the subtitle, which names the object
        mover = movers[int(rng.integers(len(movers)))]
        annotations.append(direction_question(mover, "the named"))
        named = name_of(mover)
    annotations += end_question(video, absent, rng)
    return annotations, named


def coming_annotation(video, label):
    """Points at the position and time where each object with this label comes."""
    objects = video["objects"]
    indices = find_named(objects, label)
    points = [place_at(objects[k], objects[k]["come"]) for k in indices]
    return point_annotation(label, points, indices)


def track_annotation(video, label):
    objects = video["objects"]
    indices = find_named(objects, label)
    points = []
    for k in indices:
        points += [{**place_at(objects[k], step), "id": k} for step in objects[k]["seen"]]
    annotation = point_annotation(label, points, indices)
    del annotation["mode"]
    return {**annotation, "type": "track", "fps": 2}


def place_at(o, step):
    now = object_at(o, step * STEP)
    return {"t": step * STEP, "x": now["x"], "y": now["y"]}


def with_unique_name(objects):
    names = [name_of(o) for o in objects]
    return [o for o, name in zip(objects, names, strict=True) if names.count(name) == 1]


def question(text, answer):
    return {"type": "qa", "question": text, "answer": answer}


def behaviour_questions(objects):
    """Questions about one object: the colour after a change, and the direction of its path."""
    unique = with_unique_name(objects)
    changes = [question(f"{name_of(o)} becomes", o["becomes"]) for o in unique if o["becomes"]]
    return changes + [direction_question(o, name_of(o)) for o in unique if moves_straight(o)]


def direction_question(o, name):
    """A question about the direction of an object's path. The answer has an explanation, because a
    model of this size does not learn to give the word alone (docs/log.md)."""
    start = point_of(o, o["come"])
    end = point_of(o, o["gone"] - 1)
    return {
        "type": "qa",
        "question": f"{name} moves",
        "explanation": f"from {start} to {end}",
        "answer": o["way"],
    }


def point_of(o, step):
    """'050 800', as in answers with points."""
    place = place_at(o, step)
    return f"{round(10 * place['x']):03d} {round(10 * place['y']):03d}"


def moves_straight(o):
    """Does the object move in one direction all the time, and is it visible at 3 steps or more?"""
    dx, dy = WAYS[o["way"]]
    distance = (o["gone"] - 1 - o["come"]) * o["speed"] * LATTICE
    end_x = o["x"] + dx * distance
    end_y = o["y"] + dy * distance
    return LOW <= end_x <= HIGH and LOW <= end_y <= HIGH and len(o["seen"]) > 2


def order_questions(objects):
    """Questions: which object comes first, and which object comes at a given time."""
    questions = []
    comes = [o["come"] for o in objects]
    if len(objects) == 1 or comes[0] < comes[1]:
        questions.append(question("which comes first", name_of(objects[0])))
    for o in with_unique_name(objects):
        if o["come"] and comes.count(o["come"]) == 1:
            text = f"which comes at {o['come'] * STEP:.1f}"
            questions.append(question(text, name_of(o)))
    return questions


def end_question(video, absent, rng):
    """A multiple-choice question: which object is there at the end. [] if it is not exactly one."""
    objects = video["objects"]
    there = [o for o in objects if o["gone"] >= video["steps"]]
    if len(there) != 1 or there[0]["becomes"]:
        return []
    right = name_of(there[0])
    others = [name_of(o) for o in objects if not o["becomes"]]
    wrong = [name for name in dict.fromkeys([*others, *absent]) if name != right][:2]
    options = [right, *wrong]
    order = rng.permutation(3).tolist()
    return [{
        "type": "qa",
        "style": "video_multiple_choice",
        "question": "which there at the end",
        "letters": False,
        "options": [options[k] for k in order],
        "answer_idx": order.index(0),
    }]


def story(video):
    """A caption: '0.5 red circle comes, 2.0 red circle becomes blue, 3.0 red circle leaves'."""
    events = []
    for o in video["objects"]:
        events.append((o["come"], f"{name_of(o)} comes"))
        if o["becomes"]:
            events.append((o["change"], f"{name_of(o)} becomes {o['becomes']}"))
        if o["gone"] < video["steps"]:
            events.append((o["gone"], f"{name_of(o)} leaves"))
    return ", ".join(f"{step * STEP:.1f} {event}" for step, event in sorted(events))
