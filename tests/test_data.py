"""Records: what is read, what is refused and with which words; sizes, prompts, mixtures, the toy world."""

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
import model
from records import media
from toy import world as tiny

MEDIA = Path(__file__).parent / "media"
CONFIG = data.DataConfig(max_tokens=4096, max_crops=4, vision=model.TOY_VISION)
TOKENIZER = data.ByteTokenizer(tiny.WORDS)
CAPTION = {"type": "caption", "text": "x"}
POINT = {"type": "point", "label": "l", "coords": "percent", "points": [{"x": 4, "y": 2}]}


def test_pixels_without_a_size_are_checked_against_the_file(tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    line = {"image": "a.png", "annotations": [{**POINT, "coords": "pixel", "points": [{"x": 39, "y": 31}]}]}
    (tmp_path / "r.jsonl").write_text(json.dumps(line))
    source = data.Records(tmp_path / "r.jsonl")                          # found when its header is read: it costs the record
    with pytest.raises(data.Unreadable, match="E62 point y=31"):
        data.size(source[0], TOKENIZER, CONFIG, 0, 0)


def test_a_declared_size_is_the_scale_of_points_in_pixels(tmp_path):
    """The file may be a smaller copy of the image that was annotated."""
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    image = {"path": "a.png", "width": 400, "height": 300}

    def read(**point):
        line = {"image": image, "annotations": [{**POINT, "coords": "pixel", "points": [{"x": 200, "y": 75}], **point}]}
        (tmp_path / "r.jsonl").write_text(json.dumps(line))
        source = data.Records(tmp_path / "r.jsonl")
        example = data.encode(source[0], TOKENIZER, CONFIG, 0, 0)
        assert data.size(source[0], TOKENIZER, CONFIG, 0, 0) == (len(example.tokens), len(example.images))
        return TOKENIZER.decode(example.tokens[example.bidir == 0])

    assert 'coords="1 1 500 250"' in read()
    assert 'coords="1 1 250 125"' in read(size=[800, 600])                # its own size comes first
    with pytest.raises(data.DataError, match=r"E62 point x=410"):
        read(points=[{"x": 410, "y": 75}])


def test_an_unreadable_image_costs_its_record_only(tmp_path):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(tmp_path / "cut.png")
    whole = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "page.png").write_text("<html>404</html>")
    (tmp_path / "thin.png").write_bytes(b"")
    Image.new("RGB", (1000, 1)).save(tmp_path / "thin.png")
    names = ("cut.png", "page.png", "thin.png", "gone.png")
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps({"image": n, "annotations": [CAPTION]}) for n in names))
    cut, page, thin, gone = data.Records(tmp_path / "r.jsonl")
    for record, code in ((page, "S21"), (thin, "S22"), (gone, "S20")):
        with pytest.raises(data.Unreadable, match=code):
            data.size(record, TOKENIZER, CONFIG, 0, 0)
    # the header of a truncated file is sound: it is planned, and found out while decoding; a blank one keeps its place
    size = data.size(cut, TOKENIZER, CONFIG, 0, 0)
    with pytest.raises(data.Unreadable, match="S21"):
        data.encode(cut, TOKENIZER, CONFIG, 0, 0)
    example = data.placeholder("cut", *size, CONFIG, "S21 cut short")
    assert size == (len(example.tokens), len(example.images)) and example.bad == "S21 cut short"
    assert example.weights.sum() == 0 and (example.images == 0).all()


def test_the_tokens_of_branches_that_do_not_fit_are_reported():
    """Tokens laid out and tokens reported as dropped are those of the whole tree, whatever the limit."""
    branches = [data.Branch([([7] * n, False), ([8] * 3, True)]) for n in (5, 9, 2, 30)]
    whole = data.layout([1, 2, 3], [False, True, True], branches)
    assert whole.dropped_tokens == 0
    for limit in range(3, len(whole.tokens) + 2):
        part = data.layout([1, 2, 3], [False, True, True], branches, limit)
        assert len(part.tokens) + part.dropped_tokens == len(whole.tokens) and len(part.tokens) <= limit
        assert (part.dropped_tokens == 0) == (part.dropped == 0)


@pytest.mark.parametrize("mode", ["P", "L", "LA", "RGBA", "CMYK", "I;16", "1"])
def test_images_of_every_mode_become_rgb(tmp_path, mode):
    name = "a.tif" if mode == "CMYK" else "a.png"
    Image.new(mode, (40, 30)).save(tmp_path / name)
    (tmp_path / "r.jsonl").write_text(json.dumps({"image": name, "annotations": [CAPTION]}))
    source = data.Records(tmp_path / "r.jsonl")
    assert source.images(source[0])[0].shape == (30, 40, 3) and source.images(source[0])[0].dtype == np.uint8


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path):
    ramp = np.arange(256, dtype=np.uint16)[None].repeat(4, 0)
    Image.fromarray(ramp * 257).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.mode.startswith("I")
    assert np.array_equal(media.read_image(tmp_path / "a.png"), ramp[..., None].repeat(3, 2))


def test_a_photo_that_exif_turns_is_read_as_displayed(tmp_path):
    photo, exif = Image.new("RGB", (40, 30)), Image.Exif()
    exif[0x0112] = 6
    photo.save(tmp_path / "a.jpg", exif=exif)
    (tmp_path / "r.jsonl").write_text(json.dumps({"image": "a.jpg", "annotations": [CAPTION]}))
    source = data.Records(tmp_path / "r.jsonl")
    assert source.image_sizes(source[0]) == [(30, 40)] and source.images(source[0])[0].shape == (40, 30, 3)


def test_the_real_records_pass_and_the_coins_come_back_within_a_pixel():
    source = data.Records(MEDIA / "records.jsonl")
    assert [r["id"] for r in source] == ["chelsea", "coffee", "astronaut", "coins", "rocket", "text-only"]
    coins = source[3]["annotations"][1]
    text = data.format_points([(1, data.unit_points(coins, (384, 303)))], "coins")
    back = sorted((x, y) for _, _, x, y in data.parse_points(text, 384, 303))
    true = sorted((p["x"], p["y"]) for p in coins["points"])
    assert len(back) == 24
    assert all(min(max(abs(x - a), abs(y - b)) for x, y in back) < 1 for a, b in true)


@pytest.mark.parametrize("limit", [4096, 400, 260, 120])
@pytest.mark.parametrize("epoch", [0, 5])
def test_size_equals_what_encode_gives_on_every_record(limit, epoch):
    """... and no visual token is cut, no branch half kept: tokens in = kept + dropped."""
    worlds = [tiny.World(split) for split in ("train", "test", "unseen")]
    records = [*data.Records(MEDIA / "records.jsonl"), *(world[i] for world in worlds for i in range(15)),
               *(tiny.Sums()[i] for i in range(5))]
    config = data.DataConfig(max_tokens=limit, max_crops=4, vision=model.TOY_VISION, sqrt_length=True)
    for record in records:
        size, example = data.size(record, TOKENIZER, config, 3, epoch), data.encode(record, TOKENIZER, config, 3, epoch)
        crops = 0 if example.images is None else len(example.images)
        if size == (0, 0):
            assert example.weights.sum() == 0
            continue
        assert size == (len(example.tokens), crops) and size[0] <= limit
        assert len(example.pool_src) == len(example.pool_dst) == (example.tokens == TOKENIZER.special["im_patch"]).sum()
        kept = max(int(example.branch.max()), 1)
        assert kept + example.dropped == len(record["annotations"])
        again = data.encode(record, TOKENIZER, config, 3, epoch)
        assert np.array_equal(again.tokens, example.tokens) and np.array_equal(again.weights, example.weights)


def texts(record, config=CONFIG, epoch=0):
    example = data.encode(record, TOKENIZER, config, 0, epoch)
    return [TOKENIZER.decode(example.tokens[(example.branch == j) & (example.bidir == 0)]) for j in range(1, example.branch.max() + 1)]


def test_prompts_of_stage_1_open_with_their_style():
    cat = data.Records(MEDIA / "records.jsonl")[0]
    caption = r"user\nlong_caption( \d+)?:\nassistant\nA close portrait of a tabby cat"
    points = r"user\n(pointing: eye\nassistant\n<points |point_count: eye\nassistant\nCounting the <points )"
    question = r"user\nuser_qa( \d+)?: What colour are the cat's eyes\?\nassistant\nGreen\.$"
    for epoch in range(5):
        written = texts(cat, epoch=epoch)                                 # in an order of the epoch's own
        assert len(written) == 3
        for form in (caption, points, question):
            assert sum(bool(re.match(form, text)) for text in written) == 1


# ---------------------------------------------------------------------------------------------------------------
# mixtures


class Named:
    def __init__(self, name, n):
        self.name, self.n = name, n

    def __len__(self):
        return self.n


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 64, 1000, 4097])
def test_epoch_is_a_permutation(n):
    """... of every source, another one in every epoch, of every seed; and neighbours do not stay neighbours."""
    orders = [[data.permute_index(i, n, seed, "name", epoch) for i in range(n)] for seed in (0, 1) for epoch in range(4)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    if n >= 64:
        assert len(set(map(tuple, orders))) == 8
        for order in orders:
            steps = np.diff(order)
            assert (abs(steps) == 1).mean() < 4 / n + 0.05 and abs(np.corrcoef(order, range(n))[0, 1]) < 4 / n**0.5


def test_a_permutation_of_ten_million_takes_no_memory():
    tracemalloc.start()
    seen = {data.permute_index(i, 10_000_000, 0, "name", 3) for i in range(1000)}
    assert tracemalloc.get_traced_memory()[1] < 1 << 20 and len(seen) == 1000 and max(seen) > 9_000_000
    tracemalloc.stop()


def test_a_mixture_keeps_its_rates_and_every_epoch_is_a_permutation():
    sources = [Named("a", 70), Named("b", 1000), Named("c", 33)]
    mixture = data.Mixture(sources, [0.6, 0.3, 0.1], seed=4)
    draws = [mixture[i] for i in range(3000)]
    for block in range(3):
        counts = np.bincount([k for k, _, _ in draws[block * 1000 : block * 1000 + 1000]], minlength=3)
        assert abs(counts - [600, 300, 100]).max() <= 2
    for k, source in enumerate(sources):
        mine = sorted((epoch, index) for kk, index, epoch in draws if kk == k)
        for epoch in range(len(mine) // source.n):
            assert [i for e, i in mine if e == epoch] == list(range(source.n))
    assert draws[:1000] != [data.Mixture(sources, [0.6, 0.3, 0.1], seed=5)[i] for i in range(1000)]


def test_a_mixture_is_a_function_of_the_draw_alone():
    make = lambda: data.Mixture([Named("a", 10), Named("b", 1000)], [1, 3], seed=0)      # noqa: E731
    mixture = make()
    forward = [mixture[i] for i in range(500)]
    assert [make()[i] for i in (499, 3, 250)] == [forward[499], forward[3], forward[250]]
    assert mixture[10**9] == make()[10**9]
