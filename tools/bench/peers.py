"""transformers' Molmo2, the reference of tools.bench: its model with our random weights, and our
examples as its inputs."""

import tempfile
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import data
import model as models
from text.tokenizer import ByteTokenizer
from vision import VisionConfig
from weights.export import export

# A model that a CPU can train: a decoder of 8 x 512 and a ViT of 6 x 384 on crops of 378 pixels.
SMALL = models.ModelConfig(
    n_layer=8,
    n_embd=512,
    n_head=8,
    n_kv_head=2,
    head_dim=64,
    n_hidden=1536,
    n_vocab=32000,
    vision=VisionConfig(n_layer=6, n_embd=384, n_head=6, n_hidden=1536, feature_layers=(5, 2)),
)
TEXT_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "labels")
PRESETS = {"small": SMALL, **models.PRESETS}


class IdTokenizer:
    """Encodes text as one id per character, for a vocabulary of any size: the cost of a step does
    not depend on which ids it reads."""

    chat_start = 1
    chat_end = 2
    bos = 2
    eos = 2

    def __init__(self, n_vocab):
        self.special = ByteTokenizer(n_vocab=n_vocab).special

    def encode(self, text):
        return [3 + ord(c) for c in text]


def import_transformers():
    """The package transformers; ValueError with the pip command if it is missing.

    A torchvision built for another torch does not load its compiled operators, and transformers
    then refuses to start. Molmo2's model calls none of them, so declaring two of them is enough.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in ("nms", "qnms"):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED_OPERATORS.append(library)
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "The comparison needs an optional package: pip install -r requirements-extras.txt"
        ) from None
    return transformers


_DECLARED_OPERATORS = []  # an operator exists as long as its Library object


def random_model(config, device, dtype):
    """Our model with random weights that depend on the config alone, in eval mode."""
    torch.manual_seed(0)
    model = models.Molmo2(replace(config, init_std=0.02)).init_weights()
    return model.to(device=device, dtype=dtype).eval()


def model_pair(config, device, dtype):
    """-> (our model, transformers' model) with the same random weights, in eval mode."""
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    ours = random_model(config, device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        export(ours, ByteTokenizer(n_vocab=config.n_vocab), data.DataConfig(), folder)
        model_class = transformers.Molmo2ForConditionalGeneration
        reference = model_class.from_pretrained(folder, dtype=dtype).to(device).eval()
    return ours, reference


def model_inputs(example, vision_config, device, dtype=torch.float32):
    """One data.Example -> keyword arguments of transformers' Molmo2, a batch of one."""
    n_tokens = len(example.tokens)
    is_visual = (example.bidir > 0).astype(np.int64)
    inputs = {
        "input_ids": torch.from_numpy(example.tokens)[None],
        "attention_mask": torch.ones(1, n_tokens, dtype=torch.long),
        "mm_token_type_ids": torch.from_numpy(is_visual)[None],
    }
    if example.images is not None:
        pixels = (torch.from_numpy(example.images) / 127.5 - 1).to(dtype)
        pooling = torch.from_numpy(example.pool_src)
        if pooling.shape[1] == 9:  # windows of 3 x 3 patches: frames of a video
            side = -(-vision_config.grid // 3)
            inputs["pixel_values_videos"] = pixels
            inputs["video_token_pooling"] = pooling
            inputs["video_grids"] = torch.tensor([[len(pixels), side, side]])
        else:  # only the number of windows matters to the model: one grid that holds all of them
            inputs["pixel_values"] = pixels
            inputs["image_token_pooling"] = pooling
            inputs["image_grids"] = torch.tensor([[1, len(pooling), 0, 0]])
    return {name: value.to(device) for name, value in inputs.items()}


def padded_batch(examples, config, device):
    """Examples as transformers' processor batches them: text padded on the right to the longest
    example, the crops of all examples one after the other, labels -100 where there is no loss."""
    columns = defaultdict(list)
    first_patch = 0
    for example in examples:
        inputs = model_inputs(example, config.vision, device)
        # transformers shifts the labels itself; the first token has no label
        labels = np.where(example.weights[:-1] > 0, example.targets[:-1], -100)
        inputs["labels"] = torch.from_numpy(np.append(-100, labels))[None].to(device)
        for name, value in inputs.items():
            if name.endswith("pooling"):
                value = torch.where(value >= 0, value + first_patch, -1)
            columns[name].append(value)
        if example.images is not None:
            first_patch += len(example.images) * config.vision.n_patch

    batch = {}
    for name, values in columns.items():
        if name in TEXT_INPUTS:
            padding = -100 if name == "labels" else 0
            rows = [value[0] for value in values]
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=padding)
        else:
            batch[name] = torch.cat(values)
    return batch
