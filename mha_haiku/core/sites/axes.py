"""Axes of values, followed from equation to equation.

An axis is a tuple of factors of its size, which are numbers that `Axes` keeps. A
reshape from `[B, T, H * V]` to `[B, T, H, V]` splits a factor in two, in all axes that
contain it. Axes of size 1 may come and go: only `with_ones` lists their factors.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

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

    def shares(self, some: Iterable[AxisFactors], other: Iterable[AxisFactors]) -> bool:
        """Checks whether axes have a factor in common."""
        return not {*self.of(*some)}.isdisjoint(self.of(*other))

    def size(self, axis: Iterable[int]) -> int:
        return math.prod(self._sizes[x] for x in self.of(axis))

    def start(self, value: Value, *marked: int) -> Reached:
        """Makes the first step of a walk, with some axes marked."""
        axes = [self.new(size) for size in value.shape]
        return Reached(value, axes, tuple(axes[i] for i in marked))

    def back(self, equation: Equation, position: int, step: Reached) -> Reached | None:
        """Steps from an equation's output back to an input; None if marks end."""
        value, marks = equation.inputs[position], step.marks
        if equation.name == "reshape":
            axes = self._regrouped(step.axes, value.shape)
            return None if axes is None else Reached(value, axes, marks)
        linked = _links(equation, position, step.value)
        if linked is None:
            return None
        axes = [self.new(size) for size in value.shape]
        for axis, size, link in zip(step.axes, step.value.shape, linked, strict=True):
            if link is not None and size == value.shape[link]:
                axes[link] = axis
            elif link is not None and equation.name in _RESIZING:
                marks = tuple(
                    axes[link] if self.of(mark) == self.of(axis) else mark
                    for mark in marks
                )
        has_marks = set(self.of(*marks)) <= set(self.of(*axes))
        return Reached(value, axes, marks) if has_marks else None

    def ahead(self, equation: Equation, position: int, step: Reached) -> Reached | None:
        """Steps from an equation's input ahead to its output."""
        value = equation.outputs[position if len(equation.outputs) > 1 else 0]
        if equation.name == "reshape":
            axes = self._regrouped(step.axes, value.shape)
            return None if axes is None else Reached(value, axes, step.marks)
        linked = _links(equation, position, value)
        if linked is None:
            return None
        axes = [
            step.axes[link]
            if link is not None and step.value.shape[link] == size
            else self.new(size)
            for link, size in zip(linked, value.shape, strict=True)
        ]
        return Reached(value, axes, step.marks)

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
            before = self.back(equation, position, step)
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
            before = self.back(maker, positions[0], step)
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


def _links(equation: Equation, position: int, output: Value) -> list[int | None] | None:
    if equation.name in _REORDERING:
        return None
    return cuts.links(equation, position, output)
