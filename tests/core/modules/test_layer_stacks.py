"""Layers looped over or scanned: the same values at another cost."""

import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import modules

B, T, H, K, F, L = 2, 5, 7, 4, 11, 3
D = H * K

STACKS = {"looped": modules.looped, "scanned": modules.scanned}
every_stack = pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)

assert_equal = np.testing.assert_array_equal


def _layer(i, num_heads=H, **kwargs):
    return modules.EncoderLayer(
        lambda: modules.MultiHeadAttention(
            num_heads,
            K,
            model_size=D,
            value_size=6,
            implementation="dense",
            name="attention",
        ),
        lambda: modules.FeedForward(F, activation=jax.nn.relu, name="feed_forward"),
        name=f"layer_{i}",
        **kwargs,
    )


def _encoder(stack, make_layer=_layer, num_layers=L):
    """An encoder as a function that gives its output and the weights of each layer."""

    def forward(*args, is_training=False, **call):
        encoder = modules.Encoder(num_layers, make_layer, stack=stack)
        output, maps = encoder(*args, is_training=is_training, **call)
        return output, tuple(each.weights() for each in maps)

    return hk.transform(forward)


@every_stack
def test_each_layer_draws_its_own_dropout(stack):
    def forward(x):
        def call_layer(i, x, gates):
            return x, jax.random.uniform(hk.next_rng_key())

        return stack(call_layer, x, [()] * L)[1]

    drawn = hk.transform(forward).apply({}, jax.random.key(0), np.ones(3))
    assert len({float(each) for each in drawn}) == L


@every_stack
def test_each_layer_starts_from_values_of_its_own_at_the_same_scale(stack, normal):
    def init(stack):
        def forward(x):
            def call_layer(i, x, gates):
                return hk.Linear(D, name=f"layer_{i}")(x), None

            return stack(call_layer, x, [()] * L)

        return jax.jit(hk.transform(forward).init)(jax.random.key(0), normal(T, D))

    looped, params = init(modules.looped), init(stack)
    params = modules.unstacked(params) if "scanned" in stack.__name__ else params
    assert jax.tree.structure(params) == jax.tree.structure(looped)
    weights = []
    for module, leaves in looped.items():
        weights.append(params[module]["w"].ravel())
        assert_equal(params[module]["b"], leaves["b"])
        assert params[module]["w"].dtype == leaves["w"].dtype
        # The standard deviation of D x D numbers is off by a share of 1 / D.
        scales = np.std(weights[-1]), np.std(leaves["w"])
        np.testing.assert_allclose(*scales, rtol=3 / D)
    assert np.abs(np.corrcoef(weights) - np.eye(L)).max() < 4 / D


def _compiled_size(stack, num_layers):
    """Lines of the program of a gradient, before XLA."""
    model = _encoder(stack, num_layers=num_layers)
    x = np.ones((B, T, D), np.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = jax.grad(lambda params: model.apply(params, None, x)[0].sum())
    return len(jax.jit(loss).lower(params).as_text().splitlines())


@pytest.mark.slow
def test_what_is_compiled_grows_with_layers_of_a_loop_and_not_of_a_scan():
    small, large = (_compiled_size(modules.scanned, n) for n in (2, 9))
    assert small == large
    small, large = (_compiled_size(modules.looped, n) for n in (2, 9))
    assert large > 3 * small


def test_a_scan_refuses_parameters_of_other_shapes(normal):
    model = _encoder(modules.scanned, lambda i: _layer(i, num_heads=(7, 7, 3)[i]))
    message = r"'attention/key/b' of float32\[28\] in layer 0 .*\[12\] in layer 2"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, jax.random.key(0), normal(B, T, D))


def test_a_scan_refuses_a_parameter_that_one_layer_lacks(normal):
    model = _encoder(
        modules.scanned,
        lambda i: _layer(i, make_norm=(modules.LayerNorm, modules.RMSNorm)[i == 1]),
    )
    message = r"'norm_1/offset' of float32\[28\] in layer 0 and of no array in layer 1"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, jax.random.key(0), normal(B, T, D))


def test_parameters_of_other_layers_are_refused(normal):
    model = _encoder(modules.scanned)
    x = normal(B, T, D)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    hidden = params["encoder/layers/layer_0/feed_forward/hidden"]
    hidden["b"] = np.ones((L, F + 1), np.float32)
    with pytest.raises(ValueError, match="layer_0/feed_forward/hidden"):
        jax.eval_shape(model.apply, params, None, x)
