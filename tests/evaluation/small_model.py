"""A small random model with a byte tokenizer, and the media that it is asked about in tests."""

import dataclasses
import json
from pathlib import Path

import torch

import data
import model
from text.tokenizer import ByteTokenizer
from toy import world
from weights import files

MEDIA = Path(__file__).parents[1] / "media"
VISION = dataclasses.replace(model.TOY_VISION, n_layer=2, feature_layers=(1, 0))
CONFIG = dataclasses.replace(model.PRESETS["toy"], n_layer=2, vision=VISION)
DATA = data.DataConfig(max_tokens=512, max_crops=1, length_hint=0, max_frames=6)
TOKENIZER = ByteTokenizer(world.WORDS)


def random_model(config=CONFIG):
    torch.manual_seed(0)
    return model.Molmo2(config).init_weights().eval()


def save_run(folder):
    """The model/ of a finished run."""
    files.save(random_model(), folder)
    TOKENIZER.save(folder)
    settings = {"max_tokens": 512, "max_crops": 1, "length_hint": 0}
    (folder / "data.json").write_text(json.dumps(settings))
    return folder
