"""A box is read in three forms and three units, rejected if it is wrong, and becomes a point."""

import numpy as np
import pytest
from PIL import Image

import data
from evaluation import scoring
from records.reader import Records
from tests.evaluation.answers import evaluate_answers
from tests.records.samples import image, verdict, write
from text.tokenizer import ByteTokenizer
from vision import RELEASED

BOX = {"type": "box", "label": "cup", "coords": "percent", "form": "xyxy",
       "boxes": [{"box": [10, 20, 30, 60]}, {"box": [50, 50, 70, 60]}]}
SAME_BOX = [("xyxy", [10, 20, 30, 60]), ("xywh", [10, 20, 20, 40]), ("cxcywh", [20, 40, 20, 40])]
UNITS = [("percent", 1, {}), ("unit", 0.01, {}), ("pixel", 2, {"size": [200, 200]})]


@pytest.mark.parametrize(("form", "numbers"), SAME_BOX)
@pytest.mark.parametrize(("coords", "factor", "more"), UNITS, ids=lambda value: str(value))
def test_a_box_in_every_form_and_unit_is_the_point_at_its_centre(tmp_path, form, numbers, coords,
                                                                 factor, more):
    entry = {"box": [number * factor for number in numbers]}
    annotation = {**BOX, "coords": coords, "form": form, "boxes": [entry], **more}
    (found,) = Records(write(tmp_path / "r.jsonl", image(annotation)))[0]["annotations"]
    (point,) = found.pop("points")
    assert found == {"type": "point", "weight": 1, "label": "cup", "labels": ["cup"],
                     "coords": coords, "mode": ["point", "point_count"], **more}
    assert point["scale"] == {"percent": (100, 100), "unit": (1, 1), "pixel": [200, 200]}[coords]
    assert [point["x"], point["y"]] == pytest.approx([20 * factor, 40 * factor])
    assert point["box"] == pytest.approx([n * factor for n in (10, 20, 30, 60)])


WRONG = [
    ({"boxes": [{"box": [10, 20, 30, 60]}, {"box": [-2, 20, 30, 60]}]}, "point 1 lies outside"),
    ({"boxes": [{"box": [10, 20, 10, 60]}]}, "boxes[0]: [10, 20, 10, 60] has no positive width"),
    ({"form": "xywh", "boxes": [{"box": [10, 20, 5, 0]}]}, "check 'form'"),
    ({"boxes": [{"box": [10, 20, 30]}]}, "'box' must be a list of four numbers"),
    ({"boxes": [[10, 20, 30, 60]]}, "annotations[0].boxes[0]: this must be an object, not "
     '[10, 20, 30, 60]; write {"box": [..]}'),
    ({"boxes": [{"box": [10, 20, 30, 60], "t": 1}]}, "'t' is needed in a video"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_what_is_no_box_is_refused_with_its_place(tmp_path, change, words):
    assert words in verdict(tmp_path, image({**BOX, **change}))


@pytest.fixture
def two_boxes(tmp_path):
    """-> Records of a file with two boxes, in pixels of an image of 200 x 100."""
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    annotation = {**BOX, "coords": "pixel", "boxes": [{"box": [20, 20, 60, 60]},
                                                      {"box": [100, 40, 190, 50]}]}
    return Records(write(tmp_path / "r.jsonl", image(annotation)))


def test_it_is_trained_as_points_with_their_weight_and_limit(two_boxes):
    tokenizer = ByteTokenizer()
    config = data.DataConfig(max_tokens=4096, max_crops=1, point_weight=0.2, sqrt_length=True)
    example = data.encode(two_boxes[0], tokenizer, config, RELEASED, 0, 0)
    text = tokenizer.decode(example.targets[example.weights > 0].tolist())
    assert 'coords="1 1 200 400 2 725 450"' in text
    assert sorted(set(example.weights.tolist())) == pytest.approx([0, 0.2])
    few = data.DataConfig(max_tokens=4096, max_crops=1, max_points=1)
    assert data.size(two_boxes[0], tokenizer, few, RELEASED, 0, 0) == (0, 0)


# first both points are inside, far from the centres; then one is outside by a thousandth
ANSWERS = [("101 201", "949 401", 1.0), ("099 400", "725 450", 0.5)]


@pytest.mark.parametrize(("first", "second", "recall"), ANSWERS)
def test_a_point_inside_the_box_is_a_hit(two_boxes, first, second, recall):
    answer = f'<points coords="1 1 {first} 2 {second}">cup</points>'
    metrics, (prediction,) = evaluate_answers(list(two_boxes), lambda question: answer)
    assert metrics["point_recall"] == recall
    assert metrics["hits"] == "box"
    assert prediction["type"] == "point"
    assert len(prediction["true"]) == 2


def test_masks_go_before_boxes_and_a_box_of_a_video_holds_at_its_time(two_boxes):
    annotation = two_boxes[0]["annotations"][0]
    everywhere = np.ones((len(annotation["points"]), 100, 200), bool)
    metrics, _ = evaluate_answers(list(two_boxes), lambda q: "", lambda *args: everywhere)
    assert metrics["hits"] == "mask"
    hit = scoring.metrics.hit_in_box([(2.0, 5, 5)], [(0, 0, 10, 10)])
    assert hit(0, (2.0, 9, 10))
    assert not hit(0, (2.5, 5, 5))
