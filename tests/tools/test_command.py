"""A command only writes to folders that it has made, and only replaces files of its own kind."""

import os
from contextlib import suppress

import pytest
import torch

from records.errors import Unreadable, UserError, draft
from records.subtitles import read_subtitles
from tests.full_disk import files_up_to
from tests.test_layout import head, reached
from tools import generate, plan, view
from tools.command import own_folder
from tools.convert.rows import read_rows
from tools.model_flags import open_device
from weights.files import describe


def write(folder, command="tools.a", **options):
    with own_folder(folder, command, **options) as out:
        (out / "records.jsonl").write_text(command)


def test_a_command_goes_on_in_a_folder_that_it_has_made(tmp_path):
    out = tmp_path / "new/out"
    write(out)
    with files_up_to(0), own_folder(out, "tools.a"):  # a full disk leaves the mark as it is
        pass
    write(out)
    with pytest.raises(UserError, match=r"contains records.jsonl, and tools.b has not made"):
        write(out, "tools.b")
    assert (out / "records.jsonl").read_text() == "tools.a"
    write(out)  # the mark in the folder is the same, too


def test_a_folder_of_the_user_is_left_alone(tmp_path):
    (tmp_path / "media").mkdir()
    with pytest.raises(UserError, match=r"contains media, .* give another folder, or delete them"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["media"]
    write(tmp_path, besides=["media"])


def test_a_command_that_failed_before_it_wrote_does_not_stop_another(tmp_path):
    with pytest.raises(KeyError), own_folder(tmp_path, "tools.a"):
        raise KeyError
    write(tmp_path, "tools.b")


def test_an_input_is_no_output(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=r"records.jsonl lies in this folder"):
        write(tmp_path, inputs=[tmp_path / "records.jsonl"])


def test_two_commands_never_write_into_one_folder(tmp_path):
    write(tmp_path)
    refused = pytest.raises(UserError, match="another run is writing there")
    with own_folder(tmp_path, "tools.a"), refused:
        write(tmp_path)
    write(tmp_path)


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
    """A killed command leaves a hidden file, which the next command replaces."""
    path = tmp_path / "new/a.png"
    for text in ("first", "second"):
        with draft(path) as hidden:
            hidden.write_text(text)
    with suppress(KeyboardInterrupt), draft(path) as hidden:
        hidden.write_text("half")
        raise KeyboardInterrupt
    assert [*path.parent.iterdir()] == [path] and path.read_text() == "second"
    hidden.write_text("the rest of a killed command")
    with draft(path) as hidden:
        hidden.write_text("third")
        with pytest.raises(UserError, match=r"a\.png in .*another run"), draft(path):
            pass
    assert [*path.parent.iterdir()] == [path] and path.read_text() == "third"
    with pytest.raises(UserError, match="new: this is a folder"), draft(path.parent):
        pass


@pytest.mark.parametrize(("command", "flags"), [
    (plan, ["--stage", "1", "--tiny", "--packs", "1", "--out", "out.npz"]),
    (view, ["--stage", "1", "--tiny", "--out", "out.html"]),
    (generate, ["--model", "toy", "--prompt", "count: any shape", "--draw", "out.png"]),
])
def test_a_full_disk_leaves_no_half_file_that_blocks_the_command(command, flags, tmp_path,
                                                                 monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.npz.part").write_text("mine")
    with files_up_to(500), pytest.raises(SystemExit, match="1"):
        command.main(flags)
    assert "File too large" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz.part"]
    command.main(flags)
    assert (tmp_path / "out.npz.part").read_text() == "mine"


def test_a_named_gpu_becomes_the_current_one(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "zeros", lambda n, device: None)
    for name in ("cpu", "cuda", "cuda:1"):
        assert open_device(name) == torch.device(name)
    assert current == [torch.device("cuda:1")]


@pytest.mark.parametrize("read", [read_rows, read_subtitles, lambda path: describe(path.parent)])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "model.jsonl")
    with pytest.raises((ValueError, Unreadable), match=r"model\.jsonl: this is not a regular file"):
        read(tmp_path / "model.jsonl")


def test_the_converter_imports_neither_the_model_nor_the_trainer():
    names = set(map(head, reached("tools/convert/__main__.py", with_functions=False)))
    assert "records" in names
    assert {"model", "data", "train", "training", "weights"}.isdisjoint(names)
