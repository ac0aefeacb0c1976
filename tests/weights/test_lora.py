"""Adapters are the training of a layer with fewer numbers; everything else stays what it was."""

import json
import shutil

import pytest
import torch

import packing
from tests.test_parallel import VISION, T, new_model, packs_of
from tests.training.processes import start, stderr_of
from tests.training.runs import RECIPE, SMALL, assert_same_run, back_to, run, sentence
from tools import generate, hf
from training import checkpoint
from training.log import read_log
from weights import files as model_folders
from weights import lora
from weights.files import load, whole_copy
from weights.lora import LoraConfig

ALL = LoraConfig(rank=4, alpha=8.0)
EXACT = ("ids", "tokens", "loss_tokens", "examples", "lr")


def batches(n):
    rows = packs_of("mixed")
    return [packing.collate(rows[2 * k : 2 * k + 2], T, VISION) for k in range(n)]


def train_steps(model):
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-2, weight_decay=0.0)
    for batch in batches(3):
        (batch.weights * model(batch)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_as_wide_as_a_layer_equals_full_training_of_that_layer():
    """With the identity for A and alpha = rank, B gets the gradients and the steps that W gets."""
    full, adapted = new_model(), new_model()
    full.requires_grad_(False)
    adapted.requires_grad_(False)
    for name in lora.LAYERS:
        part = "mlp" if name in ("up", "gate", "down") else "attn"
        wide = getattr(getattr(full.blocks[0], part), name).in_features
        lora.add_adapters(adapted, LoraConfig(wide, wide, (name,)))
        for block, full_block in zip(adapted.blocks, full.blocks, strict=True):
            getattr(getattr(block, part), name).lora_a.data = torch.eye(wide)
            getattr(getattr(full_block, part), name).weight.requires_grad_(True)
    for key, p in adapted.named_parameters():
        if key.endswith("lora_b"):
            p.data.zero_()
            p.requires_grad_(True)
        elif key.endswith("lora_a"):
            p.requires_grad_(False)
    before = {key: tensor.clone() for key, tensor in full.state_dict().items()}
    train_steps(full)
    train_steps(adapted)
    tensors = lora.merged(adapted, adapted.state_dict(), torch.float32)
    moved = 0
    for key, tensor in full.state_dict().items():
        torch.testing.assert_close(tensors[key], tensor, rtol=1e-4, atol=2e-5)
        moved += not torch.equal(tensor, before[key])
    assert moved == len(full.blocks) * len(lora.LAYERS)


def test_merged_equals_unmerged_within_rounding_and_a_new_adapter_changes_nothing():
    plain, adapted = new_model().eval(), new_model().eval()
    (batch,) = batches(1)
    lora.add_adapters(adapted, ALL)
    lora.init_adapters(adapted, 0)
    assert all(torch.equal(a, b) for a, b in zip(plain(batch), adapted(batch), strict=True))
    for key, p in adapted.named_parameters():
        if key.endswith("lora_b"):
            p.data.normal_(std=0.05)
    merged = whole_copy(adapted, "cpu", torch.float32)
    nll, _ = adapted(batch)
    torch.testing.assert_close(merged(batch)[0], nll, rtol=1e-5, atol=1e-5)
    assert (nll - plain(batch)[0]).abs().max() > 0.1


def test_adapters_are_the_same_with_activation_checkpointing_and_under_autocast():
    models = [new_model() for _ in range(3)]
    (batch,) = batches(1)
    gradients = []
    for k, model in enumerate(models):
        lora.add_adapters(model, ALL)
        lora.init_adapters(model, 0)
        model.recompute = k == 1
        if k == 2:
            lora.hold_frozen(model, torch.bfloat16)
            assert model.blocks[0].attn.q.weight.dtype == torch.bfloat16
            assert model.extra.weight.dtype == model.blocks[0].attn_norm.weight.dtype
        with torch.autocast("cpu", torch.bfloat16, enabled=k == 2):
            nll, _ = model(batch)
        (batch.weights * nll).sum().backward()
        assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
        gradients.append(torch.cat([p.grad.flatten() for key, p in model.named_parameters()
                                    if key.endswith("lora_b")]))
    plain, checkpointed, low = gradients
    assert torch.equal(plain, checkpointed)
    assert (low - plain).norm() < 0.05 * plain.norm()


@pytest.fixture(scope="module")
def base(tmp_path_factory, records):
    out = tmp_path_factory.mktemp("runs") / "base"
    assert run(out, *SMALL, "--steps", "1", "--save-every", "0", *records) == 0
    return out


def adapters(base, *flags):
    recipe = ["--init", str(base), "--lora", "4", "--lr.llm=1e-2", *flags]
    small = [word for word in RECIPE if not word.startswith(("--model.", "--train"))]
    return [*small, *recipe]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, base, records):
    out = tmp_path_factory.mktemp("runs") / "adapted"
    assert run(out, *adapters(base), *records) == 0
    return out


def names_in(folder):
    return set(checkpoint.dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_only_adapters_and_connector_learn_and_a_checkpoint_holds_nothing_else(base, adapted):
    before, after = load(base).state_dict(), load(adapted).state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = {f"blocks.0.{part}.{name}.weight" for part, names in
              (("attn", lora.LAYERS[:4]), ("mlp", lora.LAYERS[4:])) for name in names}
    others = ("vision.vit", "blocks", "embedding", "norm", "head")
    connector = {name for name in before if not name.startswith(others)}
    assert layers <= changed <= layers | connector
    stored = names_in(adapted / "step-6")
    assert {name for name in stored if name.startswith("model.blocks")} == {
        f"model.{name.removesuffix('weight')}lora_{side}" for name in layers for side in "ab"}
    assert not any("vit" in name or "embedding" in name for name in stored)
    state = json.loads((adapted / "step-6" / "state.json").read_text())
    assert state["base"] == str(base / "model")


def test_a_run_is_not_resumed_on_another_base_but_on_the_same_elsewhere(base, adapted, records,
                                                                        tmp_path, capsys):
    out = back_to(adapted, tmp_path / "out", 4)
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(base, moved)
    shutil.copytree(base, other)
    model = load(other)
    model.norm.weight.data += 1
    model_folders.save(model, other / "model")
    flags = [word for word in adapters(base) if word not in ("--init", str(base))]
    assert run(out, *flags, *records, "--resume", "--else-init", str(other)) == 2
    sentence(capsys, "base: the files, or their contents, are different")
    assert run(out, *flags, *records, "--resume", "--else-init", str(moved)) == 0
    assert_same_run(out, adapted)


@pytest.mark.extras("safetensors")
def test_tools_take_an_adapter_run_as_it_is_and_export_it_merged(adapted, tmp_path, capsys):
    words = ["--image", "tests/media/coins.png", "--prompt", "point", "--max-new", "8"]
    hf.main(["export", str(adapted), str(tmp_path / "hf")])
    assert "the byte tokenizer of the toy is not exported" in capsys.readouterr().err
    shutil.copy(adapted / "model" / "tokenizer.json", tmp_path / "hf")
    answers = []
    for folder in (adapted, tmp_path / "hf"):
        generate.main(["--model", str(folder), *words])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""
    exported, own = load(tmp_path / "hf").state_dict(), load(adapted).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in own.items())


LAYOUTS = {"two": [], "cp": ["--cp", "2"], "low": ["--dtype", "bfloat16"]}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one(base, records, tmp_path, layout):
    flags = LAYOUTS[layout]
    recipe = [*adapters(base), "--deterministic", "--micro-batch", "1", *records,
              "--recompute=1", "--save-every", "3"]
    if layout == "low":
        recipe += flags
    stderr_of(start(tmp_path / "one", *recipe))
    stderr_of(start(tmp_path / "two", *recipe, *flags, ranks=2))
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("one", "two")]
    rel = 5e-3 if layout == "low" else 2e-5
    for ours, theirs in zip(*logs, strict=True):
        if "lr" in ours:
            assert [ours[key] for key in EXACT] == [theirs[key] for key in EXACT]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=rel)
            assert ours["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=10 * rel)
    one, two = (load(tmp_path / name).state_dict() for name in ("one", "two"))
    start_of = load(base).state_dict()
    apart = sum((two[name] - one[name]).square().sum() for name in one)
    moved = sum((one[name] - start_of[name]).square().sum() for name in one)
    assert apart < (0.1 if layout == "low" else 1e-3) ** 2 * moved
    assert names_in(tmp_path / "one" / "step-6") == names_in(tmp_path / "two" / "step-6")
