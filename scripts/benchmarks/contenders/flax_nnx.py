"""Flax nnx and optax: modules split from their parameters once, one jitted step."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(
    case: str, size: int, attention: Mapping[str, Any] | None = None
) -> worker.Program:
    """Prepares what is measured in a case.

    Args:
      case: A name of `sizes.TRAINING_CASES`, "forward" or "forward_and_backward".
      size: Steps or calls in a run.
      attention: Fields of `sizes.AttentionSize`, of the attention module.
    """
    if case in sizes.TRAINING_CASES:
        config = sizes.training_config(case)
        apply, params = _split(_Model(config, nnx.Rngs(config.seed)))
        return jax_programs.training(config, params, apply, steps=size)
    shape = sizes.attention_size(attention)
    module = _attention(shape.heads, shape.width, nnx.Rngs(0))
    apply, params = _split(module, is_causal=shape.is_causal)
    return jax_programs.attention(params, apply, shape, case=case, calls=size)


def _split(module, **options):
    """Returns a pure function of parameters and input, and the parameters."""
    definition, params = nnx.split(module)

    def apply(params, x):
        return nnx.merge(definition, params)(x, **options)

    return apply, params


class _Model(nnx.Module):
    def __init__(self, config, rngs):
        model = config.model
        size = model.model_size
        self.embedding = nnx.Embed(config.task.num_tokens, size, rngs=rngs)
        positions = jax.random.normal(rngs(), (1, model.embedding.max_length, size))
        self.positions = nnx.Param(0.02 * positions)
        self.layers = nnx.Sequential(
            *(_Layer(model, rngs) for _ in range(model.num_layers))
        )
        self.norm = _norm(model, rngs)
        self.logits = nnx.Linear(size, config.task.num_tokens, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens) + self.positions[...]
        return self.logits(self.norm(self.layers(x)))


class _Layer(nnx.Module):
    def __init__(self, model, rngs):
        size = model.model_size
        self.norm_1 = _norm(model, rngs)
        self.attention = _attention(model.attention.num_heads, size, rngs)
        self.norm_2 = _norm(model, rngs)
        self.hidden = nnx.Linear(size, model.feed_forward.hidden_size, rngs=rngs)
        self.output = nnx.Linear(model.feed_forward.hidden_size, size, rngs=rngs)

    def __call__(self, x):
        x += self.attention(self.norm_1(x))
        hidden = jax.nn.gelu(self.hidden(self.norm_2(x)), approximate=False)
        return x + self.output(hidden)


def _norm(model, rngs):
    return nnx.LayerNorm(model.model_size, epsilon=model.norm.epsilon, rngs=rngs)


def _attention(num_heads, width, rngs):
    return nnx.MultiHeadAttention(
        num_heads, width, decode=False, keep_rngs=False, rngs=rngs
    )
