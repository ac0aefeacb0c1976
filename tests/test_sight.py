"""Records of every kind - an image, several, a film, pictures of a film, text - from their headers to what the model reads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
import model
import vision
from records import media

MEDIA = Path(__file__).parent / "media"
TOKENIZER = data.ByteTokenizer()
CONFIG = data.DataConfig(max_tokens=4096, max_crops=2, max_frames=8, vision=model.TOY_VISION)
FILM, POINT = "bigbuckbunny.mp4", {"type": "point", "label": "l"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("media"), np.random.default_rng(0)
    for k in range(12):
        w, h = rng.integers(12, 70, 2)
        Image.fromarray(rng.integers(0, 255, (h, w, 3), np.uint8)).save(folder / f"{k}.png")
    for k in range(6):
        Image.fromarray(np.full((24, 32, 3), 40 * k, np.uint8)).save(folder / f"still{k}.png")
    shutil.copy(MEDIA / FILM, folder / FILM)
    return folder


def source(folder, *records, name="r.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, records)))
    return data.Records(folder / name, folder)


def annotation(rng, kind, n, span):
    """A random annotation that such a record may have. n: images; span: first and last second of the clip."""
    words = lambda: " ".join(rng.choice(["cat", "dog", "red", "runs", "ünï", "<|im_end|>"], int(rng.integers(1, 9))))        # noqa: E731
    times = [round(float(t), 2) for t in rng.uniform(*span, 3)] if span else []
    types = {"text": ["qa", "text"], "video": ["caption", "qa", "point", "count", "track"]}.get(kind, ["caption", "qa", "point", "count"])
    a = {"type": str(rng.choice(types)), "weight": float(rng.choice([0, 0.5, 1], p=[0.1, 0.2, 0.7]))}
    points = [{"x": float(rng.uniform(0, 100)), "y": float(rng.uniform(0, 100))} for _ in range(3)]
    if a["type"] == "caption":
        a |= {"text": words()} | ({"start": min(times), "end": max(times)} if times and rng.random() < 0.4 else {})
    elif a["type"] == "text":
        a |= {"text": words()}
    elif a["type"] == "count":
        a |= {"label": words(), "count": int(rng.integers(0, 9))}
    elif a["type"] == "qa":
        turns = [{"question": words(), "answer": words(), "weight": int(rng.integers(0, 2))} for _ in range(int(rng.integers(1, 4)))]
        options = {"question": words(), "options": ["a", "b", words()], "answer_idx": 1, "shuffle_options": True}
        a |= {"turns": turns} if rng.random() < 0.5 else options
    elif a["type"] == "point":
        where = [{"image": int(rng.integers(n))} if kind == "images" else {"t": t} if span else {} for t in times or [0] * 3]
        a |= {"label": words(), "coords": "percent", "points": [p | w for p, w in zip(points, where, strict=True)]}
    else:
        points = [{**p, "t": t, "id": k} for k, (p, t) in enumerate(zip(points, times, strict=True))]
        a |= {"label": words(), "coords": "percent", "points": points}
    return a


def record(rng):
    kind = str(rng.choice(["image", "images", "stills", "film", "text"], p=[0.3, 0.25, 0.2, 0.02, 0.23]))
    n, span, r = int(rng.integers(2, 6)), None, {}
    if kind == "image":
        r["image"] = f"{rng.integers(12)}.png"
    elif kind == "images":
        r["images"] = [f"{k}.png" for k in rng.integers(0, 12, n)]
    elif kind == "stills":
        r["video"], span = {"frames": [f"still{k}.png" for k in range(6)], "fps": 2.0}, (0, 3)
        if rng.random() < 0.5:
            r["video"] |= {"start": 0.5, "end": 2.4}
            span = (0.5, 2.4)
    elif kind == "film":
        r["video"], span = {"path": FILM, "start": 1.0, "end": 3.0}, (1, 3)
    if span and rng.random() < 0.5:
        r["subtitles"] = [{"start": 0.2, "end": 1.5, "text": "hello"}, {"start": 2.0, "end": 2.2, "text": "there"}]
    shown = "video" if span else kind
    return r | {"annotations": [annotation(rng, shown, n, span) for _ in range(int(rng.integers(1, 6)))]}


def test_size_equals_what_encode_gives_on_a_thousand_records_of_all_kinds(folder):
    """... with random limits; no visual token is cut, and tokens in are those laid out and those reported as dropped."""
    rng = np.random.default_rng(1)
    records, kinds, cut = source(folder, *(record(rng) for _ in range(1000))), set(), 0
    assert len(list(records)) == 1000
    for i in range(1000):
        r = records[i]
        config = replace(CONFIG, max_tokens=int(rng.integers(40, 1500)), max_frames=int(rng.integers(1, 9)),
                         max_crops=int(rng.integers(1, 4)), sqrt_length=bool(i % 2), prefix_all=bool(i % 3), fps=float(rng.choice([1, 2])))
        size, example = data.size(r, TOKENIZER, config, 0, i % 4), data.encode(r, TOKENIZER, config, 0, i % 4)
        kinds.add("video" if "video" in r else "images" if "images" in r else "image" if "image" in r else "text")
        if size == (0, 0):
            assert not example.weights.any()
        else:
            assert size == (len(example.tokens), 0 if example.images is None else len(example.images)) and size[0] <= config.max_tokens
        whole = data.build_tree(r, data.read_headers(r, config), TOKENIZER, replace(config, max_tokens=10**6), 0, i % 4)
        assert len(example.tokens) + example.dropped_tokens == len(whole.tokens)
        parts = lambda e: [e.tokens[e.branch == j].tolist() for j in range(e.branch.max() + 1)]              # noqa: E731
        if example.branch.max() > 0:                                     # the trunk whole, and of the branches some, each of them whole
            assert parts(example)[0] == parts(whole)[0] and all(part in parts(whole)[1:] for part in parts(example)[1:])
        seen = np.isin(example.tokens, [TOKENIZER.special["im_patch"]])
        assert seen.sum() == np.isin(whole.tokens, [TOKENIZER.special["im_patch"]]).sum() == len(example.pool_dst) == len(example.pool_src)
        cut += example.dropped
    assert kinds == {"video", "images", "image", "text"} and cut > 100


def test_a_film_is_what_asking_about_it_shows(folder):
    """The same tokens before the question, the same pixels and windows as data.ask makes of the clip."""
    (r,) = source(folder, {"video": {"path": FILM, "start": 1.0, "end": 4.0}, "subtitles": [{"start": 2.0, "end": 2.5, "text": "hm"}],
                           "annotations": [{"type": "caption", "text": "a rabbit", "style": "video_long_caption"}]}, name="film.jsonl")
    example = data.encode(r, TOKENIZER, CONFIG, 0, 0)
    clip, film = data.open_clip(MEDIA / FILM, CONFIG, [(2.0, 2.5, "hm")], 1.0, 4.0)
    prompt = data.encode_prompt([], [("?", None)], TOKENIZER, CONFIG, clip)
    n = int(np.flatnonzero(prompt.tokens == TOKENIZER.chat_start)[0])
    assert np.array_equal(example.tokens[:n], prompt.tokens[:n]) and np.array_equal(example.bidir[:n], prompt.bidir[:n])
    assert np.array_equal(example.images, prompt.images) and np.array_equal(example.pool_src, prompt.pool_src)
    assert example.pool_src.shape[1] == 9 and len(example.images) == len(clip.times) == 7
    assert "1.0 - 1.5 hm" in TOKENIZER.decode(example.tokens) and film.width > film.height


def test_images_come_in_their_order_and_points_say_which_one(folder):
    r = source(folder, {"images": ["1.png", "0.png"], "annotations": [
        {"type": "point", "label": "dot", "coords": "percent", "mode": "point", "style": "pointing", "points": [
            {"image": 1, "x": 50, "y": 50}, {"image": 0, "x": 10, "y": 20}]}]}, name="two.jsonl")[0]
    example = data.encode(r, TOKENIZER, CONFIG, 0, 0)
    one, zero = (media.read_image(folder / name) for name in ("1.png", "0.png"))
    crops = [vision.crops(image, CONFIG.max_crops, CONFIG.vision)[0] for image in (one, zero)]
    assert np.array_equal(example.images, np.concatenate(crops))
    text = TOKENIZER.decode(example.tokens)
    assert "Image 1" in text and "Image 2" in text and text.index("Image 1") < text.index("Image 2")
    assert '1 1 100 200' in text and '2 2 500 500' in text


def test_a_turn_of_weight_0_is_context(folder):
    turns = [{"question": "a?", "answer": "no", "weight": 0}, {"question": "b?", "answer": "yes"}]
    plain, muted = (data.encode(source(folder, {"annotations": [{"type": "qa", "turns": t}]}, name="t.jsonl")[0], TOKENIZER, CONFIG, 0, 0)
                    for t in ([{**turns[0], "weight": 1}, turns[1]], turns))
    learned = lambda e: TOKENIZER.decode(e.targets[e.weights > 0])        # noqa: E731
    assert np.array_equal(plain.tokens, muted.tokens) and learned(plain) == "noyes" and learned(muted) == "yes"


def test_captions_of_videos_and_tracks_have_their_flat_weights(folder):
    """0.1 and 0.2 in stages 2 and 3, whatever their length; a question about the same video goes by the roots (spec 7.1)."""
    config = replace(CONFIG, sqrt_length=True, sqrt_branches=True, point_weight=0.2, video_caption_weight=0.1)
    video = {"video": {"frames": ["still0.png", "still1.png"], "fps": 2.0}}
    kinds = [{"type": "caption", "text": "grey"}, {"type": "qa", "question": "?", "answer": "grey"},
             {"type": "track", "label": "x", "coords": "percent", "points": [{"t": 0.0, "id": 1, "x": 5, "y": 5}]}]
    weights = [data.encode(source(folder, video | {"annotations": [a]}, name="w.jsonl")[0], TOKENIZER, config, 0, 0).weights for a in kinds]
    n = 5                                                                # g r e y and EOS
    assert [set(w[w > 0].round(6).tolist()) for w in weights] == [{np.float32(0.1).round(6)}, {np.float32(2 / n**0.5).round(6)},
                                                                   {np.float32(0.2).round(6)}]


@pytest.mark.parametrize(("changes", "code"), [
    ({"images": ["0.png"] * 6}, "S03"), ({"images": ["0.png", "gone.png"]}, "S20"),
    ({"video": "gone.mp4"}, "S20"), ({"video": "0.png"}, "S23"), ({"video": {"path": FILM, "start": 1000.0, "end": 1001.0}}, "S23"),
    ({"video": {"frames": ["still0.png", "gone.png"], "fps": 2.0}}, "S24"),
    ({"video": FILM, "annotations": [{"type": "caption", "text": "x", "start": 1.0, "end": 5000.0}]}, "S10"),
    ({"video": FILM, "annotations": [{**POINT, "coords": "percent", "points": [{"x": 1, "y": 1, "t": 999.0}]}]}, "S10"),
    ({"video": FILM, "annotations": [{**POINT, "coords": "pixel", "points": [{"x": 9999, "y": 1, "t": 0.0}]}]}, "E62"),
])
def test_media_that_are_no_good_cost_their_record_while_planning(folder, changes, code):
    r = source(folder, {"annotations": [{"type": "qa", "question": "?", "answer": "x"}]} | changes, name="bad.jsonl")[0]
    with pytest.raises(data.Unreadable, match=code):
        data.size(r, TOKENIZER, CONFIG, 0, 0)


def test_a_video_is_probed_once_until_its_file_changes(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(media, "probe", lambda path, probe=media.probe: (asked.append(path), probe(path))[1])
    line = {"video": "own.mp4", "annotations": [{"type": "caption", "text": "x"}]}
    shutil.copy(MEDIA / FILM, folder / "own.mp4")
    found = [source(folder, line, name="probe.jsonl")[0] for _ in range(3)]
    sizes = [data.size(r, TOKENIZER, CONFIG, 0, 0) for r in found]
    assert len(asked) == 1 and sizes[0] == sizes[1] == sizes[2]
    notes = folder / ".probe.jsonl.probes.jsonl"
    notes.write_text(notes.read_text() + '[["cut')                       # a line that a kill cut off
    (folder / "own.mp4").touch()
    data.size(source(folder, line, name="probe.jsonl")[0], TOKENIZER, CONFIG, 0, 0)
    assert len(asked) == 2


def test_an_image_is_described_aloud_once_an_epoch_and_by_another_voice_in_the_next(folder):
    """Stage 1 reads the caption and one transcript, drawn anew in every epoch; later stages read none (spec 9.3)."""
    spoken = [{"type": "caption", "style": "transcript", "text": f"voice {k}"} for k in range(4)]
    r = source(folder, {"image": "0.png", "annotations": [{"type": "caption", "text": "all of it"}, *spoken]}, name="s.jsonl")[0]
    heard = set()
    for epoch in range(30):
        example = data.encode(r, TOKENIZER, CONFIG, 0, epoch)
        text = TOKENIZER.decode(example.tokens)
        assert "all of it" in text and text.count("voice ") == 1 and example.branch.max() == 2 and example.dropped == 0
        heard.add(text[text.index("voice ") + 6])
    assert heard == set("0123")
    assert "voice" not in TOKENIZER.decode(data.encode(r, TOKENIZER, replace(CONFIG, n_transcripts=0), 0, 0).tokens)


def clip_of_stills(folder, *annotations, fps=2.5, **more):
    """Six pictures at fps, from 0.4 s on, as one record; the pictures are grey of 0, 40, .. 200."""
    video = {"frames": [f"still{k}.png" for k in range(6)], "fps": fps, "start": 0.4, "end": 2.2}
    return source(folder, {"video": video, "annotations": list(annotations), **more}, name="c.jsonl")[0]


def test_a_clip_of_stills_word_by_word_and_pixel_by_pixel(folder):
    """Times, the picture on display at each, points in pixels of the file, captions of a part: against what stands here."""
    config = replace(CONFIG, max_frames=5, prefix_all=False, separator=";", video_caption_weight=0.1, point_weight=0.2, sqrt_length=True)
    point = {"type": "point", "label": "Dot", "coords": "pixel", "mode": "point", "question": "Where?",
             "points": [{"t": 1.4, "x": 16, "y": 6}]}                    # of 32 x 24
    r = clip_of_stills(folder, point, subtitles=[{"start": 0.1, "end": 0.3, "text": "gone"}, {"start": 0.2, "end": 0.9, "text": "here"}])
    example = data.encode(r, TOKENIZER, config, 0, 0)
    text = TOKENIZER.decode(example.tokens)
    assert text.startswith("0.0  0.5  1.0  1.5  1.8 ")
    assert "0.0 - 0.5 here" in text and "gone" not in text and '<points coords="1.0 1 500 250">' in text
    grey = [int(crop.astype(int).mean().round()) for crop in example.images]
    assert grey == [40, 80, 120, 160, 200]                               # at 0.4, 0.9, 1.4, 1.9, 2.2 s of the file
    assert set(example.weights[example.weights > 0].round(6).tolist()) == {np.float32(0.2).round(6)}


def test_weights_of_every_level_multiply(folder):
    """Of the record, of the annotation, of the turn; the roots count tokens and not weights (spec 7.1)."""
    turns = [{"question": "?", "answer": "abc", "weight": 0.5}, {"question": "?", "answer": "d"}]
    config = replace(CONFIG, sqrt_length=True, prefix_all=False)
    r = source(folder, {"weight": 2.0, "annotations": [{"type": "qa", "weight": 3.0, "turns": turns}]}, name="w2.jsonl")[0]
    weights = data.encode(r, TOKENIZER, config, 0, 0).weights
    n = 3 + 1 + 1 + 1                                                    # two answers, each with its EOS
    assert weights[weights > 0] == pytest.approx([6 * 0.5 * 2 / n**0.5] * 4 + [6 * 2 / n**0.5] * 2)
    count = {"type": "count", "label": "dots", "count": 3}
    of = lambda a, **seen: data.encode(source(folder, {"annotations": [a], **seen}, name="w3.jsonl")[0], TOKENIZER,     # noqa: E731
                                       replace(config, point_weight=0.2, video_caption_weight=0.1), 0, 0).weights.max()
    assert of(count, image="0.png") == pytest.approx(0.2) and of({"type": "caption", "text": "abc"}, image="0.png") == pytest.approx(1.0)


def test_too_many_points_cost_their_annotation_and_tracks_have_no_such_limit(folder):
    points = [{"x": k, "y": k} for k in range(61)]
    crowd, caption = {"type": "point", "label": "dots", "coords": "percent", "points": points}, {"type": "caption", "text": "dots"}
    example = data.encode(source(folder, {"image": "0.png", "annotations": [crowd, caption]}, name="m.jsonl")[0], TOKENIZER, CONFIG, 0, 0)
    assert example.dropped == 1 and "caption" in TOKENIZER.decode(example.tokens)
    track = {"type": "track", "label": "dot", "coords": "percent", "points": [{"t": 0.5, "id": k, "x": k, "y": k} for k in range(61)]}
    video = {"frames": ["still0.png", "still1.png", "still2.png"], "fps": 2.0}
    r = source(folder, {"video": video, "annotations": [track]}, name="n.jsonl")[0]
    assert " 61 600 600" in TOKENIZER.decode(data.encode(r, TOKENIZER, CONFIG, 0, 0).tokens)


def test_films_with_tracks_are_looked_at_where_the_tracks_have_points(folder):
    """On a grid of their rate and not spread over the film, so that no point is lost that a frame could show (spec 3.1)."""
    track = {"type": "track", "label": "dot", "coords": "percent", "fps": 1,
             "points": [{"t": float(t), "id": 1, "x": 10 * t + 5, "y": 50} for t in range(6)]}
    for max_frames, seen in ((6, 6), (4, 4), (384, 6)):
        r = source(folder, {"video": FILM, "annotations": [track]}, name="t.jsonl")[0]
        config = replace(CONFIG, max_frames=max_frames)
        sight, text = data.read_headers(r, config), TOKENIZER.decode(data.encode(r, TOKENIZER, config, 0, 0).tokens)
        assert [t for t in sight.times if t == int(t)] == list(range(seen)) and len(sight.times) <= max_frames
        assert all(f"{10 * 10 * t + 50:03d} 500" in text for t in range(seen)) and f"{100 * seen + 50:03d} 500" not in text
    both = source(folder, {"video": FILM, "annotations": [track, {"type": "caption", "text": "x"}]}, name="t.jsonl")[0]
    frames = len(data.read_headers(both, CONFIG).times)
    assert data.size(both, TOKENIZER, CONFIG, 0, 0)[1] == len(data.encode(both, TOKENIZER, CONFIG, 0, 0).images) == frames


@pytest.mark.parametrize("notes", [b"\xff\xfe", b"5", b"null", b"[1,2]", b'[["a",[1],2,1],[1,2,3,4]]', b'[["a",1,2,1],["x"]]', b"[" * 9000])
def test_damaged_notes_of_probes_cost_nothing(folder, notes):
    (folder / ".d.jsonl.probes.jsonl").write_bytes(notes + b"\n")
    r = source(folder, {"video": FILM, "annotations": [{"type": "caption", "text": "x"}]}, name="d.jsonl")[0]
    assert data.size(r, TOKENIZER, CONFIG, 0, 0)[1] == len(data.read_headers(r, CONFIG).times)


def test_probes_of_two_processes_stand_together_and_a_bad_film_is_asked_once(folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(media, "probe", lambda path, probe=media.probe: (asked.append(path.name), probe(path))[1])
    for name in ("x.mp4", "y.mp4"):
        shutil.copy(MEDIA / FILM, tmp_path / name)
    (tmp_path / "bad.mp4").write_bytes(b"no film")
    one, two = media.Probes(tmp_path / "notes"), media.Probes(tmp_path / "notes")
    one(tmp_path / "x.mp4")
    two(tmp_path / "y.mp4")
    third = media.Probes(tmp_path / "notes")
    assert third(tmp_path / "x.mp4") == third(tmp_path / "y.mp4") == (1280, 720, pytest.approx(5.28), pytest.approx(0.04))
    assert asked.count("y.mp4") == 1 and asked.count("x.mp4") <= 2
    for _ in range(3):
        with pytest.raises(media.Unreadable, match="S23"):
            third(tmp_path / "bad.mp4")
    assert asked.count("bad.mp4") == 1
    (tmp_path / "folder").mkdir()
    assert media.Probes(tmp_path / "folder")(tmp_path / "x.mp4")[0] == 1280          # cannot be written: does without


def test_a_file_that_changes_while_it_is_read_is_told(folder):
    r = source(folder, *[{"annotations": [{"type": "text", "text": f"number {k}"}]} for k in range(5)], name="live.jsonl")[0]
    records = r["source"]
    (folder / "live.jsonl").write_text((folder / "live.jsonl").read_text().replace("number 3", "no. three"))
    with pytest.raises(data.DataError, match="has changed since it was opened"):
        records[3]


def test_a_picture_that_would_fill_the_memory_is_not_opened(folder):
    """A file of a few bytes whose header claims 2.5 thousand million pixels: Pillow's limit stays on."""
    import struct
    import zlib

    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = lambda kind, body: struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))   # noqa: E731
    (folder / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(9))))
    r = source(folder, {"image": "bomb.png", "annotations": [{"type": "caption", "text": "x"}]}, name="bomb.jsonl")[0]
    with pytest.raises(data.Unreadable, match="S22"):
        data.size(r, TOKENIZER, CONFIG, 0, 0)


@pytest.mark.parametrize("cp", [1, 2, 3, 5])
def test_what_the_ranks_of_a_group_decode_is_the_whole_once(folder, cp, monkeypatch):
    """A film, its pictures, an image, several: each rank decodes its own units only, and together they have every crop."""
    read, filmed = [], []
    records = source(folder, *(seen | {"annotations": [{"type": "qa", "question": "?", "answer": "!"}]} for seen in (
        {"video": {"path": FILM, "start": 1.0, "end": 4.0}}, {"video": {"frames": [f"still{k}.png" for k in range(6)], "fps": 2}},
        {"image": "0.png"}, {"images": ["1.png", "0.png", "2.png"]}, {})), name="shared.jsonl")
    sizes = [data.size(r, TOKENIZER, CONFIG, 0, 0)[1] for r in records]
    whole = [data.encode(r, TOKENIZER, CONFIG, 0, 0) for r in records]
    open_image, open_film = media.read_image, media.frames
    monkeypatch.setattr(media, "read_image", lambda path: (read.append(path), open_image(path))[1])
    monkeypatch.setattr(media, "frames", lambda video, times: (filmed.append(len(times)), open_film(video, times))[1])
    loads, ranks = [], []
    for rank in range(cp):
        shares = [data.CropShard(rank, cp, sum(sizes[:k]), sum(sizes)) for k in range(len(sizes))]
        mine = [data.encode(r, TOKENIZER, CONFIG, 0, 0, share) for r, share in zip(records, shares, strict=True)]
        for x, of_all, share in zip(mine, whole, shares, strict=True):
            cut = data.select_crops(of_all, share)
            for name in ("tokens", "weights", "images", "unit", "owner", "pool_src", "pool_dst"):
                assert np.array_equal(getattr(x, name), getattr(cut, name)), name
        ranks.append([x.images for x in mine[:-1]])
        loads.append(sum(len(x.images) for x in mine[:-1]))
    for k, x in enumerate(whole[:-1]):
        assert np.array_equal(np.concatenate([images[k] for images in ranks]), x.images)
    assert sum(loads) == sum(sizes) and max(abs(n - sum(sizes) / cp) for n in loads) <= 3      # crops of the largest image
    assert sum(filmed) == 7 + 7 and sum("still" not in path.name for path in read) == 1 + 3
