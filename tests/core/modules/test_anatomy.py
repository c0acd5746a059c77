"""The properties of parameters by name hold for all existing parameters."""

import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import modules
from mha_haiku.core.modules import anatomy

T, D, H, G, K, V, F = 3, 11, 6, 2, 4, 5, 7
COUNTS = {
    anatomy.HEADS: H,
    anatomy.KEY_VALUE_HEADS: G,
    anatomy.HEAD_FEATURES: K,
    anatomy.UNITS: F,
}
# The sizes of one head or unit, by the product of which an axis is as long as it is.
SIZES = {"smear": 1, "sinks": 1, "query": K, "key": K, "value": V, "linear": V}


@pytest.fixture
def params():
    """Every parameter that attention and feed-forward parts may have."""

    def forward(x):
        attention = modules.MultiHeadAttention(
            H,
            K,
            value_size=V,
            model_size=D,
            num_key_value_heads=G,
            transforms=modules.HeadTransforms(True, modules.smeared_keys),
            pattern=modules.Pattern(None, modules.learned_sinks, modules.head_gates),
            name="attention",
        )
        modules.FeedForward(F, gated=True, name="feed_forward")(x)
        return attention(x, x, x)[0]

    x = np.ones((T, D), np.float32)
    return jax.eval_shape(hk.transform(forward).init, jax.random.key(0), x)


def test_every_parameter_of_heads_and_units_is_known(params):
    unknown = set()
    for module, leaves in params.items():
        for name, leaf in leaves.items():
            axis = anatomy.axis_of(f"encoder/layer_3/{module}", name)
            if axis is None:
                unknown.add(f"{module}/{name}")
                continue
            part = module.rpartition("/")[2]
            size = SIZES.get(name, SIZES.get(part, 1))
            assert leaf.shape[axis.place] == COUNTS[axis.holds] * size, (module, name)
            assert axis.is_read == (name == "w" and part in ("linear", "output"))
    assert unknown == {"attention/linear/b", "feed_forward/output/b"}


def test_heads_that_stay_are_blocks_of_their_axis():
    rows, columns = anatomy.axis_of("linear", "w"), anatomy.axis_of("query", "w")
    array = np.arange(6 * 6).reshape(6, 6)
    np.testing.assert_array_equal(
        anatomy.taken(array, rows, 3, [2, 0]), array[[4, 5, 0, 1]]
    )
    np.testing.assert_array_equal(anatomy.taken(array, columns, 2, [1]), array[:, 3:])
    assert anatomy.taken(array, columns, 2, []).shape == (6, 0)
    with pytest.raises(
        ValueError, match=r"must have 4 heads along axis -2, .*\(6, 6\)"
    ):
        anatomy.taken(array, rows, 4, [1])
    with pytest.raises(ValueError, match=r"must have 2 heads .*shape \(6,\)"):
        anatomy.taken(array[0], rows, 2, [1])


def test_factors_scale_the_blocks_of_each_layer():
    axis = anatomy.axis_of("attention/linear", "w")
    array = np.ones((2, 6, 5))
    factors = np.array([[1, 2, 3], [4, 5, 6]])
    scaled = anatomy.scaled(array, axis, factors)
    np.testing.assert_array_equal(scaled[..., 0], np.repeat(factors, 2, axis=1))
    np.testing.assert_array_equal(anatomy.scaled(array[0], axis, factors[0]), scaled[0])


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        ("encoder/layer_12/attention/query", ("encoder/", 12, "/attention/query")),
        ("layer_0", ("", 0, "")),
        ("a/layers/layer_0/norm_1", ("a/", None, "/norm_1")),
        ("layers/layer_0", ("", None, "")),
        ("players/layer_0", ("players/", 0, "")),
        ("encoder/norm", None),
        ("encoder/layer_x", None),
    ],
)
def test_names_tell_the_layer(module, wanted):
    layer = anatomy.layer_of(module)
    assert layer == (wanted and anatomy.LayerName(*wanted))
    assert layer is None or str(layer) == module
    assert anatomy.is_stacked(module) == (wanted is not None and wanted[1] is None)
