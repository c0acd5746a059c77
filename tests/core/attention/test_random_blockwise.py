"""Attention and all observations at random: three implementations and the oracles.

B... batch axes, T queries, S keys, H query heads, G key heads, K query/key and V value
size. Cases differ in their numbers; what is compiled is one of a few structures, drawn
at random as well.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from mha_haiku import masks, positions
from mha_haiku.core.attention import (
    Blockwise,
    additive,
    attend,
    bin_edges,
    dot_product,
)
from mha_haiku.core.attention.tiled import engine, sweep
from tests import oracles

# Seeds of structures in which each choice is made at least once.
STRUCTURES = (10, 101, 342, 376, 377)

# (batch, T, S, H, G, K, V) and the sizes of tiles.
SIZES = [
    (((2,), 9, 13, 4, 2, 6, 7), (4, 5, 3)),
    (((), 17, 17, 3, 3, 2, 1), (16, 16, 1)),
    (((1, 2), 5, 21, 2, 1, 5, 4), (2, 8, 4)),
    (((2,), 20, 6, 2, 2, 4, 4), (7, 6, 1)),
]
MASKS = ("causal", "window", "padding", "valid lens", "segments", "dense", "global")
BIASES = (None, "dense", "example", "alibi", "t5")
SCORES = (None, "soft cap", "additive")


def structure_of(seed):
    """Returns what is compiled: sizes, kinds of masks, of bias, of score."""
    rng = np.random.default_rng(seed)
    choose = lambda options: options[rng.integers(len(options))]  # noqa: E731
    kinds = tuple(
        (choose(MASKS), bool(rng.random() < 0.25), choose("&|"))
        for _ in range(rng.integers(3))
    )
    return choose(SIZES), kinds, choose(BIASES), choose(SCORES)


def mask_of(kinds, arrays):
    """Returns the mask that arrays of numbers make."""
    found = None
    for (kind, is_inverted, combine), numbers in zip(kinds, arrays, strict=True):
        mask = {
            "causal": lambda _: masks.window(None, 1),
            "window": lambda _: masks.window(3, 1),
            "global": lambda _: masks.window(1, 1) | masks.global_tokens([0, 4]),
            "padding": lambda x: masks.padding(*x),
            "valid lens": masks.valid_lens,
            "segments": lambda x: masks.segments(*x),
            "dense": masks.dense,
        }[kind](numbers)
        mask = ~mask if is_inverted else mask
        if found is None:
            found = mask
        else:
            found = found & mask if combine == "&" else found | mask
    return found


def numbers_of(kinds, rng, batch, T, S, H):
    """Returns the arrays of numbers that masks are made from."""
    makers = {
        "padding": lambda: (
            rng.integers(0, S + 1, batch),
            rng.integers(0, T + 1, batch),
        ),
        "valid lens": lambda: rng.integers(0, S + 1, (*batch, T)),
        "segments": lambda: tuple(rng.integers(0, 3, (*batch, n)) for n in (T, S)),
        "dense": lambda: rng.random((*batch, H, T, S)) < rng.choice([0.1, 0.5, 0.9]),
    }
    return tuple(makers.get(kind, lambda: None)() for kind, *_ in kinds)


def added_bias(kind, bias, num_heads):
    """Returns a bias of a kind, as `attend` takes it."""
    if kind == "alibi":
        return positions.alibi(num_heads)
    if kind == "t5":
        return positions.relative_bias(bias, bidirectional=True, max_distance=9)
    return bias


@functools.cache
def compiled(seed, implementation):
    """Returns a compiled function of only numbers for one structure."""
    (((batch, T, S, H, G, K, V), tiles), kinds, bias_kind, score_kind) = structure_of(
        seed
    )
    del batch, T, S, G, K, V
    by = Blockwise(*tiles) if implementation == "blockwise" else implementation

    def run(inputs, numbers, bias, weight, cotangents):
        mask = mask_of(kinds, numbers)

        def loss(inputs, bias, weight):
            score = {
                None: dot_product,
                "soft cap": lambda: dot_product(scale=0.7, soft_cap=1.5),
                "additive": lambda: additive(weight),
            }[score_kind]()
            added = added_bias(bias_kind, bias, H)
            values, found = attend(
                *inputs, mask=mask, bias=added, score=score, implementation=by
            )
            seen = found.logsumexp > -jnp.inf
            # A fault's NaN is not asked to be differentiated.
            logsumexp = jnp.where(
                seen & ~jnp.isnan(found.logsumexp), found.logsumexp, 0
            )
            total = jnp.vdot(jnp.where(jnp.isnan(values), 0, values), cotangents[0])
            return total + jnp.vdot(logsumexp, cotangents[1]), (values, found)

        gradients, (values, found) = jax.grad(loss, (0, 1, 2), has_aux=True)(
            inputs, bias, weight
        )
        results = {"values": values, "logsumexp": found.logsumexp}
        results |= {"gradients": gradients}
        observed = {}
        if implementation == "blockwise":
            observed = {
                "statistics": found.statistics(pooled=(4, 5)),
                "top": found.top(3),
                "weights": found.weights(),
            }
        return results, observed

    return jax.jit(run)


def case_of(seed, number):
    """Returns the numbers of a case, float64."""
    (((batch, T, S, H, G, K, V), _), kinds, bias_kind, score_kind) = structure_of(seed)
    rng = np.random.default_rng((seed, number))
    shapes = (*batch, T, H, K), (*batch, S, G, K), (*batch, S, G, V)
    inputs = tuple(rng.normal(size=shape) for shape in shapes)
    bias = {
        "dense": lambda: rng.normal(size=(*batch, H, T, S)),
        "example": lambda: rng.normal(size=(*batch, T, S)),
        "t5": lambda: rng.normal(size=(8, H)),
    }.get(bias_kind, lambda: None)()
    weight = rng.normal(size=(H, K)) if score_kind == "additive" else None
    numbers = numbers_of(kinds, rng, batch, T, S, H)
    cotangents = rng.normal(size=(*batch, T, H, V)), rng.normal(size=(*batch, H, T))
    return inputs, numbers, bias, weight, cotangents


def unseen_keys(mask, num_queries, num_keys, batch):
    """Returns which keys no query may see, booleans `[B..., H, S]` or of size 1."""
    unseen = mask.aligned(len(batch)).unseen_keys(num_queries, num_keys)
    unseen = np.zeros(num_keys, bool) if unseen is None else np.asarray(unseen)
    return unseen.reshape((1,) * (len(batch) + 2 - unseen.ndim) + unseen.shape)


def poisoned(seed, case, rng):
    """Puts NaN into an unseen key and value; returns whether there was one."""
    (((batch, T, S, *_), _), kinds, *_) = structure_of(seed)
    inputs, numbers, *rest = case
    mask = mask_of(kinds, numbers)
    if mask is None:
        return case
    unseen = unseen_keys(mask, T, S, batch).all(-2)
    nobody = np.broadcast_to(unseen, (*batch, S))[..., None, None]
    query, key, value = inputs
    fault = rng.choice([np.nan, np.inf, -np.inf])
    key, value = (np.where(nobody, fault, x) for x in (key, value))
    return (query, key, value), numbers, *rest


def as_dtype(tree, dtype):
    """Returns the tree with its floats as `dtype`."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if x.dtype == np.float64 else jnp.asarray(x),
        tree,
    )


def compare(seed, number, is_poisoned):
    """Asserts that blockwise, dense and the float64 formula agree in one case."""
    case = case_of(seed, number)
    if is_poisoned:
        case = poisoned(seed, case, np.random.default_rng(number))
    single = as_dtype(case, jnp.float32)
    found, observed = compiled(seed, "blockwise")(*single)
    dense, _ = compiled(seed, "dense")(*single)
    with jax.enable_x64(True):
        exact, _ = compiled(seed, "formula")(*as_dtype(case, jnp.float64))
    for expected in (dense, exact):
        assert_close(found, expected)
    assert_close(stated(seed, number), exact)
    weights = np.asarray(observed["weights"], np.float64)
    (((batch, T, S, *_), _), kinds, *_) = structure_of(seed)
    mask = mask_of(kinds, case[1])
    unseen = None if mask is None else unseen_keys(mask, T, S, batch)
    found = observed["statistics"]
    statistics, pooled = found.values | {"received": found.received}, found.pooled
    assert_close(statistics, oracles.map_statistics(weights, unseen=unseen))
    edges = bin_edges(T, 4), bin_edges(S, 5)
    assert_close(pooled, oracles.pooled_map(weights, *edges))
    assert_close(observed["top"].weights, -np.sort(-weights, -1)[..., :3])


def stated(seed, number):
    """Returns values and logsumexp of a case by the oracle, float64."""
    (((batch, T, S, H, *_), _), kinds, bias_kind, score_kind) = structure_of(seed)
    inputs, numbers, bias, weight, _ = case_of(seed, number)
    at, options = (np.arange(T), np.arange(S)), {}
    mask = mask_of(kinds, numbers)
    if mask is not None:
        allowed = mask.aligned(len(batch)).aligned_tile(*at)
        options["allowed"] = np.broadcast_to(allowed, (*batch, H, T, S))
    if bias_kind in ("alibi", "t5"):
        made = added_bias(bias_kind, bias, H).aligned(len(batch))
        bias = np.float64(made.aligned_tile(*at))
    if bias is not None:
        options["bias"] = bias if bias.ndim > len(batch) + 2 else bias[..., None, :, :]
    if score_kind == "soft cap":
        score = functools.partial(oracles.dot_product, scale=0.7, soft_cap=1.5)
        options["score"] = score
    if score_kind == "additive":
        options["score"] = lambda q, k, h: weight[h] @ np.tanh(q + k)
    found = oracles.attention(*inputs, **options)
    return {"values": found.values, "logsumexp": found.logsumexp}


def assert_close(found, expected):
    """Asserts that trees agree to the rounding of float32."""
    for name, one in jax.tree_util.tree_leaves_with_path(found):
        other = expected
        for step in name:
            other = other[getattr(step, "key", getattr(step, "idx", None))]
        other = np.asarray(other)
        size = max(1.0, np.abs(other[np.isfinite(other)]).max(initial=0))
        np.testing.assert_allclose(
            one, other, 0, 2e-5 * size, err_msg=jax.tree_util.keystr(name)
        )


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Makes observations use small tiles; undone at the end."""
    sizes = engine._sizes
    engine._sizes = lambda factors: sweep.Sizes(4, 5, 3)
    yield
    engine._sizes = sizes


CASES = {
    "number": st.integers(0, 2**32 - 1),
    "is_poisoned": st.booleans(),
}


@pytest.mark.slow
@hypothesis.settings(max_examples=50)
@hypothesis.given(seed=st.sampled_from(STRUCTURES), **CASES)
def test_blockwise_equals_dense_and_the_oracle_in_many_cases(seed, number, is_poisoned):
    compare(seed, number, is_poisoned)
