"""The arithmetic of the claim on Markov chains, by hand."""

import jax
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


def test_columns_of_doubly_stochastic_chains_sum_to_one():
    key = jax.random.key(0)
    plain, doubly = (
        np.asarray(markov_chains.transitions(key, 7, is_doubly=is_doubly))
        for is_doubly in (False, True)
    )
    for rows in (plain, doubly):
        np.testing.assert_allclose(rows.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(doubly.sum(-2), 1, atol=1e-3)
    assert np.abs(plain.sum(-2) - 1).max() > 0.1


def test_the_phase_of_unigrams_and_the_steps_to_bigrams():
    def line(step, loss, *divergences):
        named = dict(zip(("uniform", "unigram", "bigram"), divergences, strict=True))
        losses = {"model": loss, "uniform": 4.0, "unigram": 3.0, "bigram": 1.0}
        losses = {f"loss, {name}": value for name, value in losses.items()}
        return {"step": step, **named, **losses}

    start, middle, late, end = (
        line(0, 4.0, 0, 1, 2),
        line(10, 3.0, 1, 0, 2),
        line(20, 2.1, 2, 1, 0),
        line(40, 1.9, 2, 0, 1),
    )
    assert markov_chains.steps_to_bigrams([start, middle, late, end]) == 30
    assert markov_chains.steps_to_bigrams([start, middle]) == 10
    assert markov_chains.has_unigram_phase([start, middle, late, end]) == 1
    assert markov_chains.has_unigram_phase([start, late, end]) == 0
    assert markov_chains.has_unigram_phase([start, middle]) == 0


def test_predictions_of_the_model_are_two_layers_in_numpy():
    generator = np.random.default_rng(0)
    shapes = {"scores 1": (3, 3), "scores 2": (6, 6), "output": (12, 3)}
    shapes |= {"distances 1": (5,), "distances 2": (5,)}
    params = {name: generator.normal(size=shape) for name, shape in shapes.items()}
    tokens = np.array([0, 2, 1, 1, 0])
    x = np.eye(3)[tokens]
    for layer in (1, 2):
        mixed = np.zeros_like(x)
        for t in range(5):
            scores = x[t] @ params[f"scores {layer}"] @ x[: t + 1].T
            scores += params[f"distances {layer}"][t::-1]
            mixed[t] = np.exp(scores) @ x[: t + 1] / np.exp(scores).sum()
        x = np.concatenate([x, mixed], axis=1)
    masses = np.exp(x @ params["output"])
    expected = np.log(masses / masses.sum(-1, keepdims=True))
    single = jax.tree.map(np.float32, params)
    found = markov_chains.predicted(single, tokens[None])[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
