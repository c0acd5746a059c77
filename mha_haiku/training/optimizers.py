"""The optimizer: AdamW with warm-up, cosine decay and clipping by global norm."""

from typing import Any

import jax
import ml_collections
import optax

from mha_haiku import checks, fields, models, modules
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
    "frozen": Field(
        "",
        "modules that are not trained, with commas between, such as "
        "embedding,encoder/layer_0 (encoder: all its layers); empty: none",
        fields.text,
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
    nor to the scales and offsets of norms. Frozen parameters stay as they are, and no
    moments are kept of them.

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
    if config.clip_norm is not None:
        adamw = optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
    if not config.frozen:
        return adamw
    return optax.partition(
        {True: optax.set_to_zero(), False: adamw},
        lambda params: are_frozen(config, params),
    )


def without_frozen(
    model: models.Model, config: ml_collections.ConfigDict
) -> models.Model:
    """Returns the model with gradients of 0 for frozen parameters.

    They are not computed: below the first layer that is trained there is no backward
    pass at all.

    Args:
      model: The model.
      config: `config.optimizer` of a run.
    """
    if not config.frozen:
        return model

    def apply(params, *arguments, **options):
        params = jax.tree.map(
            lambda x, is_frozen: jax.lax.stop_gradient(x) if is_frozen else x,
            params,
            are_frozen(config, params),
        )
        return model.apply(params, *arguments, **options)

    return model._replace(apply=apply)


def are_frozen(config: ml_collections.ConfigDict, params: Any) -> Any:
    """Returns the tree of `params` with True where `config.frozen` names the module.

    Args:
      config: `config.optimizer` of a run.
      params: The parameters of a model, or their shapes.

    Raises:
      ConfigError: If a name is of no module, or no parameter is left to train.
    """
    names = [name.strip().strip("/") for name in config.frozen.split(",")]

    def is_in(module, name):
        return f"{module}/".startswith(f"{name}/")

    for name in names:
        if not any(is_in(module, name) for module in params):
            parts = [module.split("/") for module in params]
            known = {"/".join(x[:i]) for x in parts for i in range(1, len(x) + 1)}
            shown = sorted({"/".join(x[:2]) for x in parts})
            raise checks.ConfigError(
                "config.optimizer.frozen must name modules of the model, got "
                f"{name!r}.{checks.nearest(name, known)}\nIt has {', '.join(shown)}."
            )
    frozen = {module: any(is_in(module, name) for name in names) for module in params}
    if all(frozen.values()):
        raise checks.ConfigError(
            "config.optimizer.frozen must leave parameters to train, got "
            f"{config.frozen!r}, which are all."
        )
    return {
        module: jax.tree.map(lambda _, own=frozen[module]: own, leaves)
        for module, leaves in params.items()
    }


def is_decayed(params: Any) -> Any:
    """Returns the tree of `params` with True where weight decay applies."""

    def decayed(path, leaf):
        in_stack = any(modules.is_stacked(key.key) for key in path)
        return leaf.ndim - in_stack > 1  # without the axis of the layers

    return jax.tree_util.tree_map_with_path(decayed, params)
