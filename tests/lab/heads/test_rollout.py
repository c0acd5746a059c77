"""Roll-out row by row, against products of whole float64 matrices."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, masks, modules
from mha_haiku.lab.heads.rollout import rollout
from tests import everyday, jaxprs

B, T, K, V, D = 2, 7, 3, 4, 6
HEADS = ((6, 2), (3, 3))  # H and G of each layer
ROWS = [5, 0, 2]


MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "padding": masks.padding([7, 4], [7, 4]),
    # Query 2 sees nothing.
    "blind": np.tril(np.ones((1, T, T), bool)) & (np.arange(T) != 2)[None, :, None],
}


def _made(mask=None, heads=HEADS, size=T):
    """Returns a map per layer."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return np.asarray(rng.normal(size=(B, size, *shape)), np.float32)

    arrays = [
        (2 * normal(num_heads, K), normal(num_groups, K), normal(num_groups, V))
        for num_heads, num_groups in heads
    ]

    @jax.jit
    def attend(arrays):
        options = {"mask": mask, "implementation": "formula"}
        return [attention.attend(*layer, **options)[1] for layer in arrays]

    return attend(arrays)


@functools.cache
def _layers(name="full"):
    """Returns a map per layer, and the whole weights of each in float64."""
    maps = _made(MASKS[name])
    return maps, [_weights(layer) for layer in maps]


def _no_heads():
    """Returns the map of a layer whose heads are all pruned."""
    layer = hk.transform(lambda x: modules.NoAttention(D)(x, x, x)[1])
    x = jnp.zeros((B, T, D))
    return layer.apply(layer.init(None, x), None, x)


def _crossed():
    """Returns a map of other positions at its keys than at its queries."""
    query, key = jnp.ones((1, 3, 1, 2)), jnp.ones((1, 5, 1, 2))
    return attention.attend(query, key, key)[1]


def of_weights(*layers):
    """Returns maps of one head each, `[1, 1, T, T]`, with the given weights."""
    with np.errstate(divide="ignore"):
        logarithms = [np.log(np.asarray(layer, np.float32)) for layer in layers]
    return [
        attention.attend(
            *(jnp.zeros((1, len(bias), 1, 1)),) * 3,
            bias=bias[None, None],
            implementation="formula",
        )[1]
        for bias in logarithms
    ]


def _weights(layer):
    return np.asarray(jax.jit(lambda layer: layer.weights())(layer), np.float64)


def _product(matrices):
    """Returns the products of the first 1, 2, ... matrices, the last one in front."""
    products = [matrices[0]]
    for matrix in matrices[1:]:
        products.append(matrix @ products[-1])
    return products


def _with_residual(totals, residual):
    """Returns matrices with rows in proportion to `totals`, where these are not 0."""
    sums = totals.sum(-1, keepdims=True)
    mixed = (1 - residual) * totals / np.where(sums > 0, sums, 1) + residual * np.eye(T)
    return np.where(sums > 0, mixed, np.eye(T))


def _oracle(weights, residual=0.5):
    """Returns the roll-outs up to each layer, `[L, B, T, T]`."""
    means = [layer.sum(1) for layer in weights]
    return np.stack(_product([_with_residual(mean, residual) for mean in means]))


def _close(found, expected, tolerance=2e-6):
    np.testing.assert_allclose(found, expected, 20 * tolerance, tolerance)


@pytest.mark.parametrize(
    "name", everyday.those(["causal", "padding", "blind"], "padding")
)
def test_rows_are_those_of_the_product_of_matrices(name):
    maps, weights = _layers(name)
    residual = 0.0 if name == "causal" else 0.3
    expected = _oracle(weights, residual)

    @jax.jit
    def found(maps):
        per_layer = rollout(maps, ROWS, residual=residual, per_layer=True)
        return per_layer, rollout(maps, slice(None), residual=residual)

    per_layer, dense = found(maps)
    _close(per_layer, expected[:, :, ROWS])
    _close(dense, expected[-1])
    np.testing.assert_allclose(per_layer.sum(-1), 1, 1e-5)
    # To the bit: later inputs reach no earlier row, and what sees nothing stays.
    hidden = {"causal": np.triu(np.ones((T, T), bool), 1)}.get(name)
    if name == "padding":
        hidden = np.zeros((B, T, T), bool)
        hidden[1, :, 4:] = ~np.eye(T, dtype=bool)[:, 4:]
    if hidden is not None:
        assert not np.asarray(dense)[np.broadcast_to(hidden, dense.shape)].any()
        rows = np.broadcast_to(hidden, dense.shape)[:, ROWS]
        assert not np.asarray(per_layer)[:, rows].any()


@pytest.mark.slow
def test_two_layers_by_hand():
    first = [[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    second = [[0, 1, 0], [1, 0, 0], [0.25, 0.25, 0.5]]
    maps = of_weights(first, second)
    # Row 2: 0.75 of itself and 0.125 each of the others, of rows (1, 0, 0),
    # (0.25, 0.75, 0) and (0, 0.25, 0.75) below.
    _close(rollout(maps, 2)[0, 0], [0.15625, 0.28125, 0.5625])
    # Raw attention of the first layer, and the product of both without residuals.
    _close(rollout(maps[:1], [1], residual=0)[0, 0], [0.5, 0.5, 0])
    _close(rollout(maps, [2], residual=0)[0, 0], [0.375, 0.375, 0.25])


def test_heads_that_see_nothing_do_not_count():
    sees = np.ones((1, 3, T, T), bool)
    sees[:, 1:, 3] = False
    maps = _made(sees, heads=((3, 3),))
    expected = 0.5 * _weights(maps[0])[:, 0, 3] + 0.5 * np.eye(T)[3]
    _close(jax.jit(lambda maps: rollout(maps, [3]))(maps)[:, 0], expected)


@pytest.mark.slow
def test_a_layer_without_heads_passes_all_on():
    maps, pruned = _layers()[0][1:], _no_heads()
    assert pruned.shape == (B, 0, T, T)

    @jax.jit
    def found(maps, between):
        stack = list(maps)
        for i in (1, 0) if between is not None else ():
            stack.insert(i, between)
        return rollout(stack, ROWS)

    np.testing.assert_allclose(found(maps, pruned), found(maps, None), 1e-6)


@pytest.mark.parametrize(
    ("rows", "same"),
    [
        (3, [3]),
        (-1, [6]),
        ([-7, 6], [0, 6]),
        (slice(1, 6, 2), [1, 3, 5]),
        (range(2), [0, 1]),
        (jnp.array([4, 4]), [4, 4]),
    ],
)
def test_rows_are_chosen_as_tiles_are(rows, same):
    maps, weights = _layers()
    _close(rollout(maps, rows), _oracle(weights)[-1][:, same])


def test_examples_may_have_rows_of_their_own():
    maps, weights = _layers()
    expected = _oracle(weights)[-1]
    rows = np.array([[3, 1], [5, 0]])
    found = jax.jit(rollout)(maps, rows)
    _close(found, [expected[0, [3, 1]], expected[1, [5, 0]]])
    _close(rollout(maps, [[-1], [-7]]), [expected[0, [6]], expected[1, [0]]])


def test_no_matrix_is_made():
    size, heads = 2**13, ((2, 1),) * 2
    maps = jax.eval_shape(lambda: _made(masks.causal(), heads, size))
    made = jax.make_jaxpr(lambda maps: rollout(maps, ROWS, per_layer=True))(maps)
    assert jaxprs.largest_array(made.jaxpr) <= size * size / 32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda maps: rollout([], 0), "at least one layer"),
        (lambda maps: rollout([maps[0], _made(size=5)[0]], 0), "the same B... and T"),
        (lambda maps: rollout([_crossed()], 0), r"H, T, T\).*\(1, 1, 3, 5\)"),
        (lambda maps: rollout(maps, 7), "in -7..6, got 7"),
        (lambda maps: rollout(maps, 1.5), "integers"),
        (
            lambda maps: rollout(maps, [[1, 2, 3]] * 3),
            r"\[B..., R\] with B... = \(2,\)",
        ),
        (lambda maps: rollout(maps, 0, residual=1.0), "residual must be"),
        (lambda maps: rollout(maps, 0, residual=-0.1), "residual must be"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(_layers()[0])


@pytest.mark.slow
def test_what_a_sink_takes_is_nobodys():
    rng = np.random.default_rng(2)
    query, key, value = (np.float32(rng.normal(size=(B, T, 3, K))) for _ in range(3))
    sinks = attention.sink(np.float32([-1.0, 0.5, 2.0]))
    maps = [attention.attend(query, key, value, normalizer=sinks)[1]] * 2
    total = _weights(maps[0]).sum(1)
    matrix = 0.5 * np.eye(T) + 0.5 * total / total.sum(-1, keepdims=True)
    wanted = (matrix @ matrix)[:, ROWS]
    _close(rollout(maps, ROWS), wanted)
    _close(rollout(maps, slice(None))[:, ROWS], wanted)
