"""Attention that the devices of a mesh share: by examples, heads and positions.

`B...` batch axes, T query positions, S key positions, H query heads, G key heads, V
value size per head. The mesh has the axes `data`, which shares the first batch axis,
`heads`, and `sequence`. Where positions are shared, the devices along that axis are a
ring, and attention is blockwise inside each; else each uses any implementation.
"""

import dataclasses
from collections.abc import Callable

import jax

from mha_haiku.core.attention import implementations
from mha_haiku.core.attention.inputs import Inputs
from mha_haiku.core.attention.sharded import layout, ring_attention
from mha_haiku.core.attention.tiled import blockwise, sweep

Array = jax.Array
IN_A_RING = ("auto", "blockwise")


@dataclasses.dataclass(frozen=True)
class Sharded(implementations.OnMesh):
    """Attention on a mesh of devices, for `attend(implementation=)`; inside a jit.

    Attributes:
      mesh: A mesh with the axes `data`, `heads` and `sequence`.
      implementation: What each device does with its part, as `attend` takes it; "auto",
        "blockwise" or a `Blockwise` where positions are shared.
    """

    mesh: jax.sharding.Mesh
    implementation: str | Callable = "auto"

    def __post_init__(self):
        if set(self.mesh.axis_names) != set(layout.AXES):
            raise ValueError(
                f"the mesh must have the axes {', '.join(layout.AXES)}, got "
                f"{', '.join(map(str, self.mesh.axis_names))}."
            )
        if self.mesh.shape["sequence"] > 1:
            _check_in_a_ring(self.implementation)

    def __call__(self, inputs: Inputs, dropout_rate: float) -> tuple[Array, Array]:
        """Computes values `[B..., T, H, V]` and logsumexp `[B..., H, T]`.

        Raises:
          ValueError: If the mesh does not divide the inputs.
        """
        layout.check(inputs, self.mesh)
        if self.mesh.shape["sequence"] > 1:
            chosen = blockwise.Blockwise()
            if isinstance(self.implementation, blockwise.Blockwise):
                chosen = self.implementation
            sizes = sweep.Sizes(chosen.rows, chosen.columns, chosen.heads)
            options = ring_attention.Options(self.mesh, sizes, dropout_rate)
            return ring_attention.attend(inputs, options)
        alone = implementations.named(self.implementation)

        def attend(inputs):
            inputs = layout.with_own_key(inputs, self.mesh)
            return alone(inputs, dropout_rate)

        batch_ndim = inputs.query.ndim - 3
        return jax.shard_map(
            attend,
            mesh=self.mesh,
            in_specs=(layout.input_specs(inputs),),
            out_specs=(layout.rows(batch_ndim), layout.logsumexp(batch_ndim)),
            check_vma=False,
        )(inputs)


def _check_in_a_ring(implementation):
    is_blockwise = isinstance(implementation, blockwise.Blockwise)
    if not is_blockwise and implementation not in IN_A_RING:
        raise ValueError(
            f"implementation must be {' or '.join(IN_A_RING)}, or a Blockwise, where "
            f"positions are shared, got {implementation!r}."
        )
