"""The optimizer: AdamW with warm-up, cosine decay and clipping by global norm."""

from typing import Any

import jax
import ml_collections
import optax

from mha_haiku import checks, fields, modules
from mha_haiku.fields import Field

FIELDS = {
    "learning_rate": Field(
        1e-2, "largest learning rate, reached after warm-up", checks.positive_number
    ),
    "warmup_steps": Field(
        50,
        "steps in which the learning rate rises from 0",
        fields.integer(0, 2**31 - 1),
    ),
    "final_learning_rate_fraction": Field(
        0.1,
        "learning rate at the last step, as a share of learning_rate",
        fields.portion,
    ),
    "weight_decay": Field(
        0.0,
        "AdamW's weight decay, of all parameters but biases and norms",
        checks.non_negative_number,
    ),
    "b1": Field(0.9, "decay of Adam's mean of gradients", checks.fraction),
    "b2": Field(0.98, "decay of Adam's mean of squared gradients", checks.fraction),
    "clip_norm": Field(
        1.0,
        "gradients of a larger global norm are scaled to this; None: no clipping",
        fields.optional(checks.positive_number),
    ),
}


def schedule(config: ml_collections.ConfigDict, *, steps: int) -> optax.Schedule:
    """Returns the learning rate of each step.

    It rises linearly from 0 at step 0 to `learning_rate` at `warmup_steps`, then falls
    along half a cosine to `learning_rate * final_learning_rate_fraction` at `steps`.

    Args:
      config: `config.optimizer` of a run.
      steps: Training steps of the whole run.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_learning_rate_fraction,
    )


def make(
    config: ml_collections.ConfigDict, *, steps: int
) -> optax.GradientTransformation:
    """Returns AdamW as the config describes it.

    Weight decay applies to parameters with at least two axes per layer: not to biases,
    nor to the scales and offsets of norms.

    Args:
      config: `config.optimizer` of a run; `clip_norm` None means no clipping.
      steps: Training steps of the whole run.

    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.
    """
    adamw = optax.adamw(
        schedule(config, steps=steps),
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=is_decayed,
    )
    if config.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def is_decayed(params: Any) -> Any:
    """Returns the tree of `params` with True where weight decay applies."""

    def decayed(path, leaf):
        in_stack = any(modules.is_stacked(key.key) for key in path)
        return leaf.ndim - in_stack > 1  # without the axis of the layers

    return jax.tree_util.tree_map_with_path(decayed, params)
