"""Models and weights from elsewhere, and back.

`load` reads models of other libraries. `save` writes them in the layout in which they
came, and models made here in ours. PyTorch modules are wrapped, see `torch_modules`.
"""

from mha_haiku.interop.loader import Imported, Sizes, load, sizes_of
from mha_haiku.interop.writer import save

__all__ = ["Imported", "Sizes", "load", "save", "sizes_of"]
