"""Tests the order of records: permutations, exact sampling rates, and access by index."""

import numpy as np

from records.mixture import Mixture


class Reader:
    """Has all attributes of a reader that a mixture uses."""

    def __init__(self, name, n, ordered=False):
        self.name = name
        self.n = n
        self.ordered = ordered

    def __len__(self):
        return self.n


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    orders = set()
    for seed in (0, 1):
        mixture = Mixture([Reader("a", 64)], [1.0], seed, block=1)
        orders |= {tuple(mixture[i][1] for i in range(start, start + 64)) for start in (0, 64)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_a_mixture_keeps_its_rates_and_every_epoch_is_a_permutation():
    readers = [Reader("a", 70), Reader("b", 1000), Reader("c", 33)]
    rates = [0.6, 0.3, 0.1]
    mixture = Mixture(readers, rates, seed=4)
    draws = [mixture[i] for i in range(3000)]
    for block in range(3):
        of_block = [readers.index(reader) for reader, _, _ in draws[block * 1000 :][:1000]]
        assert abs(np.bincount(of_block, minlength=3) - [600, 300, 100]).max() <= 2
    for reader in readers:
        drawn = sorted((epoch, index) for of, index, epoch in draws if of is reader)
        for epoch in range(len(drawn) // reader.n):
            assert [index for e, index in drawn if e == epoch] == list(range(reader.n))
    again = Mixture(readers, rates, seed=4)              # a draw only depends on its index
    assert [again[i] for i in (2999, 3, 250)] == [draws[i] for i in (2999, 3, 250)]
    assert again[10**9] == mixture[10**9]
    other = Mixture(readers, rates, seed=5)
    assert draws[:1000] != [other[i] for i in range(1000)]


def test_an_ordered_reader_comes_in_its_own_order():
    mixture = Mixture([Reader("a", 50), Reader("b", 1 << 40, ordered=True)], [1, 1], seed=0)
    draws = [mixture[i] for i in range(1000)]
    assert sorted(i for reader, i, _ in draws if reader.name == "b") == list(range(500))
    assert {epoch for reader, _, epoch in draws if reader.name == "b"} == {0}
