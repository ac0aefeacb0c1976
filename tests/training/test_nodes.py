"""Two nodes, as two agents of torchrun on this machine: one is lost with its process, another takes
its place, and the run continues."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.processes import ROOT, n_lines, pids_of_ranks, wait_for
from tests.training.runs import SMALL, logged
from training import checkpoint

pytestmark = pytest.mark.slow
RUN = [*SMALL, "--deterministic", "--eval_images=1", "--steps", "40", "--save-every", "4"]


def start_node(out, port):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "NODES": "2", "GPUS": "1", "HEAD": f"localhost:{port}",
           "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "stages" / "cluster.sh"), *RUN, "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_a_replaced_node_joins_and_the_run_logs_what_it_would_have_logged(tmp_path):
    """The first agent keeps the rendezvous; the second is killed with its process, without a word
    to the first, and a new one is started."""
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    port = free_port()
    nodes = [start_node(plain, port), start_node(plain, port)]
    for node in nodes:
        text, _ = node.communicate(timeout=280)
        assert node.returncode == 0, text

    port = free_port()
    first = start_node(broken, port)
    wait_for(first, lambda: is_listening(port))          # it keeps the rendezvous
    second = start_node(broken, port)
    nodes = [first, second]
    try:
        wait_for(first, lambda: len(checkpoint.complete_steps(broken)) > 0
                 and n_lines(broken) > 6)
        workers = pids_of_ranks(second).values()
        os.kill(second.pid, signal.SIGKILL)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        second.communicate(timeout=60)
        third = start_node(broken, port)
        nodes.append(third)
        texts = [node.communicate(timeout=280)[0] for node in (first, third)]
    finally:
        for node in nodes:
            node.kill()
    assert (first.returncode, third.returncode) == (0, 0), "\n".join(texts)
    assert logged(broken) == logged(plain)


def is_listening(port):
    with socket.socket() as s:
        return s.connect_ex(("localhost", port)) == 0

