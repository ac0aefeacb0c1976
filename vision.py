"""Pixels to visual tokens (paper: architecture, image and video input; spec 1.3, 1.4, 2, 3.1).

in    an image (H,W,3) uint8, or a video's duration
out   crops as patches (N,P,F) uint8 and, for every visual token, the K patches it pools: pool_src (M,K)
then  see(images, pool_src) -> (M,C): ViT, two of its layers, attentional pooling, projector

An image becomes one low-resolution crop of everything plus a mosaic of overlapping high-resolution crops. The
overlap gives every patch some context in its crop; each patch is then *used* from one crop only:

    two 27-patch crops at stride 19:   |aaaaaaaaaaaaaaaaaaa aaaa|bbbb
                                                       aaaa|bbbb bbbbbbbbbbbbbbbbbbb|      4 + 4 shared on each side
    grid of used patches:              |aaaaaaaaaaaaaaaaaaaaaaa|bbbbbbbbbbbbbbbbbbbbbbb|   19*2 + 8 = 46 wide

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
    n_layer: int = 25                # blocks kept of SigLIP2 So400m's 27: nothing above the last feature layer
    n_embd: int = 1152               # E, width
    n_head: int = 16                 # heads of the ViT and of the pooling, 72 wide each
    n_hidden: int = 4304             # inner size of the ViT's MLP
    feature_layers: tuple = (24, 18)       # blocks whose outputs are concatenated, in this order (-3 and -9 of 27)
    grid: int = 27                   # patches along one side of a crop
    patch: int = 14                  # pixels along one side of a patch
    overlap_margin: int = 4                  # patches of overlap on each side of a high-resolution crop
    eps: float = 1e-6                # of the LayerNorms
    neighbor_init: bool = False              # start with heads that look at neighbours (init_neighbor_heads): for a ViT that starts from nothing

    @property
    def crop(self):                  # 378 pixels
        return self.grid * self.patch

    @property
    def stride(self):                # 266 pixels: the stride between crops
        return (self.grid - 2 * self.overlap_margin) * self.patch

    @property
    def n_patch(self):               # P = 729
        return self.grid**2

    @property
    def n_pixel(self):               # F = 588
        return self.patch**2 * 3


RELEASED = VisionConfig()


# ---------------------------------------------------------------------------------------------------------------
# image -> crops


@lru_cache(maxsize=65536)
def tiling(h, w, max_crops, config=RELEASED):
    """(rows, cols) of high-resolution crops for an image of h x w pixels (spec 2.2).

    The smallest tiling that needs no shrinking; where all shrink, the one that shrinks least. Float32 as in the
    official code, because ties are decided by rounding.
    """
    candidates = [(i, j) for i in range(1, max_crops + 1) for j in range(1, max_crops + 1) if i * j <= max_crops]
    candidates.sort(key=lambda ij: (ij[0] * ij[1], ij[0]))
    overlap = config.crop - config.stride
    size = np.array([max(h - overlap, 1), max(w - overlap, 1)], dtype=np.float32)
    scale = (np.array(candidates, dtype=np.float32) * config.stride / size).min(axis=1)
    best = scale.argmax() if (scale < 1).all() else np.where(scale < 1, np.inf, scale).argmin()
    return candidates[best]


def pooled_grids(h, w, max_crops, config=RELEASED):
    """((rows, cols) of tokens of the low-resolution view, the same of the mosaic, number of crops): sizes, no pixels."""
    rows, cols = tiling(h, w, max_crops, config)
    inner = config.grid - 2 * config.overlap_margin
    low = -(-config.grid // 2)
    high = tuple(-(-(n * inner + 2 * config.overlap_margin) // 2) for n in (rows, cols))
    return (low, low), high, 1 + rows * cols


def windows(grid, k):
    """Patch ids (h,w) -> (M, k*k): k x k windows in raster order, -1 where a window hangs over the edge (spec 2.3)."""
    h, w = grid.shape
    (top, bottom), (left, right) = ((pad // 2, pad - pad // 2) for pad in (-h % k, -w % k))
    grid = np.pad(grid, ((top, bottom), (left, right)), constant_values=-1)
    grid = grid.reshape(grid.shape[0] // k, k, grid.shape[1] // k, k)
    return grid.transpose(0, 2, 1, 3).reshape(-1, k * k)


def resize(image, h, w):
    """(H,W,3) uint8 -> (h,w,3) uint8, bilinear without antialiasing (spec 2.1).

    An image of that size is returned as it is. Interpolates floats and then rounds: on uint8 torch is off by one level in a fifth of
    the values. Channels stand where the batch does, because with three channels torch picks its kernel by the number of threads.
    """
    if image.shape[:2] == (h, w):
        return image
    x = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[:, None].float()
    x = F.interpolate(x, (h, w), mode="bilinear", align_corners=False, antialias=False)
    return x[:, 0].round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


def patchify(crops, config=RELEASED):
    """(n,crop,crop,3) -> (n,P,F): patches in raster order, each flattened as (row, column, channel)."""
    g, p = config.grid, config.patch
    return crops.reshape(-1, g, p, g, p, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, g * g, p * p * 3)


def to_array(image):
    """PIL image -> (H,W,3) uint8, turned as its EXIF tag says; an array must be that already."""
    if isinstance(image, Image.Image):
        if image.mode.startswith("I"):                   # 16 bits in a channel: Pillow would cut off at 255
            image = Image.fromarray((np.array(image).clip(0, 65535) / 257).round().astype(np.uint8))
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3, (image.dtype, image.shape)
    return image


def crops(image, max_crops=8, config=RELEASED):
    """One image -> crops (n,P,F) uint8, the low-resolution view first, and pool_src (M,4) int64 (spec 2.2, 2.3).

    Rows of pool_src: the low-resolution view's tokens, then the mosaic's, in raster order; an entry is
    crop * P + patch, or -1 where a window hangs over the edge.
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


def image_windows(rows, cols, config=RELEASED):
    """pool_src (M,4) of an image with rows x cols high-resolution crops, as `crops` gives it: geometry alone."""
    g, m, inner = config.grid, config.overlap_margin, config.grid - 2 * config.overlap_margin
    view = np.arange(g * g).reshape(g, g)                                        # crop 0
    used = np.empty((rows * inner + 2 * m, cols * inner + 2 * m), dtype=np.int64)
    for n, (r, c) in enumerate(np.ndindex(rows, cols), 1):
        # a crop keeps its margin only on the outer edges of the mosaic
        top, left = m * (r > 0), m * (c > 0)
        bottom, right = g - m * (r < rows - 1), g - m * (c < cols - 1)
        used[r * inner + top : r * inner + bottom, c * inner + left : c * inner + right] = (n * g * g + view)[top:bottom, left:right]
    return np.concatenate([windows(view, 2), windows(used, 2)])


def frame(image, config=RELEASED):
    """One video frame -> (1,P,F) uint8 and pool_src (M,9): one crop, 3x3 windows, 81 tokens as released (spec 3.2)."""
    return patchify(resize(to_array(image), config.crop, config.crop)[None], config), frame_windows(config)


def frame_windows(config=RELEASED):
    return windows(np.arange(config.n_patch).reshape(config.grid, config.grid), 3)


def frame_times(duration, max_frames, fps=2, last=True):
    """Seconds at which a clip is looked at: every 1/fps, the last instant always, evenly spread if too many (spec 3.1).

    last=False is an older rule of the official code, which stops short of the last instant.
    """
    if (max_frames - 1) / fps < duration:
        return np.linspace(0, duration, max_frames, endpoint=last).tolist()
    return np.arange(0, duration, 1 / fps).tolist() + [float(duration)] * last


def track_times(duration, max_frames, rates):
    """Seconds at which a video with tracks is looked at: a grid of the highest of `rates` (rising, per second) that max_frames
    reach the end with, the lowest if none do; the last instant only where it lies on the grid (spec 3.1)."""
    fps = rates[0]
    for rate in rates[1:]:
        if max_frames / rate < duration:
            break
        fps = rate
    times = np.arange(max_frames) / fps
    return times[times < duration].tolist()


# ---------------------------------------------------------------------------------------------------------------
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

    def forward(self, x):                                # (N,P,E)
        N, P, E = x.shape
        h = self.attn_norm(x)
        q, k, v = (f(h).view(N, P, self.n_head, -1).transpose(1, 2) for f in (self.q, self.k, self.v))    # (N,H,P,D)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(N, P, E))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class ViT(nn.Module):
    """(N,P,F) uint8 -> (N,P,2E): the outputs of two blocks side by side (spec 1.3)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.patch = nn.Linear(config.n_pixel, config.n_embd)
        self.pos = nn.Parameter(torch.zeros(config.n_patch, config.n_embd))
        self.blocks = nn.ModuleList(ViTBlock(config) for _ in range(config.n_layer))

    def forward(self, images, activation_checkpointing=False):
        x = images.to(self.patch.weight.dtype) / 127.5 - 1              # SigLIP's normalisation, on the device
        x = self.patch(x) + self.pos
        seen = {}
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if activation_checkpointing else block(x)
            if i in self.config.feature_layers:
                seen[i] = x
        return torch.cat([seen[i] for i in self.config.feature_layers], dim=-1)


class Pool(nn.Module):
    """Attentional pooling: the mean of a window's valid patches asks, the valid patches answer (spec 1.4)."""

    def __init__(self, config):
        super().__init__()
        E = config.n_embd
        self.n_head = config.n_head
        self.q, self.k, self.v = (nn.Linear(len(config.feature_layers) * E, E) for _ in range(3))
        self.out = nn.Linear(E, E)

    def forward(self, features, pool_src):               # (N,P,2E), (M,K) -> (M,E)
        M, K = pool_src.shape
        valid = pool_src >= 0
        window = features.flatten(0, 1)[pool_src.clamp(min=0)] * valid[..., None]                      # (M,K,2E)
        mean = window.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
        q = self.q(mean).view(M, 1, self.n_head, -1)                                                   # (M,1,H,D)
        k, v = (f(window).view(M, K, self.n_head, -1) for f in (self.k, self.v))                       # (M,K,H,D)
        score = (q * k).sum(-1) * q.shape[-1] ** -0.5                                                  # (M,K,H)
        # a padding row has no valid patch: let it look at all of its zeros, so that nothing turns into NaN
        score = score.masked_fill(~(valid | ~valid.any(1, keepdim=True))[..., None], float("-inf"))
        return self.out((score.softmax(1)[..., None] * v).sum(1).flatten(1))


class Projector(nn.Module):
    """SwiGLU from the vision width to the decoder's, (M,E) -> (M,C), through the decoder's own MLP size (spec 1.4)."""

    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.up = nn.Linear(n_in, n_hidden, bias=False)
        self.gate = nn.Linear(n_in, n_hidden, bias=False)
        self.down = nn.Linear(n_hidden, n_out, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Vision(nn.Module):
    """See: images (N,P,F) uint8, pool_src (M,K) -> (M,C), zero where a row of pool_src is all -1.

    activation_checkpointing: keep the inputs of ViT blocks and of the pooling for backward, not what they compute (activation checkpointing).
    A seam: a plain function of two tensors, so that sharing it out over ranks is a wrapper put on from outside.
    """

    def __init__(self, config, n_hidden, n_out):
        super().__init__()
        self.vit = ViT(config)
        self.pool = Pool(config)
        self.projector = Projector(config.n_embd, n_hidden, n_out)

    def forward(self, images, pool_src, activation_checkpointing=False):
        features = self.vit(images, activation_checkpointing)
        tokens = checkpoint(self.connect, features, pool_src, use_reentrant=False) if activation_checkpointing else self.connect(features, pool_src)
        # biases make the rows of padding non-zero: multiply, because dropping rows would change the shape
        return tokens * (pool_src >= 0).any(1, keepdim=True)

    def connect(self, features, pool_src):               # (N,P,2E), (M,K) -> (M,C)
        return self.projector(self.pool(features, pool_src))


NEIGHBOURS = (((0, 1), (0, -1), (1, 0), (-1, 0)), ((1, 1), (1, -1), (-1, 1), (-1, -1)), ((0, 2), (0, -2), (2, 0), (-2, 0)))


@torch.no_grad()
def init_neighbor_heads(vit, sharpness=2.0):
    """Start weights for a ViT that starts from nothing: every head looks at one neighbour of its patch.

    The first D of the E dimensions hold sines and cosines of row and column, and no pixels. Keys read them as they are,
    queries read them turned by the offset to the neighbour, so that the score is highest there: sum of
    cos(freq * distance). Blocks take the nearest, the diagonal and the next but one neighbours in turn. All of it is
    free to change, and later blocks also read what earlier ones left there. RESULTS.md says what it gains.
    """
    grid, E, D = vit.config.grid, vit.config.n_embd, vit.config.n_embd // vit.config.n_head
    assert D % 4 == 0 and D < E, (f"{vit.config.n_head} heads of {D} dimensions cannot start at neighbours (several heads, "
                                  "of a multiple of 4); --model.vision.neighbor_init=false starts them anywhere")
    # from a quarter turn per crop to a quarter turn per patch
    freq = torch.pi / 2 * torch.logspace(-np.log2(grid), 0, D // 4, base=2.0)
    angle = (torch.arange(grid) + 0.5)[:, None] * freq
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)                      # (grid, D/2)
    rows, cols = wave[:, None].expand(-1, grid, -1), wave[None].expand(grid, -1, -1)
    vit.pos.copy_(F.pad(torch.cat([rows, cols], dim=-1).flatten(0, 1), (0, E - D)))
    vit.patch.weight[:D] = 0

    def turn(n):                     # sin(a + f n), cos(a + f n) from sin a, cos a
        sin, cos = (freq * n).sin().diag(), (freq * n).cos().diag()
        return torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)])

    for i, block in enumerate(vit.blocks):
        for part in (block.q, block.k):
            part.weight.mul_(0.1)    # a little of everything else
        for h in range(vit.config.n_head):
            head = slice(h * D, (h + 1) * D)
            down, right = NEIGHBOURS[i % 3][h % 4]
            block.q.weight[head, :D] = sharpness * torch.block_diag(turn(down), turn(right))
            block.k.weight[head, :D] = sharpness * torch.eye(D)
