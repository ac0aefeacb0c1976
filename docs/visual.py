"""Draws how an image and a video become tokens (Figure 2 of the paper), with functions of vision.py
and text/visual_tokens.py.

The photograph has the geometry of the released models. The pooling has the weights of the
trained toy model, for a window of a drawn image.
"""


import numpy as np
import torch
from PIL import Image

import vision
from docs.photos import MEDIA, picture
from docs.svg import box, line, page, write
from text.visual_tokens import image_tokens, subtitle_text
from tools.walk import examples
from toy.shapes import SIZE, draw_scene, render
from weights import files

MAX_CROPS = 8
OF_CROP = ("empty", "caption", "points", "question", "text")  # colours; crop 0 is the whole image
PATCH = 4  # units in the drawing of the crops
FIRST = 20  # the windows are drawn from this patch of the mosaic on, in both directions
ZOOM = 24  # units of a patch in the drawing of the windows
SCENE, WINDOW = 8, 9  # seed of a toy image, and the number of a window with the edge of a shape

DURATIONS = (60, 192, 600)  # seconds of the videos on the time line
MAX_FRAMES = 384  # of stage 3
FPS = 2
SUBTITLES = ((0.4, 2.1, "Hello."), (3.2, 4.6, "A cup."))


def crops():
    image = vision.to_array(Image.open(MEDIA / "coffee.png"))
    height, width = image.shape[:2]
    tiling = vision.tiling(height, width, MAX_CROPS)
    low, high, _ = vision.pooled_grids(height, width, MAX_CROPS)
    _, pool_src = vision.crops(image, MAX_CROPS)
    out = [*draw_crops(image, tiling), *draw_windows(pool_src, low, high), *draw_pooling(),
           *draw_tokens(image, low, high)]
    return page(1034, "How an image becomes tokens", out)


def draw_crops(image, tiling):
    """Yields the image, the low-resolution crop, and the mosaic with its overlapping crops."""
    config = vision.RELEASED
    height, width = image.shape[:2]
    yield write(8, 20, "1. The image is resized twice, then cut into crops", "title")
    yield picture(8, 30, 108, image)[0]
    yield write(8, 120, f"image of {width} x {height}\npixels", "soft")
    side = config.grid * PATCH
    yield picture(8, 160, side, vision.resize(image, config.crop, config.crop))[0]
    yield write(8, 282, f"1 low-resolution\ncrop: {config.crop} x {config.crop}\npixels, or "
                f"{config.grid} x {config.grid}\npatches", "soft")

    rows, cols = tiling
    inner = config.grid - 2 * config.overlap_margin
    patches = np.array([rows, cols]) * inner + 2 * config.overlap_margin
    pixels = patches * config.patch
    left, top = 142, 40
    yield picture(left, top, int(patches[1]) * PATCH, vision.resize(image, *map(int, pixels)))[0]
    for number, (r, c) in enumerate(np.ndindex(rows, cols), 1):
        # a crop is drawn one or two units smaller, so that the lines of two crops are beside
        # each other where the crops overlap
        x = left + c * inner * PATCH + 2 * (number % 2)
        y = top + r * inner * PATCH + 2 * (number // 3)
        yield box(x, y, side - 2, side - 2, f"edge {OF_CROP[number]}-edge")
        yield box(x + 42 * c + 22, y + 42 * r + 22, 20, 18, OF_CROP[number])
        yield write(x + 42 * c + 32, y + 42 * r + 35, str(number), "on", "middle")
    bottom = top + int(patches[0]) * PATCH
    yield write(left, bottom + 18, f"{rows * cols} high-resolution crops of {config.crop} x "
                f"{config.crop}\npixels from a mosaic of {pixels[1]} x {pixels[0]}.\nNeighbours "
                f"overlap by {2 * config.overlap_margin} patches, so\nthat patches at an edge have "
                "context.\nThe aspect ratio is not kept.", "soft")


def draw_windows(pool_src, low, high):
    """Yields the patches around the middle of the mosaic, and the window that is made of four
    crops."""
    y = 360
    n_patch = vision.RELEASED.n_patch
    yield write(8, y, "2. Windows of 2 x 2 patches become one visual token", "title")
    # each line of pool_src lists the patches of a window; back to a grid of the used patches
    mosaic = pool_src[low[0] * low[1] :].reshape(*high, 2, 2).transpose(0, 2, 1, 3)
    mosaic = mosaic.reshape(2 * high[0], 2 * high[1])[FIRST : FIRST + 6, FIRST : FIRST + 6]
    for (r, c), patch in np.ndenumerate(mosaic):
        yield box(8 + c * ZOOM, y + 12 + r * ZOOM, ZOOM - 1, ZOOM - 1, OF_CROP[patch // n_patch])
    for r, c in np.ndindex(3, 3):
        if (r, c) != (1, 1):
            yield box(9 + 2 * c * ZOOM, y + 13 + 2 * r * ZOOM, 2 * ZOOM - 3, 2 * ZOOM - 3, "line")
    yield box(8 + 2 * ZOOM, y + 12 + 2 * ZOOM, 2 * ZOOM - 1, 2 * ZOOM - 1, "frame")
    number = low[0] * low[1] + high[1] * (FIRST // 2 + 1) + FIRST // 2 + 1
    yield write(166, y + 24, "The middle of the mosaic. A colour\nis the crop whose patch is used."
                "\nEach window is a line of pool_src.\nThe window in the middle has one\npatch of "
                "each crop:", "soft")
    for k, patch in enumerate(pool_src[number]):
        crop, inside = divmod(int(patch), n_patch)
        yield box(166, y + 88 + 16 * k, 12, 12, OF_CROP[crop])
        yield write(184, y + 98 + 16 * k, f"{patch} = {crop} x {n_patch} + {inside}")


def draw_pooling():
    """Yields a window of a toy image, and the weights of its four patches in each head."""
    model, _, config = files.open_model_folder("toy")
    image = render(draw_scene(np.random.default_rng(SCENE), "test", 2, 4))
    images, pool_src = vision.crops(image, config.max_crops, model.config.vision)
    with torch.no_grad():
        features = model.vision.vit(torch.from_numpy(images)).flatten(0, 1)
        window = features[pool_src[WINDOW]]
        shares = pooling_weights(model.vision.pool, window)
    y = 540
    yield write(8, y, "3. Attentional pooling (weights of the trained toy model)", "title")
    side = SIZE // 5  # pixels of a window
    row, column = divmod(WINDOW, 5)
    pixels = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
    yield picture(8, y + 12, 92, pixels.repeat(12, 0).repeat(12, 1))[0]
    yield line("line", (54, y + 12), (54, y + 104))
    yield line("line", (8, y + 58), (100, y + 58))
    for head, of_head in enumerate(shares.T.tolist()):
        x = 124 + 58 * head
        yield write(x + 23, y + 24, f"head {head}", "soft", "middle")
        for k, share in enumerate(of_head):
            down, right = divmod(k, 2)
            left, top = x + 24 * right, y + 34 + 24 * down
            yield box(left, top, 23, 23, "empty")
            yield box(left, top + 23 * (1 - share), 23, 23 * share, "prefix")
            colour = "on" if share > 0.5 else ""
            yield write(left + 11.5, top + 16, f"{share:.0%}".strip("%"), colour, "middle")
    yield write(8, y + 124, "The query is the mean of the four patches. Keys and values\nare the "
                "patches. The weights are percent, and their sum is\n100 in each head. Four heads "
                "can keep four different\npatches, which a plain mean cannot.", "soft")


def pooling_weights(pool, window):
    """The weights of vision.Pool for one window of valid patches: (K,2E) -> (K,heads)."""
    q = pool.q(window.mean(0)).view(pool.n_head, -1)
    k = pool.k(window).view(len(window), pool.n_head, -1)
    return ((q * k).sum(-1) * q.shape[-1] ** -0.5).softmax(0)


def draw_tokens(image, low, high):
    """Yields the tokens of the image in their order, one small square for each <im_patch> and each
    <im_col>, which ends a line of the mosaic."""
    height, width = image.shape[:2]
    ids = image_tokens(width, height, examples.TOKENIZER, MAX_CROPS, vision.RELEASED)
    name_of = {number: name for name, number in examples.TOKENIZER.special.items()}
    names = [name_of[token] for token in ids]
    end = names.index("im_end")
    y = 740
    yield write(8, y, f"4. The image is {len(ids)} tokens, in this order", "title")
    yield from draw_grid(8, y, names[: end + 1], low[1])
    yield from draw_grid(176, y, names[end + 1 :], high[1] + 1)
    yield write(8, y + 136, f"{low[0]} lines of\n{low[1]} <im_patch>", "soft")
    yield write(176, y + 190, f"{high[0]} lines of {high[1]} <im_patch>\nand one <im_col>", "soft")
    yield write(8, y + 252, "Each <im_patch> stands for one window. Its visual token is\nadded to "
                "the embedding of <im_patch>, and the sum enters\nthe decoder.", "soft")


def draw_grid(x, y, names, columns):
    """Yields the tokens between two markers as lines of `columns` squares, and the markers."""
    first, *inside, last = names
    yield box(x, y + 14, 14, 14, "text")
    yield write(x + 20, y + 26, f"<{first}>")
    for number, name in enumerate(inside):
        down, right = divmod(number, columns)
        kind = "prefix" if name == "im_patch" else "question"
        yield box(x + 6 * right, y + 36 + 6 * down, 5, 5, kind)
    bottom = y + 36 + 6 * len(inside) // columns + 36
    yield box(x, bottom, 14, 14, "text")
    yield write(x + 20, bottom + 12, f"<{last}>")


def frames():
    times = vision.frame_times(DURATIONS[-1], MAX_FRAMES, FPS)
    out = [*draw_durations(), *draw_subtitles(times[:5]), *draw_video_tokens(times)]
    return page(494, "How a video becomes tokens", out)


def draw_durations():
    """Yields the times of the frames of three videos."""
    scale = 344 / DURATIONS[-1]
    yield write(8, 20, f"1. Two frames per second, at most {MAX_FRAMES} frames", "title")
    for number, duration in enumerate(DURATIONS):
        times = vision.frame_times(duration, MAX_FRAMES, FPS)
        y = 34 + 44 * number
        yield write(8, y + 12, f"{duration} s: {len(times)} frames, one every "
                    f"{times[1] - times[0]:.2f} s")
        yield box(8, y + 18, duration * scale, 14, "prefix")
        for time in times[::8]:
            yield line("line", (8 + time * scale, y + 18), (8 + time * scale, y + 32))
    longest = (MAX_FRAMES - 1) / FPS
    yield write(8, 178, "A line in a bar is every eighth frame. A video that is longer\nthan "
                f"{longest:g} s has the same number of frames, farther apart.", "soft")


def draw_subtitles(times):
    """Yields the first frames of a video and two subtitles on a time line of 8 seconds."""
    scale = 344 / 8
    yield write(8, 228, "2. The first 8 seconds of the longest video", "title")
    yield box(8, 262, 344, 2, "padding")
    for time in times:
        x = 8 + time * scale
        yield box(x, 248, 10, 14, "prefix")
        yield write(x, 244, f"{time:.1f}", "soft")
    for start, end, words in SUBTITLES:
        yield box(8 + start * scale, 270, (end - start) * scale, 16, "caption")
        yield write(12 + start * scale, 282, words, "on")
    yield write(8, 304, "The subtitles are below the frames. A subtitle is used if it is at\nmost "
                "one second from a frame.", "soft")


def draw_video_tokens(times):
    """Yields the first three frames, the last one and the subtitles as tokens."""
    n = len(vision.frame_windows())
    yield write(8, 354, f"3. Its tokens: {n} for each frame, from windows of 3 x 3", "title")
    places = [(8, 382), (114, 382), (220, 382), (8, 410)]
    for (x, y), time in zip(places, [*times[:3], times[-1]], strict=True):
        yield write(x, y, f"{time:.1f}")
        left = x + (22 if time < 100 else 36)
        yield box(left, y - 12, 8, 16, "text")
        yield box(left + 9, y - 12, 56, 16, "prefix")
        yield write(left + 37, y, str(n), "on", "middle")
        yield box(left + 66, y - 12, 8, 16, "text")
    yield write(322, 382, "..")
    yield write(136, 410, subtitle_text(SUBTITLES, times).rstrip())
    yield write(8, 468, "A frame stands between <frame_start> and <frame_end>, after\nits time in "
                "seconds. The subtitles follow the last frame.", "soft")
