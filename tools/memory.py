"""Where the memory of a GPU goes, and what leaves it: bytes by part, of one training step or of one answer. Counted, not measured.

    python -m tools.memory --stage 1 --preset 4b --train connector,llm --micro-batch 1
    python -m tools.memory --stage 3 --preset 8b --gpus 8 --cp 8
    python -m tools.memory --stage 3 --preset 8b --gpus 128 --cp 8 --shard=8         # weights sharded within each node
    python -m tools.memory --stage 3 --preset 4b --generate                          # a prompt and its answer, --data.max_tokens long

Takes the flags of train.py; prints parts, moments (the largest is the peak), what is sent, then one JSON line. One rule is behind all
activations: autograd keeps what the backward of an operation reads. y = x W needs x for the gradient of W, and W for that of x; a product
needs both factors; a sum needs nothing. Autocast hands matrices bfloat16 copies of float32 tensors, and then it is the copies that stay.

The worst case is counted: full rows, all crops, loss at every token. Attention of the decoder is FlexAttention, as on a GPU. Left out:
integers per token beside the batch, work space inside kernels, the CUDA context (half a GiB), what torch.compile saves, and what the
allocator loses between blocks: leave a tenth for these.

Sent is what leaves one rank for one micro-batch. Of R ranks that gather n bytes, or sum them up and keep a shard each, one sends
n (R-1)/R; where each keeps the whole sum, twice that, as in a ring. Numbers that steer the run (losses, norms) are left out.

B rows, T tokens of a row, V vocabulary, K patches per window; widths: C decoder, h its MLPs, Q all queries, KV all keys, E ViT,
e its MLPs, F the features that are pooled (two blocks side by side); s bytes of a number in matrix products, 2 under autocast or 4.
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import parallel
import train

GB, SIZES = 2**30, (24, 48, 80, 141)     # what "80 GB" means on a GPU
NLL_CHUNK, BLOCK = 1024, 128             # Molmo2.nll_chunk; pairs of attention.allow_by_blocks are BLOCK x BLOCK


def letters(config, s, gpus=1):
    """What one of `gpus` ranks computes in one forward, at most.

    An image has up to 196 visual tokens per crop (a view and a mosaic of one crop each), a frame only 81; but a frame's windows pool
    9 patches and not 4, and a single frame widens all windows of its batch. Stage 1 has no frames.
    """
    m, v, B, T, cp = config.model, config.model.vision, config.micro_batch, config.data.max_tokens, config.cp
    own = -(-config.pack_crops // cp) + (cp > 1) * config.data.max_crops       # of a row: its share, and what else its images have
    crops, per_crop = B * min(own, config.pack_crops), (-(-v.grid // 2)) ** 2
    return SimpleNamespace(
        m=m, v=v, s=s, B=B, T=T, V=m.n_vocab, K=4 if config.stage == 1 else 9, C=m.n_embd, h=m.n_hidden, Q=m.n_head * m.head_dim,
        KV=m.n_kv_head * m.head_dim, E=v.n_embd, e=v.n_hidden, F=len(v.feature_layers) * v.n_embd, tokens=B * T // cp,
        patches=-(-crops // config.crop_bucket) * config.crop_bucket * v.n_patch,              # padding is encoded too
        visual=min(crops * per_crop, B * T), arriving=min(B * config.pack_crops * per_crop, B * T // cp),          # pooled here; used here
        cp=cp, gpus=gpus, ranks=config.shard or gpus,                                          # ranks: that hold the weights together
        kv=max(m.n_kv_head, cp) * m.head_dim,                                                  # copied where ranks outnumber kv heads
        wide=4 if gpus == 1 else s,      # of q and k after their norms, whose weights FSDP gathers in the arithmetic's dtype
        again=config.activation_checkpointing, keep=min(config.uncheckpointed_blocks, m.n_layer), qwen=m.family == "qwen",
        dropout=config.residual_dropout + config.response_dropout > 0,
        vit="vit" in config.train, connector="connector" in config.train, llm="llm" in config.train, frozen=config.freeze_embedding)


def blocks_of(tokens):
    return -(-tokens // BLOCK)


# ---- numbers in the model, as (in matrices, in everything else): autocast copies matrices, with their biases

def vit_block_size(x):
    return 4 * (x.E * x.E + x.E) + (x.E * x.e + x.e) + (x.e * x.E + x.E), 2 * 2 * x.E        # q k v out, up, down; two LayerNorms


def block_size(x):
    norms = 2 * x.C + (2 * x.m.head_dim if x.qwen else x.Q + x.KV)            # two of the stream; of q and k, per head or whole
    return x.C * (x.Q + 2 * x.KV) + x.Q * x.C + 3 * x.C * x.h, norms          # q k v, out, up gate down


def parameters(x):
    """{part: (numbers in matrices, numbers in everything else)}, parts as in Molmo2.groups."""
    (vit, vit_norms), (llm, norms), table = vit_block_size(x), block_size(x), x.V * x.C
    pool, projector = 3 * (x.F * x.E + x.E) + (x.E * x.E + x.E), 2 * x.E * x.h + x.h * x.C
    return {"vit": (x.v.n_pixel * x.E + x.E + x.v.n_layer * vit, x.v.n_patch * x.E + x.v.n_layer * vit_norms),  # patches; positions
            "connector": (pool + projector, x.m.n_extra * x.C),                              # extra embeddings
            "llm": (x.m.n_layer * llm + (0 if x.m.tied else table), table + x.m.n_layer * norms + x.C)}         # head; embedding, norm


def units(x):
    """{part: (numbers that FSDP gathers at once, how often, how many of them learn)}, as parallel.parallelize wraps them."""
    sizes, table = {part: sum(n) for part, n in parameters(x).items()}, x.V * x.C
    vit, llm, extra = sum(vit_block_size(x)), sum(block_size(x)), x.m.n_extra * x.C
    patches, connector, head = sizes["vit"] - x.v.n_layer * vit, sizes["connector"] - extra, sizes["llm"] - x.m.n_layer * llm
    return {"ViT block": (vit, x.v.n_layer, x.vit * vit),
            "vision": (patches + connector, 1, x.vit * patches + x.connector * connector),
            "decoder block": (llm, x.m.n_layer, x.llm * llm),
            "model": (head + extra, 1, x.connector * extra + x.llm * (head - x.frozen * table))}


# ---- what backward needs, in bytes

def read_by(x, n):
    """Of a number that n matrices read: autocast copies it for each of them, float32 is kept once, as it is."""
    return n * x.s if x.s < 4 else 4


def vit_block(x):
    """Of a patch, in a block that learns. A frozen ViT keeps nothing: there is nothing below it to learn."""
    norms = 2 * (4 * x.E + 2 * 4)                        # the residual stream before each, float32; mean and deviation
    inputs = (read_by(x, 3) + read_by(x, 1)) * x.E       # of q k v, of up
    attend = x.s * 4 * x.E + 4 * x.v.n_head              # q, k, v, and what comes out, which `out` reads; logsumexp per head
    return norms + inputs + attend + x.s * 2 * x.e       # around GELU: before it, and after it for down


def attention(x):
    """Of a token, in one block: norm, attention, dropout. A frozen decoder lets gradients pass: its matrices need no inputs, all else
    stays."""
    of_heads = (4 + x.llm * x.s) * (x.Q + x.KV) + 4 * (x.m.n_head + x.m.n_kv_head if x.qwen else 2)           # norms of q and k
    return norm(x) + x.llm * read_by(x, 3) * x.C + of_heads + flex(x) + x.dropout * x.C


def flex(x):
    """q, k, v (after an exchange views of one tensor), what comes out, logsumexp; `out` reads that, or its copy that was exchanged."""
    return x.s * (2 * x.Q + 2 * x.kv + (x.cp > 1) * x.llm * x.Q) + 4 * x.m.n_head


def norm(x):
    """An RMSNorm keeps its input as float32, 1/rms of every row, and for the gradient of its scale the normalised input, in the input's
    dtype: float32 where qwen's norms read the residual stream, s where olmo's, and all norms of q and k, read a product."""
    return (4 + x.llm * (4 if x.qwen else x.s)) * x.C + 4


def mlp(x):
    """Of a token, in one block: norm, MLP, dropout, of which a byte says which numbers stay."""
    inner = x.s * x.h * (3 + x.llm)                                           # gate, silu(gate), up; their product, for down
    return norm(x) + x.llm * read_by(x, 2) * x.C + inner + x.dropout * x.C


def connector(x):
    """Of a visual token, pooled from K patches and projected."""
    inputs = x.connector * (read_by(x, 1) + read_by(x, 2) * x.K) * x.F        # the mean, for q; the window, for k and v
    pool = x.s * (1 + 2 * x.K) * x.E + 4 * x.K * x.v.n_head                   # q, k, v; the softmax
    outputs = x.connector * 2 * x.s * x.E                                     # pooled, for `out`; projected, for up and gate
    return inputs + pool + outputs + x.s * x.h * (3 + x.connector)            # gate, silu(gate), up; their product, for down


def whole_blocks(x):
    """Bytes of what decoder blocks keep that do not run again, and how many these are."""
    copies = x.again * (x.s < 4 and x.gpus == 1) * x.s * block_size(x)[0]     # of its weights; without activation_checkpointing counted apart
    n = x.keep if x.again else x.m.n_layer
    return n * ((attention(x) + mlp(x)) * x.tokens + copies), n


def kept(x):
    """{part: bytes} of all that lives from the forward to the backward, copies of weights apart."""
    if x.again:                          # inputs of blocks, float32, and the features, which are the input of the pooling
        vit, pooled = x.v.n_layer * 4 * x.E * x.patches, 4 * x.F * x.patches
    else:
        vit, pooled = x.v.n_layer * vit_block(x) * x.patches, connector(x) * x.visual
    whole, n = whole_blocks(x)
    llm = whole + (x.m.n_layer - n) * 4 * x.C * x.tokens
    rope = (2 if x.m.yarn.layers else 1) * 2 * 4 * (x.m.head_dim // 2) * x.tokens            # cos and sin
    return {"ViT": x.vit * (vit + x.s * x.v.n_pixel * x.patches),                            # pixels: what its first matrix reads
            "connector": (x.vit or x.connector) * pooled,
            "pooled tokens": (x.vit or x.connector) * 4 * x.C * x.arriving,                  # index_add keeps what it adds
            "decoder": llm + rope,
            "loss": (4 + x.llm * 4 + 4) * x.C * x.tokens}                                    # final norm; what the head reads


# ---- one step, one answer

def batch(x):                            # tokens, targets, pos, labelled, weights; doc, branch, bidir; images; pool_src, pool_dst
    return (4 * 8 + 4) * x.tokens + 3 * 4 * x.B * x.T + x.v.n_pixel * x.patches + 8 * (x.K * x.visual + x.arriving)


def training(x):
    """-> {part: bytes}, {moment: bytes}: the largest moment is the peak.

    FSDP2 shards float32 weights, gradients and optimizer. It gathers the block at work and the next one, decoder blocks in the
    arithmetic's dtype, all else in float32; embedding, last norm and head stay whole from the forward to the end of the backward.
    """
    s, sizes, unit, table, fsdp = x.s, parameters(x), units(x), x.V * x.C, x.gpus > 1
    head_learns = x.llm and not (x.m.tied and x.frozen)
    copy = s if s < 4 else 0                             # bytes of a number of a weight's copy, where there is one
    graded = s + copy * 2                                # ... of its gradient, until that has been added as float32
    trained = sum(times * learn for _, times, learn in unit.values())

    # autograd keeps the copies that gradients pass through; where blocks run again, train.py has autocast copy at every use
    held = {"vit": x.vit, "connector": x.connector or x.vit, "llm": True}
    copied = sum(sizes[part][0] for part in sizes if held[part]) - fsdp * x.m.n_layer * block_size(x)[0]
    copies = 0 if x.again else copy * (copied + table * (x.m.tied and head_learns))
    head = 0 if head_learns and not x.again else copy * table
    block = 0 if fsdp else copy * block_size(x)[0]
    whole, n_whole = whole_blocks(x)
    # of decoder blocks that keep all, the first that backward comes to; of those that run again, all that one keeps, when those have gone
    cases = [(0, 0)] * (n_whole > 0) + [(1, block - whole)] * (n_whole < x.m.n_layer)
    keep, n, stream = kept(x), min(NLL_CHUNK, x.tokens), (4 + s) * x.C * x.tokens           # gradients: of the stream, of a product
    qkv = s * (x.Q + 2 * x.kv)
    work = {
        # the features so far and the stream, beside what is kept; in a block: its norm, q, k, v, and both sides of GELU
        "ViT forward": (4 * x.F + (4 + 4 + 3 * s) * x.E + 2 * s * x.e) * x.patches + copy * vit_block_size(x)[0],
        # a chunk of logits, float32, and logsumexp's copy of them
        "logits forward": 2 * 4 * n * x.V + head,
        # logits, the gradient of gather, three steps of logsumexp's; or then the gradient of the head
        "logits": max(5 * 4 * n * x.V, (s * n + head_learns * graded * x.C) * x.V) + copy * table,
        # all that it keeps (its input once more) with copies of its weights; either gradients of gate, silu and up, when only the
        # product has been freed, or of a matrix
        "decoder block": max(again * (attention(x) + mlp(x)) * x.tokens + more for again, more in cases)
        + stream + max(2 * s * x.h * x.tokens, x.llm * graded * x.C * x.h),
        # the MLP has gone. Gradients of q, k, v beside that of the result and its product with the result, one number per head; or those
        # of q as float32 too; or where ranks exchange them, two of each. Or when all that and k's norm have gone, five steps of q's,
        # float32, beside the gradient of v
        "attention": max(again * attention(x) * x.tokens - (not again) * mlp(x) * x.tokens + more for again, more in cases) + stream
        + max(qkv + max(s * x.Q + 4 * x.m.n_head, (x.wide > s) * x.wide * x.Q, (x.cp > 1) * qkv),
              5 * 4 * x.Q + s * x.kv - flex(x) - x.llm * s * x.Q - (4 + x.llm * s) * x.KV) * x.tokens,
        # the windows beside all that it keeps; their gradient, through k and through v, comes when most of that has gone
        "connector": (x.again * connector(x) + 4 * x.K * x.F) * x.visual + x.again * copy * sizes["connector"][0],
        # as the decoder's, with its input once; and the gradient of the features
        "ViT block": x.vit * (x.again * ((vit_block(x) - 4 * x.E) * x.patches + copy * vit_block_size(x)[0])
                              + ((4 + s) * x.E + s * x.e + 4 * x.F) * x.patches)}

    fixed = {"weights": 4 * sum(map(sum, sizes.values())) // x.ranks,
             "gradients": 4 * trained // x.ranks,        # from the second micro-batch of a step on
             "optimizer": 2 * 4 * trained // x.ranks,    # AdamW's two means
             "batch": batch(x),
             # for the forward and for the backward, blocks allowed in part and as a whole: which, and how many; three integers per token
             "mask": x.B * (4 * 4 * blocks_of(x.T) * (blocks_of(x.T) + 1) + 3 * 4 * BLOCK * blocks_of(x.T)),
             "gathered: embedding and head": fsdp * 4 * unit["model"][0]}
    blocks, seeing = fsdp * 2 * s * unit["decoder block"][0], fsdp * 4 * (unit["vision"][0] + 2 * unit["ViT block"][0])
    # gradients that are whole until they have been summed up: of a block and, in float32, of the one before; of the rest, at the end
    summed = {"decoder block": fsdp * (4 + s) * unit["decoder block"][2], "ViT block": fsdp * 2 * 4 * unit["ViT block"][2],
              "vision": fsdp * 4 * unit["vision"][2], "model": fsdp * 4 * unit["model"][2]}
    still = sum(fixed.values())
    below = still + copies + keep["ViT"] + summed["model"]
    above = below + keep["connector"] + keep["pooled tokens"] + keep["decoder"] + blocks
    moments = {"forward of the ViT": still + keep["ViT"] + work["ViT forward"] + seeing,
               "end of the forward": still + sum(keep.values()) + copies + work["logits forward"] + blocks,
               "backward of the loss": above + keep["loss"] + work["logits"],
               "backward of a decoder block": above + work["decoder block"] + summed["decoder block"],
               "backward of attention": above + work["attention"] + summed["decoder block"],
               "backward of the connector": below + keep["connector"] + work["connector"] + seeing + summed["vision"],
               "backward of a ViT block": below + work["ViT block"] + seeing + summed["vision"] + summed["ViT block"],
               "end of the backward": still + copies + seeing + 2 * (summed["vision"] + summed["model"])}
    parts = fixed | {"gathered: decoder blocks": blocks, "gathered: vision": seeing} | {f"kept: {k}": n for k, n in keep.items()}
    return parts | {"copies of weights": copies} | {f"work: {k}": n for k, n in work.items()}, moments


def room_for(x, size):
    """The most decoder blocks of which a step in `size` bytes can keep all; 0 where it does not fit without any."""
    fits = lambda n: max(training(SimpleNamespace(**{**vars(x), "keep": n}))[1].values()) <= size        # noqa: E731
    return max(filter(fits, range(1, x.m.n_layer + 1)), default=0)


def sent(x):
    """-> {what: bytes} that leave one rank for one micro-batch, at most (the convention is above)."""
    unit, R, copies, seen = units(x), x.ranks, x.gpus // x.ranks, x.vit or x.connector
    whole = {part: (x.s if part == "decoder block" else 4) * n * times for part, (n, times, _) in unit.items()}
    # all but what stays whole; FSDP is one unit ahead of the backward, and so gathers the first of those that learn nothing
    back = whole["decoder block"] + whole["vision"] + (whole["ViT block"] if x.vit else seen * 4 * unit["ViT block"][0])
    learned, layer = 4 * sum(times * n for _, times, n in unit.values()), parallel.bytes_sent(x.m, x.B * x.T, x.cp, x.s)
    return {"Ulysses, forward of a layer": layer,
            "Ulysses": (3 * x.m.n_layer - whole_blocks(x)[1]) * layer,        # forward, again, backward
            "pooled tokens, forward": (x.cp > 1) * x.s * x.C * x.visual,      # should all of them belong elsewhere
            "pooled tokens, backward": (x.cp > 1) * seen * x.s * x.C * x.arriving,
            "weights, forward": sum(whole.values()) * (R - 1) // R, "weights, backward": back * (R - 1) // R,
            "gradients, to their shards": learned * (R - 1) // R, "gradients, between copies": 2 * learned // R * (copies - 1) // copies}


def answering(config, s):
    """-> {part: bytes}, {moment: bytes} of tools.generate: prompt and answer fill data.max_tokens, weights are in the dtype."""
    x = letters(config, s)
    fixed = {"weights": s * sum(map(sum, parameters(x).values())), "cache": x.m.n_layer * 2 * x.KV * s * x.tokens, "batch": batch(x)}
    work = {"ViT": (s * x.F + 5 * s * x.E + 2 * s * x.e) * x.patches,                        # as in training, all in dtype
            # embedded text; features; windows, k, v, v weighted, mean and q; or the projector's gate, up and product
            "connector": s * x.C * x.tokens + s * x.F * x.patches + s * max((x.F + 3 * x.E) * x.K + x.F + x.E, 3 * x.h) * x.visual,
            # stream: of the model, of the block, after attention, normalised; q, k, v and RoPE in float32 (q, its halves turned,
            # both joined), or gate, up and product; masks
            "decoder": (4 * s * x.C + max(s * (x.Q + 2 * x.KV) + 3 * 4 * x.Q, 3 * s * x.h)) * x.tokens + x.B * x.T * x.T,
            "logits": (s + 4) * x.V * x.B}
    return fixed | {f"work: {k}": n for k, n in work.items()}, {f"prefill: {k}": sum(fixed.values()) + n for k, n in work.items()}


def main(argv=None):
    parser = train.Parser(prog="python -m tools.memory", description=__doc__.split("\n\n")[0], allow_abbrev=False,
                          epilog="All flags of train.py are taken too (python train.py --help), --stage is required.")
    parser.add_argument("--gpus", type=int, default=1, help="processes that train together; --cp and --shard are train.py's (default 1)")
    parser.add_argument("--generate", action="store_true", help="inference: one prompt, or --micro-batch of them")
    try:
        own, rest = parser.parse_known_args(argv)
        args, config = train.parse(rest)
        shape, gpus = config.model, own.gpus
        if args.init:
            raise train.UserError("--init: only shapes are looked at; name one with --preset and --model.*")
        if gpus < 1 or (own.generate and gpus > 1):
            raise train.UserError(f"--gpus {gpus}: must be at least 1, and 1 with --generate")
        micro = (config.micro_batch if "micro_batch" in args.fields else 1) if own.generate else max(min(config.micro_batch, config.batch * config.cp // gpus), 1)
        config = replace(config, micro_batch=micro)      # in training, what train.join leaves of it
        why = parallel.misfit(gpus, config.cp, shape.n_head, shape.n_kv_head, config.batch, micro, config.data.max_tokens, config.shard)
        if why:
            raise train.UserError(why)
    except train.UserError as e:
        print(f"tools.memory: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    s = 4 if config.dtype == "float32" or (config.dtype, config.device) == ("auto", "cpu") else 2
    dtype = {2: "bfloat16", 4: "float32"}[s]
    x = letters(config, s, gpus)
    parts, moments = answering(config, s) if own.generate else training(x)
    peak = max(moments, key=moments.get)
    fits = {size: moments[peak] / (size * GB) for size in SIZES}
    spare = {} if own.generate or not x.again else {size: room_for(x, 0.9 * size * GB) for size in SIZES}
    both = {f"blocks run again: {again}": sum(kept(SimpleNamespace(**{**vars(x), "again": again})).values()) for again in (True, False)}
    tables = {"GiB on one GPU, by part": parts, "GiB on one GPU, at one moment": moments}
    if not own.generate:
        tables |= {f"GiB kept for the backward, in all (in force: {x.again})": both, "GiB that leave one GPU for a micro-batch": sent(x)}

    print(f"stage {config.stage}, {config.preset}, {dtype}: {x.B} x {x.T} tokens, on a GPU {x.patches // x.v.n_patch} crops, {x.visual} "
          f"visual tokens of {x.K} patches" + ("" if own.generate else f"; {', '.join(config.train)} learn"))
    for title, rows in tables.items():
        print(f"\n{title}")
        for name, n in rows.items():
            print(f"{name:30s}{n / GB:9.3f}{'  <- the peak' if name == peak else ''}")
    print(f"\n{'total':30s}{moments[peak] / GB:9.3f}")
    for size, share in fits.items():
        print(f"{size:4d} GB: {'fits' if share <= 0.9 else 'fits only just' if share <= 1 else 'does not fit'}, {share:.0%} of it"
              + (f"; 90 % with --uncheckpointed_blocks={spare[size]}" if spare.get(size) else ""))
    print(json.dumps({"memory": "generate" if own.generate else "train", "preset": config.preset, "stage": config.stage, "dtype": dtype,
                      "train": config.train, "micro_batch": x.B, "max_tokens": x.T, "gpus": gpus, "cp": x.cp,
                      "shard": x.ranks, "activation_checkpointing": x.again, "uncheckpointed_blocks": x.keep, "parts": parts, "moments": moments, "peak": peak,
                      "total": moments[peak], "share_of_gb": fits} | ({} if own.generate else {"kept": both, "sent": sent(x)})))


if __name__ == "__main__":
    main()
