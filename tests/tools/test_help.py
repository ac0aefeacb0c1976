"""Every command of tools/ answers --help with a text and status 0."""

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
COMMANDS = []
for path in sorted(TOOLS.rglob("*.py")):
    parts = path.relative_to(TOOLS.parent).with_suffix("").parts
    if path.name == "__main__.py":
        COMMANDS.append(".".join(parts[:-1]))
    elif "__name__ ==" in path.read_text(encoding="utf-8"):
        COMMANDS.append(".".join(parts))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_text_and_status_0(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name="__main__")
    assert ended.value.code == 0
    stdout, stderr = capsys.readouterr()
    assert len(stdout.split()) > 30
    assert not stderr


def test_all_commands_are_found():
    assert len(COMMANDS) > 12
    assert {"tools.check", "tools.runs", "tools.ablations", "tools.bench"} <= set(COMMANDS)
