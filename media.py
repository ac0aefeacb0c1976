"""Files to pixels (spec 2.1, 3.1): images of any kind that Pillow knows.

in    a path
out   (width, height) from the header alone; pixels (H,W,3) uint8 as displayed

Whatever a file holds, it costs its record and never the run: Unreadable, with a code (S20 to S22) and the reason.
"""

from pathlib import Path

from PIL import Image

import vision


class Unreadable(Exception):
    """A media file that cannot be used; costs the record, never the run (codes S20 to S22)."""


# what Pillow raises on files that are not what they seem; UnidentifiedImageError is an OSError
_DAMAGED = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


def _open(path):
    if not path.is_file():
        raise Unreadable(f"S20 no file {path}")
    try:
        picture = Image.open(path)
    except _DAMAGED as e:
        raise Unreadable(f"S21 cannot read {path}: {e}") from None
    w, h = picture.size
    if min(w, h) < 2 or max(w, h) > 200 * min(w, h):
        raise Unreadable(f"S22 {path} is {w} x {h} pixels")
    return picture


def header(path):
    """(width, height) of an image file as displayed, without decoding it."""
    with _open(path) as picture:
        w, h = picture.size
        # of a PNG, Pillow decodes all to look for EXIF data behind the pixels: take what stands in front
        known = picture.format != "PNG" or {"exif", "Raw profile type exif", "XML:com.adobe.xmp"} & set(picture.info)
        try:
            turned = known and picture.getexif().get(0x0112, 1) >= 5
        except _DAMAGED as e:
            raise Unreadable(f"S21 cannot read {path}: {e}") from None
        return (h, w) if turned else (w, h)


def read_image(path):
    """(H,W,3) uint8 as displayed, of any mode that Pillow knows; Unreadable with the reason otherwise."""
    path = Path(path)
    with _open(path) as picture:
        try:
            pixels = vision.to_array(picture)
        except _DAMAGED as e:
            raise Unreadable(f"S21 cannot decode {path}: {e}") from None
    if pixels.shape[1::-1] != header(path):
        raise Unreadable(f"S21 {path} is not of the size that its header says")
    return pixels
