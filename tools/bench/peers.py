"""The Molmo2 of transformers, the reference of tools.bench. It gets our random weights, and our
examples as inputs."""

import tempfile
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import data
import model as models
from records.errors import import_extra
from text.tokenizer import ByteTokenizer
from vision import VisionConfig
from weights.export import export

# A model that a CPU can train: a decoder of 8 x 512 and a ViT of 6 x 384 on crops of 378 pixels.
SMALL = models.ModelConfig(
    n_layer=8, n_embd=512, n_head=8, n_kv_head=2, head_dim=64, n_hidden=1536, n_vocab=32000,
    vision=VisionConfig(n_layer=6, n_embd=384, n_head=6, n_hidden=1536, feature_layers=(5, 2)))
PRESETS = {"small": SMALL, **models.PRESETS}


def import_transformers():
    """-> the package transformers. ValueError with the pip command if it is missing.

    A torchvision that was built for another torch cannot load its compiled operators, and then
    the import of transformers fails. Molmo2 calls none of these operators, so it is enough to
    declare two of them.
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
    return import_extra("transformers", "requirements-dev.txt")


_DECLARED_OPERATORS = []  # an operator exists as long as its Library object


def random_model(config, device, dtype):
    """-> our model in eval mode, with random weights that depend only on the config."""
    torch.manual_seed(0)
    with torch.device(device):  # a GPU draws billions of random numbers in a second
        model = models.Molmo2(replace(config, init_std=0.02)).init_weights()
    return model.to(dtype).eval()


def model_pair(config, device, dtype):
    """-> (our model, the model of transformers), both in eval mode with the same random weights."""
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    ours = random_model(config, device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        export(ours, ByteTokenizer(n_vocab=config.n_vocab), data.DataConfig(), folder)
        model_class = transformers.Molmo2ForConditionalGeneration
        reference = model_class.from_pretrained(folder, dtype=dtype).to(device).eval()
    return ours, reference


def reference_inputs(examples, config, device, dtype=torch.float32):
    """A list of data.Example -> keyword arguments for the Molmo2 of transformers, in the format of
    its processor. Text is padded on the right to the longest example. The crops of all examples are
    concatenated. A token without loss has the label -100."""
    texts = defaultdict(list)
    media = defaultdict(list)
    n_crops = 0
    for example in examples:
        # transformers shifts the labels itself; the first token has no label
        labels = np.where(example.weights[:-1] > 0, example.targets[:-1], -100)
        texts["labels"].append(np.append(-100, labels))
        texts["input_ids"].append(example.tokens)
        texts["attention_mask"].append(np.ones_like(example.tokens))
        texts["mm_token_type_ids"].append((example.bidir > 0).astype(np.int64))
        if example.images is None:
            continue
        windows = torch.from_numpy(example.pool_src)
        pooling = torch.where(windows >= 0, windows + n_crops * config.vision.n_patch, -1)
        pixels = (torch.from_numpy(example.images) / 127.5 - 1).to(dtype)
        n_crops += len(pixels)
        is_video = windows.shape[1] == 9  # windows of 3 x 3 patches
        kind = "video" if is_video else "image"
        side = -(-config.vision.grid // 3)
        # for an image only the number of windows matters, so one grid contains all of them
        grid = [len(pixels), side, side] if is_video else [1, len(windows), 0, 0]
        media["pixel_values_videos" if is_video else "pixel_values"].append(pixels)
        media[f"{kind}_token_pooling"].append(pooling)
        media[f"{kind}_grids"].append(torch.tensor([grid]))
    batch = {name: torch.cat(parts) for name, parts in media.items()}
    for name, rows in texts.items():
        padding = -100 if name == "labels" else 0
        rows = [torch.from_numpy(row) for row in rows]
        batch[name] = pad_sequence(rows, batch_first=True, padding_value=padding)
    return {name: value.to(device) for name, value in batch.items()}
