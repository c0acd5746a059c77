"""The config of a model: what its fields may be, and which heads its layers have.

H heads and G key/value heads before any were pruned, L layers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mha_haiku import attention, checks
from mha_haiku.models import parts

FAMILIES = ("encoder", "causal", "set_classifier")


class LayerHeads(NamedTuple):
    """The heads of a layer.

    Attributes:
      names: Which of the H heads of the unpruned layer they are, ascending.
      num_key_value_heads: How many key/value heads they read.
      groups: Which of these each head reads, or None where all serve equally many.
      key_value_names: Which of the G heads of the unpruned layer these are.
    """

    names: tuple[int, ...]
    num_key_value_heads: int
    groups: tuple[int, ...] | None
    key_value_names: tuple[int, ...]


def heads_of_layers(config: Any) -> tuple[LayerHeads, ...]:
    """Returns the heads of each of the L layers of the model that a config describes.

    Args:
      config: `config.model`.
    """
    kept = config.kept_heads
    if kept is None:
        kept = [range(config.num_heads)] * config.num_layers
    return tuple(_layer_heads(config, tuple(sorted(names))) for names in kept)


def hidden_sizes(config: Any) -> tuple[int, ...]:
    """Returns the number of hidden units of each of the L layers.

    Args:
      config: `config.model`.
    """
    if config.hidden_sizes is None:
        return (config.hidden_size,) * config.num_layers
    return tuple(config.hidden_sizes)


def key_size(config: Any) -> int:
    """Returns K, the size of a head's queries, keys and values.

    Args:
      config: `config.model`.
    """
    return config.key_size or config.model_size // config.num_heads


@checks.user_mistakes()
def check(config: Any) -> None:
    """Raises `checks.ConfigError` where a field of `config.model` is out of range."""
    checks.choice("config.model.family", config.family, FAMILIES)
    checks.choice("config.model.activation", config.activation, parts.ACTIVATIONS)
    checks.choice("config.model.norm", config.norm, parts.NORMS)
    checks.choice("config.model.norm_position", config.norm_position, ("pre", "post"))
    checks.choice("config.model.positions", config.positions, parts.POSITIONS)
    checks.choice("config.model.precision", config.precision, parts.PRECISIONS)
    checks.choice(
        "config.model.attention.implementation",
        config.attention.implementation,
        attention.IMPLEMENTATIONS,
    )
    for field in ("num_layers", "num_heads", "model_size", "hidden_size", "max_length"):
        checks.positive_integer(f"config.model.{field}", config[field])
    checks.positive_number("config.model.norm_epsilon", config.norm_epsilon)
    checks.fraction("config.model.dropout_rate", config.dropout_rate)
    if config.key_size is not None:
        checks.positive_integer("config.model.key_size", config.key_size)
    elif config.model_size % config.num_heads:
        raise checks.ConfigError(
            f"config.model.num_heads must divide model_size = {config.model_size} "
            f"where key_size is not given, got {config.num_heads}; the nearest that "
            f"does is {_nearest_divisor(config.model_size, config.num_heads)}."
        )
    if config.num_key_value_heads is not None:
        name = "config.model.num_key_value_heads"
        checks.positive_integer(name, config.num_key_value_heads)
        if config.num_heads % config.num_key_value_heads:
            raise checks.ConfigError(
                f"{name} must divide num_heads = {config.num_heads}, got "
                f"{config.num_key_value_heads}; the nearest that does is "
                f"{_nearest_divisor(config.num_heads, config.num_key_value_heads)}."
            )
    if config.positions == "rotary" and key_size(config) % 2:
        raise checks.ConfigError(
            "config.model.positions = 'rotary' needs an even key size, got "
            f"{key_size(config)}."
        )
    if config.positions == "sinusoidal" and config.model_size % 2:
        raise checks.ConfigError(
            "config.model.positions = 'sinusoidal' needs an even model_size, got "
            f"{config.model_size}."
        )
    _check_pruned(config)


def _layer_heads(config, names) -> LayerHeads:
    num_groups = config.num_key_value_heads or config.num_heads
    group_of = [name * num_groups // config.num_heads for name in names]
    key_value_names = sorted(set(group_of))
    groups = tuple(key_value_names.index(group) for group in group_of)
    is_even = len({groups.count(group) for group in groups}) < 2
    return LayerHeads(
        names, len(key_value_names), None if is_even else groups, tuple(key_value_names)
    )


def _check_pruned(config) -> None:
    """Checks the fields that a pruned model has in place of one number for all."""
    for field in ("kept_heads", "hidden_sizes"):
        given = config[field]
        if given is None:
            continue
        name = f"config.model.{field}"
        if not isinstance(given, Sequence) or len(given) != config.num_layers:
            raise checks.ConfigError(
                f"{name} must have an entry for each of the {config.num_layers} "
                f"layers, got {given!r}."
            )
        if config.scan_layers:
            raise checks.ConfigError(
                f"config.model.scan_layers must be False with {field}: scanned layers "
                "are alike."
            )
    for i, heads in enumerate(config.kept_heads or ()):
        name = f"config.model.kept_heads[{i}]"
        for head in heads:
            checks.integer_in(name, head, 0, config.num_heads - 1)
        if len(set(heads)) != len(heads):
            raise checks.ConfigError(f"{name} must not repeat a head, got {heads!r}.")
    for i, size in enumerate(config.hidden_sizes or ()):
        checks.positive_integer(f"config.model.hidden_sizes[{i}]", size)


def _nearest_divisor(number, wanted):
    divisors = [i for i in range(1, number + 1) if number % i == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
