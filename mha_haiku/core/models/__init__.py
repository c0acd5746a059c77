"""Whole models as pure functions, built from a config."""

from mha_haiku.core import arguments
from mha_haiku.core.models import decoding
from mha_haiku.core.models.architecture import (
    FAMILIES,
    GONE,
    KINDS,
    POSITIONS,
    PRECISIONS,
    ModelConfig,
)
from mha_haiku.core.models.build import Model, build, check_rows, of_function
from mha_haiku.core.models.consistency import check
from mha_haiku.core.models.forward import Maps, Output
from mha_haiku.core.models.parts import (
    LayerHeads,
    heads_of_layers,
    hidden_sizes,
    key_size,
    max_length,
    num_decoder_layers,
    part_of,
)
from mha_haiku.core.modules import stacked, unstacked

__all__ = [
    "FAMILIES",
    "GONE",
    "KINDS",
    "LayerHeads",
    "Maps",
    "Model",
    "ModelConfig",
    "Output",
    "POSITIONS",
    "PRECISIONS",
    "build",
    "check_rows",
    "check",
    "decoding",
    "heads_of_layers",
    "hidden_sizes",
    "key_size",
    "max_length",
    "num_decoder_layers",
    "of_function",
    "part_of",
    "stacked",
    "unstacked",
]

arguments.check_all(globals())
