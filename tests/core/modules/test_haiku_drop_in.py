"""`MultiHeadAttention` stands wherever `hk.MultiHeadAttention` stood."""

import functools
import warnings

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh

B, T, S, H, K, V = 2, 3, 5, 7, 4, 6
W_INIT = hk.initializers.RandomNormal(0.5)
VARIANTS = {
    "defaults": {"w_init": W_INIT},
    "w_init_scale": {"w_init_scale": 2.0},
    "sizes": {"w_init": W_INIT, "value_size": V, "model_size": 11},
    "no_bias": {"w_init": W_INIT, "with_bias": False, "value_size": V},
    "b_init": {"w_init": W_INIT, "b_init": hk.initializers.RandomNormal(1.0)},
}
MASKS = {
    "none": None,
    "of_keys": (B, 1, 1, S),
    "of_pairs": (B, 1, T, S),
    "of_heads": (B, H, T, S),
    "of_all_examples": (1, 1, T, S),
}

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
assert_trees_close = functools.partial(
    chex.assert_trees_all_close, rtol=1e-5, atol=1e-6
)


@pytest.fixture
def inputs(normal):
    """Query, key and value of three widths."""
    return normal(B, T, 8), normal(B, S, 9), normal(B, S, 10)


@pytest.fixture
def jax_usage():
    """Lets Haiku check that no JAX transformation sees its side effects."""
    before = hk.experimental.check_jax_usage(True)
    yield
    hk.experimental.check_jax_usage(before)


def _theirs(name="mha", **kwargs):
    def forward(query, key, value, mask=None):
        # Haiku warns of w_init_scale, which is deprecated.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = hk.MultiHeadAttention(H, K, name=name, **kwargs)
        return module(query, key, value, mask)

    return hk.transform(forward)


def _ours(name="mha", **kwargs):
    def forward(query, key, value, mask=None):
        output, _ = mh.MultiHeadAttention(H, K, name=name, **kwargs)(
            query, key, value, mask
        )
        return output

    return hk.transform(forward)


def _mask(shape):
    """A boolean mask of this shape in which every row has a true, or None."""
    if shape is None:
        return None
    mask = np.random.default_rng(1).random(shape) < 0.5
    mask[..., 0] = True
    return mask


def test_parameter_names_and_shapes(inputs):
    model = _ours(w_init=W_INIT, value_size=V, model_size=11)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), params)
    assert shapes == {
        "mha/query": {"w": ((8, 28), "float32"), "b": ((28,), "float32")},
        "mha/key": {"w": ((9, 28), "float32"), "b": ((28,), "float32")},
        "mha/value": {"w": ((10, 42), "float32"), "b": ((42,), "float32")},
        "mha/linear": {"w": ((42, 11), "float32"), "b": ((11,), "float32")},
    }


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["w_init_scale", "b_init"])
def test_initial_parameters_are_equal(variant, normal):
    # All matrices are of one shape, as random numbers compile anew for each.
    inputs = [normal(1, 1, H * K)] * 3
    key, kwargs = jax.random.key(3), VARIANTS[variant]
    ours = _ours(None, **kwargs).init(key, *inputs)
    theirs = _theirs(None, **kwargs).init(key, *inputs)
    assert ours.keys() == theirs.keys()
    assert "multi_head_attention/linear" in ours
    chex.assert_trees_all_equal(ours, theirs)


def test_weight_initializers_that_contradict_are_refused(inputs):
    model = _ours(w_init=W_INIT, w_init_scale=2.0)
    with pytest.raises(ValueError, match="w_init or w_init_scale, not both"):
        jax.eval_shape(model.init, jax.random.key(0), *inputs)


@pytest.mark.parametrize(("variant", "mask"), list(zip(VARIANTS, MASKS, strict=True)))
def test_outputs_and_gradients_are_equal(
    variant, mask, inputs, normal, random_parameters
):
    kwargs, mask = VARIANTS[variant], _mask(MASKS[mask])
    ours, theirs = _ours(**kwargs), _theirs(**kwargs)
    params = random_parameters(theirs, *inputs)
    cotangent = normal(B, T, kwargs.get("model_size", H * K))

    def run(model):
        def loss(params, inputs):
            output = model.apply(params, None, *inputs, mask)
            return (output * cotangent).sum(), output

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, inputs)

    (found, output), (wanted, wanted_output) = run(ours), run(theirs)
    assert_close(output, wanted_output)
    assert_trees_close(found, wanted, atol=5e-6)


@pytest.mark.parametrize("shape", [(), (B, 11)], ids=["none", "two"])
def test_any_number_of_leading_axes(shape, normal, random_parameters):
    inputs = normal(*shape, T, 8), normal(*shape, S, 9), normal(*shape, S, 10)
    mask = _mask((*shape, 1, T, S))
    ours, theirs = _ours(w_init=W_INIT), _theirs(w_init=W_INIT)
    params = random_parameters(theirs, *inputs)
    found = jax.jit(ours.apply)(params, None, *inputs, mask)
    assert_close(found, jax.jit(theirs.apply)(params, None, *inputs, mask))


@pytest.mark.slow
def test_map_holds_the_weights_of_haiku(inputs, random_parameters):
    query, key, _ = inputs
    value = np.broadcast_to(np.eye(S, dtype=np.float32), (B, S, S))
    kwargs = {"w_init": W_INIT, "value_size": S, "model_size": H * S}
    theirs = _theirs(**kwargs)
    params = random_parameters(theirs, query, key, value)
    # Values are one-hot vectors that nothing mixes, so the output is the weights.
    params["mha/value"] = {"w": np.tile(np.eye(S), H), "b": np.zeros(H * S)}
    params["mha/linear"] = {"w": np.eye(H * S), "b": np.zeros(H * S)}
    params = jax.tree.map(np.float32, params)
    mask = _mask((B, H, T, S))
    weights = jax.jit(theirs.apply)(params, None, query, key, value, mask)
    weights = weights.reshape(B, T, H, S).transpose(0, 2, 1, 3)

    def forward(query, key, value, mask):
        return mh.MultiHeadAttention(H, K, name="mha", **kwargs)(
            query, key, value, mask
        )

    ours = jax.jit(hk.transform(forward).apply)
    _, attention_map = ours(params, None, query, key, value, mask)
    assert attention_map.shape == (B, H, T, S)
    assert_close(attention_map, weights)
    np.testing.assert_array_equal(np.asarray(attention_map)[~mask], 0)


def test_vmap_of_haiku_equals_a_batch_axis(inputs, random_parameters, jax_usage):
    batched = _ours(w_init=W_INIT)
    params = random_parameters(batched, *inputs)

    def forward(query, key, value):
        module = mh.MultiHeadAttention(H, K, w_init=W_INIT, name="mha")
        split_rng = not hk.running_init()
        return hk.vmap(module, split_rng=split_rng)(query, key, value)

    mapped = hk.transform(forward)
    shapes = jax.eval_shape(mapped.init, jax.random.key(0), *inputs)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    output, attention_map = jax.jit(mapped.apply)(params, jax.random.key(1), *inputs)
    assert_close(output, jax.jit(batched.apply)(params, None, *inputs))
    assert attention_map.shape == (B, H, T, S)
