"""The processes of data loaders start from a server. A run ends if one of them is killed."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.training import processes
from tests.training.processes import ROOT, n_lines, stderr_of, wait_for
from tests.training.runs import SMALL

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(sys.platform != "linux", reason="processes start by spawn")]

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from training.processes import iterate

class About:
    def __getitem__(self, i):
        fields = Path("/proc/self/smaps_rollup").read_text().split()
        return {"data": sys.modules["data"].__file__, "folder": os.getcwd(),
                "MB": int(fields[fields.index("Private_Dirty:") + 1]) / 1000,
                "threads of the server": len(os.listdir(f"/proc/{os.getppid()}/task")),
                "ignored": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN}

if __name__ == "__main__":
    print(json.dumps(next(iterate(About(), 1, sampler=[0]))))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


def test_a_process_shares_the_code_of_the_project_wherever_the_command_is_started(tmp_path):
    """Here, the folder has modules of the same names. A process that imported torch and this
    project by itself would have 190 MB of its own."""
    (tmp_path / "training").mkdir()
    for name in ("training/__init__.py", "training/loader.py", "data.py"):
        (tmp_path / name).write_text("raise SystemExit('a module of the user was imported')")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "bin/program.py"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert about.pop("MB") < 60
    assert about == {"data": str(ROOT / "data.py"), "folder": str(tmp_path), "ignored": True,
                     "threads of the server": 1}


@pytest.mark.parametrize("killed", ["a process", "the server"])
def test_a_run_ends_with_a_sentence_if_a_process_is_killed(tmp_path, killed):
    out = tmp_path / "out"
    run = processes.start(out, *SMALL, "--steps=10000", "--workers=2", "--save-every=0")
    wait_for(run, lambda: n_lines(out) > 2)
    workers = processes.workers_of(run.pid)
    server = [pid for pid in processes.children_of(run.pid) if processes.children_of(pid)]
    os.kill(workers[0] if killed == "a process" else server[0], signal.SIGKILL)
    assert "use fewer --workers" in stderr_of(run, 1)
    assert processes.all_end(workers)
