"""Placement of arrays and programs: one device or many, in one process or several.

A placement divides the work among devices: `Replicas` the batch only, `Sharded`, a
mesh, heads and the sequence as well. The training step and the evaluation are written
once, for any: another placement is a class with the methods of `Replicas`. `anatomy`
says which axis of a parameter belongs to heads or hidden units, and the task which axes
of an example are shared: nothing is decided by the sizes of arrays. `cluster` connects
to other processes and exchanges results with them.
"""

from mha_haiku.training.devices import cluster
from mha_haiku.training.devices.placements import Replicas, Sharded, make_mesh

Placement = Replicas | Sharded

__all__ = ["Placement", "Replicas", "Sharded", "cluster", "make_mesh"]
