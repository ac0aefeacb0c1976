"""A small model and its largest possible batch, for tests of memory and compilation."""

from dataclasses import replace

import torch

import model as models
import packing
import vision
from training.config import Config
from training.setup import apply_recipe, largest_example

VISION = vision.VisionConfig(n_layer=2, n_embd=64, n_head=4, n_hidden=160, feature_layers=(1, 0),
                             grid=6, patch=4, overlap_margin=1)
SMALL = models.ModelConfig(n_layer=2, n_embd=96, n_head=4, n_kv_head=2, head_dim=24, n_hidden=256,
                           n_vocab=400, init_std=0.0, vision=VISION)


def config_of(model, max_tokens=96, **changes):
    """A Config with this ModelConfig and small rows. `changes` sets further fields."""
    small = {"micro_batch": 2, "pack_crops": 3, "crop_bucket": 1, "recompute": 0.0}
    config = replace(Config(), model=model, **{**small, **changes})
    return replace(config, data=replace(config.data, max_tokens=max_tokens))


def model_of(config):
    return apply_recipe(models.Molmo2(config.model).init_weights(), config).train()


def batch_of(config):
    """The largest micro-batch. Every row is one example with all crops, as many visual tokens as
    the crops can have, and loss at every token. Tokens and pixels are random."""
    example = largest_example(config)
    rows = [[example]] * config.micro_batch
    batch = packing.collate(rows, config.data.max_tokens, config.model.vision, config.crop_bucket)
    tokens = torch.randint(0, config.model.n_vocab, batch.tokens.shape)
    images = torch.randint(0, 256, batch.images.shape, dtype=torch.uint8)
    return replace(batch, tokens=tokens, targets=tokens.roll(-1, 1), images=images)
