"""Model folders: what is saved is what is loaded, by a process that holds it once."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import data
from model import Molmo2
from tests.evaluation.small_model import CONFIG, TOKENIZER, random_model, save_run
from text.tokenizer import ByteTokenizer
from weights import files
from weights.export import export_tensors, hub_config

ROOT = Path(__file__).parents[2]
MIB = 2**20
on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(),
                              reason="Linux tells what a process reads and holds")


@pytest.fixture
def run(tmp_path):
    return save_run(tmp_path / "run" / "model").parent


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bit_for_bit(tmp_path, tied, dtype):
    saved = random_model(dataclasses.replace(CONFIG, tied=tied)).bfloat16()
    saved.norm.float()
    files.save(saved, tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["config.json", "model.pt"]
    loaded = files.load(tmp_path, dtype)
    assert loaded.config == saved.config
    assert (loaded.head is None) == tied
    assert not loaded.training
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    for name, tensor in saved.state_dict().items():
        found = loaded.state_dict()[name]
        assert found.dtype == (dtype or tensor.dtype), name
        assert torch.equal(found, tensor.to(found.dtype)), name


@pytest.mark.parametrize("inner", ["", "model"])
def test_a_run_is_opened_with_the_settings_that_it_was_trained_with(run, inner):
    model, tokenizer, config = files.open_model_folder(run / inner, dtype=torch.bfloat16)
    assert model.config == CONFIG
    assert model.norm.weight.dtype == torch.bfloat16
    assert tokenizer.encode("red circle") == TOKENIZER.encode("red circle")
    assert config == data.DataConfig(max_tokens=512, max_crops=1, length_hint=0)
    (run / "model" / "data.json").unlink()
    config = files.open_model_folder(run / inner)[2]
    assert config == data.DataConfig(**files.RELEASED_SETTINGS)


def test_a_missing_field_of_a_config_takes_its_default(run):
    path = run / "model" / "config.json"
    raw = json.loads(path.read_text())
    del raw["eps"], raw["vision"]["eps"], raw["yarn"]
    path.write_text(json.dumps(raw))
    assert files.load(run).config == CONFIG


def config_json(**values):
    return lambda model: edit(model / "config.json", **values)


def data_json(**values):
    return lambda model: edit(model / "data.json", **values)


MISTAKES = {
    "an unknown field": (config_json(n_heads=4), "config.json", "'n_heads'"),
    "an unknown setting": (data_json(odd=1), "data.json", "'odd'"),
    "a list for a number": (data_json(max_crops=[8]), "data.json", "type int, not [8]"),
    "a negative width": (config_json(n_embd=-1), "config.json", "'n_embd'"),
    "a family that does not exist": (config_json(family="x"), "config.json",
                                     "unknown family 'x'"),
    "a billion blocks": (config_json(n_layer=10**9), "config.json",
                         "1000000000 layers are more than 1000"),
    "a negative frame rate": (data_json(fps=-1.0), "data.json", "'fps'"),
    "another width": (config_json(n_hidden=8), "has shape", "requires [8, "),
    "another depth": (config_json(n_layer=3), "same tensors", "blocks.2"),
    "half a file": (lambda m: (m / "model.pt").write_bytes((m / "model.pt").read_bytes()[:9999]),
                    "model.pt", "cannot be used"),
    "no weights": (lambda m: (m / "model.pt").unlink(), "No such file", "model.pt"),
    "no model": (shutil.rmtree, "this folder contains no model"),
    "no folder": (lambda m: shutil.rmtree(m.parent), "no such folder; to download", "hf download"),
    "no end": (lambda m: (shutil.rmtree(m), [(m.parent / f"step-{k}").mkdir() for k in (9, 15)]),
               "its run has not finished", "--resume", "--finish-at 15"),
}


@pytest.mark.extras("safetensors")
def test_a_released_folder_without_its_embedding_is_refused_in_one_sentence(tmp_path):
    """It was a KeyError."""
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(hub_config(CONFIG, "float32")))
    save_file({"lm_head.weight": torch.zeros(9, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"and config\.json do not have the same tensors"):
        files.load(tmp_path)


def test_the_fingerprint_of_a_folder_is_of_its_tensors_and_its_config_alone(run):
    folder = run / "model"
    before = files.fingerprint(run)
    for name in ("modeling_molmo2.py", "model_card.md", "README.md"):
        (folder / name).write_text("of the Hub")
    assert files.fingerprint(run) == before
    found = {before}
    (folder / "model-00001-of-00002.safetensors").touch()
    for name in ("config.json", "model.pt", "model-00001-of-00002.safetensors"):
        (folder / name).write_bytes(b" " + (folder / name).read_bytes())
        found.add(files.fingerprint(run))
    assert len(found) == 4


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_folder_is_refused_in_one_sentence(run, name):
    damage, *words = MISTAKES[name]
    damage(run / "model")
    with pytest.raises((OSError, ValueError)) as error:
        files.open_model_folder(run)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in [str(run), *words]), error.value


def test_the_folder_of_a_checkpoint_has_no_model(tmp_path):
    (tmp_path / "step-9").mkdir()
    with pytest.raises(OSError, match=r"step-9: this is a checkpoint; .* --finish-at 9 makes"):
        files.describe(tmp_path / "step-9")


def status(name):
    """MiB of this process as Linux counts them: VmRSS now, VmHWM at its highest."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) / 1024


def added_memory(act):
    """MiB that act() adds to this process at its highest."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = act()
    return status("VmHWM") - before, result


def save_released(config, folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hub_config(config, "float32")))
    export_tensors(Molmo2(config), folder)
    ByteTokenizer(n_vocab=config.n_vocab).save(folder)
    return folder


@on_linux
@pytest.mark.extras("safetensors")
def test_eight_rows_tell_whether_a_released_head_is_tied(tmp_path):
    wide = dataclasses.replace(CONFIG, n_vocab=2**17)    # head and embedding of 64 MiB each
    for tied in (True, False):
        config = dataclasses.replace(wide, tied=tied)
        folder = save_released(config, tmp_path / str(tied))
        added, described = added_memory(lambda f=folder: files.describe(f))
        assert described.config.tied == tied
        assert added < 32


@on_linux
@pytest.mark.extras("safetensors")
@pytest.mark.parametrize("kind", ["ours", "released"])
def test_loading_holds_the_model_once(tmp_path, kind):
    config = dataclasses.replace(CONFIG, n_embd=512, n_hidden=2048, n_layer=6, n_head=16)
    size = sum(p.nbytes for p in files.meta_model(config).parameters()) / MIB
    for name, shape in (("small", CONFIG), ("large", config)):
        if kind == "ours":
            files.save(Molmo2(shape), tmp_path / name)
        else:
            save_released(shape, tmp_path / name)
    # a process of its own, which has no freed memory to use again
    script = f"""
from tests.weights.test_weights import added_memory, files
files.load({str(tmp_path / "small")!r})                  # imports what it needs
print(added_memory(lambda: files.load({str(tmp_path / "large")!r}))[0])
"""
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                           check=True)
    assert size > 64
    assert 0.9 * size < float(child.stdout) < size + 24


def read_bytes():
    """Bytes that this process has read from files so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_a_fingerprint_reads_little_and_tells_trained_weights_apart(tmp_path):
    model = random_model(dataclasses.replace(CONFIG, n_vocab=2**16))
    files.save(model, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    before = read_bytes()
    found = files.fingerprint(tmp_path / "a")
    assert read_bytes() - before < (tmp_path / "a" / "model.pt").stat().st_size / 8
    assert files.fingerprint(tmp_path / "copy") == found
    model.embedding.weight.data += 0.01
    files.save(model, tmp_path / "b")
    assert files.fingerprint(tmp_path / "b") != found
