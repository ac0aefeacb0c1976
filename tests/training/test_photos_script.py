"""stages/photos.sh as a whole, with drawn cut-outs and a language model of random weights."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.training.hf_models import ROOT
from tests.training.runs import logged
from tests.training.test_base import save_language_model

FOLDERS = ("animals/birds", "food/fruit", "hobbies/music")     # the last is held out


@pytest.fixture
def folders(tmp_path, base_tokenizer):
    """Five cut-outs of each folder, five photographs, a language model."""
    for shade, kind in enumerate(FOLDERS):
        folder = tmp_path / "stamps" / kind
        folder.mkdir(parents=True)
        for n in range(5):
            image = Image.new("RGBA", (60, 40 + 5 * n))
            ImageDraw.Draw(image).ellipse((3, 3, 55, 35), fill=(90 * shade, 50 * n, 200))
            image.save(folder / f"{n}.png")
            (folder / f"{n}.txt").write_text(f"Number {n}.\n")
    (tmp_path / "photographs").mkdir()
    rng = np.random.default_rng(0)
    for n in range(5):
        pixels = rng.integers(0, 255, (90, 120, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photographs" / f"{n}.png")
    save_language_model("llama tied", tmp_path / "llm")
    shutil.copytree(base_tokenizer, tmp_path / "llm", dirs_exist_ok=True)
    return tmp_path


def start(folder, *flags):
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
           "STAMPS": str(folder / "stamps"), "BACKGROUNDS": str(folder / "photographs"),
           "LLM": str(folder / "llm"), "OUT": str(folder / "out"), "OMP_NUM_THREADS": "1",
           "SCENES": "8", "HELD_OUT": "2", "TOWER_STEPS": "2", "CONNECTOR_STEPS": "2"}
    return subprocess.run(["bash", str(ROOT / "stages" / "photos.sh"), *flags], env=env,
                          capture_output=True, text=True)


@pytest.mark.slow
def test_the_script_makes_everything_once_and_goes_on_where_it_was(folders):
    out = folders / "out"
    failed = start(folders, "--steps", "none")
    assert failed.returncode == 2, failed.stderr
    made = {path: path.stat().st_mtime_ns for part in ("tower", "base", "start", "data")
            for path in (out / part).rglob("*")}
    assert not (out / "model").exists()

    done = start(folders, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert all(path.stat().st_mtime_ns == time for path, time in made.items())
    assert sorted(logged(out / "model")) == [1, 2]
    assert "| | known | stamps | backgrounds | kinds |" in done.stdout
    for part in ("known", "stamps", "backgrounds", "kinds"):
        assert (out / part / "scenes.png").is_file()
