"""The numbers of a step for the log: counted per micro-batch, summed over ranks at the end."""

import math
from collections import Counter

import torch

import attention
import parallel
from records.errors import warn
from training.log import dropped_by_source, save_nonfinite_batches
from training.planner import RunError


def batch_counts(rows):
    """What is in these rows of data.Example, to be added up over the micro-batches of a step."""
    examples = [x for row in rows for x in row]
    return {
        "packs": len(rows),
        "examples": len(examples),
        "branches": sum(x.n_branches for x in examples if not x.mask_reason),
        "tokens": sum(len(x.tokens) for x in examples),
        "crops": sum(0 if x.image_id is None else len(x.image_id) for x in examples),
        "visual_tokens": sum(len(x.pool_dst) for x in examples),
        "pairs": sum(pairs(x) for x in examples),
        "loss_tokens": sum(int((x.weights > 0).sum()) for x in examples),
        "masked_tokens": sum(len(x.tokens) for x in examples if x.mask_reason),
        "branches_dropped": sum(x.dropped_branches for x in examples),
        "tokens_dropped": sum(x.dropped_tokens for x in examples),
    }


def pairs(example):
    """Pairs of tokens that attention computes for an example."""
    fields = torch.from_numpy(example.visible_until), torch.from_numpy(example.bidir)
    return attention.allowed_pairs(*fields)


class StepStats:
    """Sums over the micro-batches of a step: counts, and the weighted nll and the weight by source.

    Losses are read from the device one micro-batch late, so that no GPU is waited for. nonfinite
    collects the rows whose loss is NaN or infinite.
    """

    def __init__(self, sources, cp):
        self.sources, self.cp = sources, cp
        self.counts = Counter()
        self.nll = dict.fromkeys(sources, 0.0)
        self.weights = dict.fromkeys(sources, 0.0)
        self.nonfinite = []
        self.delayed = None

    def add(self, rows, batch, nll):
        """nll (B,T): of each token of a Batch made of these rows; weighted, summed by example."""
        n_examples = len(batch.ids)
        sums = torch.zeros(n_examples + 1, device=nll.device)            # the last is padding
        sums.index_add_(0, batch.example.flatten(), (batch.weights * nll.detach()).flatten())
        self.read_delayed()
        self.delayed = rows, sums

    def read_delayed(self):
        if self.delayed is None:
            return
        rows, sums = self.delayed
        self.delayed = None
        sums = sums.tolist()
        if not math.isfinite(sum(sums)):
            self.nonfinite.append(rows)
        examples = [x for row in rows for x in row]
        for x, value in zip(examples, sums, strict=False):               # all but padding
            self.nll[x.source] += value
            self.weights[x.source] += float(x.weights.sum(dtype="float64")) / self.cp
        self.counts.update(batch_counts(rows))

    def all_reduce(self):
        """Sums over all ranks: counts, weight, loss and nll_by_source are set."""
        self.read_delayed()
        # the ranks that share a row have all counted it
        counts = {name: n / self.cp for name, n in self.counts.items()}
        counts, nll, weights = all_reduce_dicts(counts, self.nll, self.weights)
        self.counts = {name: round(n) for name, n in counts.items()}
        self.total_weight = sum(weights.values())
        self.weight = max(self.total_weight, 1e-8)
        self.loss = sum(nll.values()) / self.weight
        self.nll_by_source = {name: nll[name] / weights[name] for name in nll if weights[name] > 0}


def all_reduce_dicts(*dicts):
    """Sums several {name: number} over all ranks in one exchange."""
    numbers = {}
    for k, of_kind in enumerate(dicts):
        numbers |= {(k, name): number for name, number in of_kind.items()}
    sums = parallel.all_reduce_sums(numbers)
    return [{name: sums[k, name] for name in of_kind} for k, of_kind in enumerate(dicts)]


def loss_fields(stats, norms, finite):
    """The fields of a log line that say what the step has learned; None where it is not finite."""
    return {"loss": stats.loss if finite else None, **stats.counts, "weight": stats.total_weight,
            "nll_by_source": stats.nll_by_source if finite else None,
            "grad_norm": math.hypot(*norms.values()) if finite else None,
            "grad_norms": norms if finite else None}


def plan_fields(config, plan, stats, masked):
    """The fields of a log line that say which records the step was made of."""
    return {"fill_tokens": stats.counts["tokens"] / (config.batch * config.data.max_tokens),
            "fill_crops": stats.counts["crops"] / (config.batch * config.pack_crops),
            "longest_wait": plan.longest_wait,
            "dropped": dropped_by_source(Counter(plan.skipped) + masked),
            "ids": plan.hash}


def report_nonfinite(run, step, plan, stats, norms, batches):
    """Names the records of a step whose loss or gradient is not finite and keeps their batches.

    RunError unless such steps are skipped. batches: those of this rank whose loss is not finite.
    """
    save_nonfinite_batches(run.out, step, batches, run.ranks.rank)
    of_ranks = parallel.all_gather([name for batch in batches for name in batch.ids])
    ids = [name for ids in of_ranks for name in ids]
    where = f"tools.view --run {run.out} --step {step} shows them"
    if ids:
        where = f"the batch is in {run.out}/nonfinite-step-{step}-*"
    names = ", ".join([*dict.fromkeys(ids or plan.ids)][:20])
    sentence = (f"step {step}: loss {stats.loss}, gradient norm {math.hypot(*norms.values())}; "
                f"records: {names}; {where}")
    if run.config.on_nonfinite == "stop":
        raise RunError(sentence, on_all_ranks=True)
    if run.ranks.first:
        warn(f"{sentence}; skipped")
