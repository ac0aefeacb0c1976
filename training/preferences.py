"""Preference pairs (DPO, arXiv 2305.18290; docs/own_data.md).

in    a Batch with pairs: two answers to a question are branches of one tree
out   the sum that is differentiated, and margins for the log

With log p of an answer, and log p' under the model that training began with:

    margin = beta * ((log p - log p') of chosen - (log p - log p') of rejected)
    loss   = -log sigmoid(margin)

Its gradient with respect to the nll of a token is beta * sigmoid(-margin) in chosen and
minus that in rejected: DPO is supervised training with these weights of tokens.
"""

import json
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import data
import packing
from records.check import is_list_of, is_number
from records.errors import DataError, Unreadable
from records.reader import Records
from training.config import RankError, RunError


def log_p_of_answers(batch, nll, group=None):
    """nll (B,T) -> (n,2), log p of both answers of the n pairs of a Batch. group: the ranks
    that share its rows."""
    sums = nll.new_zeros(1 + 2 * len(batch.pairs))
    sums.index_add_(0, batch.answer.flatten(), -nll.detach().flatten())
    if group:
        dist.all_reduce(sums, group=group)
    return sums[1:].view(-1, 2)


def objective(run, batch, nll, lse):
    """nll and lse (B,T) of a Batch with pairs -> the sum to differentiate, the loss of each
    token or of its pair (B,T), margins (n,) of the pairs. RankError for a pair without
    reference. Plain annotations count as in train.forward_backward.
    """
    if missing := [pair for pair in batch.pairs if pair not in run.references]:
        raise RankError(f"{batch.ids}: references.json lacks the preference {missing[0]} of one of "
                        "them; begin a new run with --init")
    mesh = run.ranks.mesh
    log_p = log_p_of_answers(batch, nll, mesh and mesh.cp.get_group())
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
    margins = margins[margins.new_tensor(batch.pair_weights) > 0]
    return plain.where(is_plain, preferred).sum(), nll.where(is_plain, losses), margins


def read_references(run):
    """{name of a pair: log p of both answers}, as a resumed run began with; None for a new run.
    RunError if the file cannot be read."""
    if not run.resume_from.folder:
        return None
    try:
        found = json.loads((run.out / "references.json").read_bytes())
        is_pair = is_list_of(is_number, 2, 2)
        if not isinstance(found, dict) or not all(map(is_pair, found.values())):
            raise ValueError("references.json must hold two numbers for each pair")
    except (OSError, ValueError, RecursionError) as e:
        raise RunError(f"the references of preference pairs cannot be read: {e}; begin a new run "
                       "with --init") from None
    return found


@torch.no_grad()
def find_references(run, model):
    """The same for all data, under this whole model; kept in the run directory."""
    files = [x for x in run.loader.mixture.sources if isinstance(x, Records)]
    places = [(source, i) for source in files for i in range(len(source))]
    own = places[run.ranks.rank :: run.ranks.world]
    found = {}
    for source, i in tqdm(own, desc="references", disable=not run.ranks.first):
        with suppress(Unreadable):  # the planner counts it
            record = source[i]
            for a in record["annotations"]:
                if a["type"] == "preference":
                    found |= log_p_of_pair(run, model, record | {"annotations": [a]})
    references = {}
    for part in run.ranks.all_gather(found):
        references |= part
    if not references:
        raise DataError("--beta: no record of --data has a preference pair that can be used; add "
                        "pairs, or leave --beta out")
    if run.ranks.first:
        draft = run.out / "references.part"
        draft.write_text(json.dumps(references), encoding="utf-8")
        draft.replace(run.out / "references.json")
    return references


def log_p_of_pair(run, model, record):
    config = run.config.data
    example = data.encode(record, run.tokenizer, config, 0, 0)
    batch = packing.collate([[example]], len(example.tokens), config.vision).to(run.device)
    # as in training, so that the first margins are 0
    with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32):
        nll, _ = model(batch)
    return dict(zip(batch.pairs, log_p_of_answers(batch, nll).tolist(), strict=True))
