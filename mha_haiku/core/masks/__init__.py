"""Masks as an algebra: `masks.causal() & masks.padding(lengths) | ~...`.

A mask says which query may attend to which key (True: may attend). It is lazy: it
computes any rectangle of itself without storing the whole.
"""

from mha_haiku.core.masks.algebra import Full, Mask
from mha_haiku.core.masks.array_masks import (
    as_mask,
    dense,
    padding,
    segments,
)
from mha_haiku.core.masks.relative import (
    causal,
    full,
    where,
    window,
)

__all__ = [
    "Full",
    "Mask",
    "as_mask",
    "causal",
    "dense",
    "full",
    "padding",
    "segments",
    "where",
    "window",
]
