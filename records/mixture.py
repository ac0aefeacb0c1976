"""Which record comes next (paper: data mixture; docs/molmo2.md 9).

in    sources of records and their rates, a seed
out   index i of an endless stream -> numbers of source, record and epoch, for any i at once
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


@lru_cache(maxsize=256)
def shuffle(n, *key):
    """The numbers 0..n-1 in an order that the key decides, (n,) int32."""
    return rng_for(*key).permutation(np.arange(n, dtype=np.int32))


class Mixture:
    """Index i of an endless stream -> numbers of source, record and epoch.

    After any number of blocks, source k has given its rate of all records, to within k; in a
    block the order is shuffled. Every epoch of a source shuffles its records anew, unless the
    source is `ordered`.
    """

    def __init__(self, sources, rates, seed, block=1000):
        assert len(sources) == len(rates) > 0 and min(rates) > 0, rates
        self.sources = sources
        self.rates = rates
        self.seed = seed
        self.block = block
        # the first source takes its share of everything, the next its share of the rest, ..
        rest = np.cumsum(np.array(rates, np.float64)[::-1])[::-1]
        self.shares = (np.array(rates) / rest).tolist()

    def __getitem__(self, i):
        """-> source, number of the record in it, epoch."""
        block, offset = divmod(i, self.block)
        n = block * self.block + int(shuffle(self.block, self.seed, "block", block)[offset])
        last = len(self.shares) - 1
        for k, share in enumerate(self.shares):
            before = math.floor(n * share)
            if math.floor((n + 1) * share) > before or k == last:
                source = self.sources[k]
                epoch, j = divmod(before if k < last else n, len(source))
                if not getattr(source, "ordered", False):
                    j = int(shuffle(len(source), self.seed, source.name, epoch)[j])
                return source, j, epoch
            n -= before
