"""Recognizes the softmax or sigmoid that turns scores into weights.

A softmax is an exponential over a sum over keys of the same exponential, or of which
the logarithm of this sum was subtracted before. Weights may be cast, masked, mixed,
scaled or renormalized before they are read. Walks go back from the weights, and keep
the axis of keys, which is marked.
"""

import itertools
from typing import NamedTuple

from mha_haiku.core.sites import levels
from mha_haiku.core.sites.axes import Axes, Reached
from mha_haiku.core.sites.levels import Equation, Value

_EXPONENTIALS = {*levels.EXPONENTIALS, "logistic"}
_MIXING = {"slice", "dynamic_slice", "dot_general"}


class Softmax(NamedTuple):
    """A softmax or sigmoid that turns scores into weights."""

    end: Equation  # the exponential, or the sigmoid
    weights: list[Reached]  # from what the product reads back to the shares of keys
    scores: Reached  # the argument of the exponential
    is_sigmoid: bool


def found(axes: Axes, weights: Reached) -> Softmax | None:
    """Finds the softmax or sigmoid of which weights are made."""
    walk = axes.walk(weights, _weighing, _exponential)
    if walk is None:
        return None
    steps, end = walk
    scores = axes.back(end, 0, steps[-1])
    if scores is None:
        return None
    is_sigmoid = end.name == "logistic"
    shares = len(steps) if is_sigmoid else 0
    for i, (step, before) in enumerate(itertools.pairwise([*steps, scores])):
        maker, place = _maker(step), _place(step, before)
        is_inverse = maker.name == "div" and place == 1  # 1 / (1 + exp(-x))
        if maker.name in ("mul", "div") and maker.inputs[1 - place].is_made:
            if not _is_total(axes, step, 1 - place, scores.value):
                return None
            shares = shares or i + 1
        elif is_inverse:
            is_sigmoid, shares = True, shares or i + 1
    shifted = axes.origin(scores)
    maker = shifted.value.maker
    if not shares and maker is not None and maker.name == "sub":
        is_log = _is_total(axes, shifted, 1, maker.inputs[0])
        shares = len(steps) if is_log else 0
    return Softmax(end, steps[:shares], scores, is_sigmoid) if shares else None


def unshifted(value: Value) -> list[int]:
    """Lists the numbers of a value and of the values that it is a shift of."""
    numbers = [value.number]
    while value.maker is not None and value.maker.name in (*levels.NEUTRAL, "sub"):
        value = value.maker.inputs[0]
        numbers.append(value.number)
    return numbers


def undropped(steps: list[Reached]) -> int:
    """Finds the step at which weights are mixed and masked, but not dropped out."""
    # Dropout is random, or zeros together with a scale:
    # `where(kept, weights / 0.8, 0)`.
    random, scales, zeros, same = set(), set(), set(), set()
    for i, (step, before) in enumerate(itertools.pairwise(steps)):
        maker = _maker(step)
        if maker.name in _MIXING:
            break
        position = 0 if maker.name == "select_n" else 1 - _place(step, before)
        if maker.name in levels.NEUTRAL:
            same.add(i)
            continue
        other = levels.origin(maker.inputs[position])
        if other.is_random and not other.is_made:
            random.add(i)
        elif maker.name in ("mul", "div") and other.size == 1:
            scales.add(i)
        elif maker.name in ("mul", "select_n"):
            zeros.add(i)
    dropped = random or (zeros if scales else set())
    best = max(dropped, default=-1) + 1
    while best in same or (dropped and best in scales):
        best += 1
    return best


def masked(axes: Axes, steps: list[Reached], index: int) -> Reached | None:
    """Finds the first scores with their mask that can be read, up to a shift of rows.

    `steps` lead from the softmax to the product of queries and keys.
    """
    best = None
    for step, before in itertools.zip_longest(steps, steps[1:]):
        best = step if step.value.is_readable(index) else best
        maker = _maker(step)
        if maker.name in levels.NEUTRAL:
            continue
        if before is None or maker.name not in ("sub", "add"):
            break
        shift = axes.back(maker, 1 - _place(step, before), step._replace(marks=()))
        if shift is None or axes.shares(before.marks, axes.origin(shift).axes):
            break
    return best


def _exponential(equation: Equation, step: Reached) -> Equation | None:
    del step
    return equation if equation.name in _EXPONENTIALS else None


def _weighing(equation: Equation, value: Value) -> list[int]:
    """Lists the inputs that may be weights, if the output is weights."""
    # Weights are multiplied by a scalar, a parameter or random numbers: a factor
    # computed by products means a backward pass or a gated layer, unless it is the
    # inverse of their sum.
    name, inputs = equation.name, equation.inputs
    if any(facet.name == "weights" for facet in equation.params.get("facets", ())):
        return []  # they already have a site
    if name in ("dot_general", "add", "sub"):
        return [i for i in (0, 1) if not inputs[1 - i].is_made]
    if name == "mul":
        return [0, 1]
    if name == "div":
        return [0] if inputs[0].is_made else [1]
    if name in ("slice", "dynamic_slice"):
        return [0]
    if name == "select_n":
        return [*range(1, len(inputs))]
    return equation.neutral(value)


def _is_total(axes: Axes, step: Reached, position: int, argument: Value) -> bool:
    """Checks whether an input of a step's equation is a sum over keys, or made of one.

    It is the sum of the exponentials of an argument, up to a shift.
    """
    total = axes.back(_maker(step), position, step._replace(marks=()))
    rows = set(axes.of(*step.axes)) - set(axes.of(*step.marks))

    def of_argument(equation: Equation, step: Reached) -> bool | None:
        if _exponential(equation, step) is None:
            return None
        return argument.number in unshifted(equation.inputs[0]) or None

    def over_keys(equation: Equation, step: Reached) -> bool | None:
        is_sum = equation.name == "reduce_sum" and len(equation.params["axes"]) == 1
        if not is_sum or set(axes.of(*step.axes)) != rows:
            return None
        terms = axes.back(equation, 0, step)
        return axes.walk(terms, _weighing, of_argument) is not None or None

    return axes.walk(total, _summing, over_keys) is not None


def _summing(equation: Equation, value: Value) -> list[int]:
    """Lists the inputs that may be a sum, if the output is one, or is made of one."""
    if equation.name == "div":
        return [] if equation.inputs[0].is_made else [1]
    if equation.name in ("add", "max", "log", "abs", "integer_pow", "select_n"):
        return equation.made(value)
    return equation.neutral(value)


def _maker(step: Reached) -> Equation:
    assert step.value.maker is not None  # it is on a walk
    return step.value.maker


def _place(step: Reached, before: Reached) -> int:
    return _maker(step).inputs.index(before.value)
