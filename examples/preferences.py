"""Trains on preference pairs (DPO, arXiv 2305.18290): an example of an objective of one's own.

    python -m examples.preferences --stage 2 --init Molmo2-4B --data pairs.jsonl --beta 0.1

All flags but --beta are those of train.py. Two annotations with the same prompt are a pair, first
the chosen answer, then the rejected one. As branches of one tree they share their image:

    {"image": "coins.png", "annotations": [
        {"type": "text", "prompt": "Are they new?", "text": "No, they are worn."},
        {"type": "text", "prompt": "Are they new?", "text": "Yes."}]}

A record may have several pairs. If its number of annotations is odd, the last one has the usual
loss. Let g be the log probability of an answer minus that of the model of --init:

    margin = beta * (g of the chosen answer - g of the rejected answer)
    loss   = -log sigmoid(margin)

Its gradient with respect to the nll of a token is w = beta * sigmoid(-margin) in the chosen answer
and -w in the rejected one. So DPO is supervised training with the loss weights w and -w.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

import train
from training.config import RankError, UserError
from weights import files, lora


def find_pairs(x):
    """A data.Example -> [number of the chosen annotation of each pair, ..]. Both answers together
    get the loss weight 1, or 0 if one of them did not fit."""
    pairs = []
    for k in range(1, x.n_branches + x.dropped_branches, 2):
        sides = [x.annotation == k, x.annotation == k + 1]
        answers = [side & (x.weights > 0) for side in sides]
        fits = answers[0].any() and answers[1].any()
        chosen, rejected = (x.tokens[side & (x.weights == 0)].tolist() for side in sides)
        if fits and chosen != rejected:
            raise RankError(f"{x.id}: annotations {k} and {k + 1} must have the same prompt; use "
                            "the type text, which has no random words in its prompt")
        for answer in answers:
            x.weights[answer] = fits / 2 / max(answer.sum(), 1)
        pairs += [k] if fits else []
    return pairs


def open_reference(run):
    """-> the model of --init, from which also a resumed run started; sharded as the trained one."""
    init = run.identity["init"]
    if init is None:
        raise UserError("the answers are compared with a reference model; give it with --init")
    model = files.meta_model(run.config.model).requires_grad_(False).eval()
    if run.config.lora.rank:  # as train.py holds the weights below the adapters
        lora.hold_frozen(model, run.dtype)
    train.place(run, model)
    try:
        files.read_weights(model, init)
    except (OSError, ValueError) as e:
        raise UserError(f"the reference model {init}: {e}") from None
    return model


class Preferences:
    """Takes the place of train.forward_backward."""

    def __init__(self, beta):
        self.beta = beta
        self.reference = None

    def __call__(self, run, model, rows):
        """Adds the gradients of a micro-batch -> its Batch, and the loss of each token (B,T). The
        loss of a token in an answer is the loss of its pair."""
        self.reference = self.reference or open_reference(run)
        pairs = [(number, k) for number, x in enumerate(x for row in rows for x in row)
                 for k in find_pairs(x)]
        batch = train.batch_of(run, rows).to(run.device)
        with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32,
                            cache_enabled=False):
            nll, lse = model(batch)
            with torch.no_grad():
                gain = self.reference(batch)[0] - nll
        side = nll.new_zeros(len(pairs), *nll.shape)  # 1 in the chosen answer, -1 in the rejected
        for of_pair, (number, k) in zip(side, pairs, strict=True):
            for sign, annotation in ((1, k), (-1, k + 1)):
                of_pair[(batch.example == number) & (batch.annotation == annotation)] = sign
        margin = self.beta * (side * gain).sum((1, 2))
        if run.config.cp > 1:  # other ranks have other tokens of the same answers
            dist.all_reduce(margin, group=run.ranks.mesh.cp.get_group())

        def of_tokens(values):  # a number for each pair -> (B,T), 0 outside of all pairs
            return torch.einsum("p,pbt->bt", values, side)

        plain = batch.weights * (nll + run.config.z_loss * lse**2)
        preferred = of_tokens(self.beta * torch.sigmoid(-margin)) * nll
        in_pair = side.any(0)
        plain.where(~in_pair, preferred).sum().backward()
        return batch, nll.where(~in_pair, of_tokens(F.softplus(-margin)).abs())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--beta", type=float, default=0.1)
    args, flags = parser.parse_known_args(argv)
    # dropout would make a difference between the model and the reference, even before training
    train.main([*flags, "--residual_dropout=0", "--response_dropout=0"], Preferences(args.beta))


if __name__ == "__main__":
    main()
