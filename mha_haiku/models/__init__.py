"""Whole models as pure functions, built from a config."""

from mha_haiku.models.architecture import (
    ACTIVATIONS,
    FAMILIES,
    NORMS,
    POSITIONS,
    PRECISIONS,
    LayerHeads,
    check,
    default_config,
    frequencies,
    heads_of_layers,
    hidden_sizes,
    key_size,
    windows,
)
from mha_haiku.models.build import Model, Output, build
from mha_haiku.modules import stacked, unstacked

__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "LayerHeads",
    "Model",
    "NORMS",
    "Output",
    "POSITIONS",
    "PRECISIONS",
    "build",
    "check",
    "default_config",
    "frequencies",
    "heads_of_layers",
    "hidden_sizes",
    "key_size",
    "stacked",
    "unstacked",
    "windows",
]
