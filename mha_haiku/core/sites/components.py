"""Components of a program: the values of all queries and all keys, and their passes.

A matrix product whose result is large compared with both operands has an axis of
queries and an axis of keys: the scores of attention, or logits. What is computed from
it, while both axes are there, is a component. All the way the axis of queries is like a
batch axis, so that a component can be computed for blocks of queries, as `regions`
does. No form of attention is recognized for this.

A value of a block that needs a sum over all blocks is computed in a further pass, in
which scores are computed again: gradients take two.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

from mha_haiku.core.sites import cuts, jaxprs
from mha_haiku.core.sites.levels import Equation, Graph, Value

# A product is a seed if its result has so many times the numbers of its operands, in
# which the hidden values of a feed-forward layer have at most 4, and logits have dozens
# of times the numbers of what the tokens are.
_GROWTH = 4
_GROWTH_OF_TOKENS = 16
# Products, and what stands for a whole layer, are computed once, not for every block.
_OF_ROWS = cuts.ELEMENTWISE | {
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "reduce_sum"),
    *("reduce_max", "reduce_min"),
}


def is_seed(eqn: Any, limit: int) -> bool:
    """Checks whether an equation may be a product of all queries and all keys."""
    if eqn.primitive.name != "dot_general" or eqn.outvars[0].aval.size <= limit:
        return False
    _, (shared, _) = eqn.params["dimension_numbers"]
    size, operands = eqn.outvars[0].aval.size, [x.aval.size for x in eqn.invars]
    is_large = bool(shared) and size >= _GROWTH * sum(operands)
    return is_large or size >= _GROWTH_OF_TOKENS * min(operands)


def has_seeds(closed: core.ClosedJaxpr, limit: int) -> bool:
    """Checks whether a program, or one inside of it, may have such a product."""
    return any(is_seed(eqn, limit) for eqn in jaxprs.walk(closed.jaxpr))


class _Labels:
    """Axes of values that are the same axis of a component, as a union of sets."""

    def __init__(self):
        self._parents: list[int] = []

    def new(self) -> int:
        self._parents.append(len(self._parents))
        return self._parents[-1]

    def find(self, label: int) -> int:
        while self._parents[label] != label:
            label = self._parents[label]
        return label

    def join(self, first: int, second: int) -> None:
        self._parents[self.find(first)] = self.find(second)


@dataclasses.dataclass(eq=False)
class Component:
    """The values that have an axis of queries and one of keys of the same attention."""

    rows: dict[Value, int]  # each value's axis that is cut in blocks
    area: int  # the number of queries times the number of keys
    num_whole: int = 0  # values that an equation needs whole
    # The pass in which an equation runs, and how; an equation that is not in here is
    # run by itself, before or after.
    passes: dict[Equation, int] = dataclasses.field(default_factory=dict)
    kinds: dict[Equation, str] = dataclasses.field(default_factory=dict)
    # The axis of rows of values that have lost the axis of keys.
    kept: dict[Value, int] = dataclasses.field(default_factory=dict)
    # The first pass in which a whole value is there.
    complete: dict[Value, int] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of queries."""
        value, axis = next(iter(self.rows.items()))
        return value.shape[axis]

    @property
    def cost(self) -> tuple[int, int, int]:
        """Compares two ways of cutting: by whole values, passes, sums over blocks."""
        count = max(self.passes.values(), default=0)
        summed = sum(kind == "sum" for kind in self.kinds.values())
        return self.num_whole, count, summed


def large(program: Graph, limit: int) -> list[tuple[dict[Value, int], ...]]:
    """Finds the values with queries and keys of each attention, and their axes.

    For each there are two choices of what is cut: either axis, by value.
    """
    labels, axes = _Labels(), {}
    for equation in program.equations:
        marked = [(n, axes[x]) for n, x in enumerate(equation.inputs) if x in axes]
        if not marked:
            if is_seed(equation.eqn, limit):
                both = _longest(equation)
                if both is not None:
                    axes[equation.outputs[0]] = {axis: labels.new() for axis in both}
            continue
        for output in equation.outputs:
            after: dict[int, int] = {}
            for n, before in marked:
                linked = cuts.links(equation, n, output) or ()
                mine = {j: before[i] for j, i in enumerate(linked) if i in before}
                if equation.name == "dot_general" and len(mine) < 2:
                    continue
                for axis, label in mine.items():
                    labels.join(after.setdefault(axis, label), label)
            if len(after) == 2:
                axes[output] = after
    groups = collections.defaultdict(dict)
    for value, pair in axes.items():
        found = {labels.find(label): axis for axis, label in pair.items()}
        groups[frozenset(found)][value] = found
    return [
        tuple({v: x[label] for v, x in values.items()} for label in key)
        for key, values in groups.items()
        if len(key) == 2  # else an axis is of queries and of keys
    ]


def _area(choices: tuple[dict[Value, int], ...]) -> int:
    """Multiplies the number of queries and the number of keys."""
    value = next(iter(choices[0]))
    return math.prod(value.shape[rows[value]] for rows in choices)


def plans(program: Graph, limit: int) -> list[Component]:
    """Plans the components of a program whose values have more than `limit` numbers."""
    found = large(program, limit)
    own = [_best(program, choices, _area(choices)) for choices in found]
    return own + _reductions(program, own)


def _best(program: Graph, choices: Sequence[dict], area: int) -> Component:
    plans = [_cut(program, rows, area) for rows in choices]
    return min(plans, key=lambda plan: plan.cost)


def _reductions(program: Graph, plans: list[Component]) -> list[Component]:
    """Plans sums and maxima of large values that are made for these only."""
    area = min((plan.area for plan in plans), default=0)
    planned = {equation for plan in plans for equation in plan.kinds}
    more: dict[Value, Component] = {}
    for equation in program.equations if plans else ():
        if equation in planned or equation.name in cuts.PULLED:
            continue
        for value in equation.inputs:
            maker = value.maker
            if maker in planned or value in more or not is_mask(area, value):
                continue
            assert maker is not None
            axes = sorted(range(len(value.shape)), key=value.shape.__getitem__)[-2:]
            choices = [{value: x} for x in axes if is_cut(maker, value, x)]
            if choices:
                more[value] = _best(program, choices, area)
    return [plan for plan in more.values() if not plan.num_whole]


def _longest(equation: Equation) -> tuple[int, int] | None:
    """Finds the longest axes of a product's result that come from either operand."""
    (output,) = equation.outputs
    linked = [cuts.links(equation, side, output) or [] for side in (0, 1)]
    both = []
    for mine, other in (linked, linked[::-1]):
        free = [j for j, i in enumerate(mine) if i is not None and other[j] is None]
        if not free:
            return None
        both.append(max(free, key=output.shape.__getitem__))
    return both[0], both[1]


def _cut(program: Graph, rows: dict[Value, int], area: int) -> Component:
    """Plans in which pass of a component each equation runs, if `rows` are cut."""
    plan = Component(dict(rows), area)
    complete, kept, available = plan.complete, plan.kept, {}

    def when(value: Value, axis: int | None) -> int:
        """Tells in which pass a block of a value is there, cut along the axis."""
        is_block = axis is not None and axis == plan.rows.get(value, kept.get(value))
        return available[value] if is_block else complete.get(value, 0)

    for equation in program.equations:
        inputs = equation.inputs
        reads = [x for x in inputs if x in plan.rows]
        is_first = any(x in rows for x in equation.outputs)
        if not reads and not is_first:
            if not _keeps(equation, plan, when, available):
                _after(equation, complete)
            continue
        kind = _kind(equation, plan)
        if kind is None:
            for output in equation.outputs:
                plan.rows.pop(output, None)
            plan.num_whole += len(reads)
            _after(equation, complete)
            continue
        needs = [
            when(x, a) for x, a in zip(inputs, axes_of(equation, plan), strict=True)
        ]
        plan.kinds[equation] = kind
        plan.passes[equation] = turn = max(needs, default=0)
        for output in equation.outputs:
            available[output] = turn
            complete[output] = turn + 1
            axis = out_axis(equation, output, plan)
            if kind == "row" and axis is not None:
                kept[output] = axis
    return plan


def _after(equation: Equation, complete: dict[Value, int]) -> None:
    turn = max((complete.get(x, 0) for x in equation.inputs), default=0)
    if turn:
        complete.update(dict.fromkeys(equation.outputs, turn))


def _keeps(equation: Equation, plan: Component, when: Any, available: dict) -> bool:
    """Plans an equation of values that have rows, but no keys; False for others."""
    inputs = equation.inputs
    reads = [x for x in inputs if x in plan.kept]
    is_early = any(available[x] < plan.complete[x] for x in reads)
    if not is_early or equation.name not in _OF_ROWS:
        return False
    axes = {out_axis(equation, output, plan) for output in equation.outputs}
    (axis,) = axes if len(axes) == 1 else (None,)
    if axis is None or not cuts.keeps_rows(equation, equation.outputs[0], axis):
        return False
    for output in equation.outputs:
        plan.kept[output] = axis
    needs = [when(x, a) for x, a in zip(inputs, axes_of(equation, plan), strict=True)]
    plan.kinds[equation] = "kept"
    plan.passes[equation] = turn = max(needs)
    late = max(plan.complete.get(x, 0) for x in inputs)
    for output in equation.outputs:
        available[output], plan.complete[output] = turn, late
    return True


def _kind(equation: Equation, plan: Component) -> str | None:
    """Tells what becomes of the rows: "both", "row", "sum", or None if unknown."""
    for output in equation.outputs:
        axis = out_axis(equation, output, plan)
        if axis is not None:
            if not cuts.keeps_rows(equation, output, axis):
                return None
        elif len(equation.outputs) > 1 or summed(equation, plan) is None:
            return None
    if any(x in plan.rows for x in equation.outputs):
        return "both"
    has_rows = out_axis(equation, equation.outputs[0], plan) is not None
    return "row" if has_rows else "sum"


def summed(equation: Equation, plan: Component) -> int | None:
    """Finds the input whose rows an equation sums."""
    for n, x in enumerate(equation.inputs):
        if x in plan.rows:
            return n if cuts.sums(equation, n, plan.rows[x]) else None
    return None


def out_axis(equation: Equation, output: Value, plan: Component) -> int | None:
    """Finds the axis of rows of an output; None if it has lost it."""
    if output in plan.rows:
        return plan.rows[output]
    if output in plan.kept:
        return plan.kept[output]
    places = set()
    has_both = any(x in plan.rows for x in equation.inputs)
    for n, x in enumerate(equation.inputs):
        axis = plan.rows.get(x, None if has_both else plan.kept.get(x))
        linked = None if axis is None else cuts.links(equation, n, output)
        if linked is not None and axis in linked:
            places.add(linked.index(axis))
        elif axis is not None:
            return None
    return places.pop() if len(places) == 1 else None


def axes_of(equation: Equation, plan: Component) -> list[int | None]:
    """Finds the axis of rows of each input of an equation of a component."""
    (output, *_) = equation.outputs
    axis = out_axis(equation, output, plan)
    if axis is not None:
        return list(linked(equation, output, axis))
    n = summed(equation, plan)
    assert n is not None
    return cuts.summed_axes(equation, n, plan.rows[equation.inputs[n]])


def linked(equation: Equation, output: Value, axis: int | None) -> Iterator[int | None]:
    """Finds the axis of each input that is an axis of an output."""
    for n in range(len(equation.inputs)):
        axes = None if axis is None else cuts.links(equation, n, output)
        yield None if axes is None or axis is None else axes[axis]


# --- Values that are computed from small ones


def is_cut(equation: Equation, output: Value, axis: int) -> bool:
    """Checks whether a block of an output follows from blocks of the inputs."""
    places = [cuts.links(equation, n, output) for n in range(len(equation.inputs))]
    if None in places or not cuts.keeps_rows(equation, output, axis):
        return False
    has_rows = any(x is not None and x[axis] is not None for x in places)
    return has_rows or equation.name in ("broadcast_in_dim", "iota")


def result_shape(eqn: Any) -> tuple[int, ...]:
    """Returns the shape of the result of a product."""
    return eqn.outvars[0].aval.shape


def least_area(jaxpr: core.Jaxpr, limit: int) -> int | None:
    """Finds the least number of queries times keys; None without a product of both."""
    shapes = [result_shape(x) for x in jaxprs.walk(jaxpr) if is_seed(x, limit)]
    return min((math.prod(sorted(x)[-2:]) for x in shapes), default=None)


def is_mask(area: int, value: Value) -> bool:
    """Checks whether a value is large, but computed from small ones at little cost."""
    maker = value.maker
    is_large = value.size >= area // 2
    return is_large and maker is not None and maker.name in cuts.PULLED
