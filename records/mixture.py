"""Chooses the record that comes next (paper: data mixture; docs/molmo2.md 9).

in    sources of records, their sampling rates, a seed
out   index i of an endless stream -> source, number of the record in it, epoch, for any i
"""

import math
import zlib
from functools import lru_cache

import numpy as np


def rng_for(seed, *key):
    """A random generator for a seed and a key of numbers or strings, equal on every machine."""
    numbers = [zlib.crc32(k.encode()) if isinstance(k, str) else k for k in key]
    return np.random.default_rng([seed, *numbers])


def sqrt_size(n, size=None, rate=None):
    """The sampling weight of n records in their group: sqrt(n) * rate (docs/molmo2.md 9.1).

    If size is given, it replaces n. A size between 0 and 1 is a fraction of n. A larger size is a
    number of records, and 0 counts as one record.
    """
    if size is not None:
        n = n * size if 0 < size < 1 else max(size, 1)
    return math.sqrt(n) * (1 if rate is None else rate)


def group_rates(groups):
    """[(rate, weights), ..] -> the rates of the sources in each group. All rates sum to 1."""
    total = sum(rate for rate, _ in groups)
    return [[rate / total * weight / sum(weights) for weight in weights]
            for rate, weights in groups]


@lru_cache(maxsize=256)
def shuffle(n, *key):
    """The numbers 0..n-1 in a random order that depends on the key only, (n,) int32."""
    return rng_for(*key).permutation(np.arange(n, dtype=np.int32))


class Mixture:
    """An endless stream of records from several sources.

    After any number of blocks, the number of records from source k differs by at most k from its
    rate times all records. The order inside a block is shuffled. The records of a source are
    shuffled again in every epoch, unless the source is `ordered`.
    """

    def __init__(self, sources, rates, seed, block=1000):
        assert len(sources) == len(rates) > 0 and min(rates) > 0, rates
        self.sources = sources
        self.rates = rates
        self.seed = seed
        self.block = block
        # the first source gets its share of all records, the second its share of the rest, ..
        rest = np.cumsum(np.array(rates, np.float64)[::-1])[::-1]
        self.shares = (np.array(rates) / rest).tolist()

    def __getitem__(self, i):
        """Index i -> source, number of the record in it, epoch."""
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
