"""Models and weights from elsewhere, and back.

`load` reads models of other libraries, and `save` writes models that `transformers`
opens. PyTorch modules are wrapped, see `torch_modules`.
"""

from mha_haiku.interop.families.vit import patches
from mha_haiku.interop.loading import Imported, Sizes, load, sizes_of
from mha_haiku.interop.saving import save

__all__ = ["Imported", "Sizes", "load", "patches", "save", "sizes_of"]
