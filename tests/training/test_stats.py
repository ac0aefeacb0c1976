"""The numbers of a step: what they count, and when they are read."""

import numpy as np
import torch

import data
import packing
from text.tokenizer import ByteTokenizer
from training.stats import StepStats, batch_counts

TOKENIZER = ByteTokenizer()
CONFIG = data.DataConfig(max_tokens=64)


def row_of(source, *n_answers):
    """A row with one example, whose branches have a question of 3 ids and so long an answer."""
    branches = [data.Branch([([5] * 3, 0), ([6] * n, 1)], weight=0.5) for n in n_answers]
    example = data.layout([TOKENIZER.bos], [False], branches, CONFIG)
    example.source = source
    return [example]


def batch_of(rows):
    return packing.collate(rows, CONFIG.max_tokens, CONFIG.vision)


def test_a_micro_batch_is_read_once_the_next_has_begun():
    """Else a GPU would wait for its host."""
    stats = StepStats(["a", "b"], cp=1)
    micro_batches = [[row_of("a", 4)], [row_of("b", 2, 3)], [row_of("a", 7)]]
    counted = []
    for rows in micro_batches:
        batch = batch_of(rows)
        stats.add(rows, batch, torch.ones(batch.tokens.shape))
        counted.append(stats.counts["loss_tokens"])
    assert counted == [0, 4, 9]
    stats.all_reduce()
    assert stats.counts["loss_tokens"] == 4 + 5 + 7
    assert stats.counts["branches"] == 4
    assert stats.counts["examples"] == stats.counts["packs"] == 3


def test_the_loss_of_a_source_is_the_mean_over_its_weight():
    stats = StepStats(["a", "b", "none"], cp=1)
    rows = [row_of("a", 4), row_of("b", 6)]
    batch = batch_of(rows)
    nll = torch.ones(batch.tokens.shape)
    nll[1] = 3
    stats.add(rows, batch, nll)
    stats.all_reduce()
    assert stats.nll_by_source == {"a": 1.0, "b": 3.0}
    assert stats.weight == 0.5 * 10
    assert stats.loss == (4 * 1 + 6 * 3) / 10
    assert stats.nonfinite == []


def test_rows_whose_loss_is_not_finite_are_kept():
    stats = StepStats(["a"], cp=1)
    for value in (1.0, np.nan, np.inf, 2.0):
        rows = [row_of("a", 4)]
        batch = batch_of(rows)
        stats.add(rows, batch, torch.full(batch.tokens.shape, value))
        if not np.isfinite(value):
            last_two = [*stats.nonfinite, rows][-2:]
    stats.all_reduce()
    assert len(stats.nonfinite) == 2
    assert stats.nonfinite[-1] is last_two[-1]
    assert not np.isfinite(stats.loss)


def test_ranks_that_share_a_row_count_it_once():
    rows = [row_of("a", 4)]
    whole = batch_counts(rows)
    stats = StepStats(["a"], cp=2)
    for _ in range(2):               # as if the two ranks were this one
        batch = batch_of(rows)
        stats.add(rows, batch, torch.ones(batch.tokens.shape) / 2)
    stats.all_reduce()
    assert stats.counts == whole
    assert stats.total_weight == 0.5 * 4
    assert stats.loss == 1
