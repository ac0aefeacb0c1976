"""Composed videos: cut-outs that move over a film, as records with tracks (toy/photos.py).

in    Photos, which draws cut-outs and backgrounds of a part; frames of a real film, or none
out   frames [(S,S,3) uint8, ..], two a second, and the visible masks of each object on each frame;
      a record with a track for every kind, the count of one, and captions

Without a film, the camera pans over a photograph.
"""

from itertools import islice
from typing import NamedTuple

import numpy as np
from PIL import Image

from records.media import frames, probe
from records.mixture import rng_for
from toy.photo_records import captions_of
from toy.photos import MIN_VISIBLE, VISIBLE, CutOut, Shadow, centre_of, paste

FPS = 2
N_FRAMES = (5, 9)                    # the fewest and the most of a video
MAX_MOVING = 3                       # objects
MAX_FILM_SECONDS = 120               # that are read of a film


class Moving(NamedTuple):
    cut_out: CutOut
    masks: np.ndarray                # (frames,S,S) bool, what is visible
    n_pixels: np.ndarray             # (frames,) of it, before other objects hid a part

    def frames_seen(self):
        """The numbers of the frames that show enough of it for a point."""
        visible = self.masks.sum((1, 2))
        return np.flatnonzero(visible >= np.maximum(MIN_VISIBLE * self.n_pixels, 1)).tolist()


def read_film(path):
    """A video file -> PIL images, two a second; Unreadable if it cannot be decoded."""
    video = probe(path)
    times = np.arange(0, min(video.duration, MAX_FILM_SECONDS), 1 / FPS)
    return [Image.fromarray(pixels) for pixels in frames(video, times)]


class Films:
    """Video i of a part is a function of (seed, part, i)."""

    def __init__(self, photos, film=()):
        self.photos = photos
        self.film = film

    def video(self, i):
        """-> [(S,S,3) uint8, ..], [Moving, ..] from left to right on the first frame on which each
        is seen; objects that are never seen are left out."""
        photos = self.photos
        rng = rng_for(photos.seed, "films", photos.part, i)
        n_frames = int(rng.integers(N_FRAMES[0], N_FRAMES[1] + 1))
        canvases = self._grounds(rng, n_frames)
        n = int(rng.integers(1, MAX_MOVING + 1))
        moving = []
        for cut_out, pixels in islice(photos.objects(rng, n), n):
            path = np.linspace(photos.place(rng), photos.place(rng), n_frames)
            shadow = Shadow.draw(rng)
            masks = np.zeros((n_frames, photos.size, photos.size), bool)
            for k in range(n_frames):
                layer = photos.layer(pixels, *path[k])
                canvases[k] = paste(canvases[k], layer, shadow)
                masks[k] = np.asarray(layer.getchannel("A")) >= VISIBLE
            for other in moving:
                other.masks[masks] = False
            moving.append(Moving(cut_out, masks, masks.sum((1, 2))))
        seen = [m for m in moving if m.frames_seen()]
        seen.sort(key=lambda m: centre_of(m.masks[m.frames_seen()[0]]))
        return [np.asarray(canvas) for canvas in canvases], seen

    def _grounds(self, rng, n_frames):
        """A square of the film, or one that moves over a photograph, for every frame."""
        size = self.photos.size
        if not self.film:
            wide = self.photos.ground(rng, 2 * size)
            corners = np.linspace(rng.uniform(0, size, 2), rng.uniform(0, size, 2), n_frames)
            return [wide.crop((int(x), int(y), int(x) + size, int(y) + size)) for x, y in corners]
        first = int(rng.integers(max(len(self.film) - n_frames, 0) + 1))
        images = [self.film[min(first + k, len(self.film) - 1)] for k in range(n_frames)]
        side = min(images[0].size)
        left = rng.uniform(0, images[0].width - side)
        top = rng.uniform(0, images[0].height - side)
        box = (left, top, left + side, top + side)
        return [image.resize((size, size), Image.BILINEAR, box) for image in images]


def video_record_of(films, i, moving, paths, languages):
    """The record of video i, whose frames lie at paths."""
    photos = films.photos
    rng = rng_for(photos.seed, "film questions", photos.part, i)
    kinds = [m.cut_out.kind for m in moving]
    annotations = []
    for kind in sorted(set(kinds)):
        numbers = [j for j, name in enumerate(kinds) if name == kind]
        points = []
        for j in numbers:
            for k in moving[j].frames_seen():
                x, y = centre_of(moving[j].masks[k])
                points.append({"t": k / FPS, "id": j, "x": x + 0.5, "y": y + 0.5})
        annotations.append({"type": "track", "label": kind, "coords": "pixel", "fps": FPS,
                            "points": points, "meta": {"objects": numbers}})
    if kinds:
        counted = kinds[int(rng.integers(len(kinds)))]
        annotations.append({"type": "count", "label": counted, "count": kinds.count(counted)})
    annotations += captions_of(photos, kinds, languages)
    return {"id": f"{photos.part}-video-{i}", "annotations": annotations,
            "video": {"frames": paths, "fps": FPS, "width": photos.size, "height": photos.size},
            "meta": {"cut_outs": [m.cut_out.name for m in moving]}}


def video_masks_of(record, moving):
    """{name in masks.npz: array} of its tracks: (n,frames,S,S) bool, and their times."""
    arrays = {}
    for k, annotation in enumerate(record["annotations"]):
        if annotation["type"] == "track":
            masks = np.array([moving[j].masks for j in annotation["meta"]["objects"]])
            arrays[f"{record['id']}/{k}"] = masks
            arrays[f"{record['id']}/{k}/times"] = np.arange(masks.shape[1]) / FPS
    return arrays
