"""Attention that the devices of a mesh share, for `attend(implementation=)`."""

from mha_haiku.core.attention import fold_gradient
from mha_haiku.core.attention.sharded import ring_fold
from mha_haiku.core.attention.sharded.mesh_attention import IN_A_RING, Sharded

__all__ = ["IN_A_RING", "Sharded"]

fold_gradient.SHARED["forward"] = ring_fold.forward
