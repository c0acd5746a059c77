"""Maps of long recognized attention are computed row by row, and equal whole ones."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.core.attention import row_maps
from mha_haiku.core.sites import regions
from tests import everyday

B, T, H, K, D = 2, 23, 3, 4, 5
LENGTHS = jnp.array([T, T - 6])


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    params = rng.normal(scale=0.5, size=(4, D, H, K)).astype(np.float32)
    return params, rng.normal(size=(B, T, D)).astype(np.float32)


@pytest.fixture
def by_rows(monkeypatch):
    """Takes maps of these tests to be large, in blocks that do not divide T."""
    monkeypatch.setattr(regions, "LIMIT", T * T // 2)
    monkeypatch.setattr(row_maps, "_NUMBERS", B * H * T * 5)


def layer(params, x):
    query, key, value = (jnp.einsum("btd,dhk->bhtk", x, w) for w in params[:3])
    at = jnp.arange(T)
    causal = at[:, None] >= at[None]
    mask = causal[None, None] & (at[None] < LENGTHS[:, None])[:, None, None]
    scores = jnp.where(mask, query @ key.swapaxes(-1, -2) / 2, -1e9)
    heads = jax.nn.softmax(scores) @ value
    return x + jnp.einsum("bhtk,dhk->btd", heads, params[3])


def grouped(params, x):
    query = jnp.einsum("btd,dhk->bthk", x, params[0])
    key, value = (jnp.einsum("btd,dk->btk", x, w[:, 0]) for w in params[1:3])
    scores = jnp.einsum("bthk,bsk->bhts", query, key)
    distance = abs(jnp.arange(T)[:, None] - jnp.arange(T)[None])
    scores = 3 * jnp.tanh(scores / 3) - 0.1 * distance[None, None]
    heads = jnp.einsum("bhts,bsk->bthk", jax.nn.softmax(scores), value)
    return x + jnp.einsum("bthk,dhk->btd", heads, params[3])


def merged(params, x):
    heads = [jnp.einsum("btd,dhk->bhtk", x, w) for w in params[:3]]
    query, key, value = (y.reshape(B * H, T, K) for y in heads)
    scores = jnp.concatenate([query @ key.swapaxes(1, 2), jnp.zeros((B * H, T, 1))], -1)
    weights = jax.nn.softmax(scores)[..., :-1]
    heads = (weights @ value).reshape(B, H, T, K)
    return x + jnp.einsum("bhtk,dhk->btd", heads, params[3])


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, jnp.stack([params] * 2))[0]


def read(attention_map):
    """Reads all that a map has."""
    everything = {
        "statistics": attention_map.statistics(
            pooled=(4, 3),
            positions=jnp.arange(T)[None].repeat(B, 0) % 3 == 0,
            tokens=jnp.arange(T)[None].repeat(B, 0) % 5,
            counted=jnp.arange(T)[None].repeat(B, 0) > 1,
        ),
        "per query": attention_map.statistics(per_query=True),
        "pooled": attention_map.pooled(4, 5, queries=slice(3, 20), keys=slice(2, 19)),
        "transposed": attention_map.apply_transposed(jnp.ones((B, T, 1, 2))),
        "divergence": attention_map.divergence(),
    }
    weighting = attention_map.weighting
    mask = weighting.mask & mh.masks.window(5, 0)
    masked = dataclasses.replace(attention_map, weighting=weighting._replace(mask=mask))
    everything |= {"masked": masked.statistics(), "sums": masked.row_sums()}
    names = ("weights", "row_sums", "outputs")
    everything |= {name: getattr(attention_map, name)() for name in names}
    everything |= {"tile": attention_map.tile([2, T - 1], [0, 7])}
    top = attention_map.top(3)
    return everything | {"top": top, "sees": attention_map.sees}


@pytest.mark.parametrize(
    ("program", "around"),
    everyday.some(
        [
            *itertools.product(
                [layer, grouped, merged, scanned], [mh.blockwise, jax.jit]
            )
        ],
        1,
    ),
)
def test_map_by_rows_is_the_whole_map(by_rows, monkeypatch, inputs, program, around):
    def look():
        return jax.jit(mh.look(around(program), {"*/map": read}))(*inputs)[1]

    found = look()
    assert len(found) == (2 if program is scanned else 1)
    monkeypatch.undo()
    jax.tree.map(assert_close, found, look())


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_map_by_rows_holds_nothing_whole(by_rows, inputs):
    _, maps = mh.look(layer, ["*/map"])(*inputs)
    (attention_map,) = maps.values()
    assert all(jnp.shape(x).count(T) < 2 for x in jax.tree.leaves(attention_map))
    assert "row by row" in repr(attention_map)


def test_map_of_edited_values_is_of_these(by_rows, inputs):
    def read(edits, of_map):
        edited = mh.edit(layer, edits)
        return [*mh.look(edited, {"*/map": of_map})(*inputs)[1].values()]

    sums = read({"*/weights": lambda weights: weights / 2}, lambda x: x.row_sums())
    np.testing.assert_allclose(*sums, 0.5, rtol=1e-6)
    (weights,) = read({"*/query": jnp.zeros_like}, lambda x: x.top(1).weights)
    seen = np.minimum(np.arange(1, T + 1), np.array(LENGTHS)[:, None, None])
    expected = np.broadcast_to(1 / seen, (B, H, T))
    np.testing.assert_allclose(weights[..., 0], expected, rtol=1e-5)


def test_nan_reaches_the_rows_that_see_it(by_rows, inputs):
    params, x = inputs
    x = x.copy()
    x[0, 10] = np.nan
    _, maps = mh.look(layer, {"*/map": lambda x: x.logsumexp})(params, x)
    (logsumexp,) = maps.values()
    np.testing.assert_array_equal(np.isnan(logsumexp[0]).any(0), np.arange(T) >= 10)
    assert not np.isnan(logsumexp[1]).any()


def test_statistics_by_rows_have_no_gradient(by_rows, inputs):
    def entropy(x):
        found = mh.look(layer, {"*/map": lambda x: x.statistics().entropy})
        return sum(each.sum() for each in found(inputs[0], x)[1].values())

    with pytest.raises(ValueError, match="has no gradient"):
        jax.grad(entropy)(inputs[1])
