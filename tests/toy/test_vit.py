"""Stage 0 and the start of a ViT from nothing: what patches are taught, and where heads look before they are taught anything."""

import dataclasses
import json
import zlib

import numpy as np
import torch

import model
import vision
from toy import vit as stage0
from toy import world as tiny


def test_labels_are_of_the_object_that_covers_most_of_a_patch():
    world, patch = tiny.World("train"), tiny.SIZE // 10
    kinds = set()
    for i in range(30):
        scene = world.scene(i)
        got = stage0.labels(scene, 10).reshape(10, 10, 4)
        for r in range(10):
            for c in range(10):
                cut = np.s_[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]
                cover = [tiny.mask_of(o)[cut].mean() for o in scene["objects"]]
                colour, shape, column, row = got[r, c]
                kinds.add(int(shape))
                if max(cover, default=0) < 0.25:
                    assert (colour, shape, column, row) == (len(tiny.COLOURS), len(tiny.SHAPES), -1, -1)
                else:
                    o = scene["objects"][int(np.argmax(cover))]
                    assert (stage0.COLOURS[colour], stage0.SHAPES[shape]) == (o["colour"], o["shape"])
                    assert (column * tiny.LATTICE, row * tiny.LATTICE) == (o["x"], o["y"])
    assert kinds == set(range(len(tiny.SHAPES) + 1))


def toy_vit(seed=0):
    torch.manual_seed(seed)
    return model.Molmo2(model.PRESETS["toy"]).init_weights().vision.vit


def test_a_vit_from_nothing_looks_at_neighbours():
    """Of the position table alone, the patch that a head attends most is the neighbour that it was turned to, where there is one."""
    vit = toy_vit()
    grid, heads = vit.config.grid, vit.config.n_head
    looked = set()
    for i, block in enumerate(vit.blocks):
        with torch.no_grad():
            h = block.attn_norm(vit.pos)
            q, k = (f(h).view(grid * grid, heads, -1).transpose(0, 1) for f in (block.q, block.k))
        best = (q @ k.transpose(1, 2)).argmax(-1).view(heads, grid, grid)
        for head in range(heads):
            down, right = vision.NEIGHBOURS[i % 3][head]
            looked.add((down, right))
            for r in range(max(0, -down), grid - max(0, down)):
                for c in range(max(0, -right), grid - max(0, right)):
                    assert best[head, r, c] == (r + down) * grid + c + right, (i, head, r, c)
    assert len(looked) == 12


def test_a_released_vit_does_not_start_that_way():
    shape = dataclasses.replace(model.TOY_VISION, neighbor_init=False)
    torch.manual_seed(0)
    vit = model.Molmo2(dataclasses.replace(model.PRESETS["toy"], vision=shape)).init_weights().vision.vit
    assert 0.01 < vit.pos.std() < 0.03 and not model.PRESETS["4b"].vision.neighbor_init


def test_patches_learn_what_lies_on_them_and_the_seed_says_how():
    def taught(seed, steps):
        vit = toy_vit()
        return list(stage0.pretrain(vit, seed, steps, images=4)), vit.patch.weight.detach()

    (lines, weight), (again, same), (_, other) = taught(0, 10), taught(0, 10), taught(1, 10)
    assert [line["nll"] for line in lines] == [line["nll"] for line in again] and torch.equal(weight, same)
    assert not torch.equal(weight, other)
    lines, _ = taught(0, 250)
    first, soon, last = ({name: np.mean([line["nll"][name] for line in part]) for name in lines[0]["nll"]}
                         for part in (lines[:3], lines[57:60], lines[-20:]))
    assert all(soon[name] < 0.8 * first[name] for name in first), (first, soon)
    # beyond telling objects from the ground (0.9) and from places of any object (2.9)
    assert last["colour"] < 0.3 and last["column"] < 2.5 and last["row"] < 2.5, last


def test_stage_0_sees_no_held_out_scene_and_no_unseen_combination(monkeypatch):
    drawn, render = [], tiny.render
    monkeypatch.setattr(tiny, "render", lambda scene: drawn.append(scene) or render(scene))
    for _ in stage0.pretrain(toy_vit(), 0, 10):
        pass
    assert len(drawn) == 80 and not any(zlib.crc32(json.dumps(scene).encode()) % 8 == 0 for scene in drawn)
    assert not {(o["colour"], o["shape"]) for scene in drawn for o in scene["objects"]} & tiny.UNSEEN


def test_steps_without_an_object_or_few_of_them_do_no_harm(monkeypatch):
    for steps in (1, 9, 10):
        assert len(list(stage0.pretrain(toy_vit(), 0, steps, images=1))) == steps
    monkeypatch.setattr(tiny.World, "scene", lambda self, i: {**tiny.draw_scene(np.random.default_rng(0), "train", 0, 0)})
    vit = toy_vit()
    (line,) = stage0.pretrain(vit, 0, 1, images=2)
    assert line["nll"]["column"] == line["nll"]["row"] == 0 and torch.isfinite(vit.patch.weight).all()
