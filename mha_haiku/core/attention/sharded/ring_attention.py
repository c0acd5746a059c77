"""Attention by devices that share the sequence: blockwise between any two chunks.

`B...` batch axes, T query positions, S key positions, C chunks on a device, H query
heads, G key heads, K query/key size and V value size per head. Chunks of keys and
values go round the ring, and in the backward pass their gradients with them; see
`ring`. No device holds more than its share of any array but masks and biases.

Source: Liu et al. 2023, https://arxiv.org/abs/2310.01889.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention import gradients, products
from mha_haiku.core.attention.inputs import Inputs, Nonfinite
from mha_haiku.core.attention.sharded import layout, ring
from mha_haiku.core.attention.tiled import blockwise, sweep

Array = jax.Array


class Options(NamedTuple):
    """What is known before anything is computed."""

    mesh: jax.sharding.Mesh  # the devices
    sizes: sweep.Sizes  # of the tiles; None among them: what suits the platform
    dropout_rate: float  # share of the weights set to zero, in [0, 1)


class _Rows(NamedTuple):
    """What stays on its device: `[C, B..., t, H, K]`, and `[C, B..., t, H]`."""

    query: Array
    nonfinite: Array | None


class _Keys(NamedTuple):
    """What goes round: `[C, B..., s, G, K or V]`, and `[C, B..., s, G]`."""

    key: Array
    value: Array
    nonfinite: Array | None


def _forward(inputs: Inputs, options: Options) -> tuple[Array, Array, tuple]:
    device_ring, specs = _ring_of(inputs, options), layout.input_specs(inputs)
    num_keys = inputs.map_shape[-1]

    def local(inputs):
        inputs = layout.with_own_key(inputs, options.mesh)
        rows, keys = _spread(inputs, device_ring)
        dtype = products.accumulation_dtype(inputs.query.dtype)
        shape = rows.query.shape[:-1]
        nothing = (
            jnp.zeros((*shape, inputs.value.shape[-1]), dtype),
            jnp.full((*shape[:-2], shape[-1], shape[-2]), -jnp.inf, dtype),
        )

        def meet(at, row, key, sums, key_sums, device_sums):
            part = _part(inputs, num_keys, at, row, key)
            values, logsumexp, _ = blockwise.forward(part, _blockwise(part, options))
            return _merged(sums, (values, logsumexp)), key_sums, device_sums

        (values, logsumexp), _, _ = device_ring.around(
            meet, rows, keys, nothing, (), ()
        )
        values = device_ring.from_chunks(values.astype(inputs.value.dtype), -3)
        return values, device_ring.from_chunks(logsumexp, -1)

    batch_ndim = inputs.query.ndim - 3
    values, logsumexp = jax.shard_map(
        local,
        mesh=options.mesh,
        in_specs=(specs,),
        out_specs=(layout.rows(batch_ndim), layout.logsumexp(batch_ndim)),
        check_vma=False,
    )(inputs)
    return values, logsumexp, ()


def _backward(
    inputs: Inputs,
    saved: tuple,
    rows_grad: gradients.RowGradients,
    wants_bias: bool,
    options: Options,
) -> tuple:
    del saved
    device_ring, specs = _ring_of(inputs, options), layout.input_specs(inputs)
    num_keys = inputs.map_shape[-1]

    def local(inputs, rows_grad):
        inputs = layout.with_own_key(inputs, options.mesh)
        rows, keys = _spread(inputs, device_ring)
        rows_grad = gradients.RowGradients(
            *(
                device_ring.to_chunks(x, axis)
                for x, axis in zip(rows_grad, (-3, -1, -1), strict=True)
            )
        )
        dtype = products.accumulation_dtype(inputs.query.dtype)
        nothing = (
            jnp.zeros(rows.query.shape, dtype),
            tuple(jnp.zeros(x.shape, dtype) for x in (keys.key, keys.value)),
            jax.tree.map(
                jnp.zeros_like,
                (
                    inputs.weighting.bias if wants_bias else None,
                    inputs.weighting.score,
                ),
            ),
        )

        def meet(at, row, key, query_grad, key_grad, shared_grads):
            row, back = row
            part = _part(inputs, num_keys, at, row, key)
            query, key, value, bias, score = blockwise.backward(
                part, (), back, wants_bias, _blockwise(part, options)
            )
            return jax.tree.map(
                jnp.add,
                (query_grad, key_grad, shared_grads),
                (query, (key, value), (bias, score)),
            )

        query_grad, key_grads, shared_grads = device_ring.around(
            meet, (rows, rows_grad), keys, *nothing
        )
        shared_grads = jax.tree.map(
            lambda x, spec: lax.psum(x, layout.unshared(spec)),
            shared_grads,
            shared_specs,
        )
        grads = (device_ring.from_chunks(x, -3) for x in (query_grad, *key_grads))
        return *grads, *shared_grads

    bias_spec = specs.weighting.bias if wants_bias else None
    shared_specs = bias_spec, specs.weighting.score
    batch_ndim = inputs.query.ndim - 3
    rows, logsumexp = layout.rows(batch_ndim), layout.logsumexp(batch_ndim)
    return jax.shard_map(
        local,
        mesh=options.mesh,
        in_specs=(specs, gradients.RowGradients(rows, logsumexp, logsumexp)),
        out_specs=(rows, rows, rows, *shared_specs),
        check_vma=False,
    )(inputs, rows_grad)


attend = gradients.differentiable(_forward, _backward)


def _ring_of(inputs, options) -> ring.Ring:
    num_queries, num_keys = inputs.map_shape[-2:]
    size = options.mesh.shape[ring.AXIS]
    return ring.Ring.of(inputs.weighting.mask, num_queries, num_keys, size)


def _spread(inputs, device_ring) -> tuple[_Rows, _Keys]:
    query, key, value = (device_ring.to_chunks(x, -3) for x in inputs[:3])
    query_flags = key_flags = None
    if inputs.nonfinite is not None:
        query_flags, key_flags = (
            device_ring.to_chunks(x, -2) for x in inputs.nonfinite
        )
    return _Rows(query, query_flags), _Keys(key, value, key_flags)


def _part(inputs, all_keys, at, row, key) -> Inputs:
    """Returns what two chunks, of the given numbers, need to attend to each other."""
    num_queries, num_keys = row.query.shape[-3], key.key.shape[-3]
    first = tiles.Origin(at[0] * num_queries, at[1] * num_keys)
    rng = inputs.rng
    if rng is not None:
        rng = jax.random.fold_in(rng, first.query * all_keys + first.key)
    return Inputs(
        row.query,
        key.key,
        key.value,
        inputs.weighting.moved(first),
        None if row.nonfinite is None else Nonfinite(row.nonfinite, key.nonfinite),
        rng,
    )


def _blockwise(part, options) -> blockwise.Options:
    best = sweep.default_sizes(part.map_shape, part.weighting, jax.default_backend())
    sizes = (own or other for own, other in zip(options.sizes, best, strict=True))
    return blockwise.Options(sweep.Sizes(*sizes), options.dropout_rate)


def _merged(first, second):
    """Merges values and logsumexp of a row over two sets of keys."""
    values, logsumexp = zip(first, second, strict=True)
    both = jnp.logaddexp(*logsumexp)
    shares = (jnp.exp(x - jnp.where(both == -jnp.inf, 0, both)) for x in logsumexp)
    parts = (
        x * jnp.moveaxis(share, -1, -2)[..., None]
        for x, share in zip(values, shares, strict=True)
    )
    return sum(parts), both
