"""Ask a trained model about an image: prefill, then decoding with a KV cache, through the same mask rule.

    python -m tools.generate --model runs/stage1-tiny --image cat.png --prompt "pointing: red circle" --draw out.png

The cache is one wrapper per block around `attend`; the model knows nothing of it. Prompts of different lengths make
one batch: what pads a short one is a document of its own, so nothing can see it.

    slot       0 1 2 3 4 5 | 6 7 ..                 prompts of 6 and 4 tokens, then what is generated
    row 0 doc  0 0 0 0 0 0 | 0 0                    pos 0 1 2 3 4 5 | 6 7
    row 1 doc  0 0 0 0-1-1 | 0 0                    pos 0 1 2 3 . . | 4 5
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw

import attention
import data
import model as models
import packing


class Cache:
    """Keys and values of every block, (B,S,G,D) each, written at slots start..stop of this call."""

    def __init__(self, model, B, S):
        c, p = model.config, model.norm.weight
        self.kv = torch.zeros(c.n_layer, 2, B, S, c.n_kv_head, c.head_dim, device=p.device, dtype=p.dtype)
        self.start = self.stop = 0

    def attends(self, attend):
        """One attend per block that reads and writes its own slot of the cache."""

        def block(kv):
            def cached(q, k, v, mask):
                kv[0, :, self.start : self.stop], kv[1, :, self.start : self.stop] = k, v
                return attend(q, kv[0, :, : self.stop], kv[1, :, : self.stop], mask)

            return cached

        return [block(kv) for kv in self.kv]


@torch.no_grad()
def generate(model, prompts, eos, max_new=128, temperature=0.0, seed=0):
    """prompts: data.Encoded from data.ask -> one list of new ids per prompt, without EOS. temperature 0: greedy.

    Sampling draws from a generator of its own, keyed by seed.
    """
    device = model.norm.weight.device
    lengths = torch.tensor([len(p.tokens) for p in prompts], device=device)
    B, T = len(prompts), int(lengths.max())
    batch = packing.build([[p] for p in prompts], T, model.config.vision).to(device)
    doc, branch, bidir = (torch.nn.functional.pad(f, (0, max_new)) for f in (batch.doc, batch.branch, batch.bidir))
    cache = Cache(model, B, T + max_new)
    attends = cache.attends(model.attend)
    rng = torch.Generator(device).manual_seed(seed)

    x, pos, last = model.embed(batch), batch.pos, lengths - 1
    done, out = torch.zeros(B, dtype=torch.bool, device=device), []
    while True:
        cache.start, cache.stop = cache.stop, cache.stop + x.shape[1]
        rows = slice(cache.start, cache.stop)
        mask = attention.allow(doc[:, : cache.stop], branch[:, : cache.stop], bidir[:, : cache.stop], rows)
        x = model.trunk(x, pos, mask, attends)
        logits = model.project(x[torch.arange(B, device=device), last]).float()             # (B,V)
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)[:, 0]
        else:
            token = logits.argmax(-1)
        done = done | (token == eos)
        out.append(torch.where(done, eos, token))
        if len(out) == max_new or bool(done.all()):
            break
        x, pos, last = model.embed_tokens(out[-1][:, None]), (lengths + len(out) - 1)[:, None], torch.zeros_like(lengths)
    rows = torch.stack(out, dim=1).tolist()
    return [row[: row.index(eos)] if eos in row else row for row in rows]


def draw_points(image, points, colour=(255, 0, 80), truth=()):
    """(H,W,3) uint8 and (x, y) in pixels -> PIL image, at least 288 wide: rings for points, crosses for truth."""
    scale = max(1, -(-288 // image.shape[1]))
    picture = Image.fromarray(image).resize((image.shape[1] * scale, image.shape[0] * scale), Image.NEAREST)
    pen, r = ImageDraw.Draw(picture), max(picture.size) // 60 + 3
    for x, y in truth:
        x, y = x * scale, y * scale
        pen.line([(x - r, y), (x + r, y)], fill=(0, 0, 0), width=3)
        pen.line([(x, y - r), (x, y + r)], fill=(0, 0, 0), width=3)
    for number, (x, y) in enumerate(points, 1):
        x, y = x * scale, y * scale
        pen.ellipse([x - r, y - r, x + r, y + r], outline=(255, 255, 255), width=4)
        pen.ellipse([x - r, y - r, x + r, y + r], outline=colour, width=2)
        pen.text((x + r + 2, y - r - 2), str(number), fill=(255, 255, 255), stroke_width=2, stroke_fill=(0, 0, 0))
    return picture


def open_model(folder, device="cpu"):
    """Run directory -> model, tokenizer, data config: everything needed to ask. OSError or ValueError in one sentence."""
    model = models.load(folder)
    folder = Path(folder) / "model" if (Path(folder) / "model" / "config.json").is_file() else Path(folder)
    tokenizer = data.ByteTokenizer.load(folder)
    state = json.loads((folder / "data.json").read_text())
    try:
        config = replace(data.DataConfig(**state), vision=model.config.vision)
    except TypeError as e:
        raise ValueError(f"{folder}/data.json: {e}") from None
    try:
        return model.to(device), tokenizer, config
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {device}: {str(e).splitlines()[0]}") from None


def main():
    parser = argparse.ArgumentParser(description="Ask a model about an image.")
    parser.add_argument("--model", required=True, help="run directory")
    parser.add_argument("--image", help="a picture; without one the prompt is text alone")
    parser.add_argument("--prompt", required=True, help='as trained, e.g. "long_caption:", "pointing: red circle", "count: any shape"')
    parser.add_argument("--max-new", type=int, default=256, help="tokens at most (default 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--draw", metavar="PNG", help="write the picture with the predicted points")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--device", default="cpu", help="default cpu")
    args = parser.parse_args()
    try:
        if args.max_new < 1 or args.temperature < 0:
            raise ValueError("--max-new must be at least 1 and --temperature at least 0")
        if args.draw and not args.image:
            raise ValueError("--draw needs --image")
        if args.draw and (Path(args.draw).suffix.lower() not in (".png", ".jpg") or not Path(args.draw).parent.is_dir()):
            raise ValueError(f"--draw {args.draw}: name a .png or .jpg in a folder that exists")
        model, tokenizer, config = open_model(args.model, args.device)
        image = data.read_image(args.image) if args.image else None
    except (OSError, ValueError, data.Unreadable) as e:
        print(f"tools.generate: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    prompt = data.ask([image] if args.image else [], [(args.prompt, None)], tokenizer, config)
    (ids,) = generate(model, [prompt], tokenizer.eos, args.max_new, args.temperature, args.seed)
    text = tokenizer.decode(ids)
    h, w = image.shape[:2] if image is not None else (0, 0)
    points = data.parse_points(text, w, h)
    if args.draw:
        draw_points(image, [(x, y) for _, _, x, y in points]).save(args.draw)
    print(json.dumps({"prompt": args.prompt, "text": text, "tokens": len(ids), "points": points}) if args.json else text)


if __name__ == "__main__":
    main()
