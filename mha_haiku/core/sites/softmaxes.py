"""Recognizes the softmax or sigmoid that turns scores into weights.

A softmax is an exponential over a sum over keys of the same exponential, or of which
the logarithm of this sum was subtracted before. Weights may be cast, masked, mixed,
scaled or renormalized before they are read. Walks go back from the weights, and keep
the axis of keys, which is marked.
"""

import collections
import itertools
from typing import NamedTuple

from mha_haiku.core.sites import levels
from mha_haiku.core.sites.axes import Axes, Reached
from mha_haiku.core.sites.levels import Equation, Value

EXPONENTIALS = {*levels.EXPONENTIALS, "logistic"}
_MIXING = {"slice", "dynamic_slice", "dot_general"}


class Softmax(NamedTuple):
    """A softmax or sigmoid that turns scores into weights."""

    end: Equation  # the exponential, or the sigmoid
    weights: list[Reached]  # from what the product reads back to the shares of keys
    scores: Reached  # the argument of the exponential
    is_sigmoid: bool


def totals(equations: list[Equation]) -> dict[int, int]:
    """Finds the bits of sums of exponentials, by the numbers of their arguments."""
    sums = [x.outputs[0] for x in equations if x.name == "reduce_sum"]
    result: dict[int, int] = collections.defaultdict(int)
    for equation in equations:
        if equation.name in EXPONENTIALS:
            bit = equation.outputs[0].bit
            bits = levels.union(x.bit for x in sums if x.behind & bit)
            for number in unshifted(equation.inputs[0]):
                result[number] |= bits
    return result


def found(axes: Axes, weights: Reached, sums: dict[int, int]) -> Softmax | None:
    """Finds the softmax or sigmoid of which weights are made; `sums` are `totals`."""
    walk = axes.walk(
        weights, _weighing, lambda x, _: x if x.name in EXPONENTIALS else None
    )
    if walk is None:
        return None
    steps, end = walk
    scores = axes.across(end, 0, steps[-1])
    if scores is None:
        return None
    is_sigmoid = end.name == "logistic"
    shares = len(steps) if is_sigmoid else 0
    for i, (step, before) in enumerate(itertools.pairwise([*steps, scores])):
        maker, place = _maker(step), _place(step, before)
        if maker.name in ("mul", "div") and maker.inputs[1 - place].is_made:
            if not _is_total(axes, step, 1 - place, scores.value, sums):
                return None
            shares = shares or i + 1
        elif maker.name == "div" and place == 1:  # 1 / (1 + exp(-x))
            is_sigmoid, shares = True, shares or i + 1
    shifted = axes.origin(scores)
    maker = shifted.value.maker
    if not shares and maker is not None and maker.name == "sub":
        is_log = _is_total(axes, shifted, 1, maker.inputs[0], sums)
        shares = len(steps) * is_log
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
    kinds = []
    for step, before in itertools.pairwise(steps):
        maker = _maker(step)
        if maker.name in levels.NEUTRAL:
            kinds.append("same")
            continue
        if maker.name not in ("mul", "div", "select_n"):
            break
        position = 0 if maker.name == "select_n" else 1 - _place(step, before)
        other = levels.origin(maker.inputs[position])
        if other.is_made:
            break
        is_scale = other.size == 1
        kinds.append("random" if other.is_random else "scale" if is_scale else "zeros")
    dropped = "random" if "random" in kinds else "zeros" if "scale" in kinds else ""
    best = max((i + 1 for i, kind in enumerate(kinds) if kind == dropped), default=0)
    skipped = {"same", "scale"} if best else {"same"}
    return best + len([*itertools.takewhile(skipped.__contains__, kinds[best:])])


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
        shift = axes.across(maker, 1 - _place(step, before), step._replace(marks=()))
        keys = set(axes.of(*before.marks))
        if shift is None or keys.intersection(axes.of(*axes.origin(shift).axes)):
            break
    return best


def _weighing(equation: Equation, value: Value) -> list[int]:
    """Lists the inputs that may be weights, if the output is weights."""
    # Weights are multiplied by a scalar, a parameter or random numbers: a factor
    # computed by products means a backward pass or a gated layer, unless it is the
    # inverse of their sum.
    if any(facet.name == "weights" for facet in equation.params.get("facets", ())):
        return []  # they already have a site
    name, made = equation.name, equation.made(value)
    if name in ("mul", "div", "select_n"):
        return [i for i in made if i or name != "select_n"]
    is_kept = name in levels.NEUTRAL | _MIXING | {"add", "sub"}
    return made if is_kept and len(made) == 1 else []


def _is_total(
    axes: Axes, step: Reached, position: int, argument: Value, sums: dict[int, int]
) -> bool:
    """Checks whether an input of a step's equation is made of a sum over keys.

    It is a sum of the exponentials of an argument, up to a shift.
    """
    total = axes.across(_maker(step), position, step._replace(marks=()))
    if total is None:
        return False
    total, keys = axes.origin(total), axes.of(*step.marks)
    is_sum = bool(sums[argument.number] & total.value.behind)
    is_of_others = bool(total.value.by_product & ~argument.by_product)
    is_column = set(keys).isdisjoint(axes.of(*total.axes))
    return is_sum and is_column and not is_of_others


def _maker(step: Reached) -> Equation:
    assert step.value.maker is not None  # it is on a walk
    return step.value.maker


def _place(step: Reached, before: Reached) -> int:
    return _maker(step).inputs.index(before.value)
