"""Where arrays live and programs run: one device or many, of one process or several.

A placement says how devices share the work. `Replicas` share the batch alone; in a mesh,
`Sharded`, they may share heads and the sequence as well.
"""

from mha_haiku.devices.mesh import Sharded, make_mesh
from mha_haiku.devices.replicas import Replicas

Placement = Replicas | Sharded

__all__ = ["Placement", "Replicas", "Sharded", "make_mesh"]
