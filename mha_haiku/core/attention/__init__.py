"""Attention as pure functions of arrays, and the attention map they return."""

import importlib
from typing import TYPE_CHECKING, Any

from mha_haiku.core.attention.attention_map import AttentionMap
from mha_haiku.core.attention.cache import Cache, Prompt
from mha_haiku.core.attention.implementations import IMPLEMENTATIONS, attend
from mha_haiku.core.attention.inputs import Weighting
from mha_haiku.core.attention.normalizers import Normalizer, sink, unnormalized
from mha_haiku.core.attention.observation import RowSum, Statistic
from mha_haiku.core.attention.scores import Score, dot_product, sigmoid
from mha_haiku.core.attention.statistics import STATISTICS, Statistics
from mha_haiku.core.attention.tiled.blockwise import Blockwise
from mha_haiku.core.attention.tiled.grid import bin_edges

if TYPE_CHECKING:
    from mha_haiku.core.attention.sharded import IN_A_RING, Sharded

_SHARDED = ("IN_A_RING", "Sharded")

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
    "attend",
    "bin_edges",
    "dot_product",
    "sigmoid",
    "sink",
    "unnormalized",
]


def __getattr__(name: str) -> Any:
    if name not in _SHARDED:  # meshes, which nothing else needs, are loaded when named
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.sharded"), name)


def __dir__() -> list[str]:
    return [*globals(), *_SHARDED]
