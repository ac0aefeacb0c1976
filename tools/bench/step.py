"""Times a training step without the optimizer, compared with the Molmo2 of transformers.

    python -m tools.bench step --preset toy --cases image --rounds 1

Both implementations have the same random weights, in float32, and train on the same tokens of the
same examples. Before timing, their losses and two gradients must agree. On a GPU, our blocks are
compiled, as in training. The case "image" is an example with 9 crops and 300 tokens of text. The
case "stream" has packed rows of stage 2. There a message tree with three annotations is one example
in our row. For transformers it is three sequences, in padded batches.
"""

import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import data
import model as models
import packing
from records.errors import import_extra
from text.tokenizer import ByteTokenizer
from tools.bench.measure import clock, run_rounds, spread
from tools.bench.rows import PRESETS, draw_rows, random_examples, set_random_pixels
from tools.bench.stream import Recipe
from tools.command import positive, print_table, show
from weights.export import export

STREAM_ROW = Recipe(max_tokens=4096, max_crops=32, max_frames=8)
REFERENCE_BATCH = 4  # number of sequences in a batch for transformers, in the case "stream"
# {our name: name in transformers} of the weights whose gradients are compared. The gradients of the
# first blocks are computed last, so an error in any block changes them.
WATCHED = {
    "blocks.0.attn.q.weight": "model.language_model.layers.0.self_attn.q_proj.weight",
    "vision.vit.blocks.0.q.weight": "model.vision_tower.layers.0.self_attn.q_proj.weight",
}
_DECLARED_OPERATORS = []  # an operator exists as long as its Library object


# --------------------------------------------------------------------------------------------------
# transformers


def import_transformers():
    """-> the package transformers. ValueError with the pip command if it is missing.

    A torchvision that was built for another torch cannot load its compiled operators, and then
    the import of transformers fails. Molmo2 calls none of these operators, so it is enough to
    declare two of them.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in ("nms", "qnms"):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED_OPERATORS.append(library)
    return import_extra("transformers", "requirements-dev.txt")


def model_pair(config, device):
    """-> (our model, the model of transformers) with the same random weights, in training mode."""
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device(device):  # a GPU draws billions of random numbers in a second
        ours = models.Molmo2(replace(config, init_std=0.02)).init_weights()
    with tempfile.TemporaryDirectory() as folder:
        export(ours, ByteTokenizer(n_vocab=config.n_vocab), data.DataConfig(), folder)
        model_class = transformers.Molmo2ForConditionalGeneration
        reference = model_class.from_pretrained(folder, dtype=torch.float32).to(device)
    return ours.train(), reference.train()


def reference_inputs(examples, config, device, dtype=torch.float32):
    """A list of data.Example -> keyword arguments for the Molmo2 of transformers, in the format of
    its processor. Text is padded on the right to the longest example. The crops of all examples are
    concatenated. A token without loss has the label -100."""
    texts = defaultdict(list)
    media = defaultdict(list)
    n_crops = 0
    for example in examples:
        # transformers shifts the labels itself; the first token has no label
        labels = np.where(example.weights[:-1] > 0, example.targets[:-1], -100)
        texts["labels"].append(np.append(-100, labels))
        texts["input_ids"].append(example.tokens)
        texts["attention_mask"].append(np.ones_like(example.tokens))
        texts["mm_token_type_ids"].append((example.bidir > 0).astype(np.int64))
        if example.images is None:
            continue
        windows = torch.from_numpy(example.pool_src)
        pooling = torch.where(windows >= 0, windows + n_crops * config.vision.n_patch, -1)
        pixels = (torch.from_numpy(example.images) / 127.5 - 1).to(dtype)
        n_crops += len(pixels)
        is_video = windows.shape[1] == 9  # windows of 3 x 3 patches
        kind = "video" if is_video else "image"
        side = -(-config.vision.grid // 3)
        # for an image only the number of windows matters, so one grid contains all of them
        grid = [len(pixels), side, side] if is_video else [1, len(windows), 0, 0]
        media["pixel_values_videos" if is_video else "pixel_values"].append(pixels)
        media[f"{kind}_token_pooling"].append(pooling)
        media[f"{kind}_grids"].append(torch.tensor([grid]))
    batch = {name: torch.cat(parts) for name, parts in media.items()}
    for name, rows in texts.items():
        padding = -100 if name == "labels" else 0
        rows = [torch.from_numpy(row) for row in rows]
        batch[name] = pad_sequence(rows, batch_first=True, padding_value=padding)
    return {name: value.to(device) for name, value in batch.items()}


# --------------------------------------------------------------------------------------------------
# the cases


class Case(NamedTuple):
    """The same examples for both implementations."""
    rows: list  # ours: for each row a list of data.Example, which are message trees
    batches: list  # reference: for each batch a list of data.Example with one annotation each
    length: int  # tokens of a row


def image_example(config, rng, n_text, tiling=None):
    """-> a data.Example with loss on all of its text. tiling: (rows, columns) of crops in the
    mosaic of its image; None: no image."""
    image_sizes = []
    if tiling:
        rows, columns = tiling
        v = config.vision
        overlap = v.crop - v.stride
        image_sizes = [(columns * v.stride + overlap, rows * v.stride + overlap)]
    example, _ = random_examples(config, rng, [(0, n_text)], image_sizes)
    set_random_pixels([example], config, rng)
    return example


def image_case(config, n):
    row = [image_example(config, np.random.default_rng(0), 300, (2, 4))]
    return Case([row], [row], len(row[0].tokens))


def stream_case(config, n):
    """-> the Case of n packed rows. Images and videos are in different batches of the reference,
    and its annotations are in random order."""
    rows, annotations = draw_rows(config, n, 2, STREAM_ROW)
    order = np.random.default_rng(0).permutation(len(annotations))
    annotations = [annotations[k] for k in order]
    batches = []
    for is_video in (True, False):
        kind = [e for e in annotations if (e.pool_src.shape[1] == 9) == is_video]
        for start in range(0, len(kind), REFERENCE_BATCH):
            batches.append(kind[start : start + REFERENCE_BATCH])
    return Case(rows, batches, STREAM_ROW.max_tokens)


CASES = {"image": image_case, "stream": stream_case}


# --------------------------------------------------------------------------------------------------
# one step


class StepResult(NamedTuple):
    seconds: float
    loss: float  # mean over all tokens with loss
    gradients: list  # gradients of the weights in WATCHED


def count_labels(examples):
    return sum(int((example.weights > 0).sum()) for example in examples)


def our_losses(model, case, device):
    """-> for each row a function that computes its part in the mean loss of the case."""
    labels = sum(map(count_labels, case.rows))

    def loss(batch):
        return (batch.weights * model(batch)[0]).sum()

    losses = []
    for row in case.rows:
        batch = packing.collate([row], case.length, model.config.vision).to(device)
        losses.append(partial(loss, replace(batch, weights=(batch.weights > 0) / labels)))
    return losses


def reference_losses(model, config, case, device):
    """-> for each padded batch a function that computes its part in the mean loss of the case."""
    labels = sum(map(count_labels, case.batches))

    def loss(inputs, share):
        return model(**inputs, use_cache=False).loss * share  # it is the mean over the batch

    return [partial(loss, reference_inputs(batch, config, device), count_labels(batch) / labels)
            for batch in case.batches]


def training_step(model, names, losses, device):
    """Forward and backward of a case -> StepResult. names: the weights whose gradients are kept."""
    start = clock(device)
    total = 0.0
    for loss in losses:
        value = loss()
        value.backward()
        total += value.detach()
    seconds = clock(device) - start
    gradients = [model.get_parameter(name).grad for name in names]
    model.zero_grad()  # sets gradients to None
    return StepResult(seconds, float(total), gradients)


def check_agreement(case, ours, reference):
    """RuntimeError if the loss or a gradient differs between two StepResults."""
    found = [("loss", 1e-4, abs(ours.loss - reference.loss) / abs(reference.loss))]
    for name, a, b in zip(WATCHED, ours.gradients, reference.gradients, strict=True):
        found.append((f"gradients of {name}", 1e-3, (a - b).norm() / b.norm()))
    for name, limit, difference in found:
        if difference > limit:
            raise RuntimeError(f"{case}: the {name} differs by {difference:.1e}.")


def bench_case(name, ours, reference, args):
    """Prints the table of one case -> its numbers. RuntimeError if the implementations differ."""
    config = ours.config
    device = args.device
    case = CASES[name](config, args.n)
    torch.compiler.reset()  # or the shapes of earlier cases count for the limit of recompilations
    runs = {
        "ours": partial(training_step, ours, WATCHED.keys(),
                        our_losses(ours, case, device), device),
        "reference": partial(training_step, reference, WATCHED.values(),
                             reference_losses(reference, config, case, device), device),
    }
    check_agreement(name, *(run_step() for run_step in runs.values()))  # also the warm-up
    rounds = run_rounds(runs, args.rounds)
    found = {}
    for side, batches in (("ours", case.rows), ("reference", case.batches)):
        seconds = statistics.median(results[side].seconds for results in rounds)
        tokens = sum(len(example.tokens) for batch in batches for example in batch)
        found[side] = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds,
                       "annotations_per_second": sum(map(len, case.batches)) / seconds}
    print()
    print_table(name, found)
    found["ratio"] = spread([r["reference"].seconds / r["ours"].seconds for r in rounds])
    print(f"time of reference / ours: {show(found['ratio'])}", flush=True)
    return found


def add_arguments(parser):
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="bench", help="shape of the model")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is trained on")
    add("--rounds", type=positive, default=5, help="measurements of each case")
    add("--n", type=positive, default=1, help="number of rows in the case stream")


def run(args):
    """Prints a table for each case -> {case: its numbers, ..}."""
    torch.set_flush_denormal(True)  # as in train.py
    ours, reference = model_pair(PRESETS[args.preset], args.device)
    if args.device.type == "cuda":
        ours.compile_blocks()  # as in train.py
    return {name: bench_case(name, ours, reference, args) for name in args.cases}
