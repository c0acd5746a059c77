"""Optimizers with warm-up, cosine decay and clipping by global norm.

`steps` are the steps of the whole run.
"""

import fnmatch
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
import optax

from mha_haiku.core import checks, fields, models, modules
from mha_haiku.core.fields import Section, field

OPTIMIZERS = ("adamw", "sgd", "optax")  # the last is an object from Python


class OptimizerConfig(Section, path="config.optimizer"):
    """The optimizer and its schedule."""

    name: str = field("adamw", "the optimizer", fields.OneOf(OPTIMIZERS))
    learning_rate: float = field(
        1e-2, "largest learning rate, reached after warm-up", checks.positive_number
    )
    warmup_steps: int = field(
        50,
        "steps in which the learning rate rises from 0",
        fields.integer(0, 2**31 - 1),
    )
    final_learning_rate_fraction: float = field(
        0.1,
        "learning rate of the last step, as a share of learning_rate",
        checks.share,
    )
    weight_decay: float = field(
        0.0,
        "weight decay: share of the parameters, times the learning rate, that a step "
        "subtracts; not from biases and norms",
        checks.non_negative_number,
    )
    momentum: float = field(0.9, "sgd: decay of the mean of gradients", checks.fraction)
    b1: float = field(0.9, "decay of Adam's mean of gradients", checks.fraction)
    b2: float = field(
        0.98, "decay of Adam's mean of squared gradients", checks.fraction
    )
    clip_norm: float | None = field(
        1.0,
        "gradients of a larger global norm are scaled to this; None for no clipping",
        checks.positive_number,
    )
    frozen: str = field(
        "",
        "modules or parameters that are not trained, with commas between, such as "
        "embedding,encoder/layer_0 (encoder: all its layers) or *bias; empty: none",
    )


def schedule(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """Returns the schedule of the learning rate: a linear rise, then half a cosine.

    The rise ends after `warmup_steps`, at most with the last step but one; the cosine
    ends with the last step, whose rate is `learning_rate *
    final_learning_rate_fraction`.
    """
    peak, fraction = config.learning_rate, config.final_learning_rate_fraction
    warmup_steps = min(config.warmup_steps, steps - 1)
    rise = optax.linear_schedule(0.0, peak, warmup_steps)
    # From the first step after the rise to the last, which may be the same.
    transitions = steps - 1 - warmup_steps
    decay = optax.constant_schedule(peak * fraction)
    if transitions:
        decay = optax.cosine_decay_schedule(peak, transitions, alpha=fraction)
    return optax.join_schedules([rise, decay], [warmup_steps])


def make(
    config: OptimizerConfig, *, steps: int, own: Any = None
) -> optax.GradientTransformation:
    """Makes the optimizer that the config describes, or freezes parameters for `own`.

    Weight decay applies to parameters with at least two axes per layer: not to biases,
    nor to the scales and offsets of norms. Frozen parameters do not change and have no
    moments.

    Source: AdamW: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.
    """
    learning_rate = schedule(config, steps=steps)
    if own is not None:
        optimizer = own
    elif config.name == "optax":
        raise checks.ConfigError("config.optimizer.name 'optax' needs optimizer=.")
    elif config.name == "sgd":
        optimizer = optax.chain(
            optax.trace(config.momentum) if config.momentum else optax.identity(),
            optax.add_decayed_weights(config.weight_decay, is_decayed),
            optax.scale_by_learning_rate(learning_rate),
        )
    else:
        optimizer = optax.adamw(
            learning_rate,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=is_decayed,
        )
    if config.clip_norm is not None and own is None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    if not config.frozen:
        return optimizer
    parts: dict[Hashable, Any] = {True: optax.set_to_zero(), False: optimizer}
    return optax.partition(parts, lambda params: are_frozen(config, params))


def without_frozen(model: models.Model, config: OptimizerConfig) -> models.Model:
    """Sets gradients of frozen parameters to 0, which spares their backward pass."""
    if not config.frozen:
        return model

    def apply(params: Any, *arguments: Any, **options: Any):
        params = jax.tree.map(
            lambda x, is_frozen: jax.lax.stop_gradient(x) if is_frozen else x,
            params,
            are_frozen(config, params),
        )
        return model.apply(params, *arguments, **options)

    return model._replace(apply=apply)


def are_frozen(config: OptimizerConfig, params: Any) -> Any:
    """Makes a tree like `params`, True where a pattern of `config.frozen` fits.

    It fits a module, all that is in it, or one parameter. ConfigError if a pattern fits
    nothing, or no parameter is left to train.
    """
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/").replace(".", "/")
        for path, _ in jax.tree.leaves_with_path(params)
    ]
    frozen = np.zeros(len(names), bool)
    for pattern in config.frozen.split(","):
        inside = f"{pattern.strip().strip('/').replace('.', '/')}/*"
        fits = [fnmatch.fnmatchcase(f"{name}/", inside) for name in names]
        if not any(fits):
            cut = {"/".join(name.split("/")[:-1][:2]) or name for name in names}
            raise checks.ConfigError(
                "config.optimizer.frozen must name modules of the model, got "
                f"{pattern.strip()!r}.\nIt has {checks.listed(sorted(cut), 8)}."
            )
        frozen |= fits
    if frozen.all():
        raise checks.ConfigError(
            "config.optimizer.frozen must leave parameters to train, got "
            f"{config.frozen!r}, which freezes all."
        )
    return jax.tree.unflatten(jax.tree.structure(params), frozen.tolist())


def is_decayed(params: Any) -> Any:
    """Makes a tree like `params`, True where weight decay applies."""

    def decayed(path: tuple, leaf: jax.Array | np.ndarray) -> bool:
        in_stack = any(modules.is_stacked(str(key)) for key in path)
        return leaf.ndim - in_stack > 1  # without the axis of the layers

    return jax.tree_util.tree_map_with_path(decayed, params)
