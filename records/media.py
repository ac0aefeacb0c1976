"""The images and videos of a record: files, or videos as lists of images.

in    paths
out   sizes from headers alone; pixels (H,W,3) uint8 as displayed (docs/molmo2.md 2.1)
"""

import json
import os
import re
import warnings
import zlib
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from PIL import Image, UnidentifiedImageError

import vision
from records.errors import Unreadable, require_file
from records.video import decode, displayed_frames, probe

EXIF_ORIENTATION = 0x0112  # values from 5 to 8 exchange width and height
# Formats that Pillow cannot read: the first bytes of a file, and a command that converts it.
UNKNOWN_FORMATS = {
    "HEIC or AVIF": (rb"....ftyp(hei|hev|mif|msf|avi)", "heif-convert a.heic a.jpg"),
    "JPEG XL": (rb"\xff\x0a|....JXL ", "djxl a.jxl a.png"),
    "SVG": (rb"(\xef\xbb\xbf)?\s*(<(\?xml|!--|!DOCTYPE svg).*)?<svg", "rsvg-convert a.svg > a.png"),
    "OpenEXR": (rb"v/1\x01", "magick a.exr a.png"),
    "Radiance HDR": (rb"#\?R", "magick a.hdr a.png"),
}
# An MP4 or MOV file (but for HEIC and AVIF, see above), Matroska or WebM, AVI.
VIDEO = rb"....ftyp(?!hei|hev|mif|msf|avi)|\x1aE\xdf\xa3|RIFF....AVI "
MAX_PIXELS = Image.MAX_IMAGE_PIXELS  # Pillow warns if an image has more
MAX_FRAMES = 2048  # per call of frames(): ffmpeg receives their times as one argument


@contextmanager
def open_image(path):
    """Opens an image without decoding it. Errors inside the `with` block become Unreadable, too."""
    require_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path)
        with image:
            yield image
    except UnidentifiedImageError:
        with open(path, "rb") as file:
            head = file.read(4096)
        if re.match(VIDEO, head, re.S):
            raise Unreadable("unknown format", f"{path}: this is a video; give it as a video, not "
                             "as an image") from None
        for name, (start, command) in UNKNOWN_FORMATS.items():
            if re.match(start, head, re.S):
                raise Unreadable("unknown format", f"{path}: Pillow cannot read this {name} file; "
                                 f"convert it, for example with: {command}") from None
        raise Unreadable("damaged image", f"{path}: Pillow finds no image in this file") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise Unreadable("too large", f"{path}: the image has more than {MAX_PIXELS:,} pixels; "
                         "make it smaller, for example with: magick a.jpg -resize 50% b.jpg"
                         ) from None
    except Exception as error:  # Pillow raises KeyError, struct.error and more
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreadable("damaged image", f"{path}: {reason}") from None


def image_size(path):
    """(width, height) of an image as displayed, without decoding it. Raises Unreadable."""
    with open_image(path) as image:
        return displayed_size(image, path)


def displayed_size(image, path):
    """(width, height) as displayed, for an image that open_image has opened."""
    # Pillow gives the size of a TIFF after the rotation. To look for EXIF data behind the
    # pixels of a PNG, it would decode the whole image.
    in_front = {"exif", "Raw profile type exif", "XML:com.adobe.xmp"} & set(image.info)
    is_png = image.format == "PNG" and not in_front
    if image.format == "TIFF" or (is_png and not has_exif(path)):
        return image.size
    turned = image.getexif().get(EXIF_ORIENTATION) in (5, 6, 7, 8)
    return image.size[::-1] if turned else image.size


def has_exif(path):
    """Has a PNG file an eXIf chunk? A chunk consists of length, name, content and checksum."""
    with open(path, "rb", buffering=0) as file:  # unbuffered, so only the chunk heads are read
        file.seek(8)
        while len(head := file.read(8)) == 8 and head[4:] != b"eXIf":
            file.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)
    return head[4:] == b"eXIf"


def read_image(path):
    """The pixels of an image as displayed, (H,W,3) uint8. Raises Unreadable."""
    with open_image(path) as image:
        size = displayed_size(image, path)
        pixels = vision.to_array(image)
    if pixels.shape[1::-1] != size:  # Pillow decodes some TIFF files wrongly
        raise Unreadable("size differs", f"{path} is not as large as its header says")
    return pixels


@dataclass(frozen=True)
class FrameFolder:
    """A video given as a list of images. Frame k appears at first + k / fps seconds."""
    paths: list
    fps: float
    duration: float  # seconds
    first: float = 0.0

    @property
    def times(self):
        return np.minimum(self.first + np.arange(len(self.paths)) / self.fps, self.duration)


def frames(video, times):
    """Yields the frame, (H,W,3) uint8, that is displayed at each of the times. Raises Unreadable.

    video: a Video or a FrameFolder. times: ascending seconds. If a frame is displayed at several
    of them, the same array is yielded again.
    """
    times = np.asarray(times, dtype=np.float64)
    assert (np.diff(times) >= 0).all(), f"times must ascend: {times}"
    shown = displayed_frames(video.times, times)
    wanted, counts = np.unique(shown, return_counts=True)
    assert len(wanted) <= MAX_FRAMES, f"{len(wanted)} frames in one call"
    if not len(wanted):  # the crops of a video may all belong to other ranks
        return
    if isinstance(video, FrameFolder):
        decoded = (read_image(video.paths[k]) for k in wanted)
    else:
        decoded = decode(video, wanted)
    # stops ffmpeg when the caller stops iterating
    with closing(decoded):
        for pixels, count in zip(decoded, counts, strict=True):
            yield from repeat(pixels, count)


def checksum_of(entry):
    """Bytes -> their CRC-32 as 8 hexadecimal digits."""
    return b"%08x" % zlib.crc32(entry)


class Probes:
    """A cache of video sizes in a file. Every process appends to this file.

    Planning needs the sizes in every epoch, and a probe reads a whole video.
    """

    def __init__(self, path):
        self.path = path
        self.known = None  # {path, bytes and time of change: size, or an Unreadable}

    def read(self):
        """Reads the file, at the first call, so that copies for other processes are small."""
        self.known = {}
        with suppress(OSError), open(self.path, "rb") as file:
            for line in file:
                # a killed process may leave half a line, and a disk may change bits
                checksum, _, entry = line.rstrip().partition(b" ")
                if checksum == checksum_of(entry):
                    key, size = json.loads(entry)
                    self.known[key] = tuple(size)

    def __call__(self, video):
        """Path -> (width, height, seconds, half a frame in seconds). Raises Unreadable."""
        require_file(video)
        if self.known is None:
            self.read()
        status = video.stat()
        key = f"{video} {status.st_size} {status.st_mtime_ns}"
        if key not in self.known:
            try:
                found = probe(video)
                half_frame = found.duration / len(found.times) / 2
                self.known[key] = (found.width, found.height, found.duration, half_frame)
                with suppress(OSError), open(self.path, "ab") as file:
                    entry = json.dumps([key, self.known[key]]).encode()
                    file.write(checksum_of(entry) + b" " + entry + b"\n")
            except Unreadable as error:  # in memory, so that ffmpeg hangs only once for this file
                self.known[key] = error
        if isinstance(self.known[key], Unreadable):
            # every raise adds to the traceback, which would keep all callers in memory
            raise self.known[key].with_traceback(None)
        return self.known[key]
