"""The axes of parameters that hold heads, hidden units or layers.

Pruning, sharding and the stacking of layers look up axes here, by the names of a module
and of its parameter.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

HEADS = "heads"
KEY_VALUE_HEADS = "key/value heads"
HEAD_FEATURES = "features of a head"  # shared by the heads
UNITS = "hidden units"

STACKED_SCOPE = "layers"  # the scope of the parameters of scanned layers


class Axis(NamedTuple):
    """An axis of a parameter."""

    # One of the constants above; the axis is divided equally among them, in order.
    holds: str
    place: int  # negative, so that a leading axis L changes nothing
    # Whether the parameter reads the outputs of heads or units; if not, it helps to
    # compute them.
    is_read: bool = False


# By the last part of the module's name and the parameter's name; by the latter only if
# the module is the attention itself. Parameters not listed belong to no head and no
# hidden unit: norms, and the biases of the projections back to the width D.
_AXES = {
    "query/w": Axis(HEADS, -1),  # [D, H K]
    "query/b": Axis(HEADS, -1),
    "key/w": Axis(KEY_VALUE_HEADS, -1),  # [D, G K]
    "key/b": Axis(KEY_VALUE_HEADS, -1),
    "value/w": Axis(KEY_VALUE_HEADS, -1),  # [D, G V]
    "value/b": Axis(KEY_VALUE_HEADS, -1),
    "linear/w": Axis(HEADS, -2, is_read=True),  # [H V, D]
    "query_norm/scale": Axis(HEAD_FEATURES, -1),  # [K]
    "query_norm/offset": Axis(HEAD_FEATURES, -1),
    "key_norm/scale": Axis(HEAD_FEATURES, -1),
    "key_norm/offset": Axis(HEAD_FEATURES, -1),
    "smear": Axis(KEY_VALUE_HEADS, -1),  # [G]
    "sinks": Axis(HEADS, -1),  # [H]
    "head_gate/w": Axis(HEADS, -1),  # [D, H]
    "hidden/w": Axis(UNITS, -1),  # [D, F]
    "hidden/b": Axis(UNITS, -1),
    "gate/w": Axis(UNITS, -1),
    "gate/b": Axis(UNITS, -1),
    "output/w": Axis(UNITS, -2, is_read=True),  # [F, D]
}

_LAYER = re.compile(
    rf"(?P<scope>|.*?/)(?:(?P<stacked>{STACKED_SCOPE}/layer_0)|layer_(?P<index>\d+))"
    r"(?P<part>/.*|)",
    re.DOTALL,
)


class LayerName(NamedTuple):
    """A module's name, in parts."""

    # The part before the layer, with its slash, as `encoder/`; may be empty.
    scope: str
    # The layer; None for scanned layers, whose arrays have a leading axis L.
    index: int | None
    part: str  # the part after it, with its slash, as `/attention/query`; may be empty

    def __str__(self) -> str:
        stacked = f"{STACKED_SCOPE}/layer_0"
        layer = stacked if self.index is None else f"layer_{self.index}"
        return f"{self.scope}{layer}{self.part}"


def layer_of(module: str) -> LayerName | None:
    """Finds the layer that a module belongs to by its name, or None."""
    match = _LAYER.fullmatch(module)
    if match is None:
        return None
    index = None if match["stacked"] else int(match["index"])
    return LayerName(match["scope"], index, match["part"])


def is_stacked(module: str) -> bool:
    """Checks whether a module's arrays, by its name, have a leading axis L."""
    layer = layer_of(module)
    return layer is not None and layer.index is None


def register(axes: Mapping[str, Axis]) -> None:
    """Adds parameters of attention, by name; for example, the weight of a score."""
    _AXES.update(axes)


def axis_of(module: str, name: str) -> Axis | None:
    """Finds the axis of a parameter that holds heads or hidden units, if any."""
    return _AXES.get(f"{module.rpartition('/')[2]}/{name}", _AXES.get(name))


def taken(array: Any, axis: Axis, count: int, kept: Sequence[int]) -> np.ndarray:
    """Returns a parameter with only the `kept` of its `count` heads or units."""
    array = np.asarray(array)
    size = _size_of_each(array, axis, count)
    places = np.asarray(kept, int)[:, None] * size + np.arange(size)
    return array.take(places.ravel(), axis.place)


def spread(array: Any, axis: Axis, names: Sequence[int], count: int) -> np.ndarray:
    """Inverts `taken`: heads or units at `names` of `count` places, 0 elsewhere."""
    array = np.asarray(array)
    size = _size_of_each(array, axis, len(names))
    shape = list(array.shape)
    shape[axis.place] = count * size
    result = np.zeros(shape, array.dtype)
    places = np.asarray(names, int)[:, None] * size + np.arange(size)
    np.moveaxis(result, axis.place, 0)[places.ravel()] = np.moveaxis(
        array, axis.place, 0
    )
    return result


def scaled(array: Any, axis: Axis, factors: np.ndarray) -> np.ndarray:
    """Scales each head or unit of a parameter by factors `[X]`, or `[L, X]`."""
    array, factors = np.asarray(array), np.asarray(factors)
    size = _size_of_each(array, axis, factors.shape[-1])
    along = np.repeat(factors, size, axis=-1)
    return array * along.reshape(*along.shape, *(1,) * (-axis.place - 1))


def _size_of_each(array: np.ndarray, axis: Axis, count: int) -> int:
    if array.ndim < -axis.place or array.shape[axis.place] % max(count, 1):
        raise ValueError(
            f"params must have {count} {axis.holds} along axis {axis.place}, got an "
            f"array of shape {array.shape}."
        )
    return array.shape[axis.place] // max(count, 1)
