"""Attention sharded over the devices of a mesh, for `attend(implementation=)`."""

from mha_haiku.core.attention.sharded.mesh_attention import IN_A_RING, Sharded

__all__ = ["IN_A_RING", "Sharded"]
