"""A model's forward pass as a file: StableHLO with the parameters inside.

Whoever runs the file needs JAX and flatbuffers, in which JAX stores programs, and
nothing else:

    import jax
    from jax import export
    program = export.deserialize(bytearray(open("model.stablehlo", "rb").read()))
    outputs = program.call(tokens, lengths)
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, models


def export(
    file: str | os.PathLike,
    model: models.Model,
    params: Any,
    inputs: Any,
    *,
    decoder_inputs: Any = None,
    weights: bool = False,
    platforms: Sequence[str] | None = None,
) -> Path:
    """Writes a model as a program of inputs and lengths that runs without this package.

    The program takes inputs of the shape of `inputs` and their lengths `[B]`, int32,
    and returns a dict: "logits" (where the model has them), "output", the `[B, T, D]`
    that the last norm returns, and optionally "weights".

    Args:
      file: The file to write, which is returned.
      model: As pure functions.
      params: Its parameters.
      inputs: An example: tokens `[B, T]` or features `[B, T, D]`; the shape counts.
      decoder_inputs: An example of the inputs of a decoder, `[B, T]`, if there is one;
        the program takes these and their lengths after the first two.
      weights: Whether it also returns all attention weights, `[L, B, H, T, T]`; all
        layers must have the same number of heads then. With a decoder they are
        "encoder_weights", "decoder_weights" and "cross_weights".
      platforms: Platforms to run on, of "cpu", "cuda", "rocm" and "tpu"; None: as here.

    Raises:
      ConfigError: If the file cannot be written, or flatbuffers is missing.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise checks.ConfigError(
            "An exported program needs flatbuffers: pip install 'mha_haiku[interop]'."
        )

    def forward(inputs, lengths, *read):
        given = dict(zip(("decoder_inputs", "decoder_lengths"), read, strict=False))
        output = model.apply(
            params, None, inputs, lengths=lengths, **given, is_training=False
        )
        results = {"output": output.output, "logits": output.logits}
        if weights:
            results |= _weights(output.maps)
        # Not as an `Output`, which could not be read where this package is missing.
        return {name: x for name, x in results.items() if x is not None}

    given = (inputs,) if decoder_inputs is None else (inputs, decoder_inputs)
    shapes = []
    for x in map(jnp.asarray, given):
        shapes.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
        shapes.append(jax.ShapeDtypeStruct(x.shape[:1], np.int32))
    exported = jax.export.export(jax.jit(forward), platforms=platforms)(*shapes)
    return checks.write_file(file, exported.serialize())


def _weights(maps) -> dict[str, jax.Array]:
    kinds = {"weights": maps}
    if isinstance(maps, models.Maps):
        kinds = {f"{kind}_weights": getattr(maps, kind) for kind in models.KINDS}
    return {
        name: jnp.stack([each.weights() for each in own]) for name, own in kinds.items()
    }
