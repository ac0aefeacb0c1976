"""Many processes against one: the same loss and the same gradients, for any layout and whatever the rows hold."""

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import loader
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import attention
import data
import model
import packing
import parallel
import train
from training import weights

ROOT = Path(__file__).parent.parent
TOY = model.PRESETS["toy"]
CONFIG = replace(TOY, n_layer=2, n_head=8, n_kv_head=2, vision=replace(TOY.vision, n_layer=3, feature_layers=(2, 1), neighbor_init=False))
DATA = data.DataConfig(max_tokens=512, max_crops=2, vision=CONFIG.vision)
TOKENIZER, T, PACKS = data.ByteTokenizer(), 512, 8


def example(rng, kind):
    """One example of a kind, random: text, image, images, video."""
    ids = lambda n: rng.integers(0, 250, n).tolist()                      # noqa: E731
    branches = [data.Branch([(ids(int(rng.integers(3, 15))), False), (ids(int(rng.integers(2, 12))), True)], float(rng.choice([0.2, 1])))
                for _ in range(int(rng.integers(1, 4)))]
    picture = lambda: rng.integers(0, 256, (int(rng.integers(20, 60)), int(rng.integers(20, 60)), 3), np.uint8)          # noqa: E731
    if kind == "text":
        return data.layout([TOKENIZER.bos], [False], branches)
    if kind == "video":
        times = [0.5 * k for k in range(int(rng.integers(2, 6)))]
        seen, visual = data.video_ids(times, None, TOKENIZER, DATA)
        crops, sight = data.frame_crops((picture() for _ in times), len(times), DATA), data.MediaInfo([(9, 9)], times)
    else:
        pictures = [picture() for _ in range(1 if kind == "image" else 3)]
        seen, visual = data.visual_ids([p.shape[1::-1] for p in pictures], TOKENIZER, DATA)
        crops, sight = data.visual_crops(pictures, DATA), data.MediaInfo([p.shape[1::-1] for p in pictures])
    x = data.layout([TOKENIZER.bos, *seen], [False, *visual], branches)
    x.images = crops
    data.place_pixels(x, sight, TOKENIZER, DATA)
    return x


KINDS = {                            # of the examples of each of eight packs
    "text only": [["text"] * 3] * PACKS,
    "images": [["image", "image"]] * PACKS,
    "video": [["video"]] * PACKS,
    "mixed": [["image", "text"], ["video"], ["images"], ["text"] * 4, ["video", "image"], ["text", "images"], ["image"], ["video"]],
    "some ranks without images": [["image"], ["text"], ["text"], ["text"]] * 2,
    "a rank without loss": [["image", "text"]] * PACKS,
}


PATTERNS = {f"pattern {bits:04b}": [["image" if bits >> k % 4 & 1 else "text"] for k in range(PACKS)] for bits in range(16)}
KINDS |= PATTERNS                    # who of four ranks has an image


def packs_of(kind):
    rng = np.random.default_rng(list(KINDS).index(kind))
    rows = []
    for names in KINDS[kind]:
        row, room = [], T
        for name in names:
            x = example(rng, name)
            if len(x.tokens) <= room:
                row.append(x)
                room -= len(x.tokens)
        rows.append(row)
    if kind == "a rank without loss":
        for x in (x for row in rows[::2] for x in row):
            x.weights[:] = 0
    return rows


def part(row, rank, cp):
    """A row as one rank of a context-parallel group has it."""
    crops = [0 if x.unit is None else len(x.unit) for x in row]
    return [data.select_crops(x, data.CropShard(rank, cp, sum(crops[:k]), sum(crops))) for k, x in enumerate(row)] if cp > 1 else row


def fresh():
    torch.manual_seed(3)
    m = model.Molmo2(CONFIG).init_weights().train()
    with torch.no_grad():
        for p in m.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))                        # biases and norms that matter
    return m


def passed(m, batch, weight):
    nll, lse = m(batch)
    (((nll + 1e-4 * lse**2) * batch.weights).sum() / weight).backward()
    return float((nll.detach() * batch.weights).sum()) / weight


@functools.cache
def reference(kind):
    """Loss and gradients of one process, a row at a time."""
    m, rows = fresh(), packs_of(kind)
    weight, loss = sum(float(x.weights.sum()) for row in rows for x in row), 0.0
    for row in rows:
        loss += passed(m, packing.collate([row], T, CONFIG.vision), weight)
    return loss, {name: p.grad.clone() for name, p in m.named_parameters()}


def worker(rank, world, cp, accumulation, kinds, folder, shard=0, dtype=torch.float32, compiled=False):
    """Leaves {kind: (loss, gradients)} in the folder. compiled: from the third pack on nothing may be compiled any more."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = parallel.mesh(cp)
    found, done, m = {}, 0, None
    for kind in kinds:
        if m is None or not compiled:
            m = parallel.parallelize(fresh(), mesh, shard, dtype)
            if compiled:
                m.activation_checkpointing = True
                m.compile_blocks()
        m.zero_grad()
        dp, size = world // cp, PACKS // (world // cp) // accumulation
        mine, loss = packs_of(kind)[mesh["dp"].get_local_rank()::dp], 0.0
        weight = parallel.total({"w": sum(float(x.weights.sum()) for x in itertools.chain(*mine))})["w"] / cp
        for start in range(0, len(mine), size):
            cp_rank = mesh["cp"].get_local_rank()
            batch = packing.collate([part(row, cp_rank, cp) for row in mine[start : start + size]], T, CONFIG.vision, 1 + compiled)
            batch = parallel.shard(batch, cp_rank, cp)
            torch.compiler.set_stance("fail_on_recompile" if compiled and done >= 2 else "default")
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
                loss += passed(m, batch, weight)
            done += 1
        gradients = {name: p.grad.full_tensor() for name, p in m.named_parameters() if p.grad is not None}
        found[kind] = parallel.total({"loss": loss})["loss"], gradients
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 4, 1), (2, 1, 2), (8, 8, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cp", "accumulation"), LAYOUTS)
def test_any_layout_gives_the_loss_and_the_gradients_of_one_process(tmp_path, world, cp, accumulation):
    """Loss within 1e-6, the gradient of every parameter within 1e-5 of its norm; the worst of every part is printed."""
    kinds = [kind for kind in KINDS if kind not in PATTERNS]
    mp.spawn(worker, (world, cp, accumulation, kinds, str(tmp_path)), nprocs=world)
    found, worst = torch.load(tmp_path / "found.pt"), {}
    for kind in kinds:
        loss, gradients = reference(kind)
        assert found[kind][0] == pytest.approx(loss, rel=1e-6), kind
        for name, expected in gradients.items():
            got = found[kind][1].get(name, torch.zeros_like(expected))
            off = float((got - expected).norm() / expected.norm().clamp(min=1e-3))
            part = name.split(".")[0] if not name.startswith("vision") else ".".join(name.split(".")[:2])
            worst[part] = max(worst.get(part, (0, "")), (off, kind))
            assert off < 1e-5, (kind, name, off)
    print(world, cp, accumulation, {part: f"{off:.1e}" for part, (off, _) in worst.items()})


@pytest.mark.slow
def test_weights_sharded_within_groups_of_two_give_the_same(tmp_path):
    """Hybrid sharding: each pair of the four ranks holds all weights."""
    mp.spawn(worker, (4, 2, 1, ["mixed"], str(tmp_path), 2), nprocs=4)
    (loss, gradients), (expected, wanted) = torch.load(tmp_path / "found.pt")["mixed"], reference("mixed")
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, g in wanted.items():
        assert float((gradients[name] - g).norm()) <= 1e-5 * max(float(g.norm()), 1e-3), name


@pytest.mark.slow
def test_compiled_blocks_with_shared_rows_equal_one_process_and_are_compiled_once(tmp_path):
    """cp 2, activation checkpointing, 24 packs of four kinds in turn; from the third on, compiling is an error."""
    kinds = ["mixed", "video", "text only"]
    mp.spawn(worker, (2, 2, PACKS, kinds, str(tmp_path), 0, torch.float32, True), nprocs=2)
    found = torch.load(tmp_path / "found.pt")
    for kind in kinds:
        loss, gradients = reference(kind)
        assert found[kind][0] == pytest.approx(loss, rel=1e-6), kind
        for name, g in gradients.items():
            got = found[kind][1].get(name, torch.zeros_like(g))
            assert float((got - g).norm()) <= 1e-5 * max(float(g.norm()), 1e-3), (kind, name)


@pytest.mark.slow
def test_blocks_gathered_in_bfloat16_are_one_process_under_autocast(tmp_path):
    """But for the rounding of norms and biases: loss within 1e-3, each gradient nearer to float32's than twice that of one process."""
    mp.spawn(worker, (2, 2, 1, ["mixed"], str(tmp_path), 0, torch.bfloat16), nprocs=2)
    (loss, gradients), (expected, wanted) = torch.load(tmp_path / "found.pt")["mixed"], reference("mixed")
    m, rows = fresh(), packs_of("mixed")
    weight = sum(float(x.weights.sum()) for row in rows for x in row)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        alone = sum(passed(m, packing.collate([row], T, CONFIG.vision), weight) for row in rows)
    assert loss == pytest.approx(alone, rel=1e-3) and loss == pytest.approx(expected, rel=1e-2)
    off = {name: [float((g - wanted[name]).norm() / wanted[name].norm()) for g in (gradients[name], p.grad)]
           for name, p in m.named_parameters() if wanted[name].norm() > 1e-3}
    assert all(gradients[name].dtype == torch.float32 for name in off) and len(off) > 40
    assert all(many < 2 * one + 0.01 for many, one in off.values()), {k: v for k, v in off.items() if v[0] >= 2 * v[1] + 0.01}
    assert max(many for many, _ in off.values()) > 1e-4                   # it was bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_whichever_of_four_ranks_have_images_none_waits_for_another(tmp_path, cp):
    """All 16 patterns, with the loss and the norm of the gradient of one process."""
    mp.spawn(worker, (4, cp, 1, list(PATTERNS), str(tmp_path)), nprocs=4)
    found = torch.load(tmp_path / "found.pt")
    for kind in PATTERNS:
        loss, gradients = reference(kind)
        assert found[kind][0] == pytest.approx(loss, rel=1e-6)
        for name, expected in gradients.items():
            got = found[kind][1].get(name, torch.zeros_like(expected))
            assert float((got - expected).norm()) <= 1e-5 * max(float(expected.norm()), 1e-3), (kind, name)


# ---------------------------------------------------------------------------------------------------------------
# without processes


def test_legal_degrees_divide_heads_or_copy_them():
    assert parallel.legal(8, 2) == [1, 2, 4, 8] and parallel.legal(32, 8) == parallel.legal(32, 32) == [1, 2, 4, 8, 16, 32]
    assert parallel.legal(6, 4) == [1, 2]
    ok = {"world": 8, "cp": 4, "n_head": 8, "n_kv_head": 2, "batch": 4, "micro_batch": 2, "tokens": 64}
    assert parallel.misfit(**ok) == ""
    for change, said in (({"cp": 3}, "allow 1, 2, 4, 8"), ({"world": 6}, "no multiple"), ({"batch": 6}, "--batch 6"),
                         ({"tokens": 62}, "--cp 4")):
        assert said in parallel.misfit(**{**ok, **change})


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_units_are_shared_out_within_one_unit_of_even(cp):
    rng = np.random.default_rng(cp)
    for _ in range(200):
        n = rng.integers(1, 9, int(rng.integers(1, 20)))
        cut = int(rng.integers(0, len(n)))                               # a row of two examples
        of = lambda units, before: data.CropShard(0, cp, before, int(n.sum())).owners(units)        # noqa: E731, B023
        owner = np.concatenate([of(n[:cut], 0), of(n[cut:], int(n[:cut].sum()))])
        assert np.array_equal(owner, of(n, 0)) and (np.diff(owner) >= 0).all()
        loads = np.bincount(owner, n, minlength=cp)
        assert loads.sum() == n.sum() and abs(loads - n.sum() / cp).max() <= n.max()


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("kind", ["mixed", "text only", "video"])
def test_the_parts_of_a_batch_are_the_batch(kind, cp):
    """Tokens side by side are the row; every crop is encoded once; every visual token arrives where it belongs."""
    rows = packs_of(kind)[:2]
    whole = packing.collate(rows, T, CONFIG.vision, crop_bucket=4)
    parts = [parallel.shard(packing.collate([part(row, rank, cp) for row in rows], T, CONFIG.vision, crop_bucket=4), rank, cp)
             for rank in range(cp)]
    for name in ("tokens", "targets", "weights", "pos"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts], 1), getattr(whole, name))
    assert all(torch.equal(p.doc, whole.doc) for p in parts) and all(len(p.images) and len(p.pool_src) for p in parts)
    assert sum(len(p.unit) for p in parts) == len(whole.unit) and all(len(p.images) == 2 or len(p.images) % 4 == 0 for p in parts)
    # what each window holds, as pixels: at the places of the row, and as it arrives
    pixels = lambda b: b.images.flatten(0, 1).float().mean(-1)            # noqa: E731
    value = lambda b, rows: (pixels(b)[b.pool_src[rows].clamp(min=0)] * (b.pool_src[rows] >= 0)).sum(1)                 # noqa: E731
    wanted = torch.zeros(whole.tokens.numel()).index_add(0, whole.pool_dst, value(whole, slice(None)))
    got = torch.zeros(whole.tokens.shape[0], cp, T // cp)
    for rank, mine in enumerate(parts):
        arriving = [value(p, slice(sum(p.route.sent))).split(p.route.sent)[rank] for p in parts]
        assert [len(a) for a in arriving] == mine.route.received
        got[:, rank] = torch.zeros(got[:, rank].numel()).index_add(0, mine.pool_dst, torch.cat(arriving)).view(got[:, rank].shape)
    assert torch.equal(got.flatten(), wanted)


def test_bytes_sent_are_those_of_the_exchanges(monkeypatch):
    """Counted where they are sent, one rank of four standing for all."""
    sent = []
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, x, group=None: (sent.append(x.numel() * 3 // 4), out.copy_(x)))
    q, k = torch.randn(1, 16, 8, 4), torch.randn(1, 16, 2, 4)
    parallel.ulysses(lambda q, k, v, mask: q, None)(q, k, k, None)
    config = replace(CONFIG, n_head=8, n_kv_head=2, head_dim=4)
    assert len(sent) == 2 and sum(sent) * 2 == parallel.bytes_sent(config, 64, 4)


def test_one_process_needs_no_exchange():
    batch = packing.collate(packs_of("mixed")[:1], T, CONFIG.vision)
    assert parallel.shard(batch, 0, 1) is batch and attention.attend is fresh().attend


@pytest.mark.slow
def test_a_run_logs_the_same_numbers_on_any_layout(tmp_path):
    """Through the command line: ids, counts, weight exactly, loss and norms to rounding; skips and scores as well."""
    flags = ["--stage", "3", "--tiny", "--steps", "3", "--batch", "4", "--vit_steps=0", "--deterministic", "--device", "cpu",
             "--eval_images=2", "--model.n_layer=1", "--pool_size=8", "--eval-every", "2"]
    logs = {}
    for ranks, cp, micro, shard in ((1, 1, 2, 0), (2, 2, 1, 0), (2, 1, 1, 1), (4, 2, 2, 2)):
        out = tmp_path / f"{ranks}-{cp}-{micro}"
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        layout = ["--cp", str(cp), "--micro-batch", str(micro), "--shard", str(shard), "--out", str(out)]
        done = subprocess.run([sys.executable, *many, "train.py", *flags, *layout], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        assert "view tensor" not in done.stderr and json.loads(done.stdout.splitlines()[-1])["steps"] == 3
        logs[ranks, cp, micro] = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        assert weights.load(out).config.n_layer == 1
    first = logs[1, 1, 2]
    for lines in logs.values():
        assert len(lines) == len(first) and lines[0]["params"] == first[0]["params"]
        for a, b in zip(first[1:], lines[1:], strict=True):
            for key, value in a.items():
                if key in ("loss", "grad_norm", "grad_norms", "nll_by_source"):
                    assert b[key] == pytest.approx(value, rel=2e-5), key
                elif key == "eval":
                    assert b[key] == value
                elif key != "seconds":
                    assert b[key] == (pytest.approx(value) if key == "weight" else value), key


@pytest.mark.parametrize(("flags", "world", "words"), [
    (["--cp", "3"], 3, "--cp 3: 8 query and 8 kv heads allow 1, 2, 4, 8"), (["--cp", "2"], 3, "3 processes are no multiple"),
    (["--batch", "3"], 2, "--batch 3: no multiple of 2 data-parallel ranks"), (["--cp", "2"], 1, "1 processes are no multiple"),
    (["--cp", "2", "--data.max_tokens=511"], 2, "--data.max_tokens=511"),
])
def test_a_layout_that_cannot_be_is_refused_before_any_model_is_built(monkeypatch, capsys, tmp_path, flags, world, words):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setattr(model.Molmo2, "init_weights", lambda self: pytest.fail("a model was built"))
    with pytest.raises(SystemExit) as refused:
        train.main(["--stage", "1", "--tiny", "--device", "cpu", "--model.n_head=8", "--model.n_kv_head=8", "--model.head_dim=8", *flags,
                    "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and words in said and len(said.strip().splitlines()) == 1 and not (tmp_path / "out").exists()


RUN = ["--stage", "1", "--tiny", "--batch", "2", "--vit_steps=0", "--device", "cpu", "--model.n_layer=1", "--pool_size=8", "--eval_images=2"]


def launched(flags, out, ranks=2, program="train.py"):
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), program, *RUN,
                             *flags, "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})


def lives(pid):
    """A process that has ended may still be listed, as a zombie, until whoever inherited it asks for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids, within=30):
    """Do they? A process closes its files, which is what its reader waits for, a little before it is gone."""
    until = time.monotonic() + within
    while any(map(lives, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(lives, pids))


def ranks_of(run):
    """{rank: process id} of what torchrun has started."""
    pids = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout.split()
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in pids}
    return {line[5:]: pid for pid, lines in environments.items() for line in lines if line.startswith("RANK=")}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path, victim):
    run = launched(["--steps", "4000"], tmp_path / "out")
    log = tmp_path / "out" / "log.jsonl"
    while not log.exists() or len(log.read_bytes().splitlines()) < 4:
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.2)
    ranks, began = ranks_of(run), time.monotonic()
    os.kill(ranks[str(victim)], signal.SIGKILL)
    _, said = run.communicate(timeout=60)                                 # or the test fails
    assert run.returncode == 1 and time.monotonic() - began < 60
    assert [line.split(";")[0] for line in said.splitlines() if line.startswith("train.py:")] == [
        f"train.py: rank {victim} of 2 has ended or hangs"]
    assert len(ranks) == 2 and all_end(ranks.values())


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_weights_move(tmp_path):
    """... naming the records of that rank, once. The optimizer of step 2 is never called."""
    (tmp_path / "program.py").write_text("""
import torch, model, train
plain, steps, rank = model.Molmo2.nll, [], int(train.os.environ["RANK"])
def nll(self, x, targets, weights):
    nll, lse = plain(self, x, targets, weights)
    return (nll * float("nan"), lse) if rank == 1 and len(steps) == 1 else (nll, lse)
model.Molmo2.nll = nll
adamw = torch.optim.AdamW.step
torch.optim.AdamW.step = lambda self: (steps.append(1), print("weights move", flush=True), adamw(self))
train.main()
""")
    run = launched(["--steps", "9"], tmp_path / "out", program=str(tmp_path / "program.py"))
    out, said = run.communicate(timeout=300)
    assert run.returncode == 1 and out.count("weights move") == 2, said          # of step 1, on both
    lines = [line for line in said.splitlines() if line.startswith("train.py:")]
    assert len(lines) == 1 and "step 2: loss nan" in lines[0]
    args, config = train.parse([*RUN, "--steps", "9"])
    sources, rates, _ = train.open_sources(args, config)
    of = loader.Loader(sources, rates, train.open_tokenizer(args, config)[0], replace(config, micro_batch=1), 1, 2)
    steps = [[example.id for rows in micro for row in rows for example in row] for _, micro in itertools.islice(of, 2)]
    assert lines[0].partition("records: ")[2].partition(";")[0].split(", ") == steps[1][:20]
    assert [path.name for path in (tmp_path / "out").glob("*.npz")] == ["nonfinite-step-2-rank-1-0.npz"]


@pytest.mark.slow
def test_ranks_that_plan_different_records_stop(tmp_path):
    """As they do where a file differs from machine to machine."""
    (tmp_path / "program.py").write_text("""
import os, train
parse = train.parse
train.parse = lambda argv: (lambda args, config: (args, train.replace(config, seed=int(os.environ["RANK"]))))(*parse(argv))
train.main()
""")
    run = launched(["--steps", "3"], tmp_path / "out", program=str(tmp_path / "program.py"))
    said = run.communicate(timeout=300)[1]
    lines = [line for line in said.splitlines() if line.startswith("train.py:")]
    assert run.returncode == 1 and len(lines) == 1 and "step 1: the ranks have planned different records" in lines[0], said


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_busy_is_not_taken_for_dead_and_who_hangs_is(tmp_path, how):
    """Rank 1 of 3 works at a step for long; rank 2 is killed, or stopped, which no exchange notices."""
    (tmp_path / "program.py").write_text("""
import os, time, alive, train
passed, steps = train.passed, []
alive.PATIENCE = 6
def slow(*args):
    steps.append(1)
    if len(steps) == 3 and os.environ["RANK"] == "1":
        open(os.environ["MARK"], "w").close()
        time.sleep(25)
    return passed(*args)
train.passed = slow
train.main()
""")
    mark = tmp_path / "busy"
    os.environ |= {"MARK": str(mark), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"}
    try:
        run = launched(["--batch", "3", "--steps", "4000"], tmp_path / "out", 3, str(tmp_path / "program.py"))
    finally:
        del os.environ["MARK"], os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    while not mark.exists():
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.2)
    time.sleep(1)
    os.kill(ranks_of(run)["2"], how)
    began = time.monotonic()
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 1 and time.monotonic() - began < 60
    assert [line.split(";")[0] for line in said.splitlines() if line.startswith("train.py:")] == [
        "train.py: rank 2 of 3 has ended or hangs"], said


@pytest.mark.slow
def test_films_several_images_and_a_bad_record_log_the_same_on_shared_rows(tmp_path):
    """Real pictures and a film, one picture cut short, which one rank of the group alone finds: masked by both, listed once."""
    media = ROOT / "tests" / "media"
    (tmp_path / "media").mkdir()
    for path in media.iterdir():
        shutil.copy(path, tmp_path / "media")
    (tmp_path / "media" / "cut.png").write_bytes((media / "coffee.png").read_bytes()[:90_000])
    qa = [{"type": "qa", "question": "What?", "answer": "That."}]
    lines = [{"images": ["chelsea.png", "coins.png", "cut.png"], "annotations": qa}, {"image": "rocket.jpg", "annotations": qa}]
    lines += [json.loads(line) for name in ("films", "records") for line in (media / f"{name}.jsonl").read_text().splitlines()]
    lines = [line for line in lines if all((media / name).exists() or name == "cut.png" for name in line.get("images", []))]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, lines)))
    logs = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks > 1 else []
        done = subprocess.run([
            sys.executable, *many, "train.py", "--stage", "3", "--tiny", "--data", str(tmp_path / "mixed.jsonl"), "--media",
            str(tmp_path / "media"), "--data.max_tokens=1024", "--data.max_frames=8", "--steps", "3", "--batch", "2", "--vit_steps=0",
            "--deterministic", "--device", "cpu", "--model.n_layer=1", "--pool_size=6", "--cp", str(ranks), "--max_skip=1",
            "--workers", "1", "--out", str(out)], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()[1:-1]]
        bad = [json.loads(line) for line in (out / "skips.jsonl").read_text().splitlines()]
        logs.append((steps, [(b["draw"], b["id"], b["reason"][:3]) for b in bad]))
    (one, bad), (two, same) = logs
    assert bad == same and len(bad) > 0 and len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6) and b["grad_norm"] == pytest.approx(a["grad_norm"], rel=2e-5)
        for key in ("ids", "weight", "tokens", "crops", "loss_tokens", "masked_tokens", "dropped", "dropped_by_source", "examples"):
            assert b[key] == pytest.approx(a[key]) if key == "weight" else b[key] == a[key], key


@pytest.mark.slow
def test_ranks_end_by_themselves_when_their_launcher_is_killed(tmp_path):
    """Nobody would end them, and nobody could: they would train on, unseen."""
    run = launched(["--steps", "4000"], tmp_path / "out")
    log = tmp_path / "out" / "log.jsonl"
    while not log.exists() or len(log.read_bytes().splitlines()) < 4:
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.2)
    ranks = ranks_of(run)
    os.kill(run.pid, signal.SIGKILL)
    said = run.communicate(timeout=60)[1]                                 # ends when the last of them has closed its stderr
    assert [line.split(";")[0] for line in said.splitlines() if line.startswith("train.py:")] == [
        "train.py: the launcher does not answer any more"]
    assert len(ranks) == 2 and all_end(ranks.values())
