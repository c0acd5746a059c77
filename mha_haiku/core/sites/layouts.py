"""Converts values to canonical axes: batch axes, heads, positions, sizes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mha_haiku.core.sites.axes import Axes, Axis, Step


@dataclasses.dataclass(frozen=True)
class Layout:
    """The conversion of a value's axes to canonical axes."""

    shape: tuple[int, ...]  # its shape in the program
    factors: tuple[int, ...]  # the sizes into which its axes are split
    order: tuple[int, ...]  # these factors in the order of canonical axes
    canonical: tuple[int, ...]  # the canonical shape
    is_aligned: bool  # whether consecutive query heads share a head of this value

    @classmethod
    def of(
        cls,
        axes: Axes,
        step: Step,
        groups: tuple[Axis | None, ...],
        heads: Axis,
    ) -> "Layout | None":
        """Finds the layout of a value; None if it has axes other than these.

        `groups` are the canonical axes; None among them is the rest of the axes. A
        group that the value lacks becomes an axis of size 1.
        """
        factors, heads = axes.of(*step.axes), axes.of(heads)
        grouped = axes.of(*(group for group in groups if group is not None))
        rest = [x for x in dict.fromkeys((*heads, *factors)) if x not in grouped]
        rest = [x for x in rest if x in factors]
        shown = [
            rest if group is None else [x for x in axes.of(group) if x in factors]
            for group in groups
        ]
        order = [factors.index(x) for group in shown for x in group]
        if sorted(order) != list(range(len(factors))):
            return None
        return cls(
            step.value.shape,
            tuple(axes.size([x]) for x in factors),
            tuple(order),
            tuple(axes.size(group) for group in shown),
            tuple(rest) == heads[: len(rest)],
        )

    def shown(self, value: Array) -> Array:
        return _reordered(value, self.factors, self.order, self.canonical)

    def hidden(self, value: Array, changed: Array) -> Array:
        del value
        factors = tuple(self.factors[i] for i in self.order)
        back = tuple(np.argsort(self.order).tolist())
        return _reordered(changed, factors, back, self.shape)


def _reordered(value, factors, order, shape) -> Array:
    """Reorders the axes of a value; steps that change nothing are not traced."""
    if value.shape != factors:
        value = jax.lax.reshape(value, factors)
    if order != tuple(range(len(order))):
        value = jax.lax.transpose(value, order)
    return value if value.shape == shape else jax.lax.reshape(value, shape)


def fitting(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Picks the layouts of weights and of the operands whose shapes fit them."""
    *_, num_heads, num_queries, num_keys = layouts["weights"].canonical
    result = {"weights": layouts["weights"]}
    lengths = {"query": num_queries, "key": num_keys, "value": num_keys}
    for name in lengths.keys() & layouts.keys():
        *_, length, own_heads, _ = layouts[name].canonical
        is_grouped = name != "query" and num_heads % own_heads == 0
        has_heads = own_heads in (1, num_heads)
        has_heads = has_heads or (is_grouped and layouts[name].is_aligned)
        if has_heads and length == lengths[name]:
            result[name] = layouts[name]
    return result


def map_of(layouts: dict[str, Layout], make_map: Callable, values: dict) -> Any:
    """Makes the map from weights and from other values that are known, by name."""
    shown = {name: layouts[name].shown(x) for name, x in values.items()}
    weights = shown.pop("weights")
    *batch, num_heads, _, _ = weights.shape
    for name, x in shown.items():
        length, own_heads, size = x.shape[-3:]
        own_heads = num_heads if name == "query" else own_heads
        whole = (*batch, length, own_heads, size)
        shown[name] = x if x.shape == whole else jnp.broadcast_to(x, whole)
    return make_map(weights, **shown)
