"""Images and videos of published sets: found in a folder, written to it, or to be
fetched."""

import hashlib
import os
import re
from pathlib import Path, PurePosixPath

from tools.prepare.annotations import Skip, number_of, require, text_of

VIDEO_SUFFIXES = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
MAGIC_BYTES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}


def image_suffix(data):
    """"png" of an image file's bytes; Skip if they are not an image."""
    if data[8:12] == b"WEBP":
        return "webp"
    for magic, suffix in MAGIC_BYTES.items():
        if data.startswith(magic):
            return suffix
    raise Skip("bytes that are no image")


def check_path(path):
    """The path of a media file that a row names; Skip if it leaves the media folder."""
    leaves = path.startswith("/") or ".." in PurePosixPath(path).parts
    require(not leaves, "path that leaves the media folder")
    return path


class Media:
    """The folder that the paths of records start from."""

    def __init__(self, root):
        self.root = Path(root)
        self.by_stem = {}            # file name without extension -> paths
        self.by_folder = {}          # folder name -> paths of the videos in it
        for folder, subfolders, names in os.walk(self.root, followlinks=True):
            subfolders.sort()        # so that the same file is found on every machine
            for name in sorted(names):
                path = Path(folder, name).relative_to(self.root).as_posix()
                self.by_stem.setdefault(os.path.splitext(name)[0], []).append(path)
                if name.lower().endswith(VIDEO_SUFFIXES):
                    self.by_folder.setdefault(os.path.basename(folder), []).append(path)

    @staticmethod
    def stem(name):
        """The name of a video without its extension; "a.b" has none."""
        return os.path.splitext(name)[0] if name.lower().endswith(VIDEO_SUFFIXES) else name

    def find(self, name, video=False):
        """Path of the file of this name, whatever its extension, or else of a video in
        a folder of this name; None if there is none. "sora2/clip" must lie in a folder
        sora2 or sora2-2fps."""
        folder, _, stem = f"/{name}".rpartition("/")
        paths = self.by_stem.get(stem, [])
        if video:
            paths = [path for path in paths if path.lower().endswith(VIDEO_SUFFIXES)]
            paths += self.by_folder.get(stem, [])
        for path in paths:
            if f"/{os.path.dirname(path)}".endswith((folder, f"{folder}-2fps")):
                return path
        return None

    def image_by_url(self, url, sha256=None):
        """An image whose file is called by the sha256 of its URL. The argument is the
        sha256 of its bytes."""
        require(text_of(url) and not re.search(r"[\t\r\n]", url), "no image")
        name = hashlib.sha256(url.encode()).hexdigest()
        image = {"path": self.find(name) or name, "url": url}
        if re.fullmatch("[0-9a-f]{64}", sha256 or ""):
            image["sha256"] = sha256
        return image

    def image_of_cell(self, cell):
        """An image cell: {bytes, path}, bytes, a path or a URL. Bytes become a file,
        once."""
        data = path = cell
        if isinstance(cell, dict):
            data = cell.get("bytes")
            path = cell.get("path")
        if data and isinstance(data, bytes):
            name = f"{hashlib.sha256(data).hexdigest()}.{image_suffix(data)}"
            path = self.root / name
            if not path.exists():
                self.root.mkdir(parents=True, exist_ok=True)
                draft = self.root / f"{name}.draft"      # a kill leaves no half of an image
                draft.write_bytes(data)
                draft.replace(path)
            return name
        require(path, "no image")
        if path.startswith(("http:", "https:")):
            return self.image_by_url(path)
        return check_path(path)

    def video(self, *names, start=None, end=None):
        """{"video": ..} of the video that goes by one of these names; if none is found,
        by the first of them, as an mp4 file."""
        require(all(names), "no video")
        path = None
        for name in names:
            path = path or self.find(self.stem(name), video=True)
        if not path:
            has_suffix = self.stem(names[0]) != names[0]
            path = names[0] if has_suffix else f"{names[0]}.mp4"
        video = {"path": check_path(path)}
        if number_of(start) is not None and number_of(end) is not None:
            require(0 <= start < end, "clip that ends before it starts")
            video |= {"start": start, "end": end}
        return {"video": video}
