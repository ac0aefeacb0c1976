"""Where the memory of a GPU goes: bytes by part, of one training step or of one answer. Counted, not measured.

    python -m tools.memory --stage 1 --preset 4b --train connector,llm --micro-batch 1
    python -m tools.memory --stage 3 --preset 8b --gpus 8 --cp 8                     # a plan: train.py has one process today
    python -m tools.memory --stage 3 --preset 4b --generate                          # a prompt and its answer, --data.max_tokens long

Takes the flags of train.py; prints parts, moments (the largest is the peak), then one JSON line. One rule is behind all activations:
autograd keeps what the backward of an operation reads. y = x W needs x for the gradient of W, and W for that of x; a product needs
both factors; a sum needs nothing. Autocast hands matrices bfloat16 copies of float32 tensors, and then it is the copies that stay.

The worst case is counted: full rows, all crops, loss at every token, one document. Left out: integers per token beside the batch,
work space inside kernels, the CUDA context (half a GiB), and what the allocator loses between blocks: leave a tenth for these.

B rows, T tokens of a row, V vocabulary, K patches per window; widths: C decoder, h its MLPs, Q all queries, KV all keys, E ViT,
e its MLPs, F the features that are pooled (two blocks side by side); s bytes of a number in matrix products, 2 under autocast or 4.
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import train

GB, SIZES = 2**30, (24, 48, 80, 141)     # what "80 GB" means on a GPU
NLL_CHUNK = 1024                         # Molmo2.nll_chunk


def letters(config, s, cp=1):
    """What one rank computes in one forward, at most; cp ranks share tokens and crops.

    An image has up to 196 visual tokens per crop (a view and a mosaic of one crop each), a frame only 81; but a frame's windows pool
    9 patches and not 4, and a single frame widens all windows of its batch. Stage 1 has no frames.
    """
    m, v, B, T = config.model, config.model.vision, config.micro_batch, config.data.max_tokens
    crops = -(-B * config.pack_crops // config.crop_bucket) * config.crop_bucket             # padding is encoded too
    visual = B * min(config.pack_crops * (-(-v.grid // 2)) ** 2, T)
    return SimpleNamespace(
        m=m, v=v, s=s, B=B, T=T, V=m.n_vocab, K=4 if config.stage == 1 else 9, C=m.n_embd, h=m.n_hidden, Q=m.n_head * m.head_dim,
        KV=m.n_kv_head * m.head_dim, E=v.n_embd, e=v.n_hidden, F=len(v.features) * v.n_embd, tokens=B * -(-T // cp),
        patches=-(-crops // cp) * v.n_patch, visual=-(-visual // cp), again=config.recompute, qwen=m.family == "qwen",
        dropout=config.residual_dropout + config.response_dropout > 0,
        vit="vit" in config.train, connector="connector" in config.train, llm="llm" in config.train)


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


def decoder_block(x):
    """Of a token, without the mask. A frozen decoder lets gradients pass: its matrices need no inputs, all else stays."""
    # an RMSNorm keeps its input as float32, 1/rms of every row, and for the gradient of its scale the normalised input, in the
    # input's dtype: float32 where qwen's norms read the residual stream, s where olmo's, and all norms of q and k, read a product
    norms = 2 * ((4 + x.llm * (4 if x.qwen else x.s)) * x.C + 4)
    norms += (4 + x.llm * x.s) * (x.Q + x.KV) + 4 * (x.m.n_head + x.m.n_kv_head if x.qwen else 2)
    inputs = x.llm * (read_by(x, 3) + read_by(x, 2)) * x.C                    # of q k v, of up and gate
    attend = x.s * (x.Q + 2 * x.KV + x.Q) + 4 * x.m.n_head                    # q, k, v, what comes out; logsumexp per head
    mlp = x.s * x.h * (3 + x.llm)                                             # gate, silu(gate), up; their product, for down
    return norms + inputs + attend + mlp + x.dropout * 2 * x.C                # which numbers stay: a byte each, after attn and mlp


def connector(x):
    """Of a visual token, pooled from K patches and projected."""
    inputs = x.connector * (read_by(x, 1) + read_by(x, 2) * x.K) * x.F        # the mean, for q; the window, for k and v
    pool = x.s * (1 + 2 * x.K) * x.E + 4 * x.K * x.v.n_head                   # q, k, v; the softmax
    outputs = x.connector * 2 * x.s * x.E                                     # pooled, for `out`; projected, for up and gate
    return inputs + pool + outputs + x.s * x.h * (3 + x.connector)            # gate, silu(gate), up; their product, for down


def kept(x):
    """{part: bytes} of all that lives from the forward to the backward, copies of weights apart."""
    if x.again:                          # inputs of blocks, float32, and the features, which are the input of the pooling
        vit, pooled, llm = x.v.n_layer * 4 * x.E * x.patches, 4 * x.F * x.patches, x.m.n_layer * 4 * x.C * x.tokens
    else:                                # SDPA turns the mask into numbers to add, anew in every block
        vit, pooled = x.v.n_layer * vit_block(x) * x.patches, connector(x) * x.visual
        llm = x.m.n_layer * (decoder_block(x) * x.tokens + x.s * x.B * x.T * x.T)
    rope = (2 if x.m.yarn.layers else 1) * 2 * 4 * (x.m.head_dim // 2) * x.tokens            # cos and sin
    return {"ViT": x.vit * (vit + x.s * x.v.n_pixel * x.patches),                            # pixels: what its first matrix reads
            "connector": (x.vit or x.connector) * (pooled + 4 * x.C * x.visual),             # index_add keeps the tokens it adds
            "decoder": llm + rope,
            "loss": (4 + x.llm * 4 + 4) * x.C * x.tokens}                                    # final norm; what the head reads


# ---- one step, one answer

def batch(x):                            # tokens, targets, pos, weights; doc, branch, bidir; images; pool_src, pool_dst
    return (3 * 8 + 4) * x.tokens + 3 * 4 * x.B * x.T + x.v.n_pixel * x.patches + 8 * (x.K + 1) * x.visual


def training(config, s, gpus=1, cp=1):
    """-> {part: bytes}, {moment: bytes}: the largest moment is the peak.

    gpus > 1 is a plan: FSDP2 shards float32 weights, gradients and optimizer over all ranks, gathers the block at work and the
    next one in the arithmetic's dtype, and reduces gradients in float32. Ulysses divides tokens and crops by cp, never the mask.
    """
    x = letters(config, s, cp)
    sizes, table, frozen = parameters(x), x.V * x.C, config.freeze_embedding and x.llm
    trained = sum(sum(sizes[part]) for part in config.train) - table * frozen
    head_learns = x.llm and not (x.m.tied and frozen)
    copy = s if s < 4 or gpus > 1 else 0                 # bytes of a number of a weight's copy, where there is one
    graded = s + 4 * (s < 4)                             # ... of its gradient, until that has been added as float32

    # autograd keeps the copies that gradients pass through; where blocks run again, train.py has autocast copy at every use
    held = {"vit": x.vit, "connector": x.connector or x.vit, "llm": True}
    copies = 0 if x.again else copy * (sum(sizes[part][0] for part in sizes if held[part]) + table * (x.m.tied and head_learns))
    head = 0 if head_learns and not x.again else copy * table
    if gpus > 1:
        copies, head = 2 * copy * block_size(x)[0], copy * table
    keep, n = kept(x), min(NLL_CHUNK, x.tokens)
    work = {
        # the features so far and the stream, beside what is kept; in a block: its norm, q, k, v, and both sides of GELU
        "ViT forward": (4 * x.F + (4 + 4 + 3 * s) * x.E + 2 * s * x.e) * x.patches + copy * vit_block_size(x)[0],
        # a chunk of logits, float32, and logsumexp's copy of them
        "loss forward": 2 * 4 * n * x.V + head,
        # logits, the gradient of gather, three steps of logsumexp's; or then the gradient of the head
        "loss": max(5 * 4 * n * x.V, (s * n + head_learns * graded * x.C) * x.V) + copy * table,
        # all that it keeps (its input once more) with copies of its weights; gradients of the stream, of what a product gave, and
        # either of gate, silu and up, when only the product has been freed, or of a matrix
        "decoder block": x.again * (decoder_block(x) * x.tokens + s * x.B * x.T * x.T + copy * block_size(x)[0])
        + (4 + s) * x.C * x.tokens + max(2 * s * x.h * x.tokens, x.llm * graded * x.C * x.h),
        # the windows beside all that it keeps; their gradient, through k and through v, comes when most of that has gone
        "connector": (x.again * connector(x) + 4 * x.K * x.F) * x.visual + x.again * copy * sizes["connector"][0],
        # as the decoder's, with its input once; and the gradient of the features
        "ViT block": x.vit * (x.again * ((vit_block(x) - 4 * x.E) * x.patches + copy * vit_block_size(x)[0])
                              + ((4 + s) * x.E + s * x.e + 4 * x.F) * x.patches)}
    if gpus > 1:                         # the next block's weights, and this one's gradient until it is reduced
        work["decoder block"] += (copy + 4 * x.llm) * block_size(x)[0]
    if cp > 1:                           # q, k, v leave and arrive; kv heads are repeated where ranks outnumber them
        work["decoder block"] += 2 * s * (x.m.n_head + 2 * max(x.m.n_kv_head, cp)) * x.m.head_dim * x.tokens

    fixed = {"weights": 4 * sum(map(sum, sizes.values())) // gpus,
             "gradients": 4 * trained // gpus,           # from the second micro-batch of a step on
             "optimizer": 2 * 4 * trained // gpus,       # AdamW's two means
             "batch": batch(x),
             "mask": x.B * x.T * x.T}                    # dense, as attention.allow makes it; a CPU has a square per document
    still, later = sum(fixed.values()), 0 if x.again or gpus > 1 else copies
    below = still + later + keep["ViT"]
    moments = {"forward of the ViT": still + keep["ViT"] + work["ViT forward"],
               "end of the forward": still + sum(keep.values()) + copies + work["loss forward"],
               "backward of the loss": still + later + sum(keep.values()) + work["loss"],
               "backward of a decoder block": below + keep["connector"] + keep["decoder"] + work["decoder block"],
               "backward of the connector": below + keep["connector"] + work["connector"],
               "backward of a ViT block": below + work["ViT block"]}
    parts = fixed | {f"kept: {k}": n for k, n in keep.items()} | {"copies of weights": copies}
    return parts | {f"work: {k}": n for k, n in work.items()}, moments


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
    parser.add_argument("--gpus", type=int, default=1, help="shard weights, gradients and optimizer over this many (default 1)")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share the tokens of a row (default 1)")
    parser.add_argument("--generate", action="store_true", help="inference: one prompt, or --micro-batch of them")
    try:
        own, rest = parser.parse_known_args(argv)
        args, config = train.parse(rest)
        heads = config.model.n_head
        if args.init:
            raise train.UserError("--init: only shapes are looked at; name one with --preset and --model.*")
        if own.cp < 1 or heads % own.cp:
            legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise train.UserError(f"--cp {own.cp}: ranks share the {heads} query heads evenly; legal are {legal}")
        if own.gpus < 1 or own.gpus % own.cp or (own.generate and own.gpus > 1):
            raise train.UserError(f"--gpus {own.gpus}: must be a multiple of --cp {own.cp}, and 1 with --generate")
    except train.UserError as e:
        print(f"tools.memory: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    dtype = "float32" if config.dtype == "float32" or (config.dtype, config.device) == ("auto", "cpu") else "bfloat16"
    s = 4 if dtype == "float32" else 2
    if own.generate:
        config = replace(config, micro_batch=args.micro_batch or 1)
    parts, moments = answering(config, s) if own.generate else training(config, s, own.gpus, own.cp)
    x, peak = letters(config, s, own.cp), max(moments, key=moments.get)
    fits = {size: moments[peak] / (size * GB) for size in SIZES}

    print(f"stage {config.stage}, {config.preset}, {dtype}: {x.B} x {x.T} tokens, on a GPU {x.patches // x.v.n_patch} crops, {x.visual} "
          f"visual tokens of {x.K} patches" + ("" if own.generate else f"; {', '.join(config.train)} learn"))
    for title, rows in ("by part", parts), ("at one moment", moments):
        print(f"\nGiB on one GPU, {title}")
        for name, n in rows.items():
            print(f"{name:30s}{n / GB:9.3f}{'  <- the peak' if name == peak else ''}")
    print(f"\n{'total':30s}{moments[peak] / GB:9.3f}")
    for size, share in fits.items():
        print(f"{size:4d} GB: {'fits' if share <= 0.9 else 'fits only just' if share <= 1 else 'does not fit'}, {share:.0%} of it")
    if x.Q != x.KV and not own.generate:
        # float32: the softmax of every block that does not run again, its gradient, that of the scores
        scores = ((1 if x.again else x.m.n_layer) + 2) * 4 * x.B * heads // own.cp * x.T * x.T
        print("Counted with a fused attention kernel. For grouped heads under a mask torch 2.13 has, by its source, one alone: cuDNN's,\n"
              f"in bfloat16, on H100 and B200. Elsewhere, and with --deterministic, its plain one adds some {scores / GB:.1f} GiB.")
    print(json.dumps({"memory": "generate" if own.generate else "train", "preset": config.preset, "stage": config.stage, "dtype": dtype,
                      "train": config.train, "micro_batch": x.B, "max_tokens": x.T, "gpus": own.gpus, "cp": own.cp, "parts": parts,
                      "moments": moments, "peak": peak, "total": moments[peak], "share_of_gb": fits}))


if __name__ == "__main__":
    main()
