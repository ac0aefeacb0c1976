"""Composed photographs: cut-outs drawn here, their masks, centres, counts, words and parts."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from data import DataConfig, encode
from model import PRESETS
from records.errors import DataError
from records.reader import Records
from text.tokenizer import ByteTokenizer
from tools import photo_scores
from tools.prepare.__main__ import main as prepare
from toy.photo_records import masks_of, record_of
from toy.photo_videos import Films
from toy.photos import Photos, open_cut_outs, read_backgrounds

SIZE = 96
MEDIA = Path(__file__).parents[1] / "media"
COLOURS = ["red", "orange", "yellow", "green", "blue"]
NOUNS = {"shapes/discs": ["disc", "Scheibe"], "shapes/bars": ["bar", "Balken"],
         "rings": ["ring", "Ring"]}


@pytest.fixture(scope="module")
def stamps(tmp_path_factory):
    """Ten discs and bars and two rings of a kind that is held out, with sentences in two
    languages; five photographs; a file of kinds."""
    folder = tmp_path_factory.mktemp("stamps")
    for kind, (english, german) in NOUNS.items():
        (folder / "cut-outs" / kind).mkdir(parents=True)
        for colour in COLOURS[: 2 if kind == "rings" else 5]:
            image = Image.new("RGBA", (80, 60))
            draw = ImageDraw.Draw(image)
            box = (10, 10, 50, 50) if kind != "shapes/bars" else (10, 20, 70, 40)
            (draw.rectangle if kind == "shapes/bars" else draw.ellipse)(box, fill=colour)
            if kind == "rings":
                draw.ellipse((20, 20, 40, 40), fill=(0, 0, 0, 0))
            path = folder / "cut-outs" / kind / f"{colour}.png"
            image.save(path)
            path.with_suffix(".txt").write_text(f"A {colour} {english}.\nde.utf8=So: {german}.\n")
    (folder / "grounds").mkdir()
    for k in range(5):
        Image.new("RGB", (120, 100), (40 * k, 30, 90)).save(folder / "grounds" / f"{k}.png")
    (folder / "kinds.json").write_text(json.dumps(
        {"languages": ["en", "de"], "held_out": ["ring"], "kinds": NOUNS}))
    return folder


@pytest.fixture(scope="module")
def parts(stamps):
    cut_outs, kinds = open_cut_outs(stamps / "cut-outs", stamps / "kinds.json")
    backgrounds = read_backgrounds([stamps / "grounds"])
    return {part: Photos(cut_outs, kinds, backgrounds, part, SIZE)
            for part in ("train", "known", "stamps", "backgrounds", "kinds")}


def test_masks_are_where_the_pixels_of_a_cut_out_are(parts):
    """The pixels of a yellow mask are yellow on average, whatever lies beside it."""
    photos = parts["train"]
    checked = 0
    for i in range(60):
        image, placed = photos.scene(i)
        assert 1 <= len(placed) <= photos.max_objects
        for p in placed:
            x, y = p.centre
            assert p.mask[y, x]
            assert p.mask.shape == (SIZE, SIZE)
            assert not any((p.mask & q.mask).any() for q in placed if q is not p)
            if p.cut_out.name.endswith("yellow"):
                red, green, blue = image[p.mask].mean(0)
                assert red > blue + 40 and green > blue + 40, (i, red, green, blue)
                checked += 1
    assert checked > 10


def test_the_centre_of_a_ring_lies_on_the_ring(parts):
    for i in range(20):
        for p in parts["kinds"].scene(i)[1]:
            x, y = p.centre
            assert p.mask[y, x]


def test_a_scene_depends_on_seed_part_and_number_alone(parts):
    image, placed = parts["train"].scene(3)
    again, placed_again = parts["train"].scene(3)
    assert (image == again).all()
    assert [p.cut_out.name for p in placed] == [p.cut_out.name for p in placed_again]
    assert not np.array_equal(image, parts["known"].scene(3)[0])


def test_what_is_held_out_is_never_shown_in_training(parts):
    shown = {part: {p.cut_out for i in range(60) for p in photos.scene(i)[1]}
             for part, photos in parts.items()}
    assert {c.kind for c in shown["kinds"]} == {"ring"}
    assert {c.kind for c in shown["train"]} == {"disc", "bar"}
    assert all(c.held_out for c in shown["stamps"])
    assert not any(c.held_out for part in ("train", "known", "backgrounds") for c in shown[part])
    assert len(shown["train"]) == 8 and len(shown["stamps"]) == 2        # one in five of each kind
    train, held_out = ({g.getpixel((0, 0)) for g in parts[part].backgrounds}
                       for part in ("train", "backgrounds"))
    assert len(train) == 4 and len(held_out) == 1 and not train & held_out


def test_annotations_say_what_the_scene_shows(parts):
    photos = parts["known"]
    named = 0
    for i in range(40):
        _, placed = photos.scene(i)
        record = record_of(photos, i, placed, "x.jpg", ["en", "de"])
        kinds = Counter(p.cut_out.kind for p in placed)
        points = [a for a in record["annotations"] if a["type"] == "point"]
        assert {a["label"]: len(a["points"]) for a in points if a["points"]} == kinds
        absent = [a["label"] for a in points if not a["points"]]
        assert absent == sorted({"disc", "bar"} - set(kinds))    # never a kind that is held out
        (count,) = [a for a in record["annotations"] if a["type"] == "count"]
        assert count["count"] == kinds[count["label"]]
        arrays = masks_of(record, placed)
        for k, annotation in enumerate(record["annotations"]):
            if annotation["type"] == "point":
                masks = arrays[f"{record['id']}/{k}"]
                assert len(masks) == len(annotation["points"])
                for point, mask in zip(annotation["points"], masks, strict=True):
                    assert mask[int(point["y"]), int(point["x"])]
        captions = {a["style"]: a["text"] for a in record["annotations"] if a["type"] == "caption"}
        english = captions["caption_en"].split(", ")
        german = {"disc": "Scheibe", "bar": "Balken"}
        assert sorted(english) == sorted(kinds)              # each kind once
        assert captions["caption_de"].split(", ") == [german[noun] for noun in english]
        if len(placed) == 1:
            assert captions["name_en"].startswith("A ")
            assert captions["name_de"] == f"So: {german[english[0]]}."
            named += 1
    assert named


def test_questions_are_answered_by_the_scene(stamps):
    """All three sorts of questions come; each answer agrees with the centres of the objects."""
    cut_outs, kinds = open_cut_outs(stamps / "cut-outs", stamps / "kinds.json")
    photos = Photos(cut_outs, kinds, [], "known", SIZE, max_objects=2)
    asked = Counter()
    for i in range(80):
        _, placed = photos.scene(i)
        record = record_of(photos, i, placed, "x.jpg", ["en"])
        (question,) = [a for a in record["annotations"] if a["type"] == "qa"]
        text, answer = question["question"], question["answer"]
        of_kind = {}
        for p in sorted(placed, key=lambda p: p.centre):
            of_kind.setdefault(p.cut_out.kind, p.centre[0])
        words = text.strip("?").split()
        if text.startswith("Is there any"):
            assert answer == ("yes" if words[-1] in of_kind else "no")
        elif text == "Which is furthest left?":
            assert of_kind[answer] == min(of_kind.values())
        else:
            assert answer == ("left" if of_kind[words[2]] <= of_kind[words[-1]] else "right")
        asked[words[0], words[1], answer] += 1
    assert {answer for _, _, answer in asked} == {"yes", "no", "left", "right", "disc", "bar"}


def test_the_files_are_records_that_train_as_one_tree(stamps, tmp_path):
    """Two languages are two branches that share the image; all parts and their masks are there.
    Nothing in training is about a kind that is held out, also not that there is none."""
    out = tmp_path / "out"
    prepare(["stamps", str(stamps / "cut-outs"), str(out), "--kinds", str(stamps / "kinds.json"),
             "--backgrounds", str(stamps / "grounds"), "--n", "6", "--held-out", "3",
             "--size", str(SIZE), "--languages", "en", "de"])
    assert sorted(path.stem for path in out.glob("*.jsonl")) == [
        "backgrounds", "kinds", "known", "stamps", "train"]
    records = Records(out / "train.jsonl")
    assert len(records) == 6 and not records.found
    config = DataConfig(vision=PRESETS["toy"].vision, max_crops=1)
    for record in records:
        example = encode(record, ByteTokenizer(), config, 0, 0)
        assert example.n_branches == len(record["annotations"])
        visual = np.flatnonzero(example.bidir)
        assert (example.visible_until[visual] == len(example.tokens)).all()      # all share it
    texts = (out / "train.jsonl").read_text()
    assert "disc" in texts and "Scheibe" in texts and "ring" not in texts and "Ring" not in texts
    assert '"ring"' in (out / "kinds.jsonl").read_text()
    masks = np.load(out / "masks.npz")
    assert not any(name.startswith("train-") for name in masks.files)
    assert {name.split("-")[0] for name in masks.files} == {
        "known", "stamps", "backgrounds", "kinds"}


def test_scores_stand_beside_those_of_answers_about_another_scene(stamps, tmp_path, capsys):
    """Right answers score 1; those to the scene before score what the table calls chance."""
    prepare(["stamps", str(stamps / "cut-outs"), str(tmp_path / "data"), "--n", "1", "--held-out",
             "12", "--kinds", str(stamps / "kinds.json"), "--languages", "en", "de"])
    records = [json.loads(line) for line in open(tmp_path / "data" / "known.jsonl")]
    (tmp_path / "known").mkdir()

    def scores(shift):
        answers = {}
        for record in records:
            for k, a in enumerate(record["annotations"]):
                text = a.get("text") or a.get("answer") or str(a.get("count"))
                p = {"id": record["id"], "annotation": k, "type": a["type"], "text": text,
                     "prompt": "pointing"}
                if a["type"] == "point":
                    places = [[1, n, q["x"] - 0.5, q["y"] - 0.5] for n, q in enumerate(a["points"])]
                    p |= {"point_f1": 0.0, "predicted": places, "true": places}
                form = a.get("question", "").split()[:2]
                answers.setdefault((a.get("style", a["type"]), *form), []).append(p)
        lines = []
        for of_style in (a for a in answers.values() if len(a) > 1):     # one alone has no next
            texts = [p["text"] for p in of_style]
            texts = texts[-shift:] + texts[:-shift] if shift else texts
            lines += [p | {"text": text} for p, text in zip(of_style, texts, strict=True)]
        (tmp_path / "known" / "predictions.jsonl").write_text("\n".join(map(json.dumps, lines)))
        photo_scores.main([str(tmp_path)])
        rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
        return dict(rows[-8:])

    right = scores(0)
    with Image.open(tmp_path / "known" / "scenes.png") as scenes:        # four in a row, two rows
        assert scenes.width >= 4 * 288 and scenes.height >= 2 * 288
    assert right.pop("no points at absent kinds") == "1.00 (0.00)"
    points, chance = right.pop("points, F1").split()
    assert points == "1.00" and 0 <= float(chance.strip("()")) < 0.5
    assert set(right) == {"captions en, recall", "captions en, precision", "captions de, recall",
                          "captions de, precision", "counts", "questions"}
    assert all(cell.startswith("1.00 (") for cell in right.values())
    wrong = scores(1)
    truths = [a for record in records for a in record["annotations"]]
    same = {"counts": same_score([("", a["count"]) for a in truths if "count" in a]),
            "questions": same_score([(tuple(a["question"].split()[:2]), a["answer"])
                                     for a in truths if "question" in a])}
    for name, cell in right.items():
        chance = max(wrong[name].split()[0], same.get(name, "0.00"))
        assert cell.split()[1].strip("()") == chance != "1.00"


def same_score(questions):
    """Of [(form, answer), ..], if each form is always given its most frequent answer. Forms that
    are asked once were left out above."""
    forms = [[a for f, a in questions if f == form] for form in {form for form, _ in questions}]
    forms = [answers for answers in forms if len(answers) > 1]
    return f"{sum(max(Counter(a).values()) for a in forms) / sum(map(len, forms)):.2f}"


def test_videos_are_records_with_tracks(stamps, tmp_path):
    """Over a real film and over a photograph. Points lie on the masks of their frames; nothing is
    wrong with the records, and the loader reads the frames."""
    for flags in (["--film", str(MEDIA / "bigbuckbunny.mp4")], []):
        out = tmp_path / f"out{len(flags)}"
        prepare(["stamps", str(stamps / "cut-outs"), str(out), "--kinds",
                 str(stamps / "kinds.json"), "--backgrounds", str(stamps / "grounds"), "--n", "1",
                 "--held-out", "12", "--videos", "4", "--size", str(SIZE), *flags])
        train = Records(out / "train-videos.jsonl")
        assert len(train) == 4 and not train.found
        config = DataConfig(vision=PRESETS["toy"].vision, max_frames=9)
        assert encode(train[0], ByteTokenizer(), config, 0, 0).n_branches >= 3
        masks = np.load(out / "masks.npz")
        held_out = Records(out / "stamps-videos.jsonl")
        assert len(held_out) == 3
        n_points = 0
        for record in held_out:
            for k, annotation in enumerate(record["annotations"]):
                if annotation["type"] == "track":
                    name = f"{record['id']}/{k}"
                    times = masks[f"{name}/times"].tolist()
                    ids = sorted({point["id"] for point in annotation["points"]})
                    assert len(masks[name]) == len(ids) == len(annotation["meta"]["objects"])
                    for p in annotation["points"]:
                        mask = masks[name][ids.index(p["id"]), times.index(p["t"])]
                        assert mask[int(p["y"]), int(p["x"])]
                        n_points += 1
        assert n_points > 10


def test_a_film_shows_behind_the_cut_outs(stamps, parts):
    film = [Image.new("RGB", (200, 120), (200, 10, k)) for k in range(9)]
    images, moving = Films(parts["train"], film).video(0)
    assert 5 <= len(images) <= 9
    shown = [int(np.median(image[..., 2][~np.any([m.masks[k] for m in moving], axis=0)]))
             for k, image in enumerate(images)]
    assert shown == list(range(shown[0], shown[0] + len(images)))


def test_a_folder_of_cut_outs_without_any_other_file(tmp_path):
    """Folders are kinds, the names of files their sentences, the ground is noise. One photograph
    for the background is not held out. A copy in the mirror is left out. A part of an earlier
    command is removed."""
    for folder, name in (("cup", "old_cup.png"), ("cup/tall", "a tall one.PNG"),
                         ("cup", "old_cup_mirror.png"), ("cup", "shaving_mirror.png")):
        (tmp_path / "my" / folder).mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", (40, 30), "red").save(tmp_path / "my" / folder / name)
    (tmp_path / "my/cup/shaving_mirror.txt").write_text("\nde.utf8= \nfr.utf8=Un miroir.\n")
    (tmp_path / "my/cup/shaving_mirror.dat").write_text("nomirror\n")
    cut_outs, kinds = open_cut_outs(tmp_path / "my")
    assert [(c.kind, c.sentences, c.held_out, c.may_mirror) for c in cut_outs] == [
        ("cup", {"en": "old cup"}, False, True),
        ("cup", {"en": "shaving mirror", "fr": "Un miroir."}, False, False),
        ("tall", {"en": "a tall one"}, False, True)]
    photos = Photos(cut_outs, kinds, [], "train", SIZE)
    assert photos.scene(0)[0].shape == (SIZE, SIZE, 3)
    Image.new("RGB", (90, 80)).save(tmp_path / "ground.webp")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kinds.jsonl").touch()
    prepare(["stamps", str(tmp_path / "my"), str(tmp_path / "out"), "--n", "2", "--held-out", "1",
             "--backgrounds", str(tmp_path / "ground.webp")])
    assert sorted(p.stem for p in (tmp_path / "out").glob("*.jsonl")) == ["known", "train"]


@pytest.mark.parametrize("content", [b"no image", b""])
def test_a_damaged_cut_out_is_named(tmp_path, content, capsys):
    (tmp_path / "cup").mkdir()
    (tmp_path / "cup" / "a.png").write_bytes(content)
    with pytest.raises(SystemExit):
        prepare(["stamps", str(tmp_path), str(tmp_path / "out")])
    assert "a.png" in capsys.readouterr().err


def test_what_is_no_cut_out_no_photograph_and_no_file_of_kinds_is_named(tmp_path, capsys):
    (tmp_path / "cup").mkdir()
    Image.new("RGBA", (9, 9)).save(tmp_path / "cup" / "a.png")
    with pytest.raises(DataError, match="nothing in it is visible"):
        open_cut_outs(tmp_path)
    Image.new("RGB", (9, 9)).save(tmp_path / "cup" / "a.png")
    open_cut_outs(tmp_path)                              # a street sign may be a rectangle
    assert "1 cut-outs are whole rectangles" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no photographs"):
        read_backgrounds([tmp_path / "empty"])
    one = '{"languages": ["en"], "kinds": {"cup": ["cup"]}, '
    (tmp_path / "kinds.json").write_text(one + '"held_out": ["cups"]}')
    with pytest.raises(ValueError, match="held_out names no kind: cups"):
        open_cut_outs(tmp_path, tmp_path / "kinds.json")
    for text in ("no", "{}", '{"languages": ["en", "de"], "kinds": {"cup": ["cup"]}}',
                 one + '"without": 5}'):
        (tmp_path / "kinds.json").write_text(text)
        with pytest.raises(ValueError, match=r"kinds\.json: not a file of kinds"):
            open_cut_outs(tmp_path, tmp_path / "kinds.json")
    with pytest.raises(ValueError, match="no PNG files"):
        open_cut_outs(tmp_path / "nowhere")


def test_a_scene_without_objects_cannot_be_asked_for(tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare(["stamps", str(tmp_path), str(tmp_path / "out"), "--max-objects", "0"])
    assert "--max-objects: invalid choice: 0" in capsys.readouterr().err
