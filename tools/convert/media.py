"""Finds images and videos in the media folder, and writes images of tables to files."""

import hashlib
import os
import re
from functools import cached_property
from pathlib import Path

from records.errors import Unreadable, draft, plural
from tools.convert.make import number_of, skip_unless, text_of

VIDEO_SUFFIXES = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
UNFINISHED = (".part", ".draft")  # a download that was interrupted


def check_path(path):
    """Returns the path of a media file. Unreadable if it is outside the media folder."""
    leaves = path.startswith("/") or ".." in path.split("/")
    skip_unless(not leaves, "path that leaves the media folder")
    return path


class Media:
    """The media folder. The paths that layouts make are relative to it. store: the folder for
    images that a table contains."""

    def __init__(self, root, store=None):
        self.root = Path(root)
        self.store = Path(store or root)

    @cached_property
    def index(self):
        """-> {file name without extension: paths}, {folder name: paths of the videos in it}."""
        by_stem = {}
        by_folder = {}
        for folder, _, names in os.walk(self.root, followlinks=True):
            for name in names:
                if name.endswith(UNFINISHED):
                    continue
                path = Path(folder, name).relative_to(self.root).as_posix()
                by_stem.setdefault(os.path.splitext(name)[0], []).append(path)
                if name.lower().endswith(VIDEO_SUFFIXES):
                    by_folder.setdefault(os.path.basename(folder), []).append(path)
        return by_stem, by_folder

    def images_here(self, stem):
        """The absolute paths of the images in the folder itself that have this name."""
        return [str(Path(self.root, path).absolute()) for path in self.index[0].get(stem, ())
                if "/" not in path and path.lower().endswith(IMAGE_SUFFIXES)]

    def only_image(self, stem):
        """The one image in the folder itself that has this name."""
        found = self.images_here(stem)
        number = plural(len(found), "image")
        skip_unless(len(found) == 1, "missing file",
                    f"{self.root} has {number} with the name {stem}, but must have exactly one")
        return found[0]

    @staticmethod
    def stem(name):
        """The name of a video without the extension of a video file; "a.b" is unchanged."""
        stem, suffix = os.path.splitext(name)
        return stem if suffix.lower() in VIDEO_SUFFIXES else name

    def find(self, name, video=False):
        """Path of the file with this name and any extension; for a video also the path of a video
        in a folder with this name; None if there is none. "sora2/clip" must be in a folder
        sora2 or sora2-2fps."""
        folder, _, stem = f"/{name}".rpartition("/")
        by_stem, by_folder = self.index
        paths = by_stem.get(stem, [])
        if video:
            paths = [path for path in paths if path.lower().endswith(VIDEO_SUFFIXES)]
            paths += by_folder.get(stem, [])
        ends = (folder, f"{folder}-2fps")
        return self.only(name, {path for path in paths
                                if f"/{os.path.dirname(path)}".endswith(ends)})

    def only(self, name, paths):
        """The path that is found under a name, or None. Unreadable if there are several."""
        if len(paths) > 1:
            raise Unreadable("several files with the name of the row", f"{self.root}: '{name}' can "
                             f"mean {' or '.join(sorted(paths))}; keep one file for each name, or "
                             "give each set its own --media")
        return next(iter(paths), None)

    def by_url(self, url, sha256=None):
        """An image by its URL. The name of its file is the sha256 of the URL. sha256: of the
        bytes."""
        skip_unless(text_of(url) and not re.search(r"[\t\r\n]", url), "no image")
        name = hashlib.sha256(url.encode()).hexdigest()
        image = {"path": self.only(name, self.index[0].get(name, ())) or name, "url": url}
        if re.fullmatch("[0-9a-f]{64}", sha256 or ""):
            image["sha256"] = sha256
        return image

    def image(self, cell):
        """A cell with {bytes, path}, bytes, a path or a URL. Bytes are written to a new file."""
        if isinstance(cell, dict):
            cell = cell.get("bytes") or cell.get("path")
        skip_unless(cell, "no image")
        if isinstance(cell, str):
            is_url = cell.startswith(("http:", "https:"))
            return self.by_url(cell) if is_url else check_path(cell)
        name = hashlib.sha256(cell).hexdigest()
        path = self.store / name
        if not path.exists():
            with draft(path) as hidden:
                hidden.write_bytes(cell)
        return name if self.store == self.root else str(path.absolute())

    def images(self, cells):
        """{"images": ..} from several cells. Molmo2 uses two to five."""
        images = [self.image(cell) for cell in cells]
        skip_unless(2 <= len(images) <= 5, "not 2 to 5 images")
        return {"images": images}

    def visual(self, row):
        """{"image": ..} or {"video": ..} from the columns of a row."""
        if "image_url" in row:
            return {"image": self.by_url(row["image_url"], row.get("image_sha256"))}
        if "image" in row:
            return {"image": self.image(row["image"])}
        return self.video(row["video_id"])

    def video(self, *names, folder="", start=None, end=None):
        """{"video": ..} with the first file found under one of these names. If none is found, the
        path is the first name, as an mp4 file if it has no extension of a video. folder: the
        file must be in a folder with this name."""
        skip_unless(all(names), "no video")
        names = [f"{folder}/{name}" if folder else name for name in names]
        found = (self.find(self.stem(name), video=True) for name in names)
        first = names[0] if self.stem(names[0]) != names[0] else f"{names[0]}.mp4"
        video = {"path": check_path(next(filter(None, found), first))}
        if number_of(start) is not None and number_of(end) is not None:
            skip_unless(0 <= start < end, "clip that ends before it starts")
            video |= {"start": start, "end": end}
        return {"video": video}
