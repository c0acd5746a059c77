"""Finds which axes of weights are batches, heads and queries; see `recognition`.

A `Layout` converts a value to canonical axes: batch axes, heads, positions, sizes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mha_haiku.core.sites.axes import Axes, AxisFactors, Reached
from mha_haiku.core.sites.levels import Equation

WHOLE = ("weights", "scores")
"""Names of values that have all queries and all keys."""


class Groups(NamedTuple):
    """The batch, head and query axes of attention weights."""

    batch: list[AxisFactors]
    heads: AxisFactors
    queries: AxisFactors
    is_assumed: bool  # whether only the order of axes tells which are heads


def made_with_size(axes: Axes, query: Reached) -> AxisFactors:
    """Finds the factors that a projection of queries makes along with their size.

    They may also be keys; the last mark is their size.
    """
    *_, size = query.marks
    query = query._replace(marks=(size,))
    walk = axes.walk(
        query, Equation.made, lambda x, _: x if x.name == "dot_general" else None
    )
    if walk is None:
        sources = [[axes.of(axis)] for axis in axes.origin(query).axes]
    else:
        (*_, query), product = walk
        query = query._replace(marks=())
        operands = [axes.back(product, i, query) for i in (0, 1)]
        # A size that data bring is of positions, as in attention over channels.
        data = [x.value.is_constant is False for x in operands if x is not None]
        sources = [
            operand.axes if data != [i == 0, i == 1] else []
            for i, operand in enumerate(operands)
            if operand is not None
        ]
    factors = [axes.with_ones(*source) for source in sources]
    size = set(axes.of(size))
    for operand in factors:
        others = {x for other in factors if other is not operand for x in other}
        if size and size <= set(operand) - others:
            return tuple(x for x in operand if x not in size | others)
    return ()


def groups(
    axes: Axes, whole: Reached, free: list[AxisFactors], heads: AxisFactors
) -> Groups:
    """Finds the groups of the axes of weights.

    Args:
      axes: All factors.
      whole: The weights before any of their axes is dropped.
      free: The axes of weights that values lack.
      heads: Factors that projections make along with a size; see `made_with_size`.
    """
    keys = set(axes.with_ones(*whole.marks))
    split = [
        tuple(x for x in axes.with_ones(axis) if x not in keys) for axis in whole.axes
    ]
    free = [axes.with_ones(axis) for axis in free]
    known = {x for axis in split for x in axis}
    heads = tuple(x for x in axes.with_ones(heads) if x in known)
    # Heads of keys are groups of the heads that share an axis with them.
    shared = [x for x in split if set(heads) < set(x) and len(split) > 3]
    heads = shared[0] if heads and shared else heads
    # Apart from heads, one of the free axes must hold the queries.
    if not any(set(axis) - set(heads) for axis in free):
        heads = ()
    queries = [tuple(x for x in axis if x not in heads) for axis in free]
    queries = ([x for x in queries if axes.of(x)] or [x for x in queries if x])[-1]
    ones = {*axes.with_ones(*free)} - {*axes.of(*free)}  # no batch, as values lack them
    gone = {*queries, *ones} - {*heads}
    others = [tuple(x for x in axis if x not in gone) for axis in split]
    others = [axis for axis in others if axis]
    is_assumed = not heads and bool(axes.of(*others))
    if not heads and len(others) > 1:
        # Assumes [B, H, T, S], or [B, H, 1, T, S] of grouped heads.
        heads = axes.with_ones(*others[-1 if axes.of(others[-1]) else 1 :])
    batch = [tuple(x for x in axis if x not in heads) for axis in others]
    return Groups([axis for axis in batch if axis], heads, queries, is_assumed)


# --- Canonical axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """The conversion of a value's axes to canonical axes."""

    shape: tuple[int, ...]  # its shape in the program
    factors: tuple[int, ...]  # the sizes into which its axes are split
    order: tuple[int, ...]  # these factors in the order of canonical axes
    canonical: tuple[int, ...]  # the canonical shape
    is_aligned: bool  # whether consecutive query heads share a head of this value
    # The axis of queries of weights, and its factor; None if it is no axis of its own.
    rows: tuple[int, int] | None

    @classmethod
    def of(
        cls,
        axes: Axes,
        step: Reached,
        groups: tuple[AxisFactors | None, ...],
        heads: AxisFactors,
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
        alone = [i for i, axis in enumerate(step.axes) if [*axes.of(axis)] == shown[-2]]
        is_single = len(shown[-2]) == 1 and bool(alone)
        return cls(
            step.value.shape,
            tuple(axes.size([x]) for x in factors),
            tuple(order),
            tuple(axes.size(group) for group in shown),
            tuple(rest) == heads[: len(rest)],
            (alone[0], factors.index(shown[-2][0])) if is_single else None,
        )

    def shown(self, value: Array) -> Array:
        return _reordered(value, self.factors, self.order, self.canonical)

    def of_rows(self, count: int) -> "Layout":
        """Returns the layout of some rows of weights."""

        def cut(sizes: tuple[int, ...], i: int) -> tuple[int, ...]:
            return (*sizes[:i], count, *sizes[i + 1 :])

        assert self.rows is not None
        axis, factor = self.rows
        return dataclasses.replace(
            self,
            shape=cut(self.shape, axis),
            factors=cut(self.factors, factor),
            canonical=cut(self.canonical, len(self.canonical) - 2),
        )

    def hidden(self, value: Array, changed: Array) -> Array:
        del value
        factors = tuple(self.factors[i] for i in self.order)
        back = tuple(np.argsort(self.order).tolist())
        return _reordered(changed, factors, back, self.shape)


def _reordered(
    value: Array,
    factors: tuple[int, ...],
    order: tuple[int, ...],
    shape: tuple[int, ...],
) -> Array:
    """Reorders the axes of a value; steps that change nothing are not traced."""
    if value.shape != factors:
        value = jax.lax.reshape(value, factors)
    if order != tuple(range(len(order))):
        value = jax.lax.transpose(value, order)
    return value if value.shape == shape else jax.lax.reshape(value, shape)


def fitting(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Picks the layouts of weights and of the other values whose shapes fit them."""
    *_, num_heads, num_queries, num_keys = whole = layouts["weights"].canonical
    result = {
        name: layouts[name]
        for name in WHOLE
        if name in layouts and layouts[name].canonical == whole
    }
    lengths = {"query": num_queries, "key": num_keys, "value": num_keys}
    for name in lengths.keys() & layouts.keys():
        *_, length, own_heads, _ = layouts[name].canonical
        is_grouped = name != "query" and num_heads % own_heads == 0
        has_heads = own_heads in (1, num_heads)
        has_heads = has_heads or (is_grouped and layouts[name].is_aligned)
        if has_heads and length == lengths[name]:
            result[name] = layouts[name]
    return result


def sides(layouts: dict[str, Layout], values: dict[str, Array]) -> dict[str, Array]:
    """Shows queries, keys and values in the canonical axes of the weights."""
    *batch, num_heads, _, _ = layouts["weights"].canonical
    shown = {}
    for name in values.keys() & {"query", "key", "value"}:
        x = layouts[name].shown(values[name])
        length, own_heads, size = x.shape[-3:]
        own_heads = num_heads if name == "query" else own_heads
        whole = (*batch, length, own_heads, size)
        shown[name] = x if x.shape == whole else jnp.broadcast_to(x, whole)
    return shown


def map_of(layouts: dict[str, Layout], make_map: Callable, values: dict) -> Any:
    """Makes the map from weights and from other values that are known, by name."""
    whole = {
        name: layouts[name].shown(values[name]) for name in WHOLE if name in values
    }
    return make_map(**whole, **sides(layouts, values))


@dataclasses.dataclass(frozen=True, eq=False)
class RowsOfMap:
    """Computes rows of weights, and of scores if they are known, as in a program."""

    layouts: dict[str, Layout]
    rows: Any  # a `regions.Rows` of these values

    def __call__(self, variables: Any, positions: Array) -> list[Array]:
        """Returns weights and scores, `[B..., H, R, S]`."""
        found = self.rows(variables, positions)
        parts = [x.of_rows(len(positions)) for x in self.layouts.values()]
        return [x.shown(y) for x, y in zip(parts, found, strict=True)]
