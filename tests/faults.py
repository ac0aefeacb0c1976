"""Forty faults of one line each, which the fast tests must notice.

    python -m tests.faults [FOLDER]      # plants one at a time in a copy of the repository; minutes

Prints whether a test failed, fault by fault; exit status 1 if one went unnoticed. Run it by hand
after tests were changed or removed: a suite that notices fewer faults has lost something.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Fault(NamedTuple):
    file: str
    old: str
    new: str
    tests: str                       # the test files that should notice, separated by blanks


FAULTS = [
    # the seven modules
    Fault("attention.py", "causal = (k <= q) & (q < visible_until_k)",
          "causal = (k <= q) & (q <= visible_until_k)", "tests/test_attention.py"),
    Fault("attention.py", "both_ways = (bidir_q == bidir_k) & (bidir_k != 0)",
          "both_ways = (bidir_q == bidir_k)", "tests/test_attention.py"),
    Fault("attention.py", "whole = (q0 >= k1 - 1) &", "whole = (q0 >= k0) &",
          "tests/test_attention.py"),
    Fault("model.py", "b * cos + a * sin]", "b * cos - a * sin]", "tests/test_model.py"),
    Fault("model.py", "(tokens - V).clamp(min=0)", "(tokens - V).clamp(min=1)",
          "tests/test_model.py"),
    Fault("model.py", "high = min(math.ceil(", "high = min(math.floor(", "tests/test_model.py"),
    Fault("model.py", "torch.where(has_loss, max(residual, response), residual)",
          "torch.where(has_loss, residual, max(residual, response))",
          "tests/test_model.py tests/evaluation/test_generate.py"),
    Fault("vision.py", "x[:, 0].round().clamp(0, 255)", "x[:, 0].floor().clamp(0, 255)",
          "tests/test_vision.py"),
    Fault("vision.py", "window.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)",
          "window.mean(1)", "tests/test_vision.py tests/test_model.py"),
    Fault("vision.py", "if (max_frames - 1) / fps < duration:", "if max_frames / fps < duration:",
          "tests/test_vision.py"),
    Fault("packing.py", "until[span] = start + x.visible_until", "until[span] = stop",
          "tests/test_packing.py"),
    Fault("packing.py", "bidir[span] = e * x.bidir", "bidir[span] = x.bidir",
          "tests/test_packing.py"),
    Fault("packing.py", "self.pool_dst.append(x.pool_dst + first_token)",
          "self.pool_dst.append(x.pool_dst)", "tests/test_packing.py"),
    Fault("packing.py", "if self.n_packs - oldest.arrived >= MAX_WAIT", "if False",
          "tests/test_packing.py"),
    Fault("data.py", "pos += range(len(trunk), len(trunk) + len(ids) - 1)",
          "pos += range(len(tokens) - len(ids) + 1, len(tokens))", "tests/test_data.py"),
    Fault("data.py", "factors[:-1] if n_plain > 1 or branch.pair else factors", "factors",
          "tests/test_data.py"),
    Fault("data.py", "weight *= 2 / max(n_loss, 1) ** 0.5", "weight *= 4 / max(n_loss, 1) ** 0.5",
          "tests/test_data.py"),
    Fault("parallel.py", "needed_by = np.where(empty, -1, position // t)",
          "needed_by = np.where(empty, -1, position // T)", "tests/test_parallel.py"),
    Fault("train.py", "norms[part] = math.sqrt(square / copies) / weight",
          "norms[part] = math.sqrt(square / copies)", "tests/test_train.py"),
    Fault("train.py", "config.z_loss * lse**2", "config.z_loss * lse", "tests/test_train.py"),
    # behind them
    Fault("text/points.py", "ids.setdefault(name, len(ids) + 1)", "ids.setdefault(name, len(ids))",
          "tests/text/test_points.py"),
    Fault("records/parse.py", '"percent": (100, 100)', '"percent": (1000, 1000)',
          "tests/text/test_point_prompts.py tests/text/test_prompts.py"),
    Fault("text/tracks.py", "half_interval(annotation) + ROUNDING", "ROUNDING",
          "tests/text/test_tracks.py"),
    Fault("text/tracks.py", 'point["t"] > query["t"]', 'point["t"] >= query["t"]',
          "tests/text/test_tracks.py tests/text/test_prompts.py"),
    Fault("records/video.py", "np.searchsorted(frame_times, times + 1e-9,",
          "np.searchsorted(frame_times, times,", "tests/records/test_video.py"),
    Fault("records/video.py", "return height, width", "return width, height",
          "tests/records/test_video.py"),
    Fault("records/visual.py", "np.where(source < 0, -1, source + start)",
          "np.where(source < 0, -1, source)", "tests/records/test_visual.py tests/test_encode.py"),
    Fault("records/visual.py", "if lowest > 10:", "if lowest > 100:",
          "tests/records/test_visual.py"),
    Fault("records/mixture.py", "rate / total * weight / sum(weights)", "rate / total * weight",
          "tests/records/test_mixture.py tests/training/test_sources.py"),
    Fault("records/mixture.py", "math.floor((n + 1) * share)", "math.ceil((n + 1) * share)",
          "tests/records/test_mixture.py"),
    Fault("training/planner.py", "(bad >= MANY and bad > self.max_skip * tried)", "bad >= MANY",
          "tests/training/test_planner.py"),
    Fault("training/config.py", "betas: tuple = (0.9, 0.95)", "betas: tuple = (0.9, 0.999)",
          "tests/training/test_config.py"),
    Fault("weights/released.py", '["mlp.up", "mlp.gate"]', '["mlp.gate", "mlp.up"]',
          "tests/weights/test_released.py"),
    Fault("weights/lora.py", "tensor.float() + scale * product", "tensor.float() + product",
          "tests/weights/test_lora.py"),
    Fault("evaluation/metrics.py", "distance <= 0.05 * math.hypot", "distance <= 0.5 * math.hypot",
          "tests/evaluation/test_metrics.py tests/evaluation/test_scoring.py"),
    Fault("evaluation/metrics.py", "for i, point in enumerate(predicted) if point[0] == image]",
          "for i, _ in enumerate(predicted)]", "tests/evaluation/test_metrics.py"),
    Fault("evaluation/generate.py", "torch.where(is_padding, T, n_slots)",
          "torch.where(is_padding, n_slots, n_slots)", "tests/evaluation/test_generate.py"),
    Fault("evaluation/text_metrics.py", "min(agreed / min(3, len(answers)), 1.0)",
          "agreed / len(answers)", "tests/evaluation/test_text_metrics.py"),
    Fault("toy/motion.py", "2 * masks[k].sum() < mask.sum()", "masks[k].sum() < 0",
          "tests/toy/test_videos.py tests/toy/test_world.py"),
    Fault("toy/images.py", 'is_held_out(scene) == (self.split != "train")', "True",
          "tests/toy/test_world.py"),
]


def is_noticed(fault, repository):
    """Plants a fault in a copy of the repository, runs its tests, and takes it out again."""
    path = repository / fault.file
    text = path.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} does not hold {fault.old!r} exactly once"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *fault.tests.split()]
    done = subprocess.run(command, cwd=repository, capture_output=True)
    path.write_text(text, encoding="utf-8")
    return done.returncode == 1      # other numbers: no test ran


def main():
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", "runs", "__pycache__")
        shutil.copytree(ROOT, repository, ignore=ignored)
        for fault in FAULTS:
            noticed = is_noticed(fault, repository)
            unnoticed += not noticed
            verdict = "noticed" if noticed else "NOT NOTICED"
            print(f"{verdict}: {fault.file}: {fault.new}", flush=True)
    print(f"{len(FAULTS) - unnoticed} of {len(FAULTS)} faults are noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
