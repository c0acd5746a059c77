"""Where arrays are and programs run: one device or many, of one process or several."""

from mha_haiku.training.devices import cluster
from mha_haiku.training.devices.placements import Placement, make_mesh

__all__ = ["Placement", "cluster", "make_mesh"]
