"""Ask a model about images or a video, once or in a conversation: prefill, then decoding with a KV cache, under the same mask rule.

    python -m tools.generate --model runs/stage1-tiny --image cat.png --prompt "pointing: red circle" --draw out.png
    python -m tools.generate --model Molmo2-4B --images a.jpg b.jpg --prompt "What has changed?" --dtype bfloat16
    python -m tools.generate --model Molmo2-4B --video match.mp4 --subtitles match.srt --prompt "Point to every goal." --draw goals.png
    python -m tools.generate --model Molmo2-4B --image cat.png --chat

The cache is one wrapper per block around `attend`; the model knows nothing of it. Prompts of different lengths make
one batch: what pads a short one is a document of its own, so nothing can see it.

    slot       0 1 2 3 4 5 | 6 7 ..                 prompts of 6 and 4 tokens, then what is generated
    row 0 doc  0 0 0 0 0 0 | 0 0                    pos 0 1 2 3 4 5 | 6 7
    row 1 doc  0 0 0 0-1-1 | 0 0                    pos 0 1 2 3 . . | 4 5

At the released settings (spec 14): 24 crops, 20 images, 384 frames, greedy. Models trained with fewer crops (the toy) keep theirs.
"""

import argparse
import itertools
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import attention
import data
import packing
import vision
from evaluation.pictures import draw_points, strip
from records import media
from stages import stage3
from text import tokenizer as text
from training import weights

# how a released checkpoint is asked and fine-tuned, unless a run directory says otherwise
RELEASED = {key.removeprefix("data."): value for key, value in stage3.RECIPE.items() if key.startswith("data.")}

# ---------------------------------------------------------------------------------------------------------------
# decoding


class Cache:
    """Keys and values of every block, (B,S,G,D) each, allocated once; slots start..stop belong to the present call."""

    def __init__(self, model, B, S):
        c, p = model.config, model.norm.weight
        self.kv = torch.zeros(c.n_layer, 2, B, S, c.n_kv_head, c.head_dim, device=p.device, dtype=p.dtype)
        self.start = self.stop = 0
        self.tokens, self.images = [], None          # of a single row: what the slots hold, for the next turn of a conversation

    def attends(self, attend):
        """One attend per block that reads and writes its own slot of the cache; masks from attention.allow_by_rows."""

        def block(kv):
            def cached(q, k, v, masks):
                kv[0, :, self.start : self.stop], kv[1, :, self.start : self.stop] = k, v
                parts = [attend(q[:, rows], kv[0, :, :keys], kv[1, :, :keys], mask) for rows, keys, mask in masks]
                return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

            return cached

        return [block(kv) for kv in self.kv]

    def continued(self, model, prompt, S):
        """This cache with S slots, holding what of `prompt` it held already: the tokens up to the first that differs, if the images
        are the same, and never the last one, whose logits begin the answer."""
        pairs = zip(self.tokens, prompt.tokens[:-1].tolist(), strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not np.array_equal(self.images, prompt.images):
            same = 0
        longer = Cache(model, 1, S)
        longer.kv[:, :, :, :same] = self.kv[:, :, :, :same]
        longer.stop = same
        return longer


@torch.no_grad()
def generate(model, prompts, stops, max_new=128, temperature=0.0, seed=0, told=None, cache=None):
    """prompts: data.Example from data.ask -> one list of new ids per prompt, up to the first of `stops` (an id, or several).

    temperature 0: greedy; sampling draws from a generator of its own, rng_for by seed. told(ids): called after every token with
    all of the first row so far. cache: of the last turn of the same conversation (a single prompt), replaced in place.
    """
    device = model.norm.weight.device
    lengths = torch.tensor([len(p.tokens) for p in prompts], device=device)
    stops = torch.tensor(sorted({stops} if isinstance(stops, int) else stops), device=device)
    B, T = len(prompts), int(lengths.max())
    batch = packing.collate([[p] for p in prompts], T, model.config.vision, shared=True).to(device)          # what prompts share, once
    doc, branch, bidir = (torch.nn.functional.pad(f, (0, max_new)) for f in (batch.doc, batch.branch, batch.bidir))
    memory = cache.continued(model, prompts[0], T + max_new) if cache is not None else Cache(model, B, T + max_new)
    attends, known = memory.attends(model.attend), memory.stop
    rng = torch.Generator(device).manual_seed(seed)

    blind = known or all(p.images is None for p in prompts)              # the ViT has nothing to see, or has seen it
    x = model.embed_tokens(batch.tokens[:, known:]) if blind else model.embed(batch)
    pos, last = batch.pos[:, known:], lengths - 1 - known
    done, out, said = torch.zeros(B, dtype=torch.bool, device=device), [], []
    while True:
        memory.start, memory.stop = memory.stop, memory.stop + x.shape[1]
        rows = slice(memory.start, memory.stop)
        masks = attention.allow_by_rows(doc[:, : memory.stop], branch[:, : memory.stop], bidir[:, : memory.stop], rows)
        x = model.transformer(x, pos, masks, attends)
        logits = model.lm_head(x[torch.arange(B, device=device), last]).float()             # (B,V)
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)[:, 0]
        else:
            token = logits.argmax(-1)
        done = done | torch.isin(token, stops)
        out.append(torch.where(done, stops[0], token))
        if told and not bool(done[0]):
            said.append(int(token[0]))
            told(said)
        if len(out) == max_new or bool(done.all()):
            break
        x, pos, last = model.embed_tokens(out[-1][:, None]), (lengths + len(out) - 1)[:, None], torch.zeros_like(lengths)
    if cache is not None:                # the tokens whose keys and values are there: not the last one
        cache.kv, cache.stop, cache.images = memory.kv, memory.stop, prompts[0].images
        cache.tokens = [*prompts[0].tokens.tolist(), *(int(step[0]) for step in out)][: memory.stop]
    rows, ends = torch.stack(out, dim=1).tolist(), set(stops.tolist())
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in rows]


# ---------------------------------------------------------------------------------------------------------------
# pictures


def draw_answer(points, images, video, start, n=24):
    """points: [(frame, id, x, y), ..] of an answer, on its images, or on the frames of a video that they name (n at most)."""
    if video is None:
        shown = [draw_points(image, [(x, y) for frame, _, x, y in points if frame == k or len(images) == 1])
                 for k, image in enumerate(images, 1)]
        return shown[0] if len(shown) == 1 else strip(shown, [f"image {k}" for k in range(1, len(shown) + 1)], 360)
    times = sorted({frame for frame, *_ in points})[:n] or [0.0]
    frames = media.frames(video, [start + t for t in times])
    return strip([draw_points(frame, [(x, y) for at, _, x, y in points if at == t], numbers=[i for at, i, *_ in points if at == t])
                  for t, frame in zip(times, frames, strict=True)], [f"{t:.1f} s" for t in times], 360)


# ---------------------------------------------------------------------------------------------------------------
# the command


def open_model(folder, device="cpu", dtype=torch.float32):
    """Run directory or released folder -> model, tokenizer, data config: all that asking needs. OSError or ValueError in one sentence."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ValueError(f"--device {device}: {str(e).splitlines()[0]}") from None
    model = weights.load(folder, dtype, device)
    folder = Path(folder) / "model" if (Path(folder) / "model" / "config.json").is_file() else Path(folder)
    tokenizer = text.load_tokenizer(folder, model.config.n_vocab)
    settings = folder / "data.json"
    try:
        state = json.loads(settings.read_text()) if settings.is_file() else RELEASED
        for name, value in state.items():
            if type(value) is not type(getattr(data.DataConfig(), name)):
                raise ValueError(f"{name} = {value!r}")
        return model, tokenizer, replace(data.DataConfig(**state), vision=model.config.vision)
    except (TypeError, ValueError, AttributeError) as e:
        raise ValueError(f"{settings}: {e}") from None


def asking(config, crops=None, frames=None):
    """The data config a model was trained with -> the one it is asked with (spec 2.4, 14)."""
    crops = crops or (max(config.max_crops, 24) if config.max_crops >= 8 else config.max_crops)
    return replace(config, max_crops=crops, max_images=max(config.max_images, 20), max_frames=frames or max(config.max_frames, 384))


def read_subtitles(path):
    """An .srt or .vtt file, or .json with [{"start": s, "end": s, "text": ..}, ..] -> [(start, end, text), ..] in seconds."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"--subtitles {path}: not UTF-8 at byte {e.start}") from None
    if Path(path).suffix.lower() == ".json":
        try:
            return [(float(entry["start"]), float(entry["end"]), sound(str(entry["text"]), path)) for entry in json.loads(content)]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"--subtitles {path}: no list of objects with start, end and text: {e!r}") from None
    clock = r"(?:(\d+):)?(\d+):(\d+)[.,](\d{3})"
    entries = []
    for block in re.split(r"\n\s*\n", content.replace("\r\n", "\n")):
        timing = re.search(rf"{clock} *--> *{clock}[^\n]*\n(.*)", block, re.S)
        if timing:
            h, m, s, ms, h2, m2, s2, ms2 = (int(x or 0) for x in timing.parameter_groups()[:8])
            words = re.sub(r"<[^>]*>", "", timing.group(9))
            entries.append((h * 3600 + m * 60 + s + ms / 1000, h2 * 3600 + m2 * 60 + s2 + ms2 / 1000, " ".join(words.split())))
    if not entries:
        raise ValueError(f"--subtitles {path}: no subtitle in it (.srt, .vtt or .json)")
    return entries


def sound(words, where):
    """The words, if they can be written as UTF-8; ValueError otherwise: no tokenizer takes half a surrogate pair."""
    try:
        words.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: not UTF-8") from None
    return words


class Teller:
    """Writes an answer to the terminal as it grows; a character whose bytes are not all there yet waits."""

    def __init__(self, tokenizer):
        self.tokenizer, self.said = tokenizer, ""

    def __call__(self, ids):
        words = self.tokenizer.decode(ids).rstrip("\ufffd")
        if words.startswith(self.said):
            print(words[len(self.said) :], end="", flush=True)
            self.said = words

    def end(self, answer):
        print(answer[len(self.said) :] if answer.startswith(self.said) else f"\n{answer}", flush=True)
        self.said = ""


def converse(model, tokenizer, config, images, clip, args):
    """--chat: a question per line of standard input, until an empty one; the cache keeps what was said."""
    cache, turns, teller = Cache(model, 1, 0), [], Teller(tokenizer)
    while True:
        print("> ", end="", flush=True, file=sys.stderr)
        question = sound(sys.stdin.readline().strip(), "standard input")
        if not question:
            return
        prompt = data.encode_prompt(images, [*turns, (question, None)], tokenizer, config, clip)
        (ids,) = generate(model, [prompt], tokenizer.stops, args.max_new, args.temperature, args.seed, teller, cache)
        teller.end(tokenizer.decode(ids))
        turns.append((question, tokenizer.decode(ids)))


def arguments(argv):
    parser = argparse.ArgumentParser(description="Ask a model about images or a video.")
    parser.add_argument("--model", required=True, help="run directory, or a folder with a released checkpoint")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--image", help="a picture; with neither image nor video the prompt is text alone")
    source.add_argument("--images", nargs="+", metavar="F", help="several pictures, at most 20")
    source.add_argument("--video", help="a video file")
    talk = parser.add_mutually_exclusive_group(required=True)
    talk.add_argument("--prompt", help='as trained; of the toy "long_caption:", "pointing: red circle", "count: any shape"')
    talk.add_argument("--chat", action="store_true", help="a conversation: a question per line, an empty line ends it")
    parser.add_argument("--frames", type=int, metavar="N", help="frames of the video at most (default 384), two in a second at most")
    parser.add_argument("--start", type=float, default=0.0, help="second of the video to begin at (default 0)")
    parser.add_argument("--end", type=float, default=math.inf, help="second of the video to end at (default: its end)")
    parser.add_argument("--subtitles", metavar="F", help=".srt, .vtt or .json, in the video's own seconds")
    parser.add_argument("--max-crops", type=int, metavar="N", help="crops of an image at most (default 24, the toy as it was trained)")
    parser.add_argument("--max-new", type=int, default=256, help="tokens of an answer at most (default 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--draw", metavar="PNG", help="write the picture, or a strip of frames, with the predicted points")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default float32)")
    args = parser.parse_args(argv)
    limits = {"max_new": (1, 65536), "temperature": (0, 100), "frames": (1, media.MAX_FRAMES), "max_crops": (1, 1000),
              "seed": (0, 2**63 - 1)}
    for name, (least, most) in limits.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} must be from {least} to {most}, not {value}")
    if 0 < args.temperature < 0.001:
        raise ValueError(f"--temperature {args.temperature}: below 0.001 it is greedy; say 0")
    if args.prompt:
        sound(args.prompt, "--prompt")
    for flag in ("frames", "subtitles", "start", "end"):
        if getattr(args, flag) != parser.get_default(flag) and not args.video:
            raise ValueError(f"--{flag} needs --video")
    if args.draw and not (args.image or args.images or args.video):
        raise ValueError("--draw needs --image, --images or --video")
    if args.chat and (args.draw or args.json):
        raise ValueError("--draw and --json go with --prompt")
    drawn = Path(args.draw or "x.png")
    if drawn.suffix.lower() not in (".png", ".jpg") or not drawn.parent.is_dir() or drawn.is_dir():
        raise ValueError(f"--draw {args.draw}: name a .png or .jpg in a folder that exists")
    return args


def main(argv=None):
    try:
        args = arguments(argv)
        answer_to(args)
    except (OSError, ValueError, data.Unreadable) as e:
        print(f"tools.generate: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def answer_to(args):
    model, tokenizer, config = open_model(args.model, args.device, getattr(torch, args.dtype))
    config = asking(config, args.max_crops, args.frames)
    files = [args.image] if args.image else args.images or []
    if len(files) > config.max_images:
        raise ValueError(f"--images: {len(files)} pictures; Molmo2 is asked about {config.max_images} at most")
    images, clip, video = [media.read_image(file) for file in files], None, None
    if args.video:
        words = read_subtitles(args.subtitles) if args.subtitles else None
        clip, video = data.open_clip(args.video, config, words, args.start, args.end)
        clip.frames = [vision.resize(frame, config.vision.crop, config.vision.crop) for frame in clip.frames]
    if args.chat:
        return converse(model, tokenizer, config, images, clip, args)
    prompt = data.encode_prompt(images, [(args.prompt, None)], tokenizer, config, clip)
    teller = None if args.json else Teller(tokenizer)
    (ids,) = generate(model, [prompt], tokenizer.stops, args.max_new, args.temperature, args.seed, teller)
    answer = tokenizer.decode(ids)
    if teller:
        teller.end(answer)
    # a point's pixels are those of the picture it lies on
    sizes = [(video.width, video.height)] if video else [image.shape[1::-1] for image in images]
    points = [(frame, i, x * w, y * h) for frame, i, x, y in data.parse_points(answer, 1, 1)
              for w, h in [sizes[int(frame) - 1 if len(sizes) > 1 else 0] if 1 <= frame <= len(sizes) or len(sizes) == 1 else (0, 0)] if w]
    if args.draw:
        if not points:
            print("tools.generate: no points in the answer: the picture is drawn without", file=sys.stderr)
        draw_answer(points, images, video, args.start).save(args.draw)
    if args.json:
        print(json.dumps({"prompt": args.prompt, "text": answer, "tokens": len(ids), "points": points}))


if __name__ == "__main__":
    main()
