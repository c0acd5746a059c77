"""Attention sharded over the devices of a mesh, for `attend(implementation=)`.

The mesh has the axes `data` (the first batch axis), `heads` and `sequence`. Examples
and heads need no communication. Devices along `sequence` form a ring: queries stay,
keys and values travel, two chunks attend blockwise, and rows are merged by their
logsumexp; in the gradient the sums of keys travel too. A chunk is a rectangle, in which
masks and biases are evaluated at absolute positions. Under a causal mask a device has
an early and a late chunk, so that all have the same work. Observations of a map are the
same fold, merged by their `merge`. A mask, bias or score declares its axes by letters
(`axes`): an axis never has a meaning by its size.
"""

from mha_haiku.core.attention.sharded.mesh_attention import IN_A_RING, Sharded

__all__ = ["IN_A_RING", "Sharded"]
