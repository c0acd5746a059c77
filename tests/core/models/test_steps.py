"""A model token by token is the model of the whole text."""

import functools

import jax
import numpy as np
import pytest

from mha_haiku import heads, models
from mha_haiku.core import sites
from tests import everyday, tiny_models
from tests.tiny_runs import model_config

B, P, S, C, D, H, K, L = 3, 5, 9, 11, 10, 4, 6, 2
LENGTHS = np.array([2, 5, 3])
STEPS = S - LENGTHS.max()
TOKENS = np.random.default_rng(0).integers(0, C, (B, S))
OTHER = np.where(np.arange(S) < LENGTHS[:, None], TOKENS, 0)

MODELS = {
    **{positions: {"positions": positions} for positions in models.POSITIONS},
    "grouped, window": {
        "num_key_value_heads": 2,
        "attention__window": 3,
        "positions": "rotary",
    },
    "window, alibi": {"attention__window": 2, "positions": "alibi"},
    "normed": {
        "attention__scale": 0.7,
        "qk_norm": True,
        "positions": "rotary",
        "norm__kind": "rms_norm",
    },
    "segments": {
        "embedding__segments": 3,
        "embedding__norm": True,
        "output__norm": True,
        "output__tied": True,
        "embedding__scale": 2.0,
    },
    "sinks, window": {
        "attention__sinks": "learned",
        "attention__window": 3,
    },
    "frequencies": {
        "positions": "rotary",
        "embedding__frequencies": [1.0, 0.1, 0.0],
    },
    "pruned": {"kept_heads": [[0, 2, 3], []], "num_key_value_heads": 2},
    "no attention": {"num_heads": 0},
    "scanned": {"scan_layers": True, "positions": "t5"},
    "bfloat16": {"precision": "bfloat16", "positions": "rotary"},
    "sigmoid": {
        "attention__score": "sigmoid",
        "attention__normalizer": "none",
        "attention__gate": "head",
    },
}


def _config(**fields):
    own = {
        "family": "causal",
        "num_layers": L,
        "model_size": D,
        "embedding__max_length": S,
        "attention__num_heads": H,
        "attention__key_size": K,
        "feed_forward__hidden_size": 7,
    }
    return model_config(**{**own, **fields})


def _build(**fields):
    config = _config(**fields)
    return models.build(config, num_tokens=C, feature_size=None, num_classes=C)


def _parameters(init, inputs=TOKENS):
    shapes = jax.eval_shape(init, jax.random.key(0), inputs)
    return tiny_models.normal(shapes, seed=1, scale=0.5)


def _gated(function, gates):
    return sites.edit(function, {} if gates is None else heads.edits.gate(gates))


SOURCE_LENGTHS = np.array([4, 0, 7])
SOURCE = np.random.default_rng(2).integers(0, 13, (B, 7))
# Of models without a source and with one: what a whole text takes, and a prefill.
TEXTS = {"inputs": TOKENS}, {"inputs": SOURCE, "lengths": SOURCE_LENGTHS}
TEXTS[1]["decoder_inputs"] = TOKENS
WITH_PADDING = np.where(np.arange(7) < SOURCE_LENGTHS[:, None], SOURCE, 12)
PREFILLS = {}, {"source": WITH_PADDING, "source_lengths": SOURCE_LENGTHS}


def _weights(maps):
    """Weights of each layer, of cross-attention where there is any."""
    return [each.weights() for each in getattr(maps, "cross", maps)]


@functools.partial(jax.jit, static_argnames=("model", "has_source"))
def _whole(model, params, gates=None, has_source=False):
    apply = _gated(model.apply, gates)
    output = apply(params, None, **TEXTS[has_source], is_training=False)
    return output.logits, _weights(output.maps)


@functools.partial(jax.jit, static_argnames=("model", "has_source"))
def _all_steps(model, params, gates=None, has_source=False):
    """Logits and rows of the maps of all steps, and the cache after them."""
    prefill = functools.partial(model.decoding.prefill, max_length=S)
    prefill = functools.partial(prefill, **PREFILLS[has_source])
    logits, cache = _gated(prefill, gates)(params, OTHER[:, :P], LENGTHS)

    def step(cache, tokens):
        logits, maps, cache = _gated(model.decoding.step, gates)(params, tokens, cache)
        return cache, (logits, jax.vmap(_weights)(maps))

    tokens = np.stack([TOKENS[np.arange(B), LENGTHS + i] for i in range(STEPS)])
    cache, steps = jax.lax.scan(step, cache, tokens)
    return logits, steps, cache


def _check(name, model, params, has_source=False):
    wanted, weights = _whole(model, params, has_source=has_source)
    # A few last places of 8 bits of logits up to about 10.
    tolerance = 0.1 if name == "bfloat16" else 1e-5
    first, (logits, rows), cache = _all_steps(model, params, has_source=has_source)
    for b, n in enumerate(LENGTHS):
        np.testing.assert_allclose(first[b], wanted[b, n - 1], atol=tolerance)
        for i in range(STEPS):
            np.testing.assert_allclose(logits[i, b], wanted[b, n + i], atol=tolerance)
            for layer, whole in enumerate(weights):
                if not whole.shape[1]:
                    continue
                row = rows[layer][i, b, :, 0]
                np.testing.assert_allclose(row, whole[b, :, n + i], atol=tolerance)
    np.testing.assert_array_equal(cache.positions, LENGTHS + STEPS)


@pytest.mark.parametrize("name", everyday.some(MODELS, 1))
def test_logits_and_maps_with_a_cache_are_those_without(name):
    model = _build(**MODELS[name])
    _check(name, model, _parameters(model.init))


TRANSLATORS = {
    "learned": {},
    "grouped, rotary, normed": {
        "num_key_value_heads": 2,
        "positions": "rotary",
        "qk_norm": True,
    },
    "sinks, gates": {"attention__sinks": "learned", "attention__gate": "head"},
    "window, t5, scanned": {
        "attention__window": 2,
        "positions": "t5",
        "scan_layers": True,
    },
    "pruned, alibi": {
        "positions": "alibi",
        "kept_heads": [[0, 1], [0, 2, 3], [1, 2], [], [0, 3], [1, 2, 3]],
    },
    "bfloat16": {"precision": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", everyday.some(TRANSLATORS, 1))
def test_an_encoder_decoder_with_a_cache_is_that_without(name):
    config = _config(family="encoder_decoder", **TRANSLATORS[name])
    model = models.build(config, num_tokens=13, feature_size=None, num_classes=C)
    init = functools.partial(model.init, decoder_inputs=TOKENS)
    _check(name, model, _parameters(init, SOURCE), has_source=True)


@pytest.mark.slow
def test_edits_and_looks_hold_in_steps():
    model = _build()
    params = _parameters(model.init)
    gates = np.float32([[1, 0, 0.5, 1], [0, 1, 1, 1]])
    wanted, _ = _whole(model, params, gates)
    first, (logits, *_), cache = _all_steps(model, params, gates)
    for b, n in enumerate(LENGTHS):
        np.testing.assert_allclose(first[b], wanted[b, n - 1], atol=1e-5)
        np.testing.assert_allclose(logits[:, b], wanted[b, n : n + STEPS], atol=1e-5)
    step = sites.look(model.decoding.step, ["layer_1/attention/weights", "stream"])
    (_, maps, _), found = step(params, TOKENS[:, P], cache)
    weights = found.pop("encoder/layer_1/attention/weights")
    np.testing.assert_array_equal(weights, jax.vmap(lambda x: x.weights())(maps[1]))
    assert [x.size for x in found.values()] == [B * D] * (L + 1)


@pytest.mark.slow
def test_a_full_cache_takes_no_more():
    model = _build()
    params = _parameters(model.init)
    _, cache = model.decoding.prefill(params, TOKENS[:, :P], LENGTHS, max_length=5)
    with pytest.raises(ValueError, match="room for max_length = 5 tokens"):
        model.decoding.step(params, TOKENS[:, 0], cache)


def test_prompts_must_fit():
    decoding = _build().decoding
    for prompts, length, message in (
        (TOKENS[:, :6], 5, "prompts must be .* max_length = 5, got shape .3, 6."),
        (TOKENS[:, :4], 5, "lengths must be at most 4, got 5"),
        (TOKENS[:, :0], 5, "prompts must be"),
        (TOKENS[:, :3], S + 1, f"max_length must be an integer from 1 to {S}, got"),
    ):
        with pytest.raises(ValueError, match=message):
            decoding.prefill({}, prompts, LENGTHS, max_length=length)


def test_models_that_predict_no_next_token_have_no_steps():
    assert _build(family="encoder").decoding is None
    assert _build(output__pool="mean").decoding is None
    assert _build(output__logits=False).decoding is None
    assert _build(smear_keys=True).decoding is None
    assert _build(positions="rotary").decoding.max_length is None
