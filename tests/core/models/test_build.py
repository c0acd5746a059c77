"""Whole models: every family with every kind of positions, in either precision."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import heads, models
from mha_haiku.core import checks, sites
from mha_haiku.core.attention import implementations
from tests import everyday, tiny_models
from tests.tiny_models import (
    NUM_TOKENS,
    B,
    C,
    H,
    T,
    random_parameters,
)

# With one stack; test_encoder_decoder.py is about the one with two.
FAMILIES = [name for name in models.FAMILIES if name != "encoder_decoder"]

assert_equal = np.testing.assert_array_equal


def _config(**fields):
    return tiny_models.config(**{"dropout_rate": 0.1} | fields)


def _build(**fields):
    return tiny_models.build(_config(**fields))


def _inputs(family, seed=0):
    """Random features for sets, else random tokens."""
    return tiny_models.inputs_of(_config(family=family), seed=seed)["inputs"]


def _parameters(model, inputs):
    return random_parameters(model, {"inputs": inputs})


@functools.cache
def _run(family, positions, precision="float32"):
    """A function from inputs, lengths and gates to logits and weights."""
    model = _build(family=family, positions=positions, precision=precision)
    params = _parameters(model, _inputs(family))

    def run(inputs, lengths, gates):
        apply = sites.edit(model.apply, heads.edits.gate(gates))
        output = apply(params, None, inputs, lengths=lengths, is_training=False)
        return output.logits, tuple(each.weights() for each in output.maps)

    # Compiled once for all tests; in half precision it runs once, quicker without.
    run = jax.jit(run) if precision == "float32" else run

    def run_on(inputs, lengths=(T, T), gates=None):
        gates = np.ones((1, H)) if gates is None else gates
        return run(inputs, np.asarray(lengths), gates)

    return run_on


@pytest.mark.parametrize(
    ("family", "positions"),
    everyday.some(itertools.product(FAMILIES, models.POSITIONS), 1),
)
def test_every_family_runs_with_every_positions_in_either_precision(family, positions):
    inputs = _inputs(family)
    logits, weights = _run(family, positions)(inputs)
    assert logits.shape == ((B, T) if family == "set_classifier" else (B, T, C))
    in_half, in_half_weights = _run(family, positions, "bfloat16")(inputs)
    for each in (*weights, *in_half_weights):
        assert each.shape == (B, H, T, T)
        np.testing.assert_allclose(each.sum(-1), 1, rtol=1e-5)
    assert logits.dtype == in_half.dtype == np.float32
    difference = np.abs(logits - in_half).max()
    assert 1e-4 < difference < 0.05 * np.abs(logits).max()


@pytest.mark.parametrize("positions", models.POSITIONS)
def test_positions_are_what_tells_the_order(positions):
    inputs = _inputs("encoder")
    order = np.array([3, 1, 4, 0, 2])
    run = _run("encoder", positions)
    found, wanted = run(inputs[:, order])[0], run(inputs)[0][:, order]
    unmoved = np.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert unmoved == (positions == "none")


@pytest.mark.parametrize("positions", models.POSITIONS)
def test_causal_logits_do_not_change_by_a_bit_with_later_tokens(positions):
    inputs = _inputs("causal")
    run = _run("causal", positions)
    logits, _ = run(inputs)
    for t in range(T - 1):
        later = np.arange(T) > t
        changed, _ = run(np.where(later, (inputs + 5) % NUM_TOKENS, inputs))
        assert_equal(changed[:, : t + 1], logits[:, : t + 1])
        assert (changed[:, t + 1] != logits[:, t + 1]).any()


def test_set_classifier_is_permutation_equivariant():
    inputs = _inputs("set_classifier")
    order = np.array([3, 1, 4, 0, 2])
    run = _run("set_classifier", "none")
    np.testing.assert_allclose(
        run(inputs[:, order])[0], run(inputs)[0][:, order], rtol=1e-4, atol=1e-5
    )
    # The elements that count may be permuted among themselves.
    order, lengths = np.array([2, 0, 1, 3, 4]), (3, 3)
    found, wanted = run(inputs[:, order], lengths)[0], run(inputs, lengths)[0]
    np.testing.assert_allclose(found, wanted[:, order], rtol=1e-4, atol=1e-5)
    assert_equal(np.isneginf(wanted), [[False] * 3 + [True] * 2] * B)


@pytest.mark.parametrize(
    ("family", "positions"),
    everyday.some(itertools.product(FAMILIES, models.POSITIONS), 6),
)
def test_content_of_padding_changes_no_bit(family, positions):
    lengths = np.array([3, 4])
    valid = np.arange(T) < lengths[:, None]
    inputs, other = _inputs(family), _inputs(family, seed=2)
    if family == "set_classifier":
        valid, other = valid[..., None], np.float32(np.nan)
    run = _run(family, positions)
    found, wanted = run(np.where(valid, inputs, other), lengths), run(inputs, lengths)
    jax.tree.map(assert_equal, found, wanted)
    assert np.isfinite(wanted[0][0, :3]).all()
    seen = np.outer(valid[0], valid[0])
    for each in wanted[1]:
        assert_equal(each[0, 0] > 0, np.tril(seen) if family == "causal" else seen)
    whole, _ = run(inputs)
    assert (whole[0, 0] != wanted[0][0, 0]).any() or family == "causal"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({"family": "set_classifier"}, (3, 4)),
        ({"output__pool": "mean", "embedding__norm": True}, (3, 0)),
    ],
    ids=["set", "pooled"],
)
def test_nan_in_padding_changes_no_bit_of_logits_or_gradients(fields, lengths):
    model = tiny_models.build(_config(**fields), features=True)
    inputs = _inputs("set_classifier")
    lengths = np.array(lengths)
    params = _parameters(model, inputs)
    padded = (np.arange(T) >= lengths[:, None])[..., None]

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradient(params, inputs):
        output = model.apply(params, None, inputs, lengths=lengths, is_training=False)
        logits = output.logits
        return (jnp.where(jnp.isfinite(logits), logits, 0) ** 2).sum(), logits

    wanted = gradient(params, np.where(padded, 0, inputs))
    found = gradient(params, np.where(padded, np.float32(np.nan), inputs))
    jax.tree.map(assert_equal, found, wanted)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(wanted[0]))
    assert np.abs(wanted[0][1]).max() > 0


@pytest.mark.slow
def test_a_model_may_have_no_logits():
    tokens, whole, without = _inputs("encoder"), _build(), _build(output__logits=False)
    params = _parameters(whole, tokens)
    logits = params.pop("logits")
    assert jax.eval_shape(without.init, jax.random.key(0), tokens).keys() == set(params)
    found = without.apply(params, None, tokens, is_training=False)
    assert found.logits is None
    wanted = whole.apply(params | {"logits": logits}, None, tokens, is_training=False)
    assert_equal(np.asarray(found.output), np.asarray(wanted.output))


def test_options_that_the_inputs_cannot_have_are_refused():
    with pytest.raises(checks.ConfigError, match="a token for each of the 14 classes"):
        models.build(
            _config(output__tied=True), num_tokens=13, feature_size=None, num_classes=14
        )
    with pytest.raises(checks.ConfigError, match="got no tokens"):
        models.build(
            _config(output__tied=True), num_tokens=None, feature_size=3, num_classes=2
        )
    tokens = _inputs("encoder")
    for fields, segments, message in (
        ({}, np.zeros((B, T), int), "segments must be None: .* is 0"),
        (
            {"embedding__segments": 2},
            np.zeros(T, int),
            r"shape \[B, T\] = \(2, 5\), got int.* of shape \(5,\)",
        ),
        ({"embedding__segments": 2}, np.zeros((B, T)), "integers .* got float"),
    ):
        model = _build(**fields)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)
        with pytest.raises(ValueError, match=message):
            model.apply(params, None, tokens, segments=segments, is_training=False)


@pytest.mark.slow
def test_ids_without_a_row_are_refused_where_they_are_known():
    model = _build(embedding__segments=2)
    tokens = np.array([[0, 1, 2, 3, 4], [12, 5, 99, 0, -1]])
    lengths = np.array([5, 2])  # what lies in padding does not matter
    params = _parameters(model, tokens)
    apply = functools.partial(model.apply, params, None, is_training=False)
    with pytest.raises(ValueError, match=r"inputs must .* 0 to 12, got 99 at \[1, 2\]"):
        apply(tokens)
    within = apply(tokens, lengths=lengths).logits
    tokens[0, 3] = -1
    for given in (tokens, jnp.array(tokens)):
        with pytest.raises(ValueError, match=r"inputs .* got -1 at \[0, 3\]"):
            apply(given, lengths=lengths)
    tokens[0, 3] = 3
    segments = np.array([[0, 1, 1, 0, 2], [0, 1, 9, 9, 9]])
    with pytest.raises(ValueError, match=r"segments must .* 1, got 2 at \[0, 4\]"):
        apply(tokens, lengths=lengths, segments=segments)
    # While a function is traced its arguments are unknown, and what it closes over not.
    traced = jax.jit(lambda x: apply(x, lengths=lengths).logits)(tokens)
    np.testing.assert_allclose(traced, within, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="got 99"):
        jax.eval_shape(lambda _: apply(tokens), 0)


@pytest.mark.slow
def test_training_has_dropout_and_says_so():
    model = _build()
    inputs = _inputs("encoder")
    params = _parameters(model, inputs)
    train = jax.jit(functools.partial(model.apply, is_training=True))
    # A generator that compiles quickly.
    keys = (jax.random.key(seed, impl="unsafe_rbg") for seed in range(2))
    first, second = (train(params, key, inputs).logits for key in keys)
    assert np.abs(first - second).max() > 1e-2
    with pytest.raises(ValueError, match="PRNGKey"):
        jax.eval_shape(train, params, None, inputs)
    with pytest.raises(TypeError, match="is_training"):
        model.apply(params, None, inputs)


def test_what_does_not_fit_the_inputs_is_refused():
    inputs = _inputs("encoder")

    def init(inputs, lengths=None, **fields):
        jax.eval_shape(
            lambda key: _build(**fields).init(key, inputs, lengths), jax.random.key(0)
        )

    with pytest.raises(ValueError, match=r"lengths must be in 0\.\.S = 0\.\.5, got 6"):
        init(inputs, np.array([6, 1]))
    with pytest.raises(ValueError, match="positions for 4 tokens, got 5"):
        init(inputs, max_length=4)
    init(inputs, max_length=4, positions="rotary")


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "formula"])
def test_implementation_is_the_one_of_the_config(implementation, monkeypatch):
    asked = []

    def attend(*args, implementation, **kwargs):
        asked.append(implementation)
        return real_attend(*args, implementation="dense", **kwargs)

    # What the module calls once it has checked the mask itself.
    real_attend = implementations.attend_within
    monkeypatch.setattr(implementations, "attend_within", attend)
    model = _build(attention__implementation=implementation)
    jax.eval_shape(model.init, jax.random.key(0), _inputs("encoder"))
    assert set(asked) == {implementation}
