"""The part of arrays on each device of a mesh, which programs keep there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mha_haiku import devices, tasks

_PARAMS = {
    "encoder/layer_0/attention/query": {"w": np.ones((6, 8)), "b": np.ones(8)},
    "encoder/layer_0/attention/linear": {"w": np.ones((8, 6)), "b": np.ones(6)},
    "encoder/layer_0/feed_forward/hidden": {"w": np.ones((6, 12)), "b": np.ones(12)},
    "encoder/layer_0/feed_forward/output": {"w": np.ones((12, 6)), "b": np.ones(6)},
    "encoder/layer_0/attention": {"smear": np.ones(2), "sinks": np.ones(4)},
    "encoder/layer_0/attention/head_gate": {"w": np.ones((6, 4))},
    "encoder/layer_0/attention/key_norm": {"scale": np.ones(6)},
    "encoder/layer_0/norm_1": {"scale": np.ones(6)},
    "logits": {"w": np.ones((6, 5)), "b": np.ones(5)},
    "embedding": {"embeddings": np.ones((4, 10))},
    "layers/layer_0/attention/value": {"w": np.ones((3, 6, 8))},
}


def _placement(shard_parameters=False, **sizes):
    mesh = devices.make_mesh(jax.local_devices()[:4], **sizes)
    return devices.Sharded(mesh, shard_parameters=shard_parameters)


def _shares(tree):
    """Returns the shape that one device holds of each array, by name."""
    return {
        (module.rpartition("/")[2], name): x.addressable_shards[0].data.shape
        for module, leaves in tree.items()
        for name, x in leaves.items()
    }


def test_heads_and_hidden_units_are_shared():
    shares = _shares(_placement(data=2, heads=2, sequence=1).put_state(_PARAMS))
    assert shares == {
        ("query", "w"): (6, 4),
        ("query", "b"): (4,),
        ("linear", "w"): (4, 6),
        ("linear", "b"): (6,),
        ("hidden", "w"): (6, 6),
        ("hidden", "b"): (6,),
        ("output", "w"): (6, 6),
        ("output", "b"): (6,),
        ("attention", "smear"): (1,),
        ("attention", "sinks"): (2,),
        ("head_gate", "w"): (6, 2),
        ("key_norm", "scale"): (6,),
        ("norm_1", "scale"): (6,),
        ("logits", "w"): (6, 5),
        ("logits", "b"): (5,),
        ("embedding", "embeddings"): (4, 10),
        ("value", "w"): (3, 6, 4),
    }


def test_parameters_and_what_the_optimizer_keeps_are_shared_over_data():
    placement = _placement(data=2, heads=2, sequence=1, shard_parameters=True)
    state = placement.put_state((_PARAMS, optax.adam(0.1).init(_PARAMS)))
    shares = _shares(state[0])
    assert shares == _shares(state[1][0].mu) == _shares(state[1][0].nu)
    assert shares["query", "w"] == (3, 4)  # the axis that is free
    assert shares["logits", "w"] == (3, 5)  # the one that 2 divides
    assert shares["embedding", "embeddings"] == (4, 5)  # the larger of two
    assert shares["logits", "b"] == (5,)


def test_what_is_put_comes_back_whole():
    placement = _placement(data=2, heads=2, sequence=1, shard_parameters=True)
    tree = jax.tree.map(
        lambda x: np.random.default_rng(0).normal(size=x.shape), _PARAMS
    )
    for put in (placement.put, placement.put_state):
        back = placement.fetch(put(tree))
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), back, tree
        )


def test_a_program_leaves_the_state_where_it_is():
    placement = _placement(data=4, heads=1, sequence=1, shard_parameters=True)

    def initial(seed):
        return {"table": {"w": jnp.full((8, 6), seed, jnp.float32)}}

    state = placement.initial_state(initial, np.uint32(3))
    before = state["table"]["w"].sharding
    program = placement.program(
        lambda state, data, factor: (
            jax.tree.map(lambda x: x * factor, state),
            data.sum(),
        ),
        num_scalars=1,
        returns_state=True,
    )
    data = placement.put(np.arange(3.0))
    compiled = program.lower(state, data, np.float32(2)).compile()
    for _ in range(2):
        state, total = compiled(state, data, np.float32(2))
    assert state["table"]["w"].sharding == before
    assert state["table"]["w"].addressable_shards[0].data.shape == (2, 6)
    np.testing.assert_array_equal(placement.fetch(state)["table"]["w"], 12.0)
    assert placement.fetch(total) == 3


def test_examples_are_shared_by_batch_and_position():
    placement = _placement(data=2, heads=1, sequence=2)

    # As many features as positions: which is which is not told by the sizes.
    def make(indices, num_positions=4, shape=(4,)):
        features = indices[:, None, None] * jnp.ones((1, num_positions, 4))
        targets = jnp.zeros((4, *shape))
        return tasks.Example(features, targets, targets, indices)

    def shares(example):
        shared = jax.jit(lambda: placement.batch(4, example))()
        np.testing.assert_array_equal(shared.lengths, np.arange(4))
        return [x.addressable_shards[0].data.shape for x in jax.tree.leaves(shared)]

    assert shares(make) == [(2, 2, 4), (2, 2), (2, 2), (2,)]
    in_a_set = functools.partial(make, shape=())
    assert shares(in_a_set) == [(2, 2, 4), (2,), (2,), (2,)]
    odd = functools.partial(make, num_positions=3, shape=(3,))
    assert shares(odd) == [(2, 3, 4), (2, 3), (2, 3), (2,)]


@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_neighbors_share_heads(sizes):
    data, heads, sequence = sizes
    mesh = devices.make_mesh(
        jax.local_devices()[:4], data=data, heads=heads, sequence=sequence
    )
    assert dict(mesh.shape) == {"data": data, "heads": heads, "sequence": sequence}
    first = mesh.devices.reshape(-1, heads)[0]
    assert [device.id for device in first] == list(range(heads))
