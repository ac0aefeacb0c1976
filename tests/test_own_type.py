"""Applies the diff of CONTRIBUTING.md, which adds an annotation type."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_diff_of_the_page_makes_a_type_that_is_trained_and_scored(tmp_path):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
    for command in ("git init -q", "git apply -p0"):
        subprocess.run(command.split(), input=diff, text=True, cwd=tmp_path, check=True)
    record = {"image": "chelsea.png", "annotations": [{"type": "ocr", "text": "EXIT"}]}
    (tmp_path / "ocr.jsonl").write_text(json.dumps(record))
    command = ("train.py --stage 1 --tiny --init toy --data ocr.jsonl --eval ocr.jsonl "
               "--media tests/media --steps 1 --eval_images=0 --out runs/ocr")
    done = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "runs" / "ocr" / "result.json").read_text())["eval"]
    assert "anls" in scores
