"""The toy world: what it says of its images is true of their pixels, and no training scene is a
held-out one."""

import json
import zlib

import numpy as np
import pytest

from text.points import format_points, parse_points, unit
from text.tokenizer import ByteTokenizer, load_tokenizer
from toy import world
from toy.images import CURRICULUM, SINGLE, ImageSeries, World, is_held_out
from toy.shapes import COLOURS, KINDS, LATTICE, SIZE, mask_of, name_of, render
from training.config import parse
from weights import files

TOKENIZER = ByteTokenizer(world.WORDS)
CONFIG = parse(["--stage", "3", "--tiny"])[1].data
SERIES = ImageSeries("test")
TRAINING = [source for source in world.mixture(0)[0] if isinstance(source, World)]
TRAINING.append(World("train", questions="patches"))
# scenes of the curriculum, and after it
INDICES = [*range(0, CURRICULUM, 40), *range(CURRICULUM, CURRICULUM + 150)]


def colour_of(pixels):
    """The name of the colour that most of these pixels are nearest to."""
    colours = np.array(list(COLOURS.values()))
    distance = np.linalg.norm(pixels[:, None].astype(float) - colours, axis=-1)
    return list(COLOURS)[np.bincount(distance.argmin(1), minlength=len(COLOURS)).argmax()]


def test_the_world_is_that_of_the_runs_in_results_md():
    """What another order of colours, shapes or words would change."""
    def crc(value):
        return zlib.crc32(json.dumps(value).encode())

    training, unseen = World("train"), World("unseen")
    assert crc([training.scene(i) for i in range(50)]) == 3453446965
    assert crc([training[i]["annotations"] for i in range(50)]) == 4153276831
    assert crc([unseen[i]["annotations"] for i in range(50)]) == 2749815469
    for name, n, checksum in (("videos", 100, 1340335852), ("long-videos", 20, 4084836015),
                              ("tracks", 20, 2253674732), ("long-tracks", 20, 1406287748)):
        source = world.SOURCES[name]("test")
        assert crc([source[i]["annotations"] for i in range(n)]) == checksum, name
    # the tokenizer of a new model; the places of the words are their ids
    assert load_tokenizer(files.TOY, 384).words == world.WORDS


def test_training_and_held_out_images_cannot_coincide():
    assert len(TRAINING) == 3
    for source in TRAINING:
        assert not any(is_held_out(source.scene(i)) for i in INDICES)
    for split in ("test", "unseen"):
        assert all(is_held_out(World(split).scene(i)) for i in range(30))


def test_unseen_combinations_are_never_shown_in_training():
    def kinds(source, indices):
        return [{(o["colour"], o["shape"]) for o in source.scene(i)["objects"]} for i in indices]

    colours, shapes, _, seen, unseen = KINDS
    assert len(seen) + len(unseen) == len(colours) * len(shapes)
    shown = [kinds(source, INDICES) for source in TRAINING]
    shown.append(kinds(World("test"), range(150)))
    for of_images in shown:
        assert set().union(*of_images) == set(seen)
    of_unseen = kinds(World("unseen"), range(50))
    assert all(of_image & set(unseen) for of_image in of_unseen)
    assert set().union(*of_unseen) >= set(unseen)
    # no annotation of a training image names one
    for source in TRAINING:
        labels = set()
        for i in INDICES:
            labels |= {a["label"] for a in source[i]["annotations"] if "label" in a}
        assert not labels & {" ".join(kind) for kind in unseen}
    # each of their colours and each of their shapes is shown in other combinations
    for colour, shape in unseen:
        assert any(colour == c for c, _ in seen)
        assert any(shape == s for _, s in seen)


def test_annotations_of_an_image_are_true_of_its_masks():
    source = World("train")
    n_objects = set()
    types = set()
    for i in range(200):
        record = source[i]
        objects = source.scene(i)["objects"]
        n_objects.add(len(objects))
        covered = np.zeros((SIZE, SIZE), int) + sum(mask_of(o) for o in objects)
        assert covered.max() <= 1  # objects never overlap
        for a in record["annotations"]:
            types.add(a["type"])
            if "label" in a:
                colour, shape = a["label"].split(" ")
                hits = [o for o in objects if colour in ("any", o["colour"])]
                hits = [o for o in hits if shape in ("shape", o["shape"])]
                assert len(hits) == (a["count"] if a["type"] == "count" else len(a["points"]))
            if a["type"] == "point":
                masks = source.masks(record, a)
                assert len(masks) == len(a["points"])
                indices = a["meta"]["objects"]
                for mask, point, k in zip(masks, a["points"], indices, strict=True):
                    assert mask[round(point["y"] - 0.5), round(point["x"] - 0.5)]
                    assert 1 < mask.sum() / objects[k]["r"] ** 2 < 3.4
    assert n_objects == set(range(7))
    assert types == {"caption", "count", "point"}


def test_points_and_captions_go_from_left_to_right_and_a_coordinate_is_one_id():
    source = World("test")
    for i in range(40):
        record = source[i]
        objects = source.scene(i)["objects"]
        by_type = {}
        for a in record["annotations"]:
            if a.get("label") in (None, "any shape"):
                by_type[a["type"]] = a
        point = by_type["point"]
        places = [unit(place, (SIZE, SIZE)) for place in point["points"]]
        text = format_points([(1, places)], "any shape")
        at = {(o["x"], o["y"]): name_of(o) for o in objects}
        names = [at[round(p.x), round(p.y)] for p in parse_points(text, SIZE, SIZE)]
        assert by_type["caption"]["text"] == (", ".join(names) or "nothing")
        for o in objects:
            for axis in "xy":
                assert o[axis] % LATTICE == 0
                assert len(TOKENIZER.encode(f" {10 * o[axis]:03d}")) == 1


def test_the_curriculum_begins_with_one_large_object_and_rises_to_as_many_as_any():
    source = World("train", curriculum=1000, max_objects=4)
    single = int(SINGLE * 1000)
    levels = [source.difficulty(i) for i in (0, single // 2, single, 999, 1000)]
    assert levels == [(1, 1, 4), (1, 1, 2), (1, 2, 0), (1, 4, 0), (0, 4, 0)]
    middle = source.difficulty((single + 1000) // 2)
    assert middle[:2] == (1, 3)


def test_training_shows_at_most_four_objects_and_the_crowded_part_more():
    (captions, points, _), _ = world.mixture(0)
    for source in (captions, points):
        assert {len(source.scene(i)["objects"]) for i in range(2000, 2200)} == {0, 1, 2, 3, 4}
    parts = world.held_out(1, 0, 20)
    shown = {name: {len(r["source"].scene(r["index"])["objects"]) for r in records}
             for name, records in parts.items()}
    assert shown == {"test": {0, 1, 2, 3, 4}, "unseen": {1, 2, 3, 4}, "crowded": {5, 6}}


def test_annotations_of_a_series_are_true_of_its_images():
    for i in range(60):
        record = SERIES[i]
        images = SERIES.images(record)
        assert len(images) == len(record["images"]) == len(SERIES.image_sizes(record)) == 2 + i % 2
        assert np.array_equal(SERIES.images(record, [1])[0], images[1])
        for a in record["annotations"]:
            if a["type"] == "point":
                for point, mask in zip(a["points"], SERIES.masks(record, a), strict=True):
                    assert mask[round(point["y"] - 0.5), round(point["x"] - 0.5)]
                    assert colour_of(images[point["image"]][mask]) == a["label"].split()[0]
            if a["type"] == "qa":
                (turn,) = a["turns"]
                name = turn["question"].removeprefix("which image shows ")
                shows = [name in map(name_of, objects) for objects in SERIES.scenes(i)]
                assert shows[int(turn["answer"]) - 1]
                assert sum(shows) == 1


@pytest.mark.parametrize(("stage", "share", "n_easy"), [(2, 0.7, 2), (3, 0.85, 0)])
def test_most_draws_of_later_stages_are_videos_and_only_stage_2_starts_easy(stage, share, n_easy):
    sources, rates = world.mixture(0, stage)
    assert sum(rates) == pytest.approx(1)
    of_videos = [rate for source, rate in zip(sources, rates, strict=True)
                 if hasattr(source, "frames")]
    assert sum(of_videos) == pytest.approx(share)
    assert sum(getattr(source, "curriculum", False) for source in sources) == n_easy


def test_an_object_is_brighter_than_its_ground_and_grounds_are_equally_bright():
    scenes = [World("train").scene(i) for i in range(CURRICULUM, CURRICULUM + 30)]
    grounds = [render(scene | {"objects": []}).mean() for scene in scenes]
    assert np.ptp(grounds) < 12
    assert np.mean(grounds) == pytest.approx(75, abs=5)
    for scene in scenes:
        pixels = render(scene)
        for o in scene["objects"]:
            assert pixels[mask_of(o)].mean() > np.mean(grounds) + 10
