"""The benchmark of processes without a model."""

from types import SimpleNamespace

import pytest

from tools.bench import ranks


def test_two_processes_start_and_exchange(capsys):
    found = ranks.run(SimpleNamespace(ranks=[2], steps=3))
    (start, step) = found["start_and_step"]["2"]
    for wall, cpu in (start, step):
        assert wall > 0
        assert cpu > 0
    assert " 2 " in capsys.readouterr().out


def test_ranks_that_form_no_groups_are_refused():
    with pytest.raises(ValueError, match="3 ranks cannot form pairs"):
        ranks.run(SimpleNamespace(ranks=[3], steps=1))
