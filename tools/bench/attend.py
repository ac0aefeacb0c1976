"""Attention in packed rows side by side: under one dense mask, in a loop over examples, and as this project does it.

    python -m tools.bench attend                            # rows of 4,096 and 16,384 tokens on the CPU: minutes
    python -m tools.bench attend --tokens 2048 --rounds 2
    python -m tools.bench attend --tokens 4096 --branches 12              # of one film with twelve annotations, most of the row
    python -m tools.bench attend --device cuda --dtype bfloat16 --heads 32 --kv-heads 8 --dim 128 --tokens 16384 36864

Rows are packs of tools.bench pack's stream (stage 3's from 36,864 tokens on, else stage 2's, with crops in proportion): their trunks,
visual tokens that see each other, annotations as branches. Every way computes the same, forward and backward, which is checked first;
they take turns, and a ratio is the median over the rounds. dense: SDPA with a mask (1,1,T,T). loop: SDPA for each example with a mask of
its own, all kept. ours: attention.attend under attention.packed_mask, FlexAttention on a GPU and documents elsewhere; on a GPU the
latter too.
"""

import statistics
from itertools import pairwise
from types import SimpleNamespace

import torch

import attention
import packing
from tools.bench import pack as pack_bench
from tools.bench.peers import clock, reach, spread

FRAME, TIME = 83, 5                      # tokens of a frame with its markers, and of the time before it


def rows(tokens, count, seed=0, branches=0):
    """The first packs of the stream that fill at least 0.8 of a row -> [(doc, branch, bidir), ..], (1,T) each. Or, where the number of
    branches is given, one example in each: a quarter of the row a film, the rest its annotations."""
    if branches:
        film = SimpleNamespace(trunk=tokens // 4, branches=[(tokens - tokens // 4) // branches] * branches, crops=1)
        film.tokens = film.trunk + sum(film.branches)
        return [fields_of([film], tokens)] * count
    stage = 3 if tokens >= pack_bench.recipe(3)[0][0] else 2
    limit, crops = pack_bench.recipe(stage)[0]
    examples = pack_bench.stream(stage, 400, seed)
    packs = packing.Planner([e[:2] for e in examples], tokens, max(crops * tokens // limit, 1))
    full = [[examples[i] for i in pack] for pack in packs if sum(examples[i].tokens for i in pack) >= 0.8 * tokens][:count]
    if len(full) < count:
        raise ValueError(f"--tokens {tokens}: 400 examples fill {len(full)} such rows, not {count}")
    return [fields_of(pack, tokens) for pack in full]


def fields_of(pack, tokens):
    doc, branch, bidir = torch.full((tokens,), -1, dtype=torch.int32), *torch.zeros(2, tokens, dtype=torch.int32)
    start = 0
    for number, e in enumerate(pack):
        order = torch.arange(e.trunk, dtype=torch.int32)
        doc[start : start + e.tokens] = number
        seen = (order > 0) & (order % (FRAME + TIME) < FRAME) & (e.crops > 0)
        bidir[start : start + e.trunk] = seen.int()
        at = start + e.trunk
        for j, n in enumerate(e.branches, 1):
            branch[at : at + n] = j
            at += n
        start += e.tokens
    return doc[None], branch[None], bidir[None]


def masks_of_examples(doc, branch, bidir):
    ends = [0, *(doc[0].diff().nonzero()[:, 0] + 1).tolist(), doc.shape[1]]
    return [(slice(a, b), attention.allow(*(f[:, a:b] for f in (doc, branch, bidir)))) for a, b in pairwise(ends)]


def loop(q, k, v, masks):
    return torch.cat([attention.attend(q[:, at], k[:, at], v[:, at], mask) for at, mask in masks], dim=1)


# how each way makes its mask, and what it does with it
WAYS = {"dense": (attention.allow, attention.attend), "loop": (masks_of_examples, loop), "ours": (attention.packed_mask, attention.attend)}
ON_GPU = WAYS | {"documents": (attention.allow_by_document, attention.attend)}


def measure(way, fields, given, device):
    """-> {"mask", "forward", "both" in seconds, "bytes" at most beside what was there, None on a CPU}, what it computed."""
    make, attend = way
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before, start = torch.cuda.memory_allocated(device) if cuda else 0, clock(device)
    mask = make(*fields)
    made = clock(device)
    out = attend(*given, mask)
    ahead = clock(device)
    grads = torch.autograd.grad(out, given, torch.ones_like(out))
    end = clock(device)
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else None
    return {"mask": made - start, "forward": ahead - made, "both": end - made, "bytes": peak}, [out.detach(), *grads]


def bench_row(tokens, args):
    device, generator = torch.device(args.device), torch.Generator().manual_seed(0)
    cuda = device.type == "cuda"
    several = [[f.to(device) for f in row] for row in rows(tokens, args.rows, branches=args.branches)]
    given = [torch.randn(1, tokens, heads, args.dim, generator=generator).to(device, getattr(torch, args.dtype)).requires_grad_()
             for heads in (args.heads, args.kv_heads, args.kv_heads)]
    ways, rounds = ON_GPU if cuda else WAYS, []
    off = dict.fromkeys(ways, 0.0)
    for fields in several:               # also warms up, and compiles
        expected = measure(ways["dense"], fields, given, device)[1]
        for name, way in ways.items():
            found = measure(way, fields, given, device)[1]
            off[name] = max(off[name], *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)))
            del found
            if off[name] > (1e-4 if args.dtype == "float32" and args.device == "cpu" else 0.05):
                raise RuntimeError(f"{name} differs from dense by {off[name]:.1e} of the largest value")
    for k in range(args.rounds):
        line = {}
        for name in list(ways)[:: 1 if k % 2 else -1]:
            each = [measure(ways[name], fields, given, device)[0] for fields in several]
            line[name] = {part: statistics.fmean(m[part] for m in each) for part in ("mask", "forward", "both")}
            line[name]["bytes"] = max(m["bytes"] for m in each) if cuda else None
        rounds.append(line)
    # the true area, a block of queries at a time: no square of a long row
    allowed = sum(int(attention.allow(*f, slice(at, at + 512)).sum()) for f in several for at in range(0, tokens, 512))
    case = {"rows": args.rows, "examples": sum(int(f[0].max()) + 1 for f in several), "area": allowed / tokens**2 / args.rows, "ways": {}}
    print(f"\n{args.rows} rows of {tokens} tokens, {case['examples']} examples, {case['area']:.1%} of all pairs allowed; times of one row\n"
          "way             mask ms  forward ms  with backward ms   MiB   dense / it (range)   loop / it (range)   off")
    for name in ways:
        r = {part: statistics.median(line[name][part] for line in rounds) for part in ("mask", "forward", "both")}
        r["bytes"] = max(line[name]["bytes"] for line in rounds) if cuda else None
        for other in ("dense", "loop"):
            r[f"{other}_over"] = spread(line[other]["both"] / line[name]["both"] for line in rounds)
        case["ways"][name] = r | {"off": off[name]}
        shown = ["{median:8.2f} ({min:.2f}-{max:.2f})".format(**r[f"{other}_over"]) for other in ("dense", "loop")]
        print(f"{name:12s} {r['mask'] * 1e3:10.1f} {r['forward'] * 1e3:11.1f} {r['both'] * 1e3:17.1f} "
              f"{'-' if r['bytes'] is None else r['bytes'] // 2**20:>5} {shown[0]:>20} {shown[1]:>19}   {off[name]:.0e}", flush=True)
    return case


def add_arguments(parser):
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of a row (default 4096 16384)")
    parser.add_argument("--rows", type=int, default=3, help="of each length, one after the other (default 3)")
    parser.add_argument("--branches", type=int, default=0, help="rows of one film with so many annotations, none from the stream")
    parser.add_argument("--heads", type=int, default=8, help="of queries (default 8)")
    parser.add_argument("--kv-heads", type=int, default=2, help="default 2")
    parser.add_argument("--dim", type=int, default=64, help="of a head (default 64)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")


def run(args):
    """Prints a table per length -> {"4096": what it shows, ..}. ValueError for what cannot be measured."""
    if min(*args.tokens, args.rows, args.rounds, args.kv_heads, args.heads, args.dim) < 1 or args.heads % args.kv_heads:
        raise ValueError("--tokens, --rows, --rounds and --dim must be at least 1, --heads a multiple of --kv-heads")
    if not 0 <= args.branches <= min(args.tokens) // 2:
        raise ValueError(f"--branches {args.branches}: from 0 to half of a row's tokens")
    reach(args.device)
    return {str(tokens): bench_row(tokens, args) for tokens in args.tokens}
