"""Other denominators than softmax's, by every implementation, against the oracle."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, masks
from tests import everyday, oracles

B, T, S, H, G, K, V = 2, 4, 6, 4, 2, 3, 5
SINKS = np.array([-1.5, 0.0, 0.7, 3.0])
OFFSET = -1.2
# The normalizer from an array that is differentiated, the score, and the oracle's.
KINDS = {
    "learned sinks": (attention.sink, None, lambda x: {"sinks": x}),
    "one sink": (
        lambda x: attention.sink(x[0]),
        attention.dot_product(0.4, 2.0),
        lambda x: {
            "sinks": np.full(H, x[0]),
            "score": functools.partial(oracles.dot_product, scale=0.4, soft_cap=2.0),
        },
    ),
    "sigmoid": (
        lambda x: attention.unnormalized(),
        attention.sigmoid(0.6, OFFSET),
        lambda x: {
            "score": functools.partial(oracles.log_sigmoid, scale=0.6, offset=OFFSET),
            "is_normalized": False,
        },
    ),
}
IMPLEMENTATIONS = {
    "dense": "dense",
    "blockwise": attention.Blockwise(3, 2, 2),
    "formula": "formula",
}
# The last query sees nothing, and no query sees the last key, which is NaN.
ALLOWED = np.arange(S) <= np.minimum(np.arange(T)[:, None] + 1, S - 2)
ALLOWED[-1] = False


def _arrays(shape=(B, T, S, H, G, K, V), seed=0):
    b, t, s, h, g, k, v = shape
    generator = np.random.default_rng(seed)
    shapes = (b, t, h, k), (b, s, g, k), (b, s, g, v), (b, t, h, v), (b, h, t, s)
    return [generator.normal(size=x) for x in shapes]


def _loss(values, weights, *factors):
    return sum((x * y).sum() for x, y in zip((values, weights), factors, strict=True))


@pytest.mark.parametrize(
    ("kind", "implementation"),
    everyday.some(itertools.product(KINDS, IMPLEMENTATIONS), 5),
)
def test_values_weights_and_gradients_are_those_of_the_oracle(kind, implementation):
    make, score, stated = KINDS[kind]
    *inputs, values_grad, weights_grad = _arrays()
    masked = [x.copy() for x in inputs]
    masked[1][:, -1], masked[2][:, -1] = np.nan, np.inf
    masked[0][:, -1] = np.nan

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True)
    def of_all(query, key, value, sinks):
        values, found = attention.attend(
            query,
            key,
            value,
            mask=ALLOWED[None],
            score=score,
            normalizer=make(sinks),
            implementation=IMPLEMENTATIONS[implementation],
        )
        weights = found.weights()
        loss = _loss(values, weights, values_grad, weights_grad)
        return loss, (values, found.logsumexp, weights, found.row_sums())

    def reference(*arguments):
        *arrays, sinks = arguments
        return oracles.attention(*arrays, allowed=ALLOWED, **stated(sinks))

    with jax.enable_x64(True):
        (_, found), gradients = of_all(*masked, SINKS)
    wanted = reference(*inputs, SINKS)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11)
    close(found[0], wanted.values)
    close(found[1], wanted.logsumexp)
    close(found[2], wanted.weights)
    close(found[3], wanted.weights.sum(-1))
    assert not np.asarray(found[0])[:, -1].any()

    # The oracle's slope along a random direction in all arguments, by differences.
    directions = [*_arrays(seed=1)[:3], np.array([0.3, -1.0, 0.8, 0.5])]
    directions[1][:, -1] = directions[2][:, -1] = 0
    slope = 0
    for side in (-1, 1):
        moved = (
            x + side * 1e-5 * d
            for x, d in zip((*inputs, SINKS), directions, strict=True)
        )
        values, _, weights = reference(*moved)
        slope += side * _loss(values, weights, values_grad, weights_grad) / 2e-5
    pairs = zip(gradients, directions, strict=True)
    own = sum((np.asarray(g) * d).sum() for g, d in pairs)
    np.testing.assert_allclose(own, slope, rtol=1e-7)
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.slow
def test_a_sink_by_hand():
    # Scores 0 and log 3 next to a sink of log 4: shares 1/8, 3/8, and 4/8 for no key.
    query, key = jnp.ones((1, 1, 1)), jnp.array([[[0.0]], [[np.log(3.0)]]])
    value = jnp.array([[[8.0, 0]], [[0, 16.0]]])
    values, found = attention.attend(
        query, key, value, normalizer=attention.sink(float(np.log(4.0)))
    )
    np.testing.assert_allclose(values, [[[1, 6]]], rtol=1e-6)
    np.testing.assert_allclose(found.weights(), [[[1 / 8, 3 / 8]]], rtol=1e-6)
    np.testing.assert_allclose(found.row_sums(), [[1 / 2]], rtol=1e-6)
    assert "rows sum to less than 1" in repr(found)


@pytest.mark.slow
def test_what_a_map_keeps_gives_its_values_once_more():
    query, key, value, gates = (jnp.asarray(x, jnp.float32) for x in _arrays()[:4])
    attend = jax.jit(attention.attend)
    how = {"mask": masks.causal(), "normalizer": attention.sink(SINKS)}
    values, found = attend(query, key, value, gates=gates, **how)
    ungated, _ = attend(query, key, value, **how)
    np.testing.assert_array_equal(values, ungated * gates)
    again, _ = attend(
        found.query,
        found.key,
        found.value,
        mask=found.weighting.mask,
        normalizer=found.weighting.normalizer,
        gates=found.weighting.gates,
    )
    np.testing.assert_allclose(again, values, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"gates must be \[B..., T, H, 1\] or"):
        attention.attend(query, key, value, gates=gates[..., :2])


@pytest.mark.slow
def test_rows_that_are_nan_leave_the_gradient_of_a_sink_alone():
    query, key, value = (jnp.asarray(x[0], jnp.float32) for x in _arrays()[:3])
    query = query.at[1].set(jnp.nan)

    @jax.jit
    @jax.grad
    def slope(sinks, query):
        values, _ = attention.attend(
            query,
            key,
            value,
            mask=masks.padding(S),
            normalizer=attention.sink(sinks),
            implementation="formula",
        )
        return jnp.where(jnp.isnan(values), 0, values).sum()

    others = slope(SINKS, query[np.array([0, 2, 3])])
    np.testing.assert_allclose(slope(SINKS, query), others, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attention.sink(jnp.ones((2, 3))), r"logits must be floats \[H\]"),
        (lambda: attention.sink(1), "logits must be floats"),
        (lambda: attention.sigmoid(-1.0), "scale must be a finite number of at least"),
        (lambda: attention.sigmoid(offset=np.inf), "offset must be a finite number"),
    ],
)
def test_what_is_no_sink_or_sigmoid_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sinks_of_another_number_of_heads_are_refused():
    query, key, value = (jnp.asarray(x) for x in _arrays()[:3])
    with pytest.raises(ValueError, match=r"logits must be \[H\] = \(4,\) or one num"):
        attention.attend(query, key, value, normalizer=attention.sink(jnp.ones(3)))
