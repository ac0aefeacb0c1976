"""tools.bench step: both implementations learn the same, and a difference is noticed."""

import argparse

import numpy as np
import pytest

from tools.bench import step, step_cases
from tools.bench.step_cases import n_crops
from tools.bench.stream import Recipe

pytestmark = pytest.mark.slow


@pytest.mark.extras("transformers", "safetensors")
def test_both_implementations_learn_the_same_in_every_case(tiny, bench, monkeypatch):
    """Losses and gradients agree (run raises if not): one image, one video, padding, packing, trees
    against single annotations."""
    monkeypatch.setattr(step_cases, "STREAM_ROW", Recipe(1024, 32, 4))
    monkeypatch.setattr(step, "matmul_peak", lambda device, dtype: 1e12)
    line, table = bench("step", "--rounds", 1, "--n", 2)
    found = line["cases"]
    assert found.pop("peak") == {"float32": 1e12, "bfloat16": 1e12}
    assert list(found) == ["image", "video", "padded", "single", "stream"]
    names = ["ours float32", "reference float32", "ours bfloat16", "reference bfloat16"]
    for name, case in found.items():
        assert list(case["sides"]) == names, name
        seconds = {key: case["sides"][key]["seconds"] for key in names}
        ratio = case["ratios"]["reference float32 / ours float32"]["median"]
        one_round = seconds["reference float32"] / seconds["ours float32"]
        assert ratio == pytest.approx(one_round, rel=2e-3)
        mfu = case["flops"] / seconds["ours float32"] / 1e12
        assert case["sides"]["ours float32"]["mfu"] == pytest.approx(mfu, rel=2e-3)
        assert f"\n{name}: " in f"\n{table}"
    for name in ("image", "video"):
        assert found[name]["ours"] == found[name]["reference"]
    assert found["image"]["ours"]["crops"] == 9
    padded = found["padded"]
    single = found["single"]
    assert padded["ours"] == single["ours"]
    assert padded["flops"] == single["flops"]
    assert padded["reference"]["padded"] > single["reference"]["padded"]
    assert single["reference"]["padded"] == single["ours"]["tokens"]
    # a mosaic of one crop repeats the low-resolution view, which ours encodes once
    assert (padded["ours"]["crops"], padded["reference"]["crops"]) == (15, 16)
    stream = found["stream"]
    assert stream["ours"]["padded"] == 2048
    assert stream["annotations"] > stream["examples"]


@pytest.mark.extras("transformers", "safetensors")
def test_a_difference_between_the_implementations_is_noticed(tiny):
    """A weight that is a little off in the decoder, or in the ViT alone, and a token that only one
    implementation learns."""
    args = argparse.Namespace(device="cpu")
    case = step_cases.make_case("image", tiny, 1)
    models = step.build_models(tiny, args)

    def run(name):
        return step.training_step(name, models[name], tiny, case, "float32", args)

    ours = run("ours")
    reference = run("reference")
    step.check_agreement("image", ours, reference)
    weights = dict(models["ours"].named_parameters())
    for name in "blocks.1.mlp.down.weight", "vision.vit.blocks.1.out.weight":
        weights[name].data *= 1.5
        with pytest.raises(RuntimeError, match="image: the "):
            step.check_agreement("image", run("ours"), reference)
        weights[name].data /= 1.5
    with pytest.raises(RuntimeError, match="image: the loss differs"):
        step.check_agreement("image", ours._replace(loss=ours.loss * 1.001), reference)
    case.rows[0][0].weights[-5] = 0
    with pytest.raises(RuntimeError, match="image: the "):
        step.check_agreement("image", run("ours"), reference)


def test_a_stream_is_whole_packs_and_every_annotation_once(tiny):
    case = step_cases.stream_case(tiny, 3, 2, Recipe(1024, 16, 4))
    trees = [e for row in case.rows for e in row]
    assert len(case.rows) == 3
    tokens = [sum(len(e.tokens) for e in row) for row in case.rows]
    crops = [sum(n_crops(e) for e in row) for row in case.rows]
    assert max(tokens) <= 1024
    assert max(crops) <= 16
    assert np.mean(tokens) > 0.8 * 1024 or np.mean(crops) > 13

    singles = [e for batch in case.batches for e in batch]
    assert len(singles) == sum(e.n_branches for e in trees)
    assert case.labelled == sum((e.weights > 0).sum() for e in singles)
    for batch in case.batches:
        assert len(batch) <= step_cases.REFERENCE_BATCH
        assert len({e.pool_src.shape[1] == 9 for e in batch}) == 1, "videos apart"
