"""How devices divide the work of a run: `config.devices`.

T positions, H heads, G key/value heads, F hidden units.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from mha_haiku.core import attention, checks, fields, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.fields import Section, field
from mha_haiku.training import devices

if TYPE_CHECKING:
    from mha_haiku.training.runs.configuration import RunConfig

_PARTS = fields.integer(1, 2**20)


class DevicesConfig(Section, path="config.devices"):
    """How devices divide the work of a run."""

    data: int | None = field(
        None,
        "parts that each batch is divided into; None: devices / (heads * sequence)",
        _PARTS,
    )
    heads: int = field(1, "parts that heads and hidden units are divided into", _PARTS)
    sequence: int = field(1, "parts that positions are divided into", _PARTS)
    shard_parameters: bool = field(
        False, "whether parameters and optimizer state are divided over data as well"
    )


def make(config: "RunConfig", available: Sequence[jax.Device]) -> devices.Placement:
    """Makes the placement of a run on some devices; raises what `check` raises."""
    check(config, len(available))
    return devices.Placement(
        available,
        heads=config.devices.heads,
        sequence=config.devices.sequence,
        shard_parameters=config.devices.shard_parameters,
        num_models=config.training.seeds,
    )


def check(config: "RunConfig", num_devices: int) -> None:
    """Raises ConfigError unless so many devices can share the work of a config.

    The sizes of the mesh must multiply to the devices, and divide what they share.
    """
    heads, sequence = config.devices.heads, config.devices.sequence
    data, rest = config.devices.data, 0
    if data is None:
        data, rest = divmod(num_devices, heads * sequence)
    if rest or data * heads * sequence != num_devices:
        given = f"data {config.devices.data or 'any'} x heads {heads} x sequence"
        raise ConfigError(
            f"config.devices must multiply to the {num_devices} "
            f"device{'s' * (num_devices > 1)} there are, got {given} {sequence}."
        )
    if sequence > 1 and config.model.family == "encoder_decoder":
        raise ConfigError(
            "config.devices.sequence must be 1 for an encoder_decoder, whose queries "
            "and keys stand in sequences of two lengths."
        )
    if sequence > 1:
        with checks.user_mistakes():
            checks.choice(
                "config.model.attention.implementation with config.devices.sequence",
                config.model.attention.implementation,
                attention.IN_A_RING,
            )
    divides_models = heads * sequence > 1 or config.devices.shard_parameters
    if config.training.seeds > 1 and divides_models:
        raise ConfigError(
            f"config.training.seeds must be 1 where devices divide heads, positions or "
            f"parameters, got {config.training.seeds}.\n"
            "Several seeds share the devices by their batches: config.devices.data."
        )
    _check_heads(config.model, heads)
    size = config.training.batch_size
    if rest := size % data:
        below, above = size - rest, size - rest + data
        raise ConfigError(
            f"config.training.batch_size must be a multiple of the {data} devices that "
            f"share it, got {size}; the nearest: "
            f"{f'{below} and {above}' if below else above}."
        )


def check_sequence(config: "RunConfig", length: int) -> None:
    """Raises ConfigError where the devices cannot share T = `length` positions."""
    parts = config.devices.sequence
    if length % parts:
        why = "be at most" if length < parts else "divide"
        raise ConfigError(
            f"config.devices.sequence must {why} the {length} positions of an example, "
            f"got {parts}."
        )


def _check_heads(model, parts) -> None:
    counts = []
    for layer in models.heads_of_layers(model):
        counts.append((len(layer.names), "heads", layer.label))
        if layer.names and layer.groups is None:
            count = layer.num_key_value_heads
            counts.append((count, "key/value heads", layer.label))
    for i, size in enumerate(models.hidden_sizes(model)):
        counts.append((size, "hidden units", f"layer {i}"))
    for count, what, layer in counts:
        if count % parts:
            raise ConfigError(
                f"config.devices.heads must divide the {count} {what} of {layer}, got "
                f"{parts}."
            )
