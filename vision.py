"""Pixels to visual tokens (paper: architecture, image and video input; docs/molmo2.md 1 to 3).

in    an image (H,W,3) uint8, or the duration of a video
out   crops as patches (N,P,F) uint8; pool_src (M,K), the K patches that a visual token pools
then  Vision(images, pool_src) -> (M,C): ViT, two of its layers, attentional pooling, projector

An image becomes one low-resolution crop of everything and a mosaic of overlapping high-resolution
crops. The overlap gives a patch some context in its crop; each patch is then used from one crop:

    two 27-patch crops,    |aaaaaaaaaaaaaaaaaaa aaaa|bbbb
    19 patches apart                           aaaa|bbbb bbbbbbbbbbbbbbbbbbb|      4 + 4 shared
    grid of used patches   |aaaaaaaaaaaaaaaaaaaaaaa|bbbbbbbbbbbbbbbbbbbbbbb|   19*2 + 8 = 46 wide

Left out, since Molmo2 does not use them: class token, post-norm, other pooling and projector kinds.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class VisionConfig:
    n_layer: int = 25                  # blocks: SigLIP2 has 27, the last two are not needed
    n_embd: int = 1152                 # E, width
    n_head: int = 16                   # heads of the ViT and of the pooling, 72 wide each
    n_hidden: int = 4304               # inner size of the ViT's MLP
    feature_layers: tuple = (24, 18)   # blocks whose outputs are concatenated, in this order
    grid: int = 27                     # patches along one side of a crop
    patch: int = 14                    # pixels along one side of a patch
    overlap_margin: int = 4            # patches of overlap on each side of a high-resolution crop
    eps: float = 1e-6                  # epsilon of the LayerNorms
    neighbor_init: bool = False        # heads start by looking at neighbours (toy/vit.py)

    @property
    def crop(self):  # 378 pixels
        return self.grid * self.patch

    @property
    def stride(self):  # 266 pixels between high-resolution crops
        return (self.grid - 2 * self.overlap_margin) * self.patch

    @property
    def n_patch(self):  # P = 729
        return self.grid**2

    @property
    def n_pixel(self):  # F = 588
        return self.patch**2 * 3


RELEASED = VisionConfig()


# --------------------------------------------------------------------------------------------------
# image -> crops


@lru_cache(maxsize=65536)
def tiling(h, w, max_crops, config=RELEASED):
    """(rows, cols) of high-resolution crops for an image of h x w pixels (docs/molmo2.md 2.2).

    The smallest tiling that needs no shrinking; where all shrink, the one that shrinks least. In
    float32 as the official code, because rounding decides ties.
    """
    candidates = [(rows, n // rows) for n in range(1, max_crops + 1)
                  for rows in range(1, n + 1) if n % rows == 0]
    overlap = config.crop - config.stride
    size = np.array([max(h - overlap, 1), max(w - overlap, 1)], dtype=np.float32)
    scale = (np.array(candidates, dtype=np.float32) * config.stride / size).min(axis=1)
    if (scale < 1).all():
        return candidates[scale.argmax()]
    return candidates[np.where(scale < 1, np.inf, scale).argmin()]


def pooled_grids(h, w, max_crops, config=RELEASED):
    """(rows, cols) of tokens of the low-resolution crop, of the mosaic, and the number of crops."""
    rows, cols = tiling(h, w, max_crops, config)
    inner = config.grid - 2 * config.overlap_margin
    low = -(-config.grid // 2)
    high_rows, high_cols = (-(-(n * inner + 2 * config.overlap_margin) // 2) for n in (rows, cols))
    return (low, low), (high_rows, high_cols), 1 + rows * cols


def windows(grid, k):
    """Patch ids (h,w) -> (M,k*k): k x k windows in raster order, -1 where one leaves the grid."""
    h, w = grid.shape
    pad_h, pad_w = -h % k, -w % k
    padding = (pad_h // 2, pad_h - pad_h // 2), (pad_w // 2, pad_w - pad_w // 2)
    grid = np.pad(grid, padding, constant_values=-1)
    grid = grid.reshape(grid.shape[0] // k, k, grid.shape[1] // k, k)
    return grid.transpose(0, 2, 1, 3).reshape(-1, k * k)


def resize(image, h, w):
    """(H,W,3) uint8 -> (h,w,3) uint8, bilinear without antialiasing (docs/molmo2.md 2.1).

    Interpolates floats and rounds: on uint8 torch is off by one level in a fifth of the values.
    """
    if image.shape[:2] == (h, w):
        return image
    # channels as the batch: with three channels torch picks its kernel by the number of threads
    x = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[:, None].float()
    x = F.interpolate(x, (h, w), mode="bilinear", align_corners=False, antialias=False)
    return x[:, 0].round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


def patchify(crops, config=RELEASED):
    """(n,crop,crop,3) -> (n,P,F): patches in raster order, each as (row, column, channel)."""
    g, p = config.grid, config.patch
    patches = crops.reshape(-1, g, p, g, p, 3).transpose(0, 1, 3, 2, 4, 5)
    return patches.reshape(-1, g * g, p * p * 3)


def to_array(image):
    """PIL image -> (H,W,3) uint8, turned as its EXIF tag says; an array must be that already.

    16 bits a channel are scaled to 8. ValueError for signed and 32-bit pixels of unknown range.
    """
    if not isinstance(image, Image.Image):
        assert image.dtype == np.uint8 and image.shape[2:] == (3,), (image.dtype, image.shape)
        return image
    # 16 bits of a PNG or PGM may open as mode I
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError(f"{image.mode} pixels have no known range; save 8 or unsigned 16 bits")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        levels = np.array(image).clip(0, 65535) / 257
        image = Image.fromarray(levels.round().astype(np.uint8))
    return np.array(image.convert("RGB"))


def crops(image, max_crops=8, config=RELEASED):
    """One image -> crops (n,P,F) uint8, the low-resolution crop first, and pool_src (M,4) int64.

    Rows of pool_src: the low-resolution crop's tokens, then the mosaic's, in raster order; an entry
    is crop * P + patch, or -1 where a window hangs over the edge (docs/molmo2.md 2.2, 2.3).
    """
    image = to_array(image)
    rows, cols = tiling(*image.shape[:2], max_crops, config)
    overlap = 2 * config.overlap_margin * config.patch
    mosaic = resize(image, rows * config.stride + overlap, cols * config.stride + overlap)
    pixels = [resize(image, config.crop, config.crop)]
    for r, c in np.ndindex(rows, cols):
        y, x = r * config.stride, c * config.stride
        pixels.append(mosaic[y : y + config.crop, x : x + config.crop])
    return patchify(np.stack(pixels), config), image_windows(rows, cols, config)


@lru_cache(maxsize=1024)
def image_windows(rows, cols, config=RELEASED):
    """pool_src (M,4) of an image with rows x cols high-resolution crops, without its pixels.

    The array is cached: copy it before you write to it.
    """
    g, m = config.grid, config.overlap_margin
    inner = g - 2 * m
    patch_ids = np.arange(g * g).reshape(g, g)
    used = np.empty((rows * inner + 2 * m, cols * inner + 2 * m), dtype=np.int64)
    for n, (r, c) in enumerate(np.ndindex(rows, cols), 1):
        # a crop keeps its margin only on the outer edges of the mosaic
        top, left = m * (r > 0), m * (c > 0)
        bottom, right = g - m * (r < rows - 1), g - m * (c < cols - 1)
        place = np.s_[r * inner + top : r * inner + bottom, c * inner + left : c * inner + right]
        used[place] = (n * g * g + patch_ids)[top:bottom, left:right]
    return np.concatenate([windows(patch_ids, 2), windows(used, 2)])


def frame(image, config=RELEASED):
    """One video frame -> (1,P,F) uint8 and pool_src (M,9): one crop, 3x3 windows, 81 tokens."""
    pixels = resize(to_array(image), config.crop, config.crop)
    return patchify(pixels[None], config), frame_windows(config)


def frame_windows(config=RELEASED):
    return windows(np.arange(config.n_patch).reshape(config.grid, config.grid), 3)


def frame_times(duration, max_frames, fps=2, last=True):
    """Seconds at which a video is looked at: every 1/fps and the last; spread evenly if too many.

    last=False is the official mode "uniform", without the last instant; training does not use it.
    """
    if (max_frames - 1) / fps < duration:
        return np.linspace(0, duration, max_frames, endpoint=last).tolist()
    return np.arange(0, duration, 1 / fps).tolist() + [float(duration)] * last


def track_times(duration, max_frames, rates):
    """Seconds at which a video with tracks is looked at (docs/molmo2.md 3.1).

    Every 1/rate seconds, without the last instant: at the highest of the rising `rates` with which
    max_frames reach the end, or at the lowest if none does.
    """
    fps = rates[0]
    for rate in rates[1:]:
        if max_frames / rate < duration:
            break
        fps = rate
    times = np.arange(max_frames) / fps
    return times[times < duration].tolist()


# --------------------------------------------------------------------------------------------------
# crops -> features


class ViTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        E = config.n_embd
        self.n_head = config.n_head
        self.attn_norm = nn.LayerNorm(E, config.eps)
        self.q, self.k, self.v = (nn.Linear(E, E) for _ in range(3))
        self.out = nn.Linear(E, E)
        self.mlp_norm = nn.LayerNorm(E, config.eps)
        self.up = nn.Linear(E, config.n_hidden)
        self.down = nn.Linear(config.n_hidden, E)

    def forward(self, x):  # (N,P,E)
        N, P, E = x.shape
        h = self.attn_norm(x)
        q, k, v = (linear(h).view(N, P, self.n_head, -1).transpose(1, 2)
                   for linear in (self.q, self.k, self.v))  # (N,H,P,D)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(N, P, E))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class ViT(nn.Module):
    """(N,P,F) uint8 -> (N,P,2E): the outputs of two blocks side by side (docs/molmo2.md 1.3)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.patch = nn.Linear(config.n_pixel, config.n_embd)
        self.pos = nn.Parameter(torch.zeros(config.n_patch, config.n_embd))
        self.blocks = nn.ModuleList(ViTBlock(config) for _ in range(config.n_layer))

    def forward(self, images, checkpointing=False):
        x = images.to(self.patch.weight.dtype) / 127.5 - 1  # SigLIP's normalisation
        x = self.patch(x) + self.pos
        outputs = {}
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
            if i in self.config.feature_layers:
                outputs[i] = x
        return torch.cat([outputs[i] for i in self.config.feature_layers], dim=-1)


class Pool(nn.Module):
    """Attentional pooling of windows (docs/molmo2.md 1.4).

    The mean of a window's valid patches is the query, these patches are the keys and values.
    """

    def __init__(self, config):
        super().__init__()
        E = config.n_embd
        n_feature = len(config.feature_layers) * E
        self.n_head = config.n_head
        self.q, self.k, self.v = (nn.Linear(n_feature, E) for _ in range(3))
        self.out = nn.Linear(E, E)

    def forward(self, features, pool_src):  # (N,P,2E), (M,K) -> (M,E)
        M, K = pool_src.shape
        valid = pool_src >= 0
        # -1 reads another patch of its window, and not always patch 0: in backward a GPU adds the
        # gradients of equal indices one by one
        source = pool_src.where(valid, pool_src.amax(1, keepdim=True)).clamp(min=0)
        window = features.flatten(0, 1)[source] * valid[..., None]  # (M,K,2E)
        mean = window.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
        q = self.q(mean).view(M, 1, self.n_head, -1)
        q = q.to(torch.promote_types(q.dtype, torch.float32))  # products not rounded to bf16
        k, v = (linear(window).view(M, K, self.n_head, -1) for linear in (self.k, self.v))
        score = (q * k).sum(-1) * q.shape[-1] ** -0.5  # (M,K,H)
        # a padding row has no valid patch: it looks at all of its zeros, so that there is no NaN
        allowed = valid | ~valid.any(1, keepdim=True)
        score = score.masked_fill(~allowed[..., None], float("-inf"))
        return self.out((score.softmax(1)[..., None] * v).sum(1).flatten(1).to(v.dtype))


class SwiGLU(nn.Module):
    """(..,n_in) -> (..,n_out): the projector, as wide inside as the decoder's MLP, and that MLP."""

    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.up = nn.Linear(n_in, n_hidden, bias=False)
        self.gate = nn.Linear(n_in, n_hidden, bias=False)
        self.down = nn.Linear(n_hidden, n_out, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Vision(nn.Module):
    """images (N,P,F) uint8, pool_src (M,K) -> (M,C), zero where a row of pool_src is all -1.

    checkpointing: backward runs the ViT's blocks and the pooling again instead of keeping what they
    computed (activation checkpointing).
    """

    def __init__(self, config, n_hidden, n_out):
        super().__init__()
        self.vit = ViT(config)
        self.pool = Pool(config)
        self.projector = SwiGLU(config.n_embd, n_hidden, n_out)

    def forward(self, images, pool_src, checkpointing=False):
        features = self.vit(images, checkpointing)
        if checkpointing:
            tokens = checkpoint(self.connect, features, pool_src, use_reentrant=False)
        else:
            tokens = self.connect(features, pool_src)
        # biases make padding rows non-zero: multiply, because dropping rows would change the shape
        return tokens * (pool_src >= 0).any(1, keepdim=True)

    def connect(self, features, pool_src):  # (N,P,2E), (M,K) -> (M,C)
        return self.projector(self.pool(features, pool_src))
