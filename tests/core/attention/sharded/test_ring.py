"""Attention on a mesh: the same as on one device, of any share of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, devices, masks, positions
from mha_haiku.core.attention.sharded import shardings

B, T, H, G, K, V = 2, 24, 4, 2, 5, 3
LENGTHS = jnp.array([20, 5])
MASKS = {
    "full": lambda: None,
    "causal": masks.causal,
    "padding": lambda: masks.padding(LENGTHS, LENGTHS),
    "window": lambda: masks.window(5, 2),
    "segments": lambda: masks.segments(jnp.repeat(jnp.arange(6), 4)[None]),
    "causal padding": lambda: masks.causal() & masks.padding(LENGTHS),
}


def _mesh(data=1, heads=1, sequence=1):
    here = jax.local_devices()[: data * heads * sequence]
    return devices.make_mesh(here, data=data, heads=heads, sequence=sequence)


def _inputs(num_keys=T):
    generator = np.random.default_rng(0)
    shapes = (B, T, H, K), (B, num_keys, G, K), (B, num_keys, G, V), (B, T, H, V)
    return [jnp.asarray(generator.normal(size=x), jnp.float32) for x in shapes]


def _found(implementation, mask, bias=None, num_keys=T):
    """Returns values, logsumexp, and the gradients of both by all inputs."""
    *arrays, cotangent = _inputs(num_keys)

    def total(query, key, value, bias):
        values, found = attention.attend(
            query, key, value, mask=mask, bias=bias, implementation=implementation
        )
        seen = found.logsumexp > -jnp.inf
        total = (values * cotangent).sum()
        total += jnp.where(seen, jnp.sin(found.logsumexp), 0).sum()
        return total, (values, found.logsumexp)

    wanted = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    gradients = jax.grad(total, wanted, has_aux=True)
    return jax.jit(gradients)(*arrays, bias)


def _assert_close(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
    jax.tree.map(close, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("window", 4), *((name, 2) for name in MASKS), ("causal padding", 4)],
)
def test_ring_equals_blockwise_on_one_device(name, size):
    mask = MASKS[name]()
    shared = attention.Sharded(_mesh(sequence=size), attention.Blockwise(rows=4))
    _assert_close(_found(shared, mask), _found("blockwise", mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [{"data": 2, "heads": 2}, {"heads": 2, "sequence": 2}], ids=str
)
def test_examples_heads_and_positions_are_shared(shape):
    mask = masks.causal() & masks.padding(LENGTHS)
    shared = attention.Sharded(_mesh(**shape))
    _assert_close(_found(shared, mask), _found("dense", mask))


@pytest.mark.slow
def test_other_keys_than_queries():
    shared = attention.Sharded(_mesh(sequence=2))
    mask = masks.window(None, 8)
    found = _found(shared, mask, num_keys=T + 8)
    _assert_close(found, _found("dense", mask, num_keys=T + 8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "alibi", "array"])
@pytest.mark.parametrize("shape", [{"heads": 2, "sequence": 2}, {"data": 2}], ids=str)
def test_biases_and_their_gradients(kind, shape):
    generator = np.random.default_rng(1)
    table = jnp.asarray(generator.normal(size=(8, H)), jnp.float32)
    bias = {
        "alibi": lambda: positions.alibi(H),
        "table": lambda: positions.relative_bias(
            table, bidirectional=True, max_distance=9
        ),
        "array": lambda: jnp.asarray(generator.normal(size=(1, H, T, T)), jnp.float32),
    }[kind]()
    mask = masks.causal()
    found = _found(attention.Sharded(_mesh(**shape)), mask, bias)
    _assert_close(found, _found("dense", mask, bias))


@pytest.mark.slow
def test_mask_of_each_head_as_an_array():
    array = np.random.default_rng(2).random((B, H, T, T)) < 0.4
    mask = masks.dense(array)
    for shape in ({"heads": 2}, {"heads": 2, "sequence": 2}):
        found = _found(attention.Sharded(_mesh(**shape)), mask)
        _assert_close(found, _found("dense", mask))


@pytest.mark.slow
def test_dropout_is_the_same_forward_and_backward():
    """The values are linear in what a value vector is, with the kept weights."""
    query, key, value, cotangent = _inputs()
    shared = attention.Sharded(_mesh(data=2, sequence=2))

    def total(value, seed):
        values, _ = attention.attend(
            query,
            key,
            value,
            mask=masks.causal(),
            dropout_rate=0.4,
            rng=jax.random.key(seed),
            implementation=shared,
        )
        return (values * cotangent).sum(), values

    of = jax.jit(jax.value_and_grad(total, has_aux=True))
    (one, values), gradient = of(value, 0)
    np.testing.assert_allclose((gradient * value).sum(), one, rtol=1e-5)
    assert not np.allclose(values, of(value, 1)[0][1])


@pytest.mark.slow
def test_no_two_parts_drop_the_same():
    """Weights are even; a key has minus the value of its like in the other half."""
    half = jnp.asarray(np.random.default_rng(4).normal(size=(1, T // 2, 1, V)))
    value = jnp.concatenate([half, -half], 1).astype(jnp.float32)
    shapes = (B, T, H, K), (B, T, G, K)
    shared = attention.Sharded(_mesh(data=2, sequence=2))
    values, _ = jax.jit(
        lambda value: attention.attend(
            *map(jnp.zeros, shapes),
            value,
            dropout_rate=0.4,
            rng=jax.random.key(0),
            implementation=shared,
        )
    )(value.repeat(G, 2).repeat(B, 0))
    assert np.abs(values).min() > 1e-6  # what both halves drop alike cancels
    assert np.abs(values[0] - values[1]).max() > 0.1
    assert np.abs(values[:, : T // 2] - values[:, T // 2 :]).max() > 0.1
    assert np.abs(values[:, :, 0] - values[:, :, 1]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "causal", "segments", "causal padding"])
def test_statistics_of_shared_maps(name):
    mask, bias = MASKS[name](), positions.alibi(H)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 4, (B, T)))

    def statistics(implementation):
        @jax.jit
        def observe(query, key, value):
            _, found = attention.attend(
                query, key, value, mask=mask, bias=bias, implementation=implementation
            )
            return found.statistics(
                pooled=(5, 7), tokens=tokens, positions=tokens == 1, counted=tokens != 2
            )

        return observe(*_inputs()[:3])

    wanted = statistics("blockwise")
    shape = {"heads": 2, "sequence": 2} if name == "causal" else {"sequence": 4}
    _assert_close(statistics(attention.Sharded(_mesh(**shape))), wanted)


@pytest.mark.slow
def test_other_observations_of_shared_maps():
    def observed(implementation):
        @jax.jit
        def observe(query, key, value):
            _, found = attention.attend(
                query,
                key,
                value,
                mask=masks.causal(),
                implementation=implementation,
            )
            return (
                found.pooled(4, 4),
                found.top(2),
                found.apply(found.value[..., :1, :]),
                found.apply_transposed(query),
                found.divergence(),
                found.weights(),
            )

        return observe(*_inputs()[:3])

    shared = attention.Sharded(_mesh(heads=2, sequence=2))
    _assert_close(observed(shared), observed("blockwise"))


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_memory_of_a_device_falls_with_the_ring():
    def size(count):
        mesh = _mesh(sequence=count)
        spec = jax.sharding.PartitionSpec(None, "sequence")
        sharding = jax.sharding.NamedSharding(mesh, spec)
        array = jax.ShapeDtypeStruct((1, 8192, 2, 32), jnp.float32, sharding=sharding)
        tiles = attention.Blockwise(rows=128, columns=128)

        def total(*arrays):
            shared = attention.Sharded(mesh, tiles)
            values, _ = attention.attend(
                *arrays, mask=masks.causal(), implementation=shared
            )
            return (values**2).sum()

        program = jax.jit(jax.grad(total, (0, 1, 2)), out_shardings=sharding)
        found = program.lower(array, array, array).compile().memory_analysis()
        return (
            found.temp_size_in_bytes
            + found.argument_size_in_bytes
            + found.output_size_in_bytes
        )

    one, two, four = size(1), size(2), size(4)
    assert two < one  # chunks on their way are held twice
    assert four < 0.55 * two


@pytest.mark.parametrize("size", [1, 2, 4])
def test_chunks_meet_once_and_come_home(size):
    """Each pair of positions meets once; under a causal mask work is even."""
    length = 8 * size
    device_ring = shardings.Ring.of(masks.causal(), length, length, size)
    assert device_ring.chunks == (2 if size > 1 else 1)
    seen = np.zeros((length, length), int)
    work = {}

    def local(at):
        rows, keys = device_ring.to_chunks(at, -1), device_ring.to_chunks(at, -1)

        def meet(chunks, row, key, of_row, of_key, met):
            device = jax.lax.axis_index(shardings.AXIS)
            jax.debug.callback(note, device, row, key, ordered=False)
            return of_row + key.sum(), of_key + row.sum(), met

        of_rows, of_keys, _ = device_ring.around(
            meet, rows, keys, jnp.zeros_like(rows), jnp.zeros_like(keys), ()
        )
        return (
            device_ring.from_chunks(rows, -1),
            device_ring.from_chunks(of_rows, -1),
            device_ring.from_chunks(of_keys, -1),
        )

    def note(device, row, key):
        seen[np.ix_(row, key)] += 1
        pairs = (row[:, None] >= key[None]).sum()
        work[int(device)] = work.get(int(device), 0) + int(pairs)

    spec = jax.sharding.PartitionSpec("sequence")
    run = jax.shard_map(
        local,
        mesh=_mesh(sequence=size),
        in_specs=spec,
        out_specs=(spec, spec, spec),
        check_vma=False,
    )
    home, of_rows, of_keys = jax.jit(run)(jnp.arange(length))
    jax.effects_barrier()
    np.testing.assert_array_equal(home, np.arange(length))
    total = np.arange(length).sum()
    np.testing.assert_array_equal(of_rows, np.full(length, total))
    np.testing.assert_array_equal(of_keys, np.full(length, total))
    np.testing.assert_array_equal(seen, np.ones((length, length)))
    assert len(set(work.values())) == 1


def test_two_chunks_only_where_queries_see_unequally():
    assert shardings.Ring.of(masks.window(3, 3), 32, 32, 4).chunks == 1
    assert shardings.Ring.of(masks.full(), 32, 32, 4).chunks == 1
    lengths = np.array([2])
    assert shardings.Ring.of(masks.padding(lengths), 8, 8, 2).chunks == 1
    assert (
        shardings.Ring.of(masks.causal() & masks.padding(lengths), 8, 8, 2).chunks == 2
    )
    prefix = masks.causal() | masks.padding(lengths)
    assert shardings.Ring.of(prefix, 8, 8, 2).chunks == 2
    assert (
        shardings.Ring.of(masks.causal(), 36, 36, 4).chunks == 1
    )  # 8 do not divide it
    assert shardings.Ring.of(masks.causal() & masks.window(3, 3), 32, 32, 4).chunks == 2
    assert shardings.Ring.of(~masks.window(None, 1), 32, 32, 4).chunks == 2


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (
            {"data": 4},
            "'data' of the mesh, of size 4, .* the first batch axis",
        ),
        (
            {"heads": 4},
            "'heads' of the mesh, of size 4, .* the key heads G, got 2",
        ),
        ({"sequence": 3}, "'sequence' of the mesh, of size 3, .* the keys S"),
    ],
    ids=str,
)
def test_what_the_mesh_does_not_divide_is_refused(shape, what):
    with pytest.raises(ValueError, match=what):
        _found(attention.Sharded(_mesh(**shape)), None, num_keys=25)


def test_what_is_no_ring_is_refused():
    with pytest.raises(ValueError, match="auto or blockwise, or a Blockwise"):
        attention.Sharded(_mesh(sequence=2), "dense")
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:2]), ("x",))
    with pytest.raises(ValueError, match="must have the axes data, heads, sequence"):
        attention.Sharded(mesh)
