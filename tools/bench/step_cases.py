"""What tools.step_bench measures: examples with random pixels and ids, as rows for us and as padded batches for transformers.

    FOUR          ours, a row                      theirs, padded                            theirs, one by one (single)
    9 crops       | 9 crops | 5 | 2 | text |       | 9 crops               |                 | 9 crops               |
    5                                              | 5           . . . . . |                 | 5           |
    2                                              | 2      . . . . . . . .|                 | 2      |
    text                                           | text  . . . . . . . . |                 | text  |

A tree with three annotations is one part of a row for us, three sequences for transformers, each with all that is seen.
"""

from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import data
import packing
import vision
from tools.bench import pack as pack_bench
from tools.bench.peers import Numbers, inputs_of

FOUR = [(300, (2, 4)), (200, (2, 2)), (150, (1, 1)), (400,)]             # tokens of text; rows and columns of an image's mosaic; frames
PLAIN = {"image": [(300, (2, 4))], "video": [(300, None, 16)], "padded": FOUR, "single": FOUR}


@dataclass
class Case:
    rows: list                       # ours: a list of data.Example for each row, message trees
    batches: list                    # theirs: a list of data.Example for each padded batch, of one annotation each
    length: int                      # tokens of a row

    @property
    def labelled(self):              # tokens that are learned, the same for both
        return sum(int((e.weights > 0).sum()) for row in self.rows for e in row)


def example(config, rng, sizes, frames, texts):
    """An example without pixels -> its message tree, and [each of its annotations by itself], data.Example.

    sizes: (width, height) of its images, or else frames: how many a film has. texts: [(tokens read, tokens learned), ..].
    """
    numbers, settings = Numbers(config.n_vocab), data.DataConfig(vision=config.vision)
    times = [k / 2 for k in range(frames)]
    ids, visual = data.video_ids(times, None, numbers, settings) if frames else data.visual_ids(sizes, numbers, settings)
    texts = [[rng.integers(10, config.n_vocab, n).tolist() for n in text] for text in texts]
    # the last id is a target only, here without loss: so both sides read the same tokens
    branches = [data.Branch([(read, False), (learned, True), ([0], False)]) for read, learned in texts]
    found = [data.layout([numbers.bos, *ids], [False, *visual], those) for those in (branches, *([b] for b in branches))]
    for e in found if ids else []:
        data.place_pixels(e, data.MediaInfo(sizes, times if frames else None), numbers, settings)
    return found[0], found[1:]


def paint(examples, config, rng):
    """Gives the annotations of one example the same random crops."""
    if (unit := examples[0].unit) is not None:
        images = rng.integers(0, 256, (len(unit), config.vision.n_patch, config.vision.n_pixel), np.uint8)
        if len(unit) == 2 and unit[0] == unit[1]:
            images[1] = images[0]        # a mosaic of one crop repeats the view; packing.collate relies on it
        for e in examples:
            e.images = images


def plain(config, rng, text, tiling=None, frames=0):
    """An example with loss on all of its text, time stamps of frames included."""
    v = config.vision
    sizes = [tuple(n * v.window + v.crop - v.window for n in reversed(tiling))] if tiling else []
    _, [e] = example(config, rng, sizes, frames, [(0, text)])
    e.weights[:-1] = e.bidir[1:] == 0
    paint([e], config, rng)
    return e


def stream(config, args):
    """Rows from the midst of a stage's stream -> Case. Subtitles are left out."""
    rng, drawn, v = np.random.default_rng(0), [], config.vision
    kinds = pack_bench.CAPTIONS if args.stage == 1 else pack_bench.MIXTURE
    edges = list(accumulate(kind.share for kind in kinds))

    def size_of(_):                      # of the next example; the planner asks for one after the other
        kind = kinds[bisect(edges, rng.random() * edges[-1])]
        (what, *how), (mean, fewest, most), frames, sizes = kind.seen, kind.annotations, 0, []
        if what == "video":
            seconds = pack_bench.around(rng, how[0] * pack_bench.VIDEO_SCALE, how[1], 2, how[2])
            frames = len(vision.frame_times(seconds, args.frames))
        else:                            # as many crops whatever the size of a crop
            pictures = [pack_bench.picture(rng) for _ in range(rng.integers(how[0], how[1] + 1))]
            sizes = [(w * v.window // vision.RELEASED.window, h * v.window // vision.RELEASED.window) for h, w in pictures]
        lengths = [int(pack_bench.around(rng, *kind.text)) for _ in range(min(max(1 + rng.poisson(mean - 1), fewest), most))]
        drawn.append(example(config, rng, sizes, frames, [(n // 4 + 1, n - n // 4 - 1) for n in lengths]))       # a question, an answer
        if len(drawn) > 50 * (args.n + packing.MAX_WAIT):
            raise ValueError(f"hardly an example fits a row of --tokens {args.tokens} and --crops {args.crops}")
        return len(drawn[-1][0].tokens), 0 if drawn[-1][0].unit is None else len(drawn[-1][0].unit)

    # the first packs hold the largest of what is in the pool; by then the largest have come and gone
    packs = list(islice(packing.Planner(size_of, args.tokens, args.crops), packing.MAX_WAIT, packing.MAX_WAIT + args.n))
    for i in sorted(i for pack in packs for i in pack):
        paint([drawn[i][0], *drawn[i][1]], config, rng)
    singles = [e for pack in packs for i in pack for e in drawn[i][1]]
    singles = [singles[k] for k in rng.permutation(len(singles))]
    apart = [[e for e in singles if (e.pool_src.shape[1] == 9) == video] for video in (True, False)]
    batches = [kind[k : k + args.batch] for kind in apart for k in range(0, len(kind), args.batch)]
    return Case([[drawn[i][0] for i in pack] for pack in packs], batches, args.tokens)


def case_of(name, config, args):
    if name == "stream":
        return stream(config, args)
    rng = np.random.default_rng(0)
    row = [plain(config, rng, *given) for given in PLAIN[name]]
    return Case([row], [[e] for e in row] if name == "single" else [row], sum(len(e.tokens) for e in row))


def collate(examples, config, device):
    """Examples as transformers' processor pads them: on the right, to the longest; all their crops one after the other."""
    parts, patches = [inputs_of(e, config.vision, device) for e in examples], 0
    for part, e in zip(parts, examples, strict=True):
        labels = np.append(-100, np.where(e.weights[:-1] > 0, e.targets[:-1], -100))         # it shifts them itself
        part["labels"] = torch.from_numpy(labels)[None].to(device)
        part.update({name: torch.where(x >= 0, x + patches, -1) for name, x in part.items() if name.endswith("pooling")})
        patches += 0 if e.images is None else len(e.images) * config.vision.n_patch
    out = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values, padding = [part[name] for part in parts if name in part], -100 if name == "labels" else 0
        text = name in ("input_ids", "attention_mask", "mm_token_type_ids", "labels")
        out[name] = pad_sequence([x[0] for x in values], batch_first=True, padding_value=padding) if text else torch.cat(values)
    return out
