"""A request of the page -> pictures, answers, and the attention of each token of an answer.

A request has "prompts" and one of these: "scene" (a scene of toy/shapes.py, or the seed of one),
"video" (the seed of a toy video) or "file" ({"name", "url"}, an image or video as a data: URL).
"""

import base64
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

import vision
from evaluation.answer import Shown, open_images, open_video, style_hint
from evaluation.generate import generate
from evaluation.metrics import count_from_text, hit_in_mask, hit_nearby, score_images
from evaluation.prompts import encode_prompt
from records.errors import Unreadable, UserError
from text.points import parse_points
from tools.generate import open_toy_scene
from tools.play.recorder import AttentionRecorder
from tools.view import data_uri
from toy.images import MAX_OBJECTS, caption_of, find_named
from toy.shapes import COLOURS, SHAPES, SIZE, are_apart, mask_of, render

MAX_NEW = 256  # maximum number of tokens in an answer
MAX_PROMPTS = 8
MAX_TEXT = 10_000  # characters of all prompts of a request
MAX_SIDE = 2048  # pixels of a picture in a reply
MAX_SHARES = 5_000_000  # in a reply; if there are more, the page only gets the mean of the blocks
LABELS = {f"{colour} {shape}" for colour in ("any", *COLOURS) for shape in ("shape", *SHAPES)}


@torch.inference_mode()  # every operation of the small model takes less time than with no_grad
def reply_to(request, loaded, sampling):
    """-> the reply for page.html. loaded: (model, tokenizer, data config of inference)."""
    model, tokenizer, config = loaded
    check_prompts(request.get("prompts", ()))
    shown, scene, true = open_request(request, config, model.config.vision)
    prompts = [encode_prompt(shown.images, [(text, None)], tokenizer, config,
                             model.config.vision, shown.clip)
               for text in request["prompts"]]
    for prompt in prompts:
        prompt.images = prompts[0].images  # the same array is encoded only once
    recorder = AttentionRecorder()
    found = generate(model, prompts, tokenizer.stops, MAX_NEW, sampling, recorder=recorder)
    shares = [recorder.shares(k, len(found[k]))[..., p.pool_dst] for k, p in enumerate(prompts)]
    n_shares = sum(map(torch.numel, shares))
    answers = []
    for text, ids, by_block in zip(request["prompts"], found, shares, strict=True):  # (L,t,M)
        # a character may have several tokens; it is shown at the last one
        so_far = [tokenizer.decode(ids[:n]).rstrip("\ufffd") for n in range(len(ids) + 1)]
        mean = by_block.mean(0, keepdim=True)
        kept = torch.cat([mean, by_block]) if n_shares <= MAX_SHARES else mean
        cut = f"the answer is cut at {MAX_NEW} tokens" if len(ids) == MAX_NEW else ""
        answers.append({
            "prompt": text,
            "tokens": [later[len(former) :] for former, later in pairwise(so_far)],
            "points": parse_points(so_far[-1], 1, 1, open_end=True),
            "verdict": None if cut else mark(text, so_far[-1], scene, true),
            "hint": "; ".join(filter(None, [cut, style_hint(text, config)])),
            "shares": (1e6 * kept).round().int().tolist()})
    return {"answers": answers, "scene": scene, "true": true, "size": shown.sizes[0],
            "unusual": bool(scene) and is_unusual(scene["objects"]),
            "times": shown.clip and shown.clip.times,
            "tiling": vision.tiling(*shown.sizes[0][::-1], config.max_crops, model.config.vision),
            "pictures": list(map(picture_of, shown.images or shown.clip.frames))}


def check_prompts(prompts):
    """UserError if these are no prompts, or more than one request may have."""
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise UserError(f'"prompts" must be a list of 1 to {MAX_PROMPTS} texts')
    length = sum(map(len, prompts))
    if length > MAX_TEXT:
        raise UserError(f"the prompt has {length:,} characters, but a request may have at most "
                        f"{MAX_TEXT:,}; give a shorter prompt")


def picture_of(array):
    """(H,W,3) uint8 -> data: URI of a JPEG that is not larger than a screen."""
    picture = Image.fromarray(array)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return data_uri(picture, "jpeg", quality=95, subsampling=0)


def open_request(request, config, vision_config):
    """-> Shown, the scene or None, and the true points of a video [(time, id, x, y), ..]."""
    if "file" in request:
        return open_file(request["file"], request["prompts"][0], config, vision_config), None, []
    if "video" in request:
        shown, record = open_toy_scene(request["video"], is_video=True)
        (track,) = (a for a in record["annotations"] if a.get("label") == "any shape")
        points = [(p["t"], p["id"], p["x"] / SIZE, p["y"] / SIZE) for p in track["points"]]
        return shown, None, points
    scene = request["scene"]
    if isinstance(scene, int):
        _, record = open_toy_scene(scene, is_video=False)
        scene = record["source"].scene(record["index"])
    return Shown([render(scene)], None, [(SIZE, SIZE)]), scene, []


def open_file(file, prompt, config, vision_config):
    """-> Shown. The media type from the browser decides whether the file is a video."""
    kind, _, content = file["url"].partition(";base64,")
    with TemporaryDirectory() as folder:  # ffmpeg can only read files
        path = Path(folder, "file")
        path.write_bytes(base64.b64decode(content))
        try:
            if kind.startswith(("data:video/", "data:image/gif")):
                return open_video(path, prompt, config, vision_config)
            return open_images([path], config)
        except Unreadable as error:
            raise Unreadable(error.args[-1].replace(str(path), file["name"])) from None


def is_unusual(objects):
    """Are there more objects than in a training image, or are two of them closer?"""
    pairs = combinations(objects, 2)
    return len(objects) > MAX_OBJECTS or not all(
        are_apart(one["x"], one["y"], one["r"], other) for one, other in pairs)


def mark(prompt, text, scene, true):
    """-> (a sentence, "right" or "wrong"), or None if the right answer is not known. true: the true
    points of a toy video."""
    style, _, label = map(str.strip, prompt.partition(":"))
    objects = scene["objects"] if scene else []
    named = [objects[k] for k in find_named(objects, label)]
    if true and label == "any shape" and style == "video_point_track_per_frame":
        points = [(round(p.frame, 1), p.x, p.y) for p in parse_points(text, SIZE, SIZE)]
        true = [(round(t, 1), x * SIZE, y * SIZE) for t, _, x, y in true]
        return mark_points(points, true, hit_nearby(true, [(SIZE, SIZE)] * len(true)))
    if true and label == "any shape" and style == "video_count":
        style = "count"
        is_right = count_from_text(text) == len({name for _, name, *_ in true})
    elif not scene:
        return None
    elif style == "long_caption":
        is_right = text == caption_of(objects)
    elif style == "count" and label in LABELS:
        is_right = count_from_text(text) == len(named)
    elif style == "pointing" and label in LABELS:
        points = [(p.frame, p.x, p.y) for p in parse_points(text, SIZE, SIZE)]
        return mark_points(points, [(1, o["x"], o["y"]) for o in named],
                           hit_in_mask([mask_of(o) for o in named]))
    else:
        return None
    kind = "right" if is_right else "wrong"
    return f"{style.removeprefix('long_')} {kind}", kind


def mark_points(points, true, hit):
    """Points [(image or time, x, y), ..] -> as `mark`. hit: see score_images."""
    n_right = round(score_images(points, true, hit).recall * len(true))
    n = max(len(points), len(true))
    return f"{n_right} of {n} points right", "right" if n_right == n else "wrong"
