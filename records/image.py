"""Image files to pixels (docs/molmo2.md 2.1), by Pillow.

in    a path
out   (width, height) from the header alone; pixels (H,W,3) uint8 as displayed

A file that cannot be used raises Unreadable: S20 missing, S21 damaged, S22 of an absurd size.
"""

from contextlib import contextmanager
from pathlib import Path

from PIL import Image

import vision
from records.errors import Unreadable

# Pillow knows more formats than these. EPS would start Ghostscript, and rarely used parsers are
# rarely tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MAX_IMAGE_PIXELS = 89_478_485        # where Pillow begins to warn; decoding one takes up to 1.3 GB
MAX_JPEG_SCANS = 100                 # each scan passes over all pixels again; 10 are usual
EXIF_ORIENTATION = 0x0112            # values of 5 and above exchange width and height
TIFF_WIDTH, TIFF_HEIGHT = 256, 257   # tags
Image.init()


def file_exists(path):
    """Is the path that of a file? A name that is too long for the system is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def absurd_size(width, height, max_pixels):
    """Is it a side of one pixel, a strip, or more pixels than memory should hold?"""
    sides = sorted((width, height))
    return sides[0] < 2 or sides[1] > 200 * sides[0] or width * height > max_pixels


@contextmanager
def parser_errors(path, action):
    """Turns any exception into Unreadable: damaged files make Pillow raise KeyError, struct.error
    and others.
    """
    try:
        yield
    except Unreadable:
        raise
    except Image.DecompressionBombError as error:
        raise Unreadable(f"S22 {path}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreadable(f"S21 cannot {action} {path}: {reason}") from None


@contextmanager
def open_image(path):
    """The Pillow image of a file, not yet decoded; Unreadable with the reason."""
    if not file_exists(path):
        raise Unreadable(f"S20 there is no file {path}")
    formats = [name for name in FORMATS if name in Image.OPEN]
    with parser_errors(path, "read"), Image.open(path, formats=formats) as image:
        width, height = image.size
        if absurd_size(width, height, MAX_IMAGE_PIXELS):
            raise Unreadable(f"S22 {path} is {width} x {height} pixels")
        if image.format == "TIFF":
            # Pillow maps a file with a name into memory, with the sides of the turned image: a TIFF
            # with an orientation would be scrambled.
            image.filename = ""
        yield image


def header(path):
    """(width, height) of an image file as displayed, without decoding it."""
    with open_image(Path(path)) as image:
        width, height = image.size
        if image.format == "TIFF":   # recent versions of Pillow have exchanged the sides already
            width, height = int(image.tag_v2[TIFF_WIDTH]), int(image.tag_v2[TIFF_HEIGHT])
        # Pillow decodes a whole PNG to look for EXIF data behind the pixels. Only what stands in
        # front of them counts here.
        in_front = {"exif", "Raw profile type exif", "XML:com.adobe.xmp"} & set(image.info)
        if image.format == "PNG" and not in_front:
            return width, height
        turned = image.getexif().get(EXIF_ORIENTATION, 1) >= 5
        return (height, width) if turned else (width, height)


def read_image(path):
    """The pixels of an image file as displayed, (H,W,3) uint8, from any mode that Pillow knows."""
    path = Path(path)
    with open_image(path) as image, parser_errors(path, "decode"):
        if image.info.get("progressive"):
            # Inside the data of a JPEG, the byte ff is followed by 00 or by d0 to d7.
            scans = path.read_bytes().count(b"\xff\xda")
            if scans > MAX_JPEG_SCANS:
                raise Unreadable(f"S22 {path} has {scans} scans")
        pixels = vision.to_array(image)
    if pixels.shape[1::-1] != header(path):
        raise Unreadable(f"S21 {path} does not have the size that its header says")
    return pixels
