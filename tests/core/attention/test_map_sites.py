"""look and edit of an attention, against the same by hand."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import attention
from mha_haiku.core.attention import map_sites
from tests import everyday, oracles

B, T, S, H, G, K, V, D = 2, 3, 5, 4, 2, 6, 7, 8

_KEYS = jax.random.split(jax.random.key(0), 5)
QUERY = jax.random.normal(_KEYS[0], (B, T, H, K))
KEY = jax.random.normal(_KEYS[1], (B, S, G, K))
VALUE = jax.random.normal(_KEYS[2], (B, S, G, V))
GATES = jax.nn.sigmoid(jax.random.normal(_KEYS[3], (B, T, H, 1)))
MASK = mh.masks.causal()
OPTIONS = {"mask": MASK, "gates": GATES}


def attend(query, implementation="dense", **options):
    options = OPTIONS | options
    return attention.attend(query, KEY, VALUE, implementation=implementation, **options)


def mixed(weights):
    """Returns what heads pass on that have these weights, `[B, T, H, V]`."""
    values = np.repeat(np.asarray(VALUE), H // G, axis=-2)
    return np.einsum("bhts,bshv->bthv", weights, values) * np.asarray(GATES)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dense", "blockwise", "formula"])
def test_the_map_weights_and_heads_are_those_that_attend_returns(implementation):
    (values, whole), found = mh.look(attend, ["*"])(QUERY, implementation)
    assert list(found) == ["scores", "map", "weights", "heads"]
    scores = np.where(np.tri(T, S, dtype=bool), found["scores"], -np.inf)
    np.testing.assert_array_equal(found["scores"], scores)
    np.testing.assert_allclose(
        found["weights"], jax.nn.softmax(scores), atol=1e-6, err_msg="softmax of scores"
    )
    np.testing.assert_array_equal(found["heads"], values)
    np.testing.assert_array_equal(found["weights"], whole.weights())
    np.testing.assert_allclose(found["heads"], mixed(found["weights"]), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_edited_weights_change_the_heads_and_what_is_seen(implementation, around):
    weights = jax.nn.softmax(jax.random.normal(_KEYS[4], (B, H, T, S)))
    weights = weights.at[0, 1, 2].set(0)  # a query that sees nothing

    def run(query, weights):
        edited = mh.edit(
            lambda query: attend(query, implementation), {"weights": lambda _: weights}
        )
        return mh.look(edited, ["map", "weights"])(query)

    query, given = QUERY, weights
    if around is jax.vmap:
        query, given = query[None], weights[None]
    (values, whole), found = jax.tree.map(
        lambda x: x[0] if around is jax.vmap else x, jax.jit(around(run))(query, given)
    )
    np.testing.assert_allclose(values, mixed(weights), atol=1e-5)
    np.testing.assert_allclose(found["weights"], weights, atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lambda whole: whole.statistics().entropy)(found["map"]),
        -jax.scipy.special.xlogy(weights, weights).sum(-1).sum(-1)
        / (weights.sum(-1) > 0).sum(-1),
        atol=1e-5,
    )
    assert np.isnan(whole.weights()).any()  # which cannot be told by queries and keys


@pytest.mark.slow
def test_weights_are_edited_under_a_vmap_that_they_are_part_of():
    def one(query):
        return attention.attend(query, KEY[0], VALUE[0], mask=MASK)[0]

    def halved(weights):
        assert weights.shape == (H, T, S)
        return weights / 2

    run = mh.edit(jax.vmap(one), {"weights": halved})
    np.testing.assert_allclose(run(QUERY), jax.vmap(one)(QUERY) / 2, atol=1e-6)


@pytest.mark.slow
def test_an_edited_map_is_that_of_its_queries():
    _, other = attend(QUERY[::-1])
    values, whole = mh.edit(attend, {"map": lambda _: other})(QUERY)
    expected, _ = attend(QUERY[::-1])
    np.testing.assert_allclose(values, expected, atol=1e-5)
    np.testing.assert_array_equal(whole.query, other.query)


@pytest.mark.slow
def test_gradients_reach_edited_weights():
    def loss(weights):
        run = mh.edit(attend, {"weights": lambda _: weights})
        return (run(QUERY)[0] @ jnp.arange(float(V))).sum()

    weights = jax.nn.softmax(jax.random.normal(_KEYS[4], (B, H, T, S)))
    slopes = jax.grad(loss)(weights)
    values = np.repeat(np.asarray(VALUE), H // G, axis=-2) @ np.arange(V)
    expected = np.einsum("bsh,bth->bhts", values, np.asarray(GATES)[..., 0])
    np.testing.assert_allclose(slopes, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_scores_that_are_cut_are_masked(implementation):
    is_cut = jnp.zeros((T, S), bool).at[1, 0].set(True).at[2].set(True)
    mask = MASK & mh.masks.as_mask(jnp.broadcast_to(~is_cut, (B, T, S)))
    options = {"normalizer": attention.sink(jnp.arange(float(H)))}

    def cut(query):
        change = {"scores": lambda scores: jnp.where(is_cut, -jnp.inf, scores)}
        run = mh.edit(lambda query: attend(query, implementation, **options), change)
        return mh.look(run, ["scores", "weights", "map"])(query)

    (values, _), found = cut(QUERY)
    expected, whole = attend(QUERY, implementation, **options | {"mask": mask})
    np.testing.assert_allclose(values, expected, atol=1e-5)
    np.testing.assert_allclose(found["weights"], whole.weights(), atol=1e-6)
    np.testing.assert_array_equal(found["scores"] == -jnp.inf, found["weights"] == 0)
    assert found["map"].rows_sum_to == whole.rows_sum_to
    assert np.isfinite(jax.grad(lambda x: cut(x)[0][0].sum())(QUERY)).all()


@pytest.mark.slow
@pytest.mark.parametrize("facet", ["scores", "weights"])
def test_an_edited_map_keeps_the_mask(facet):
    change = {"scores": lambda x: x / 2, "weights": lambda x: 0 * x}[facet]
    run = mh.edit(attend, {facet: change})
    _, found = mh.look(run, ["map"])(QUERY)
    mask = np.broadcast_to(found["map"].weighting.mask.array(T, S), (B, H, T, S))
    np.testing.assert_array_equal(mask, np.broadcast_to(np.tri(T, S), mask.shape))


SIGNED = jax.random.normal(_KEYS[4], (B, H, T, S)).at[0, 1, 2].set(0)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_edited_weights_keep_their_sign(implementation):
    def centered(weights):
        return weights - weights.mean(-1, keepdims=True)

    edited = mh.edit(lambda x: attend(x, implementation), {"weights": centered})
    (values, _), found = mh.look(edited, ["weights", "map", "heads"])(QUERY)
    _, whole = attend(QUERY, implementation)
    wanted = centered(whole.weights())
    np.testing.assert_allclose(found["weights"], wanted, atol=1e-6)
    np.testing.assert_allclose(found["heads"], mixed(wanted), atol=1e-5)
    np.testing.assert_array_equal(found["heads"], values)
    np.testing.assert_allclose(found["map"].outputs(), mixed(wanted), atol=1e-5)
    with np.errstate(all="ignore"):
        logs = np.where(
            wanted > 0, np.log(wanted), np.where(wanted < 0, np.nan, -np.inf)
        )
    np.testing.assert_allclose(found["map"].scores(), logs, rtol=1e-4, atol=1e-4)
    part = {"queries": slice(1, 3), "keys": slice(2, 4)}
    pooled = found["map"].pooled(2, 2, **part)
    np.testing.assert_allclose(pooled, wanted[..., 1:3, 2:4], atol=1e-6)
    assert "rows sum to any amount" in repr(found["map"])
    assert "of weights computed elsewhere" in repr(found["map"])
    assert "DenseBias" not in repr(found["map"])


@pytest.mark.slow
def test_a_map_of_signed_weights_measures_them_as_they_are():
    whole = map_sites.map_of_weights(SIGNED, value=VALUE)
    weights = np.asarray(SIGNED, np.float64)

    @jax.jit
    def run(whole):
        answers = whole.weights(), whole.statistics(), whole.row_sums(), whole.top(S)
        return *answers, whole.pooled(2, 2), whole.divergence(), whole.outputs()

    found, statistics, sums, top, pooled, divergence, outputs = run(whole)
    np.testing.assert_array_equal(found, SIGNED)
    np.testing.assert_allclose(sums, weights.sum(-1), atol=1e-6)
    np.testing.assert_allclose(outputs * GATES, mixed(weights), atol=1e-5)
    np.testing.assert_allclose(top.weights, -np.sort(-weights), atol=1e-6)
    with np.errstate(invalid="ignore"):  # the root of a negative second moment
        expected = oracles.map_statistics(weights)
    names = "squared_weights", "distance", "own_position", "first_token", "received"
    for name in (*names, "num_queries"):
        own = getattr(statistics, name)
        np.testing.assert_allclose(own, expected[name], atol=1e-6, err_msg=name)
    # Statistics that are defined only for probabilities are not computed otherwise.
    assert np.isnan(statistics.entropy).all() and np.isnan(divergence).all()
    assert np.isnan(statistics.received_gini).all()
    counted = (weights != 0).any(-1, keepdims=True)
    first = weights[..., :2, :3].sum((-2, -1)) / counted[..., :2, 0].sum(-1)
    np.testing.assert_allclose(pooled[..., 0, 0], first, atol=1e-6)


@pytest.mark.slow
def test_gradients_of_observations_reach_signed_weights_of_any_size():
    def total(weights):
        whole = map_sites.map_of_weights(weights)
        moments = whole.statistics().squared_weights.sum() + whole.pooled(1, 1).sum()
        return moments + whole.apply(jnp.ones((B, S, 1, 1))).sum()

    slopes = jax.grad(total)(SIGNED)
    count = (np.asarray(SIGNED) != 0).any(-1).sum(-1)[..., None, None]
    wanted = (2 * np.asarray(SIGNED) + 1) / count + 1
    counts = (np.asarray(SIGNED) != 0).any(-1, keepdims=True)
    np.testing.assert_allclose(slopes, np.where(counts, wanted, 1), atol=1e-5)


@pytest.mark.slow
def test_recognized_heads_that_are_mixed_have_the_map_of_their_weights():
    mix = jax.random.normal(_KEYS[3], (H, H))

    def talking(query):
        query = query.at[0, 0, 1].set(jnp.nan)
        key, value = (jnp.repeat(x, H // G, -2) for x in (KEY, VALUE))
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query, key))
        weights = jnp.einsum("bhts,hi->bits", weights, mix)
        return jnp.einsum("bhts,bshv->bthv", weights, value)

    heads, found = mh.look(talking, ["*/map", "*/weights"])(QUERY)
    found = {name.rsplit("/", 1)[-1]: value for name, value in found.items()}
    weights = np.asarray(found["weights"])
    assert (weights < 0).any() and np.isnan(weights[0, :, 0]).all()
    np.testing.assert_array_equal(found["map"].weights(), weights)
    np.testing.assert_allclose(found["map"].outputs(), heads, atol=1e-5)
    seen = found["map"].statistics()
    assert np.isnan(seen.distance[0]).all() and np.isfinite(seen.distance[1]).all()
    squares = (weights[1].astype(float) ** 2).sum(-1).mean(-1)
    np.testing.assert_allclose(seen.squared_weights[1], squares, rtol=1e-5)


@pytest.mark.parametrize("gate", [0.0, 0.5, -1.0])
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_the_slope_of_a_gate_of_weights_is_the_same_at_every_gate(implementation, gate):
    def loss(gate, key):
        by = {"weights": lambda weights: weights.at[..., key].multiply(gate)}
        values, _ = mh.edit(lambda x: attend(x, implementation), by)(QUERY)
        return (values @ jnp.arange(float(V))).sum()

    _, whole = attend(QUERY, implementation)
    for key in (slice(None), 1):
        part = np.zeros((B, H, T, S))
        part[..., key] = np.asarray(whole.weights())[..., key]
        wanted = (mixed(part) @ np.arange(V)).sum()
        np.testing.assert_allclose(jax.grad(loss)(gate, key), wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scores", "weights"])
def test_an_edit_that_makes_nan_gives_nan(name):
    run = mh.edit(attend, {name: lambda x: x.at[0, 1, 2, 0].set(jnp.nan)})
    (values, _), found = mh.look(run, ["map"])(QUERY)
    is_nan = np.isnan(values).any(-1)
    assert is_nan[0, 2, 1] and is_nan.sum() == 1
    assert np.isnan(found["map"].weights()[0, 1, 2]).any()
    assert np.isnan(found["map"].statistics().entropy).sum() == 1


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", ["scores", "weights", "map"])
def test_an_edit_that_changes_nothing_keeps_the_dropout(name, implementation, around):
    options = {"dropout_rate": 0.4, "rng": jax.random.key(3)}

    def run(query):
        if around is jax.vmap:
            arrays = query, KEY[0], VALUE[0]
            return attention.attend(
                *arrays, mask=MASK, implementation=implementation, **options
            )
        return attend(query, implementation, **options)

    wanted, _ = around(run)(QUERY)
    found, _ = around(mh.edit(run, {name: lambda x: x}))(QUERY)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    without, _ = attend(QUERY, implementation)
    assert abs(wanted - without).max() > 0.1


@pytest.mark.parametrize(
    "name", everyday.those(["query", "key", "value", "heads", "output"], "heads")
)
def test_a_module_has_its_parts_as_sites(name):
    sizes = {"query": (T, H, K), "key": (T, G, K), "value": (T, G, V)}
    sizes |= {"heads": (T, H, V), "output": (T, D)}

    def forward(x):
        module = mh.MultiHeadAttention(
            H, K, value_size=V, model_size=D, num_key_value_heads=G, name="mha"
        )
        return module(x, x, x, MASK)[0]

    model = hk.without_apply_rng(hk.transform(forward))
    x = jax.random.normal(_KEYS[0], (B, T, D))
    params = model.init(_KEYS[1], x)
    _, found = mh.look(model.apply, [f"mha/{name}"])(params, x)
    assert found[f"mha/{name}"].shape == (B, *sizes[name])
    silent = mh.edit(model.apply, {f"mha/{name}": jnp.zeros_like})(params, x)
    if name in ("value", "heads", "output"):
        np.testing.assert_array_equal(silent, 0)  # biases start at 0
    else:
        assert not np.allclose(silent, model.apply(params, x))
