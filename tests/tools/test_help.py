"""With --help, every command prints a sentence and an example and exits with status 0. An error has
one sentence and a status."""

import errno
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest

from records.errors import Parser, RunError
from tests import test_readme
from tools import hf
from tools.bench import __main__ as bench
from tools.command import report_errors

TOOLS = Path(__file__).parents[2] / "tools"
COMMANDS = []
for path in sorted(TOOLS.rglob("*.py")):
    parts = path.relative_to(TOOLS.parent).with_suffix("").parts
    if path.name == "__main__.py":
        COMMANDS.append(".".join(parts[:-1]))
    elif "__name__ ==" in path.read_text(encoding="utf-8"):
        COMMANDS.append(".".join(parts))

HELPS = [*COMMANDS, *(f"tools.bench {name}" for name in bench.COMMANDS),
         *(f"tools.hf {name}" for name in hf.COMMANDS),
         "tools.prepare frames", "train"]
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # a warning of runpy

# CI does not run these examples. They need downloads, masks or extras, or other tests run them.
NOT_RUN = ("tools.hf import ", "tools.hf base ", "tools.hf export toy ", "tools.j_and_f ")

def run(command, flags, monkeypatch):
    """Runs `python -m command flags` in this process -> its exit status."""
    monkeypatch.setattr(sys, "argv", [command, *flags.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("command", HELPS)
def test_help_is_one_sentence_one_example_and_the_flags(command, monkeypatch, capsys):
    """The numbers in it are the defaults of the flags."""
    parsers = []
    print_help = Parser.print_help
    monkeypatch.setattr(Parser, "print_help", lambda self: parsers.append(self) or print_help(self))
    module, *name = command.split()
    assert run(module, " ".join([*name, "--help"]), monkeypatch) == 0
    stdout, stderr = capsys.readouterr()
    assert not stderr
    _, sentence, example, flags = stdout.split("\n\n", 3)
    assert re.fullmatch(r"[A-Z]([^:;.]|[.](?=\w))+[.]", sentence), sentence
    example = " ".join(example.replace("\\\n", " ").split())
    assert "    python " not in flags
    is_listed = example.startswith(tuple(f"python -m {start}" for start in NOT_RUN))
    assert is_listed or example in test_readme.COMMANDS, f"CI does not run: {example}"
    for action in parsers[0]._actions:
        stated = re.search(r"\(default:? (-?[\d.]+)", action.help or "")
        if stated and isinstance(action.default, (int, float)):
            assert float(stated[1]) == action.default, action.dest


@pytest.mark.parametrize(("error", "status"), [
    (KeyboardInterrupt(), 130),
    (RunError("the run has failed"), 1),
    (OSError(errno.ENOSPC, "No space left on device"), 1),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), 1),
    (ValueError("wrong"), 2),
])
def test_the_status_tells_what_ended_a_command(capsys, error, status):
    @report_errors
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == status
    assert (signal.getsignal(signal.SIGINT) is signal.SIG_IGN) == (status == 130)
    assert len(capsys.readouterr().err.splitlines()) == (status != 130)
