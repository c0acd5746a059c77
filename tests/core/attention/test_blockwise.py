"""Attention tile by tile gives what whole matrices give, and holds none.

B batch, T queries, S keys, H query heads, G key heads, K query/key and V value size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks, positions
from mha_haiku.core.attention import (
    Blockwise,
    Weighting,
    attend,
    dot_product,
)
from mha_haiku.core.attention.tiled import sweep
from tests import everyday, jaxprs
from tests.core.attention.rated_score import Rated

B, T, S, H, G, K, V = 2, 41, 53, 4, 2, 6, 7
rng = np.random.default_rng(7)
LENGTHS = np.asarray([50, 0])
IDS, KEY_IDS = np.sort(rng.integers(0, 4, (B, T))), np.sort(rng.integers(0, 4, (B, S)))


def normal(*shape):
    """Returns normal numbers, the same ones each time."""
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


# Options of `attend`; arrays that need a gradient are in "bias" or "score".
CASES = {
    "nothing": {},
    "causal": {"mask": masks.causal()},
    "causal, offset, and padding": {
        "mask": masks.window(None, S - T) & masks.padding(LENGTHS)
    },
    "padded queries": {"mask": masks.padding(LENGTHS, np.asarray([30, 5]))},
    "window": {"mask": masks.window(9, 4)},
    "segments": {"mask": masks.segments(IDS, KEY_IDS) & masks.causal()},
    "prefix or not": {
        "mask": masks.causal() | masks.padding(LENGTHS) | ~masks.window(3, 3)
    },
    "mask per head": {"mask": rng.random((B, H, T, S)) < 0.2},
    "bias of all": {"bias": normal(1, 1, S)},
    "bias per example": {"bias": normal(B, T, S), "mask": masks.causal()},
    "bias per head": {"bias": normal(B, H, T, S)},
    "T5": {"bias": "t5", "mask": masks.causal()},
    "ALiBi": {"bias": positions.alibi(H)},
    "soft cap": {"score": dot_product(soft_cap=1.5)},
    "rates": {"score": Rated(jnp.asarray(normal(H)))},
    "dropout": {"dropout_rate": 0.3, "rng": jax.random.key(3)},
}

SMALL, TOGETHER = Blockwise(16, 16, 1), Blockwise(32, 16, 3)


def everything(inputs, options, implementation):
    """Returns values, logsumexp and all gradients, by name."""
    options = dict(options)
    bias = options.pop("bias", None)
    table = normal(16, H) if isinstance(bias, str) else None
    score = options.pop("score", None)
    cotangent = normal(B, T, H, V)

    def loss(inputs, bias, table, score):
        if table is not None:
            bias = positions.relative_bias(table, bidirectional=False, max_distance=20)
        values, found = attend(
            *inputs, bias=bias, score=score, implementation=implementation, **options
        )
        finite = jnp.where(found.logsumexp == -jnp.inf, 0, found.logsumexp)
        total = (values * cotangent).sum() + (jnp.sin(finite)).sum()
        return total, (values, found.logsumexp)

    if isinstance(bias, str):
        bias = None
    gradients, (values, logsumexp) = jax.jit(
        jax.grad(loss, (0, 1, 2, 3), has_aux=True, allow_int=True)
    )(inputs, bias, table, score)
    names = ("query", "key", "value", "bias", "table", "score")
    gradients = dict(zip(names, (*gradients[0], *gradients[1:]), strict=True))
    return {"values": values, "logsumexp": logsumexp} | gradients


@pytest.mark.parametrize("name", everyday.some(CASES, 1))
def test_blockwise_equals_the_formula(name, arrays):
    inputs = arrays((B,), T, S, H, G, K, V)
    expected = everything(inputs, CASES[name], "formula")
    for implementation in ("dense", SMALL, TOGETHER):
        found = everything(inputs, CASES[name], implementation)
        assert_equal_trees(found, expected, str(implementation))


def assert_equal_trees(found, expected, where):
    """Asserts that trees are equal to float32's rounding, naming what is not."""
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree.leaves(expected),
        strict=True,
    )
    for (path, one), other in leaves:
        message = f"{where}: {jax.tree_util.keystr(path)}"
        size = max(1.0, np.abs(np.nan_to_num(other, neginf=0)).max(initial=0))
        np.testing.assert_allclose(one, other, 0, 5e-6 * size, err_msg=message)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)]
)
def test_half_precision_is_at_most_twice_as_wrong_as_the_naive_way(dtype, arrays):
    inputs = arrays((B,), 200, 300, H, H, 32, 32, dtype=dtype)
    exact = [x.astype(jnp.float32) for x in inputs]
    cotangent = normal(B, 200, H, 32)

    def naive(query, key, value):
        scores = jnp.einsum("bthk,bshk->bhts", query, key) / jnp.sqrt(32).astype(
            query.dtype
        )
        return jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(scores), value)

    def blockwise(*inputs):
        return attend(*inputs, implementation=Blockwise(64, 128, 2))[0]

    def errors(function):
        def run(*inputs):
            values, pullback = jax.vjp(function, *inputs)
            return values, *pullback(cotangent.astype(values.dtype))

        found = jax.jit(run)(*inputs)
        expected = jax.jit(lambda *x: jax.vjp(naive, *x))(*exact)
        expected = expected[0], *expected[1](cotangent)
        return [
            np.sqrt(np.mean((np.asarray(one, np.float64) - np.asarray(other)) ** 2))
            for one, other in zip(found, expected, strict=True)
        ]

    for ours, theirs in zip(errors(blockwise), errors(naive), strict=True):
        assert ours <= 2 * theirs


@pytest.mark.slow
def test_dropout_is_the_same_whatever_the_tiles(arrays):
    inputs = arrays((B,), T, S, H, G, K, V)
    options = CASES["dropout"]
    runs = [
        jax.jit(lambda *x, by=by: attend(*x, implementation=by, **options)[0])(*inputs)
        for by in ("dense", SMALL, TOGETHER, Blockwise(41, 53, 8))
    ]
    for run in runs[1:]:
        np.testing.assert_allclose(run, runs[0], 1e-5, 1e-6)
    other = attend(*inputs, dropout_rate=0.3, rng=jax.random.key(4))[0]
    assert not np.allclose(other, runs[0])


def visited(mask, num_queries, num_keys, height, width):
    """Returns the tiles that a walk visits: starts of rows and columns, if masked."""
    found = []

    def of_rows(rows, fresh_from, carry):
        def of_tile(columns, seen_from, carry):
            found.append((int(rows.start), int(columns.start), seen_from is not None))
            return carry

        weighting = Weighting(mask)
        return sweep.over_keys(of_tile, carry, weighting, rows, num_keys, width)

    with jax.disable_jit():
        sweep.over_rows(of_rows, 0, num_queries, height)
    return found


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (masks.full(), [(r, c, False) for r in (0, 4, 8) for c in (0, 4, 8)]),
        (
            masks.causal(),
            [
                *[(0, 0, True), (4, 0, False), (4, 4, True)],
                *[(8, 0, False), (8, 4, False), (8, 8, True)],
            ],
        ),
        (
            masks.window(4, 0),
            [(0, 0, True), (4, 0, True), (4, 4, True), (8, 4, True), (8, 8, True)],
        ),
        (
            masks.segments(np.repeat([0, 1, 1], 4)),
            [(0, 0, False), *[(r, c, False) for r in (4, 8) for c in (4, 8)]],
        ),
        (
            masks.padding(np.asarray(5)),
            [(r, c, c == 4) for r in (0, 4, 8) for c in (0, 4)],
        ),
        (~masks.full(), [(r, c, True) for r in (0, 4, 8) for c in (0, 4, 8)]),
    ],
)
def test_tiles_that_a_mask_rules_out_are_skipped(mask, expected):
    assert visited(mask, 12, 12, 4, 4) == expected


def test_tiles_have_one_size_and_the_last_overlaps():
    assert visited(masks.full(), 6, 9, 4, 4) == [
        *[(0, 0, False), (0, 4, False), (0, 5, True)],
        *[(2, 0, False), (2, 4, False), (2, 5, True)],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [SMALL, TOGETHER])
def test_map_has_its_queries_still_when_values_have_their_size(implementation):
    query = normal(B, T, H, K)
    query[0, 3, 1, 2], query[1, T - 1] = np.nan, np.inf
    inputs = query, normal(B, S, G, K), normal(B, S, G, K)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, *inputs):
        mask = masks.causal() & masks.padding(LENGTHS)
        values, found = attend(*inputs, mask=mask, implementation=implementation)
        return values, found.logsumexp, found.weights(), found.query

    found, wanted = run(implementation, *inputs), run("dense", *inputs)
    np.testing.assert_array_equal(found[-1], wanted[-1])
    for x, y in zip(found[:-1], wanted[:-1], strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_nothing_of_the_size_of_a_matrix_is_held():
    size = 4096
    shape = jax.ShapeDtypeStruct((1, size, 2, 8), jnp.float32)

    def gradients(query, key, value):
        loss = lambda *x: (attend(*x, mask=masks.causal())[0] ** 2).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(query, key, value)

    traced = jax.jit(gradients).trace(shape, shape, shape)
    assert jaxprs.largest_array(traced.jaxpr.jaxpr) <= 512 * 1024
    memory = traced.lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * size * size / 4


@pytest.mark.slow
def test_programs_do_not_grow_with_the_length():
    def size_of_program(length):
        shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        loss = lambda *x: attend(*x, mask=masks.causal())[0].sum()  # noqa: E731
        run = jax.jit(jax.grad(loss, (0, 1, 2)))
        return len(run.lower(shape, shape, shape).as_text().splitlines())

    short, long = size_of_program(4096), size_of_program(131_072)
    assert long <= 1.02 * short


@pytest.mark.parametrize("field", ["rows", "columns", "heads"])
def test_tile_sizes_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be an integer of at least 1"):
        Blockwise(**{field: 0})
