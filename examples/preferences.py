"""Trains on preference pairs (DPO, arXiv 2305.18290): an example of an objective of one's own.

    python -m examples.preferences --stage 2 --init Molmo2-4B --data pairs.jsonl --beta 0.1

It has the flags of train.py, and --beta. Two annotations of type text with the same prompt are a
pair, first the chosen answer, then the rejected one. As branches of one tree they share their
image:

    {"image": "coins.png", "annotations": [
        {"type": "text", "prompt": "Are they new?", "text": "No, they are worn."},
        {"type": "text", "prompt": "Are they new?", "text": "Yes."}]}

A record may have several pairs. If its number of annotations is odd, the last one has the usual
loss. Let g be the log probability of an answer minus its value in the model of --init:

    margin = beta * (g of the chosen answer - g of the rejected answer)
    loss   = -log sigmoid(margin)

Its gradient with respect to the nll of a token is w = beta * sigmoid(-margin) in the chosen answer
and -w in the rejected one. So DPO is supervised training with the loss weights w and -w.
"""

import argparse
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F

import train
from records.errors import DataError, UserError
from weights import files, lora


def open_objective(beta, run):
    """-> a function in place of train.forward_backward. Nothing has been written yet, so mistakes
    are found here: UserError, DataError."""
    if not 0 < beta <= 1000:
        raise UserError(f"--beta {beta}: must be above 0 and at most 1000")
    init = run.identity["init"]  # of the first start, if the run is resumed
    if init is None:
        raise UserError("the answers are compared with a reference model; give it with --init")
    check_pairs(run.loader.mixture.sources)
    return partial(forward_backward, open_reference(run, init), beta)


def check_pairs(sources):
    """DataError if there is no pair, or if two annotations are not a pair."""
    n_pairs = 0
    for record in chain.from_iterable(sources):
        found = record["annotations"]
        for k in range(0, len(found) - 1, 2):
            pair = found[k : k + 2]
            kinds = {(a["type"], a.get("prompt"), a["weight"] * record["weight"]) for a in pair}
            if kinds != {("text", pair[0].get("prompt"), 1)}:
                raise DataError(
                    f"{record['where']}: annotations {k + 1} and {k + 2} are not a preference "
                    "pair: both must have the type text, the same prompt and the weight 1")
            n_pairs += 1
    if not n_pairs:
        raise DataError("no record of --data has a preference pair: two annotations of type text "
                        "with the same prompt (docs/preferences.md)")


def open_reference(run, init):
    """-> the model of --init without gradients, sharded in the same way as the trained model."""
    model = files.meta_model(run.config.model).requires_grad_(False).eval()
    if run.config.lora.rank:  # as the run holds the weights below the adapters
        lora.hold_frozen(model, run.dtype)
    train.place(run, model)
    try:
        files.read_weights(model, init)
    except (OSError, ValueError) as e:
        raise UserError(f"the reference model {init}: {e}") from None
    return model


def find_pairs(x):
    """A data.Example -> [number of the chosen annotation of each pair, ..]. Both answers together
    get the loss weight 1, or 0 if one of them did not fit."""
    pairs = []
    for k in range(1, x.n_branches + x.dropped_branches, 2):
        answers = [(x.annotation == number) & (x.weights > 0) for number in (k, k + 1)]
        weight = 0.0
        if all(answer.any() for answer in answers):
            weight = 0.5
            pairs.append(k)
        for answer in answers:
            x.weights[answer] = weight / max(answer.sum(), 1)
    return pairs


def batch_of(run, rows):
    """As train.batch_of -> a Batch that also has its pairs: (number of the example, number of the
    chosen annotation)."""
    examples = [x for row in rows for x in row]
    # before the Batch is made, because it changes their loss weights
    pairs = [(number, k) for number, x in enumerate(examples) for k in find_pairs(x)]
    batch = train.batch_of(run, rows)
    batch.pairs = pairs
    return batch


def forward_backward(reference, beta, run, model, batch):
    """Adds the gradients of a micro-batch -> the loss of each token (B,T). The loss of a token in
    an answer is the loss of its pair."""
    with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32,
                        cache_enabled=False):
        nll, lse = model(batch)
        with torch.no_grad():
            gain = reference(batch)[0] - nll
    # 1 in the chosen answer, -1 in the rejected
    side = nll.new_zeros(len(batch.pairs), *nll.shape)
    for of_pair, (number, k) in zip(side, batch.pairs, strict=True):
        for sign, annotation in ((1, k), (-1, k + 1)):
            of_pair[(batch.example == number) & (batch.annotation == annotation)] = sign
    margin = beta * (side * gain).sum((1, 2))
    if run.config.cp > 1:  # other ranks have other tokens of the same answers
        dist.all_reduce(margin, group=run.ranks.mesh.cp.get_group())

    def of_tokens(values):  # a number for each pair -> (B,T), 0 outside of all pairs
        return torch.einsum("p,pbt->bt", values, side)

    plain = batch.weights * (nll + run.config.z_loss * lse**2)
    preferred = of_tokens(beta * torch.sigmoid(-margin)) * nll
    in_pair = side.any(0)
    plain.where(~in_pair, preferred).sum().backward()
    return nll.where(~in_pair, of_tokens(F.softplus(-margin)).abs())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, default=0.1, help="0.1 is usual; a larger value "
                        "keeps the model closer to the model of --init (default 0.1)")
    args, flags = parser.parse_known_args(argv)
    # dropout would make a difference between the model and the reference, even before training
    flags += ["--residual-dropout=0", "--response-dropout=0"]
    train.main(flags, partial(open_objective, args.beta), batch_of)


if __name__ == "__main__":
    main()
