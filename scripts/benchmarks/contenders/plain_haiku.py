"""Haiku and optax as their examples use them: hk.MultiHeadAttention, a jitted step."""

from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(
    case: str,
    size: int,
    attention: Mapping[str, Any] | None = None,
    scan: bool = False,
) -> worker.Program:
    """Prepares what is measured in a case.

    Args:
      case: A name of `sizes.TRAINING_CASES`, "forward" or "forward_and_backward".
      size: Steps or calls in a run.
      attention: Fields of `sizes.AttentionSize`, of the attention module.
      scan: Whether all steps of a run are one call.
    """
    if case in sizes.TRAINING_CASES:
        config = sizes.training_config(case)
        model = hk.without_apply_rng(hk.transform(lambda x: _logits(config, x)))
        tokens = jax.numpy.zeros((1, config.task.sequence_length), int)
        params = jax.jit(model.init)(jax.random.key(config.seed), tokens)
        return jax_programs.training(config, params, model.apply, steps=size, scan=scan)
    shape = sizes.attention_size(attention)

    def apply(x):
        mask = jax_programs.causal(x.shape[1])[None, None] if shape.is_causal else None
        return _attention(shape.heads, shape.width, x, mask)

    module = hk.without_apply_rng(hk.transform(apply))
    x = jax_programs.normal(0, (1, 1, shape.width))
    params = jax.jit(module.init)(jax.random.key(0), x)
    return jax_programs.attention(params, module.apply, shape, case=case, calls=size)


def _logits(config, tokens):
    model = config.model
    x = hk.Embed(config.task.num_tokens, model.model_size)(tokens)
    x += hk.get_parameter(
        "positions",
        (1, model.embedding.max_length, model.model_size),
        init=hk.initializers.RandomNormal(0.02),
    )
    for _ in range(model.num_layers):
        x += _attention(model.attention.num_heads, model.model_size, _norm(config, x))
        hidden = hk.Linear(model.feed_forward.hidden_size)(_norm(config, x))
        hidden = jax.nn.gelu(hidden, approximate=False)
        x += hk.Linear(model.model_size)(hidden)
    return hk.Linear(config.task.num_tokens)(_norm(config, x))


def _attention(num_heads, width, x, mask=None):
    attention = hk.MultiHeadAttention(
        num_heads, width // num_heads, w_init=hk.initializers.VarianceScaling()
    )
    return attention(x, x, x, mask)


def _norm(config, x):
    return hk.LayerNorm(-1, True, True, eps=config.model.norm.epsilon)(x)
