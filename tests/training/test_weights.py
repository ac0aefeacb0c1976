"""Weights in: one copy in memory, every tensor accounted for, one sentence for what is refused."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import Molmo2
from tests.training.hf_models import DATA_CONFIG, QWEN, ROOT, edit
from text.tokenizer import ByteTokenizer
from tools import hf as command
from weights import files, released, tensor_files
from weights.export import export

# ------------------------------------------------------------------------------------------------
# what is loaded


def test_a_head_is_tied_only_if_all_of_it_is_a_copy(tmp_path):
    wide = Molmo2(dataclasses.replace(QWEN, n_vocab=1500)).init_weights()
    wide.head.weight.data.copy_(wide.embedding.weight)
    wide.head.weight.data[1400, 3] += 1
    export(wide, ByteTokenizer(n_vocab=1500), DATA_CONFIG, tmp_path)
    again = files.load(tmp_path)
    assert not again.config.tied
    assert torch.equal(again.head.weight, wide.head.weight)


@pytest.mark.parametrize("where", ["the whole", "the text"])
def test_a_tied_folder_may_leave_out_the_head(saved, tmp_path, where):
    folder = tmp_path / "hf"
    shutil.copytree(saved("tied").folder, folder)

    def declare_tied(config):
        part = config if where == "the whole" else config["text_config"]
        part["tie_word_embeddings"] = True

    edit(folder / "config.json", declare_tied)
    edit(folder / "model.safetensors.index.json", lambda i: i["weight_map"].pop("lm_head.weight"))
    again = files.load(folder)
    assert again.head is None
    assert torch.equal(again.embedding.weight, saved("tied").ours.embedding.weight)


def test_one_file_goes_before_an_index(saved, tmp_path):
    """What is left of an older save in several files does not count."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "hf"
    shutil.copytree(saved("untied").folder, folder)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    tensors["model.transformer.ln_f.weight"] = torch.full((64,), 7.0)
    save_file(tensors, folder / "model.safetensors")
    assert (files.load(folder).norm.weight == 7).all()


@pytest.mark.parametrize("split", [[7, 5], [1, 11], [10, 2], [12, 0], [3, 3, 6]])
def test_stacked_rows_reach_the_right_parameter_wherever_files_are_split(split):
    rows = torch.arange(24.0).view(12, 2)
    parameters = [torch.zeros(10, 2), torch.zeros(2, 2)]
    start = 0
    for part in rows.split(split):
        tensor_files.copy_rows(part, len(part), start, parameters)
        start += len(part)
    assert torch.equal(torch.cat(parameters), rows)


def test_as_stored_keeps_every_dtype(tmp_path):
    model = Molmo2(QWEN).init_weights().bfloat16()
    model.norm.float()
    files.save(model, tmp_path)
    again = files.load(tmp_path, dtype=None)
    assert again.embedding.weight.dtype == torch.bfloat16
    assert again.norm.weight.dtype == torch.float32
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert files.load(tmp_path).embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_without_safetensors_a_run_is_saved_and_loaded_as_model_pt(tmp_path, monkeypatch, dtype):
    model = Molmo2(QWEN).init_weights().bfloat16()
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "safetensors", None)
        absent.setitem(sys.modules, "safetensors.torch", None)
        files.save(model, tmp_path)
        again = files.load(tmp_path, dtype)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["config.json", "model.pt"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(dtype)), name


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_loading_holds_the_model_once(tmp_path):
    """Peak memory of a process that loads half a GiB in files of 64 MiB, as stored and in another
    precision."""
    shape = dataclasses.replace(QWEN, n_embd=1024, n_hidden=4096, n_layer=8, n_vocab=2048,
                                n_head=8, head_dim=128)
    big = Molmo2(shape).bfloat16()
    export(big, ByteTokenizer(n_vocab=2048), DATA_CONFIG, tmp_path / "big", file_bytes=2**26)
    size = sum(p.nbytes for p in big.parameters())
    for dtype, factor in (("None", 1), ("torch.float32", 2)):
        script = rf"""
import re
import torch
import safetensors.torch
from weights import files

def peak():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read()).group(1))

torch.zeros(2**20).sum()
before = peak()
model = files.load({str(tmp_path / "big")!r}, {dtype})
print(peak() - before)
"""
        child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True,
                               text=True, check=True)
        grown = int(child.stdout)
        assert factor * size * 0.95 < grown < factor * size + 2 * 2**26, (dtype, grown / size)


# ------------------------------------------------------------------------------------------------
# what is refused


def edit_config(change):
    return lambda folder: edit(folder / "config.json", change)


def edit_text(**values):
    return edit_config(lambda config: config["text_config"].update(values))


def edit_vision(**values):
    return edit_config(lambda config: config["vision_config"].update(values))


def edit_margins(margins):
    path = "preprocessor_config.json"
    return lambda folder: edit(folder / path, lambda c: c.update(overlap_margins=margins))


def edit_index(change):
    path = "model.safetensors.index.json"
    return lambda folder: edit(folder / path, lambda index: change(index["weight_map"]))


def second_file(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def edit_tensors(change):
    """change(tensors, name): on the second weight file, and the first name in it."""

    def rewrite(folder):
        from safetensors.torch import load_file, save_file

        tensors = load_file(second_file(folder))
        change(tensors, min(tensors))
        save_file(tensors, second_file(folder))

    return rewrite


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lead_outside(weight_map):
    weight_map["lm_head.weight"] = f"../{weight_map['lm_head.weight']}"


def copy_into_another_file(folder):
    from safetensors.torch import load_file, save_file

    first = min(folder.glob("*.safetensors"))
    tensors = load_file(second_file(folder))
    save_file(load_file(first) | {min(tensors): tensors[min(tensors)]}, first)


def drop_token(folder):
    def change(state):
        added = state["added_tokens"]
        state["added_tokens"] = [token for token in added if token["content"] != "<im_col>"]

    edit(folder / "tokenizer.json", change)


def swap_tokens(folder):
    content = (folder / "tokenizer.json").read_text()
    for old, new in (("<im_col>", "<x>"), ("<im_patch>", "<im_col>"), ("<x>", "<im_patch>")):
        content = content.replace(f'"{old}"', f'"{new}"')
    (folder / "tokenizer.json").write_text(content)


HUGE_HEADER = (2**60).to_bytes(8, "little") + b"{}"
BAD_YARN = {"rope_type": "yarn", "factor": "abc", "rope_theta": 1.0}
MISTAKES = {
    "another model": (edit_config(lambda c: c.update(model_type="llava")), "model_type = 'llava'"),
    "another rope": (
        edit_config(lambda c: c["text_config"]["rope_parameters"].update(rope_type="llama3")),
        "rope_type"),
    "another factor": (edit_text(rope_parameters=BAD_YARN), "describes no model"),
    "another GELU": (edit_vision(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "no heads": (edit_text(head_dim=None), "config.json describes no model"),
    "no layers": (edit_vision(num_hidden_layers=0), "config.json describes no model"),
    "no size": (edit_vision(image_size=[]), "config.json describes no model"),
    "oblong images": (edit_vision(image_size=[378, 392]), "[378, 392] pixels"),
    "odd heads": (edit_text(num_key_value_heads=3), "config.json describes no model"),
    "odd margins": (edit_margins([4, 3]), "overlap_margins = [4, 3]"),
    "no margins": (edit_margins([]), "config.json describes no model"),
    "biases": (edit_text(attention_bias=True), "attention_bias = True"),
    "no text config": (edit_config(lambda c: c.pop("text_config")), "describes no model"),
    "integers": (
        edit_tensors(lambda tensors, n: tensors.update({n: tensors[n].to(torch.int8)})),
        "is stored as I8"),
    "one tensor more": (
        edit_tensors(lambda tensors, n: tensors.update({"weird.tensor": tensors[n].clone()})),
        "1 tensors unknown to this project, first weird.tensor"),
    "one tensor twice": (copy_into_another_file, "is in another file too"),
    "one tensor less": (edit_tensors(lambda tensors, n: tensors.pop(n)), "1 tensors missing"),
    "no head": (edit_index(lambda w: w.pop("lm_head.weight")),
                "1 tensors missing, first lm_head.weight"),
    "unknown tensors": (edit_text(num_hidden_layers=2),
                        "unknown to this project, first model.transformer.blocks.2"),
    "another shape": (
        edit_tensors(lambda tensors, n: tensors.update({n: tensors[n][:1].clone()})),
        "config.json asks for [828, 64]"),
    "a missing file": (lambda folder: second_file(folder).unlink(),
                       "that the index names is missing"),
    "a file elsewhere": (edit_index(lead_outside),
                         "'../model-00001-of-00011.safetensors' that the index names"),
    "no index": (write("model.safetensors.index.json", "{}"), "not an index"),
    "a truncated file": (lambda folder: truncate(second_file(folder)), "not readable as weights"),
    "a huge header": (lambda folder: second_file(folder).write_bytes(HUGE_HEADER),
                      "not readable as weights"),
    "settings of a tokenizer": (write("tokenizer_config.json", "[]"),
                                "not readable as a tokenizer"),
    "a list of a token": (write("tokenizer_config.json", '{"eos_token": {"x": 1}}'),
                          "not readable as a tokenizer"),
    "odd settings": (write("data.json", '{"max_crops": "x"}'), "data.json: max_crops = 'x'"),
    "a tokenizer without a token": (drop_token, "lacks the special token <im_col>"),
    "a shifted tokenizer": (swap_tokens, "of the tokenizer and"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "half a tokenizer": (lambda folder: truncate(folder / "tokenizer.json"), "not JSON"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_folder_is_refused_in_one_sentence(saved, tmp_path, capsys, name):
    damage, words = MISTAKES[name]
    folder = tmp_path / "hf"
    shutil.copytree(saved("untied").folder, folder)
    damage(folder)
    with pytest.raises(SystemExit) as end:
        command.main(["import", str(folder), str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert not printed.out
    assert words in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [
    {"embedding.weight": 1},
    [1],
    {"embedding.weight": torch.zeros(2, 2)},
])
def test_a_wrong_model_pt_is_refused_in_one_sentence(tmp_path, content):
    files.save(Molmo2(QWEN), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt: ") as error:
        files.load(tmp_path)
    assert "\n" not in str(error.value)
    assert re.search("do not fit config.json|than a dictionary of tensors", str(error.value))


def test_a_config_with_too_many_layers_is_refused_before_memory_is_used(tmp_path):
    raw = dataclasses.asdict(QWEN) | {"n_layer": released.MAX_LAYERS}
    with pytest.raises(ValueError, match="1,003 layers, more than 1,000"):
        files.meta_model(files.config_from_dict(raw))
