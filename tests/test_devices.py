"""Replication, and each device's part of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import devices


@pytest.mark.parametrize("count", [1, 2, 4])
def test_replicated_tree_comes_back_and_is_on_every_device(count):
    tree = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.int32(7)}
    local = devices.local(count)
    replicated = devices.replicate(tree, local)
    assert replicated["a"].shape == (count, 2, 3)
    assert replicated["b"].shape == (count,)
    assert replicated["a"].devices() == set(local)
    back = devices.unreplicate(replicated)
    np.testing.assert_array_equal(back["a"], tree["a"])
    assert back["b"] == 7 and back["b"].dtype == np.int32


def test_host_copy_outlives_donation():
    local = devices.local(2)
    original = np.arange(5.0)
    replicated = devices.replicate(original, local)
    before = devices.unreplicate(replicated)
    add = jax.pmap(lambda x: x + 1, devices=local, donate_argnums=0)
    after = devices.unreplicate(add(replicated))
    np.testing.assert_array_equal(original, np.arange(5.0))
    np.testing.assert_array_equal(before, np.arange(5.0))
    np.testing.assert_array_equal(after, np.arange(5.0) + 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_devices_share_the_batch_in_order(count):
    local = devices.local(count)
    part = jax.pmap(
        lambda _: devices.part_of_batch(12, count),
        axis_name=devices.AXIS,
        devices=local,
    )
    indices = part(jnp.zeros(count))
    assert indices.dtype == jnp.int32
    assert indices.shape == (count, 12 // count)
    np.testing.assert_array_equal(indices.ravel(), np.arange(12))


def test_batch_that_the_devices_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="multiple of 4 devices, got 10"):
        devices.part_of_batch(10, 4)


@pytest.mark.parametrize("count", [1, 4])
def test_total_is_the_sum_over_devices(count):
    total = jax.pmap(
        lambda x: devices.total({"x": x}, count),
        axis_name=devices.AXIS,
        devices=devices.local(count),
    )
    values = jnp.arange(1.0, count + 1)
    np.testing.assert_array_equal(total(values)["x"], np.full(count, values.sum()))
