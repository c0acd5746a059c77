"""Axes of values, followed from equation to equation.

An axis is a tuple of factors of its size, which are numbers that `Axes` keeps. A
reshape from `[B, T, H * V]` to `[B, T, H, V]` splits a factor in two, in all axes that
contain it. Axes of size 1 may come and go: only `with_ones` lists their factors.

`groups` finds which axes of weights are batches, heads and queries, and a `Layout`
converts a value to canonical axes: batch axes, heads, positions, sizes.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from mha_haiku.core.sites import cuts
from mha_haiku.core.sites.levels import Equation, Value

AxisFactors = tuple[int, ...]

# The largest number of values on a walk; a softmax is a few values from its products.
FARTHEST = 100

# An axis of the output may be longer or shorter than the input's.
_RESIZING = {"slice", "dynamic_slice", "concatenate", "pad", "split"}
_REORDERING = {"sort", "rev", "gather", "scatter", "cumsum", "cumlogsumexp", "cumprod"}


class Reached(NamedTuple):
    """A value on a walk."""

    value: Value
    axes: list[AxisFactors]
    # Axes that the walk must not lose, such as the axis of keys.
    marks: tuple[AxisFactors, ...] = ()


class Axes:
    """The factors of axes."""

    def __init__(self):
        self._sizes: list[int] = []
        self._parts: dict[int, AxisFactors] = {}

    def new(self, size: int) -> AxisFactors:
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def of(self, *axes: Iterable[int]) -> AxisFactors:
        """Lists the factors of axes that are not 1, in order, after all splits."""
        return tuple(x for x in self.with_ones(*axes) if self._sizes[x] > 1)

    def with_ones(self, *axes: Iterable[int]) -> AxisFactors:
        """Lists all factors of axes, in order, after all splits."""
        result = []
        for factor in itertools.chain.from_iterable(axes):
            parts = self._parts.get(factor)
            result += [factor] if parts is None else self.with_ones(parts)
        return tuple(result)

    def size(self, axis: Iterable[int]) -> int:
        return math.prod(self._sizes[x] for x in self.of(axis))

    def start(self, value: Value, *marked: int) -> Reached:
        """Makes the first step of a walk, with some axes marked."""
        axes = [self.new(size) for size in value.shape]
        return Reached(value, axes, tuple(axes[i] for i in marked))

    def across(
        self, equation: Equation, position: int, step: Reached
    ) -> Reached | None:
        """Steps from an output back to an input, or from an input ahead to the output.

        Returns None if marks end.
        """
        is_back = step.value.maker is equation
        output = equation.outputs[position if len(equation.outputs) > 1 else 0]
        output = step.value if is_back else output
        value, marks = equation.inputs[position] if is_back else output, step.marks
        if equation.name == "reshape":
            axes = self._regrouped(step.axes, value.shape)
            return None if axes is None else Reached(value, axes, marks)
        is_kept = equation.name not in _REORDERING
        linked = cuts.links(equation, position, output) if is_kept else None
        if linked is None:
            return None
        axes = [self.new(size) for size in value.shape]
        for i, link in enumerate(linked):
            if link is None:
                continue
            source, target = (i, link) if is_back else (link, i)
            axis = step.axes[source]
            if step.value.shape[source] == value.shape[target]:
                axes[target] = axis
            elif equation.name in _RESIZING:
                marks = tuple(
                    axes[target] if self.of(mark) == self.of(axis) else mark
                    for mark in marks
                )
        has_marks = set(self.of(*marks)) <= set(self.of(*axes))
        return Reached(value, axes, marks) if has_marks else None

    def walk(
        self,
        step: Reached | None,
        passing: Callable[[Equation, Value], list[int]],
        goal: Callable[[Equation, Reached], Any],
        seen: set[Value] | None = None,
    ) -> tuple[list[Reached], Any] | None:
        """Walks back to a goal, depth first; returns the steps and the goal's result.

        `passing` maps an equation and its output to the inputs that the walk may take;
        `goal` maps an equation and the step at its output to a result, or None. Values
        in `seen` were visited before.
        """
        seen = set() if seen is None else seen
        if step is None or step.value in seen or len(seen) > FARTHEST:
            return None
        equation = step.value.maker
        if equation is None:
            return None
        seen.add(step.value)
        result = goal(equation, step)
        if result is not None:
            return [step], result
        for position in passing(equation, step.value):
            before = self.across(equation, position, step)
            walk = self.walk(before, passing, goal, seen)
            if walk is not None:
                return [step, *walk[0]], walk[1]
        return None

    def forms(self, step: Reached) -> Iterator[Reached]:
        """Yields a value, and all earlier values with the same numbers."""
        while True:
            yield step
            maker = step.value.maker
            if maker is None or not (positions := maker.neutral(step.value)):
                return
            before = self.across(maker, positions[0], step)
            if before is None:
                return
            step = before

    def origin(self, step: Reached) -> Reached:
        """Walks back to the first value with the same numbers."""
        return list(self.forms(step))[-1]

    def _regrouped(
        self, axes: list[AxisFactors], shape: tuple[int, ...]
    ) -> list[AxisFactors] | None:
        """Regroups the axes for a reshape; None if sizes have no common factors."""
        rest, result = [*self.with_ones(*axes)], []
        for size in shape:
            is_one = rest and self._sizes[rest[0]] == 1
            axis = [] if size > 1 else [rest.pop(0)] if is_one else [*self.new(1)]
            while size > 1:
                factor = rest.pop(0)
                factor_size = self._sizes[factor]
                if factor_size > size and factor_size % size == 0:
                    parts = self.new(size) + self.new(factor_size // size)
                    self._parts[factor] = parts
                    (factor, inner), factor_size = parts, size
                    rest.insert(0, inner)
                if size % factor_size:
                    return None
                axis.append(factor)
                size //= factor_size
            result.append(tuple(axis))
        return result


# --- Batches, heads and queries


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
        operands = [x for i in (0, 1) if (x := axes.across(product, i, query))]
        # A size that data bring is of positions, as in attention over channels.
        data = [x.value.is_of_data for x in operands]
        are_data = [data == [i == 0, i == 1] for i in (0, 1)]
        sources = [[] if y else x.axes for x, y in zip(operands, are_data, strict=True)]
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
    split = _without(whole.axes, axes, axes.with_ones(*whole.marks))
    parts = {x for axis in split for x in axis}
    heads = tuple(x for x in axes.with_ones(heads) if x in parts)
    # Heads of keys are groups of the heads that share an axis with them.
    shared = [x for x in split if set(heads) < set(x) and len(split) > 3]
    heads = shared[0] if heads and shared else heads
    # Apart from heads, one of the free axes must hold the queries.
    heads = heads if any(_without(free, axes, heads)) else ()
    queries = _without(free, axes, heads)
    queries = ([x for x in queries if axes.of(x)] or [x for x in queries if x])[-1]
    ones = {*axes.with_ones(*free)} - {*axes.of(*free)}  # no batch, as values lack them
    gone = {*queries, *ones} - {*heads}
    others = [axis for axis in _without(split, axes, gone) if axis]
    is_assumed = not heads and bool(axes.of(*others))
    if not heads and len(others) > 1:
        # Assumes [B, H, T, S], or [B, H, 1, T, S] of grouped heads.
        heads = axes.with_ones(*others[-1 if axes.of(others[-1]) else 1 :])
    batch = [axis for axis in _without(others, axes, heads) if axis]
    return Groups(batch, heads, queries, is_assumed)


def _without(
    some: list[AxisFactors], axes: Axes, gone: Collection[int]
) -> list[AxisFactors]:
    return [tuple(x for x in axes.with_ones(axis) if x not in gone) for axis in some]


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
        rest = [x for x in heads if x in factors and x not in grouped]
        rest += [x for x in factors if x not in {*grouped, *heads}]
        whole = [
            rest if group is None else [x for x in axes.of(group) if x in factors]
            for group in groups
        ]
        order = [factors.index(x) for group in whole for x in group]
        if sorted(order) != list(range(len(factors))):
            return None
        alone = [i for i, axis in enumerate(step.axes) if [*axes.of(axis)] == whole[-2]]
        is_single = len(whole[-2]) == 1 and bool(alone)
        return cls(
            step.value.shape,
            tuple(axes.size([x]) for x in factors),
            tuple(order),
            tuple(axes.size(group) for group in whole),
            tuple(rest) == heads[: len(rest)],
            (alone[0], factors.index(whole[-2][0])) if is_single else None,
        )

    def shown(self, value: Array) -> Array:
        """Converts a value, or some rows of weights, to the canonical axes."""
        factors, canonical = [*self.factors], [*self.canonical]
        if self.rows is not None:
            axis, factor = self.rows
            factors[factor] = canonical[-2] = value.shape[axis]
        value = jax.lax.transpose(jax.lax.reshape(value, factors), self.order)
        return jax.lax.reshape(value, canonical)

    def hidden(self, value: Array, changed: Array) -> Array:
        del value
        changed = jax.lax.reshape(changed, [self.factors[i] for i in self.order])
        changed = jax.lax.transpose(changed, np.argsort(self.order))
        return jax.lax.reshape(changed, self.shape)
