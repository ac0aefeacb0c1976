"""python -m tools.tensorboard: TensorBoard reads the same numbers as log.jsonl contains."""

import json

import pytest

from tests.full_disk import files_up_to
from tests.tools.command import run_main
from tools import tensorboard


def write_log(run, *lines):
    run.mkdir(exist_ok=True)
    with open(run / "log.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def scalars(run):
    """-> {name: [(step, value), ..]} that TensorBoard reads from a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    return {name: [(event.step, event.value) for event in board.Scalars(name)]
            for name in board.Tags()["scalars"]}


def steps(*numbers, loss):
    return [{"step": n, "loss": loss, "lr": {"vit": 0.5}, "ids": "ab", "seconds": 1}
            for n in numbers]


@pytest.mark.extras("tensorboard")
def test_tensorboard_reads_the_later_line_of_each_step_however_often_the_command_runs(tmp_path):
    """The run was killed after step 4, resumed after step 2, and evaluated twice."""
    run = tmp_path / "run"
    write_log(run, {"config": {}}, *steps(1, 2, loss=8), {"step": 2, "eval": {"point_f1": 0.25}},
              *steps(3, 4, loss=7), *steps(3, loss=6),
              {"step": 3, "eval": {"point_f1": 0.5, "b.jsonl": {"loss": 2}}, "seconds": 900})
    with open(run / "log.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    (run / "tensorboard").mkdir()
    (run / "tensorboard/mine.txt").touch()
    for _ in range(2):
        tensorboard.main([str(run), "--once"])
        assert scalars(run) == {
            "loss": [(1, 8), (2, 8), (3, 6)], "lr/vit": [(1, 0.5), (2, 0.5), (3, 0.5)],
            "seconds": [(1, 1), (2, 1), (3, 1)], "eval/point_f1": [(2, 0.25), (3, 0.5)],
            "eval/b.jsonl/loss": [(3, 2)]}
    assert len(list((run / "tensorboard").iterdir())) == 3


@pytest.mark.extras("tensorboard")
def test_a_full_disk_is_one_sentence(tmp_path):
    write_log(tmp_path, *steps(*range(1, 99), loss=8))
    with files_up_to(900):
        status, _, err = run_main(tensorboard.main, tmp_path, "--once")
    (sentence,) = err.splitlines()
    assert status == 1
    assert "File too large" in sentence


@pytest.mark.extras("tensorboard")
def test_it_follows_a_run_until_ctrl_c(tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_log(run, {"config": {}}, *steps(1, 2, loss=8))
    news = [steps(3, loss=7), [], steps(2, loss=6)]  # the last ones after a resume
    sizes = []

    def wait(seconds):
        (events,) = (run / "tensorboard").iterdir()
        sizes.append(events.stat().st_size)
        if not news:
            raise KeyboardInterrupt
        write_log(run, *news.pop(0))

    monkeypatch.setattr(tensorboard.time, "sleep", wait)
    status, _, err = run_main(tensorboard.main, run)
    assert (status, err) == (130, "")
    assert scalars(run)["loss"] == [(1, 8), (2, 6)]
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3]  # each line is written once


@pytest.mark.extras("tensorboard")
def test_a_run_that_is_deleted_ends_it_with_a_sentence(tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_log(run, {"config": {}}, *steps(1, loss=8))
    monkeypatch.setattr(tensorboard.time, "sleep", lambda _: (run / "log.jsonl").unlink())
    status, _, err = run_main(tensorboard.main, run)
    assert status == 2
    assert err.endswith("has fewer lines than before; start this command again\n")
