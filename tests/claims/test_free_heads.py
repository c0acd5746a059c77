"""The share of heads that is free, and the orders in which an arm ablates heads."""

import numpy as np

from experiments.claims import base, free_heads


def test_heads_are_free_up_to_the_first_fall_that_can_be_noticed():
    falls = np.array([[0.0, 0.0, 0.5, 0.0, 0.9], [0.0, 0.1, 0.2, 0.3, 0.4]])
    assert free_heads.free_share(falls[:1]) == 1 / 4
    assert free_heads.free_share(falls) == 1 / 8
    assert free_heads.free_share(np.zeros((1, 5))) == 3 / 4


def test_the_planted_failure_ablates_less_important_heads_first():
    order = [(layer, head) for layer in range(2) for head in range(4)]
    generator = np.random.default_rng(0)
    assert free_heads.orders_of(order, "claim", generator) == [order]
    for arm in ("control", base.PLANTED):
        orders = free_heads.orders_of(order, arm, generator)
        assert all(sorted(each) == order for each in orders)
        first = {head for each in orders for head in each[:4]}
        assert (first == set(order[:4])) == (arm == base.PLANTED)
