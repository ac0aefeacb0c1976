"""A run continues bit for bit from its checkpoint, or prints why it cannot."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils

import data
import model
import train
from evaluation import report
from records import media
from records.errors import UserError, lock
from tests.full_disk import files_up_to
from tests.training.runs import (
    RECIPE,
    SMALL,
    assert_same_run,
    back_to,
    logged,
    run,
    sentence,
    weights,
)
from tests.training.stream import write_texts
from text.tokenizer import ByteTokenizer
from training import checkpoint
from training.log import RunLog


@pytest.fixture
def encoded(monkeypatch):
    """-> the ids of the records that are decoded, as a list that grows."""
    ids = []
    encode = data.encode

    def noted(record, *args, **kwargs):
        ids.append(record["id"])
        return encode(record, *args, **kwargs)

    monkeypatch.setattr(data, "encode", noted)
    return ids


@pytest.mark.parametrize("step", [0, 2])
def test_a_resumed_run_is_the_run_that_nothing_stopped(whole, recipe, tmp_path, step, capsys,
                                                       encoded):
    """The run has dropout. Without a checkpoint, it starts from step 1 and prints a message. With a
    checkpoint, it decodes no record of earlier steps."""
    out = back_to(whole, tmp_path / "out", step)
    (out / "step-2.part").mkdir()
    assert run(out, *recipe, "--resume") == 0
    assert_same_run(out, whole)
    assert not list(out.glob("*.part"))
    assert ("no checkpoint" in capsys.readouterr().err) == (step == 0)
    if step:
        lines = logged(whole)
        used = sum(lines[n]["examples"] for n in range(step + 1, 7))
        assert len(encoded) == used > 0
        assert any(lines[n]["unreadable"] for n in range(step + 1, 7))


def test_a_partial_line_is_cut_off_and_the_log_is_never_written_anew(whole, recipe, tmp_path):
    """So a kill during a resume loses no line. No record is listed twice."""
    out = back_to(whole, tmp_path / "out", 4)
    lines = (out / "log.jsonl").read_bytes().splitlines(keepends=True)
    others = b'{"of": "another program"}\n'
    (out / "log.jsonl").write_bytes(b"".join(lines[:6]) + others + lines[6][:20])
    with open(out / "log.jsonl", "rb") as old:
        assert run(out, *recipe, "--resume") == 0
        assert old.read() == (out / "log.jsonl").read_bytes()
    assert logged(out) == logged(whole)
    assert weights(out) == weights(whole)


def test_another_layout_is_no_other_recipe(whole, recipe, tmp_path):
    """It trains on the same records. Only rounding and dropout change the loss."""
    out = back_to(whole, tmp_path / "out", 4)
    flags = ["--micro-batch=1", "--recompute=1", "--crop_bucket=4", "--keep=1"]
    assert run(out, *recipe, "--resume", *flags) == 0
    for step in (5, 6):
        ours = logged(out)[step]
        theirs = logged(whole)[step]
        for field in ("ids", "tokens", "weight", "lr"):
            assert ours[field] == theirs[field]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.1)
    assert [path.name for path in out.glob("step-*")] == ["step-6"]


OTHER_RECIPES = [
    (["--lr.llm=1", "--z_loss=1"], "lr.llm was 0.0022 and is 1.0; z_loss was 0.0001 and is 1.0"),
    (["--deterministic"], "deterministic was false and is true"),
    (["--model.n_hidden=96"], "the shape of its model differs"),
    (["--plan=plan.npz"], "needs --plan if the run started with it"),
]


@pytest.mark.parametrize(("flags", "words"), OTHER_RECIPES, ids=[w for _, w in OTHER_RECIPES])
def test_another_recipe_is_refused_with_the_fields_named(whole, recipe, capsys, flags, words):
    before = contents(whole)
    assert run(whole, *recipe, "--resume", *flags) == 2
    sentence(capsys, words)
    assert contents(whole) == before


def test_with_other_data_no_good_record_is_unreadable(tmp_path, capsys, encoded):
    """The saved pool of the packer contains sizes of old records, which new records do not have."""
    path = tmp_path / "r.jsonl"
    out = tmp_path / "out"

    def write(more):
        write_texts(path, ["x" * (9 + k) + more for k in range(40)])

    write("")
    flags = [*RECIPE, f"--data={path}", "--pool_size=30"]
    assert run(out, *flags) == 0
    shutil.rmtree(out / "step-6")
    write("y" * 20)
    assert run(out, *flags, "--resume") == 2
    sentence(capsys, "does not have the same data", "or their contents", "--resume-anyway")
    encoded.clear()
    capsys.readouterr()
    assert run(out, *flags, "--resume-anyway", "--steps=7") == 0
    # 0.1 + 0.9 * (1 + cos(pi * 4 / n)) / 2 of 0.0022, for n = 6 and 7 steps
    jump = "after step 4 the learning rate jumps, .* llm from 0.000715 to 0.00099"
    assert re.search(jump, capsys.readouterr().err)
    assert logged(out)[6]["skipped"] == {}
    assert len(encoded) == sum(logged(out)[step]["examples"] for step in (5, 6, 7))


def test_a_checkpoint_that_lost_a_write_costs_the_steps_since_the_one_before(whole, recipe,
                                                                              tmp_path, capsys):
    out = back_to(whole, tmp_path / "out", 6)
    os.truncate(out / "step-6" / "__0_0.distcp", 100)
    assert run(out, *recipe, "--resume") == 0
    sentence(capsys, "step-6: a file is missing or damaged", "trying the checkpoint before it")
    assert_same_run(out, whole)
    assert checkpoint.find_newest(out).step == 6


def test_a_flipped_bit_of_a_tensor_ends_the_run_with_the_step_of_the_older_checkpoint(
        whole, recipe, tmp_path, capsys):
    """The folder is not deleted. After the user has deleted it, the run continues."""
    out = back_to(whole, tmp_path / "out", 6)
    path = out / "step-6" / "__0_0.distcp"
    sound = path.read_bytes()
    weight = next(reversed(checkpoint.Reader(out / "step-6").read_metadata().storage_data.values()))
    for byte in (weight.length // 2, weight.length - 22):  # of the numbers; where a zip file ends
        text = bytearray(sound)
        text[weight.offset + byte] ^= 1
        path.write_bytes(text)
        assert run(out, *recipe, "--resume") == 2
        sentence(capsys, "step-6: a tensor in __0_0.distcp is damaged", "delete this folder",
                 "continues from step 4")
    shutil.rmtree(out / "step-6")
    assert run(out, *recipe, "--resume") == 0
    assert_same_run(out, whole)


def test_any_change_of_a_file_that_is_no_tensor_damages_a_checkpoint(whole, tmp_path):
    """One bit, or one field of state.json, is changed."""
    out = back_to(whole, tmp_path / "out", 6)
    state = json.loads((out / "step-6" / "state.json").read_text())
    texts = ["{}", "[]", "null", '{"files": {}}', json.dumps(state | {"recipe": []})]
    texts += [json.dumps({k: state[k] for k in state if k != name}) for name in state]
    for field in ("loader", "data"):  # from another program, with the right hash
        forged = {key: state[key] for key in state if key != "sha256"} | {field: {}}
        digest = checkpoint.hash_without_tensors(out / "step-6", forged)
        texts.append(json.dumps(forged | {"sha256": digest}))
    damaged = [("state.json", text.encode()) for text in texts]
    for name in ("state.json", ".metadata", "tokenizer.json"):
        for share in (0, 0.3, 0.5, 0.7, 0.99):
            text = bytearray((out / "step-6" / name).read_bytes())
            text[int(share * len(text))] ^= 4
            damaged.append((name, text))
    for name, text in damaged:
        path = out / "step-6" / name
        sound = path.read_bytes()
        path.write_bytes(text)
        assert checkpoint.find_newest(out).step == 4, (name, text[:100])
        path.write_bytes(sound)
    assert checkpoint.find_newest(out).step == 6


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code_of_those_who_made_it(whole, tmp_path):
    out = back_to(whole, tmp_path / "out", 6)
    folder = out / "step-6"
    text = pickle.dumps(Evil(tmp_path / "made"))
    (folder / ".metadata").write_bytes(text)
    state = json.loads((folder / "state.json").read_text())
    del state["sha256"]
    state["files"][".metadata"] = len(text)
    state["sha256"] = checkpoint.hash_without_tensors(folder, state)
    (folder / "state.json").write_text(json.dumps(state))
    assert checkpoint.find_newest(out).step == 4
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir, a foreign class"):
        checkpoint.Reader(folder).read_metadata()
    assert not (tmp_path / "made").exists()
    assert "BytesStorageMetadata" not in chain(*checkpoint.METADATA_CLASSES.values())


def test_a_full_disk_ends_the_run_in_one_sentence_and_resume_continues(whole, recipe, tmp_path,
                                                                       capsys, monkeypatch):
    out = tmp_path / "out"
    with files_up_to(2000):  # less than config.json
        assert run(out, *recipe) == 1
    sentence(capsys, "File too large")
    write_item = dcp.filesystem._write_item

    def full_at_4(*args):
        if list(out.glob("step-4.part")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_item(*args)

    with monkeypatch.context() as patch:
        patch.setattr(dcp.filesystem, "_write_item", full_at_4)
        assert run(out, *recipe) == 1
    sentence(capsys, "the checkpoint of step 4 cannot be written", "No space left", "--resume")
    assert [path.name for path in out.glob("step-*")] == ["step-2"]
    assert run(out, *recipe, "--resume") == 0
    assert_same_run(out, whole)


def test_a_loss_that_is_not_finite_stops_the_run_with_the_records_named(recipe, tmp_path, capsys,
                                                                        monkeypatch):
    """It stops before the optimizer changes the weights."""
    steps = []
    dropout_seed = train.dropout_seed
    nll = model.Molmo2.nll
    monkeypatch.setattr(train, "dropout_seed", lambda seed, step, rank: (
        steps.append(step), dropout_seed(seed, step, rank))[1])
    monkeypatch.setattr(model.Molmo2, "nll", lambda self, *args: tuple(
        x * (float("nan") if steps[-1] == 3 else 1) for x in nll(self, *args)))
    out = tmp_path / "out"
    assert run(out, *recipe) == 1
    sentence(capsys, "step 3: loss nan", "records: records.jsonl:",
             f"tools.view --run {out} --step 3")
    assert sorted(logged(out)) == [1, 2]


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")
            if path.name != "lock"}


def test_a_directory_that_holds_a_run_needs_resume_or_overwrite(whole, recipe, tmp_path, capsys,
                                                                monkeypatch):
    """No file is renamed. --overwrite deletes the files of a run, but no file of the user."""
    monkeypatch.chdir(tmp_path)
    out = Path("out")  # a relative path, like the default directory
    shutil.copytree(whole, out)
    (out / "notes.txt").write_text("mine")
    for name in ("step-by-step", "step-²", "step-07"):
        (out / name).mkdir()
    before = contents(tmp_path)
    assert run(out, *recipe) == 2
    sentence(capsys, f"--out {out}: contains a run; --resume continues it, --overwrite deletes it")
    assert contents(tmp_path) == before
    flags = [*recipe, "--steps=1", "--save-every=0", "--overwrite"]
    assert run(tmp_path, *flags) == 2
    sentence(capsys, "is not a run directory (it has no config.json)")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("{}")
    before = contents(tmp_path)
    for more in ([], ["--overwrite"]):
        assert run(tmp_path / "mine", *recipe, *more) == 2
        sentence(capsys, "mine: contains config.json, which was not written by a run")
        (tmp_path / "mine/lock").unlink()
    for flag in ("--init", "--vit"):
        assert run(out, *flags, flag, str(out)) == 2
        sentence(capsys, f"--overwrite would delete the weights of {flag}")
    assert contents(tmp_path) == before
    assert run(out, *flags) == 0
    assert sorted(logged(out)) == [1]
    assert (out / "notes.txt").read_text() == "mine"
    assert {path.name for path in out.glob("step-*")} == {"step-by-step", "step-²", "step-07"}
    assert run(out, *recipe, "--resume") == 2
    sentence(capsys, "contains a run without a complete checkpoint to resume")


def test_overwrite_deletes_every_file_of_a_run_except_config_json(tmp_path):
    for name in ("config.json", "log.jsonl", "loss.png", "scores.png", "progress.gif",
                 "result.json"):
        (tmp_path / name).touch()
    for name in ("step-4", "step-6.part", "model", "samples", "tensorboard"):
        (tmp_path / name).mkdir()
    checkpoint.delete_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_checkpoint_of_another_model_does_not_fit(whole):
    layer = torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match="step-6 does not fit this model: Missing key"):
        checkpoint.restore(checkpoint.Checkpoint(whole / "step-6", 6), layer,
                           torch.optim.AdamW(layer.parameters()))


def test_a_resumed_run_starts_a_new_log_if_the_log_was_deleted(tmp_path):
    resumed = SimpleNamespace(ranks=SimpleNamespace(first=True), out=tmp_path,
                              resume_from=SimpleNamespace(step=4))
    RunLog(resumed, {}).write({"step": 5})
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 5}\n'


def test_adapters_started_from_the_default_directory_leave_it_and_can_be_resumed(
        records, tmp_path, monkeypatch, capsys):
    """The base model is in the directory to which the run would write by default."""
    monkeypatch.chdir(tmp_path)
    base = Path("runs/stage1-tiny")
    assert run(base, *SMALL, *records, "--steps=2", "--save-every=0") == 0
    capsys.readouterr()
    before = contents(base)
    shape = [word for word in SMALL if not word.startswith("--model.")]
    flags = [*shape, *records, "--lora=4", f"--init={base}", "--steps=4", "--save-every=2"]
    with pytest.raises(SystemExit) as end:
        train.main(flags)
    assert end.value.code == 2
    sentence(capsys, f"--out {base}: contains a run", "choose another directory")
    assert contents(base) == before
    assert run("adapted", *flags) == 0
    shutil.rmtree("adapted/step-4")
    resumed = [word for word in flags if word != f"--init={base}"]
    assert run("adapted", *resumed, "--resume") == 0
    assert checkpoint.find_newest(Path("adapted")).state["init"] == str(base)
    shutil.rmtree("adapted/step-4")
    # the same command works as well
    assert run("adapted", *flags, "--resume") == 0
    capsys.readouterr()
    assert run("adapted", *resumed, "--init=other", "--resume") == 2
    sentence(capsys, f"--init other: the run in adapted started from {base}; omit --init")


def test_another_run_is_kept_out_until_the_first_ends(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    held = lock(out)
    assert run(out, *SMALL) == 2
    sentence(capsys, f"--out {out}: another run is writing there")
    assert [path.name for path in out.iterdir()] == ["lock"]
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")  # of the same run
        lock(out).close()
    held.close()
    lock(out).close()


@pytest.mark.parametrize("has_crc", [True, False])
def test_parameters_that_have_no_optimizer_state_have_none_after_a_resume(tmp_path, has_crc):
    """The gradient of such a parameter was None in every step. A checkpoint needs no CRC-32."""
    def make():
        linear = torch.nn.Linear(5, 2)
        return linear, torch.optim.AdamW(linear.parameters(), fused=True)

    linear, optimizer = make()
    linear(torch.ones(3, 5)).sum().backward()
    linear.bias.grad = None
    optimizer.step()
    saved = checkpoint.name_tensors(linear, optimizer)
    torch.serialization.set_crc32_options(has_crc)
    dcp.save(saved, checkpoint_id=tmp_path / "step-1", no_dist=True)
    torch.serialization.set_crc32_options(True)
    other, other_optimizer = make()
    checkpoint.restore(checkpoint.Checkpoint(tmp_path / "step-1"), other, other_optimizer)
    restored = checkpoint.name_tensors(other, other_optimizer)
    assert saved.keys() >= {"model.bias", "exp_avg.weight"}
    torch.testing.assert_close(restored, saved, rtol=0, atol=0)
    assert other.bias not in other_optimizer.state


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_in_an_image(*_):
    """Sends SIGTERM in a block that reports every Exception as a damaged image."""
    with media.open_image(Path(__file__).parents[1] / "media" / "coins.png"):
        terminate()


@pytest.mark.parametrize(("when", "save_every"), [
    ("in an image of an evaluation", 6), ("in the last step", 6), ("in the last step", 0)])
def test_sigterm_beside_the_steps_ends_the_run_where_nothing_is_lost(
        whole, records, recipe, tmp_path, monkeypatch, when, save_every):
    flags = [*recipe, f"--save-every={save_every}"]
    write = RunLog.write
    in_evaluation = "evaluation" in when
    if in_evaluation:
        monkeypatch.setattr(report, "scores", terminate_in_an_image)
        flags += [f"--eval={records[1]}", "--eval-every=4"]
    else:
        monkeypatch.setattr(RunLog, "write", lambda log, line: (
            write(log, line), line["step"] == 6 and "loss" in line and terminate()))
    out = tmp_path / "out"
    assert run(out, *flags) == (143 if save_every else 0)
    step = 4 if in_evaluation else 6
    assert checkpoint.list_steps(out) == [step] * (save_every > 0)
    assert (out / "model").exists() == (not save_every)
    monkeypatch.undo()
    if save_every:
        assert run(out, *recipe, "--resume") == 0
    assert_same_run(out, whole)


def test_ctrl_c_while_a_checkpoint_is_written_is_no_broken_disk(
        recipe, tmp_path, monkeypatch, capsys):
    """torch turns it into its own exception."""
    def interrupted(*_, **options):
        raise dcp.api.CheckpointException("", {0: (KeyboardInterrupt(), None)})

    monkeypatch.setattr(dcp, "save", interrupted)
    assert run(tmp_path / "out", *recipe) == 130
    sentence(capsys, "interrupted; nothing was saved; start again with")


def test_the_checkpoint_with_the_lowest_held_out_loss_stays_and_ends_the_run_when_asked(
        records, recipe, tmp_path, monkeypatch, capsys):
    """With --keep 1, after SIGTERM and --resume. The first of two held-out sets decides."""
    losses = iter([0.5, None, 0.7, 0.1])

    def scores(*_):
        loss = next(losses)
        if not loss:
            terminate()
        return {"nll": {"all": loss}, "other": {"nll": {"all": 1 - loss}}}

    out = tmp_path / "out"
    flags = [*recipe, f"--eval={records[1]}", "--eval-every=2", "--keep=1"]
    monkeypatch.setattr(report, "scores", scores)
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--out", "x"])
    assert run(out, *flags) == 143
    assert run(out, *flags, "--resume") == 0
    assert checkpoint.list_steps(out) == [6, 2]
    printed = capsys.readouterr().out
    assert f"lowest at step 2 ({out}/step-2)" in printed
    assert "train.py --out x --finish-at 2\n" in printed
    assert run(out, *flags, "--finish-at=4") == 2
    assert "no complete checkpoint of this step; it has checkpoints of the steps [6, 2]" in (
        capsys.readouterr().err)
    assert run(out, *flags, "--finish-at=2") == 0
    printed = capsys.readouterr()
    assert "lowest at step" not in printed.out
    assert "jumps" not in printed.err
    assert json.loads((out / "result.json").read_text())["steps"] == 2
    format_utils.dcp_to_torch_save(out / "step-2", tmp_path / "step-2.pt")
    saved = torch.load(tmp_path / "step-2.pt", weights_only=False)
    for name, tensor in torch.load(out / "model" / "model.pt").items():
        assert torch.equal(tensor, saved[f"model.{name}"])


def test_a_save_keeps_itself_where_a_later_checkpoint_was_damaged(tmp_path):
    for name in ("step-1", "step-2.part", "step-4"):
        (tmp_path / name).mkdir()
    run = SimpleNamespace(out=tmp_path, config=SimpleNamespace(keep=1), tokenizer=ByteTokenizer())
    checkpoint.complete(run, tmp_path / "step-2.part", {"step": 2})
    assert checkpoint.list_steps(tmp_path) == [4, 2]


def test_an_evaluation_that_was_abandoned_does_not_decide_which_checkpoint_stays(recipe, tmp_path):
    """The log has a lower loss at step 6, but the checkpoint of step 6 was deleted."""
    out = tmp_path / "out"
    flags = [*recipe, "--keep=1", "--save-every=2"]
    assert run(out, *flags, "--keep=3") == 0
    shutil.rmtree(out / "step-6")
    with open(out / "log.jsonl", "a", encoding="utf-8") as log:
        for step, loss in ((2, 1.0), (4, 1.5), (6, 0.9)):
            log.write(json.dumps({"step": step, "eval": {"nll": {"all": loss}}}) + "\n")
    assert run(out, *flags, "--resume") == 0
    assert 2 in checkpoint.list_steps(out)
