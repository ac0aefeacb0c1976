"""Tests on a GPU, with the toy model: python -m pytest -m cuda. They are skipped without a GPU.
With one GPU, two ranks share it and exchange tensors over gloo. With two, they use NCCL.

MOLMO_TEST_DEVICE=cpu runs them on a CPU, where chunks of documents replace FlexAttention. On an
H200, relative errors were below 1e-6 in float32 (docs/gpu.md). PyTorch rounds float32 products to
TF32 only if a program asks for it.
"""

import copy
import os
from itertools import islice

import pytest
import torch

import attention
import packing
import parallel
from evaluation.generate import generate
from evaluation.prompts import encode_prompt
from tests.evaluation.test_generate import continued
from tests.test_train import opened
from tests.training import processes
from tests.training.runs import SMALL, back_to, logged, run
from toy import world
from weights.files import open_model_folder

DEVICE = torch.device(os.environ.get("MOLMO_TEST_DEVICE", "cuda"))
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(),
                       reason="no GPU that torch can use")]
T = 1024  # tokens per row in the toy's stage 2


@pytest.fixture(scope="module")
def start():
    """-> model, config, four packs of images and videos from the toy's stage 2."""
    model, config, steps = opened("--stage=2", "--tiny", "--batch=1", "--workers=0")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))  # parameters that are zero would hide errors
    return model.to(DEVICE), config, [rows[0] for rows in islice(steps, 4)]


@torch.no_grad()
def relative_error(found, expected):
    """-> the norm of the difference, divided by the norm of `expected`. pytest -rP prints it."""
    error = float((found.float() - expected).norm() / expected.norm())
    print(f"relative error {error:.1e}")
    return error


def losses_and_gradients(model, rows, dtype=torch.float32):
    """-> the nll of every token (B,T), and all gradients as one vector."""
    batch = packing.collate(rows, T, model.config.vision).to(DEVICE)
    model.zero_grad()
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
        nll, lse = model(batch)
    (batch.weights * (nll + 1e-4 * lse**2)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return nll.detach(), torch.cat(gradients)


def attend_and_gradients(q, k, v, mask):
    """-> [output, gradients of q, k and v] for random gradients of the output."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention.attend(*inputs, mask)
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, inputs, factors)]


@pytest.fixture(scope="module")
def row(start):
    """-> the mask fields of a packed row; q, k and v with 8 query heads and 2 kv heads; the output
    and the gradients of attention with the rule in float64."""
    _, config, packs = start
    batch = packing.collate(packs[:1], T, config.model.vision).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, T, heads, 64, generator=generator).to(DEVICE) for heads in (8, 2, 2)]
    fields = batch.visible_until, batch.bidir
    exact = [x.double() for x in inputs]
    return fields, inputs, attend_and_gradients(*exact, attention.allow(*fields))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_flex_attention_equals_the_rule(row, dtype, bound):
    fields, inputs, expected = row
    mask = attention.packed_mask(*fields)
    assert isinstance(mask, attention.BlockMask) == (DEVICE.type == "cuda")
    found = attend_and_gradients(*(x.to(dtype) for x in inputs), mask)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b.float()) < bound


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_the_share_of_one_rank_of_eight_equals_the_rule(row, rank):
    """It computes its queries with all keys (gather), or its head on all tokens (Ulysses)."""
    fields, (q, k, v), (expected, *_) = row
    queries = parallel.distribute(T, 8)[rank].to(DEVICE)
    found = attention.attend(q[:, queries], k, v, attention.packed_mask(*fields, queries))
    assert relative_error(found, expected[:, queries].float()) < 1e-5
    head, kv_head = [rank], [rank // 4]
    found = attention.attend(
        q[:, :, head], k[:, :, kv_head], v[:, :, kv_head], attention.packed_mask(*fields))
    assert relative_error(found, expected[:, :, head].float()) < 1e-5


def test_a_packed_row_gives_the_losses_and_gradients_of_each_example_alone(start):
    model, _, packs = start
    examples = packs[0]
    nll, gradients = losses_and_gradients(model, [examples])
    alone = [losses_and_gradients(model, [[x]]) for x in examples]
    parts = [found[0, : len(x.tokens)] for (found, _), x in zip(alone, examples, strict=True)]
    n_tokens = sum(map(len, parts))
    assert len(examples) > 1
    torch.testing.assert_close(nll[0, :n_tokens], torch.cat(parts), rtol=0, atol=1e-3)
    assert relative_error(gradients, sum(found for _, found in alone)) < 1e-5


def test_bfloat16_gives_the_loss_and_gradients_of_float32(start):
    model, _, packs = start
    nll, gradients = losses_and_gradients(model, packs[:1])
    found, found_gradients = losses_and_gradients(model, packs[:1], torch.bfloat16)
    assert relative_error(found, nll) < 5e-3
    assert relative_error(found_gradients, gradients) < 0.03


def test_compiled_blocks_give_the_losses_and_gradients_of_plain_ones(start):
    """Packs have different numbers of crops. Activation checkpointing is on."""
    plain, _, packs = start
    compiled = copy.deepcopy(plain)
    compiled.recompute = 1
    compiled.compile_blocks()
    for pack in packs:
        nll, gradients = losses_and_gradients(plain, [pack])
        found, found_gradients = losses_and_gradients(compiled, [pack])
        torch.testing.assert_close(found, nll, rtol=0, atol=1e-3)
        assert relative_error(found_gradients, gradients) < 1e-5
    torch._dynamo.reset()


@torch.no_grad()
def test_decoding_gives_the_logits_of_a_full_pass(monkeypatch):
    """The batch contains two prompts of different lengths."""
    model, tokenizer, config = open_model_folder("toy", DEVICE, torch.float32)
    source = world.World("test")
    questions = ["long_caption:", "pointing: any shape"]
    prompts = [encode_prompt(source.images(source[k]), [(question, None)], tokenizer, config,
                             model.config.vision)
               for k, question in enumerate(questions)]
    steps, lm_head = [], model.lm_head
    with monkeypatch.context() as patch:
        patch.setattr(model, "lm_head", lambda x: steps.append(lm_head(x)) or steps[-1])
        answers = generate(model, prompts, stops=-1, max_new=24)
    found = torch.stack(steps, 1)
    for row, (prompt, ids) in enumerate(zip(prompts, answers, strict=True)):
        whole = continued(prompt, ids)
        batch = packing.collate([[whole]], len(whole.tokens), model.config.vision).to(DEVICE)
        expected = model.logits(batch)[0, len(prompt.tokens) - 1 : -1]
        assert relative_error(found[row], expected) < 1e-5


FLOAT32 = ["--dtype=float32", "--workers=0", "--eval_images=1", "--steps=4"]
RUN = [*SMALL, *FLOAT32, "--save-every=2", "--keep=0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """-> the run directories of --tiny on a CPU and on the device."""
    folder = tmp_path_factory.mktemp("runs")
    assert run(folder / "cpu", *RUN) == 0
    assert run(folder / "device", *RUN, "--device", str(DEVICE)) == 0
    return folder / "cpu", folder / "device"


def assert_same_steps(found, expected):
    """Compares the logs of two run directories."""
    found, expected = logged(found), logged(expected)
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    for step, line in expected.items():
        assert found[step]["ids"] == line["ids"]
        assert found[step]["loss"] == pytest.approx(line["loss"], rel=3e-3)
        assert found[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=3e-2)


def test_training_on_a_gpu_logs_the_losses_of_a_cpu(runs):
    assert_same_steps(*reversed(runs))


def test_a_checkpoint_of_a_gpu_is_resumed_on_a_cpu(runs, tmp_path):
    cpu, device = runs
    out = back_to(device, tmp_path / "resumed", 2)
    assert run(out, *RUN, "--resume") == 0
    assert_same_steps(out, cpu)


@pytest.mark.parametrize("layout", ["", "--cp 2", "--cp 2 --cp_exchange gather"])
def test_two_ranks_log_the_losses_of_one(tmp_path, layout):
    flags = ["--stage=3", "--tiny", "--init=toy", "--batch=2", "--micro-batch=1", *FLOAT32,
             f"--device={DEVICE.type}"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(one, *flags) == 0
    processes.outputs_of(processes.start(
        two, *flags, *layout.split(), ranks=2, program="tests/training/share_gpu.py"))
    assert_same_steps(two, one)
