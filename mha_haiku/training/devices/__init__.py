"""Where arrays are and programs run: one device or many, of one process or several.

A placement divides the work among devices. `Replicas` divides the batch only;
`Sharded`, a mesh, may divide heads and the sequence as well. Its programs are of one
model or of several (`Together`).
"""

from mha_haiku.training.devices import cluster
from mha_haiku.training.devices.mesh import Sharded, make_mesh
from mha_haiku.training.devices.replicas import Replicas, Together

Placement = Replicas | Sharded

__all__ = ["Placement", "Replicas", "Sharded", "Together", "cluster", "make_mesh"]
