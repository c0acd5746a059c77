"""Gradients of observations equal gradients from whole float64 matrices.

B batch, T queries, S keys, H query heads, G key heads, K query/key and V value size.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks, positions
from mha_haiku.core.attention import (
    STATISTICS,
    attend,
    bin_edges,
    dot_product,
    observation,
)
from mha_haiku.core.attention.tiled import engine, sweep
from tests import everyday, oracles
from tests.core.attention.rated_score import Rated

B, T, S, H, G, K, V = 2, 13, 17, 4, 2, 3, 5
rng = np.random.default_rng(8)
TOKENS, KEY_TOKENS = rng.integers(0, 3, (B, T)), rng.integers(0, 3, (B, S))
CHOSEN, COUNTED = rng.random((B, S)) < 0.3, rng.random((B, T)) < 0.8
LENGTHS = np.asarray([14, 0])
MASKS = {
    "full": masks.full,
    "causal padding": lambda: masks.causal() & masks.padding(LENGTHS),
    "window": lambda: masks.window(7, 0),
    "segments": lambda: masks.segments(np.sort(TOKENS), np.sort(KEY_TOKENS)),
}
# Whose gradients are 0.
CONSTANT = {"num_queries", "largest_at_previous", "largest_at_own", "largest_at_next"}
# Mask, bias, score: few, as they compile for long.
CASES = [
    ("full", "array", "dot product"),
    ("causal padding", "table", "dot product"),
    ("window", "alibi", "capped"),
    ("segments", "array", "rates"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Makes tiles that do not divide the map."""
    monkeypatch.setattr(sweep, "_MULTIPLE", 4)
    monkeypatch.setattr(engine, "_sizes", lambda factors: sweep.Sizes(8, 8, 1))


def numbers(bias_kind, score_kind):
    """Returns what is differentiated, float64 by name."""
    shapes = {
        "query": (B, T, H, K),
        "key": (B, S, G, K),
        "value": (B, S, G, V),
        "x": (B, S, 1, 2),
        "y": (B, T, H, 2),
    }
    if bias_kind:
        shapes["bias"] = {"array": (1, H, T, S), "table": (8, H), "alibi": (H,)}[
            bias_kind
        ]
    if score_kind == "rates":
        shapes["rate"] = (H,)
    draw = np.random.default_rng(1)
    return {name: draw.normal(size=shape) for name, shape in shapes.items()}


def map_of(numbers, mask, bias_kind, score_kind, implementation):
    """Returns the map of one case."""
    bias = numbers.get("bias")
    if bias_kind == "table":
        bias = positions.relative_bias(bias, bidirectional=True, max_distance=9)
    if bias_kind == "alibi":
        slopes = positions.alibi(H)
        bias = dataclasses.replace(slopes, slopes=bias)
    score = {
        "dot product": dot_product,
        "capped": lambda: dot_product(scale=0.8, soft_cap=1.5),
        "rates": lambda: Rated(numbers["rate"]),
    }[score_kind]()
    arrays = (numbers[name] for name in ("query", "key", "value"))
    return attend(
        *arrays, mask=mask, bias=bias, score=score, implementation=implementation
    )[1]


def observed(found, numbers):
    """Returns what the fold makes of a map."""
    statistics = found.statistics(
        pooled=(3, 4),
        tokens=TOKENS,
        key_tokens=KEY_TOKENS,
        positions=CHOSEN,
        counted=COUNTED,
    )
    rows = found.statistics(per_query=True)
    return statistics.values | {
        "received": statistics.received,
        "pooled": statistics.pooled,
        "rms_per_query": rows.rms_distance,
        "largest_per_query": rows.largest_weight,
        "part": found.pooled(2, 3, queries=slice(2, 9), keys=slice(1, 12)),
        "top": found.top(3).weights,
        "apply": found.apply(numbers["x"]),
        "apply_transposed": found.apply_transposed(numbers["y"]),
        "divergence": found.divergence(),
    }


@jax.numpy_rank_promotion("allow")
def stated(found, numbers):
    """Returns the same from the whole matrix."""
    weights, scores = found.weights(), found.scores()
    options = {"counted": COUNTED, "positions": CHOSEN, "xp": jnp}
    options |= {"tokens": TOKENS, "key_tokens": KEY_TOKENS}
    unseen = found.weighting.mask.unseen_keys(T, S)
    statistics = oracles.map_statistics(weights, **options, unseen=unseen)
    rows = oracles.map_statistics(weights, per_query=True, xp=jnp)
    sees = weights.sum(-1) > 0
    counts = sees & COUNTED[:, None]
    counted = jnp.where(counts[..., None], weights, 0)
    scores = jnp.where(counts[..., None], scores, -jnp.inf)
    scores = scores.reshape(*scores.shape[:-2], -1)
    # Not by max, whose gradient compares numbers that a program may round twice.
    place = jax.lax.stop_gradient(scores).argmax(-1, keepdims=True)
    largest = jnp.take_along_axis(scores, place, -1)[..., 0]
    return statistics | {
        "max_score": jnp.where(counts.any(-1), largest, 0),
        "pooled": oracles.pooled_map(counted, bin_edges(T, 3), bin_edges(S, 4), xp=jnp),
        "rms_per_query": rows["rms_distance"],
        "largest_per_query": rows["largest_weight"],
        "part": oracles.pooled_map(
            weights[..., 2:9, 1:12],
            *(bin_edges(7, 2), bin_edges(11, 3)),
            counts=sees[..., 2:9],
            xp=jnp,
        ),
        "top": -jnp.sort(-weights, -1)[..., :3],
        "apply": jnp.einsum("bhts,bsv->bthv", weights, numbers["x"][:, :, 0]),
        "apply_transposed": jnp.einsum("bhts,bthv->bshv", weights, numbers["y"]),
        "divergence": oracles.divergence(weights, weights, jnp),
    }


def total(results, names):
    """Returns the sum of all results, weighted by different numbers."""
    draw = np.random.default_rng(2)
    weighted = [
        (results[name] * draw.normal(size=results[name].shape)).sum() for name in names
    ]
    return sum(weighted)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_those_of_the_whole_matrix(case):
    mask_kind, *kinds = case
    mask = MASKS[mask_kind]()
    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, numbers(*kinds))

        def gradients(observe, implementation):
            def run(arrays):
                found = map_of(arrays, mask, *kinds, implementation)
                results = observe(found, arrays)
                return total(results, names), results

            return jax.jit(jax.grad(run, has_aux=True))(arrays)

        whole = jax.eval_shape(
            lambda x: stated(map_of(x, mask, *kinds, "formula"), x), arrays
        )
        names = sorted(whole.keys() - CONSTANT)
        expected, expected_results = gradients(stated, "formula")
        result, results = gradients(observed, "blockwise")
    assert {*STATISTICS} <= {*names} | CONSTANT
    for name in names:
        np.testing.assert_allclose(
            results[name], expected_results[name], 1e-9, 1e-9, err_msg=name
        )
    for name, values in expected.items():
        np.testing.assert_allclose(result[name], values, 1e-7, 1e-9, err_msg=name)
        assert name == "value" or np.abs(values).max() > 1e-3


# Masks that no case above has, each with an observation that compiles quickly.
OTHERS = {
    "union": (masks.window(3, 1) | masks.window(0, 5), "top"),
    "prefix": (masks.causal() | masks.padding(np.asarray([9, 0])), "part"),
    "function": (masks.where(lambda t, s: (t - s) % 3 > 0), "apply_transposed"),
    "padding": (masks.padding(rng.integers(1, S + 1, B)), "divergence"),
    "pruned groups": (masks.window(7, 0), "apply"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", everyday.some(OTHERS, 2))
def test_gradients_under_other_masks(name):
    mask, asked = OTHERS[name]
    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, numbers(None, "dot product"))

        def gradients(results_of, implementation):
            def run(arrays):
                if name == "pruned groups":  # as what is left of 2 x 3 heads reads them
                    groups = np.asarray([0, 1, 1, 1])
                    vectors = ("key", "value")
                    arrays |= {each: arrays[each][:, :, groups] for each in vectors}
                found = map_of(arrays, mask, None, "dot product", implementation)
                results = results_of(found, arrays)
                return total({asked: results}, [asked]), results

            return jax.jit(jax.grad(run, has_aux=True))(arrays)

        expected = gradients(lambda *x: stated(*x)[asked], "formula")
        found = gradients(lambda *x: observed(*x)[asked], "blockwise")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 1e-7, 1e-9), found, expected
    )
    assert np.abs(expected[0]["key"]).max() > 1e-3


@pytest.mark.slow
def test_queries_that_see_nothing_have_no_gradient_and_spread_none():
    """In float32, with an example that is all padding, and a NaN that is masked."""
    arrays = {
        name: jnp.asarray(x, jnp.float32) for name, x in numbers(None, "").items()
    }
    arrays["key"] = arrays["key"].at[:, 15:].set(jnp.nan)
    mask = masks.causal() & masks.padding(LENGTHS)

    @jax.jit
    @jax.grad
    def gradients(arrays):
        found = map_of(arrays, mask, None, "dot product", "blockwise")
        results = observed(found, arrays)
        return sum((x.astype(jnp.float32) ** 2).sum() for x in results.values())

    for name, gradient in gradients(arrays).items():
        assert np.isfinite(gradient).all(), name
        if name in ("query", "key"):
            np.testing.assert_array_equal(gradient[1], 0)
            assert np.abs(gradient[0]).max() > 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "observe",
    [
        lambda found, x: [*jax.tree.leaves(found.statistics(pooled=(32, 32)))],
        lambda found, x: [found.top(4).weights],
        lambda found, x: [found.pooled()],
        lambda found, x: [found.apply(x)],
        lambda found, x: [found.apply_transposed(x)],
    ],
    ids=["statistics", "top", "pooled", "apply", "apply_transposed"],
)
def test_gradients_of_long_maps_hold_no_matrix(observe):
    """At 32,768 tokens the gradient of any observation takes less than 200 MiB."""
    length = 32_768
    shape = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)

    def loss(query, key):
        found = attend(query, key, key, mask=masks.causal())[1]
        results = observe(found, key)
        return sum((x.astype(jnp.float32) ** 2).sum() for x in results)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(shape, shape).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 200 * 2**20


@dataclasses.dataclass(frozen=True)
class Squares(observation.Observation):
    """The sum of squared weights of each query."""

    def init(self, num_queries, num_keys, arrays, dtype):
        return observation.Sums(jnp.zeros(num_queries, dtype))

    def add(self, tile, sums):
        return sums._replace(queries=sums.queries + (tile.weights**2).sum(-1))


def test_gradient_of_an_observation():
    given = numbers(None, "dot product")
    slopes = jnp.asarray(rng.normal(size=(B, H, T)))

    def in_tiles(query):
        _, attention_map = attend(query, given["key"], given["value"])
        sums = attention_map.observe(Squares())
        return (slopes * sums.queries).sum()

    def whole(query):
        _, attention_map = attend(
            query, given["key"], given["value"], implementation="formula"
        )
        return (slopes * (attention_map.weights() ** 2).sum(-1)).sum()

    np.testing.assert_allclose(
        *(jax.jit(jax.grad(f))(given["query"]) for f in (in_tiles, whole)),
        rtol=1e-5,
        atol=1e-6,
    )


class Entropies(Squares):
    """The entropy of the weights of each query."""

    def add(self, tile, sums):
        entropy = -(tile.weights * tile.log_weights).sum(-1)
        return sums._replace(queries=sums.queries + entropy)


@pytest.mark.slow
def test_neither_large_cotangents_nor_queries_that_see_nan_spoil_a_gradient():
    """The log weight of a hidden key, times a large cotangent, would overflow."""
    given = {name: jnp.float32(x) for name, x in numbers(None, "").items()}

    @jax.jit
    @jax.grad
    def gradient(arrays, factor):
        query, key = arrays
        found = attend(query, key, given["value"], mask=masks.causal())[1]
        entropy = found.observe(Entropies()).queries
        return factor * jnp.where(jnp.isfinite(entropy), entropy, 0).sum()

    query, key = given["query"], given["key"]
    wanted = gradient((query, key), 1.0)
    for one, other in zip(gradient((query, key), 1e12), wanted, strict=True):
        np.testing.assert_allclose(one / 1e12, other, 1e-5, 1e-6)
    spoilt, _ = gradient((query, key.at[:, 9].set(jnp.nan)), 1.0)
    np.testing.assert_allclose(spoilt[:, :9], wanted[0][:, :9], 1e-5, 1e-6)
    np.testing.assert_array_equal(spoilt[:, 9:], 0)
