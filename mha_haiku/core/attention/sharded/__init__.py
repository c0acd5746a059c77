"""Attention that the devices of a mesh share, for `attend(implementation=)`."""

from mha_haiku.core.attention.sharded import ring_fold
from mha_haiku.core.attention.sharded.mesh_attention import IN_A_RING, Sharded
from mha_haiku.core.attention.tiled import fold_gradient

__all__ = ["IN_A_RING", "Sharded"]

fold_gradient.SHARED["forward"] = ring_fold.forward
