"""A checkpoint is complete or not there at all; a damaged or hostile one is refused, not run."""

import copy
import errno
import io
import json
import os
import pickle
import random
import shutil
import threading
import time

import pytest
import torch

from tests.training.faulty_disk import FaultyDisk, Killed
from tests.training.runs import RECIPE, back_to, run, sentence
from text.tokenizer import ByteTokenizer
from training import checkpoint
from training.checkpoint_files import checksum


class Toy:
    """The smallest run that can be saved: ten weights that learn, two that do not, a tokenizer."""

    def __init__(self):
        self.model = torch.nn.Linear(5, 2)
        self.model.bias.requires_grad_(False)
        self.optimizer = torch.optim.AdamW([self.model.weight], fused=True)
        self.tokenizer = ByteTokenizer()

    def learn(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 5)).square().sum().backward()
        self.optimizer.step()
        return self

    def save(self, saver, step, wait=True):
        saver.begin(step, self.tokenizer)
        saver.save(step, self.model, self.optimizer, {"step": step})
        if wait:
            saver.wait()

    def tensors(self):
        named = checkpoint.tensors(self.model, self.optimizer)
        return {name: tensor.clone() for name, tensor in named.items()}

    def is_in(self, folder):
        """Does a checkpoint restore these numbers, bit by bit, and no other names?"""
        other = Toy()
        checkpoint.restore(folder, other.model, other.optimizer)
        mine = self.tensors()
        theirs = other.tensors()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.fixture
def toy_checkpoint(tmp_path):
    """-> the folder of a checkpoint of a Toy."""
    Toy().learn().save(checkpoint.Saver(tmp_path / "run"), 6)
    return tmp_path / "run" / "step-6"


def restore(folder):
    toy = Toy()
    checkpoint.restore(folder, toy.model, toy.optimizer)


# --------------------------------------------------------------------------------------------------
# a save that fails


def operations_of_a_save(out, with_earlier):
    """[(operation, file name), ..] on the disk of a save of step 2."""
    found = []
    saver = checkpoint.Saver(out, keep=1)
    toy = Toy().learn()
    if with_earlier:
        toy.save(saver, 1)
    with FaultyDisk(out, lambda n, what, path: found.append((what, os.path.basename(path)))):
        toy.save(saver, 2)
    return found


def check_what_is_left(out, disk, old, new, killed):
    """The checkpoints that are there hold what was saved, after an outage too."""
    for power in (True, False) if killed else (True,):
        if not power:
            disk.lose_power()
        left = checkpoint.complete_steps(out)
        assert left or not old, "nothing is left"
        for step in left:
            assert (new if step == 2 else old).is_in(out / f"step-{step}"), left
    return left


def fails_at(k, operation, out, with_earlier, killed):
    """A save of step 2 that fails at its k-th operation on the disk -> whether it said so."""
    saver = checkpoint.Saver(out, keep=1)
    old = Toy().learn()
    if with_earlier:
        old.save(saver, 1)
    new = copy.deepcopy(old).learn()
    error = None

    def hook(n, what, path):
        if killed and n >= k:
            raise Killed
        if not killed and n == k:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with FaultyDisk(out, hook) as disk:
        try:
            new.save(saver, 2)
        except (Killed, checkpoint.SaveError) as e:
            error = e
    assert disk.count > k
    left = check_what_is_left(out, disk, old if with_earlier else None, new, killed)
    if error and not killed:
        message = str(error)
        assert "\n" not in message
        assert "step 2" in message
        assert "No space left" in message
        assert (f"step-{left[0]} is complete" if left else "there is none before it") in message
        assert not list(out.glob("*.part"))
    if not error:            # an older checkpoint may stay, or the folder was there already
        assert operation in ("unlink", "rmdir", "mkdir")
        assert checkpoint.complete_steps(out)[0] == 2
    new.learn().save(checkpoint.Saver(out, keep=1) if killed else saver, 2)
    assert [path.name for path in out.iterdir()] == ["step-2"]
    assert new.is_in(out / "step-2")
    return error is not None


EARLIER_AND_EVERY = [
    (True, 8),
    pytest.param(True, 1, marks=pytest.mark.slow),
    pytest.param(False, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "full"])
@pytest.mark.parametrize(("with_earlier", "every"), EARLIER_AND_EVERY)
def test_a_save_that_fails_anywhere_costs_nothing_but_itself(tmp_path, killed, with_earlier, every):
    """At each operation on the disk (of the many that write tensors, each `every`-th), with --keep
    1: the checkpoint before restores bit by bit, and the next save of the same step works and
    leaves nothing else.

    killed: nothing is done from there on; then the power goes too, and what was not synced is lost.
    full: that operation alone fails, and the one sentence about it names what is left.
    """
    operations = operations_of_a_save(tmp_path / "count", with_earlier)
    chosen = [k for k, operation in enumerate(operations)
              if k % every == 0 or operation != ("write", "__0_0.distcp")]
    assert len(chosen) >= 30
    assert {"create", "write", "fsync", "mkdir", "rename"} <= {what for what, _ in operations}
    failed = 0
    for k in chosen:
        what, name = operations[k]
        try:
            failed += fails_at(k, what, tmp_path / str(k), with_earlier, killed)
        except Exception as e:
            message = f"operation {k} of {len(operations)}, {what} {name}: {e}"
            raise AssertionError(message) from e
    assert failed >= 30


# --------------------------------------------------------------------------------------------------
# a save beside the steps


def test_a_save_returns_before_anything_is_written_and_holds_that_step(tmp_path):
    """... whatever happens to the weights meanwhile, in place."""
    saver = checkpoint.Saver(tmp_path)
    toy = Toy().learn()
    toy.save(saver, 1)
    then = copy.deepcopy(toy)
    go = threading.Event()
    with FaultyDisk(tmp_path, lambda n, what, path: go.wait(60) if ".distcp" in path else None):
        toy.save(saver, 2, wait=False)
        assert not saver.done()
        assert not list((tmp_path / "step-2.part").glob("*.distcp"))
        assert checkpoint.complete_steps(tmp_path) == [1]
        toy.learn().learn()
        with torch.no_grad():
            toy.model.bias.add_(1)
        go.set()
        saver.wait()
    assert saver.done()
    assert then.is_in(tmp_path / "step-2")
    assert not toy.is_in(tmp_path / "step-2")


@pytest.mark.parametrize(("keep", "expected"), [(1, [4]), (2, [4, 3]), (0, [4, 3, 2, 1])])
def test_the_newest_are_kept_and_one_being_written_is_not_removed(tmp_path, keep, expected):
    go = threading.Event()
    saver = checkpoint.Saver(tmp_path, keep)
    toy = Toy().learn()
    for step in (1, 2, 3):
        toy.save(saver, step)
    with FaultyDisk(tmp_path, lambda n, what, path: go.wait(60) if ".distcp" in path else None):
        toy.save(saver, 4, wait=False)
        assert checkpoint.complete_steps(tmp_path) == [3, 2, 1][: keep or None]
        assert (tmp_path / "step-4.part").is_dir()
        assert not saver.done()
        go.set()
        while not saver.done():
            time.sleep(0.01)
    assert checkpoint.complete_steps(tmp_path) == expected
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{n}" for n in expected}


# --------------------------------------------------------------------------------------------------
# nothing there, damaged, or not to be read


def test_only_a_folder_without_checkpoints_has_none(tmp_path, toy_checkpoint):
    assert checkpoint.complete_steps(tmp_path / "not there") == []
    assert checkpoint.complete_steps(tmp_path) == []
    for name in ("step-7.part", "step-x", "step-", "step-8 "):
        shutil.copytree(toy_checkpoint, tmp_path / "other" / name)
    (tmp_path / "other" / "step-9").write_text("{}")
    assert checkpoint.complete_steps(tmp_path / "other") == []
    with pytest.raises(checkpoint.LoadError, match="Not a directory"):
        checkpoint.complete_steps(tmp_path / "other" / "step-9")


@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_a_checkpoint_that_lost_a_write_is_passed_over_for_the_one_before(tmp_path, toy_checkpoint,
                                                                          damage):
    """... and where there is none before it, the run does not start anew as if nothing had been."""
    names = {path.name for path in toy_checkpoint.iterdir()}
    assert names == {".metadata", "__0_0.distcp", "complete", "state.json", "tokenizer.json"}
    for name in names:
        out = tmp_path / name / "run"
        shutil.copytree(toy_checkpoint, out / "step-6")
        path = out / "step-6" / name
        if damage == "gone":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size // 2 if damage == "cut" else 0)
        with pytest.raises(checkpoint.LoadError, match="missing or cut short in step-6"):
            checkpoint.complete_steps(out)
        shutil.copytree(toy_checkpoint, out / "step-4")
        assert checkpoint.complete_steps(out) == [4], name


WRONG_LISTS = [b"[]", b"3", b"[" * 100_000, b'{"state.json": "many"}', b'{"": 1}', b"\xff",
               b'{"\\u0000": {"bytes": 3}}', b'{"/dev/zero": {"bytes": 0}}']


@pytest.mark.parametrize("content", WRONG_LISTS)
def test_a_list_of_files_that_is_none_is_a_damaged_checkpoint(toy_checkpoint, content):
    (toy_checkpoint / "complete").write_bytes(content)
    with pytest.raises(checkpoint.LoadError):
        checkpoint.complete_steps(toy_checkpoint.parent)
    assert checkpoint.newest_step(toy_checkpoint.parent) is None


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("where", ["the folder", "its list of files", "a file"])
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_none(toy_checkpoint, monkeypatch, error,
                                                                where):
    """Even if an older one can: the disk may be back in a minute."""
    shutil.copytree(toy_checkpoint, toy_checkpoint.parent / "step-4")

    def failing(real, name):
        def call(path, *args, **kwargs):
            if str(path).endswith(name):
                raise OSError(error, os.strerror(error))
            return real(path, *args, **kwargs)
        return call

    if where == "the folder":
        monkeypatch.setattr(os, "scandir", failing(os.scandir, "run"))
    elif where == "its list of files":
        monkeypatch.setattr(io, "open", failing(io.open, "step-6/complete"))
    else:
        monkeypatch.setattr(os, "stat", failing(os.stat, "step-6/__0_0.distcp"))
    with pytest.raises(checkpoint.LoadError, match=os.strerror(error)):
        checkpoint.complete_steps(toy_checkpoint.parent)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_folder_without_permissions_is_not_taken_for_none(toy_checkpoint):
    toy_checkpoint.parent.chmod(0)
    try:
        with pytest.raises(checkpoint.LoadError, match="Permission denied"):
            checkpoint.complete_steps(toy_checkpoint.parent)
    finally:
        toy_checkpoint.parent.chmod(0o755)


def is_refused(folder):
    """Does a run that resumes from the only checkpoint of a folder end with a LoadError?"""
    try:
        checkpoint.complete_steps(folder.parent)
        restore(folder)
    except checkpoint.LoadError:
        return True
    return False


def test_a_flipped_bit_anywhere_is_found(toy_checkpoint):
    """In each file: some of its bits, and of the list of files all of them."""
    rng = random.Random(0)
    for path in sorted(toy_checkpoint.iterdir()):
        content = path.read_bytes()
        bits = range(8 * len(content))
        for bit in bits if path.name == "complete" else rng.sample(bits, 40):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            assert is_refused(toy_checkpoint), (path.name, bit)
        path.write_bytes(content)
    restore(toy_checkpoint)


def test_a_flipped_bit_ends_a_resume_in_one_sentence(whole, records, tmp_path, capsys):
    out = back_to(whole, tmp_path / "out", 6)
    path = out / "step-6" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert run(out, *RECIPE, *records, "--resume") == 2
    sentence(capsys, "step-6", "__0_0.distcp is damaged", "checksum")


# --------------------------------------------------------------------------------------------------
# hostile


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def replace_files(folder, **contents):
    """Replaces files of a checkpoint, with the sizes and checksums that they should have."""
    files = json.loads((folder / "complete").read_text())
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "crc32": checksum(folder / name)}
    (folder / "complete").write_text(json.dumps(files))


def changed_metadata(folder, **values):
    """.metadata of a checkpoint, with other values in each of its entries."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        for name, value in values.items():
            setattr(info, name, value)
    return pickle.dumps(metadata)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_in_place_of_a_checkpoints_contents_does_not_run(toy_checkpoint, tmp_path,
                                                                  protocol):
    content = pickle.dumps(Payload(tmp_path / "ran"), protocol)
    replace_files(toy_checkpoint, **{".metadata": content})
    assert checkpoint.complete_steps(toy_checkpoint.parent) == [6]
    with pytest.raises(checkpoint.LoadError, match="mkdir"):
        restore(toy_checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("elsewhere", ["../x.distcp", "/etc/passwd", "a/b", "..", "."])
def test_a_checkpoint_names_no_file_outside_its_folder(toy_checkpoint, elsewhere):
    shutil.copy(toy_checkpoint / "__0_0.distcp", toy_checkpoint.parent / "x.distcp")
    metadata = changed_metadata(toy_checkpoint, relative_path=elsewhere)
    replace_files(toy_checkpoint, **{".metadata": metadata})
    with pytest.raises(checkpoint.LoadError, match="outside the folder"):
        restore(toy_checkpoint)


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle", "noise", "other tensor"])
def test_a_pickle_in_place_of_a_tensor_does_not_run(toy_checkpoint, tmp_path, form):
    hostile = Payload(tmp_path / "ran")
    tensor = io.BytesIO()
    if form.endswith("torch"):
        torch.save(hostile, tensor, _use_new_zipfile_serialization=form == "torch")
    elif form == "other tensor":
        torch.save(torch.zeros(3), tensor)
    else:
        noise = random.Random(0).randbytes(1000)
        tensor.write(pickle.dumps(hostile) if form == "pickle" else noise)
    content = tensor.getvalue()
    metadata = changed_metadata(toy_checkpoint, offset=0, length=len(content))
    replace_files(toy_checkpoint, **{"__0_0.distcp": content, ".metadata": metadata})
    with pytest.raises(checkpoint.LoadError, match="not readable as a checkpoint"):
        restore(toy_checkpoint)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_that_builds_known_things_wrongly_is_refused(toy_checkpoint):
    metadata = pickle.loads((toy_checkpoint / ".metadata").read_bytes())
    metadata.storage_data = ["no table"]
    for content in (pickle.dumps(metadata), pickle.dumps(torch.float32), pickle.dumps([]), b"",
                    b"\x80\x04", b"garbage"):
        replace_files(toy_checkpoint, **{".metadata": content})
        with pytest.raises(checkpoint.LoadError, match="not readable as a checkpoint"):
            restore(toy_checkpoint)


def test_a_hostile_checkpoint_ends_a_resume_in_one_sentence(whole, records, tmp_path, capsys):
    out = back_to(whole, tmp_path / "out", 6)
    replace_files(out / "step-6", **{".metadata": pickle.dumps(Payload(tmp_path / "ran"))})
    assert run(out, *RECIPE, *records, "--resume") == 2
    assert not (tmp_path / "ran").exists()
    sentence(capsys, "step-6", "mkdir")


def damaged_states(state):
    """{what is wrong: the content of state.json} that `state_of` must notice."""
    text = json.dumps(state).encode()
    changes = {"another step": {"step": 4}, "step": {"step": "6"}, "config": {"config": []}}
    contents = {what: json.dumps(state | change).encode() for what, change in changes.items()}
    for key in checkpoint.STATE_TYPES:
        contents[f"without {key}"] = json.dumps({k: state[k] for k in state if k != key}).encode()
    return contents | {
        "cut": text[: len(text) // 2], "empty": b"", "zeros": bytes(len(text)), "list": b"[]",
        "nested": b"[" * 100_000, "not text": b"\xff\xfe{}",
    }


def test_a_state_that_is_damaged_is_refused(whole, tmp_path):
    """... though the sizes and checksums of its files are right."""
    out = back_to(whole, tmp_path / "out", 6)
    state = json.loads((out / "step-6" / "state.json").read_text())
    assert checkpoint.state_of(out / "step-6") == state
    for content in damaged_states(state).values():
        replace_files(out / "step-6", **{"state.json": content})
        with pytest.raises(checkpoint.LoadError, match="step-6"):
            checkpoint.state_of(out / "step-6")


def hostile_states(state):
    """{what is wrong: the content of state.json} that only the parts of the run notice."""
    plans = state["loader"]["plans"]

    def with_plans(**change):
        return {"loader": state["loader"] | {"plans": plans | change}}

    changes = {
        "model": {"model": {"n_layer": 1}},
        "absurd model": {"model": state["model"] | {"n_embd": -3}},
        "loader": {"loader": {}},
        "plans": {"loader": state["loader"] | {"plans": 3}},
        "planner": with_plans(planner=3),
        "ids": with_plans(ids=[[1]]),
        "pool": with_plans(planner=plans["planner"] | {"pool": 7}),
    }
    return {what: json.dumps(state | change).encode() for what, change in changes.items()}


def test_a_state_with_wrong_parts_ends_a_resume_in_one_sentence(whole, records, tmp_path, capsys):
    out = back_to(whole, tmp_path / "out", 6)
    state = json.loads((out / "step-6" / "state.json").read_text())
    for what, content in {"cut": b"{", **hostile_states(state)}.items():
        replace_files(out / "step-6", **{"state.json": content})
        assert run(out, *RECIPE, *records, "--resume") == 2, what
        sentence(capsys, "step-6")
