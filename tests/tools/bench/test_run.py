"""MFU of a run from its log: what steps say of themselves, and what their batches ask for."""

import json
import sys

import pytest

import packing
import train
from loader import Loader
from tools.bench import __main__ as bench
from tools.bench import run as run_bench
from tools.bench import step as step_bench
from training import log as journal


def ran(monkeypatch, capsys, *flags):
    monkeypatch.setattr(sys, "argv", ["bench", "run", *map(str, flags)])
    bench.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Three steps of stage 2, of films, pictures and text, by train.py itself."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "score", lambda *_: {})                     # what it has learned is not the question
        train.main(["--stage", "2", "--tiny", "--steps", "3", "--vit_steps=0", "--save-every", "0", "--eval_images=1", "--out", str(out)])
    return out


def test_flops_of_a_step_are_those_of_its_batches(out, monkeypatch, capsys):
    """Windows that hang over an edge, and mosaics that repeat their view, make it less: of films there are none."""
    args, config = train.parse(["--stage", "2", "--tiny", "--steps", "3", "--vit_steps=0"])
    sources, rates, _ = train.open_sources(args, config)
    model, tokenizer, config = train.open_model(args, config)
    loader = Loader(sources, rates, tokenizer, config)
    loader.begin()
    _, steps = run_bench.of_run(out)
    for (_, micro_batches), line in zip(loader, steps, strict=False):
        batches = [packing.collate(rows, config.data.max_tokens, config.data.vision) for rows in micro_batches]
        assert line["pairs"] == sum(step_bench.area(b.doc, b.branch, b.bidir) for b in batches)
        assert line["visual_tokens"] == sum(int((b.pool_src >= 0).any(1).sum()) for b in batches)
    wanted = sum(step_bench.useful(model, b, config.train) for b in batches)
    found = ran(monkeypatch, capsys, out, "--peak", 0.1, "--skip", 2)                    # of the last step
    assert 0.999 * wanted <= found["flops"] <= 1.2 * wanted
    assert found["mfu"] == pytest.approx(found["flops"] / found["seconds"] / 1e11, rel=2e-3) and found["gpus"] == 1
    device = train.pick_device(config)[0]
    assert found["run"] == {"hardware": journal.hardware(device), "dtype": "float32" if device.type != "cuda" else "bfloat16",
                            "commit": journal.commit()}
    assert found["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"], rel=1e-3)
    log = (out / "log.jsonl").read_text().replace('"world": 1', '"world": 4')
    for again in (log, log.replace('"pairs"', '"pears"'), log.replace('"world": 4, ', "")):
        (out.parent / "log.jsonl").write_text(again)
        if again == log:
            assert ran(monkeypatch, capsys, out.parent, "--peak", 0.1, "--skip", 2)["mfu"] == pytest.approx(found["mfu"] / 4, rel=1e-3)
        else:
            with pytest.raises(SystemExit, match="2"):
                ran(monkeypatch, capsys, out.parent, "--peak", 0.1)
            assert "a log of an earlier version" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "said"), [(["--peak", "0"], "--peak must be more than 0"),
                                             (["--peak", "1", "--skip", "3"], "3 steps, of which")])
def test_mistakes_end_in_one_sentence(out, flags, said, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        ran(monkeypatch, capsys, out, *flags)
    assert said in capsys.readouterr().err


def test_a_folder_without_a_run_is_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        ran(monkeypatch, capsys, tmp_path / "none", "--peak", "1")
    assert "none: no log of a run" in capsys.readouterr().err
