"""What tools/memory.py counts against what torch really keeps: parameters, AdamW, tensors saved for backward, peaks of whole steps.

On a CPU, with the dense mask of a GPU. What SDPA saves there is what CUDA's fused kernels save: q, k, v, what comes out, logsumexp,
and the mask as numbers; CUDA's keep two integers more (a seed), and softmax, which autocast runs in float32 there, is half as large
on a CPU under bfloat16 (4 of some 20,000 bytes per visual token and patch).
"""

import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attention
import model as models
import packing
import train
import vision
from tools import memory
from tools.generate import Cache, generate

ALL = ("vit", "connector", "llm")
VISION = vision.VisionConfig(n_layer=2, n_embd=64, n_head=4, n_hidden=160, features=(1, 0), grid=6, patch=4, margin=1)
SMALL = models.Config(n_layer=2, n_embd=96, n_head=4, n_kv_head=2, head_dim=24, n_hidden=256, n_vocab=400, init_std=0.0, vision=VISION)
BIG_VISION = replace(VISION, n_layer=3, n_embd=96, n_hidden=256, features=(2, 1), grid=8)
SHAPES = {"small": (SMALL, {}), "deeper": (replace(SMALL, n_layer=6), {}), "more crops": (SMALL, {"pack_crops": 10}),
          "wider": (replace(SMALL, n_embd=160, n_hidden=320, head_dim=40, tied=True), {"stage": 2}),
          "a larger ViT": (replace(SMALL, vision=BIG_VISION), {"micro_batch": 1, "stage": 3, "response_dropout": 0.0})}
BYTES = {torch.float32: 4, torch.bfloat16: 2}


def config_of(model, max_tokens=96, **changes):
    changes = {"micro_batch": 2, "pack_crops": 3, "crop_bucket": 1, "recompute": False, **changes}
    config = replace(train.Config(), model=model, **changes)
    return replace(config, data=replace(config.data, max_tokens=max_tokens, vision=model.vision))


def model_of(config):
    return train.open_model(SimpleNamespace(init=None), config)[0]


def batch_of(config):
    """The largest micro-batch: full rows of one document, every crop, as many visual tokens as are counted, loss everywhere."""
    x = memory.letters(config, 4)
    rows, crops = torch.randint(0, x.V, (x.B, x.T)), x.patches // x.v.n_patch
    flat = torch.zeros(x.B, x.T, dtype=torch.int32)
    images = torch.randint(0, 256, (crops, x.v.n_patch, x.v.n_pixel), dtype=torch.uint8)
    return packing.Batch(rows, rows.roll(-1, 1), torch.ones(x.B, x.T), torch.arange(x.T).repeat(x.B, 1), flat, flat.clone(), flat.clone(),
                         images, torch.randint(0, x.patches, (x.visual, x.K)), torch.randperm(x.B * x.T)[: x.visual], [])


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(attention, "allow_by_document", attention.allow)
    torch.manual_seed(0)


def tensors(batch):
    return [t for t in vars(batch).values() if torch.is_tensor(t)]


def forward(model, batch, dtype):
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=not model.recompute):        # as train.py
        return model(batch)


# ---------------------------------------------------------------------------------------------------------------
# what is there all the time


@pytest.mark.parametrize(("preset", "total"), [("toy", None), ("4b", 4_461_913_040), ("8b", 8_661_703_120), ("o7b", 7_760_786_896)])
def test_numbers_in_the_model_equal_the_presets(preset, total):
    with torch.device("meta"):
        model = models.Molmo2(models.PRESETS[preset])
    sizes = memory.parameters(memory.letters(config_of(model.config), 4))
    assert {part: sum(n) for part, n in sizes.items()} == {part: sum(p.numel() for p in ps) for part, ps in model.groups().items()}
    matrices = sum(p.numel() for module in model.modules() if isinstance(module, torch.nn.Linear) for p in module.parameters())
    assert sum(n for n, _ in sizes.values()) == matrices                     # what autocast makes copies of
    assert total in (None, sum(map(sum, sizes.values())))                    # spec 1.1
    assert model.nll_chunk == memory.NLL_CHUNK


@pytest.mark.parametrize("learn", [ALL, ("connector", "llm"), ("vit",)])
@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"family": "olmo"}], ids=str)
def test_weights_gradients_and_optimizer_equal_a_real_step(learn, changes):
    for freeze in (True, False):
        config = config_of(replace(models.PRESETS["toy"], **changes), train=learn, freeze_embedding=freeze, max_tokens=64)
        model = model_of(config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        sum(forward(model, batch_of(config), torch.float32)).sum().backward()
        optimizer.step()
        parts, _ = memory.training(config, 4)
        assert parts["weights"] == sum(p.nbytes for p in model.parameters())
        assert parts["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        assert parts["optimizer"] == sum(s.nbytes for state in optimizer.state.values() for s in state.values() if s.ndim)


def test_batch_and_mask_are_counted_exactly():
    for model, changes in SHAPES.values():
        config = config_of(model, **changes)
        batch, (parts, _) = batch_of(config), memory.training(config, 4)
        assert parts["batch"] == sum(t.nbytes for t in tensors(batch))
        assert parts["mask"] == attention.allow(batch.doc, batch.branch, batch.bidir).nbytes


def test_no_image_has_more_visual_tokens_per_crop_than_counted():
    for h in range(50, 3000, 150):
        for w in range(50, 3000, 150):
            low, high, crops = vision.pooled_grids(h, w, 8)
            assert low[0] * low[1] + high[0] * high[1] <= crops * 196
    x = memory.letters(config_of(models.PRESETS["4b"], max_tokens=10_000, micro_batch=1, pack_crops=16), 2)
    assert x.visual == 16 * 196


# ---------------------------------------------------------------------------------------------------------------
# what is kept for backward


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


def saved(model, batch, dtype):
    """Bytes of the storages that autograd holds after a forward, parameters and the batch apart."""
    live = weakref.WeakSet()             # of what is held still: a checkpoint that nothing needs has let go of its input

    def pack(tensor):
        held = Held(tensor)
        live.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        out = forward(model, batch, dtype)
    storages = {s.data_ptr(): s.nbytes() for s in (held.tensor.untyped_storage() for held in live)}
    assert out[0].requires_grad          # the graph is alive
    given = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *tensors(batch))}
    return sum(n for at, n in storages.items() if at not in given)


def counted(config, dtype):
    """The same from tools.memory. Of the copies of weights autograd holds all but an untied head's: the loss runs again."""
    x = memory.letters(config, BYTES[dtype])
    parts, _ = memory.training(config, x.s)
    total = sum(n for part, n in parts.items() if part.startswith("kept"))
    if config.recompute:                 # the mask is an input of every block, and counted by itself
        return total + parts["mask"]
    return total + parts["copies of weights"] - (dtype != torch.float32) * (not x.m.tied) * x.s * x.V * x.C


CASES = [(name, family, dtype, again, ALL) for name in SHAPES if name != "small"
         for family in ("qwen", "olmo") for dtype in BYTES for again in (False, True)]
CASES += [("small", family, dtype, again, learn) for family, learn in (("qwen", ("connector", "llm")), ("olmo", ("connector", "llm")),
          ("qwen", ("vit", "llm")), ("olmo", ("connector",)), ("qwen", ("vit",))) for dtype in BYTES for again in (False, True)]


@pytest.mark.parametrize(("shape", "family", "dtype", "again", "learn"), CASES)
def test_counted_activations_are_what_autograd_keeps(shape, family, dtype, again, learn):
    # What is left: integers per token, which are not counted. Above a frozen ViT in bfloat16 also the copies of the pooling's
    # q, k, v, which autocast holds and autograd does not; and where blocks run again RoPE's tables, which a checkpoint holds in a
    # tuple, where hooks cannot see them (of a real model, a 300th of the decoder's part).
    rel = 0.03 if again else 0.02 if dtype == torch.bfloat16 and "vit" not in learn else 0.005
    model, changes = SHAPES[shape]
    config = config_of(replace(model, family=family), train=learn, recompute=again, **changes)
    assert counted(config, dtype) == pytest.approx(saved(model_of(config), batch_of(config), dtype), rel=rel)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dtype", BYTES)
def test_frozen_parts_keep_less(dtype, again):
    both = []
    for learn in (ALL, ("connector", "llm"), ("connector",)):
        config = config_of(SMALL, train=learn, recompute=again)
        both.append((counted(config, dtype), saved(model_of(config), batch_of(config), dtype)))
    for numbers in zip(*both, strict=True):
        assert numbers[0] > 1.2 * numbers[1] > 1.2 * numbers[2]


# ---------------------------------------------------------------------------------------------------------------
# peaks


class Live(TorchDispatchMode):
    """Bytes of all storages that operations have returned and that are alive: now, and at most since `peak` was set."""

    def __init__(self, *tensors):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()
        self.add(tensors)

    def add(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage.data_ptr(), storage.nbytes())
        self.peak = max(self.peak, self.now)

    def gone(self, at, n):
        self.known.discard(at)
        self.now -= n

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.add([t for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t) and t.untyped_storage().nbytes()])
        return out


DECODER = replace(SMALL, n_layer=3, n_embd=128, head_dim=32, n_hidden=384)
CONNECTOR = replace(DECODER, vision=replace(BIG_VISION, n_layer=1, features=(0, 0)))
DEEP_VISION = replace(BIG_VISION, n_layer=8, features=(7, 5))
PEAKS = [("backward of a decoder block", ALL, config_of(DECODER, recompute=True, max_tokens=600)),
         ("backward of the loss", ALL, config_of(DECODER, max_tokens=192)),
         ("backward of the loss", ("connector", "llm"), config_of(replace(DECODER, n_vocab=3000, tied=True), recompute=True)),
         ("backward of the loss", ALL, config_of(replace(DECODER, n_vocab=3000), recompute=True)),
         ("backward of a ViT block", ALL, config_of(replace(DECODER, vision=BIG_VISION), recompute=True, pack_crops=12)),
         ("forward of the ViT", ("connector",), config_of(replace(DECODER, vision=DEEP_VISION), recompute=True, pack_crops=24)),
         ("backward of the connector", ALL, config_of(CONNECTOR, recompute=True, pack_crops=16, max_tokens=256, stage=2, micro_batch=1))]


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize(("moment", "learn", "config"), PEAKS, ids=range(len(PEAKS)))
def test_the_largest_moment_is_the_peak_of_a_real_step(moment, learn, config, dtype):
    # the loss is counted term by term; in a block the input is counted twice, and of the gradients in flight the largest
    rel = 0.01 if moment == "backward of the loss" else 0.06
    config = replace(config, train=learn)
    model, batch = model_of(config), batch_of(config)
    for p in model.parameters():         # the second micro-batch of a step: gradients are there
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    live = Live(*model.parameters(), *(p.grad for p in model.parameters() if p.requires_grad), *tensors(batch))
    with live:
        nll, lse = forward(model, batch, dtype)
        loss = (batch.weights * (nll + 1e-4 * lse**2)).sum()
        del nll, lse
        loss.backward()
    parts, moments = memory.training(config, BYTES[dtype])
    assert max(moments.values()) - parts["optimizer"] == pytest.approx(live.peak, rel=rel)
    if dtype == torch.float32:
        assert max(moments, key=moments.get) == moment


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize(("moment", "model", "tokens", "crops"), [("decoder", DECODER, 512, 2), ("connector", CONNECTOR, 400, 25),
                                                                  ("ViT", replace(DECODER, vision=DEEP_VISION), 200, 40)])
def test_an_answer_takes_what_is_counted(moment, model, tokens, crops, dtype):
    config = config_of(model, max_tokens=tokens, pack_crops=crops, micro_batch=1, stage=3)
    model, batch = models.Molmo2(config.model).init_weights().to(dtype).eval(), batch_of(config)
    parts, moments = memory.answering(config, BYTES[dtype])
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert parts["cache"] == Cache(model, 1, tokens).kv.nbytes
    n, shown = tokens - 8, batch.pool_dst < tokens - 8                       # the last 8 are generated
    row = {f: getattr(batch, f)[0, :n].numpy() for f in ("tokens", "targets", "weights", "pos", "branch", "bidir")}
    prompt = SimpleNamespace(id="worst", images=batch.images.numpy(), pool_src=batch.pool_src[shown].numpy(),
                             pool_dst=batch.pool_dst[shown].numpy(), unit=None, bad=None, **row)
    live = Live(*model.parameters())
    with live:
        generate(model, [prompt], -1, 8)
    assert max(moments.values()) == pytest.approx(live.peak, rel=0.03)
    assert max(moments, key=moments.get) == f"prefill: {moment}"


# ---------------------------------------------------------------------------------------------------------------
# many GPUs, and the command


def test_gpus_share_weights_and_cp_shares_tokens():
    config = config_of(models.PRESETS["4b"], max_tokens=4096, micro_batch=1, recompute=True)
    (one, _), (eight, _), (cut, _) = (memory.training(config, 2, *layout) for layout in ((1, 1), (8, 1), (8, 8)))
    for part in ("weights", "gradients", "optimizer"):
        assert eight[part] == cut[part] == one[part] // 8
    assert eight["kept: decoder"] == one["kept: decoder"] == 8 * cut["kept: decoder"]
    assert cut["mask"] == one["mask"]                                        # whole on every rank


def test_command_prints_a_table_and_one_line_of_json(capsys):
    memory.main(["--stage", "1", "--preset", "4b", "--train", "connector,llm", "--micro-batch", "1", "--data.max_tokens=1000"])
    text = capsys.readouterr().out
    result = json.loads(text.splitlines()[-1])
    assert result["total"] == result["moments"][result["peak"]] == max(result["moments"].values())
    assert (result["max_tokens"], result["train"]) == (1000, ["connector", "llm"])
    assert f"total {result['total'] / 2**30:.3f}" in " ".join(text.split())
    assert " 24 GB: does not fit" in text and "141 GB: fits" in text
    memory.main(["--stage", "3", "--preset", "4b", "--generate", "--data.max_tokens=1000"])
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 2 * answer["parts"]["weights"] == result["parts"]["weights"]      # bfloat16 there, float32 masters here


@pytest.mark.parametrize(("flags", "said"), [
    ("--preset 4b --gpus 6 --cp 6", "--cp 6: ranks share the 32 query heads evenly; legal are 1, 2, 4, 8, 16, 32"),
    ("--gpus 4 --cp 8", "multiple of --cp 8"), ("--cp 0", "legal are"), ("--gpus 2 --generate", "1 with --generate"),
    ("--init x", "--preset"), ("--gpu 4", "--gpu: no such flag")])
def test_mistakes_end_in_one_sentence(flags, said, capsys):
    with pytest.raises(SystemExit) as end:
        memory.main(["--stage", "3", *flags.split()])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and said in error
