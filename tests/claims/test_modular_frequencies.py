"""Measurements of modular addition are right for waves made by hand."""

import jax
import numpy as np
import pytest

from experiments.claims import modular_frequencies

P, KEYS = 13, (1, 2, 3, 5, 6)  # all but the fourth of six frequencies


def _waves(keys, at):
    turns = 2 * np.pi * np.multiply.outer(np.asarray(keys), at) / P
    return np.cos(turns), np.sin(turns)


@pytest.mark.slow
def test_waves_are_told_from_what_is_learned_by_heart():
    numbers = np.arange(P)
    embedding = np.concatenate(
        [*_waves(KEYS, numbers), 0.5 * _waves([4], numbers)[0]]
    ).T
    a, b, c = np.indices((P, P, P))
    waves = _waves(KEYS, a + b - c)[0].sum(0)
    is_training = np.random.default_rng(0).random((P, P)) < 0.3
    found = modular_frequencies.numbers(embedding, waves, is_training)
    np.testing.assert_allclose(found["logits' variance"], 1)
    np.testing.assert_allclose(found["loss"], found["loss restricted"])
    np.testing.assert_allclose(found["loss excluded"], np.log(P))
    by_heart = 20.0 * ((a + b - c) % P == 0) * is_training[..., None]
    found = modular_frequencies.numbers(embedding, by_heart, is_training)
    assert found["logits' variance"] < 0.5
    assert found["loss"] < found["loss excluded"] < np.log(P)


@pytest.mark.slow
def test_logits_are_those_of_a_model_token_by_token(monkeypatch):
    monkeypatch.setattr(modular_frequencies, "_MODULUS", P)
    params = modular_frequencies._initial(jax.random.key(0))
    params["bias"] = jax.random.normal(jax.random.key(1), params["bias"].shape)
    sums = np.array([[3, 0, 12, 3], [5, 0, 1, 5]])
    found = modular_frequencies._logits(params, sums)
    w = {name: np.float64(value) for name, value in params.items()}
    for sum_, logits in zip(sums.T, found, strict=True):
        stream = w["embedding"][[*sum_, P]] + w["positions"]
        query, key, value = (
            (stream @ w[name]).reshape(3, 4, -1) for name in ("query", "key", "value")
        )
        scores = np.einsum("hk,shk->hs", query[-1], key) / np.sqrt(key.shape[-1])
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        mixed = np.einsum("hs,shv->hv", weights, value).ravel()
        after = stream[-1] + mixed @ w["output"]
        units = np.maximum(after @ w["into"] + w["bias"], 0)
        expected = (after + units @ w["out of"]) @ w["logits"]
        np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)
