"""What the names in a config stand for."""

import functools

import jax

from mha_haiku import modules

ACTIVATIONS = {
    "gelu": modules.gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
}
NORMS = {
    "layer_norm": modules.LayerNorm,
    "rms_norm": modules.RMSNorm,
    "none": modules.no_norm,
}
POSITIONS = ("none", "learned", "sinusoidal", "rotary", "alibi", "t5")
PRECISIONS = {
    "float32": "params=float32,compute=float32,output=float32",
    "bfloat16": "params=float32,compute=bfloat16,output=float32",
}
