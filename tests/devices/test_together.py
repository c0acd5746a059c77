"""Several models in one program: each keeps its own numbers."""

import jax
import numpy as np
import pytest

from mha_haiku import devices


@pytest.mark.parametrize("count", [1, 3])
def test_states_of_models_come_back_as_they_were_put(count):
    together = devices.Together(devices.Replicas(jax.devices()[:1]), count)
    states = [
        {"step": np.int32(i), "w": np.arange(4.0, dtype=np.float32) + 10 * i}
        for i in range(count)
    ]
    found = together.fetch(together.put_states(states))
    assert len(found) == count
    for state, own in zip(states, found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, own, state)


@pytest.mark.parametrize("count", [1, 3])
def test_a_program_gives_each_model_its_own_scalar(count):
    together = devices.Together(devices.Replicas(jax.devices()[:1]), count)
    state = together.put_states([{"w": np.float32(5 + i)} for i in range(count)])
    data = together.placement.put(np.float32(2))
    program = together.placement.program(
        lambda state, data, scalar: {"w": state["w"] * data + scalar},
        num_scalars=1,
        returns_state=False,
    )
    scalars = [np.float32(i) for i in range(count)]
    found = together.fetch(program(state, data, together.joined(scalars)))
    assert [each["w"] for each in found] == [2 * (5 + i) + i for i in range(count)]
