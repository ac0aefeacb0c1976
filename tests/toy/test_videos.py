"""The toy's videos: annotations are true of the pixels, and no training video is a held-out one."""

import numpy as np
import pytest

import data
from model import TOY_VISION
from tests.toy.test_world import colour_of
from text.tokenizer import ByteTokenizer
from toy import world
from toy.images import is_held_out
from toy.motion import POLE_HALF_WIDTH, STEP, object_at, visible_masks
from toy.shapes import KINDS, name_of
from toy.videos import MovingShapes
from training.config import parse

TOKENIZER = ByteTokenizer(world.WORDS)
CONFIG = {stage: parse(["--stage", str(stage), "--tiny"])[1].data for stage in (2, 3)}
SHORT = world.SOURCES["videos"]("test")
LONG = world.SOURCES["long-videos"]("test")
TRACKS = world.SOURCES["tracks"]("test")
LONG_TRACKS = world.SOURCES["long-tracks"]("test")
every_kind = pytest.mark.parametrize(
    "source", [SHORT, LONG, TRACKS, LONG_TRACKS], ids=lambda source: source.name)


def test_training_and_held_out_videos_cannot_coincide():
    def as_drawn(video):
        """Without `seen`, which is added after drawing."""
        objects = [{k: o[k] for k in o if k != "seen"} for o in video["objects"]]
        return video | {"objects": objects}

    training = []
    for stage in (2, 3):
        sources, _ = world.mixture(0, stage)
        training += [source for source in sources if isinstance(source, MovingShapes)]
    assert len(training) == 6
    names = set()
    for source in training:
        for i in range(0, 6000, 300):
            assert not is_held_out(as_drawn(source.video(i)))
            names |= {name_of(o) for o in source.video(i)["objects"]}
    assert names <= {" ".join(kind) for kind in KINDS.seen}
    for source in (SHORT, LONG, TRACKS, LONG_TRACKS):
        assert all(is_held_out(as_drawn(source.video(i))) for i in range(30))


@pytest.mark.parametrize("stage", [2, 3])
def test_sources_fit_the_rows_of_their_stage_and_planned_sizes_are_those_encoded(stage):
    config = CONFIG[stage]
    for source in world.mixture(0, stage)[0]:
        for i in range(5000, 5012):
            record = source[i]
            example = data.encode(record, TOKENIZER, config, TOY_VISION, 0, 0)
            n_crops = 0 if example.image_id is None else len(example.image_id)
            planned = data.size(record, TOKENIZER, config, TOY_VISION, 0, 0)
            assert planned == (len(example.tokens), n_crops)
            assert planned[0] <= config.max_tokens
            assert not example.dropped_branches


@every_kind
def test_points_and_tracks_lie_on_the_objects_that_they_name(source):
    """Checked on the pixels: at every point there is an object of the colour that it has then."""
    n_points = n_changed = n_hidden = 0
    for i in range(25):
        record = source[i]
        video = source.video(i)
        frames = list(source.frames(record, source.step_times(record)))
        for a in record["annotations"]:
            if a["type"] not in ("point", "track"):
                continue
            indices = a["meta"]["objects"]
            found = source.masks(record, a)
            masks = found["masks"]
            visible = masks.any((2, 3))
            assert len(found["times"]) == video["steps"]
            assert len(masks) == len(indices)
            assert len(a["points"]) == (len(masks) if a["type"] == "point" else visible.sum())
            n_hidden += int((~visible).sum())
            for n, point in enumerate(a["points"]):
                k = indices.index(point["id"]) if a["type"] == "track" else n
                step = round(point["t"] / STEP)
                o = video["objects"][indices[k]]
                mask = masks[k, step]
                # the centre of an object that is partly hidden need not be visible
                assert mask.any()
                ys, xs = np.nonzero(mask)
                assert xs.min() - o["r"] <= point["x"] <= xs.max() + o["r"]
                assert ys.min() - o["r"] <= point["y"] <= ys.max() + o["r"]
                has_changed = bool(o["becomes"]) and step >= o["change"]
                colour = o["becomes"] if has_changed else o["colour"]
                assert colour_of(frames[step][mask]) == colour
                assert a["label"] in ("any shape", name_of(o))
                n_changed += colour != o["colour"]
                n_points += 1
    assert n_points > 60
    assert n_hidden > 20
    assert (n_changed > 5) == (source.questions == "tracks")


def test_an_object_counts_as_hidden_when_more_than_half_of_it_is():
    o = {"colour": "red", "shape": "square", "r": 20, "light": 0, "x": 50, "y": 50,
         "way": "nowhere", "speed": 1, "come": 0, "gone": 4, "becomes": "", "change": 0}
    ground = {"slope": [0, 0], "texture": 0, "period": 4, "noise": 1}
    video = {"objects": [o], "pole": 0, "steps": 4, **ground}
    area = visible_masks(video, 0.0)[0].sum()
    assert area > 0
    assert not visible_masks(video, 2.0).any()           # gone
    behind_pole = visible_masks({**video, "pole": 50}, 0.0)
    assert behind_pole[0].sum() == area - 32 * 2 * POLE_HALF_WIDTH
    for x, visible in ((60, [False, True]), (75, [True, True])):
        in_front = {**o, "x": x, "colour": "blue"}
        masks = visible_masks({**video, "objects": [o, in_front]}, 0.0)
        assert masks.any((1, 2)).tolist() == visible


@every_kind
def test_no_name_means_two_objects(source):
    """Every object that has the colour and shape of a label at any time is meant by the label."""
    n_absent = 0
    for i in range(50):
        video = source.video(i)
        for a in source[i]["annotations"]:
            if a["type"] in ("point", "track") and a["label"] != "any shape":
                named = set()
                for k, o in enumerate(video["objects"]):
                    states = [object_at(o, step * STEP) for step in range(video["steps"])]
                    if any(state and name_of(state) == a["label"] for state in states):
                        named.add(k)
                assert named == set(a["meta"]["objects"])
                n_absent += not named
    assert n_absent > 5 or source.questions == "tracks"


class Witness:
    """Answers the questions about a video from the masks and frames alone."""

    def __init__(self, source, i):
        self.source = source
        self.record = source[i]
        self.objects = source.video(i)["objects"]
        everyone = {"meta": {"objects": list(range(len(self.objects)))}}
        self.masks = source.masks(self.record, everyone)["masks"]        # (n,t,h,w)
        self.names = [name_of(o) for o in self.objects]
        self.visible = self.masks.any((2, 3))
        self.first = self.visible.argmax(1)                              # step of each object

    def check(self, a):
        """Asserts that the answer is right; returns (kind of question, answer)."""
        kind = next(kind for kind in CHECKS if kind in a["question"])
        answer = a["options"][a["answer_idx"][0]] if "options" in a else a["answer"]
        CHECKS[kind](self, a, answer)
        return kind, answer

    def check_first(self, a, answer):
        assert self.names[int(self.first.argmin())] == answer
        assert (self.first == self.first.min()).sum() == 1

    def check_time(self, a, answer):
        step = float(a["question"].split()[-1]) / STEP
        assert [self.names[k] for k in np.flatnonzero(self.first == step)] == [answer]

    def check_end(self, a, answer):
        there = [name for name, v in zip(self.names, self.visible, strict=True) if v[-1]]
        assert there == [answer]
        assert len(set(a["options"])) == 3

    def check_change(self, a, answer):
        colour, shape, _ = a["question"].split()
        k = self.names.index(f"{colour} {shape}")
        last = np.flatnonzero(self.visible[k])[-1]
        (frame,) = self.source.frames(self.record, [last * STEP])
        assert colour_of(frame[self.masks[k, last]]) == answer != colour

    def check_direction(self, a, answer):
        name = a["question"].removesuffix(" moves")
        if name == "the named":
            name = self.record["subtitles"][0]["text"]
        assert self.names.count(name) == 1
        k = self.names.index(name)
        r = self.objects[k]["r"]
        steps = np.flatnonzero(self.visible[k])[[0, -1]]
        centres = [np.argwhere(self.masks[k, step])[:, ::-1].mean(0) for step in steps]
        dx, dy = centres[1] - centres[0]
        # the places of the explanation: on the object, or within its radius of its visible part
        numbers = [float(word) / 10 for word in a["explanation"].split() if word.isdecimal()]
        places = np.reshape(numbers, (2, 2))
        for (x, y), step in zip(places, steps, strict=True):
            ys, xs = np.nonzero(self.masks[k, step])
            assert np.hypot(xs - x, ys - y).min() < r
        assert np.abs(places[1] - places[0] - (dx, dy)).max() < r
        # a moving object moves by 20 pixels or more; the centre of its visible part may move less
        if max(abs(dx), abs(dy)) <= 12:
            way = "nowhere"
        elif abs(dx) > abs(dy):
            way = "right" if dx > 0 else "left"
        else:
            way = "down" if dy > 0 else "up"
        assert answer == way


CHECKS = {                           # by the first of these that a question holds
    "which comes first": Witness.check_first, "which comes at": Witness.check_time,
    "which there at the end": Witness.check_end, "the named moves": Witness.check_direction,
    "moves": Witness.check_direction, "becomes": Witness.check_change}


def test_answers_can_be_found_in_masks_and_frames():
    answers = {}
    for source in (SHORT, LONG):
        for i in range(150):
            witness = Witness(source, i)
            for a in witness.record["annotations"]:
                if a["type"] == "count":
                    assert a["count"] == len(witness.names)
                if a["type"] == "qa":
                    kind, answer = witness.check(a["turns"][0])
                    answers.setdefault(kind, set()).add(answer)
    assert set(answers) == set(CHECKS)
    assert all(len(of_kind) > 4 for of_kind in answers.values())


def test_a_video_ends_with_its_last_step_and_one_with_tracks_a_step_later():
    """Then frames every half a second show every step once."""
    for name, extra in (("videos", 0), ("tracks", 1)):
        source = world.SOURCES[name]("test")
        record = source[0]
        n_steps = len(source.step_times(record))
        assert source.video_size(record)[2] == (n_steps - 1 + extra) / 2
