"""Preference pairs (DPO, arXiv 2305.18290; docs/preferences.md).

in    a Batch with pairs; the two answers of a pair are branches of one tree
out   the sum to differentiate, and the margins for the log

Let log p be the log probability of an answer, and log p' the same for the reference model, which
is the model before training:

    margin = beta * ((log p - log p') of chosen - (log p - log p') of rejected)
    loss   = -log sigmoid(margin)

The gradient with respect to the nll of a token is w = beta * sigmoid(-margin) in the chosen answer
and -w in the rejected one. So DPO is supervised training with the loss weights w and -w.
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
    """nll (B,T) of a Batch with n pairs -> (n,2), log p of the chosen and the rejected answer.
    group: the process group of the ranks that share its rows."""
    sums = nll.new_zeros(1 + 2 * len(batch.pairs))
    sums.index_add_(0, batch.answer.flatten(), -nll.detach().flatten())
    if group:
        dist.all_reduce(sums, group=group)
    return sums[1:].view(-1, 2)


def objective(run, batch, nll, lse):
    """nll and lse (B,T) of a Batch with pairs -> the sum to differentiate, losses for the log
    (B,T), margins of the pairs whose weight is not 0. The loss of a token in an answer is the loss
    of its pair. Other annotations have the same loss as in train.forward_backward. RankError if a
    pair has no reference."""
    if missing := [pair for pair in batch.pairs if pair not in run.references]:
        raise RankError(f"{batch.ids}: references.json does not have the preference pair "
                        f"{missing[0]} of one of these records; start a new run with --init")
    mesh = run.ranks.mesh
    log_p = log_p_of_answers(batch, nll, mesh and mesh.cp.get_group())
    gain = log_p - log_p.new_tensor([run.references[pair] for pair in batch.pairs])
    beta = run.config.beta
    margins = beta * (gain[:, 0] - gain[:, 1])
    slopes = log_p.new_tensor(batch.pair_weights) * beta * torch.sigmoid(-margins)

    def of_tokens(of_answers):  # (n,2) -> (B,T), 0 for a token outside of all answers
        return F.pad(of_answers.flatten(), (1, 0)).to(nll.dtype)[batch.answer]

    is_plain = batch.answer == 0
    plain = batch.weights * (nll + run.config.z_loss * lse**2)
    preferred = of_tokens(torch.stack([slopes, -slopes], 1)) * nll
    losses = of_tokens(F.softplus(-margins)[:, None].expand(-1, 2))
    margins = margins[margins.new_tensor(batch.pair_weights) > 0]
    return plain.where(is_plain, preferred).sum(), nll.where(is_plain, losses), margins


def read_references(run):
    """-> {name of a pair: log p of both answers}, which a resumed run saved before its first step.
    None for a new run. RunError if the file cannot be read."""
    if not run.resume_from.folder:
        return None
    try:
        found = json.loads((run.out / "references.json").read_bytes())
        is_pair = is_list_of(is_number, 2, 2)
        if not isinstance(found, dict) or not all(map(is_pair, found.values())):
            raise ValueError("references.json must contain two numbers for each pair")
    except (OSError, ValueError, RecursionError) as e:
        raise RunError(f"the references of preference pairs cannot be read: {e}; start a new run "
                       "with --init") from None
    return found


@torch.no_grad()
def find_references(run, model):
    """Computes {name of a pair: log p of both answers} for all pairs of --data with this model,
    which must not be sharded. Writes references.json in the run directory."""
    files = [x for x in run.loader.mixture.sources if isinstance(x, Records)]
    places = [(source, i) for source in files for i in range(len(source))]
    own = places[run.ranks.rank :: run.ranks.world]
    found = {}
    for source, i in tqdm(own, desc="references", disable=not run.ranks.first):
        with suppress(Unreadable):  # the planner counts this record
            record = source[i]
            for a in record["annotations"]:
                if a["type"] == "preference":
                    found |= log_p_of_pair(run, model, record | {"annotations": [a]})
    references = {}
    for part in run.ranks.all_gather(found):
        references |= part
    if not references:
        raise DataError("--beta: no record of --data has a preference pair that can be used; add "
                        "preference pairs, or omit --beta")
    if run.ranks.first:
        draft = run.out / "references.part"
        draft.write_text(json.dumps(references), encoding="utf-8")
        draft.replace(run.out / "references.json")
    return references


def log_p_of_pair(run, model, record):
    config = run.config.data
    example = data.encode(record, run.tokenizer, config, 0, 0)
    batch = packing.collate([[example]], len(example.tokens), config.vision).to(run.device)
    # the same autocast as in training, so that the margins are 0 in the first step
    with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32):
        nll, _ = model(batch)
    return dict(zip(batch.pairs, log_p_of_answers(batch, nll).tolist(), strict=True))
