"""--tensorboard: the numbers of log.jsonl, which stays the truth, and pictures of samples."""

from pathlib import Path

import numpy as np
from PIL import Image

MAX_PICTURES = 20


def numbers(fields, prefix=""):
    """Nested fields of a log line -> {"eval/point_f1": 0.5, ..}, without texts and nulls."""
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[prefix + name] = value
    return found


class Board:
    """Writes to out/tensorboard; of a resumed run, steps after resume_step are dropped."""

    def __init__(self, out, resume_step=None):
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self.samples = Path(out) / "samples"
        self.writer = SummaryWriter(out / "tensorboard", purge_step=purge, flush_secs=10)

    def line(self, line):
        for name, value in numbers(line).items():
            self.writer.add_scalar(name, value, line["step"])

    def pictures(self, step):
        for path in sorted(self.samples.rglob("*.png"))[:MAX_PICTURES]:
            pixels = np.asarray(Image.open(path).convert("RGB"))
            self.writer.add_image(path.stem, pixels, step, dataformats="HWC")
        self.writer.flush()
