"""Published benchmarks: small files with the published columns, scores computed by hand, and
mistakes that give one sentence."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from evaluation.masks import open_masks
from records.errors import UserError
from records.reader import Records
from tests.evaluation.answers import evaluate_answers
from tests.evaluation.small_model import save_run
from tests.tools.convert.command import run
from tests.tools.prepare.cases import U, V, W, image_cell, sha, xy
from tests.tools.prepare.command import write_parquet
from text.points import format_points
from tools import benchmarks, evaluate

pytestmark = pytest.mark.extras("pyarrow")

WIDTH, HEIGHT = 20, 10


def picture(mode="RGB"):
    """-> the bytes of an image file."""
    file = io.BytesIO()
    Image.new(mode, (WIDTH, HEIGHT)).save(file, "png")
    return file.getvalue()


def mask(left, top, right, bottom, size=(WIDTH, HEIGHT)):
    """-> (h,w) bool, true in a rectangle."""
    pixels = np.zeros(size[::-1], bool)
    pixels[top:bottom, left:right] = True
    return pixels


def pointed(*points):
    """-> the answer of a model that points at these pixels."""
    units = [(x / WIDTH, y / HEIGHT) for x, y in points]
    return format_points([(1, units)], "it")


@pytest.fixture
def files(tmp_path):
    """-> folders for published files, for downloaded images, and for work."""
    folders = {name: tmp_path / name for name in ("folder", "fetched", "work")}
    for folder in folders.values():
        folder.mkdir()
    return SimpleNamespace(**folders)


def publish(files, rows, split="test"):
    write_parquet(files.folder / "data" / f"{split}-00000-of-00001.parquet", rows)


def fetch(files, *urls):
    for url in urls:
        (files.fetched / sha(url)).write_bytes(picture())


def convert(name, files):
    """-> the records, and the counts of tools.convert. Images by URL are in files.fetched."""
    source, media = {"point-bench": ("folder/data.json", files.folder),
                     "countbench": ("folder", None)}.get(name, ("folder", files.fetched))
    words = [files.work.parent / source, files.work / "records.jsonl", "--overwrite",
             "--as", f"benchmark-{name}", *(["--media", media] if media else [])]
    status, counts, _ = run(*words, media_are_there=False)
    return [] if status else list(Records(files.work / "records.jsonl", media)), counts


def scores_of(name, files, answers):
    """-> the last line of tools.evaluate, and {number of the record: prompt}. `answers`, {number:
    text}, replace the answers of a model."""
    records, counts = convert(name, files)

    def number(record_id):
        return int(record_id.removeprefix(f"benchmark-{name}-"))

    masks = files.work / "records.masks.npz"
    metrics, predictions = evaluate_answers(
        records, lambda question: answers[number(question.record["id"])],
        open_masks(masks) if masks.exists() else None)
    prompts = {number(p["id"]): p["prompt"] for p in predictions}
    return benchmarks.summary(name, records, metrics, predictions), prompts, counts["skipped"]


def test_pixmo_count_is_asked_about_the_images_that_were_fetched(files):
    rows = [
        {"image_url": U, "count": 3, "label": "Sheep"},
        {"image_url": V, "count": 5, "label": "people"},
        {"image_url": W, "count": 2, "label": "cars"},
    ]
    publish(files, rows)
    publish(files, [{"image_url": U, "count": 9, "label": "x"}], "train")
    fetch(files, U, V)
    answers = {1: "3", 2: pointed((1, 1), (2, 2), (3, 3), (4, 4))}
    found, prompts, skipped = scores_of("pixmo-count", files, answers)
    # "3" is exact, and 4 points for 5 people are close
    assert (found["count_accuracy"], found["count_close"]) == (0.5, 1.0)
    assert (found["questions"], found["records"]) == (2, 2)
    assert skipped == {"missing file": 1}
    # the small model has the settings of stage 1, where every prompt starts with its style
    assert prompts[1] == "point_count: How many sheep are there?"


def test_pixmo_points_are_hits_in_the_mask_of_the_matched_point(files):
    rows = [
        {"image_url": U, "label": "Mug", "points": xy((10, 20), (90, 80)),         # percent
         "masks": [mask(0, 0, 5, 5).tolist(), mask(15, 5, 20, 10).tolist()]},
        {"image_url": U, "label": "cat", "points": [], "masks": [mask(0, 0, 0, 0).tolist()]},
        {"image_url": U, "label": "dog", "points": xy((50, 50)),
         "masks": [mask(0, 0, 4, 4, (8, 8)).tolist()]},
        {"image_url": U, "label": "bee", "points": xy((50, 50)), "masks": None},
    ]
    publish(files, rows)
    fetch(files, U)
    # of three predicted points, (2, 2) and (18, 8) are matched and inside the masks
    answers = {1: pointed((2, 2), (10, 5), (18, 8)), 2: "There are none."}
    found, _, skipped = scores_of("pixmo-points", files, answers)
    assert found["point_precision"] == round((2 / 3 + 1) / 2, 4)
    assert found["point_recall"] == 1
    assert found["point_f1"] == round((0.8 + 1) / 2, 4)
    assert skipped == {"masks that do not fit the points and the image": 1, "no masks": 1}


def test_countbench_leaves_out_what_the_official_code_leaves_out(files):
    images = [image_cell(picture()), image_cell(picture("L")), None, image_cell(b"<html>")]
    publish(files, [{"image": image, "question": "How many cups?", "number": 4}
                    for image in images])
    found, prompts, skipped = scores_of("countbench", files, {1: "a total of 4"})
    assert found["count_accuracy"] == 1
    assert prompts == {1: "point_count: How many cups?"}
    assert skipped == {"image with a single channel": 1, "no image": 1, "damaged image": 1}


def write_point_bench(files, entries):
    """Writes the files of PointBench. entries: [(category, mask pixels), ..]"""
    data = [{"image_filename": "a.png", "category": name, "user_input": "no mask"}
            for name in ("spatial", "other")]
    for number, (category, pixels) in enumerate(entries):
        name = f"{number}.png"
        # red, because a pixel is true if one channel is above 127
        red = Image.fromarray(np.where(pixels[..., None], np.uint8([128, 0, 0]), np.uint8(127)))
        for kind, image in (("images", Image.new("RGB", (WIDTH, HEIGHT))), ("masks", red)):
            folder = files.folder / f"selected_{kind}" / category
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / name)
        data.append({"image_filename": name, "mask_filename": name, "category": category,
                     "user_input": f"Point to object {number}.", "count": 1})
    (files.folder / "data.json").write_text(json.dumps(data))


def test_an_answer_of_point_bench_has_at_most_256_tokens_as_in_the_official_code():
    assert benchmarks.BENCHMARKS["point-bench"].max_new == 256


def test_point_bench_wants_a_point_and_all_points_in_the_mask(files, capsys):
    left = mask(0, 0, 10, 10)
    write_point_bench(files, [("spatial", left), ("spatial", left), ("spatial", left),
                              ("counting", left), ("steerable", mask(0, 0, 5, 5, (5, 5)))])
    answers = {
        1: pointed((9.8, 5)),              # cut to 9, not rounded to 10
        2: pointed((2, 2), (15, 5)),       # one of two is outside
        3: "There are none.",
        4: pointed((2, 2), (3, 3)),
        5: pointed((8, 8)),                # outside a mask that is too small
    }
    found, prompts, skipped = scores_of("point-bench", files, answers)
    assert found["spatial"] == round(1 / 3, 4)
    assert (found["counting"], found["steerable"]) == (1, 0)
    assert found["average"] == round((1 / 3 + 1 + 0) / 3, 4)
    assert prompts[1] == "pointing: Point to object 0."
    assert skipped == {"no mask": 1, "category other": 1}
    assert found["published"] == {"Molmo2-4B": 67.7, "Molmo2-8B": 68.7, "Molmo2-O-7B": 66.5}
    benchmarks.print_scores(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["average", "44.44", "67.7", "68.7", "66.5"]
    assert lines[2].split() == ["counting", "100", "71.4", "71.4", "72.4"]
    last = "5 of 5 records were evaluated; published scores: paper, version 4, Table 7"
    assert lines[-1] == last


def test_the_command_prints_a_table_and_one_line_of_json(files, tmp_path, capsys):
    cups = {"image": image_cell(picture()), "question": "How many cups?", "number": 4}
    publish(files, [cups, cups])
    assert len(convert("countbench", files)[0]) == 2
    words = ["--model", save_run(tmp_path / "run"), "--benchmark", "countbench", "--max-new",
             "2", "--out", tmp_path / "out", "--data", files.work / "records.jsonl"]
    evaluate.main(list(map(str, words)))
    *table, last = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["percent", "ours", "Molmo2-4B", "Molmo2-8B", "Molmo2-O-7B"]
    assert table[1].split() == ["count_accuracy", "0", "93.9", "93.7", "95.1"]
    assert table[-1] == "2 of 2 records were evaluated; published scores: paper, version 4, Table 6"
    found = json.loads(last)
    assert (found["benchmark"], found["questions"], found["published"]["Molmo2-8B"]) == (
        "countbench", 2, 93.7)
    assert len((tmp_path / "out/predictions.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("name", "row", "kind"), [
    ("countbench", {"image": image_cell(), "question": "a"}, "missing column"),
    ("pixmo-points", {"image_url": U, "label": "mug", "points": ["x"], "masks": []},
     "wrong record"),
    ("pixmo-count", {"image_url": V, "label": "cats", "count": 2}, "missing file"),
])
def test_entries_that_are_not_as_published_are_skipped(files, name, row, kind):
    publish(files, [row])
    fetch(files, U)
    assert convert(name, files) == ([], {"rows": 1, "records": 0, "skipped": {kind: 1}})


BUNNY = Path(__file__).parents[1] / "media/bigbuckbunny.mp4"
# the middle of 320 x 180 pixels, x 110 to 209 and y 60 to 119, as run lengths of COCO
RLE = {"size": [180, 320], "counts": [110 * 180 + 60, *[60, 120] * 99, 60, 110 * 180 + 60]}


def test_a_point_of_videopoint_is_right_at_each_time_of_its_masks(files):
    """The hits are those of the official code. The masks have another size than the video."""
    row = {"video_id": "bunny", "two_fps_timestamps": [1.0], "points": [{"x": 160, "y": 90}],
           "label": "rabbit", "width": 320, "height": 180,
           "masks": [[{"frame_id": n, "rle": RLE} for n in (1, 2, 3)]]}
    rows = [row] * 6
    rows += [row | {"video_id": "absent"}, row | {"masks": []}]
    publish(files, rows, "val")
    (files.fetched / "bunny.mp4").write_bytes(BUNNY.read_bytes())
    places = [(1.0, 500, 500), (1.0, 600, 500), (0.5, 500, 500), (1.5, 550, 500), (2.0, 500, 500),
              (1.0, 700, 500)]
    answers = {n: f'<points coords="{t} 1 {x} {y}">rabbit</points>'
               for n, (t, x, y) in enumerate(places, 1)}
    found, prompts, skipped = scores_of("molmo2-videopoint", files, answers)
    assert found["video_point_f1"] == round(4 / 6, 4)
    assert found["published"]["Molmo2-8B"] == 38.4
    assert skipped == {"missing file": 1, "masks that do not fit the points": 1}
    asked = 'video_point_count: How many "rabbit" are there in the video?'
    assert set(prompts.values()) == {asked}


def test_videocount_is_scored_by_category_and_by_the_true_count(files, capsys):
    """As in the official code, a bin starts with its first number and ends before its second."""
    row = {"video_id": "bunny", "question": "How often does it yawn?", "label": "yawn",
           "clip_start": 1.0, "clip_end": 4.0}
    entries = [("action/event", 3, "There are 4."), ("animal", 4, "4"), ("animal", 5, "4"),
               ("object", 25, "25"), ("object", 60, "a total of 60")]
    publish(files, [row | {"category": name, "count": n} for name, n, _ in entries], "val")
    (files.fetched / "bunny_2fps.mp4").write_bytes(BUNNY.read_bytes())
    answers = {n: text for n, (*_, text) in enumerate(entries, 1)}
    found, prompts, _ = scores_of("molmo2-videocount", files, answers)
    assert (found["count_accuracy"], found["count_close"]) == (0.6, 1)
    assert set(prompts.values()) == {"video_count: How often does it yawn?"}
    parts = {name: found[name] for name in found if name.startswith("accuracy_")}
    assert parts == {
        "accuracy_action/event": 0, "accuracy_animal": 0.5, "accuracy_object": 1,
        "accuracy_0_5": 0.5, "accuracy_5_10": 0, "accuracy_25_60": 1}
    benchmarks.print_scores(found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["accuracy_animal", "50", "59.2", "69.4", "63.3"] in lines


def test_tracks_of_videotrack_are_scored_once_a_second_in_masks(files):
    """Two of three objects are meant. One of them is absent from frame 0, where the official code
    compares with the mask of another object."""
    far = {"size": [180, 320], "counts": [0, 20 * 180, 300 * 180]}
    paths = [("b", [None, None, [10.0, 90.0]]), ("a", [[160.0, 90.0]] * 3),
             ("c", [[300.0, 90.0]] * 3)]
    row = {"video": "source", "clip": "bunny", "video_dataset": "dance", "exp": "the two",
           "fps": 2, "w": 320, "h": 180, "mask_id": ["b", "a"],
           "points": [{"object_id": name, "points": path} for name, path in paths],
           "masks": [{"object_id": "b", "masks": [None, None, far]},
                     {"object_id": "a", "masks": [RLE] * 3}]}
    publish(files, [row] * 2)
    (files.fetched / "dance").mkdir()
    (files.fetched / "dance/bunny.mp4").write_bytes(BUNNY.read_bytes())
    right = '<tracks coords="0.0 1 600 500;1.0 1 400 500 2 010 010">the two</tracks>'
    answers = {1: right,
               2: right.replace("2 010 010", "2 200 500")}
    found, prompts, _ = scores_of("molmo2-videotrack", files, answers)
    assert found["track_f1"] == round((1 + (1 + 0.5) / 2) / 2, 4)
    assert found["hota"] < 1
    assert prompts[1] == "video_point_track_per_frame: the two"


def test_records_that_do_not_belong_to_a_benchmark_are_named():
    """The first mistake is found before the model answers."""
    with pytest.raises(UserError, match="molmo2-videocount need 'meta': make its records with"):
        benchmarks.check_records("molmo2-videocount", [{"annotations": [{}]}])
    with pytest.raises(UserError, match="countbench has none of the scores of these records"):
        benchmarks.summary("countbench", [], {}, [])
