"""Compares the FLOPs of a step with torch's counter and with values by hand, and the MFU that
tools.bench run reads from a log with batches of the same examples."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import packing
from model import Molmo2
from tests.small_model import SMALL
from tools.bench.flops import Work, all_pairs, batch_work, flops, matrix_size
from tools.bench.step import image_example
from training.log import count_rows

pytestmark = pytest.mark.slow


def random_model(config):
    return Molmo2(config).init_weights()


def counted_flops(run):
    """FLOPs of the matrix products in run() and its backward pass, by torch's counter. Products in
    attention are not counted."""
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    counts = counter.get_flop_counts()["Global"].items()
    return sum(n for operator, n in counts if "mm" in str(operator))


def test_flops_of_a_step_are_those_of_its_matrices_and_of_the_pairs_that_attend():
    """torch also counts the second forward of the checkpointed head. It does not count the gradient
    of pixels, which is not computed. All windows of a crop of 6 x 6 patches are full."""
    config = SMALL
    model = random_model(config)
    rng = np.random.default_rng(0)
    row = [image_example(config, rng, 20, (2, 1)), image_example(config, rng, 7)]
    batch = packing.collate([row], sum(len(e.tokens) for e in row), config.vision)
    counted = counted_flops(lambda: model(batch)[0])
    v = config.vision
    patches = 3 * 36
    labelled = int((batch.weights > 0).sum())
    counted += 2 * v.n_pixel * v.n_embd * patches
    counted -= 2 * config.n_vocab * config.n_embd * labelled
    lengths = [len(e.tokens) for e in row]
    visual = int((row[0].bidir > 0).sum())
    pairs = sum(n * (n + 1) // 2 for n in lengths) + visual * (visual - 1) // 2
    in_windows = int((batch.pool_src >= 0).sum())
    n_layer = 2
    attended = n_layer * pairs * 4 * 24 + n_layer * patches * 36 * 64 + in_windows * 64
    # 4 in forward and 8 in backward, per query-key pair and component
    work = batch_work(model, batch)
    assert flops(model, work) == counted + 12 * attended
    assert batch_work(model, packing.collate([row], 400, config.vision)) == work  # padded row
    padded = all_pairs(work, 400)
    assert (padded.tokens, padded.labelled, padded.pairs) == (400, 400, 160_000)
    assert padded.patches == patches


@pytest.mark.parametrize(("train", "vit", "connector", "llm"), [
    (["connector"], 2, 6, 4),
    (["llm"], 2, 2, 6),
    (["vit"], 6, 4, 4),
    (["vit", "connector", "llm"], 6, 6, 6),
])
def test_parts_that_do_not_learn_cost_less(tiny, train, vit, connector, llm):
    """FLOPs per weight and vector: 2 in forward, 2 for the gradient of the input if an earlier part
    is trained, 2 for the gradient of the weight. torch's counter gives the same for the blocks."""
    model = random_model(tiny)
    for part, parameters in model.parameter_groups().items():
        for p in parameters:
            p.requires_grad_(part in train)
    learned = flops(model, Work(patches=36), train) / flops(model, Work(patches=36))
    assert learned == pytest.approx(vit / 6)  # including attention
    pool = model.vision.pool
    per_visual_token = matrix_size(pool.q, pool.out, model.vision.projector)
    assert flops(model, Work(visual=7), train) == connector * 7 * per_visual_token
    x = torch.randn(1, 256, tiny.n_embd, requires_grad=True)
    positions = torch.arange(256)[None]
    mask = torch.ones(1, 256, 256, dtype=torch.bool)
    blocks = counted_flops(lambda: model.transformer(x, positions, mask))
    per_token = matrix_size(*model.blocks)
    assert flops(model, Work(tokens=256), train) == blocks == llm * 256 * per_token


def test_adapters_spare_the_gradients_of_the_matrices_of_the_decoder(tiny):
    model = random_model(tiny)
    for work, size in ((Work(tokens=7), 7 * matrix_size(*model.blocks)),
                       (Work(labelled=5), 5 * tiny.n_vocab * tiny.n_embd)):
        spared = flops(model, work, ["llm"]) - flops(model, work, ["llm"], lora_rank=8)
        assert spared == 2 * size


def test_a_frozen_embedding_spares_the_gradient_of_a_tied_head(tiny):
    work = Work(labelled=5)
    for tied in (False, True):
        model = random_model(replace(tiny, tied=tied))
        spared = flops(model, work) - flops(model, work, freeze_embedding=True)
        assert spared == tied * 2 * tiny.n_vocab * tiny.n_embd * 5


@pytest.mark.parametrize("rank", [0, 8])
def test_mfu_of_a_run_is_that_of_its_batches_over_all_gpus(tmp_path, tiny, bench, rank):
    """The log has three steps of one batch. FLOPs from a log are slightly higher, because all
    windows count as full. One run trains adapters of rank 8."""
    rng = np.random.default_rng(0)
    row = [image_example(tiny, rng, 20, (2, 2)), image_example(tiny, rng, 9)]
    batch = packing.collate([row], 200, tiny.vision)
    model = random_model(tiny)
    expected = flops(model, batch_work(model, batch), ["llm"], lora_rank=rank)
    config = {"model": asdict(tiny), "stage": 1, "train": ["llm"], "freeze_embedding": False,
              "lora": {"rank": rank}}
    lines = [{"config": config, "world": 4}]
    for step, seconds in enumerate((50.0, 2.0, 3.0), 1):
        lines.append({"step": step, "loss": 1.0, "lr": {"llm": 0.1}, "seconds": seconds,
                      **count_rows([row])})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    line, table = bench("run", tmp_path, "--peak", 0.1, "--skip", 1)
    found = line["cases"]
    assert expected <= found["flops"] <= 1.02 * expected
    assert found["seconds"] == 2.5
    rate = found["flops"] * (1 / 2 + 1 / 3) / 2
    assert found["mfu"] == pytest.approx(rate / (4 * 0.1e12), rel=2e-3)
    assert (found["steps"], found["gpus"]) == (2, 4)
    assert table.startswith("medians of the steps")
