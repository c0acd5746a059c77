"""Roll-out row by row, against products of whole float64 matrices."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, masks, models, modules
from mha_haiku.core.attention.tiled import engine, sweep
from mha_haiku.lab.heads.rollout import (
    gradient_rollout,
    output_gradients,
    rollout,
    value_rollout,
)
from tests import jaxprs, oracles
from tests.heads import conftest

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


def _of_weights(*layers):
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


def _values(layer):
    """Returns the values that each head reads, `[B, H, S, V]`."""
    value = np.asarray(layer.value, np.float64)
    groups = np.arange(layer.shape[1]) // (layer.shape[1] // value.shape[2])
    return np.moveaxis(value[:, :, groups], 2, 1)


def _close(found, expected, tolerance=2e-6):
    np.testing.assert_allclose(found, expected, 20 * tolerance, tolerance)


@pytest.mark.parametrize("name", ["causal", "padding", "blind"])
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


def test_two_layers_by_hand():
    first = [[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    second = [[0, 1, 0], [1, 0, 0], [0.25, 0.25, 0.5]]
    maps = _of_weights(first, second)
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


def test_a_layer_without_heads_passes_all_on():
    maps, pruned = _layers()[0][1:], _no_heads()
    assert pruned.shape == (B, 0, T, T)
    arrays = [np.ones((B, T, layer.shape[1], V)) for layer in maps]
    weights = [np.ones((layer.shape[1], V, D)) for layer in maps]

    @jax.jit
    def found(maps, between):
        stack, weights_of, arrays_of = list(maps), list(weights), list(arrays)
        for i in (1, 0) if between is not None else ():
            stack.insert(i, between)
            weights_of.insert(i, None)
            arrays_of.insert(i, None)
        return (
            rollout(stack, ROWS),
            value_rollout(stack, ROWS, output_weights=weights_of),
            gradient_rollout(stack, arrays_of, ROWS),
        )

    for with_it, without in zip(found(maps, pruned), found(maps, None), strict=True):
        np.testing.assert_allclose(with_it, without, 1e-6)


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
    gradients = [jax.ShapeDtypeStruct((B, size, 2, V), jnp.float32)] * 2
    programs = [
        lambda maps, _: rollout(maps, ROWS, per_layer=True),
        lambda maps, _: value_rollout(maps, ROWS),
        lambda maps, gradients: gradient_rollout(maps, gradients, ROWS),
    ]
    for program in programs:
        made = jaxprs.largest_array(jax.make_jaxpr(program)(maps, gradients).jaxpr)
        assert made <= size * size / 32


def _value_oracle(maps, weights, output_weights, residual):
    matrices = []
    for layer, own, projection in zip(maps, weights, output_weights, strict=True):
        written = _values(layer)
        if projection is not None:
            written = np.einsum("bhsv,hvd->bhsd", written, projection)
        sizes = np.sqrt((written**2).sum(-1))
        totals = (own * sizes[:, :, None]).sum(1)
        matrices.append(_with_residual(totals, residual))
    return np.stack(_product(matrices))


@pytest.mark.slow
def test_weights_count_by_the_sizes_of_what_they_move():
    maps, weights = _layers("padding")
    rng = np.random.default_rng(1)
    # Wider and narrower than the values.
    projections = [
        rng.normal(size=(layer.shape[1], V, width))
        for layer, width in zip(maps, (D, 3), strict=True)
    ]

    @jax.jit
    def found(maps):
        options = {"output_weights": projections, "residual": 0.3}
        projected = value_rollout(maps, ROWS, per_layer=True, **options)
        return projected, value_rollout(maps[:1], ROWS, residual=0.3)

    projected, alone = found(maps)
    expected = _value_oracle(maps, weights, projections, 0.3)
    _close(projected, expected[:, :, ROWS], 5e-6)
    expected = _value_oracle(maps[:1], weights[:1], [None], 0.3)
    _close(alone, expected[0][:, ROWS], 5e-6)
    for rows in (projected, alone):
        np.testing.assert_allclose(rows.sum(-1), 1, 1e-5)


def test_heads_that_write_nothing_count_for_nothing():
    maps, all_weights = _layers()
    layer, weights = maps[1], all_weights[1]
    projection = np.zeros((3, V, D))
    found = jax.jit(lambda w: value_rollout([layer], ROWS, output_weights=[w]))
    nothing = found(projection)
    _close(nothing, np.broadcast_to(np.eye(T)[ROWS], (B, 3, T)))
    projection[1] = np.random.default_rng(2).normal(size=(V, D))
    sizes = np.linalg.norm(_values(layer)[:, 1] @ projection[1], axis=-1)
    totals = weights[:, 1] * sizes[:, None]
    _close(found(projection), _with_residual(totals, 0.5)[:, ROWS], 5e-6)


@pytest.mark.parametrize(("name", "tile"), [("padding", 3), ("blind", 512)])
def test_gradients_weight_attention_tile_by_tile(name, tile, monkeypatch):
    sizes = sweep.Sizes(tile, tile, 1)
    monkeypatch.setattr(engine, "_sizes", lambda asked: sizes)
    maps, weights = _layers(name)
    rng = np.random.default_rng(3)
    gradients = [rng.normal(size=(B, T, layer.shape[1], V)) for layer in maps]
    matrices = []
    for layer, own, gradient in zip(maps, weights, gradients, strict=True):
        slopes = np.einsum("bthv,bhsv->bhts", gradient, _values(layer))
        matrices.append(np.eye(T) + np.maximum(own * slopes, 0).mean(1))
    expected = np.stack(_product(matrices))[:, :, ROWS]

    @jax.jit
    def found(maps):
        return gradient_rollout(maps, gradients, ROWS, per_layer=True)

    _close(found(maps), expected, 2e-5)


def _first_logit(logits, example):
    del example
    return logits[:, 0, 0]


@pytest.mark.parametrize("scan_layers", [False, True])
def test_gradients_of_outputs_are_slopes_of_the_answer(scan_layers):
    fields = {"num_layers": 2, "num_key_value_heads": 2}
    of, lengths = conftest.config(**fields), np.array([5, 3, 4])
    params, example = conftest.random_params(of), conftest.example(lengths=lengths)

    def answer(logits, example):
        return logits[:, 2, 1] + example.targets[:, 0] * logits[:, 1, 0]

    model = conftest.build(conftest.config(**fields, scan_layers=scan_layers))
    own = models.stacked(params) if scan_layers else params
    gradients = jax.jit(lambda: output_gradients(model, own, example, answer)[1])()
    _, values = conftest.oracle(of, params, example)
    for i, gradient in enumerate(gradients):
        name, step = f"encoder/layer_{i}/attention/heads", 1e-5
        toward = np.random.default_rng(i).standard_normal(values[name].shape)
        ends = []
        for side in (-step, step):
            changed = {name: lambda x, side=side, toward=toward: x + side * toward}
            logits, _ = oracles.recorded(
                params, example.inputs, of, lengths=lengths, changes=changed
            )
            ends.append(answer(logits, example))
        slopes = (ends[1] - ends[0]) / (2 * step)
        assert np.abs(slopes).min() > 0.01
        _close((gradient * toward).sum((1, 2, 3)), slopes, 1e-4)


def test_pruned_layers_have_gradients_without_heads():
    of = conftest.config(kept_heads=[[0, 2], [], [3]])
    model, params = conftest.build(of), conftest.random_params(of)

    def found():
        example = conftest.example()
        output, gradients = output_gradients(model, params, example, _first_logit)
        return gradients, gradient_rollout(output.maps, gradients, [0])

    gradients, rows = jax.eval_shape(found)
    assert [x.shape[2] for x in gradients] == [2, 0, 1]
    assert rows.shape == (conftest.B, 1, conftest.T)


def _without_value(maps):
    return [*maps[:1], attention.AttentionMap(**{**vars(maps[1]), "value": None})]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda maps: rollout([], 0), "at least one layer"),
        (lambda maps: rollout([maps[0], _made(size=5)[0]], 0), "the same B... and T"),
        (lambda maps: rollout(maps, 7), "in -7..6, got 7"),
        (lambda maps: rollout(maps, 1.5), "integers"),
        (
            lambda maps: rollout(maps, [[1, 2, 3]] * 3),
            r"\[B..., R\] with B... = \(2,\)",
        ),
        (lambda maps: rollout(maps, 0, residual=1.0), "residual must be"),
        (lambda maps: rollout(maps, 0, residual=-0.1), "residual must be"),
        (lambda maps: value_rollout(maps, 0, residual=2), "residual must be"),
        (
            lambda maps: value_rollout(maps, 0, output_weights=[np.ones((6, V, D))]),
            "output_weights must be of L = 2 layers, as maps are, got 1",
        ),
        (
            lambda maps: value_rollout(
                maps[:1], 0, output_weights=[np.ones((6, D, V))]
            ),
            r"\[H, V, D\] .* = \(6, 4\), got shape \(6, 6, 4\)",
        ),
        (lambda maps: value_rollout(_without_value(maps), 0), "must have values"),
        (
            lambda maps: gradient_rollout(maps, [np.ones((B, T, 6, V))], 0),
            "gradients must be of L = 2 layers",
        ),
        (
            lambda maps: gradient_rollout(maps[:1], [np.ones((B, T, 6, D))], 0),
            r"gradients must be .*\(2, 7, 6, 4\) here, got shape \(2, 7, 6, 6\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(_layers()[0])


def test_maps_of_other_positions_are_refused():
    query, key = jnp.ones((1, 3, 1, 2)), jnp.ones((1, 5, 1, 2))
    _, crossed = attention.attend(query, key, key)
    with pytest.raises(ValueError, match=r"\(B..., H, T, T\).*\(1, 1, 3, 5\)"):
        rollout([crossed], 0)


@pytest.mark.parametrize("channels", [1, V])
def test_gates_count_in_gradients_and_are_refused_by_sizes(channels):
    maps, weights = _layers("padding")
    rng = np.random.default_rng(4)

    gates = [rng.uniform(size=(B, T, x.shape[1], channels)) for x in maps]
    gradients = [rng.normal(size=(B, T, x.shape[1], V)) for x in maps]
    by_gradient = []
    for i, (layer, own) in enumerate(zip(maps, weights, strict=True)):
        moved = np.einsum("bthv,bhsv->bhtsv", gates[i] * np.ones(V), _values(layer))
        slopes = np.einsum("bthv,bhtsv->bhts", gradients[i], moved)
        by_gradient.append(np.eye(T) + np.maximum(own * slopes, 0).mean(1))

    gated = [
        dataclasses.replace(
            layer, weighting=layer.weighting._replace(gates=jnp.float32(gate))
        )
        for layer, gate in zip(maps, gates, strict=True)
    ]
    weighted = jax.jit(lambda maps: gradient_rollout(maps, gradients, ROWS))(gated)
    _close(weighted, _product(by_gradient)[-1][:, ROWS], 2e-5)
    with pytest.raises(ValueError, match="attention without gates"):
        value_rollout(gated, ROWS)


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
