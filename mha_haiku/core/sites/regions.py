"""Runs a program without its values of all queries and all keys.

A matrix product whose result is large compared with both operands has an axis of
queries and an axis of keys: the scores of attention, or logits. What is computed from
it, while both axes are there, is a component. All the way the axis of queries is like a
batch axis, so that a component can be computed for blocks of queries: `lax.scan` runs
over blocks, and keeps only what has lost the axis of keys (maxima and sums of rows,
products with values), or adds up what has lost the axis of queries (gradients of keys
and values). No form of attention is recognized for this.

A value of a block that needs a sum over all blocks is computed in a further pass, in
which scores are computed again: gradients take two. Masks and biases that are made of
smaller values are computed for each block.

Where an equation needs all queries and keys at once, the value stays whole.
"""

import collections
import dataclasses
import functools
import graphlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from mha_haiku.core.sites import cuts, jaxprs, levels
from mha_haiku.core.sites.levels import Equation, Graph, Value

LIMIT = 2**24
"""Numbers of the largest values of queries and keys that are made whole."""

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
    whole: list[str] = dataclasses.field(default_factory=list)  # what is left so, why
    # The pass in which an equation runs, and how; an equation that is not in here is
    # run by itself, before or after.
    passes: dict[Equation, int] = dataclasses.field(default_factory=dict)
    kinds: dict[Equation, str] = dataclasses.field(default_factory=dict)
    # The axis of rows of values that have lost the axis of keys.
    kept: dict[Value, int] = dataclasses.field(default_factory=dict)
    # The first pass in which a whole value is there.
    complete: dict[Value, int] = dataclasses.field(default_factory=dict)

    @property
    def cost(self) -> tuple[int, int, int]:
        """Compares two ways of cutting: by whole values, passes, sums over blocks."""
        count = max(self.passes.values(), default=0)
        summed = sum(kind == "sum" for kind in self.kinds.values())
        return len(self.whole), count, summed


def components(program: Graph, limit: int) -> list[Component]:
    """Finds the components of a program whose values have more than `limit` numbers."""
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
    plans = []
    for key, values in groups.items():
        if len(key) == 2:  # else an axis is of queries and of keys
            choices = [{v: x[label] for v, x in values.items()} for label in key]
            first = next(iter(values))
            area = math.prod(first.shape[axis] for axis in values[first].values())
            plans.append(_best(program, choices, area))
    return plans + _reductions(program, plans)


def _best(program: Graph, choices: list[dict], area: int) -> Component:
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
            if maker in planned or value in more or not _is_mask(area, value):
                continue
            assert maker is not None
            axes = sorted(range(len(value.shape)), key=value.shape.__getitem__)[-2:]
            choices = [{value: x} for x in axes if _is_cut(maker, value, x)]
            if choices:
                more[value] = _best(program, choices, area)
    return [plan for plan in more.values() if not plan.whole]


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
            plan.whole += [f"{equation.name} needs {x.aval.str_short()}" for x in reads]
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
        elif len(equation.outputs) > 1 or _summed(equation, plan) is None:
            return None
    if any(x in plan.rows for x in equation.outputs):
        return "both"
    has_rows = out_axis(equation, equation.outputs[0], plan) is not None
    return "row" if has_rows else "sum"


def _summed(equation: Equation, plan: Component) -> tuple[int, Any] | None:
    for n, x in enumerate(equation.inputs):
        if x in plan.rows:
            join = cuts.summed(equation, n, plan.rows[x])
            return None if join is None else (n, join)
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
        return list(_linked(equation, output, axis))
    summed = _summed(equation, plan)
    assert summed is not None
    result: list[int | None] = [None] * len(equation.inputs)
    n, _ = summed
    result[n] = plan.rows[equation.inputs[n]]
    if equation.name == "dot_general":
        result[1 - n] = cuts.partner(equation, n, result[n])
    return result


def _linked(
    equation: Equation, output: Value, axis: int | None
) -> Iterator[int | None]:
    for n in range(len(equation.inputs)):
        linked = None if axis is None else cuts.links(equation, n, output)
        yield None if linked is None or axis is None else linked[axis]


# --- Regions: a pass over the blocks of a component


class _Node(NamedTuple):
    """An equation of a region, with the axes of rows of its outputs and inputs."""

    number: int
    equation: Equation
    axis: int | None  # None where the rows are summed, or for all rows
    of_inputs: tuple[int | None, ...]


class _Nodes:
    """The equations that compute rows of values, and what they read of the others.

    A value is computed if `is_inside(value, axis)`, given its axis of rows, or None.
    """

    def __init__(self, is_inside: Callable[[Value, int | None], bool]):
        self.inputs: dict[tuple[Value, int | None], None] = {}
        self._nodes: dict[tuple[Equation, int | None], _Node] = {}
        self._is_inside = is_inside

    def ordered(self) -> list[_Node]:
        return sorted(self._nodes.values(), key=lambda node: node.number)

    def enter(
        self, equation: Equation, axis: int | None, of_inputs: list[int | None]
    ) -> None:
        todo = [(equation, axis, of_inputs)]
        while todo:
            equation, axis, of_inputs = todo.pop()
            if (equation, axis) in self._nodes:
                continue
            node = _Node(equation.number, equation, axis, tuple(of_inputs))
            self._nodes[equation, axis] = node
            for value, place in zip(equation.inputs, of_inputs, strict=True):
                maker = value.maker
                if maker is not None and self._is_inside(value, place):
                    todo.append((maker, place, list(_linked(maker, value, place))))
                elif value.constant is None or place is not None:
                    self.inputs[value, place] = None


@dataclasses.dataclass(eq=False)
class _Region:
    """A pass over the blocks of a component."""

    plan: Component
    turn: int
    length: int
    outputs: dict[Value, int | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.nodes = _Nodes(self._is_inside)

    def add(self, output: Value) -> list[Value]:
        """Adds an output, and returns the inputs that the region needs for it."""
        equation = output.maker
        assert equation is not None
        if output in self.outputs:
            return []
        axis = out_axis(equation, output, self.plan)
        self.outputs[output] = axis
        before = set(self.nodes.inputs)
        self.nodes.enter(equation, axis, axes_of(equation, self.plan))
        return [value for value, axis in self.nodes.inputs.keys() - before]

    def _is_inside(self, value: Value, axis: int | None) -> bool:
        """Checks whether the block of a value is computed in the region."""
        plan, maker = self.plan, value.maker
        if axis is None or maker is None:
            return False
        if plan.rows.get(value) == axis and maker in plan.kinds:
            return True
        if plan.kept.get(value) == axis and plan.complete.get(value, 0) > self.turn:
            return True
        return _is_mask(plan.area, value) and _is_cut(maker, value, axis)


def _is_cut(equation: Equation, output: Value, axis: int) -> bool:
    """Checks whether a block of an output follows from blocks of the inputs."""
    places = [cuts.links(equation, n, output) for n in range(len(equation.inputs))]
    if None in places or not cuts.keeps_rows(equation, output, axis):
        return False
    has_rows = any(x is not None and x[axis] is not None for x in places)
    return has_rows or equation.name in ("broadcast_in_dim", "iota")


def _planned(closed: core.ClosedJaxpr, limit: int) -> tuple[Graph, list, dict]:
    """Returns a program, the equations and regions to run in order, and scans."""
    program = levels.graph(closed.jaxpr, closed.consts, barred=limit)
    scans = _with_masks_inside(program, limit)
    plans = components(program, limit)
    while True:
        plan_of = {
            equation: plan
            for plan in plans
            for equation, kind in plan.kinds.items()
            if kind != "kept"
        }
        units = _units(program, plan_of)
        kept = {
            region.plan
            for region in units
            if isinstance(region, _Region)
            if not region.outputs.keys() <= region.plan.rows.keys()
        }
        if len(kept) < len({plan_of[x] for x in plan_of}):
            plans = [plan for plan in plans if plan in kept]  # others are whole anyway
            continue
        try:
            order = graphlib.TopologicalSorter(units).static_order()
            return program, list(order), scans
        except graphlib.CycleError as error:
            # A region would need its own outputs: the component is left whole.
            cyclic = next(x for x in error.args[1] if isinstance(x, _Region))
            plans = [plan for plan in plans if plan is not cyclic.plan]


def whole(closed: core.ClosedJaxpr, limit: int) -> list[str]:
    """Lists the values of all queries and keys that a program makes, with the maker."""
    program, order, _ = _planned(closed, limit)
    eqns = jaxprs.walk(closed.jaxpr)
    areas = [_area(eqn) for eqn in eqns if is_seed(eqn, limit)]
    lines: dict[str, None] = {}
    for unit in order:
        if isinstance(unit, _Region):
            large = [(x, "blocks") for x in unit.outputs if x in unit.plan.rows]
        else:
            large = [(x, unit.name) for x in unit.outputs if areas]
        for value, name in large:
            if value.size >= min(areas, default=0) // 2:
                lines[f"{value.aval.str_short()} of {name}"] = None
    return [*lines]


def run(closed: core.ClosedJaxpr, arguments: list, limit: int) -> list:
    """Runs a program with its components in blocks; returns the outputs."""
    program, order, scans = _planned(closed, limit)
    values = dict(zip(program.inputs, arguments, strict=True))
    for unit in order:
        if isinstance(unit, _Region):
            values.update(_blocks(unit, values, limit))
        elif unit in scans:
            inputs = [cuts.read(x, values) for x in unit.inputs]
            values.update(zip(unit.outputs, scans[unit](inputs), strict=True))
        else:
            cuts.run([unit], values)
    return [cuts.read(x, values) for x in program.outputs]


def _units(program: Graph, plan_of: dict[Equation, Component]) -> dict[Any, set]:
    """Finds what to run for the outputs: equations and regions, and what each needs."""
    regions: dict[tuple[Component, int], _Region] = {}
    units: dict[Any, set] = {}
    makers: dict[Value, Any] = {}
    todo, seen = list(program.outputs), set()
    needs: dict[Any, list[Value]] = collections.defaultdict(list)
    while todo:
        value = todo.pop()
        equation = value.maker
        if equation is None or value in seen:
            continue
        seen.add(value)
        plan = plan_of.get(equation)
        if plan is None:
            if equation not in units:
                units[equation] = set()
                needs[equation] += equation.inputs
                todo += equation.inputs
            makers[value] = equation
            continue
        turn = plan.passes[equation]
        length = _length(plan)
        region = regions.setdefault((plan, turn), _Region(plan, turn, length))
        units.setdefault(region, set())
        makers[value] = region
        more = region.add(value)
        needs[region] += more
        todo += more
    for unit, values in needs.items():
        units[unit] = {makers[x] for x in values if x in makers}
    return units


def _length(plan: Component) -> int:
    value, axis = next(iter(plan.rows.items()))
    return value.shape[axis]


def _blocks(region: _Region, values: dict[Value, Any], limit: int) -> dict:
    """Runs a region; returns its outputs."""
    length, plan = region.length, region.plan
    widest = max(x.size // x.shape[axis] for x, axis in plan.rows.items())
    rows = _rows(length, max(1, limit // 4 // widest))
    count = -(-length // rows)
    nodes = region.nodes.ordered()
    stacked = [x for x, axis in region.outputs.items() if axis is not None]
    sums = [x for x, axis in region.outputs.items() if axis is None]

    def block(totals: list, number: Any):
        # The last block begins earlier if rows do not divide the length; its first rows
        # were in the block before, and do not count in sums.
        first = jnp.minimum(number * rows, length - rows)
        positions = first + jnp.arange(rows)
        is_new = None if count * rows == length else positions >= number * rows
        here: dict[tuple[Value, int | None], Any] = {}
        for value, axis in region.nodes.inputs:
            whole = cuts.read(value, values)
            if axis is not None:
                whole = lax.dynamic_slice_in_dim(jnp.asarray(whole), first, rows, axis)
            here[value, axis] = whole
        for node in nodes:
            equation = node.equation
            inputs = [
                here[x, axis] if (x, axis) in here else x.constant
                for x, axis in zip(equation.inputs, node.of_inputs, strict=True)
            ]
            if node.axis is None:
                results = _of_block(node, inputs, is_new)
            else:
                results = cuts.for_rows(equation, inputs, node.axis, positions)
            here.update(
                ((x, node.axis), y)
                for x, y in zip(equation.outputs, results, strict=True)
            )
        totals = [
            _join(x.maker, plan)(total, here[x, None].astype(total.dtype))
            for x, total in zip(sums, totals, strict=True)
        ]
        return totals, [here[x, region.outputs[x]] for x in stacked]

    begin = [
        jnp.full(x.shape, cuts.neutral(x.maker, x.aval.dtype), _sum_dtype(x))
        for x in sums
    ]
    totals, parts = lax.scan(block, begin, jnp.arange(count))
    result = {
        x: total.astype(x.aval.dtype) for x, total in zip(sums, totals, strict=True)
    }
    for x, part in zip(stacked, parts, strict=True):
        axis = region.outputs[x]
        assert axis is not None
        result[x] = _joined(part, axis, length)
    return result


def _rows(length: int, largest: int) -> int:
    """Chooses the rows of a block: a divisor of the length, if one is near."""
    largest = min(largest, length)
    near = range(largest, max(largest // 2, 1) - 1, -1)
    return next((rows for rows in near if length % rows == 0), largest)


def _joined(parts: jax.Array, axis: int, length: int) -> jax.Array:
    """Joins blocks `[N, ...]` along an axis; the last may overlap the one before."""
    count, rows = parts.shape[0], parts.shape[axis + 1]
    whole = jnp.moveaxis(parts, 0, axis)
    shape = (*whole.shape[:axis], count * rows, *whole.shape[axis + 2 :])
    whole = whole.reshape(shape)
    if count * rows == length:
        return whole
    begin = lax.slice_in_dim(whole, 0, (count - 1) * rows, axis=axis)
    rest = length - (count - 1) * rows
    end = lax.slice_in_dim(whole, count * rows - rest, count * rows, axis=axis)
    return jnp.concatenate([begin, end], axis)


def _join(equation: Equation | None, plan: Component) -> Any:
    assert equation is not None
    summed = _summed(equation, plan)
    assert summed is not None
    return summed[1]


def _sum_dtype(value: Value) -> Any:
    """Returns the dtype of a sum over blocks: at least float32."""
    dtype = value.aval.dtype
    is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.float32 if is_short else dtype


def _of_block(node: _Node, inputs: list, is_new: Any) -> list:
    """Computes a block's part of a sum over all rows."""
    equation = node.equation
    (output,) = equation.outputs
    if is_new is not None:
        for n, axis in enumerate(node.of_inputs):
            if axis is None:
                continue
            shape = [1] * inputs[n].ndim
            shape[axis] = -1
            neutral = cuts.neutral(equation, inputs[n].dtype)
            inputs[n] = jnp.where(is_new.reshape(shape), inputs[n], neutral)
            break
    if equation.name != "dot_general" or _sum_dtype(output) == output.aval.dtype:
        return cuts.outputs(equation, inputs)
    params = equation.params | {"preferred_element_type": jnp.dtype(jnp.float32)}
    return [equation.eqn.primitive.bind(*inputs, **params)]


class Rows:
    """How any rows of large values follow from smaller values of a level.

    Weights of attention, for example, follow from queries, keys and the lengths of
    texts, all of them variables of the level that are there before an equation.
    """

    def __init__(self, values: Sequence[tuple[Value, int]], index: int, area: int):
        """Args: values, each with its axis of rows; the equation; queries x keys."""
        self._values, self._index, self._area = values, index, area
        self._nodes = _Nodes(self._is_inside)
        for value, axis in values:
            assert value.maker is not None
            of_inputs = list(_linked(value.maker, value, axis))
            self._nodes.enter(value.maker, axis, of_inputs)
        self._order = self._nodes.ordered()
        self._inputs = list(self._nodes.inputs)
        are_there = (
            x.constant is not None or self._is_there(x) for x, _ in self._inputs
        )
        firsts = (_is_cut(x.maker, x, axis) for x, axis in values if x.maker)
        self.is_possible = all(are_there) and all(firsts)
        self.variables = [x.variable for x, _ in self._inputs if x.constant is None]

    def _is_there(self, value: Value) -> bool:
        return value.variable is not None and value.index <= self._index

    def _is_inside(self, value: Value, axis: int | None) -> bool:
        maker = value.maker
        is_small = value.size < self._area // 2
        if maker is None or (self._is_there(value) and (is_small or axis is None)):
            return False
        return axis is None or _is_cut(maker, value, axis)

    def __call__(self, variables: Sequence, positions: jax.Array) -> list:
        """Computes the rows at some positions, from the values of the variables."""
        values, here = iter(variables), {}
        for value, axis in self._inputs:
            x = next(values) if value.constant is None else jnp.asarray(value.constant)
            here[value, axis] = x if axis is None else jnp.take(x, positions, axis)
        for node in self._order:
            inputs = [
                here[x, axis] if (x, axis) in here else x.constant
                for x, axis in zip(node.equation.inputs, node.of_inputs, strict=True)
            ]
            results = cuts.for_rows(node.equation, inputs, node.axis, positions)
            pairs = zip(node.equation.outputs, results, strict=True)
            here.update(((x, node.axis), result) for x, result in pairs)
        return [here[key] for key in self._values]


# --- Values that are computed again where they are read


class _Recipe:
    """How large values are computed from small ones."""

    def __init__(self, values: list[Value], is_large: Callable[[Value], bool]):
        self.values = values
        self.small: dict[Value, None] = {}
        steps: dict[Equation, None] = {}
        todo = list(values)
        for value in todo:
            if value.constant is not None:
                continue
            if value.maker is None or not is_large(value):
                self.small[value] = None
            elif value.maker not in steps:
                steps[value.maker] = None
                todo += value.maker.inputs
        self._steps = sorted(steps, key=lambda equation: equation.number)

    def __call__(self, small: Sequence) -> list:
        """Computes the values from the small ones."""
        values = dict(zip(self.small, small, strict=True))
        cuts.run(self._steps, values)
        return [cuts.read(x, values) for x in self.values]


class _Scan:
    """A scan that computes large constants, such as masks, in its body."""

    def __init__(self, scan: Equation, recipe: _Recipe, limit: int):
        num_consts, self.num_carry = jaxprs.carried(scan.eqn)
        self.params, self.limit, count = scan.params, limit, len(recipe.small)
        (body,) = jaxprs.inner(scan.eqn)
        avals = [*(x.aval for x in recipe.small), *body.in_avals[num_consts:]]

        def inside(*inputs):
            consts = recipe(inputs[:count])
            return core.jaxpr_as_fun(body)(*consts, *inputs[count:])

        self.num_consts, self.body = count, jax.make_jaxpr(inside)(*avals)
        scan.inputs = [*recipe.small, *scan.inputs[num_consts:]]

    def __call__(self, inputs: list) -> list:
        num_unscanned = self.num_consts + self.num_carry
        consts, scanned = inputs[: self.num_consts], inputs[num_unscanned:]

        def step(carry: list, x: list) -> tuple[list, list]:
            outputs = run(self.body, [*consts, *carry, *x], self.limit)
            return outputs[: self.num_carry], outputs[self.num_carry :]

        carry, stacked = lax.scan(
            step,
            inputs[self.num_consts : num_unscanned],
            scanned,
            length=self.params["length"],
            reverse=self.params["reverse"],
            unroll=self.params["unroll"],
        )
        return [*carry, *stacked]


def _with_masks_inside(program: Graph, limit: int) -> dict[Equation, _Scan]:
    """Finds scans whose attention reads masks, and what runs in their place."""
    scans = {}
    for equation in program.equations:
        if equation.name != "scan":
            continue
        eqns = jaxprs.walk(jaxprs.inner(equation.eqn)[0].jaxpr)
        area = min((_area(x) for x in eqns if is_seed(x, limit)), default=None)
        consts = equation.inputs[: jaxprs.carried(equation.eqn)[0]]
        if area is not None and any(_is_mask(area, x) for x in consts):
            recipe = _Recipe(consts, functools.partial(_is_mask, area))
            scans[equation] = _Scan(equation, recipe, limit)
    return scans


def _area(eqn: Any) -> int:
    *_, first, second = sorted(eqn.outvars[0].aval.shape)
    return first * second


def _is_mask(area: int, value: Value) -> bool:
    """Checks whether a value is large, but computed from small ones at little cost."""
    maker = value.maker
    is_large = value.size >= area // 2
    return is_large and maker is not None and maker.name in cuts.PULLED


def without_large_results(
    closed: core.ClosedJaxpr, count: int, limit: int
) -> tuple[core.ClosedJaxpr, Callable[[Sequence], list]]:
    """Replaces large results after the first `count` by what they are computed from.

    Returns the program with these results, and a function from them to the results
    after the first `count` of the given program.
    """
    program = levels.graph(closed.jaxpr, closed.consts, barred=limit)
    plans = components(program, limit)
    large = {value for plan in plans for value in plan.rows}
    area = min((plan.area for plan in plans), default=None)

    def is_large(value: Value) -> bool:
        return value in large or (area is not None and _is_mask(area, value))

    recipe = _Recipe(program.outputs[count:], is_large)
    results = [*program.outputs[:count], *recipe.small]

    def shortened(*arguments: Any) -> list:
        values = dict(zip(program.inputs, arguments, strict=True))
        cuts.run(program.equations, values)
        return [cuts.read(x, values) for x in results]

    return jax.make_jaxpr(shortened)(*closed.in_avals), recipe
