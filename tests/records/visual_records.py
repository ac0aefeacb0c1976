"""Media files, and random records with every kind of visual input: one image, several images, a
video file, a video given as frames, or only text."""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

import data
import model
from records.reader import Records
from tests.records.samples import write
from text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
CONFIG = data.DataConfig(max_tokens=4096, max_crops=2, max_frames=8)
VISION = model.TOY_VISION
VIDEO = "bigbuckbunny.mp4"
VIDEO_PATH = Path(__file__).parents[1] / "media" / VIDEO
GREY_FRAMES = [f"grey{k}.png" for k in range(6)]
VIDEO_TYPES = ["caption", "qa", "point", "count", "track"]
WORDS = ["cat", "dog", "red", "runs", "ünï", "<|im_end|>"]


def write_media(folder):
    """Writes twelve images of noise, six grey ones (0, 40, .. 200) and a video -> the folder."""
    rng = np.random.default_rng(0)
    for k in range(12):
        w, h = rng.integers(12, 70, 2)
        Image.fromarray(rng.integers(0, 255, (h, w, 3), np.uint8)).save(folder / f"{k}.png")
    for k, name in enumerate(GREY_FRAMES):
        Image.fromarray(np.full((24, 32, 3), 40 * k, np.uint8)).save(folder / name)
    shutil.copy(VIDEO_PATH, folder / VIDEO)
    return folder


def open_records(folder, *records, name="r.jsonl"):
    """Writes the records to a file -> Records."""
    return Records(write(folder / name, *records), folder)


def encoded(folder, record, config=CONFIG, epoch=0):
    return data.encode(open_records(folder, record)[0], TOKENIZER, config, VISION, 0, epoch)


def random_text(rng):
    return " ".join(rng.choice(WORDS, int(rng.integers(1, 9))))


def random_qa(rng):
    if rng.random() < 0.5:
        return {"question": random_text(rng), "options": ["a", "b", random_text(rng)],
                "answer_idx": 1, "shuffle_options": True}
    return {"turns": [{"question": random_text(rng), "answer": random_text(rng),
                       "weight": int(rng.integers(0, 2))} for _ in range(rng.integers(1, 4))]}


def random_annotation(rng, kind, n_images, clip):
    """kind: image, images, video or text. clip: first and last second of a video, else None."""
    times = [round(float(t), 2) for t in rng.uniform(*clip, 3)] if clip else [0] * 3
    types = {"text": ["qa", "text"], "video": VIDEO_TYPES}.get(kind, VIDEO_TYPES[:4])
    chosen = str(rng.choice(types))
    a = {"type": chosen, "weight": float(rng.choice([0, 0.5, 1], p=[0.1, 0.2, 0.7]))}
    if chosen == "qa":
        return a | random_qa(rng)
    if chosen in ("text", "caption"):
        part = {"start": min(times), "end": max(times)}
        return a | {"text": random_text(rng)} | (part if clip and rng.random() < 0.4 else {})
    a["label"] = random_text(rng)
    if chosen == "count":
        return a | {"count": int(rng.integers(0, 9))}
    points = []
    for k, t in enumerate(times):
        x, y = rng.uniform(0, 100, 2).tolist()
        place = {"video": {"t": t}, "images": {"image": int(rng.integers(n_images))}}
        name = {"id": k} if chosen == "track" else {}
        points.append({"x": x, "y": y, **place.get(kind, {}), **name})
    return a | {"coords": "percent", "points": points}


def random_record(rng):
    forms = ["image", "images", "frames", "video file", "text"]
    form = str(rng.choice(forms, p=[0.3, 0.25, 0.2, 0.02, 0.23]))
    n_images = int(rng.integers(2, 6))
    record = {}
    clip = None
    if form == "image":
        record["image"] = f"{rng.integers(12)}.png"
    elif form == "images":
        record["images"] = [f"{k}.png" for k in rng.integers(0, 12, n_images)]
    elif form == "frames":
        record["video"] = {"frames": GREY_FRAMES, "fps": 2.0}
        clip = (0, 3)
        if rng.random() < 0.5:
            clip = (0.5, 2.4)
            record["video"] |= {"start": 0.5, "end": 2.4}
    elif form == "video file":
        record["video"] = {"path": VIDEO, "start": 1.0, "end": 3.0}
        clip = (1, 3)
    if clip and rng.random() < 0.5:
        record["subtitles"] = [{"start": 0.2, "end": 1.5, "text": "hello"},
                               {"start": 2.0, "end": 2.2, "text": "there"}]
    kind = "video" if clip else form
    record["annotations"] = [random_annotation(rng, kind, n_images, clip)
                             for _ in range(int(rng.integers(1, 6)))]
    return record
