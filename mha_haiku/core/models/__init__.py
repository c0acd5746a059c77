"""Whole models as pure functions, built from a config.

`build(config.model, ...)` returns a `Model`: two pure functions, `init` and `apply`.
One model, described by fields (`architecture`), covers most transformers: BERT is
`norm.position = "post"`, `embedding.norm`, `embedding.segments` and `output.hidden`,
`norm`, `tied`; Llama is `norm.kind = "rms_norm"`, rotary positions and
`feed_forward.activation = "swiglu"`. Size 0 removes a part. A pruned model is a config
too (`attention.kept_heads`, `feed_forward.hidden_sizes`). `Model.scanned` is the same
model with its layers in a `lax.scan`, and compiles one of them; `Model.decoding` is the
same, token by token.

A new field is read in one place, checked across fields in `consistency.check`, and must
not change names, shapes or the order of initialization by its default. `GONE` has the
fields of earlier versions, so that their runs open.
"""

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
