"""What is measured of modular addition is right where waves are put in by hand."""

import numpy as np

from experiments.claims import modular_frequencies

P, KEYS = 13, (1, 2, 3, 5, 6)  # all but the fourth of six frequencies


def _waves(keys, at):
    turns = 2 * np.pi * np.multiply.outer(np.asarray(keys), at) / P
    return np.cos(turns), np.sin(turns)


def test_waves_are_told_from_what_is_learnt_by_heart():
    numbers = np.arange(P)
    embedding = np.concatenate(
        [*_waves(KEYS, numbers), 0.5 * _waves([4], numbers)[0]]
    ).T
    a, b, c = np.indices((P, P, P))
    waves = _waves(KEYS, a + b - c)[0].sum(0)
    held_out = np.array([0, 3, 7]), np.array([5, 3, 12])
    found = modular_frequencies.numbers(embedding, waves, held_out)
    np.testing.assert_allclose(found["embedding's power"], 10 / 10.25)
    np.testing.assert_allclose(found["logits' variance"], 1)
    assert found["accuracy"] == 1
    by_heart = np.random.default_rng(0).standard_normal((P, P, P))
    by_heart[a[..., 0], b[..., 0], (a + b)[..., 0] % P] += 9 * (a > b)[..., 0]
    found = modular_frequencies.numbers(embedding, by_heart, held_out)
    assert found["logits' variance"] < 0.5
    assert found["accuracy"] == found["accuracy without"] == 0
