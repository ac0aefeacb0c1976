"""From pixels to visual tokens (paper: 3.1 and appendix A; docs/molmo2.md 1 to 3).

in    an image (H,W,3) uint8, or the duration of a video
out   crops as patches (N,P,F) uint8; pool_src (M,K), the K patches that a visual token pools
then  Vision(images, pool_src) -> (M,C): ViT, two of its layers, attentional pooling, projector

Letters: N crops, P patches of a crop, F values of a patch (its pixels in three colours), E width of
the ViT, M visual tokens, K patches that one visual token pools, C width of the decoder.

An image becomes one low-resolution crop of the whole image and a mosaic of overlapping
high-resolution crops. Without overlap, patches at the edge of a crop would have no context on one
side. Of the patches in an overlap, each is then used from one crop only. Two crops of 27 patches,
19 patches apart, in one line of the mosaic:

    column of the mosaic   0                  19      27                  46
    crop a has             aaaaaaaaaaaaaaaaaaaaaaaaaaa
    crop b has                                bbbbbbbbbbbbbbbbbbbbbbbbbbb
    used                   aaaaaaaaaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbb    19 * 2 + 8 = 46 columns

Windows of 2x2 used patches become one visual token each (3x3 in videos): the low-resolution crop
gives 14 x 14 = 196 tokens, a mosaic of two crops 14 x 23. Molmo2 uses no class token, no final norm
of the ViT and no other kind of pooling or projector, so this file has none.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

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
    overlap_margin: int = 4            # patches not used on a side of a crop with a neighbour
    eps: float = 1e-6                  # epsilon of the LayerNorms

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

    It is the tiling that enlarges the image least. If every tiling would shrink the image, it is
    the one that shrinks it least. The scales are float32 as in the official code, because rounding
    decides which of two nearly equal scales is the smaller one.
    """
    # in the order of their number of crops: argmin and argmax take the first of equal scales
    candidates = [(rows, n // rows) for n in range(1, max_crops + 1)
                  for rows in range(1, n + 1) if n % rows == 0]
    overlap = config.crop - config.stride
    # n crops cover n * stride + overlap pixels, so n * stride is compared with the image's pixels
    # minus the overlap
    size = np.array([max(h - overlap, 1), max(w - overlap, 1)], dtype=np.float32)
    scale = (np.array(candidates, dtype=np.float32) * config.stride / size).min(axis=1)
    if (scale < 1).all():
        return candidates[scale.argmax()]
    return candidates[np.where(scale < 1, np.inf, scale).argmin()]


def pooled_grids(h, w, max_crops, config=RELEASED):
    """-> (rows, cols) of the tokens of the low-resolution crop, (rows, cols) of the tokens of the
    mosaic, number of crops. The planner needs these numbers before any image is decoded."""
    rows, cols = tiling(h, w, max_crops, config)
    inner = config.grid - 2 * config.overlap_margin
    low = math.ceil(config.grid / 2)  # 27 patches make 14 windows
    high_rows, high_cols = (math.ceil((n * inner + 2 * config.overlap_margin) / 2)
                            for n in (rows, cols))
    return (low, low), (high_rows, high_cols), 1 + rows * cols


def windows(grid, k):
    """Patch ids (h,w) -> (M,k*k): k x k windows in raster order, with -1 for patches that a window
    at the edge lacks. If an odd number of lines or columns is missing, the end has one more."""
    h, w = grid.shape
    pad_h, pad_w = -h % k, -w % k
    padding = (pad_h // 2, pad_h - pad_h // 2), (pad_w // 2, pad_w - pad_w // 2)
    grid = np.pad(grid, padding, constant_values=-1)
    # (rows, k, cols, k): window row, row inside the window, window column, column inside it
    grid = grid.reshape(grid.shape[0] // k, k, grid.shape[1] // k, k)
    return grid.transpose(0, 2, 1, 3).reshape(-1, k * k)


def resize(image, h, w):
    """(H,W,3) uint8 -> (h,w,3) uint8, bilinear without antialiasing (docs/molmo2.md 2.1).

    The aspect ratio is not kept. Floats are interpolated and then rounded; if torch interpolates
    uint8, a fifth of the values differs from the official ones by one level.
    """
    if image.shape[:2] == (h, w):
        return image
    # (3,1,H,W), channels as the batch: for (1,3,H,W) torch would choose the kernel by
    # the number of threads, and the kernels round differently
    x = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[:, None].float()
    x = F.interpolate(x, (h, w), mode="bilinear", align_corners=False, antialias=False)
    return x[:, 0].round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


def patchify(crops, config=RELEASED):
    """(n,crop,crop,3) -> (n,P,F): patches in raster order, each as (row, column, channel)."""
    g, p = config.grid, config.patch
    # (n, row of patches, y in the patch, column of patches, x in it, RGB) -> y and x side by side
    patches = crops.reshape(-1, g, p, g, p, 3).transpose(0, 1, 3, 2, 4, 5)
    return patches.reshape(-1, g * g, p * p * 3)


def to_array(image):
    """PIL image -> (H,W,3) uint8, rotated as its EXIF tag says. An array must already be like this.

    Channels of 16 bits are scaled to 8. ValueError if pixels are signed or have 32 bits, because
    their range is unknown.
    """
    if not isinstance(image, Image.Image):
        assert image.dtype == np.uint8 and image.shape[2:] == (3,), (image.dtype, image.shape)
        return image
    # Pillow may open a PNG or PGM of 16 bits as mode "I", 32-bit integers
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError(f"{image.mode} pixels have no known range; save 8 or unsigned 16 bits")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        levels = np.array(image).clip(0, 65535) / 257
        image = Image.fromarray(levels.round().astype(np.uint8))
    return np.array(image.convert("RGB"))


def crops(image, max_crops=8, config=RELEASED):
    """One image -> crops (n,P,F) uint8, the low-resolution crop first, and pool_src (M,4) int64.

    A line of pool_src is a visual token: first all tokens of the low-resolution crop, then all
    of the mosaic, each in raster order. An entry is crop * P + patch, or -1 if the window lacks
    a patch at the edge (docs/molmo2.md 2.2, 2.3).
    """
    image = to_array(image)
    rows, cols = tiling(*image.shape[:2], max_crops, config)
    overlap = 2 * config.overlap_margin * config.patch
    mosaic = resize(image, rows * config.stride + overlap, cols * config.stride + overlap)
    pixels = [resize(image, config.crop, config.crop)]
    for r, c in np.ndindex(rows, cols):
        y, x = r * config.stride, c * config.stride
        pixels.append(mosaic[y : y + config.crop, x : x + config.crop])
    # a small image has the tiling 1 x 1, and so two equal crops: packing.Crops encodes one of them
    return patchify(np.stack(pixels), config), image_windows(rows, cols, config)


@lru_cache(maxsize=1024)
def image_windows(rows, cols, config=RELEASED):
    """pool_src (M,4) of an image with rows x cols high-resolution crops. It needs no pixels.

    The array is cached, so copy it before you write to it.
    """
    g, m = config.grid, config.overlap_margin
    inner = g - 2 * m
    patch_ids = np.arange(g * g).reshape(g, g)
    # the mosaic as one grid of patches: each cell says which patch of which crop is used there
    used = np.empty((rows * inner + 2 * m, cols * inner + 2 * m), dtype=np.int64)
    for n, (r, c) in enumerate(np.ndindex(rows, cols), 1):  # crop 0 is the low-resolution crop
        # a crop keeps its margin only at the outer edges of the mosaic
        top, left = m * (r > 0), m * (c > 0)
        bottom, right = g - m * (r < rows - 1), g - m * (c < cols - 1)
        region = np.s_[r * inner + top : r * inner + bottom, c * inner + left : c * inner + right]
        used[region] = (n * g * g + patch_ids)[top:bottom, left:right]
    return np.concatenate([windows(patch_ids, 2), windows(used, 2)])


def frame(image, config=RELEASED):
    """One video frame -> (1,P,F) uint8. frame_windows are its windows.

    A frame has one crop and windows of 3x3, which give 81 tokens. As an image it would have at
    least 392, so 128 frames would not fit into a row of stage 2.
    """
    pixels = resize(to_array(image), config.crop, config.crop)
    return patchify(pixels[None], config)


def frame_windows(config=RELEASED):
    """pool_src (M,9) of a video frame."""
    return windows(np.arange(config.n_patch).reshape(config.grid, config.grid), 3)


def frame_times(duration, max_frames, fps=2):
    """Times of the frames of a video in seconds: every 1/fps, and the last instant. If these are
    more than max_frames, the frames are spread evenly (docs/molmo2.md 3.1)."""
    # one frame is for the last instant, so max_frames - 1 are left for the grid of 1/fps
    if (max_frames - 1) / fps < duration:
        return np.linspace(0, duration, max_frames).tolist()
    return [*np.arange(0, duration, 1 / fps).tolist(), float(duration)]


def track_times(duration, max_frames, rates):
    """Times of the frames of a video with tracks, in seconds (docs/molmo2.md 3.1).

    Every 1/fps seconds, without the last instant. fps is the highest of the increasing frame rates
    `rates` with which max_frames cover the video, or the lowest if none of them does. The
    rates are multiples of the frame rate of the annotations, so that frames have annotated points.
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


# Activation checkpointing: recomputed(f, x) is f(x), but backward computes f again, so that only x
# is kept. A function that draws random numbers also needs preserve_rng_state=True.
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


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
                   for linear in (self.q, self.k, self.v))  # (N,heads,P,72)
        # There is no mask: a patch attends to all patches of its crop, and to no other crop. So
        # the cost grows with N * P^2, not (N * P)^2. Frames are related in the decoder.
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)  # (N,P,heads,72)
        x = x + self.out(attended.reshape(N, P, E))
        h = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(h)


class ViT(nn.Module):
    """(N,P,F) uint8 -> (N,P,2E): the outputs of two blocks, concatenated (docs/molmo2.md 1.3)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.patch = nn.Linear(config.n_pixel, config.n_embd)
        self.pos = nn.Parameter(torch.zeros(config.n_patch, config.n_embd))
        self.blocks = nn.ModuleList(ViTBlock(config) for _ in range(config.n_layer))

    def forward(self, images, n_recomputed=0):
        # 0..255 -> -1..1 as in SigLIP. It is done here and not in the loader, because
        # uint8 is a quarter of the bytes that must be copied to a GPU.
        x = images.to(self.patch.weight.dtype) / 127.5 - 1
        # (N,P,E). A convolution that moves by its own size is a linear layer on flattened patches.
        x = self.patch(x) + self.pos
        outputs = {}
        for i, block in enumerate(self.blocks):
            x = recomputed(block, x) if i < n_recomputed else block(x)
            # keep these only: all 25 outputs took 20 GiB more at 384 frames (docs/log.md)
            if i in self.config.feature_layers:
                outputs[i] = x
        return torch.cat([outputs[i] for i in self.config.feature_layers], dim=-1)


class Pool(nn.Module):
    """Attentional pooling of windows (paper: 3.1; docs/molmo2.md 1.4): one visual token per window.

    The query is the mean of the window's valid patches. Keys and values are these patches. On the
    toy, an ablation found no clear difference to a plain mean (docs/log.md).
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
        # An index must not be -1, so another patch of the same window stands for a missing one.
        # If patch 0 stood for all, a GPU would add thousands of its gradients one after the other.
        # A batch without images has windows without any patch (packing.Crops.arrays): index 0.
        stand_in = pool_src.amax(1, keepdim=True).clamp(min=0)
        source = pool_src.where(valid, stand_in)
        window = features.flatten(0, 1)[source]  # (M,K,2E)
        window = window * valid[..., None]  # 0 for missing patches
        # window.mean(1) would count missing patches as zeros
        mean = window.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)  # (M,2E)
        q = self.q(mean).view(M, 1, self.n_head, -1)
        q = q.to(torch.promote_types(q.dtype, torch.float32))  # so products are not rounded
        k, v = (linear(window).view(M, K, self.n_head, -1) for linear in (self.k, self.v))
        # (M,K,heads): with one query and at most 9 keys, a sum is simpler than SDPA
        score = (q * k).sum(-1) * q.shape[-1] ** -0.5
        # An empty window attends to all of its zeros. A softmax over nothing would be
        # NaN, and the product with 0 at the end of Vision.forward would still be NaN.
        allowed = valid | ~valid.any(1, keepdim=True)
        score = score.masked_fill(~allowed[..., None], float("-inf"))
        # (M,K,heads,1) * (M,K,heads,72), summed over the patches
        attended = (score.softmax(1)[..., None] * v).sum(1)  # (M,heads,72)
        return self.out(attended.flatten(1).to(v.dtype))


class SwiGLU(nn.Module):
    """(..,n_in) -> (..,n_out). It is the MLP of the decoder, and also the projector of the visual
    tokens, with the same inner width."""

    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.up = nn.Linear(n_in, n_hidden, bias=False)
        self.gate = nn.Linear(n_in, n_hidden, bias=False)
        self.down = nn.Linear(n_hidden, n_out, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Vision(nn.Module):
    """images (N,P,F) uint8, pool_src (M,K) -> (M,C), zero for empty windows (all entries -1).

    n_recomputed: the first n blocks of the ViT are computed again in backward. If there are any,
    the pooling and the projector are computed again, too.
    """

    def __init__(self, config, n_hidden, n_out):
        super().__init__()
        self.vit = ViT(config)
        self.pool = Pool(config)
        self.projector = SwiGLU(config.n_embd, n_hidden, n_out)

    def forward(self, images, pool_src, n_recomputed=0):
        features = self.vit(images, n_recomputed)
        if n_recomputed:
            tokens = recomputed(self.connect, features, pool_src)
        else:
            tokens = self.connect(features, pool_src)
        # The biases of Pool make empty windows non-zero. They are multiplied by 0 and
        # not removed, because the shape would then depend on the data.
        return tokens * (pool_src >= 0).any(1, keepdim=True)

    def connect(self, features, pool_src):  # (N,P,2E), (M,K) -> (M,C)
        return self.projector(self.pool(features, pool_src))
