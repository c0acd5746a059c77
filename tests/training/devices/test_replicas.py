"""Replication, and each device's part of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import devices, tasks


def _replicas(count):
    return devices.Replicas(jax.local_devices()[:count])


def test_host_copy_outlives_donation():
    replicas = _replicas(2)
    original = np.arange(5.0)
    placed = replicas.put_state(original)
    assert placed.devices() == set(replicas.devices)
    before = replicas.fetch(placed)
    add = replicas.program(lambda x, one: (x + one, one), returns_state=True)
    after = replicas.fetch(add(placed, replicas.put(np.float64(1)))[0])
    assert placed.is_deleted()
    np.testing.assert_array_equal(original, np.arange(5.0))
    np.testing.assert_array_equal(before, np.arange(5.0))
    np.testing.assert_array_equal(after, np.arange(5.0) + 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_devices_share_the_batch_in_order(count):
    replicas = _replicas(count)

    @jax.jit
    def batch():
        def make(indices):
            weights = jnp.ones((12, 3))
            return tasks.Example(jnp.tile(indices[:, None], 3), weights > 0, weights)

        return replicas.batch(12, make).inputs

    found = batch()
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found[:, 0], np.arange(12))
    parts = [np.asarray(x.data)[:, 0] for x in found.addressable_shards]
    assert {len(part) for part in parts} == {12 // count}
