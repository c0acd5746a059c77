"""Attention that the devices of a mesh share, for `attend(implementation=)`."""

from mha_haiku.attention import row_sums
from mha_haiku.attention.sharded import ring_sums
from mha_haiku.attention.sharded.mesh_attention import IN_A_RING, Sharded

__all__ = ["IN_A_RING", "Sharded"]

row_sums.SHARED["sums"] = ring_sums.of_map
