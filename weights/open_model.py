"""A trained or released model with everything that is needed to ask it questions."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from data import DataConfig
from stages import stage3
from text.tokenizer import load_tokenizer
from weights import files

# a released checkpoint has no data.json: it is asked and fine-tuned with the settings of stage 3
RELEASED_SETTINGS = {
    name.removeprefix("data."): value
    for name, value in stage3.RECIPE.items()
    if name.startswith("data.")
}


def open_model_folder(folder, device="cpu", dtype=torch.float32, read=True):
    """A run directory, its model/, or a released folder -> model, tokenizer, DataConfig of
    training.

    OSError or ValueError, in one sentence, if one of them cannot be read. dtype None: as stored.
    read False: weights are checked, and the model is on the meta device (files.read_weights).
    """
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ValueError(f"--device {device}: {str(e).splitlines()[0]}") from None
    model = files.load(folder, dtype, device if read else "meta")
    folder = Path(folder)
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    tokenizer = load_tokenizer(folder, model.config.n_vocab)
    settings = read_settings(folder / "data.json")
    return model, tokenizer, replace(settings, vision=model.config.vision)


def read_settings(path):
    """data.json of a run -> DataConfig; the released settings if there is none. ValueError
    otherwise."""
    try:
        fields = json.loads(path.read_text()) if path.is_file() else RELEASED_SETTINGS
        for name, value in fields.items():
            if type(value) is not type(getattr(DataConfig(), name)):
                raise ValueError(f"{name} = {value!r}")
        return DataConfig(**fields)
    except (TypeError, ValueError, AttributeError) as e:
        raise ValueError(f"{path}: {e}") from None
