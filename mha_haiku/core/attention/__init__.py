"""Attention as pure functions of arrays, and the attention map they return."""

import importlib
from typing import TYPE_CHECKING, Any

from mha_haiku.core.attention.attention_map import AttentionMap
from mha_haiku.core.attention.cache import Cache, Prompt
from mha_haiku.core.attention.implementations import IMPLEMENTATIONS, attend
from mha_haiku.core.attention.normalizers import Normalizer, sink, unnormalized
from mha_haiku.core.attention.scores import (
    Score,
    additive,
    cosine,
    dot_product,
    linear,
    sigmoid,
)
from mha_haiku.core.attention.statistic import RowSum, Statistic
from mha_haiku.core.attention.statistics import STATISTICS, Statistics
from mha_haiku.core.attention.tiled import Blockwise, bin_edges
from mha_haiku.core.attention.weighting import Weighting

if TYPE_CHECKING:
    from mha_haiku.core.attention.sharded import IN_A_RING, Sharded

__all__ = [
    "IMPLEMENTATIONS",
    "IN_A_RING",
    "STATISTICS",
    "AttentionMap",
    "Blockwise",
    "Cache",
    "Normalizer",
    "Prompt",
    "RowSum",
    "Score",
    "Sharded",
    "Statistic",
    "Statistics",
    "Weighting",
    "additive",
    "attend",
    "bin_edges",
    "cosine",
    "dot_product",
    "linear",
    "sigmoid",
    "sink",
    "unnormalized",
]

_OPTIONAL_BACKENDS = {"IN_A_RING": "sharded", "Sharded": "sharded"}


def __getattr__(name: str) -> Any:
    """Imports an optional backend on first use of one of its names."""
    if name not in _OPTIONAL_BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend = importlib.import_module(f"{__name__}.{_OPTIONAL_BACKENDS[name]}")
    return getattr(backend, name)
