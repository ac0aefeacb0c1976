"""Which record comes next (paper: data mixture; docs/molmo2.md 9).

in    readers of records and their rates, a seed
out   index i of an endless stream -> numbers of reader, record and epoch, for any i at once
"""

import math
import zlib
from functools import lru_cache

import numpy as np


def rng_for(seed, *key):
    """A generator for seed and key, numbers or strings: the same on every machine."""
    numbers = [zlib.crc32(k.encode()) if isinstance(k, str) else k for k in key]
    return np.random.default_rng([seed, *numbers])


def sqrt_size(n, size=None, rate=None):
    """The weight of a source of n records within its group (docs/molmo2.md 9.1): sqrt(n) * rate.

    size, if given, takes the place of n: a number of records from 1 on, a fraction of n below 1; 0
    means one record.
    """
    if size is None:
        counted = n
    elif size == 0:
        counted = 1
    else:
        counted = n * size if size < 1 else size
    return math.sqrt(counted) * (1 if rate is None else rate)


def group_rates(groups):
    """[(rate, weights), ..] -> for each group the rates of its members; all of them sum to 1."""
    total = sum(rate for rate, _ in groups)
    rates = []
    for rate, weights in groups:
        rates.append([rate / total * weight / sum(weights) for weight in weights])
    return rates


@lru_cache(maxsize=64)
def shuffled_block(n, *key):
    return rng_for(*key).permutation(n)


@lru_cache(maxsize=1024)
def feistel_keys(*key):
    return rng_for(*key).integers(1 << 32, size=6, dtype=np.uint64).tolist()


def permute_index(i, n, *key):
    """Where the keyed permutation of 0..n-1 sends i, without holding it: a Feistel network.

    Cycle-walking: the network permutes 0..2^(2k)-1; re-apply it until the result is below n.
    """
    half = max((n - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for k in feistel_keys(*key):             # multiply and fold: every bit reaches every other
            mixed = (right + k) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed ^ mixed >> 32) & mask
        i = left << half | right
        if i < n:
            return i


class Mixture:
    """Index i of an endless stream -> numbers of reader, record, epoch: a function of (seed, i).

    Of the first n records, n a multiple of `block`, reader k has given rate * n, off by k at most;
    inside a block the order is shuffled. Every epoch of a reader is a permutation of it (paper:
    data; docs/molmo2.md 9).
    """

    def __init__(self, readers, rates, seed, block=1000):
        assert len(readers) == len(rates) > 0 and min(rates) > 0, rates
        self.sources, self.seed, self.block = readers, seed, block
        # the first reader takes its share of everything, the next its share of the rest, and so on
        rest = np.cumsum(np.array(rates, np.float64)[::-1])[::-1]
        self.shares = (np.array(rates) / rest).tolist()

    def __getitem__(self, i):
        """-> number of the reader, number of the record in it, epoch."""
        block, offset = divmod(i, self.block)
        n = block * self.block + int(shuffled_block(self.block, self.seed, "block", block)[offset])
        last = len(self.shares) - 1
        for k, share in enumerate(self.shares):
            before, after = math.floor(n * share), math.floor((n + 1) * share)
            if after > before or k == last:
                reader = self.sources[k]
                epoch, j = divmod(before if k < last else n, len(reader))
                if getattr(reader, "ordered", False):       # endless, in its own order
                    return k, j, epoch
                return k, permute_index(j, len(reader), self.seed, reader.name, epoch), epoch
            n -= before
