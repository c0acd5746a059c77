"""Models and weights from elsewhere, and back.

`load` reads a model that others stored, `save` writes one that `transformers` opens,
and `export` writes its forward pass as a program that runs without this package.
`from_torch`, `to_torch` and similar functions move the parameters of single modules.
"""

from mha_haiku.interop.exporting import export
from mha_haiku.interop.families.vit import patches
from mha_haiku.interop.layers import (
    from_equinox,
    from_flax,
    from_haiku,
    from_torch,
    to_equinox,
    to_flax,
    to_torch,
)
from mha_haiku.interop.loading import Imported, Sizes, load, sizes_of
from mha_haiku.interop.saving import save

__all__ = [
    "Imported",
    "Sizes",
    "export",
    "from_equinox",
    "from_flax",
    "from_haiku",
    "from_torch",
    "load",
    "patches",
    "save",
    "sizes_of",
    "to_equinox",
    "to_flax",
    "to_torch",
]
