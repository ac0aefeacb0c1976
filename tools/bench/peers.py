"""The other side of a comparison: transformers' Molmo2 with our random weights, and our examples as its inputs."""

import statistics
import tempfile
import time
from dataclasses import replace

import numpy as np
import torch

import data
import model as models
from training.export import export
from vision import VisionConfig

# the shape that the training step of the peers was measured with: a decoder of 8 x 512 and a ViT of 6 x 384 on crops of 378 pixels
SMALL = models.ModelConfig(n_layer=8, n_embd=512, n_head=8, n_kv_head=2, head_dim=64, n_hidden=1536, n_vocab=32000,
                      vision=VisionConfig(n_layer=6, n_embd=384, n_head=6, n_hidden=1536, feature_layers=(5, 2)))


class Numbers:
    """Text made of ids: the cost does not depend on which."""
    chat_start, chat_end, eos, bos = 1, 2, 2, 2

    def __init__(self, n_vocab):
        self.special = data.ByteTokenizer(n_vocab=n_vocab).special

    def encode(self, text):
        return [3 + ord(c) for c in text]


def inputs_of(prompt, vision, device, dtype=torch.float32):
    """One data.Example as the keyword arguments of transformers' Molmo2; vision: the VisionConfig."""
    out = {"input_ids": torch.from_numpy(prompt.tokens)[None], "attention_mask": torch.ones(1, len(prompt.tokens), dtype=torch.long),
           "mm_token_type_ids": torch.from_numpy((prompt.bidir > 0).astype(np.int64))[None]}
    if prompt.images is not None:
        pixels, windows = (torch.from_numpy(prompt.images) / 127.5 - 1).to(dtype), torch.from_numpy(prompt.pool_src)
        side = -(-vision.grid // 3)
        if windows.shape[1] == 9:
            grids = torch.tensor([[len(pixels), side, side]])
            out |= {"pixel_values_videos": pixels, "video_token_pooling": windows, "video_grids": grids}
        else:                            # only the number of windows matters to it: one grid that holds them all
            grids = torch.tensor([[1, len(windows), 0, 0]])
            out |= {"pixel_values": pixels, "image_token_pooling": windows, "image_grids": grids}
    return {name: value.to(device) for name, value in out.items()}


def peer():
    """transformers, with or without torchvision; beside one that was built for another torch, whose compiled operators do not load,
    it would refuse: they are declared here, and nobody calls them. ValueError names the package if it is missing."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass                             # only its processors need torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            _OPERATORS.append(torch.library.Library("torchvision", "FRAGMENT"))
            _OPERATORS[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import transformers
    except ImportError:
        raise ValueError("the other side of the comparison needs an extra package: pip install transformers") from None
    return transformers


_OPERATORS = []                          # they last as long as these


def random_model(config, device, dtype):
    torch.manual_seed(0)
    return models.Molmo2(replace(config, init_std=0.02)).init_weights().to(device=device, dtype=dtype).eval()


def peers(config, device, dtype):
    """-> ours and transformers' model with the same random weights."""
    transformers = peer()
    transformers.utils.logging.disable_progress_bar()
    ours = random_model(config, device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        export(ours, data.ByteTokenizer(n_vocab=config.n_vocab), data.DataConfig(), folder)
        theirs = transformers.Molmo2ForConditionalGeneration.from_pretrained(folder, dtype=dtype).to(device).eval()
    return ours, theirs


def clock(device):
    """Seconds, once the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def spread(ratios):
    """-> what the JSON says of a ratio that was measured once a round."""
    ratios = list(ratios)
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def reach(device):
    """ValueError in one sentence if there is no such device."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {device}: {str(e).splitlines()[0].split('. ')[0]}") from None
