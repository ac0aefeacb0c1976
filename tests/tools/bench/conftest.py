"""What several tests of the benchmarks share."""

import subprocess

import imageio_ffmpeg
import pytest

import model as models
from tools.bench import load, peers
from vision import VisionConfig

TINY = models.ModelConfig(
    n_layer=2,
    n_embd=32,
    n_head=4,
    n_kv_head=2,
    head_dim=8,
    n_hidden=48,
    n_vocab=400,
    vision=VisionConfig(
        n_layer=2,
        n_embd=32,
        n_head=2,
        n_hidden=64,
        feature_layers=(1, 0),
        grid=7,
        patch=4,
        overlap_margin=1,
    ),
)


@pytest.fixture
def tiny(monkeypatch):
    """A model config that stands in for the preset "small"."""
    monkeypatch.setattr(peers, "SMALL", TINY)
    return TINY


@pytest.fixture
def with_transformers():
    """Skips where the other side of the comparison is not installed."""
    for name in ("transformers", "safetensors"):
        pytest.importorskip(name)


@pytest.fixture(scope="session")
def video(tmp_path_factory):
    """A video of 2 s whose first frame appears at 0.7 s of the file."""
    folder = tmp_path_factory.mktemp("video")
    load.make_video(folder / "a.mp4", 2, "96x64")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-itsoffset", "0.7"]
    command += ["-i", str(folder / "a.mp4"), "-c", "copy", str(folder / "b.mkv")]
    subprocess.run(command, check=True)
    return folder / "b.mkv"
