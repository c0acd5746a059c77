"""Where arrays live and programs run: one device or many, of one process or several.

A placement says how devices share the work. `Replicas` share the batch alone; those of
a mesh, `Sharded`, may share heads and the sequence as well.
"""

from mha_haiku.devices import cluster
from mha_haiku.devices.mesh import Sharded, make_mesh
from mha_haiku.devices.replicas import Replicas

Placement = Replicas | Sharded

__all__ = ["Placement", "Replicas", "Sharded", "cluster", "make_mesh"]
