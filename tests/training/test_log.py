"""log.jsonl and skips.jsonl: what a resumed run adds to them, and lines that cannot be read."""

import io
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from training import log
from training.ending import Ending
from training.log import RunLog, read_log, read_skips

STEP = {"step": 1, "loss": 2.5, "lr": {"llm": 1e-3}, "seconds": 0.1}


def step(n, **more):
    return {**STEP, "step": n, **more}


def masked(*indices):
    return [{"index": i, "id": f"r:{i}", "where": f"r.jsonl:{i}", "reason": "damaged image: x"}
            for i in indices]


def test_a_log_begins_with_its_head_and_has_a_line_per_step_and_evaluation(tmp_path):
    head = {"config": {"steps": 3}}
    written = RunLog(tmp_path, True, head)
    written.step(step(1), masked(7, 3))
    written.step(step(2, loss=None), [])
    written.scores(2, {"f1": 0.5}, seconds=3.0)
    assert read_log(tmp_path / "log.jsonl") == [
        head, step(1), step(2, loss=None), {"step": 2, "eval": {"f1": 0.5}, "seconds": 3.0}]
    assert json.loads((tmp_path / "config.json").read_text()) == head
    assert [(skip["step"], skip["index"]) for skip in read_skips(tmp_path)] == [(1, 3), (1, 7)]
    assert written.loss is None


def test_a_resumed_log_continues_after_the_last_whole_line(tmp_path):
    """It knows the loss of its step, and repeats no skip that is there."""
    first = RunLog(tmp_path, True, {"config": {}})
    first.step(step(1), masked(4))
    first.step(step(2, loss=1.5), masked(5))
    first.file.write('{"step": 3, "lo')
    first.file.close()
    with open(tmp_path / "skips.jsonl", "a") as skips:
        skips.write('{"index": 6, "rea')
    resumed = RunLog(tmp_path, True, {"config": {}}, 2)
    assert resumed.loss == 1.5
    resumed.step(step(3), masked(5, 6))
    assert [line.get("step") for line in read_log(tmp_path / "log.jsonl")] == [None, 1, 2, 3]
    assert [skip["index"] for skip in read_skips(tmp_path)] == [4, 5, 6]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_directory_that_is_deleted_ends_the_run_with_a_sentence(tmp_path, capsys, replaced):
    out = tmp_path / "run"
    out.mkdir()
    written = RunLog(out, True, {"config": {}})
    written.step(step(1), [])
    shutil.rmtree(out)
    if replaced:
        out.mkdir()
        (out / "log.jsonl").write_text("another run's\n")
    for write in (lambda: written.step(step(2), []), lambda: written.scores(2, {})):
        with pytest.raises(SystemExit) as ended, Ending():
            write()
        assert ended.value.code == 1
        sentence = f"train.py: {out}: the run directory was deleted or moved while"
        assert capsys.readouterr().err.startswith(sentence)


def test_only_the_first_rank_writes(tmp_path):
    first = RunLog(tmp_path, True, {"config": {}})
    first.step(step(1), masked(4))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for resume_step in (None, 1):
        other = RunLog(tmp_path, False, {"config": {}}, resume_step)
        other.step(step(2), masked(9))
        other.scores(2, {})
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


NOT_LINES = [
    b"", b"{", b"null", b"3", b"[1]", b'"lr"', b"\xff\xfe", b"\x00" * 50, b"[" * 100_000, b"{}{}",
    b'{"lr": {}}', b'{"step": "4", "loss": 1, "lr": {}, "seconds": 1}', b'{"eval": {}}',
    b'{"step": 4, "loss": "x", "lr": {}, "seconds": 1}', b'{"step": 4, "eval": 3}',
    b'{"step": 4, "loss": 1, "lr": null, "seconds": 1}', b'{"loss": 1, "seconds": "x"}',
    b'{"step": 4, "loss": 1, "lr": {"vit": "x"}, "seconds": 1}',
    b'{"step": 4, "loss": 1, "lr": {}, "seconds": 1, "nll_by_source": {"a": []}}',
    b"1" * 5000,
]


@pytest.mark.parametrize("content", NOT_LINES, ids=range(len(NOT_LINES)))
def test_a_malformed_line_is_passed_over(tmp_path, content):
    """... by readers, and by a run that resumes; in skips.jsonl too."""
    lines = json.dumps(step(1)).encode(), content, json.dumps(step(2, loss=1.5)).encode()
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert read_log(tmp_path / "log.jsonl") == [step(1), step(2, loss=1.5)]
    skips = json.dumps(masked(4)[0]).encode(), content, b'{"index": "5", "reason": "x"}'
    (tmp_path / "skips.jsonl").write_bytes(b"\n".join(skips) + b"\n")
    assert read_skips(tmp_path) == masked(4)
    resumed = RunLog(tmp_path, True, {}, 2)
    assert resumed.loss == 1.5
    resumed.step(step(3), masked(4, 5))
    assert [skip["index"] for skip in read_skips(tmp_path)] == [4, 5]


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert read_log(tmp_path / "log.jsonl") == read_skips(tmp_path) == []


def test_dropped_records_are_counted_by_source_and_kind():
    counts = {"a.jsonl: missing file": 2, "b: c.jsonl: missing file": 1, "a.jsonl: too long": 4}
    assert log.dropped_by_source(counts) == {
        "a.jsonl": {"missing file": 2, "too long": 4}, "b: c.jsonl": {"missing file": 1}}


def test_the_commit_of_code_outside_a_checkout_is_unknown(tmp_path, monkeypatch):
    assert log.commit() == "unknown" or len(log.commit()) >= 7
    monkeypatch.setattr(log, "__file__", str(tmp_path / "training" / "log.py"))
    (tmp_path / "training").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert log.commit() == "unknown"


def test_hardware_is_a_gpu_by_its_name_or_a_processor_and_its_cores(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert log.hardware(torch.device("cuda:1")) == "GPU of cuda:1"
    assert "cores, " in log.hardware("cpu")


class Bar:
    """A progress bar of tqdm, as far as time_left reads it: 2 steps a second."""

    total = 1000

    def __init__(self, n):
        self.n = n
        self.format_dict = {"rate": 2.0 if n else None}


def test_the_time_left_includes_what_follows_the_bar():
    assert log.time_left(Bar(0), 60) == "?"
    assert log.time_left(Bar(400), 0) == "05:00"
    assert log.time_left(Bar(400), 60) == "05:30"
    assert log.time_left(Bar(1000), 60) == "00:30"


@pytest.mark.parametrize(("eval_records", "stage", "world", "steps"), [
    (None, 1, 1, 400 / 3), (None, 3, 1, 800 / 3), (None, 1, 2, 200 / 3), ({"a": [1] * 6}, 1, 1, 0)
])
def test_three_images_of_the_toy_are_evaluated_in_a_step(eval_records, stage, world, steps):
    run = SimpleNamespace(eval_records=eval_records, ranks=SimpleNamespace(world=world),
                          config=SimpleNamespace(stage=stage, eval_images=200))
    assert log.evaluation_in_steps(run) == pytest.approx(steps)


def test_the_bar_shows_loss_fill_and_the_time_left(monkeypatch):
    bar = tqdm(range(10), file=io.StringIO())
    monkeypatch.setattr(log, "time_left", lambda *_: "07:40")
    log.show_progress(bar, SimpleNamespace(eval_records={}), 0.12345, 0.976)
    assert bar.postfix == "ends_in=07:40, fill=98%, loss=0.123"
