"""Replication, and each device's part of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import devices


def _replicas(count):
    return devices.Replicas(jax.local_devices()[:count])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_replicated_tree_comes_back_and_is_on_every_device(count):
    tree = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.int32(7)}
    replicas = _replicas(count)
    placed = replicas.put(tree)
    assert placed["a"].shape == (count, 2, 3)
    assert placed["b"].shape == (count,)
    assert placed["a"].devices() == set(replicas.devices)
    back = replicas.fetch(placed)
    np.testing.assert_array_equal(back["a"], tree["a"])
    assert back["b"] == 7 and back["b"].dtype == np.int32


def test_host_copy_outlives_donation():
    replicas = _replicas(2)
    original = np.arange(5.0)
    placed = replicas.put_state(original)
    before = replicas.fetch(placed)
    add = replicas.program(
        lambda x, one: (x + one, one), num_scalars=0, returns_state=True
    )
    after = replicas.fetch(add(placed, replicas.put(np.float64(1)))[0])
    assert placed.is_deleted()
    np.testing.assert_array_equal(original, np.arange(5.0))
    np.testing.assert_array_equal(before, np.arange(5.0))
    np.testing.assert_array_equal(after, np.arange(5.0) + 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_devices_share_the_batch_in_order(count):
    replicas = _replicas(count)
    part = replicas.program(
        lambda state, data: replicas.batch(12, lambda indices: indices),
        num_scalars=0,
        returns_state=False,
    )
    indices = part(jnp.zeros(count), jnp.zeros(count))
    assert indices.dtype == jnp.int32
    assert indices.shape == (count, 12 // count)
    np.testing.assert_array_equal(indices.ravel(), np.arange(12))


@pytest.mark.parametrize("count", [1, 4])
def test_total_is_the_sum_over_devices(count):
    replicas = _replicas(count)
    total = replicas.program(
        lambda x, _: replicas.total({"x": x}), num_scalars=0, returns_state=False
    )
    values = jnp.arange(1.0, count + 1)
    found = total(values, jnp.zeros(count))
    np.testing.assert_array_equal(found["x"], np.full(count, values.sum()))
