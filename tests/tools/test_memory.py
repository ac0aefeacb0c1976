"""tools.memory: a step on fake tensors has the memory of a real one. Also cards that fit it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import attention
import model as models
import train
from tests.small_model import SMALL, batch_of, config_of, model_of
from tools import memory
from training.ranks import Ranks
from weights import lora

pytestmark = pytest.mark.slow

READS = {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__"}


@pytest.mark.parametrize(("dtype", "changes"), [
    (torch.float32, {}),
    (torch.bfloat16, {"recompute": 1.0, "residual_dropout": 0.1}),
    (torch.bfloat16, {"recompute": 0.5, "train": ("connector",)}),
    (torch.bfloat16, {"recompute": 0.5, "residual_dropout": 0.1, "compile": True}),
    (torch.bfloat16, {"lora": lora.LoraConfig(8), "train": ("connector", "llm")}),
], ids=str)
def test_the_peaks_on_fake_tensors_are_those_of_a_real_step(dtype, changes, monkeypatch):
    monkeypatch.setattr(models, "rope_frequencies", models.rope_frequencies.__wrapped__)
    config = config_of(SMALL, max_tokens=600, **changes)
    model = model_of(config)
    if config.lora.rank:
        lora.hold_frozen(model, dtype)
    if config.compile:
        monkeypatch.setattr(models, "compile_for_training", memory.Traced())
        monkeypatch.setattr(models, "dropout", memory.drop_everywhere)
        model.compile_blocks()
    run = SimpleNamespace(
        config=config, ranks=Ranks(), device=torch.device("cpu"), dtype=dtype)
    real = memory.run_step(run, model, batch_of(config), {})
    fake = memory.count(config, dtype)
    assert fake.parts == real.parts
    assert fake.peaks == real.peaks
    assert min(fake.parts.values()) > 0
    assert fake.parts["weights"] == sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    averages = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    assert fake.parts["optimizer"] == sum(x.nbytes for x in averages)


def test_a_traced_block_stores_what_torch_compile_stores():
    """In bfloat16. The backend is the default one of torch.compile without its kernels."""
    def compile_part(block, part, dynamic):
        plain = getattr(block, part)
        setattr(block, part, torch.compile(plain, backend="aot_eager_decomp_partition"))

    x = torch.randn(1, 64, SMALL.n_embd, requires_grad=True)
    rope = models.rope_table(torch.arange(64)[None], *models.rope_frequencies(SMALL))
    stored = []
    for change in (lambda *_: None, compile_part, memory.Traced()):
        block = models.Block(SMALL)
        for part in ("before", "after"):
            change(block, part, None)
        found = {}

        def keep(x, found=found):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16):
            out = block(x, rope, None, attention.attend, models.no_dropout)
        assert out.requires_grad
        stored.append(sum(found.values()))
    eager, compiled, traced = stored
    assert traced == compiled < 0.8 * eager


class NoReads(TorchFunctionMode):
    """Every method that copies values of a tensor to the host is an error."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in READS, f"the host reads a tensor: {name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.0])
def test_no_step_waits_for_a_number_that_the_gpu_computes(share, monkeypatch):
    """On fake tensors, operations whose result or shape the host must read are errors."""
    step = train.forward_backward

    def step_without_reads(*args):
        with NoReads():
            return step(*args)

    monkeypatch.setattr(train, "forward_backward", step_without_reads)
    config = config_of(SMALL, recompute=share, residual_dropout=0.1)
    memory.count(config, torch.bfloat16)

    def recipe_that_waits(model, config):
        model.route = lambda features, batch: features[features[:, 0] > 0]
        return model

    monkeypatch.setattr(memory, "apply_recipe", recipe_that_waits)
    with pytest.raises(RuntimeError, match="nonzero"):
        memory.count(config, torch.bfloat16)


def test_one_of_eight_ranks_holds_its_shard_and_its_slice():
    """There are two copies of the weights, each over four ranks. Two ranks share a row."""
    config = config_of(SMALL, pack_crops=32, max_tokens=512, recompute=1.0)
    one = memory.count(config, torch.bfloat16).parts
    rank = memory.count(replace(config, cp=2, shard=4), torch.bfloat16, gpus=8).parts
    for part in ("weights", "gradients", "optimizer"):
        assert rank[part] == pytest.approx(one[part] / 4, rel=0.02)      # shards are padded
    assert rank["saved for backward"] < 0.75 * one["saved for backward"]
    assert rank["FSDP's flat buffer"] == 4 * SMALL.n_vocab * SMALL.n_embd
    assert rank["NCCL's buffers"] == 3 * memory.NCCL_BUFFERS


def printed(capsys, flags):
    memory.main(flags.split())
    out, err = capsys.readouterr()
    assert not err
    return out, json.loads(out.splitlines()[-1])


def test_the_table_says_which_card_is_large_enough(capsys):
    text, step = printed(capsys, "--stage 2 --preset 8b --model.n_layer=1 --model.vision.n_layer=9 "
                                 "--model.vision.feature_layers=8,2 --pack_crops=8 "
                                 "--data.max_tokens=1024 --micro-batch 1")
    assert step["total"] == step["peaks"]["backward"] == max(step["peaks"].values())
    assert f"total {step['total'] / 2**30:.4g}" in " ".join(text.split())
    held = [step["parts"][name] for name in ("weights", "gradients", "optimizer", "batch")]
    assert step["activations"] == step["total"] - sum(held)
    assert " 16 GB: does not fit" in text
    assert " 24 GB: too tight" in text
    assert " 40 GB: fits" in text


def test_the_4b_with_adapters_fits_a_card_of_24_gb(capsys):
    text, _ = printed(capsys, "--stage 2 --preset 4b --lora 16 --micro-batch 1 "
                              "--data.max_tokens=2560")
    assert " 24 GB: fits" in text


def test_heads_and_keys_that_are_exchanged_take_a_communicator_each():
    config = config_of(SMALL, pack_crops=32, max_tokens=512, recompute=1.0)
    both = memory.count(replace(config, cp=4, cp_heads=2), torch.bfloat16, gpus=4).parts
    assert both["NCCL's buffers"] == 4 * memory.NCCL_BUFFERS       # all ranks, a row, heads, keys


def test_each_of_two_nodes_has_all_weights_and_a_rank_no_more_packs_than_its_share():
    flags = ["--stage=3", "--preset=8b", "--gpus=16", "--batch=32", "--micro-batch=4"]
    _, _, config = memory.read_command(flags)
    assert (config.shard, repr(config.micro_batch)) == (8, "2")  # not 2.0


@pytest.mark.parametrize(("gib", "verdict"), [
    (9, "fits, 90% used"), (9.5, "too tight, 95% used"), (10, "too tight, 100% used"),
    (11, "does not fit, 110% used")])
def test_a_card_is_filled_to_nine_tenths(capsys, monkeypatch, gib, verdict):
    monkeypatch.setattr(memory, "GPU_SIZES", {10: 10})
    step = SimpleNamespace(parts={}, peaks={"forward": gib * 2**30})
    monkeypatch.setattr(memory, "count", lambda *_: step)
    assert f" 10 GB: {verdict}\n" in printed(capsys, "--stage=1 --tiny")[0]
