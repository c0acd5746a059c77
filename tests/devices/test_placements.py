"""What a placement puts comes back, and each model and device has its own part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import devices, tasks


def _placement(count, **options):
    return devices.Placement(jax.local_devices()[:count], **options)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_replicated_tree_comes_back_and_is_on_every_device(count):
    tree = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.int32(7)}
    placement = _placement(count)
    placed = placement.put(tree)
    assert placed["a"].is_fully_replicated and placed["a"].shape == (2, 3)
    assert placed["a"].devices() == set(placement.devices)
    back = placement.fetch(placed)
    np.testing.assert_array_equal(back["a"], tree["a"])
    assert back["b"] == 7 and back["b"].dtype == np.int32


def test_host_copy_outlives_donation():
    placement = _placement(2)
    original = np.arange(5.0)
    placed = placement.put_state(original)
    before = placement.fetch(placed)
    add = placement.program(
        lambda x, one: (x + one, one), num_scalars=0, returns_state=True
    )
    after = placement.fetch(add(placed, placement.put(np.float64(1)))[0])
    assert placed.is_deleted()
    np.testing.assert_array_equal(original, np.arange(5.0))
    np.testing.assert_array_equal(before, np.arange(5.0))
    np.testing.assert_array_equal(after, np.arange(5.0) + 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_devices_share_the_batch_in_order(count):
    placement = _placement(count)

    def make(indices):
        return tasks.Example(indices[:, None], indices, jnp.ones(indices.shape))

    found = jax.jit(lambda: placement.batch(12, make))().targets
    assert placement.batch_parts == count
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.arange(12))
    parts = {shard.device: shard.data for shard in found.addressable_shards}
    for i, device in enumerate(placement.devices):
        part = np.arange(12).reshape(count, -1)[i]
        np.testing.assert_array_equal(parts[device], part)


def test_batch_that_the_devices_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="multiple of 4 devices, got 10"):
        _placement(4).batch(10, lambda indices: indices)


@pytest.mark.parametrize("count", [1, 3])
def test_states_of_models_come_back_as_they_were_put(count):
    placement = _placement(1, num_models=count)
    states = [
        {"step": np.int32(i), "w": np.arange(4.0, dtype=np.float32) + 10 * i}
        for i in range(count)
    ]
    found = placement.fetch_each(placement.put_state(placement.joined(states)))
    assert len(found) == count
    for state, own in zip(states, found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, own, state)


@pytest.mark.parametrize("count", [1, 3])
def test_a_program_gives_each_model_its_own_scalar(count):
    placement = _placement(1, num_models=count)
    states = [{"w": np.float32(5 + i)} for i in range(count)]
    state = placement.put_state(placement.joined(states))
    data = placement.put(np.float32(2))
    program = placement.program(
        lambda state, data, scalar: {"w": state["w"] * data + scalar},
        num_scalars=1,
        returns_state=False,
    )
    scalars = [np.float32(i) for i in range(count)]
    found = placement.fetch_each(program(state, data, placement.joined(scalars)))
    assert [each["w"] for each in found] == [2 * (5 + i) + i for i in range(count)]
