"""A seeded sample of tests/fuzz.py, and that it would find what it looks for."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

if os.name != "posix":
    pytest.skip("alarms and limits", allow_module_level=True)

import vision
from evaluation import scoring
from records import media
from tests import fuzz, fuzz_inputs
from training import config, limits

ROOT = Path(__file__).parent.parent


def run_sample(**counts):
    """The last line of the command for so many cases; every one is counted, none is a find."""
    flags = [word for kind, n in counts.items() for word in (f"--{kind}", str(n))]
    command = [sys.executable, "-m", "tests.fuzz", *flags, "--seed", "7"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-4000:]
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["finds"] == 0
    for kind in fuzz.KINDS:
        assert sum(result[kind].values()) == counts[f"{kind}s"]
        assert result[kind]["sound"] > 0
        assert len(result[kind]) > 1
    # A process that is started inherits the peak of the one that starts it, the whole test run.
    memory = result["MiB"]
    peak = max(memory["at most"], memory["children at most"])
    assert peak < max(1024, memory["at first"] + 300)
    assert result["slowest"][0] < fuzz.SECONDS
    return result


def test_a_sample_of_rubbish_ends_in_declared_errors():
    assert len(run_sample(records=300, images=150, videos=10)["record"]) > 15


def test_flags_answers_and_turned_images_do_what_they_should():
    result, finds = fuzz.run({"flag": 400, "answer": 1000, "orientation": 60}, seed=7)
    assert not finds, finds[0][2]
    assert set(result["flag"]) == {"sound", "refused"}
    assert set(result["answer"]) == {"sound", "no points"}
    assert len(result["orientation"]) == 6


def an_id_counts_once_in_a_text(text, width, height):
    """As parse_points was in an earlier version."""
    points = {}
    for point in points_of_tags(text, width, height):
        points.setdefault((point.frame, point.id), point)
    return list(points.values())


def bounds_of_shapes_only(name, values):
    return limits.broken_rule(name, values) if name.startswith("model.") else ""


points_of_tags = fuzz_inputs.parse_points
EARLIER = [
    # kind, what was otherwise in the commit that was attacked, in which module
    ("answer", fuzz_inputs, "parse_points", an_id_counts_once_in_a_text),
    ("answer", scoring, "MAX_FRAME", math.inf),
    ("orientation", vision.ImageOps, "exif_transpose", lambda image: image),
    ("flag", config, "broken_rule", bounds_of_shapes_only),
]


@pytest.mark.parametrize(("kind", "module", "name", "earlier"), EARLIER, ids=lambda x: str(x)[:20])
def test_what_an_attack_found_would_be_found(kind, module, name, earlier, monkeypatch):
    monkeypatch.setattr(module, name, earlier)
    assert fuzz.run({kind: 400}, seed=7)[1]


@pytest.mark.slow
def test_a_larger_sample_of_rubbish_ends_in_declared_errors():
    assert len(run_sample(records=2500, images=500, videos=60)["record"]) > 25


def test_a_case_alone_is_the_case_among_others(tmp_path):
    made = {}
    for name, numbers in (("all", range(6)), ("last", [5])):
        (tmp_path / name).mkdir()
        stage = fuzz.Stage(tmp_path / name, fuzz.KINDS)
        for kind in fuzz.KINDS:
            for number in numbers:
                path = stage.write(3, kind, number) or stage.file
                made[name, kind, number] = path.read_bytes()
    for kind in fuzz.KINDS:
        assert made["all", kind, 5] == made["last", kind, 5]
    assert len(set(made.values())) > 12


def test_a_bug_would_be_found(monkeypatch):
    header = media.header

    def buggy(path):
        if "case2" in Path(path).name:
            raise KeyError("x")
        if "case4" in Path(path).name:
            time.sleep(9)
        return header(path)

    monkeypatch.setattr(media, "header", buggy)
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    result, finds = fuzz.run({"image": 5}, seed=19)
    errors = {number: text.splitlines()[-1].split(":")[0] for _, number, text in finds}
    assert errors[2] == "KeyError"
    assert errors[4] == "tests.fuzz.Late"
    assert result["finds"] == len(finds) >= 2
    assert result["image"]["find"] == len(finds)
