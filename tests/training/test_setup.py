"""All inputs of a run are checked before a model is built or a file is written."""

import dataclasses
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import model as models
import packing
import train
from evaluation import report
from evaluation.generate import evaluation_config
from records.errors import UserError
from tests.evaluation.small_model import CONFIG, save_run
from tests.records.samples import CAPTION, GOOD, image, write
from tests.training.runs import SMALL, logged, run, sentence
from tools import evaluate
from training import setup
from training.checkpoint import Checkpoint, recipe_fields
from training.config import parse
from training.ranks import Ranks, device_of_rank
from training.setup import choose_layout, layout_error, pick_device

TINY = ["--stage=1", "--tiny"]


LAYOUTS = [
    (8, [], ""),
    (8, ["--shard=4", "--cp-heads=2"], ""),
    (8, ["--cp=3"], "--cp 3: 8 query and 2 kv heads"),
    (8, ["--cp-heads=3"], "--cp 4 is not a multiple of --cp-heads 3"),
    (6, [], "--cp 4: the number of processes, 6, is not a multiple of it"),
    (8, ["--batch=6"], "--batch 6 is not a multiple of 2 data-parallel ranks times "
     "--micro-batch 2; use --micro-batch 1"),
    (8, ["--batch=48", "--micro-batch=18"], "--batch 48 is not a multiple of 2 data-parallel "
     "ranks times --micro-batch 18; use --micro-batch 12"),
    (8, ["--batch=5"], "--batch 5 is not a multiple of 2 data-parallel ranks times "
     "--micro-batch 2; use a multiple of 2 for --batch"),
    (8, ["--data.max_tokens=62"], "--data.max_tokens=62 is not a multiple of --cp 4"),
    (8, ["--shard=3"], "--shard 3: the number of processes, 8, is not a multiple"),
]


@pytest.mark.parametrize(("world", "flags", "message"), LAYOUTS)
def test_a_layout_that_cannot_be_is_one_sentence(world, flags, message):
    heads = replace(models.PRESETS["toy"], n_head=8, n_kv_head=2)
    possible = [*TINY, "--cp=4", "--batch=4", "--micro-batch=2", "--data.max_tokens=64"]
    found = layout_error(world, parse([*possible, *flags])[1], heads)
    assert found.startswith(message)
    assert bool(found) == bool(message)


def test_auto_is_a_gpu_or_the_cpu_and_mps_must_be_named(monkeypatch, capsys):
    def pick(*flags, cuda=False, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        return pick_device(parse([*TINY, *flags])[1])

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert pick("--dtype=bfloat16") == (torch.device("cpu"), torch.bfloat16)
    with pytest.raises(UserError, match="--device cuda: no such device was found"):
        pick("--device=cuda")
    assert pick(cuda=True) == (torch.device("cuda"), torch.bfloat16)
    assert pick("--device=cpu", cuda=True) == (torch.device("cpu"), torch.float32)
    assert pick(mps=True) == (torch.device("cpu"), torch.float32)
    assert not capsys.readouterr().err
    assert pick("--device=mps", mps=True) == (torch.device("mps"), torch.float32)
    assert "this code has never been run on MPS" in capsys.readouterr().err


def test_under_torchrun_every_command_uses_the_gpu_of_its_local_rank(monkeypatch):
    """It is also torch's current device, which NCCL barriers and compiled kernels use."""
    current = []
    used = []

    def join(cp, device):
        used.append(device)
        raise UserError("far enough")

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "zeros", lambda n, device: None)
    monkeypatch.setattr(evaluate, "join_ranks", join)
    used.append(pick_device(parse([*TINY, "--device=cuda"])[1])[0])
    for name in ("cuda", "cuda:0", "cpu"):
        with pytest.raises(SystemExit):
            evaluate.main(["--model=toy", "--data=r.jsonl", f"--device={name}"])
    second = torch.device("cuda:1")
    assert used == [second, second, second, torch.device("cpu")]
    assert current == [second, second, second]


FILES = {
    "good": [GOOD],
    "wrong": [GOOD, {**GOOD, "wieght": 1}],
    "unreadable": [image(CAPTION)],
}
MISTAKES = [
    (["--stage", "1"], "--data is missing; give record files"),
    (["--data=a.jsonl=x"], "the sampling rate 'x' is not a number from 1e-09 to 1e+12"),
    (["--data", "good.jsonl=1e308", "good.jsonl=1e308"], "the sampling rate '1e308' is not"),
    (["--data=good.jsonl", "--media=nowhere"], "--media nowhere"),
    (["--data", "x" * 300 + "=1"], "--data: no such file: xxx"),
    (["--data=good.jsonl", "--media", "x" * 300], "there is no such folder"),
    (["--data=good.jsonl", "--eval", "x" * 300 + ".jsonl"], "File name too long"),
    (["--data=good.jsonl", "--eval", "x" * 300 + "/r.jsonl"], "File name too long"),
    (["--data=good.jsonl", "--eval=."], ".: this is not a .jsonl file of records"),
    (["--data=good.jsonl", "--plan=."], "--plan .: not a plan"),
    (["--init", "x" * 300], "File name too long"),
    (["--out", "x" * 300], "File name too long"),
    (["--init", ""], "--init"),
    (["--out=full"], "--out full: contains a run"),
    (["--out=a.png"], "--out a.png: File exists"),
    (["--lora=4"], "give these weights with --init"),
    (["--data=wrong.jsonl"], "wrong.jsonl:2: wrong record: "),
    (["--data=unreadable.jsonl"], "unreadable.jsonl:1: damaged image: "),
    (["--data=good.jsonl", "--eval=gone.jsonl"], "gone.jsonl: the file cannot be"),
    (["--model.n_head=3"], "--model: a model cannot have this shape"),
    (["--vit=", "--model.vision.feature_layers=0,3"], "cannot have this shape: a ViT of"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_users_mistake_costs_one_sentence(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("full/step-1").mkdir(parents=True)
    Path("a.png").write_text("no image")
    for name, records in FILES.items():
        write(Path(f"{name}.jsonl"), *records)
    before = sorted(Path().rglob("*"))
    if "--stage" in flags:
        monkeypatch.setattr(models, "Molmo2", lambda config: pytest.fail("built a model"))
    with pytest.raises(SystemExit) as end:
        train.main(flags if "--stage" in flags else [*TINY, *flags])
    assert end.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in "\n".join(lines)
    assert "Traceback" not in "\n".join(lines)
    assert all(line.startswith("train.py: ") for line in lines)
    written = {path for path in Path().rglob("*") if path.is_file()} - {*before}
    assert {path.name for path in written} <= {"lock"}


def test_ranks_that_see_other_data_end_in_one_sentence(tmp_path, capsys, monkeypatch, records):
    stat = Path(records[1]).stat()

    def with_another_rank(ranks, mine):
        folder, made_for, stamps = mine
        assert stamps == [(stat.st_size, stat.st_mtime_ns)]
        return [mine, (folder, made_for, [(stat.st_size, stat.st_mtime_ns + 1)])]

    monkeypatch.setattr(Ranks, "all_gather", with_another_rank)
    assert run(tmp_path / "out", *SMALL, *records) == 1
    sentence(capsys, "the ranks do not have the same checkpoint, record files and config")


def test_a_dry_run_has_the_largest_shapes_and_changes_nothing(tmp_path, monkeypatch):
    """Its rows are full, with all crops and loss at every token. The log does not change."""
    batches = []
    collate = packing.collate
    build_optimizer = train.build_optimizer

    def noted(*args, **options):
        batches.append(collate(*args, **options))
        return batches[-1]

    def build_and_try(run, model):
        groups, optimizer = build_optimizer(run, model)
        setup.dry_run_largest_batch(run, groups, train.batch_of,
                                    partial(train.forward_backward, run, model))
        return groups, optimizer

    monkeypatch.setattr(report, "final_scores", lambda *_: {})  # not needed here
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    flags = [*SMALL, "--stage=2", "--data.max_tokens=1024", "--batch=2", "--steps=1",
             "--deterministic"]
    assert run(tmp_path / "without", *flags) == 0
    monkeypatch.setattr(packing, "collate", noted)
    monkeypatch.setattr(train, "build_optimizer", build_and_try)
    assert run(tmp_path / "with", *flags) == 0
    torch.use_deterministic_algorithms(False)
    assert logged(tmp_path / "without") == logged(tmp_path / "with")
    config = json.loads((tmp_path / "with" / "config.json").read_text())["config"]
    for batch in batches[:2]:
        assert batch.weights.bool().all()
        assert batch.tokens.shape == (config["micro_batch"], config["data"]["max_tokens"])
        assert len(batch.images) == config["micro_batch"] * config["pack_crops"]
        assert len(batch.images) >= max(len(other.images) for other in batches[2:])
        assert len(batch.pool_src) >= max(len(other.pool_src) for other in batches[2:])


CHOICES = [  # device, processes, processes per node, flags -> shard, workers, compile
    ("cpu", 1, 1, [], (0, 0, False)),
    ("cpu", 12, 8, [], (0, 0, False)),
    ("cpu", 16, 8, [], (8, 0, False)),  # every node has a copy of the weights
    ("cpu", 16, 8, ["--shard=16"], (16, 0, False)),
    ("cuda", 1, 1, [], (0, 8, True)),
    ("cuda", 1, 1, ["--tiny"], (0, 8, False)),  # compiling the toy takes longer than it saves
    ("cuda", 8, 8, ["--compile=false"], (0, 3, False)),
    ("cuda", 64, 64, ["--workers=5"], (0, 5, True)),
]


@pytest.mark.parametrize(("device", "world", "local", "flags", "expected"), CHOICES)
def test_sharding_workers_and_compilation_go_by_the_machine_or_the_flags(
        monkeypatch, device, world, local, flags, expected):
    """On a GPU, the CPU cores of a process decode in workers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    found = choose_layout(*parse(["--stage=1", *flags]), torch.device(device))
    assert (found.shard, found.workers, found.compile) == expected


@pytest.mark.parametrize(("own", "expected"), [
    (None, "expandable_segments:True"), ("backend:native", "backend:native")])
def test_memory_of_a_gpu_is_not_fragmented_unless_the_user_chooses(monkeypatch, own, expected):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", own or "")
    if own is None:
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    device_of_rank("cpu")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == expected


def test_a_run_knows_how_many_crops_the_weights_before_it_have_seen(tmp_path):
    """Inference uses this number, also after training with 24 crops was continued with 8."""
    args, config = parse(["--stage=1", "--tiny", "--data.max_crops=8",
                          f"--init={save_run(tmp_path)}"])
    for settings, seen in (({"max_crops": 2}, 8), ({"max_crops": 8, "high_res_share": 0.3}, 24),
                           ({"max_crops": 8, "trained_crops": 24}, 24)):
        (tmp_path / "data.json").write_text(json.dumps(settings))
        _, found = setup.find_start(args, config)
        assert evaluation_config(found.data).max_crops == seen
    state = {"model": dataclasses.asdict(CONFIG), "recipe": recipe_fields(found)}
    resumed = Checkpoint(tmp_path, 1, state)
    assert setup.find_start(args, config, resumed)[1].data.trained_crops == 24
