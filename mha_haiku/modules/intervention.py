"""Interventions: gates that close heads and hidden units, and what passes instead.

`B...` batch axes, T positions, H heads, V value size per head, F hidden units, L
layers. What is given here goes through a whole model as the one argument
`interventions`, so that ablation, patching and learned gates are functions of it, to be
`jax.vmap`ped and `jax.grad`ed like any other.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Interventions:
    """What is done to the heads and hidden units of a layer, or of each layer.

    Shapes are those of one layer. For a whole encoder or model a field is an array with
    a leading axis L, or a sequence of L entries, None for a layer that is left alone.

    Attributes:
      heads: Gates `[H]`, `[B..., H]` or `[B..., T, H]`, which multiply the heads'
        outputs; None: all are open.
      replacement: `[H, V]` or `[B..., T, H, V]`, what closed heads pass on: a head's
        output becomes `gate * output + (1 - gate) * replacement`; None: zeros.
      units: Gates `[F]`, `[B..., F]` or `[B..., T, F]`, which multiply the hidden units
        of the feed-forward part; None: all are open.
      units_of: `[B]` integers: of which example of the batch `[B, T, D]` each example
        has the hidden units, before the gates. With the same inputs twice in a batch,
        once changed, feed-forward parts are held at what they were. None: its own.
    """

    heads: Array | Sequence[Array | None] | None = None
    replacement: Array | Sequence[Array | None] | None = None
    units: Array | Sequence[Array | None] | None = None
    units_of: Array | Sequence[Array | None] | None = None

    def for_attention(self) -> "Interventions":
        """Returns what an attention takes: all but that of hidden units."""
        return dataclasses.replace(self, units=None, units_of=None)

    def for_feed_forward(self) -> "Interventions":
        """Returns what a feed-forward part takes: that of hidden units."""
        return Interventions(units=self.units, units_of=self.units_of)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderInterventions:
    """What is done to a decoder layer, or to each layer of a decoder.

    Attributes:
      own: Of the heads that attend to the decoder's own positions.
      cross: Of the heads that attend to the encoder's.
      units: As in `Interventions`; the two above have none.
      units_of: Likewise.
    """

    own: Interventions = Interventions()
    cross: Interventions = Interventions()
    units: Array | Sequence[Array | None] | None = None
    units_of: Array | Sequence[Array | None] | None = None

    def for_feed_forward(self) -> Interventions:
        """Returns what a feed-forward part takes: that of hidden units."""
        return Interventions(units=self.units, units_of=self.units_of)


def checked(given: Any, kind: type = Interventions) -> Any:
    """Returns the interventions, none where None is given.

    Raises:
      TypeError: If they are of another type.
    """
    if given is None:
        return kind()
    if not isinstance(given, kind):
        fields = ", ".join(f"{field.name}=" for field in dataclasses.fields(kind))
        raise TypeError(
            f"interventions must be modules.{kind.__name__}({fields}), got "
            f"{type(given).__name__}."
        )
    return given


def per_layer(given: Any, num_layers: int) -> list[Any]:
    """Returns the interventions of each of the L layers.

    Args:
      given: `Interventions` or `DecoderInterventions` of L layers.
      num_layers: L.

    Raises:
      ValueError: If a field does not have L entries.
    """

    def entries(path: str, x: Any) -> list[Any]:
        if dataclasses.is_dataclass(x):
            fields = {
                field.name: entries(f"{path}.{field.name}", getattr(x, field.name))
                for field in dataclasses.fields(x)
            }
            layers = zip(*fields.values(), strict=True)
            return [type(x)(*layer) for layer in layers]
        if x is None:
            return [None] * num_layers
        size = len(x) if isinstance(x, list | tuple) else (jnp.shape(x) or (None,))[0]
        if size != num_layers:
            raise ValueError(
                f"{path} must be [L, ...] or a sequence of L = {num_layers} layers' "
                f"entries, got {'a single number' if size is None else size}."
            )
        return [x[i] for i in range(num_layers)]

    return entries("interventions", given)


def gated_heads(values: Array, given: Interventions | None) -> Array:
    """Returns the heads' outputs, closed as far as the gates say.

    Args:
      values: `[B..., T, H, V]`, the outputs of the heads.
      given: Of one layer.

    Returns:
      `[B..., T, H, V]`.

    Raises:
      ValueError: If shapes do not fit, there is a replacement without gates, or gates
        of hidden units, which an attention has not.
    """
    given = checked(given)
    if given.units is not None or given.units_of is not None:
        raise ValueError(
            "interventions.units must be None for attention, and .units_of too: it has "
            "no hidden units; a layer takes both."
        )
    if given.heads is None:
        if given.replacement is not None:
            raise ValueError(
                "interventions.replacement needs interventions.heads, the gates that "
                "say what it replaces."
            )
        return values
    gates = _aligned("heads", "H", given.heads, values.shape[:-1])
    gates = gates.astype(values.dtype)[..., None]
    if given.replacement is None:
        return values * gates
    replacement = jnp.asarray(given.replacement, values.dtype)
    if replacement.shape not in (values.shape, values.shape[-2:]):
        raise ValueError(
            "interventions.replacement must be [H, V] or [B..., T, H, V], of shape "
            f"{values.shape[-2:]} or {values.shape}, got {replacement.shape}."
        )
    missing = values.ndim - replacement.ndim
    replacement = replacement.reshape(*(1,) * missing, *replacement.shape)
    return values * gates + replacement * (1 - gates)


def gated_units(hidden: Array, given: Interventions | None) -> Array:
    """Returns the hidden units, or those of other examples, times their gates.

    Args:
      hidden: `[B..., T, F]`.
      given: Of one layer.

    Returns:
      `[B..., T, F]`.

    Raises:
      ValueError: If shapes do not fit, or there is something for heads.
    """
    given = checked(given)
    if given.heads is not None or given.replacement is not None:
        raise ValueError(
            "interventions.heads and .replacement must be None for a feed-forward "
            "part, which has no heads; a layer takes both."
        )
    if given.units_of is not None:
        examples = jnp.asarray(given.units_of)
        is_integer = jnp.issubdtype(examples.dtype, jnp.integer)
        if not is_integer or examples.shape != hidden.shape[:1] or hidden.ndim != 3:
            raise ValueError(
                "interventions.units_of must be integers [B] for a batch [B, T, D], "
                f"got {examples.dtype} of shape {examples.shape} for hidden units of "
                f"shape {hidden.shape}."
            )
        hidden = hidden[examples]
    if given.units is None:
        return hidden
    gates = _aligned("units", "F", given.units, hidden.shape)
    return hidden * gates.astype(hidden.dtype)


def _aligned(field: str, letter: str, gates: Array, shape: tuple[int, ...]) -> Array:
    """Returns gates with all axes of `[B..., T, X]`, of size 1 where they had none."""
    gates = jnp.asarray(gates)
    alone, per_example = shape[-1:], (*shape[:-2], shape[-1])
    if gates.shape == shape:
        return gates
    if gates.shape == per_example:
        return gates[..., None, :]
    if gates.shape == alone:
        return gates.reshape(*(1,) * (len(shape) - 1), -1)
    raise ValueError(
        f"interventions.{field} must be [{letter}], [B..., {letter}] or [B..., T, "
        f"{letter}], of shape {alone}, {per_example} or {shape}, got {gates.shape}."
    )
