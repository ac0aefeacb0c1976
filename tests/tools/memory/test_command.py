"""python -m tools.memory: tables, one line of JSON, --init, mistakes."""

import json
import re
from dataclasses import replace

import pytest

import model as models
from tools.memory import __main__ as command
from weights import export, files
from weights.hub_config import hub_config

TRAIN_4B = ["--stage", "1", "--preset", "4b", "--train", "connector,llm", "--micro-batch", "1",
            "--data.max_tokens=1000"]


def printed(capsys, *flags):
    """-> everything that the command prints, and its line of JSON."""
    command.main(list(flags))
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_command_prints_a_table_and_one_line_of_json(capsys):
    text, result = printed(capsys, *TRAIN_4B)
    assert result["total"] == result["moments"][result["peak"]] == max(result["moments"].values())
    assert (result["max_tokens"], result["train"]) == (1000, ["connector", "llm"])
    assert f"total {result['total'] / 2**30:.3f}" in " ".join(text.split())
    assert " 24 GB: does not fit" in text
    assert "141 GB: fits" in text
    hint = re.search(r"141 GB: fits, .* 90% with --uncheckpointed_blocks=(\d+)", text)
    n = int(hint[1])
    _, with_blocks = printed(capsys, *TRAIN_4B, f"--uncheckpointed_blocks={n}")
    assert with_blocks["uncheckpointed_blocks"] == n
    assert result["total"] < with_blocks["total"] <= 0.9 * 140.4 * 2**30
    _, answer = printed(capsys, "--stage", "3", "--preset", "4b", "--generate",
                        "--data.max_tokens=1000")
    # bfloat16 to answer, float32 master weights to train
    assert 2 * answer["parts"]["weights"] == result["parts"]["weights"]


def test_init_has_the_shape_of_a_saved_model(tmp_path, capsys):
    model = models.Molmo2(models.PRESETS["toy"])
    files.save(model, tmp_path / "run" / "model")
    _, by_preset = printed(capsys, "--stage", "2", "--tiny")
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        # without --tiny the preset is 4b: the shape comes from the folder
        text, by_init = printed(capsys, "--stage", "2", "--init", str(folder))
        assert by_init["parts"]["weights"] == sum(p.nbytes for p in model.parameters())
        assert by_init["parts"]["weights"] == by_preset["parts"]["weights"]
        assert f"stage 2, {folder}, bfloat16" in text


@pytest.mark.parametrize("tied", [True, False])
def test_init_has_the_shape_of_a_released_checkpoint(tied, tmp_path, capsys):
    """Only the weights tell if the head is tied: a copy of the embedding counts once."""
    pytest.importorskip("safetensors")
    vision = replace(models.PRESETS["toy"].vision, grid=12, overlap_margin=4)
    model = models.Molmo2(replace(models.PRESETS["toy"], tied=tied, vision=vision)).init_weights()
    (tmp_path / "config.json").write_text(json.dumps(hub_config(model.config, "float32")))
    export.export_tensors(model, tmp_path, file_bytes=10**6)
    _, result = printed(capsys, "--stage", "2", "--init", str(tmp_path))
    assert result["parts"]["weights"] == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("flags", "message"), [
    ("--preset 4b --gpus 6 --cp 6", "--cp 6: 32 query and 8 kv heads allow 1, 2, 4, 8, 16, 32"),
    ("--cp 8", "--cp 8: 1 processes"),
    ("--gpus 4 --cp 8", "no multiple"),
    ("--cp 0", "--cp 0: must be between 1 and"),
    ("--gpus 0", "at least 1"),
    ("--gpus 2 --generate", "1 with --generate"),
    ("--gpus 3", "--batch 128"),
    ("--gpus 8 --shard=3", "--shard 3"),
    ("--gpus 8 --cp 8 --data.max_tokens=1001", "no multiple of --cp 8"),
    ("--init nowhere", "--init: nowhere: no such folder"),
    ("--init nowhere --preset 4b", "--init nowhere: has a shape of its own"),
    ("--init nowhere --model.n_layer=2", "--init nowhere: has a shape of its own"),
    ("--gpu 4", "--gpu: no such flag")])
def test_mistakes_end_in_one_sentence(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["--stage", "3", *flags.split()])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1
    assert message in error
