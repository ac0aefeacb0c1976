"""A seeded sample of tests/fuzz.py, and that it would find what it looks for."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

if os.name != "posix":
    pytest.skip("alarms and limits", allow_module_level=True)

from records import media
from tests import fuzz

ROOT = Path(__file__).parent.parent


def sample(**counts):
    """The last line of the command for so many cases; every one is accounted for and none is a find."""
    flags = [word for kind, n in counts.items() for word in (f"--{kind}", str(n))]
    child = subprocess.run([sys.executable, "-m", "tests.fuzz", *flags, "--seed", "7"], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-4000:]
    result = json.loads(child.stdout.splitlines()[-1])
    assert {f"{kind}s": sum(result[kind].values()) for kind in ("record", "image", "video")} == counts and result["finds"] == 0
    assert all(result[kind]["sound"] > 0 and len(result[kind]) > 1 for kind in ("record", "image", "video"))
    # a process that is started inherits the peak of the one that starts it, the whole test run here
    assert max(result["MiB"]["at most"], result["MiB"]["children at most"]) < max(1024, result["MiB"]["at first"] + 300)
    assert result["slowest"][0] < fuzz.SECONDS
    return result


def test_a_sample_of_rubbish_ends_in_declared_errors():
    assert len(sample(records=300, images=150, videos=10)["record"]) > 15


@pytest.mark.slow
def test_a_larger_sample_of_rubbish_ends_in_declared_errors():
    assert len(sample(records=2500, images=500, videos=60)["record"]) > 25


def test_a_case_alone_is_the_case_among_others(tmp_path):
    made = []
    for name, numbers in (("a", range(6)), ("b", [5])):
        (tmp_path / name).mkdir()
        stage = fuzz.Stage(tmp_path / name, ["record", "image", "video"])
        made.append([path.read_bytes() if (path := stage.write(3, kind, n)) else stage.file.read_bytes()
                     for kind in ("record", "image", "video") for n in numbers])
    assert made[0][5::6] == made[1]
    assert len(set(made[0])) > 12


def test_a_bug_would_be_found(monkeypatch):
    header = media.header

    def buggy(path):
        if "case2" in Path(path).name:
            raise KeyError("x")
        if "case4" in Path(path).name:
            time.sleep(9)
        return header(path)

    monkeypatch.setattr(media, "header", buggy)
    monkeypatch.setattr(media, "read_image", lambda path: (buggy(path), media.vision.to_array(media.Image.open(path)))[1])
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    result, finds = fuzz.run({"image": 5}, seed=19)
    assert [(n, what.splitlines()[-1].split(":")[0]) for _, n, what in finds if n in (2, 4)] == [(2, "KeyError"), (4, "fuzz.Late")]
    assert result["finds"] == len(finds) >= 2 and result["image"]["find"] == len(finds)
