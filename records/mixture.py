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
    """The weight of a source of n records in its group (docs/molmo2.md 9.1): sqrt(n) * rate.

    size, if given, takes the place of n: a number of records, or below 1 a fraction of n; 0
    means one record.
    """
    if size is not None:
        n = n * size if 0 < size < 1 else max(size, 1)
    return math.sqrt(n) * (1 if rate is None else rate)


def group_rates(groups):
    """[(rate, weights), ..] -> the rates of each group's members; all sum to 1."""
    total = sum(rate for rate, _ in groups)
    return [[rate / total * weight / sum(weights) for weight in weights]
            for rate, weights in groups]


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
        left = i >> half
        right = i & mask
        for k in feistel_keys(*key):  # every bit reaches every other
            mixed = (right + k) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed ^ mixed >> 32) & mask
        i = left << half | right
        if i < n:
            return i


class Mixture:
    """Index i of an endless stream -> numbers of reader, record and epoch.

    After any number of blocks, reader k has given its rate of all records, to within k; in a
    block the order is shuffled. An epoch of a reader is a permutation of its records (paper:
    data; docs/molmo2.md 9).
    """

    def __init__(self, readers, rates, seed, block=1000):
        assert len(readers) == len(rates) > 0 and min(rates) > 0, rates
        self.sources = readers
        self.seed = seed
        self.block = block
        # the first reader takes its share of everything, the next its share of the rest, ..
        rest = np.cumsum(np.array(rates, np.float64)[::-1])[::-1]
        self.shares = (np.array(rates) / rest).tolist()

    def __getitem__(self, i):
        """-> number of the reader, number of the record in it, epoch."""
        block, offset = divmod(i, self.block)
        order = shuffled_block(self.block, self.seed, "block", block)
        n = block * self.block + int(order[offset])
        last = len(self.shares) - 1
        for k, share in enumerate(self.shares):
            before = math.floor(n * share)
            if math.floor((n + 1) * share) > before or k == last:
                reader = self.sources[k]
                epoch, j = divmod(before if k < last else n, len(reader))
                # endless, in its own order
                if getattr(reader, "ordered", False):
                    return k, j, epoch
                j = permute_index(j, len(reader), self.seed, reader.name, epoch)
                return k, j, epoch
            n -= before
