"""Attention sharded over the devices of a mesh: by examples, heads and positions.

The mesh has the axes `data`, which shards the first batch axis, `heads`, and
`sequence`. Where positions are sharded, the devices along that axis form a ring: chunks
of keys and values travel around it, in the backward pass with their gradients, and any
two chunks attend blockwise. No device holds more than its share of any array except
masks and biases. Otherwise each device may use any implementation.

C chunks on a device. Observations are folded in the same way: any two chunks of queries
and keys are a part of the map, as the logsumexp of a row is known; sums of queries
stay, sums of keys travel with the keys, and sums of heads are added over the devices at
the end.

Source: Liu et al. 2023, https://arxiv.org/abs/2310.01889.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mha_haiku.core import tiles
from mha_haiku.core.attention import gradients, implementations, products
from mha_haiku.core.attention.factors import Factors
from mha_haiku.core.attention.inputs import Inputs, Nonfinite
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.attention.observation import Observation, SideArrays, Sums, Tree
from mha_haiku.core.attention.sharded import shardings
from mha_haiku.core.attention.tiled import blockwise, fold, sweep

IN_A_RING = ("auto", "blockwise")
# The devices, how two chunks attend, and the rate of dropout.
RingOptions = tuple[jax.sharding.Mesh, blockwise.Blockwise, float]
_At = tuple[Array, Array]  # the numbers of a chunk of queries and of a chunk of keys


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Attention on a mesh of devices, for `attend(implementation=)` inside jit."""

    mesh: jax.sharding.Mesh  # a mesh with the axes `data`, `heads` and `sequence`
    # The implementation on each device, as for `attend`; "auto", "blockwise" or a
    # `Blockwise` where positions are sharded.
    implementation: str | Callable = "auto"

    def __post_init__(self):
        if set(self.mesh.axis_names) != set(shardings.AXES):
            raise ValueError(
                f"the mesh must have the axes {', '.join(shardings.AXES)}, got "
                f"{', '.join(map(str, self.mesh.axis_names))}."
            )
        is_blockwise = isinstance(self.implementation, blockwise.Blockwise)
        can_go_round = is_blockwise or self.implementation in IN_A_RING
        if self.mesh.shape["sequence"] > 1 and not can_go_round:
            raise ValueError(
                f"implementation must be {' or '.join(IN_A_RING)}, or a Blockwise, "
                f"where positions are sharded, got {self.implementation!r}."
            )

    @property
    def fold(self) -> "RingFold":
        """The walk over the tiles of the maps; see `AttentionMap.fold`."""
        return RingFold(self.mesh)

    def __call__(self, inputs: Inputs, dropout_rate: float) -> tuple[Array, LogSum]:
        """Computes values `[B..., T, H, V]` and logsumexp `[B..., H, T]`."""
        shardings.check(inputs, self.mesh)
        if self.mesh.shape["sequence"] > 1:
            inner = self.implementation
            if not isinstance(inner, blockwise.Blockwise):
                inner = blockwise.Blockwise()
            return _attend_in_a_ring(inputs, (self.mesh, inner, dropout_rate))
        on_device = implementations.named(self.implementation)

        def attend(inputs: Inputs) -> tuple[Array, LogSum]:
            values, logsumexp = on_device(inputs, dropout_rate)
            return values, LogSum.rounded(logsumexp)

        return _on_devices(attend, inputs, self.mesh)


def _on_devices(attend: Callable, inputs: Inputs, mesh: jax.sharding.Mesh) -> tuple:
    batch_ndim = inputs.query.ndim - 3
    rows = shardings.logsumexp(batch_ndim)
    on_devices = jax.shard_map(
        lambda inputs: attend(shardings.with_own_key(inputs, mesh)),
        mesh=mesh,
        in_specs=(shardings.input_specs(inputs),),
        out_specs=(shardings.rows(batch_ndim), LogSum(rows, rows)),
        check_vma=False,
    )
    # Outside jit, JAX does not shard functions with a custom gradient.
    return jax.jit(on_devices, inline=True)(inputs)


def _forward(inputs: Inputs, options: RingOptions) -> tuple[Array, LogSum, tuple]:
    mesh, chunks, dropout_rate = options
    device_ring = _ring_of(inputs, mesh)
    batch_ndim, num_keys = inputs.query.ndim - 3, inputs.map_shape[-1]

    def local(inputs: Inputs) -> tuple:
        rows, keys = device_ring.to_chunks(_spread(inputs), batch_ndim)
        dtype = products.accumulation_dtype(inputs.query.dtype)
        shape = rows[0].shape[:-1]
        no_sum = jnp.full((*shape[:-2], shape[-1], shape[-2]), -jnp.inf, dtype)
        nothing = (
            jnp.zeros((*shape, inputs.value.shape[-1]), dtype),
            LogSum.rounded(no_sum),
        )

        def meet(
            at: _At, row: tuple, key: tuple, sums: Any, key_sums: Any, device_sums: Any
        ):
            part = _part(inputs, num_keys, at, row, key)
            chunk_options = chunks.options(part, dropout_rate)
            values, log_sum, _ = blockwise.forward(part, chunk_options)
            return _merged(sums, (values, log_sum)), key_sums, device_sums

        (values, log_sum), _, _ = device_ring.around(meet, rows, keys, nothing, (), ())
        values = values.astype(inputs.value.dtype)
        values = device_ring.from_chunks(values, batch_ndim)
        return values, device_ring.from_chunks(log_sum, batch_ndim + 1)

    return *_on_devices(local, inputs, mesh), ()


def _backward(
    inputs: Inputs,
    saved: tuple,
    rows_grad: gradients.RowGradients,
    wants_bias: bool,
    options: RingOptions,
) -> tuple:
    del saved
    mesh, chunks, dropout_rate = options
    device_ring, specs = _ring_of(inputs, mesh), shardings.input_specs(inputs)
    batch_ndim, num_keys = inputs.query.ndim - 3, inputs.map_shape[-1]

    def local(inputs: Inputs, rows_grad: gradients.RowGradients) -> gradients.Gradients:
        inputs = shardings.with_own_key(inputs, mesh)
        rows, keys = device_ring.to_chunks(_spread(inputs), batch_ndim)
        rows_grad = gradients.RowGradients(
            device_ring.to_chunks(rows_grad.values, batch_ndim),
            *device_ring.to_chunks(rows_grad[1:], batch_ndim + 1),
        )
        dtype = products.accumulation_dtype(inputs.query.dtype)
        nothing = (
            jnp.zeros(rows[0].shape, dtype),
            tuple(jnp.zeros(x.shape, dtype) for x in keys[:2]),
            blockwise.zeros(inputs.weighting, wants_bias),
        )

        def meet(
            at: _At,
            row: tuple,
            key: tuple,
            query_grad: Array,
            key_grad: tuple,
            shared_grads: tuple,
        ):
            row, back = row
            part = _part(inputs, num_keys, at, row, key)
            chunk_options = chunks.options(part, dropout_rate)
            grads = blockwise.backward(part, (), back, wants_bias, chunk_options)
            return jax.tree.map(
                jnp.add,
                (query_grad, key_grad, shared_grads),
                (grads.query, (grads.key, grads.value), (grads.bias, grads.score)),
            )

        query_grad, key_grads, shared_grads = device_ring.around(
            meet, (rows, rows_grad), keys, *nothing
        )
        shared_grads = jax.tree.map(
            lambda x, spec: lax.psum(x, shardings.unshared(spec)),
            shared_grads,
            shared_specs,
        )
        grads = device_ring.from_chunks((query_grad, *key_grads), batch_ndim)
        return gradients.Gradients(*grads, *shared_grads)

    bias_spec = specs.weighting.bias if wants_bias else None
    shared_specs = bias_spec, specs.weighting.score
    rows, logsumexp = shardings.rows(batch_ndim), shardings.logsumexp(batch_ndim)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, gradients.RowGradients(rows, logsumexp, logsumexp)),
        out_specs=gradients.Gradients(rows, rows, rows, *shared_specs),
        check_vma=False,
    )(inputs, rows_grad)


_attend_in_a_ring = gradients.differentiable(_forward, _backward)


def _ring_of(inputs: Inputs, mesh: jax.sharding.Mesh) -> shardings.Ring:
    num_queries, num_keys = inputs.map_shape[-2:]
    size = mesh.shape[shardings.AXIS]
    return shardings.Ring.of(inputs.weighting.mask, num_queries, num_keys, size)


def _spread(inputs: Inputs) -> tuple[tuple, tuple]:
    """Splits the arrays into those that stay on a device and those that travel."""
    query_flags, key_flags = inputs.nonfinite or (None, None)
    return (inputs.query, query_flags), (inputs.key, inputs.value, key_flags)


def _part(inputs: Inputs, all_keys: int, at: _At, row: tuple, key: Any) -> Inputs:
    """Builds the inputs for attention between the two chunks numbered `at`."""
    (query, query_flags), (key, value, key_flags) = row, key
    num_queries, num_keys = query.shape[-3], key.shape[-3]
    first = tiles.Origin(at[0] * num_queries, at[1] * num_keys)
    rng = inputs.rng
    if rng is not None:
        rng = jax.random.fold_in(rng, first.query * all_keys + first.key)
    return Inputs(
        query,
        key,
        value,
        inputs.weighting.moved(first),
        None if query_flags is None else Nonfinite(query_flags, key_flags),
        rng,
    )


def _merged(first: tuple, second: tuple) -> tuple:
    """Merges values and log sums of a row over two sets of keys."""
    values, log_sums = zip(first, second, strict=True)
    both = log_sums[0].plus(log_sums[1])
    parts = (
        x * jnp.moveaxis(log_sum.over(both), -1, -2)[..., None]
        for x, log_sum in zip(values, log_sums, strict=True)
    )
    return sum(parts), both


# --- Observations


@dataclasses.dataclass(frozen=True)
class RingFold:
    """Folds maps on a mesh; see `fold.forward`."""

    mesh: jax.sharding.Mesh

    def __repr__(self) -> str:
        return f"on {self.mesh.size} devices"

    def of_part(self) -> None:
        """Returns the walk over a rectangle of the map, which is not sharded."""

    def __call__(
        self,
        observation: Observation,
        factors: Factors,
        arrays: SideArrays,
        sizes: sweep.Sizes,
    ) -> Sums:
        """Folds an observation over the tiles of a map."""
        *batch_shape, num_queries, _, _ = factors.query.shape
        batch_ndim, num_keys = len(batch_shape), factors.key.shape[-3]
        mask, num_devices = factors.weighting.mask, self.mesh.shape[shardings.AXIS]
        device_ring = shardings.Ring.of(mask, num_queries, num_keys, num_devices)

        def local(factors: Factors, arrays: SideArrays) -> Sums:
            stay, go_round = device_ring.to_chunks(
                ((factors.query, arrays.queries), (factors.key, arrays.keys)),
                batch_ndim,
            )
            log_sums = device_ring.to_chunks(factors.log_sum, batch_ndim + 1)

            def meet(
                at: _At,
                row: tuple,
                key: Any,
                row_sums: Tree,
                key_sums: Tree,
                head_sums: Tree,
            ) -> tuple:
                (query, of_queries), log_sum = row
                key, of_keys = key
                first = tiles.Origin(at[0] * query.shape[-3], at[1] * key.shape[-3])
                weighting = factors.weighting.moved(first)
                part = Factors(query, key, weighting, log_sum)
                chunk_arrays = SideArrays(of_queries, of_keys)
                sums = fold.forward(observation, part, chunk_arrays, sizes, first)
                return (
                    observation.merge(row_sums, sums.queries),
                    jax.tree.map(jnp.add, key_sums, sums.keys),
                    jax.tree.map(jnp.add, head_sums, sums.head),
                )

            init = _init(observation, log_sums.logsumexp, stay, go_round)
            row_sums, key_sums, head_sums = device_ring.around(
                meet, (stay, log_sums), go_round, *init
            )
            # The axis of positions follows B... and H.
            row_sums, key_sums = device_ring.from_chunks(
                (row_sums, key_sums), batch_ndim + 1
            )
            head_sums = jax.tree.map(lambda x: lax.psum(x, shardings.AXIS), head_sums)
            return Sums(row_sums, key_sums, head_sums)

        rows, rows_of_heads = (
            shardings.rows(batch_ndim),
            shardings.logsumexp(batch_ndim),
        )
        weighting = shardings.weighting_specs(factors.weighting)
        log_sum = LogSum(rows_of_heads, rows_of_heads)

        def spec(x: Array) -> shardings.Spec:
            axes = zip(rows, x.shape, strict=False)
            return shardings.Spec(*(name if size > 1 else None for name, size in axes))

        whole = jax.eval_shape(
            lambda *x: fold.forward(observation, *x, sizes), factors, arrays
        )
        specs_of_sums = Sums(
            *(jax.tree.map(lambda _: rows_of_heads, sums) for sums in whole[:2]),
            head=jax.tree.map(
                lambda _: shardings.Spec(*rows_of_heads[:-1]), whole.head
            ),
        )
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(
                Factors(rows, rows, weighting, log_sum),
                jax.tree.map(spec, arrays),
            ),
            out_specs=specs_of_sums,
            check_vma=False,
        )(factors, arrays)


def _init(
    observation: Observation, logsumexp: Array, stay: tuple, go_round: tuple
) -> Sums:
    """Makes the initial sums `[C, B..., H, t, ...]` of chunks."""
    (_, of_queries), (key, of_keys) = stay, go_round
    *shape, num_queries = logsumexp.shape
    arrays = jax.tree.map(
        lambda x: x[(0,) * (len(shape) - 1)][:, 0], SideArrays(of_queries, of_keys)
    )
    init = observation.init(num_queries, key.shape[-3], arrays, logsumexp.dtype)

    def all_of(tree: Tree, shape: list[int]) -> Tree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), tree)

    return Sums(
        all_of(init.queries, shape),
        all_of(init.keys, shape),
        all_of(init.head, shape[1:]),
    )
