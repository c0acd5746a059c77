"""Recognizes the softmax or sigmoid that turns scores into weights.

A softmax is exponentials over their sum, or `exp(x - logsumexp(x))`. Weights may be
cast, masked, mixed, scaled or renormalized before they are read. Walks go back from the
weights, and keep the axis of keys, which is marked.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from mha_haiku.core.sites import levels
from mha_haiku.core.sites.axes import Axes, Reached
from mha_haiku.core.sites.levels import Equation, Value


class Change(NamedTuple):
    """The effect of an equation on weights along a walk."""

    name: str  # of the primitive
    number: int | None  # of the other operand, or of a selection's condition
    place: int  # the index of the weights among the operands
    size: int = 1  # of the other operand
    is_random: bool = False
    is_of_rows: bool = False  # whether the other operand is the same for all keys

    @property
    def key(self) -> tuple:
        return self.name, self.number, self.place


class Softmax(NamedTuple):
    """A softmax or sigmoid that turns scores into weights."""

    scores: Reached
    # The changes of exponentials on their way into the numerator and into the sum. None
    # for a sum that has other terms, or if there is no sum.
    divided: Sequence[Change | None] = ()
    summed: Sequence[Change | None] | None = None
    is_sigmoid: bool = False
    argument: Value | None = None  # of the exponential in the sum

    def are_shares(self, later: list[Change | None], masks: set[tuple]) -> bool:
        """Checks whether rows sum to 1, or to 0, after changes of the quotient."""
        # If the scores are masked, the same mask on the exponentials changes nothing.
        if self.summed is None:
            return False
        keys = {
            x.key
            for x in (*self.divided, *later)
            if x and not (x.name == "select_n" and x.is_of_rows)
        }
        return keys - masks == {x.key for x in self.summed if x} - masks


def found(axes: Axes, equation: Equation, step: Reached) -> Softmax | None:
    """Finds the softmax or sigmoid of which an equation is the last step."""
    if equation.name == "logistic":
        scores = axes.back(equation, 0, step)
        return None if scores is None else Softmax(scores, is_sigmoid=True)
    if equation.name in levels.EXPONENTIALS:
        return _of_shifted(axes, equation, step)
    if equation.name == "div" and not equation.inputs[0].is_made:
        return _of_inverse(axes, equation, step)
    parts = _quotient(axes, equation, step)
    walk = parts and axes.walk(parts[0], weighing, functools.partial(_masses, axes))
    if not parts or not walk:
        return None
    steps, (masses, scores, is_sigmoid) = walk
    goal = functools.partial(is_computed_alike, masses)
    total = _summed(axes, steps[-1], parts[1], goal)
    if total is None:
        return None
    summed, argument = total
    return Softmax(scores, changes(axes, steps), summed, is_sigmoid, argument)


def changes(axes: Axes, steps: list[Reached]) -> list[Change | None]:
    """Lists the changes between the steps of a walk; None for no change."""
    return [_change(axes, *pair) for pair in itertools.pairwise(steps)]


def weighing(equation: Equation, value: Value) -> list[int]:
    """Lists the inputs that may be weights, if the output is weights."""
    # Weights are multiplied by a scalar, a parameter or random numbers: a factor
    # computed by products means a backward pass or a gated layer.
    name, inputs = equation.name, equation.inputs
    if any(facet.name == "weights" for facet in equation.params.get("facets", ())):
        return []  # they already have a site
    if name in ("mul", "dot_general", "add", "sub"):
        return [i for i in (0, 1) if not inputs[1 - i].is_made]
    if name in ("slice", "dynamic_slice") or name == "div" and not inputs[1].is_made:
        return [0]
    return _chosen(equation) or equation.neutral(value)


def is_computed_alike(
    wanted: Equation, equation: Equation, step: Reached
) -> Equation | None:
    """Returns an equation if it computes the wanted numbers; a goal of walks."""
    del step
    is_same = equation.outputs[0].number == wanted.outputs[0].number
    return equation if is_same else None


def _chosen(equation: Equation) -> list[int]:
    """Lists the inputs of a selection except the condition."""
    return [*range(1, len(equation.inputs))] if equation.name == "select_n" else []


def _summing(equation: Equation, value: Value) -> list[int]:
    """Lists the inputs that may be a sum of exponentials, if the output is one."""
    if equation.name in ("add", "max"):
        return [0, 1]
    if equation.name in ("log", "abs"):
        return [0]
    return _chosen(equation) or equation.neutral(value)


def _of_shifted(axes: Any, equation: Equation, step: Reached) -> Softmax | None:
    """Finds a softmax of the form `exp(x - logsumexp(x))`."""
    scores = axes.back(equation, 0, step)
    shifted = scores.value.maker
    if shifted is None or shifted.name != "sub":
        return None
    logsumexp = axes.back(shifted, 1, scores._replace(marks=()))
    goal = functools.partial(_is_shifted, shifted.inputs[0].number)
    total = _summed(axes, scores, logsumexp, goal, is_log=True)
    if total is None:
        return None
    return Softmax(scores, summed=total[0], argument=total[1])


def _of_inverse(axes: Any, equation: Equation, step: Reached) -> Softmax | None:
    """Finds a sigmoid of the form `1 / (1 + exp(-x))`."""
    total = axes.back(equation, 1, step)
    adding = total and total.value.maker
    if adding is None or adding.name != "add":
        return None
    begin = axes.back(adding, int(adding.inputs[1].is_made), total)
    walk = axes.walk(
        begin, weighing, lambda x, _: x if x.name in levels.EXPONENTIALS else None
    )
    if walk is None:
        return None
    steps, exponential = walk
    return Softmax(axes.back(exponential, 0, steps[-1]), is_sigmoid=True)


def _quotient(
    axes: Any, equation: Equation, step: Reached
) -> tuple[Reached, Reached] | None:
    """Finds the numerator and denominator of a division or an equivalent product."""
    back, whole = axes.back, step._replace(marks=())
    if equation.name == "div" and equation.inputs[1].is_made:
        return back(equation, 0, step), back(equation, 1, whole)
    for i in (0, 1) if equation.name == "mul" else ():
        if not equation.inputs[1 - i].is_made:
            continue
        inverse = axes.origin(back(equation, 1 - i, whole))
        maker = inverse.value.maker
        if maker and maker.name == "integer_pow" and maker.params["y"] == -1:
            return back(equation, i, step), back(maker, 0, inverse)
        if maker and maker.name == "div":
            one = maker.eqn.invars[0]
            if isinstance(one, core.Literal) and one.val == 1:
                return back(equation, i, step), back(maker, 1, inverse)
    return None


def _masses(
    axes: Any, equation: Equation, step: Reached
) -> tuple[Equation, Reached, bool] | None:
    """Finds a numerator that may be divided by its sum: exponentials, or weights."""
    if equation.name in levels.EXPONENTIALS:
        return equation, axes.back(equation, 0, step), False
    softmax = found(axes, equation, step)
    return softmax and (equation, softmax.scores, softmax.is_sigmoid)


def _is_shifted(number: int, equation: Any, step: Reached) -> Equation | None:
    """Finds an exponential of the value with this number, up to a subtraction."""
    del step
    if equation.name not in levels.EXPONENTIALS:
        return None
    value = equation.inputs[0]
    while value.number != number:
        maker = value.maker
        is_passed = maker and (maker.name == "sub" or maker.name in levels.NEUTRAL)
        if not is_passed:
            return None
        value = maker.inputs[0]
    return equation


def _summed(
    axes: Any,
    step: Reached,
    total: Reached | None,
    goal: Callable[[Equation, Reached], Any],
    *,
    is_log: bool = False,
) -> tuple | None:
    """Checks whether a total is the sum over keys of a step's values, or its logarithm.

    The goal finds these values there. Returns their changes on the way, None if the sum
    has other terms, and the argument of the exponential there.
    """
    keys = set(axes.of(*step.marks))
    others = set(axes.of(*step.axes)) - keys

    def over_keys(equation: Equation, step: Reached):
        is_sum = equation.name == "reduce_sum" and len(equation.params["axes"]) == 1
        if not is_sum or set(axes.of(*step.axes)) != others:
            return None
        return axes.walk(axes.back(equation, 0, step), weighing, goal)

    walk = axes.walk(total, _summing, over_keys)
    names = [step.value.maker.name for step in walk[0]] if walk else []
    if not walk or ("log" in names) != is_log:
        return None
    if is_log:  # logsumexp adds the maximum to the logarithm
        names = names[names.index("log") :]
    terms, exponential = walk[1]
    summed = None if "add" in names else changes(axes, terms)
    return summed, exponential.inputs[0]


def _change(axes: Axes, step: Any, before: Reached) -> Change | None:
    maker = step.value.maker
    place = maker.inputs.index(before.value)
    if maker.name in levels.NEUTRAL:
        return None
    if maker.name not in ("select_n", "mul", "div", "add", "sub"):
        return Change(maker.name, step.value.number, place)
    position = 0 if maker.name == "select_n" else 1 - place
    other = axes.back(maker, position, step._replace(marks=()))
    other = axes.origin(other or axes.start(maker.inputs[position]))
    value, keys = other.value, set(axes.of(*before.marks))
    return Change(
        maker.name,
        value.number,
        place,
        math.prod(value.shape),
        value.is_random and not value.is_made,
        not keys & set(axes.of(*other.axes)),
    )
