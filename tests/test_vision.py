"""Compares crops, pixels and visual tokens with the official code, and pooling with a loop."""

import hashlib
import json
import math
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch

import vision
from data import DataConfig
from records.visual import MediaInfo, image_crops, pool_windows
from text.tokenizer import ByteTokenizer
from text.visual_tokens import image_tokens, images_tokens, video_tokens
from vision import RELEASED, VisionConfig

HERE = Path(__file__).parent / "conformance"
TILING, POOLING, PIXELS, VIDEO, TIMES = (
    json.loads((HERE / f"{name}.json").read_text())
    for name in ("image_tiling", "token_pooling", "image_pixels", "video_tokens", "frame_sampling")
)
TOKENIZER = ByteTokenizer(n_vocab=151936)  # so that special ids are as in Qwen
SMALL = VisionConfig(n_layer=2, n_embd=8, n_head=2, n_hidden=12, feature_layers=(1, 0),
                            grid=6, patch=2, overlap_margin=1)


def name(case):
    return " ".join(str(value) for value in case["input"].values() if type(value) is int)


def sizes(case):
    return case["input"]["height"], case["input"]["width"], case["input"]["max_crops"]


def image_ids(h, w, max_crops):
    return image_tokens(w, h, TOKENIZER, max_crops, RELEASED)


def sha256(array, dtype):
    return hashlib.sha256(np.ascontiguousarray(array, dtype).tobytes()).hexdigest()


# --------------------------------------------------------------------------------------------------
# image -> crops


@pytest.mark.parametrize("case", TILING["cases"], ids=name)
def test_tiling_equals_the_official_code(case):
    e = case["expected"]
    low, high, n_crops = vision.pooled_grids(*sizes(case))
    assert vision.tiling(*sizes(case)) == (e["rows"], e["cols"])
    assert high == tuple(e["pooled_grid"])
    assert n_crops == e["n_images_total"]
    assert low[0] * low[1] + high[0] * high[1] == e["pool_rows"]
    assert len(image_ids(*sizes(case))) == e["n_tokens"]


@pytest.mark.parametrize("case", POOLING["token_pooling"], ids=name)
def test_pooling_windows_and_tokens_equal_the_official_code(case):
    e = case["expected"]
    h, w, max_crops = sizes(case)
    patches, pool_src = vision.crops(np.zeros((h, w, 3), np.uint8), max_crops)
    assert list(patches.shape) == e["images_shape"]
    assert list(pool_src.shape) == e["pool_shape"]
    assert pool_src[:3].tolist() == e["first_rows"]
    assert sha256(pool_src, "<i4") == e["sha256_int32_le"]
    assert runs_of(image_ids(h, w, max_crops)) == e["tokens_rle"]


def runs_of(ids):
    return [[token, len(list(run))] for token, run in groupby(ids)]


def squeeze(runs):
    """Shortens runs as the conformance file does: the first ten, '...', the last two."""
    return runs if len(runs) <= 13 else [*runs[:10], ["...", 0], *runs[-2:]]


@pytest.mark.parametrize("case", POOLING["multi_image"], ids=lambda case: str(case["input"]))
def test_several_images_equal_the_official_code(case):
    """The official code ignores images beyond the fifth. Here such a record is skipped."""
    e, tokenizer = case["expected"], Letters(n_vocab=151936)
    kept = case["input"][: e["n_images_kept"]]
    info = MediaInfo([(w, h) for h, w in kept])
    ids, visual = images_tokens(info.sizes, tokenizer, 8, RELEASED)
    images = [np.zeros((h, w, 3), np.uint8) for h, w in kept]
    patches = image_crops(images, 8, RELEASED)
    pool_src = pool_windows(info, 8, RELEASED)
    assert len(ids) == len(visual) == sum(e["n_tokens"])
    assert len(patches) == sum(e["n_images"])
    done, seen, pooled = 0, 0, 0
    for k in range(e["n_images_kept"]):
        part = ids[done : done + e["n_tokens"][k]]
        assert squeeze(runs_of(part)) == e["tokens_rle"][k]
        assert visual[done : done + len(part)] == [token >= 151936 for token in part]
        # the windows of an image refer to its own crops, and are the same as for the image alone
        _, alone = vision.crops(np.zeros((*case["input"][k], 3), np.uint8), 8)
        expected = np.where(alone < 0, -1, alone + seen * RELEASED.n_patch)
        assert (pool_src[pooled : pooled + len(alone)] == expected).all()
        done, seen, pooled = done + len(part), seen + e["n_images"][k], pooled + len(alone)
    assert pooled == len(pool_src) == ids.count(tokenizer.special["im_patch"])


class Letters(ByteTokenizer):
    """In the conformance files, text has one id per character."""

    def encode(self, text):
        return [ord(c) for c in text]


@pytest.mark.parametrize(("largest_of", "n"), [("max_shapes_single", 1), ("max_shapes_multi5", 5)])
def test_largest_image_has_the_official_shapes(largest_of, n):
    """Images of all tilings are tried; the record contains n images of the largest."""
    e, tokens, pools, crops = POOLING[largest_of], {}, [], []
    for rows in range(1, 9):
        for cols in range(1, 8 // rows + 1):
            h, w = rows * 266 + 112, cols * 266 + 112
            assert vision.tiling(h, w, 8) == (rows, cols)
            low, high, n_crops = vision.pooled_grids(h, w, 8)
            tokens[w, h] = len(image_ids(h, w, 8))
            pools.append(low[0] * low[1] + high[0] * high[1])
            crops.append(n_crops)
    largest = max(tokens, key=tokens.get)
    ids, _ = images_tokens([largest] * n, Letters(n_vocab=151936), 8, RELEASED)
    assert [len(ids)] == e["tokens"]
    assert [n * max(pools), 4] == e["token_pooling"]
    assert [n * max(crops), RELEASED.n_patch, RELEASED.n_pixel] == e["images"]


def synthetic(h, w):
    """The image of the cases: R = 7x + 3y, G = x*x // 11 + 5y, B = 3 (x xor y), modulo 256."""
    y, x = np.mgrid[:h, :w]
    return np.stack([7 * x + 3 * y, x * x // 11 + 5 * y, (x ^ y) * 3], axis=-1).astype(np.uint8)


@pytest.fixture(params=[1, 2])
def threads(request):
    """The number of threads. torch chooses kernels by it, and workers have fewer than training."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [c for c in PIXELS["cases"] if "formula" in c["input"]], ids=name)
def test_pixels_equal_the_official_bytes(case, threads):
    e = case["expected"]
    patches, _ = vision.crops(synthetic(case["input"]["height"], case["input"]["width"]))
    assert list(patches.shape) == e["shape"]
    assert str(patches.dtype) == e["dtype"]
    assert patches[0, 0, :12].tolist() == e["patch0_first12"]
    assert patches[0, 400, :12].tolist() == e["patch400_crop0_first12"]
    assert patches[-1, -1, -12:].tolist() == e["last_crop_last_patch_last12"]
    assert patches.sum(dtype=np.int64) == pytest.approx(e["sum"], rel=1e-5)
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):    # other CPUs round differently
        assert sha256(patches, np.uint8) == e["sha256"]


@pytest.mark.parametrize(
    "case", [c for c in PIXELS["cases"] if "normalize_on_gpu" in c["input"]], ids=name)
def test_normalised_pixels_equal_the_official_floats(case):
    e = case["expected"]
    patches, _ = vision.crops(synthetic(case["input"]["height"], case["input"]["width"]))
    vit = vision.ViT(VisionConfig(1, 4, 1, 4, feature_layers=(0,)))
    seen = []                        # inputs of the first layer
    vit.patch.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        vit(torch.from_numpy(patches))
    assert str(seen[0].dtype) == "torch." + e["dtype"]
    assert seen[0][0, 0, :6].tolist() == pytest.approx(e["first6"], abs=1e-7)
    assert seen[0].double().mean().item() == pytest.approx(e["mean"], abs=1e-6)


@pytest.mark.parametrize("case", VIDEO["cases"], ids=lambda case: f"{case['input']['timestamps']}")
def test_the_tokens_of_a_video_equal_the_official_ones(case):
    given, e = case["input"], case["expected"]
    subtitles = given["subtitle"]
    if isinstance(subtitles, list):
        subtitles = [(start, end, words) for (start, end), words in subtitles]
    config = DataConfig(frame_markers=given["per_frame_special_token"])
    ids, visual = video_tokens(
        given["timestamps"], subtitles, Letters(n_vocab=151936), config, RELEASED)
    names = {i: f"<{name}>" for name, i in TOKENIZER.special.items()}
    spelt = "".join(names.get(i) or chr(i) for i in ids)
    spelt = spelt.replace("<im_patch>" * 81, "{81*<im_patch>}")
    assert spelt == e["tokens_text"]
    assert visual == [i in names for i in ids]


@pytest.mark.parametrize("case", VIDEO["cases"], ids=lambda case: f"{case['input']['timestamps']}")
def test_frames_pool_as_in_the_official_code(case):
    e, n = case["expected"], len(case["input"]["timestamps"])
    patches, window = vision.frame(synthetic(90, 160)), vision.frame_windows()
    assert patches.shape == (1, 729, 588)
    pool_src = np.concatenate([window + i * RELEASED.n_patch for i in range(n)])
    assert list(pool_src.shape) == e["pool_shape"]
    assert pool_src[:2].tolist() == e["pool_first_rows"]
    assert sha256(pool_src, "<i4") == e["sha256_int32_le"]


# The mode "uniform", which leaves out the last instant, is not used in training.
@pytest.mark.parametrize(
    "case", [case for case in TIMES["cases"] if case["input"]["mode"] != "uniform"],
    ids=lambda case: "{mode}-{duration}s-{max_frames}-{max_fps}".format_map(case["input"]))
def test_frames_are_taken_when_the_official_code_takes_them(case):
    given, e = case["input"], case["expected"]
    # without a limit of the frame rate, max_frames frames are spread over the video
    fps = math.inf if given["max_fps"] is None else given["max_fps"]
    if given["mode"] == "fps":
        rates = given["candidate_sampling_fps"]
        times = vision.track_times(given["duration"], given["max_frames"], rates)
    else:
        times = vision.frame_times(given["duration"], given["max_frames"], fps)
    assert times == e["timestamps"]
    assert [f"{t:.1f}" for t in times] == e["timestamp_text"]


def test_a_frame_is_the_low_resolution_view_of_the_same_picture():
    picture = synthetic(90, 160)
    assert np.array_equal(vision.frame(picture)[0], vision.crops(picture)[0][0])


# --------------------------------------------------------------------------------------------------
# crops -> features


def random_windows(M, K):
    """(M,K) patch ids of two crops of SMALL. Some are -1, but none in the first row or column."""
    rng = np.random.default_rng(0)
    pool_src = rng.integers(2 * SMALL.n_patch, size=(M, K))
    pool_src[1:, 1:][rng.random((M - 1, K - 1)) < 0.4] = -1
    return torch.from_numpy(pool_src)


@pytest.mark.parametrize("K", [4, 9])
def test_pooling_equals_a_loop_over_valid_patches(K):
    torch.manual_seed(0)
    pool = vision.Pool(SMALL).double()  # the weights do not depend on K
    features = torch.randn(2, SMALL.n_patch, 16, dtype=torch.float64)
    pool_src = random_windows(20, K)
    assert (pool_src < 0).any()
    rows = []
    for ids in pool_src.tolist():
        window = features.flatten(0, 1)[[i for i in ids if i >= 0]]      # without missing patches
        q, k, v = pool.q(window.mean(0)), pool.k(window), pool.v(window)
        heads = [(k[:, h] @ q[h] / 4**0.5).softmax(0) @ v[:, h] for h in (slice(0, 4), slice(4, 8))]
        rows.append(pool.out(torch.cat(heads)))
    torch.testing.assert_close(pool(features, pool_src), torch.stack(rows), rtol=0, atol=1e-12)


def test_a_row_without_patches_is_zero_and_leaves_gradients_alone():
    def gradients(pool_src):
        torch.manual_seed(0)
        see = vision.Vision(SMALL, n_hidden=12, n_out=10)
        images = torch.randint(256, (2, SMALL.n_patch, SMALL.n_pixel), dtype=torch.uint8)
        see.double()  # in float32, large sums of other shapes are rounded differently
        for p in see.parameters():
            torch.nn.init.normal_(p)  # with biases, a row without patches would not be zero
        tokens = see(images, pool_src)
        (tokens**2).sum().backward()
        return tokens.detach(), {key: p.grad for key, p in see.named_parameters()}

    pool_src = random_windows(6, 4)
    tokens, plain = gradients(pool_src)
    more, padded = gradients(torch.cat([pool_src, torch.full((2, 4), -1)]))
    assert (more[6:] == 0).all()
    assert (tokens != 0).all()
    torch.testing.assert_close(more[:6], tokens)
    assert all(g.isfinite().all() for g in padded.values())
    # softmax ignores a constant, so the gradient of pool.k.bias is only rounding. Therefore
    # errors are compared with the largest of all gradients.
    largest = max(float(g.abs().max()) for g in plain.values())
    for key, g in plain.items():
        assert (padded[key] - g).abs().max() <= 1e-7 * g.abs().max() + 1e-12 * largest, key


def test_padding_of_a_window_reads_none_but_its_own_patches():
    """Patch 0 is NaN, and no window contains it, so padding must not read it. If all padding read
    one patch, backward on a GPU would add thousands of equal indices one after another."""
    torch.manual_seed(0)
    pool = vision.Pool(SMALL)
    n_feature = len(SMALL.feature_layers) * SMALL.n_embd
    features = torch.randn(2, SMALL.n_patch, n_feature)
    features[0, 0] = math.nan
    source = torch.tensor([[1, 2, -1, -1], [-1, -1, 7, 9], [-1, SMALL.n_patch, -1, 5]])
    assert pool(features, source).isfinite().all()


def test_pooling_in_bfloat16_sums_products_that_are_not_rounded():
    """As in the official code, only q, k and v are bfloat16, and their scores are float32."""
    torch.manual_seed(0)
    pool = vision.Pool(SMALL)
    for p in pool.parameters():
        torch.nn.init.normal_(p)
    features = torch.randn(2, SMALL.n_patch, len(SMALL.feature_layers) * SMALL.n_embd)
    source = torch.randint(2 * SMALL.n_patch, (20, 4))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        window = features.flatten(0, 1)[source]
        q, k, v = pool.q(window.mean(1)), pool.k(window), pool.v(window)
        q, k, v = (x.float().unflatten(-1, (SMALL.n_head, -1)) for x in (q, k, v))
        with torch.autocast("cpu", enabled=False):       # autocast would round the inputs of einsum
            shares = torch.einsum("mhd,mkhd->mkh", q, k).div(k.shape[-1] ** 0.5).softmax(1)
            pooled = torch.einsum("mkh,mkhd->mhd", shares, v).flatten(1)
        expected = pool.out(pooled)
        found = pool(features, source)
    assert (found - expected).abs().max() <= 2**-8 * expected.abs().max()    # one bfloat16 step
