"""The tokens around pixels: patches, markers, image numbers, timestamps, subtitles (paper: image and video input).

    image     <low_res_im_start> <im_patch>.. <im_end> <im_start> <im_patch>.. <im_col> .. <im_end>
    images    Image 1 <low_res_im_start> .. <im_end> Image 2 <low_res_im_start> .. <im_end>
    video     0.0 <frame_start> <im_patch>.. <frame_end> 0.5 <frame_start> .. <frame_end> subtitle

"Image 1", times and subtitles are text tokens; everything in <> is a visual token, and visual tokens
attend to each other in both directions. One <im_patch> stands for one window of patches that
vision.py pools; so the number of tokens follows from the geometry alone, without pixels.

`config` is a data.DataConfig. This file cannot import data.py, which is above it; it reads only the
fields vision, max_crops, max_images and frame_markers.
"""

import vision


def image_tokens(width, height, tokenizer, config):
    """Ids of the visual tokens of an image of width x height pixels (docs/molmo2.md 2.3).

    First the low-resolution view without column tokens, then the mosaic of high-resolution crops,
    in which <im_col> ends every row of windows.
    """
    special = tokenizer.special
    low, high, _ = vision.pooled_grids(height, width, config.max_crops, config.vision)
    low_rows, low_columns = low
    high_rows, high_columns = high
    view = [special["im_patch"]] * (low_rows * low_columns)
    mosaic = ([special["im_patch"]] * high_columns + [special["im_col"]]) * high_rows
    return [
        special["low_res_im_start"], *view, special["im_end"],
        special["im_start"], *mosaic, special["im_end"],
    ]


def images_tokens(sizes, tokenizer, config):
    """Tokens of one or more images -> (ids, is_visual), two lists of the same length.

    sizes: [(width, height), ..] in pixels, in the order of the images. Where there are several, the
    text "Image 1", "Image 2" and so on stands before each (docs/molmo2.md 2.4). Images beyond
    config.max_images are left out.
    """
    ids = []
    is_visual = []
    for number, (width, height) in enumerate(sizes[: config.max_images], 1):
        if len(sizes) > 1:
            name = tokenizer.encode(f"Image {number}")
            ids += name
            is_visual += [False] * len(name)
        image = image_tokens(width, height, tokenizer, config)
        ids += image
        is_visual += [True] * len(image)
    return ids, is_visual


def video_tokens(times, subtitles, tokenizer, config):
    """Tokens of a video -> (ids, is_visual), two lists of the same length (docs/molmo2.md 3.2).

    times: seconds of the frames from the start of the clip. subtitles: [(start, end, text), ..] in
    the same seconds, or one text, or None; they follow the last frame. Where config.frame_markers is
    false, <frame_start> and <frame_end> stand once, around the whole video.
    """
    frame_start = tokenizer.special["frame_start"]
    frame_end = tokenizer.special["frame_end"]
    patches = [tokenizer.special["im_patch"]] * len(vision.frame_windows(config.vision))
    frame = [frame_start, *patches, frame_end] if config.frame_markers else patches

    ids = []
    is_visual = []

    def add(tokens, visual):
        ids.extend(tokens)
        is_visual.extend([visual] * len(tokens))

    if not config.frame_markers:
        add([frame_start], True)
    for k, time in enumerate(times):
        space = " " if k else ""
        add(tokenizer.encode(f"{space}{time:.1f} "), False)
        add(frame, True)
    if not config.frame_markers:
        add([frame_end], True)
    add(tokenizer.encode(subtitle_text(subtitles, times)), False)
    return ids, is_visual


def subtitle_text(subtitles, times):
    """The part of the subtitles that the model reads, "" if there is none (docs/molmo2.md 3.2).

    Only entries that reach to within one second of a frame are kept. Subtitles given as one text
    have no times and are read whole.
    """
    if not subtitles:
        return ""
    if isinstance(subtitles, str):
        return f"subtitle\n{subtitles}"
    lines = []
    for start, end, words in subtitles:
        if any(start <= time + 1 and end >= time - 1 for time in times):
            lines.append(f"{start:.1f} - {end:.1f} {words}\n")
    return "subtitle\n" + "".join(lines) if lines else ""


def shift_subtitles(subtitles, clip_start):
    """Subtitles in seconds of the file -> in seconds from the start of the clip.

    Entries that end before the clip starts are dropped; one text without times stays as it is.
    """
    if not subtitles or isinstance(subtitles, str):
        return subtitles
    shifted = []
    for start, end, words in subtitles:
        if end >= clip_start:
            shifted.append((max(start - clip_start, 0.0), end - clip_start, words))
    return shifted
