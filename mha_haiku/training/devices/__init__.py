"""Placement of arrays and programs: one device or many, in one process or several.

A placement divides the work among devices: `Replicas` the batch only, `Sharded`, a
mesh, heads and the sequence as well.
"""

from mha_haiku.training.devices import cluster
from mha_haiku.training.devices.placements import Replicas, Sharded, make_mesh

Placement = Replicas | Sharded

__all__ = ["Placement", "Replicas", "Sharded", "cluster", "make_mesh"]
