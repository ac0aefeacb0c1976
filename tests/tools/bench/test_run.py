"""tools.bench run: MFU of a run from its log, against the batches of the run itself."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import packing
import train
from evaluation import report
from tools.bench import __main__ as command
from tools.bench.flops import allowed_pairs, batch_work, flops
from tools.bench.run import read_run
from training.log import commit, hardware
from weights import files


class Run(NamedTuple):
    out: Path
    steps: list  # of each step: its batches


def bench(monkeypatch, capsys, *flags):
    monkeypatch.setattr(sys, "argv", ["bench", "run", *map(str, flags)])
    command.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps of stage 2 with videos, images and text, by train.py itself."""
    out = tmp_path_factory.mktemp("run") / "out"
    batches = []
    collate = packing.collate

    def recording(*args, **options):
        batches.append(collate(*args, **options))
        return batches[-1]

    flags = "--stage 2 --tiny --steps 3 --vit_steps=0 --save-every 0 --eval_images=1 --device cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "collate", recording)
        for name in ("final_scores", "draw_curves", "draw_progress"):
            patch.setattr(report, name, lambda *_: {})  # what it has learned does not matter
        train.main([*flags.split(), "--out", str(out)])
    assert len(batches) % 3 == 0
    n = len(batches) // 3
    return Run(out, [batches[k : k + n] for k in range(0, len(batches), n)])


def test_the_log_says_what_the_batches_hold(run):
    _, lines = read_run(run.out)
    for line, batches in zip(lines, run.steps, strict=True):
        assert line["pairs"] == sum(allowed_pairs(batch) for batch in batches)
        visual = sum(int((batch.pool_src >= 0).any(1).sum()) for batch in batches)
        assert line["visual_tokens"] == visual


def test_flops_of_a_step_are_those_of_its_batches(run, monkeypatch, capsys):
    """From the log they are up to a fifth more: windows count as full, and a mosaic that repeats
    the low-resolution view as encoded."""
    first, lines = read_run(run.out)
    model = files.meta_model(files.config_from_dict(first["config"]["model"]))
    learning = first["config"]["train"]
    expected = sum(flops(model, batch_work(model, b), learning) for b in run.steps[-1])
    found = bench(monkeypatch, capsys, run.out, "--peak", 0.1, "--skip", 2)  # the last step
    assert 0.999 * expected <= found["flops"] <= 1.2 * expected
    mfu = found["flops"] / found["seconds"] / 1e11
    assert found["mfu"] == pytest.approx(mfu, rel=2e-3)
    tokens_per_second = lines[-1]["tokens"] / lines[-1]["seconds"]
    assert found["tokens_per_second"] == pytest.approx(tokens_per_second, rel=1e-3)
    assert found["gpus"] == 1
    machine = {"hardware": hardware("cpu"), "dtype": "float32", "commit": commit()}
    assert found["run"] == machine


def test_mfu_is_of_all_gpus(run, monkeypatch, capsys, tmp_path):
    log = (run.out / "log.jsonl").read_text()
    assert '"world": 1' in log
    (tmp_path / "log.jsonl").write_text(log.replace('"world": 1', '"world": 4'))
    one = bench(monkeypatch, capsys, run.out, "--peak", 0.1, "--skip", 2)
    four = bench(monkeypatch, capsys, tmp_path, "--peak", 0.1, "--skip", 2)
    assert four["mfu"] == pytest.approx(one["mfu"] / 4, rel=1e-3)


@pytest.mark.parametrize("missing", ['"pairs": ', '"world": '])
def test_a_log_without_what_is_counted_is_refused(run, missing, monkeypatch, capsys, tmp_path):
    log = (run.out / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(log.replace(missing, '"other": '))
    with pytest.raises(SystemExit, match="2"):
        bench(monkeypatch, capsys, tmp_path, "--peak", 0.1)
    assert "has a log of an earlier version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peak", "0"], "--peak must be more than 0"),
        (["--peak", "1", "--skip", "3"], "has 3 steps, and --skip 3 of them"),
    ],
)
def test_a_mistake_ends_in_one_sentence(run, flags, message, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench(monkeypatch, capsys, run.out, *flags)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_without_a_run_is_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench(monkeypatch, capsys, tmp_path / "none", "--peak", "1")
    assert "none has no log of a run" in capsys.readouterr().err
