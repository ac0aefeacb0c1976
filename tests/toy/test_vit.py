"""The training of the toy's ViT: the classes of the patches, and that the ViT learns from them.

Also its initial weights: each head attends to a neighbour.
"""

import numpy as np
import pytest
import torch

import model
from toy import shapes, vit
from toy.images import World
from toy.shapes import LATTICE, SIZE


def toy_vit():
    torch.manual_seed(0)
    tower = model.Molmo2(model.PRESETS["toy"]).init_weights().vision.vit
    vit.init_neighbor_heads(tower)
    return tower


def test_heads_of_a_new_vit_attend_to_neighbours():
    """From the position table alone, the best patch of a head is the neighbour of its offset."""
    tower = toy_vit()
    grid = tower.config.grid
    n_head = tower.config.n_head
    offsets = set()
    for i, block in enumerate(tower.blocks):
        with torch.no_grad():
            h = block.attn_norm(tower.pos)
            q = block.q(h).view(grid * grid, n_head, -1).transpose(0, 1)
            k = block.k(h).view(grid * grid, n_head, -1).transpose(0, 1)
        best = (q @ k.transpose(1, 2)).argmax(-1).view(n_head, grid, grid)
        for head in range(n_head):
            down, right = vit.OFFSETS[i % 3][head]
            offsets.add((down, right))
            for row in range(max(0, -down), grid - max(0, down)):
                for column in range(max(0, -right), grid - max(0, right)):
                    neighbour = (row + down) * grid + column + right
                    assert best[head, row, column] == neighbour, (i, head, row, column)
    near = (-1, 0, 1)
    assert offsets == {(r, c) for r in near for c in near} - {(0, 0)} | {
        (0, 2), (0, -2), (2, 0), (-2, 0)}


@pytest.mark.parametrize(("step", "rate"), [
    (1, 0.19995), (5, 0.99397), (50.5, 1.0), (100, 0.00048)])
def test_the_learning_rate_rises_for_a_tenth_of_the_steps_and_falls_as_a_cosine(step, rate):
    assert vit.learning_rate(step, 2.0, 100) == pytest.approx(rate, abs=1e-5)


def test_labels_are_of_the_object_that_covers_most_of_a_patch():
    world = World("train")
    patch = SIZE // 10
    colours, shape_names, *_ = shapes.KINDS
    ground = (len(colours), len(shape_names), -1, -1)
    shape_classes = set()
    for i in range(30):
        scene = world.scene(i)
        classes = vit.labels(scene, 10).reshape(10, 10, 4)
        for r, c in np.ndindex(10, 10):
            cut = np.s_[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]
            coverage = [shapes.mask_of(o)[cut].mean() for o in scene["objects"]]
            colour, shape, column, row = classes[r, c]
            shape_classes.add(int(shape))
            if max(coverage, default=0) < 0.25:
                assert (colour, shape, column, row) == ground
            else:
                o = scene["objects"][int(np.argmax(coverage))]
                assert (colours[colour], shape_names[shape]) == (o["colour"], o["shape"])
                assert (column * LATTICE, row * LATTICE) == (o["x"], o["y"])
    assert shape_classes == set(range(len(shape_names) + 1))


def test_the_first_steps_have_the_losses_that_they_had_before():
    losses = [[*line["nll"].values()] for line in vit.pretrain(toy_vit(), 0, 4, images=2)]
    expected = [1.9079, 1.6768, 16.0957, 13.2303], [1.7586, 1.6621, 19.9597, 14.0547]
    assert (losses[0], losses[3]) == tuple(pytest.approx(row, rel=0.01) for row in expected)


def test_a_patch_of_the_background_counts_a_tenth_and_has_no_position():
    classes = np.array([[0, 0, 0, 0], [1, 1, -1, -1]])
    shares = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    logits = [shares / 0.4, shares / 0.4, shares / 8, shares / 8]
    of_both = (np.log(2) + 0.1 * np.log(4)) / 1.1
    assert torch.stack(vit.nll_of_tasks(logits, classes)).tolist() == pytest.approx(
        [of_both, of_both, np.log(2), np.log(2)])


@pytest.mark.slow
def test_patches_learn_their_objects():
    losses = [line["nll"] for line in vit.pretrain(toy_vit(), 0, 250, images=4)]
    last = {task: np.mean([nll[task] for nll in losses[-20:]]) for task in vit.TASKS}
    # telling objects from the ground alone gives 0.9, and the places of any object 2.9
    assert last["colour"] < 0.3, last
    assert last["column"] < 2.5, last
    assert last["row"] < 2.5, last
