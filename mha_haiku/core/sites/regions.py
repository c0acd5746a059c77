"""Runs a program without its values of all queries and all keys.

Components of the program run for blocks of queries: `lax.scan` runs over blocks, and
keeps only what has lost the axis of keys (maxima and sums of rows, products with
values), or adds up what has lost the axis of queries (gradients of keys and values).
Masks and biases that are made of smaller values are computed for each block.

Where an equation needs all queries and keys at once, the value stays whole.
"""

import collections
import dataclasses
import functools
import graphlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from mha_haiku.core import tiles
from mha_haiku.core.sites import components, cuts, jaxprs, levels
from mha_haiku.core.sites.levels import Equation, Graph, Value

LIMIT = 2**24
"""Numbers of the largest values of queries and keys that are made whole."""

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

    def run(
        self,
        here: dict[tuple[Value, int | None], Any],
        positions: jax.Array,
        without_rows: Callable[[_Node, list], list] = lambda node, inputs: cuts.outputs(
            node.equation, inputs
        ),
    ) -> None:
        """Adds values of the rows at some positions to the inputs, in order."""
        for node in sorted(self._nodes.values(), key=lambda node: node.number):
            pairs = zip(node.equation.inputs, node.of_inputs, strict=True)
            inputs = [here.get((x, axis), x.constant) for x, axis in pairs]
            if node.axis is None:
                results = without_rows(node, inputs)
            else:
                results = cuts.for_rows(node.equation, inputs, node.axis, positions)
            keys = ((x, node.axis) for x in node.equation.outputs)
            here.update(zip(keys, results, strict=True))

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
                    todo.append(
                        (maker, place, list(components.linked(maker, value, place)))
                    )
                elif value.constant is None or place is not None:
                    self.inputs[value, place] = None


@dataclasses.dataclass(eq=False)
class _Region:
    """A pass over the blocks of a component."""

    plan: components.Component
    turn: int
    outputs: dict[Value, int | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.nodes = _Nodes(self._is_inside)

    def add(self, output: Value) -> list[Value]:
        """Adds an output, and returns the inputs that the region needs for it."""
        equation = output.maker
        assert equation is not None
        if output in self.outputs:
            return []
        axis = components.out_axis(equation, output, self.plan)
        self.outputs[output] = axis
        before = set(self.nodes.inputs)
        self.nodes.enter(equation, axis, components.axes_of(equation, self.plan))
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
        return components.is_mask(plan.area, value) and components.is_cut(
            maker, value, axis
        )


def _planned(closed: core.ClosedJaxpr, limit: int) -> tuple[Graph, list, dict]:
    """Returns a program, the equations and regions to run in order, and scans."""
    consts = closed.consts
    program = levels.graph(closed.jaxpr, consts, barred=limit, has_sites=False)
    scans = _with_masks_inside(program, limit)
    plans = components.plans(program, limit)
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
    seeds = [eqn for eqn in jaxprs.walk(closed.jaxpr) if components.is_seed(eqn, limit)]
    lengths = {tuple(sorted(components.result_shape(x))[-2:]) for x in seeds}

    def is_whole(value: Value) -> bool:
        counts = collections.Counter(value.shape)
        return any(not collections.Counter(both) - counts for both in lengths)

    lines: dict[str, None] = {}
    for unit in order:
        for value in unit.outputs:
            if isinstance(unit, _Region):
                name, rows, maker = "blocks", unit.plan.rows, value.maker
                reads = [x for x in maker.inputs if x in rows] if maker else []
                large = value in rows or any(value.size >= x.size for x in reads)
            else:
                name, large = unit.name, is_whole(value)
            if large:
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


def _units(
    program: Graph, plan_of: dict[Equation, components.Component]
) -> dict[Any, set]:
    """Finds what to run for the outputs: equations and regions, and what each needs."""
    regions: dict[tuple[components.Component, int], _Region] = {}
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
        region = regions.setdefault((plan, turn), _Region(plan, turn))
        units.setdefault(region, set())
        makers[value] = region
        more = region.add(value)
        needs[region] += more
        todo += more
    for unit, values in needs.items():
        units[unit] = {makers[x] for x in values if x in makers}
    return units


def _blocks(region: _Region, values: dict[Value, Any], limit: int) -> dict:
    """Runs a region; returns its outputs."""
    plan, length = region.plan, region.plan.length
    widest = max(x.size // x.shape[axis] for x, axis in plan.rows.items())
    rows = _rows(length, max(1, limit // 4 // widest))
    stacked = {x: axis for x, axis in region.outputs.items() if axis is not None}
    sums = [x for x, axis in region.outputs.items() if axis is None]

    def block(totals: list, positions: jax.Array, is_new: jax.Array | None):
        is_new = is_new if length % rows else None  # None if all rows are new
        here: dict[tuple[Value, int | None], Any] = {}
        for value, axis in region.nodes.inputs:
            whole = cuts.read(value, values)
            if axis is not None:
                whole = lax.dynamic_slice_in_dim(
                    jnp.asarray(whole), positions[0], rows, axis
                )
            here[value, axis] = whole
        region.nodes.run(here, positions, lambda *node: _of_block(plan, is_new, *node))
        totals = [
            cuts.join(_maker(x), total, here[x, None].astype(total.dtype))
            for x, total in zip(sums, totals, strict=True)
        ]
        return totals, [here[place] for place in stacked.items()]

    begin = [
        jnp.full(x.shape, cuts.neutral(_maker(x), x.aval.dtype), _sum_dtype(x))
        for x in sums
    ]
    totals, parts = tiles.over_rows(block, begin, length, rows, [*stacked.values()])
    result = dict(zip(stacked, parts, strict=True))
    for x, total in zip(sums, totals, strict=True):
        result[x] = total.astype(x.aval.dtype)
        if _maker(x).name == "scatter-add":
            result[x] += cuts.read(_maker(x).inputs[0], values)
    return result


def _maker(value: Value) -> Equation:
    assert value.maker is not None
    return value.maker


def _rows(length: int, largest: int) -> int:
    """Chooses the rows of a block: a divisor of the length, if one is near."""
    largest = min(largest, length)
    near = range(largest, max(largest // 2, 1) - 1, -1)
    return next((rows for rows in near if length % rows == 0), largest)


def _sum_dtype(value: Value) -> Any:
    """Returns the dtype of a sum over blocks: at least float32."""
    dtype = value.aval.dtype
    is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.float32 if is_short else dtype


def _of_block(
    plan: components.Component, is_new: Any, node: _Node, inputs: list
) -> list:
    """Computes a block's part of a sum over all rows."""
    equation = node.equation
    (output,) = equation.outputs
    n = components.summed(equation, plan)
    if is_new is not None and n is not None:
        shape = [1] * inputs[n].ndim
        shape[node.of_inputs[n]] = -1  # type: ignore[call-overload]
        neutral = cuts.neutral(equation, inputs[n].dtype)
        inputs[n] = jnp.where(is_new.reshape(shape), inputs[n], neutral)
    if equation.name == "scatter-add":
        inputs[0] = jnp.zeros_like(inputs[0])  # what is added to comes at the end
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
            of_inputs = list(components.linked(value.maker, value, axis))
            self._nodes.enter(value.maker, axis, of_inputs)
        inputs = [*self._nodes.inputs]
        are_there = (x.constant is not None or self._is_there(x) for x, _ in inputs)
        firsts = (components.is_cut(x.maker, x, axis) for x, axis in values if x.maker)
        self.is_possible = all(are_there) and all(firsts)
        self.variables = [x.variable for x, _ in inputs if x.constant is None]

    def _is_there(self, value: Value) -> bool:
        return value.variable is not None and value.index <= self._index

    def _is_inside(self, value: Value, axis: int | None) -> bool:
        maker = value.maker
        is_small = value.size < self._area // 2
        if maker is None or (self._is_there(value) and (is_small or axis is None)):
            return False
        return axis is None or components.is_cut(maker, value, axis)

    def __call__(self, variables: Sequence, positions: jax.Array) -> list:
        """Computes the rows at some positions, from the values of the variables."""
        values, here = iter(variables), {}
        for value, axis in self._nodes.inputs:
            x = next(values) if value.constant is None else jnp.asarray(value.constant)
            here[value, axis] = x if axis is None else jnp.take(x, positions, axis)
        self._nodes.run(here, positions)
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
        for equation in self._steps:
            if equation.name == "site":  # it was passed when the value was made
                inputs = (cuts.read(x, values) for x in equation.inputs)
                values.update(zip(equation.outputs, inputs, strict=True))
            else:
                cuts.run([equation], values)
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
        area = components.least_area(jaxprs.inner(equation.eqn)[0].jaxpr, limit)
        consts = equation.inputs[: jaxprs.carried(equation.eqn)[0]]
        if area is not None and any(components.is_mask(area, x) for x in consts):
            recipe = _Recipe(consts, functools.partial(components.is_mask, area))
            scans[equation] = _Scan(equation, recipe, limit)
    return scans


def without_large_results(
    closed: core.ClosedJaxpr, count: int, limit: int
) -> tuple[core.ClosedJaxpr, list[Any], list[int | None], Callable[[Sequence], list]]:
    """Replaces large results after the first `count` by what they are computed from.

    Returns the program with these sources after the first results; the shapes of all
    sources; for each of them the number of the argument that it is, None if the
    program makes it; and a function from sources to the results after the first
    `count` of the given program.
    """
    program = levels.graph(
        closed.jaxpr, closed.consts, barred=limit, enters_custom=False
    )
    large = {
        value for choices in components.large(program, limit) for value in choices[0]
    }
    area = components.least_area(closed.jaxpr, limit)

    def is_large(value: Value) -> bool:
        return value in large or (area is not None and components.is_mask(area, value))

    recipe = _Recipe(program.outputs[count:], is_large)
    number = {value: i for i, value in enumerate(program.inputs)}
    places = [number.get(x) for x in recipe.small]
    results = [*program.outputs[:count], *(x for x in recipe.small if x not in number)]

    def shortened(*arguments: Any) -> list:
        values = dict(zip(program.inputs, arguments, strict=True))
        cuts.run(program.equations, values)
        return [cuts.read(x, values) for x in results]

    first = jax.make_jaxpr(shortened)(*closed.in_avals)
    return first, [x.aval for x in recipe.small], places, recipe
