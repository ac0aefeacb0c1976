"""Two agents of torchrun on this machine act as two nodes. One of them is killed with its process
and replaced, and the run continues. This happens three times, the limit in stages/cluster.sh."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.training.processes import ROOT, free_port, n_lines, pids_of_ranks, wait_for
from tests.training.runs import SMALL, logged
from training import checkpoint

pytestmark = pytest.mark.slow
# Steps take about 0.1 s. So the run does not end before a node is killed, even on a busy machine.
RUN = [*SMALL, "--deterministic", "--eval_images=1", "--steps", "160", "--save-every", "4"]


def start_node(out, port):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "NODES": "2", "GPUS": "1", "HEAD": f"localhost:{port}",
           "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "stages" / "cluster.sh"), *RUN, "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def lose(node):
    """Kills an agent and its rank, so that they cannot notify the other agent -> its output."""
    workers = pids_of_ranks(node).values()
    for pid in (node.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    return node.communicate(timeout=60)[0]


def output_of(node):
    """Waits for the end of an agent -> its output. If it does not end, it is killed."""
    with suppress(subprocess.TimeoutExpired):
        return node.communicate(timeout=280)[0]
    return lose(node)


def test_three_replaced_nodes_join_and_the_run_logs_what_it_would_have_logged(tmp_path):
    """The first agent runs the rendezvous. The second is killed after 7, 17 and 27 steps, and each
    time a new one is started."""
    plain = tmp_path / "plain"
    broken = tmp_path / "broken"
    port = free_port()
    nodes = [start_node(plain, port), start_node(plain, port)]
    for node in nodes:
        text = output_of(node)
        assert node.returncode == 0, text

    port = free_port()
    first = start_node(broken, port)
    wait_for(first, lambda: is_listening(port))  # it runs the rendezvous
    nodes = [first, start_node(broken, port)]
    try:
        for n_logged in (7, 17, 27):
            wait_for(first, lambda n=n_logged: len(checkpoint.list_steps(broken)) > 0
                     and n_lines(broken) >= n)
            lose(nodes[-1])
            nodes.append(start_node(broken, port))
        texts = [output_of(node) for node in (first, nodes[-1])]
    finally:
        for node in nodes:
            node.kill()
    assert (first.returncode, nodes[-1].returncode) == (0, 0), "\n".join(texts)
    assert logged(broken) == logged(plain)


def is_listening(port):
    with socket.socket() as s:
        return s.connect_ex(("localhost", port)) == 0

