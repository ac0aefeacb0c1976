"""The first look at a reader's function: compared with the project's on the row of the walk.

Each function takes the reader's and returns a sentence that says what is wrong and where to look,
or None. The project's tests, which take longer, come after it (tools/walk/check.py).
"""

import itertools
from types import SimpleNamespace

import torch

import attention
import data
import packing
import train
from tools.walk import examples, ranks, swap


def look_at_allow(mine):
    row = examples.encode()
    batch = examples.collate([row])
    wanted = attention.allow(batch.visible_until, batch.bidir)
    found = mine(batch.visible_until, batch.bidir)
    if not torch.is_tensor(found) or found.shape != wanted.shape or found.dtype != torch.bool:
        kind = f"{found.dtype} {tuple(found.shape)}" if torch.is_tensor(found) else type(found)
        return f"the mask must be torch.bool of shape {tuple(wanted.shape)}; yours is {kind}"
    wrong = (found != wanted)[0].nonzero()
    if not len(wrong):
        return None
    q, k = wrong[0].tolist()
    parts = examples.parts_of(row, examples.ROW)
    of_q, of_k = (next(p for p in parts if p.start <= place < p.stop) for place in (q, k))
    pair = (f"query {q} ({of_q.name}) and key {k} ({of_k.name}), whose visible_until is "
            f"{int(batch.visible_until[0, k])}; {len(wrong)} pairs are wrong in all")
    both_ways = bool((batch.bidir[0, q] == batch.bidir[0, k]) & (batch.bidir[0, q] != 0))
    if wanted[0, q, k]:
        why = ("both are visual tokens of one example (the same bidir, not 0): they see each other "
               "both ways" if k > q and both_ways else "k <= q < visible_until[k] holds")
        return f"the pair must be allowed, but is not: {pair}. Why: {why}."
    if of_q.example != of_k.example or of_k.example == -1:
        why = "they belong to different examples of the row: the key's visibility ends before q"
    elif of_q.name != of_k.name and k < q:
        why = "they are in different branches: the key's visibility ends before the query's place"
    elif k > q:
        why = "the key comes after the query, and they are not both visual: bidir 0 is no group"
    else:
        why = "visible_until is the first place that may no longer see the key"
    return f"the pair must not be allowed, but is: {pair}. Why: {why}."


def look_at_best_subset(mine):
    """On the pool of the walk, and on pools where the largest first is not the best."""
    stream = [packing.Item(i, t, c, 0) for i, (t, c) in enumerate(examples.STREAM)]
    cases = [(stream[: examples.POOL], examples.ROW, examples.MAX_CROPS), (stream[4:], 100, 4),
             (stream[1:9], 70, 3)]
    for items, tokens, crops in cases:
        found = mine(list(items), tokens, crops, 1, 1 / tokens, 1 / crops)
        if not isinstance(found, list) or not set(found) <= set(items):
            return f"the result must be a list of some of the items; yours is {found!r}"
        if len(set(found)) < len(found):
            return "an item may be taken only once, but your list has one of them twice"

        def used(subset):
            return sum(e.tokens for e in subset), sum(e.crops for e in subset)

        def worth(subset, tokens=tokens, crops=crops):
            t, c = used(subset)
            return t / tokens + c / crops if t <= tokens and c <= crops else -1

        if worth(found) < 0:
            return (f"your subset has {used(found)} tokens and crops, but the row has room for "
                    f"{(tokens, crops)} only: both limits count")
        subsets = itertools.chain(*(itertools.combinations(items, n) for n in range(len(items))))
        best = max(subsets, key=worth)
        if worth(found) < worth(best) - 1e-9:
            return (f"your subset uses {used(found)} tokens and crops of {(tokens, crops)} and is "
                    f"worth {worth(found):.3f}; another uses {used(best)} and is worth "
                    f"{worth(best):.3f}. Taking the largest first is not enough: keep, for every "
                    "sum of tokens and crops that can be reached, one subset that reaches it")
    return None


def look_at_token_weight(mine):
    kinds = [(kind, of_video) for kind in ("point", "count", "track", "caption", "qa", "text")
             for of_video in (False, True)]
    for (kind, of_video), n_loss, config in itertools.product(
            kinds, (9, 0), (examples.DATA, examples.FLAT)):
        branch = data.Branch([], kind, 3.0, of_video)
        wanted = data.token_weight(branch, n_loss, 4, config)
        medium = "a video" if of_video else "an image"
        where = (f"a branch of kind '{kind}' of {medium}, with weight 3, {n_loss} loss tokens, "
                 f"4 branches, sqrt_length {config.sqrt_length}")
        try:
            found = mine(branch, n_loss, 4, config)
        except ZeroDivisionError:
            return f"a division by zero for {where}: count at least one loss token"
        if not isinstance(found, float | int) or abs(found - wanted) > 1e-9:
            return (f"the weight of {where} is {wanted:.4f}; yours is {found}. Flat weights come "
                    "first, the square roots hold for everything else, and branch.weight "
                    "multiplies all of them")
    return None


def look_at_ulysses(mine):
    """On two processes, each of which loads the reader's function again (swap.swap_in)."""
    try:
        mine(attention.attend, None)     # cheap: is anything written yet?
    except NotImplementedError:
        raise
    except Exception:                    # there is no process group here
        pass
    found = ranks.two_processes(swap.swap_in)
    heads, tokens = examples.MODEL.n_head, examples.ROW
    for rank, own in enumerate(found):
        wanted = torch.zeros(tokens, heads, dtype=torch.bool)
        wanted[:, rank * heads // 2 : (rank + 1) * heads // 2] = True
        if own.heads.shape != wanted.shape or not torch.equal(own.heads, wanted):
            return (f"inside attention process {rank} must have heads {rank * 2} and {rank * 2 + 1}"
                    f" of all {tokens} tokens; yours has {int(own.heads.any(1).sum())} tokens, and "
                    f"heads {own.heads.any(0).nonzero()[:, 0].tolist()}. Before the exchange, "
                    "dimension 0 must be the process that gets the heads; after it, dimension 0 is "
                    "the slice of tokens")
        wanted[:] = False
        wanted[rank * tokens // 2 : (rank + 1) * tokens // 2] = True
        if not torch.equal(own.returned, wanted):
            return (f"after the second exchange process {rank} must have all heads of its own "
                    "tokens again, in their order")
    loss, weight = ranks.one_process()
    shared = sum(own.loss for own in found) / sum(own.weight for own in found)
    if abs(shared - loss / weight) > 1e-9:
        return (f"two processes compute the loss {shared:.8f}, one computes {loss / weight:.8f}: "
                "the tokens or heads come back in another order, or k and v do not match q")
    return None


def look_at_forward_backward(mine):
    data_config = examples.DATA
    config = SimpleNamespace(data=data_config, crop_bucket=1, cp=1, z_loss=1e-2,
                             activation_checkpointing=False)
    run = SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32,
                          ranks=SimpleNamespace(cp_rank=0))
    row = examples.encode()
    halves = [row[:1]], [row[1:]]                # micro-batches of one row each

    def gradient(function, given=run, by_weight=False, micro_batches=halves):
        model = examples.new_model()
        sums = 0
        for rows in micro_batches:
            result = function(given, model, rows)
            if by_weight:
                weight = sum(float(x.weights.sum()) for x in rows[0])
                sums = sums + flat(model) / weight
                model.zero_grad()
        return (sums if by_weight else flat(model)), result

    wanted, _ = gradient(train.forward_backward)
    found, result = gradient(mine)

    def is_along(other):
        return float((found / found.norm() - other / other.norm()).norm()) < 1e-6

    if float((found - wanted).norm()) > 1e-6 * float(wanted.norm()):
        without_z = SimpleNamespace(**vars(run) | {"config": SimpleNamespace(
            **vars(config) | {"z_loss": 0.0})})
        if is_along(gradient(train.forward_backward, by_weight=True)[0]):
            return ("each micro-batch was divided by its own weight, so the video counts more than "
                    "it should; add up sums, train.divide_and_clip divides once")
        if is_along(gradient(train.forward_backward, micro_batches=halves[1:])[0]):
            return "the gradient is that of the last micro-batch alone: do not call zero_grad here"
        if is_along(gradient(train.forward_backward, without_z)[0]):
            return "the z-loss is missing: run.config.z_loss * lse**2 is added to nll"
        return (f"the gradient of two micro-batches has norm {float(found.norm()):.4f} instead of "
                f"{float(wanted.norm()):.4f}: it must be that of the sum, not the mean, of "
                "weights * (nll + z_loss * lse**2)")
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[0], packing.Batch) or result[1].dim() != 2:
        return "it must return the Batch and nll (B,T), which the log reads"
    return None


def flat(model):
    """All gradients as one vector."""
    return torch.cat([torch.zeros(p.numel()).double() if p.grad is None else p.grad.flatten()
                      for p in model.parameters()])


FIRST_LOOKS = {"allow": look_at_allow, "best_subset": look_at_best_subset,
               "token_weight": look_at_token_weight, "ulysses": look_at_ulysses,
               "forward_backward": look_at_forward_backward}
assert set(FIRST_LOOKS) == set(swap.MODULE_OF)
