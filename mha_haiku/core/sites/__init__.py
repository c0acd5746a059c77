"""Sites: named values of a JAX function that can be read and edited.

A value gets a name where it is computed, `site("heads", x)`. `look` returns the values
by name, and `edit` changes them, in any function that JAX can trace, under jit, vmap,
grad and scan.
"""

from mha_haiku.core.site_primitive import SEEN, Facet, faceted, site
from mha_haiku.core.sites.blocks import blockwise
from mha_haiku.core.sites.program import Resume
from mha_haiku.core.sites.site_survey import Address
from mha_haiku.core.sites.traces import is_array
from mha_haiku.core.sites.transformations import (
    Sites,
    edit,
    look,
    show_stream,
    sites,
)

__all__ = [
    "Address",
    "SEEN",
    "Facet",
    "Resume",
    "Sites",
    "blockwise",
    "edit",
    "faceted",
    "is_array",
    "look",
    "show_stream",
    "site",
    "sites",
]
