"""Models and weights from elsewhere, and back.

`load` reads a model that others stored, and `save` writes one that `transformers`
opens. PyTorch modules are wrapped as they are, see `torch_modules`.
"""

from mha_haiku.interop.families.vit import patches
from mha_haiku.interop.loading import Imported, Sizes, load, sizes_of
from mha_haiku.interop.saving import save

__all__ = ["Imported", "Sizes", "load", "patches", "save", "sizes_of"]
