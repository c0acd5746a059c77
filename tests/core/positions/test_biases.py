"""Score biases spelled out as arrays.

B batch, T queries, S keys, H heads.
"""

import numpy as np
import pytest

from mha_haiku import positions

B, T, S, H = 2, 4, 7, 3


@pytest.mark.parametrize("shape", [(B, T, S), (B, H, T, S), (1, T, S), (B, 1, 1, S)])
def test_dense_bias_is_the_array(shape):
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    bias = positions.as_bias(array)
    bias.check((B,), H, T, S)
    expected = array if len(shape) == 4 else array[:, None]
    found = np.broadcast_to(
        bias.aligned(1).aligned_tile(np.arange(T), np.arange(S)), (B, H, T, S)
    )
    np.testing.assert_array_equal(found, np.broadcast_to(expected, (B, H, T, S)))
    tile = bias.aligned(1).aligned_tile(np.asarray([3, 1]), np.arange(2, 5))
    np.testing.assert_array_equal(
        np.broadcast_to(tile, (B, H, 2, 3)), found[:, :, [3, 1], 2:5]
    )


@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_bias_of_no_floats_is_refused_and_pointed_to_mask(dtype):
    with pytest.raises(ValueError, match=r"bias must be floating.* as mask="):
        positions.as_bias(np.ones([T, S], dtype))


@pytest.mark.parametrize("shape", [(T, S), (B, S, T), (B, 2, T, S), (1, B, H, T, S)])
def test_dense_bias_of_another_shape_is_refused_with_both_shapes(shape):
    with pytest.raises(ValueError, match=r"bias must be \[B..., T, S\] or") as error:
        positions.as_bias(np.ones(shape, np.float32)).check((B,), H, T, S)
    assert f"got shape {shape}" in str(error.value)
    assert str((B, H, T, S) if len(shape) == 4 else (B, T, S)) in str(error.value)


def test_as_bias_keeps_biases_and_nothing():
    bias = positions.alibi(H)
    assert positions.as_bias(bias) is bias
    assert positions.as_bias(None) is None
