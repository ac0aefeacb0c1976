"""Preference pairs (DPO, arXiv 2305.18290; docs/preference_pairs.md).

in    a Batch with pairs: two answers to a question are branches of one tree
out   the sum that is differentiated, and margins for the log

With log p of an answer, and log p' under the model that training began with:

    margin = beta * ((log p - log p') of chosen - (log p - log p') of rejected)
    loss   = -log sigmoid(margin)

Its gradient with respect to the nll of a token is beta * sigmoid(-margin) in chosen and
minus that in rejected: DPO is supervised training with these weights of tokens.
"""

import json
import math
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import data
import packing
from records.errors import Unreadable
from records.reader import Records
from training.config import RunError
from training.ranks import all_gather


def log_p_of_answers(batch, nll, group=None):
    """nll (B,T) -> (n,2), log p of both answers of the n pairs of a Batch.

    group: the ranks that share its rows, each with some of the tokens.
    """
    sums = nll.new_zeros(1 + 2 * len(batch.pairs), dtype=torch.float64)
    sums.index_add_(0, batch.answer.flatten(), -nll.detach().flatten().double())
    if group:
        dist.all_reduce(sums, group=group)
    return sums[1:].view(-1, 2)


def objective(run, batch, nll, lse):
    """nll and lse (B,T) of a Batch with pairs -> the sum to differentiate, the loss of each
    token or of its pair (B,T), margins (n,) of the pairs. RunError for a pair without
    reference. Plain annotations count as in train.forward_backward.
    """
    if missing := [pair for pair in batch.pairs if pair not in run.references]:
        raise RunError(f"{missing[0]}: references.json lacks it; begin a new run with --init")
    mesh = run.ranks.mesh
    log_p = log_p_of_answers(batch, nll, mesh and mesh["cp"].get_group())
    gain = log_p - log_p.new_tensor([run.references[pair] for pair in batch.pairs])
    beta = run.config.beta
    margins = beta * (gain[:, 0] - gain[:, 1])
    slopes = log_p.new_tensor(batch.pair_weights) * beta * torch.sigmoid(-margins)

    def of_tokens(of_answers):  # (n,2) -> (B,T), 0 where a token belongs to none
        return F.pad(of_answers.flatten(), (1, 0)).to(nll.dtype)[batch.answer]

    is_plain = batch.answer == 0
    plain = batch.weights * (nll + run.config.z_loss * lse**2)
    preferred = of_tokens(torch.stack([slopes, -slopes], 1)) * nll
    losses = of_tokens(F.softplus(-margins)[:, None].expand(-1, 2))
    return plain.where(is_plain, preferred).sum(), nll.where(is_plain, losses), margins


@torch.no_grad()
def find_references(run, model):
    """{pair: log p of both answers} of all data under this whole model; the run directory
    keeps them for a run that is resumed."""
    path = run.out / "references.json"
    if path.exists():
        return json.loads(path.read_text())
    files = [x for x in run.loader.mixture.sources if isinstance(x, Records)]
    places = [(source, i) for source in files for i in range(len(source))]
    own = places[run.ranks.rank :: run.ranks.world]
    found = {}
    for source, i in tqdm(own, desc="references", disable=not run.ranks.first):
        with suppress(Unreadable):  # the planner counts it
            found |= log_p_of_record(run, model, source[i])
    references = {}
    for part in all_gather(found):
        references |= part
    if run.ranks.first:
        path.write_text(json.dumps(references))
    return references


def log_p_of_record(run, model, record):
    if all(a["type"] != "preference" for a in record["annotations"]):
        return {}
    config = replace(run.config.data, max_tokens=math.inf)
    example = data.encode(record, run.tokenizer, config, 0, 0)
    batch = packing.collate([[example]], len(example.tokens), config.vision).to(run.device)
    nll, _ = model(batch)
    return dict(zip(batch.pairs, log_p_of_answers(batch, nll).tolist(), strict=True))
