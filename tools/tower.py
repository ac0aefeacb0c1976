"""Stage 0 on composed photographs: a vision tower for readers who have no pre-trained one.

    python -m tools.tower CUT_OUTS runs/composed/tower --kinds toy/stamp_kinds.json \\
        --backgrounds PHOTOGRAPHS --steps 4000

A linear head classifies every patch of a composed photograph: which kind, which cut-out, and where
is the centre of the object (toy/vit.py)? OUT becomes a folder in the layout of SigLIP, so tools.hf
base reads it as it reads a released tower. A killed command goes on where it was when it is given
again.
"""

import argparse
import json
import os
import time
from pathlib import Path

# Before torch is imported: OpenMP's threads soon sleep, so that other processes may run (train.py).
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch
from tqdm import tqdm

import vision
from model import ModelConfig
from records.errors import DataError, warn
from toy.neighbor_init import init_neighbor_heads
from toy.photos import Photos, add_arguments, open_cut_outs, read_backgrounds
from toy.vit import Pretraining, Tasks, classes_of_patches
from weights.base import PATCH_EMBEDDING, siglip_config, siglip_names
from weights.tensor_files import write_safetensors

IMAGES = 8                           # of a step
SAVE_EVERY = 200                     # steps
LR = 5e-4
# the config.json of SigLIP; Molmo2 reads the third and the ninth block from the end
SHAPE = {
    "model_type": "siglip_vision_model",
    "num_hidden_layers": 10,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "patch_size": 14,
    "image_size": 168,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tools.tower", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_arguments(parser)
    add("out", metavar="OUT")
    add("--steps", type=int, default=4000, help="of eight images (default 4000)")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def new_vit(seed):
    """A ViT from scratch, whose heads start at neighbours."""
    torch.manual_seed(seed)
    config = siglip_config(SHAPE, "tools.tower")
    vit = vision.ViT(config)
    for module in vit.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
            torch.nn.init.zeros_(module.bias)
    init_neighbor_heads(vit)
    return vit


def tasks_of(cut_outs, kinds, grid):
    return Tasks(
        names=("kind", "cut_out", "column", "row"),
        n_classes=[len(kinds) + 1, len(cut_outs) + 1, 2 * grid, 2 * grid],
        loss_shares=(2, 1, 0.5, 0.5),
        logit_factors=(1, 1, 2, 2),
    )


def labels(placed, cut_outs, kinds, config, grid):
    """(grid*grid,4) int64: the classes of a scene in grid x grid parts. Places are counted in half
    patches."""
    of_objects = []
    for p in placed:
        x, y = p.centre
        half_patch = config.patch / 2
        of_objects.append((kinds.index(p.cut_out.kind), cut_outs.index(p.cut_out),
                           int(x / half_patch), int(y / half_patch)))
    ground = (len(kinds), len(cut_outs), -1, -1)
    return classes_of_patches([p.mask for p in placed], of_objects, ground, grid)


def pretrain(vit, photos, args, out):
    """Trains to the last step, from the state in out/state.pt if there is one. ValueError if that
    was begun with other settings."""
    kinds = sorted(photos.by_kind)
    cut_outs = [c for kind in kinds for c in photos.by_kind[kind]]
    pretraining = Pretraining(vit, tasks_of(cut_outs, kinds, vit.config.grid), args.steps, LR)
    parts = {"vit": vit, "head": pretraining.head, "optimizer": pretraining.optimizer}
    path = out / "state.pt"
    log_path = out / "stage0.jsonl"
    made_for = json.dumps([args.steps, args.seed, args.backgrounds,
                           [(c.name, c.kind) for c in cut_outs]])
    done = 0
    lines = []
    if path.is_file():
        state = torch.load(path, weights_only=True)
        if state["made_for"] != made_for:
            raise ValueError(f"{path} was begun with other cut-outs, backgrounds, steps or seed: "
                             "name another folder")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        done = state["step"]
        lines = log_path.read_text().splitlines(keepends=True)[:done]    # later steps come again
    with open(log_path, "w", buffering=1) as log:
        log.writelines(lines)
        for step in tqdm(range(done + 1, args.steps + 1), unit="step", desc="stage 0",
                         initial=done, total=args.steps, mininterval=1):
            started = time.monotonic()
            scenes = [photos.scene(i) for i in range((step - 1) * IMAGES, step * IMAGES)]
            classes = [labels(placed, cut_outs, kinds, vit.config, vit.config.grid)
                       for _, placed in scenes]
            nll = pretraining.step(step, [image for image, _ in scenes], classes)
            line = {"step": step, "nll": nll, "seconds": time.monotonic() - started}
            log.write(json.dumps(line) + "\n")
            if step % SAVE_EVERY == 0 or step == args.steps:
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save({"step": step, "made_for": made_for, **state}, out / "state.pt.tmp")
                os.replace(out / "state.pt.tmp", path)


def save_as_siglip(vit, out):
    """Writes config.json and model.safetensors; the blocks that Molmo2 does not use are absent."""
    config = vit.config
    ours = {f"vision.vit.{name}": tensor for name, tensor in vit.state_dict().items()}
    tensors = {}
    for (theirs,), (name,) in siglip_names(ModelConfig(vision=config)).items():
        tensors[theirs] = ours[name]
    kernel = tensors[PATCH_EMBEDDING].view(-1, config.patch, config.patch, 3)
    tensors[PATCH_EMBEDDING] = kernel.permute(0, 3, 1, 2)
    write_safetensors({name: t.contiguous() for name, t in tensors.items()},
                      out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(SHAPE, indent=1))


def main(argv=None):
    args = parse(argv)
    torch.set_flush_denormal(True)
    out = Path(args.out)
    vit = new_vit(args.seed)
    try:
        cut_outs, kinds = open_cut_outs(args.source, args.kinds)
        photos = Photos(cut_outs, kinds, read_backgrounds(args.backgrounds), "train",
                        vit.config.crop, args.seed)
        out.mkdir(parents=True, exist_ok=True)
        pretrain(vit, photos, args, out)
    except (OSError, DataError, ValueError) as e:
        warn(f"tools.tower: {e}")
        raise SystemExit(2) from None
    save_as_siglip(vit, out)
    print(json.dumps({"out": str(out), "cut_outs": sum(map(len, photos.by_kind.values())),
                      "params": sum(p.numel() for p in vit.parameters())}))


if __name__ == "__main__":
    main()
