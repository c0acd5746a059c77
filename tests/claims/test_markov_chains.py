"""What the arithmetic of the claim on Markov chains says, by hand."""

import numpy as np

from experiments.claims import markov_chains


def test_strategies_count_what_has_been_seen():
    tokens = np.array([[2, 0, 2, 0, 1]])
    found = markov_chains.predictions(tokens, 3)
    expected = {"uniform": [], "unigram": [], "bigram": []}
    for t in range(5):
        seen = tokens[0, : t + 1]
        after = [b for a, b in zip(seen[:-1], seen[1:], strict=True) if a == seen[-1]]
        for name, counted in (("uniform", []), ("unigram", seen), ("bigram", after)):
            counts = np.bincount(np.array(counted, int), minlength=3) + 1
            expected[name].append(np.log(counts / counts.sum()))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name][0], values, rtol=1e-5)


def test_the_order_of_phases_and_the_jump():
    def line(step, loss, *divergences):
        named = dict(zip(("uniform", "unigram", "bigram"), divergences, strict=True))
        losses = {"loss, model": loss, "loss, unigram": 3.0, "loss, bigram": 1.0}
        return {"step": step, **named, **losses}

    start, middle, late, end = (
        line(0, 4.0, 0, 1, 2),
        line(10, 3.0, 1, 0, 2),
        line(20, 2.4, 2, 1, 0),
        line(40, 1.2, 2, 1, 0),
    )
    assert markov_chains.is_in_order([start, middle, late, end]) == 1
    assert markov_chains.is_in_order([start, late, middle, end]) == 0
    assert markov_chains.is_in_order([start, middle]) == 0
    assert markov_chains.jump([start, middle, late, end]) == 0.5
    assert markov_chains.jump([start, middle, late]) == 1.0
