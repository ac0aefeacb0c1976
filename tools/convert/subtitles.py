"""Finds the subtitle file of a video in the folder of --subtitles (docs/convert.md)."""

import os
import re
from functools import lru_cache
from pathlib import Path

from records.errors import Unreadable
from records.parse import as_object
from records.subtitles import read_subtitles

LANGUAGE = re.compile(r"\.[a-z]{2,3}(?:[-_]\w+(?:-\w+)*)?$")  # the end of film.en and film.zh-Hans


class SubtitleFolder:
    """The subtitle files in a folder, and the videos that have their names. start: the folder to
    which the paths of the videos are relative."""

    def __init__(self, folder, start):
        self.start = start
        self.paths = sorted(path for path in folder.rglob("*") if path.suffix in (".srt", ".vtt"))
        self.files = {}  # {path in the folder, without suffix, with and without language: files}
        self.videos = {}  # {file: the videos to which it may belong}
        self.used = set()
        self.read = lru_cache(maxsize=1)(read_subtitles)  # a video may have several records
        for path in self.paths:
            name = str(path.relative_to(folder).with_suffix(""))
            for key in {name, LANGUAGE.sub("", name)}:
                self.files.setdefault(key, []).append(path)

    def find(self, video):
        """The absolute path of a video -> its subtitle files, [] if there are none. It is one file,
        unless there are files in several languages."""
        best = []
        parts = Path(video).with_suffix("").parts
        for k in range(1, len(parts)):  # x/film comes before film
            files = self.files.get(os.path.join(*parts[k:]), [])
            files = [file for file in files if file.stem == parts[-1]][:1] or files
            for file in files:
                self.videos.setdefault(file, set()).add(video)
            best = best or files
        return best

    def add_to(self, record):
        """Adds subtitles to the record of a video, unless it has its own. Unreadable if their file
        cannot be read, or if there are several."""
        path = as_object(record["video"]).get("path")
        files = self.find(os.path.normpath(self.start / path)) if path else []
        if "subtitles" in record or not files:
            return
        if len(files) > 1:
            raise Unreadable("several subtitle files", f"{', '.join(map(str, files))}: give the "
                             f"file that you want the name {Path(path).stem}{files[0].suffix}")
        fields = ("start", "end", "text")
        record["subtitles"] = [dict(zip(fields, entry, strict=True))
                               for entry in self.read(files[0])]
        self.used.update(files)

    def find_mistake(self):
        """-> a sentence about a file that was used but has the name of several videos, or None."""
        for file in sorted(self.used):
            if len(self.videos[file]) > 1:
                return (f"{file} has the name of several videos: "
                        f"{', '.join(sorted(self.videos[file]))}; move it to a folder that has the "
                        "name of the folder of its video (docs/convert.md)")
        return None
