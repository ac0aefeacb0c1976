"""Tests how records become examples: planned sizes, prompts, pixels, placeholders, and the crops of
each rank."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
import parallel
import vision
from evaluation.evaluate import questions_of
from evaluation.prompts import VideoClip, encode_prompt
from model import PRESETS
from records import media
from records.errors import Unreadable
from records.reader import Records
from records.visual import clip_times, read_headers
from tests.records.samples import CAPTION, POINT, QA, VIDEO_POINT, image, video, write
from tests.records.visual_records import (
    CONFIG,
    GREY_FRAMES,
    TOKENIZER,
    VIDEO,
    VIDEO_PATH,
    VISION,
    encoded,
    open_records,
    random_record,
    write_media,
)
from text.prompts import annotations_of
from text.styles import medium
from text.visual_tokens import shift_subtitles
from training.config import Config
from training.loader import placeholder, select_crops
from training.setup import largest_example
from vision import RELEASED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_media(tmp_path_factory.mktemp("media"))


def n_crops(example):
    return 0 if example.images is None else len(example.images)


def branches_of(example):
    """The slice of each branch if the tree has two or more branches; else []."""
    restarts = np.flatnonzero(np.diff(example.pos) <= 0) + 1
    if not len(restarts):
        return []
    starts = np.flatnonzero(example.pos == example.pos[restarts[0]])
    return [slice(a, b) for a, b in pairwise([*starts.tolist(), len(example.pos)])]


# --------------------------------------------------------------------------------------------------
# sizes


def check_tree(example, whole):
    """The prefix and the remaining branches are complete. No token attends to another branch."""
    branches = branches_of(example)
    if not branches:
        return
    assert len(branches) == example.n_branches
    prefix = branches[0].start
    assert branches_of(whole)[0].start == prefix
    assert np.array_equal(example.tokens[:prefix], whole.tokens[:prefix])
    assert (example.visible_until[:prefix] == len(example.tokens)).all()
    of_whole = [whole.tokens[part].tolist() for part in branches_of(whole)]
    for part in branches:
        assert example.tokens[part].tolist() in of_whole
        assert (example.visible_until[part] == part.stop).all()


def test_size_equals_what_encode_gives_on_150_records_of_all_kinds(folder):
    """Limits are random. No visual token is cut, and laid out + skipped tokens = all tokens."""
    rng = np.random.default_rng(1)
    records = open_records(folder, *(random_record(rng) for _ in range(150)))
    assert len(list(records)) == 150
    kinds = set()
    n_dropped = 0
    for i in range(150):
        record = records[i]
        config = replace(
            CONFIG, max_tokens=int(rng.integers(40, 1500)), max_frames=int(rng.integers(1, 9)),
            max_crops=int(rng.integers(1, 4)), sqrt_length=bool(i % 2), prefix_all=bool(i % 3),
            fps=float(rng.choice([1, 2])))
        size = data.size(record, TOKENIZER, config, VISION, 0, i % 4)
        example = data.encode(record, TOKENIZER, config, VISION, 0, i % 4)
        if size == (0, 0):
            assert not example.weights.any()
        else:
            assert size == (len(example.tokens), n_crops(example))
            assert size[0] <= config.max_tokens
        no_limit = replace(config, max_tokens=10**6)
        info = read_headers(record, config)
        whole = data.build_tree(record, info, TOKENIZER, no_limit, VISION, 0, i % 4)
        assert len(example.tokens) + example.dropped_tokens == len(whole.tokens)
        check_tree(example, whole)
        patch = TOKENIZER.special["im_patch"]
        n_visual = (example.tokens == patch).sum()
        assert n_visual == (whole.tokens == patch).sum()
        assert n_visual == len(example.pool_dst) == len(example.pool_src)
        kinds.add(medium(record))
        n_dropped += example.dropped_branches
    assert kinds == {"video", "images", "image", "text"}
    assert n_dropped > 15


def test_three_images_in_ten_with_points_have_up_to_24_crops(tmp_path):
    """Paper 3.2, with the crops and visual tokens of the official code. The limit stays 8 crops for
    captions, for several images, and for an image whose annotation would be skipped."""
    Image.new("L", (1024, 768)).save(tmp_path / "a.png")
    point = {**POINT, "points": [{"x": 0.5, "y": 0.5, "image": 0}]}
    count = {"type": "count", "label": "l", "count": 2}
    records = open_records(
        tmp_path, image(POINT, image="a.png"), image(CAPTION, image="a.png"),
        {"images": ["a.png", "a.png"], "annotations": [point]}, image(count, image="a.png"),
        image({"type": "qa", "turns": [{"question": "q", "answer": "a"}, POINT]}, image="a.png"))
    config = replace(CONFIG, max_tokens=4096, max_crops=8, high_res_share=0.3)

    def crops_of(record, **fields):
        changed = replace(config, **fields)
        sizes = [data.size(record, TOKENIZER, changed, RELEASED, 0, k) for k in range(100)]
        return Counter(n for _, n in sizes)

    found = crops_of(records[0])
    assert found.keys() == {7, 13}
    assert 20 < found[13] < 40
    assert crops_of(records[0], max_tokens=1640) == {7: 100}         # no room for the answer
    assert crops_of(records[3]).keys() == crops_of(records[4]).keys() == {7, 13}
    assert crops_of(records[1]) == {7: 100}
    assert crops_of(records[2]) == {14: 100}
    for epoch in range(10):
        example = data.encode(records[0], TOKENIZER, config, RELEASED, 0, epoch)
        assert (n_crops(example), len(example.pool_dst)) in ((7, 955), (13, 1582))
        assert data.size(records[0], TOKENIZER, config, RELEASED, 0, epoch)[1] == n_crops(example)


def test_the_points_of_one_video_in_five_are_asked_for_in_one_conversation(folder):
    """Paper 3.2: a conversation has the same answers as the branches of a tree."""
    points = [{**VIDEO_POINT, "label": label} for label in ("cat", "dog")]
    records = open_records(
        folder, video(*points, video=VIDEO), video(*points, CAPTION, video=VIDEO))
    config = replace(CONFIG, multi_turn_share=0.2)

    def examples(record):
        info = read_headers(record, config)
        return [data.build(record, info, TOKENIZER, config, VISION, 0, epoch)[0]
                for epoch in range(200)]

    (joined,) = annotations_of(records[0], replace(config, multi_turn_share=1),
                               np.random.default_rng(0))
    assert (joined["type"], joined["style"], joined["weight"]) == ("qa", "user_qa", 1)
    n_branches = Counter(example.n_branches for example in examples(records[0]))
    assert n_branches.keys() == {1, 2}
    assert 25 < n_branches[1] < 55
    assert {example.n_branches for example in examples(records[1])} == {3}
    # a tree skips one annotation, but a conversation would be skipped as a whole
    long = {**VIDEO_POINT, "label": "cow" * 400}
    many = {**VIDEO_POINT, "points": VIDEO_POINT["points"] * 61}
    for other, fields in ((long, {"max_tokens": 1500}), (many, {})):
        (record,) = open_records(folder, video(points[0], other, video=VIDEO), name="other.jsonl")
        info = read_headers(record, config)
        always = replace(config, multi_turn_share=1, **fields)
        for epoch in range(5):
            example, _ = data.build(record, info, TOKENIZER, always, VISION, 0, epoch)
            assert (example.n_branches, example.dropped_branches) == (1, 1)
    orders = set()
    for example in examples(records[0])[:60]:
        answers = TOKENIZER.decode(example.targets[example.weights > 0])
        assert answers.count("</points>") == 2 and ">cat<" in answers and ">dog<" in answers
        orders.add((example.n_branches, answers.index(">cat<") < answers.index(">dog<")))
    assert len(orders) == 4


def learned(example):
    """The text of all targets with loss, with "|" for EOS."""
    ids = example.targets[example.weights > 0].tolist()
    return TOKENIZER.decode([ord("|") if i == TOKENIZER.eos else i for i in ids])


@pytest.mark.parametrize("media", [{}, {"image": "0.png"}])
@pytest.mark.parametrize("others", [(), ({"type": "text", "text": "8"},), (QA,)])
def test_a_text_without_a_prompt_is_learned_from_its_first_token_on(folder, media, others):
    record = {**media, "annotations": [{"type": "text", "text": "7 cats"}, *others]}
    for epoch in range(4):                           # the branches in both orders
        example = encoded(folder, record, epoch=epoch)
        texts = {"7 cats", *(other.get("text", "a") for other in others)}
        assert {*learned(example).rstrip("|").split("|")} == texts
        assert {*example.weights.tolist()} <= {0, 1}
        tokens, targets = example.tokens.tolist(), example.targets.tolist()
        if others:                                   # starts with BOS, which predicts "7"
            start = tokens.index(ord("7"))
            assert (tokens[start - 1], targets[start - 1]) == (TOKENIZER.bos, ord("7"))


def test_records_with_the_same_id_make_random_choices_of_their_own(folder):
    question = {"type": "qa", "question": "q", "options": ["a", "b", "c", "d"], "answer_idx": 0,
                "shuffle_options": True}
    records = open_records(folder, *[{"id": "x", "annotations": [question]}] * 200)
    assert {record["id"] for record in records} == {"x"}
    letters = Counter(learned(data.encode(record, TOKENIZER, CONFIG, VISION, 0, 0))[0]
                      for record in records)
    assert all(letters[letter] >= 30 for letter in "ABCD"), letters


def test_too_many_points_cost_their_annotation_and_tracks_have_no_such_limit(folder):
    points = [{"x": k, "y": k} for k in range(61)]
    crowd = {"type": "point", "label": "dots", "coords": "percent", "points": points}
    caption = {"type": "caption", "text": "dots"}
    example = encoded(folder, image(crowd, caption, image="0.png"))
    assert example.dropped_branches == 1
    assert "caption" in TOKENIZER.decode(example.tokens)
    example = encoded(folder, image({**crowd, "points": points[:60]}, image="0.png"))
    assert example.dropped_branches == 0
    points = [{"t": 0.5, "id": k, "x": k, "y": k} for k in range(61)]
    track = {"type": "track", "label": "dot", "coords": "percent", "points": points}
    video = {"frames": GREY_FRAMES[:3], "fps": 2.0}
    example = encoded(folder, {"video": video, "annotations": [track]})
    assert " 61 600 600" in TOKENIZER.decode(example.tokens)


def test_a_track_with_no_point_on_a_frame_is_left_out_and_never_answered_with_none(folder):
    points = [{"t": 0.5 + k / 6, "id": 1, "x": 1, "y": 1} for k in (1, 2)]
    track = {"type": "track", "label": "dot", "coords": "percent", "fps": 6, "points": points}
    video = {"frames": GREY_FRAMES[:3], "fps": 2.0}
    record = {"video": video, "annotations": [track, {"type": "caption", "text": "grey"}]}
    example = encoded(folder, record)
    assert (example.dropped_branches, example.n_branches) == (1, 1)
    text = TOKENIZER.decode(example.tokens)
    assert "grey" in text
    assert "dot" not in text
    # a record with only this track has nothing to train on, and no prompt is made for it
    record = open_records(folder, {"video": video, "annotations": [track]})[0]
    assert data.size(record, TOKENIZER, CONFIG, VISION, 0, 0) == (0, 0)
    assert not questions_of(record, read_headers(record, CONFIG), CONFIG)


def test_an_unreadable_image_costs_its_record_only(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.png")
    content = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "page.png").write_text("<html>404</html>")
    names = ("cut.png", "page.png", "gone.png")
    path = write(tmp_path / "r.jsonl", *(image(CAPTION, image=name) for name in names))
    cut, page, gone = Records(path)
    for record, kind in ((page, "damaged image"), (gone, "missing file")):
        with pytest.raises(Unreadable, match=f"^{kind}: "):
            data.size(record, TOKENIZER, CONFIG, VISION, 0, 0)
    # The header of a truncated file is intact, so the record is planned and only fails while it is
    # decoded. Then a placeholder of the planned size replaces it.
    size = data.size(cut, TOKENIZER, CONFIG, VISION, 0, 0)
    with pytest.raises(Unreadable, match=r"^damaged image: "):
        data.encode(cut, TOKENIZER, CONFIG, VISION, 0, 0)
    example = placeholder("cut", *size, VISION, "damaged image: cut short")
    assert size == (len(example.tokens), len(example.images))
    assert (example.id, example.unreadable) == ("cut", "damaged image: cut short")
    assert example.weights.sum() == 0
    assert (example.images == 0).all()


def test_the_reason_of_a_lost_record_does_not_repeat_its_place(tmp_path, monkeypatch):
    """The caller prints the location first: "r.jsonl:1: size differs: an image is not .."."""
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    (record,) = Records(write(tmp_path / "r.jsonl", image(CAPTION)))
    # the number of crops is the same, but the size is not
    monkeypatch.setattr(vision, "to_array", lambda image: np.zeros((64, 48, 3), np.uint8))
    with pytest.raises(Unreadable) as error:
        data.encode(record, TOKENIZER, CONFIG, VISION, 0, 0)
    path = tmp_path / "a.png"
    assert str(error.value) == f"size differs: {path} is not as large as its header says"


@pytest.mark.parametrize("crops", [10, 400])
def test_the_largest_example_fills_a_row(crops):
    """400 crops have more windows than a row has tokens."""
    config = Config(data=CONFIG, model=PRESETS["toy"], pack_crops=crops)
    example = largest_example(config)
    n_visual = min(25 * crops, CONFIG.max_tokens - 1)            # a 10 x 10 crop has 5 x 5 windows
    assert len(example.tokens) == CONFIG.max_tokens
    assert example.tokens.max() < 384
    assert (example.weights == 1).all()
    assert example.images.shape == (crops, 100, 300)
    assert example.pool_src.shape == (n_visual, 9)
    assert np.array_equal(example.pool_dst, np.arange(1, 1 + n_visual))
    patches = np.sort(example.pool_src[example.pool_src >= 0])
    assert np.array_equal(patches, np.arange(4 * n_visual))      # each patch at most once
    per_image = 1 + CONFIG.most_crops()                          # 1 is the low-resolution view
    assert np.array_equal(example.image_id, np.arange(crops) // per_image)
    parts = [largest_example(config, parallel.CropShard(rank, 3, 0, crops))
             for rank in range(3)]
    assert sum(len(part.images) for part in parts) == crops


# --------------------------------------------------------------------------------------------------
# prompts


def test_one_transcript_of_an_image_is_read_in_an_epoch_and_another_in_the_next(folder):
    """Stage 1 adds one transcript to the caption, later stages add none (docs/molmo2.md 9.3)."""
    caption = {"type": "caption", "text": "all of it"}
    transcripts = [{"type": "caption", "style": "transcript", "text": f"voice {k}"}
                   for k in range(4)]
    record = image(caption, *transcripts, image="0.png")
    texts = [TOKENIZER.decode(encoded(folder, record, epoch=k).tokens) for k in range(30)]
    assert all("all of it" in text and text.count("voice ") == 1 for text in texts)
    assert {text[text.index("voice ") + 6] for text in texts} == set("0123")
    later = encoded(folder, record, replace(CONFIG, n_transcripts=0))
    assert "voice" not in TOKENIZER.decode(later.tokens)


# --------------------------------------------------------------------------------------------------
# pixels


def test_a_prompt_shows_a_video_as_training_does(folder):
    """The tokens before the question, the pixels and the windows are the same."""
    caption = {"type": "caption", "text": "a rabbit", "style": "video_long_caption"}
    example = encoded(folder, {
        "video": {"path": VIDEO, "start": 1.0, "end": 4.0},
        "subtitles": [{"start": 2.0, "end": 2.5, "text": "hm"}], "annotations": [caption]})
    video = media.probe(VIDEO_PATH)
    times, _ = clip_times(video.duration, CONFIG, 1.0, 4.0)
    frames = media.frames(video, [1.0 + t for t in times])
    clip = VideoClip(times, frames, shift_subtitles([(2.0, 2.5, "hm")], 1.0))
    prompt = encode_prompt([], [("?", None)], TOKENIZER, CONFIG, VISION, clip)
    check_prompt(prompt, example)
    assert example.pool_src.shape[1] == 9
    assert len(example.images) == len(clip.times) == 7
    assert "1.0 - 1.5 hm" in TOKENIZER.decode(example.tokens)


def test_a_prompt_shows_images_as_training_does(folder):
    names = ["1.png", "0.png"]
    example = encoded(folder, {"images": names, "annotations": [QA]})
    images = [media.read_image(folder / name) for name in names]
    prompt = encode_prompt(images, [("?", None)], TOKENIZER, CONFIG, VISION)
    check_prompt(prompt, example)
    assert example.pool_src.shape[1] == 4
    crops = [vision.crops(pixels, CONFIG.max_crops, VISION)[0] for pixels in images]
    assert np.array_equal(example.images, np.concatenate(crops))
    text = TOKENIZER.decode(example.tokens)
    assert 0 <= text.find("Image 1") < text.find("Image 2")


def check_prompt(prompt, example):
    n = int(np.flatnonzero(prompt.tokens == TOKENIZER.chat_start)[0])
    for name, end in (("tokens", n), ("bidir", n), ("images", None), ("pool_src", None),
                      ("pool_dst", None)):
        assert np.array_equal(getattr(example, name)[:end], getattr(prompt, name)[:end]), name
    assert not prompt.weights.any()
    assert TOKENIZER.decode(prompt.tokens[n:]) == "user\n?\nassistant\n"


def recorded(calls, function, measure):
    """-> the function, which also appends measure(*args) to `calls`."""
    def call(*args):
        calls.append(measure(*args))
        return function(*args)

    return call


def test_the_ranks_of_a_group_decode_every_crop_exactly_once(folder, monkeypatch):
    cp_size = 5
    inputs = [{"video": {"path": VIDEO, "start": 1.0, "end": 4.0}},
              {"video": {"frames": GREY_FRAMES, "fps": 2}},
              {"image": "0.png"}, {"images": ["1.png", "0.png", "2.png"]}, {}]
    records = list(open_records(folder, *(visual | {"annotations": [QA]} for visual in inputs)))
    sizes = [data.size(record, TOKENIZER, CONFIG, VISION, 0, 0)[1] for record in records]
    whole = [data.encode(record, TOKENIZER, CONFIG, VISION, 0, 0) for record in records]
    read_paths = []
    frame_counts = []
    count_frames = recorded(frame_counts, media.frames, lambda video, times: len(times))
    monkeypatch.setattr(media, "read_image", recorded(read_paths, media.read_image, Path))
    monkeypatch.setattr(media, "frames", count_frames)
    images_of_ranks = []
    for rank in range(cp_size):
        images = []
        for k, record in enumerate(records):
            shard = parallel.CropShard(rank, cp_size, sum(sizes[:k]), sum(sizes))
            example = data.encode(record, TOKENIZER, CONFIG, VISION, 0, 0, shard)
            selected = select_crops(whole[k], shard)
            for name in ("tokens", "weights", "images", "image_id", "cp_rank", "pool_src",
                         "pool_dst"):
                assert np.array_equal(getattr(example, name), getattr(selected, name)), name
            images.append(example.images)
        images_of_ranks.append(images[:-1])                      # the last record has no image
    for k, example in enumerate(whole[:-1]):
        parts = [images[k] for images in images_of_ranks]
        assert np.array_equal(np.concatenate(parts), example.images)
    loads = [sum(len(part) for part in images) for images in images_of_ranks]
    assert sum(loads) == sum(sizes)
    # the largest image has 3 crops
    assert max(abs(load - sum(sizes) / cp_size) for load in loads) <= 3
    assert sum(frame_counts) == 7 + 7
    assert sum(path.name not in GREY_FRAMES for path in read_paths) == 1 + 3
