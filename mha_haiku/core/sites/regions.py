"""Runs a program without its values of all queries and all keys.

Components of the program run for blocks of queries: `lax.scan` runs over blocks, and
keeps only what has lost the axis of keys (maxima and sums of rows, products with
values), or adds up what has lost the axis of queries (gradients of keys and values).
Masks and biases that are made of smaller values are computed for each block.

Where an equation needs all queries and keys at once, the value stays whole.
"""

import collections
import functools
import graphlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from mha_haiku.core import tiles
from mha_haiku.core.sites import cuts, jaxprs, levels
from mha_haiku.core.sites.levels import Equation, Graph, Value

LIMIT = 2**24
"""Numbers of the largest values of queries and keys that are made whole."""


class _Block:
    """The equations that compute rows of values, and what they read of the others.

    Axes are axes of rows: None where rows are summed, and for values of all rows.
    """

    def __init__(self):
        self.inputs: dict[tuple[Value, int | None], None] = {}
        # Of an equation, and the axis of its outputs, the axes of its inputs.
        self._nodes: dict[tuple[Equation, int | None], list[int | None]] = {}

    def _of_inputs(self, value: Value, axis: int | None) -> list[int | None] | None:
        """Finds the axes from which a value is computed; None if it is only read."""
        raise NotImplementedError

    def enter(self, maker: Equation, axis: int | None, of_inputs: list) -> None:
        """Adds an equation, and what it needs."""
        todo = [(maker, axis, of_inputs)]
        for maker, axis, of_inputs in todo:
            if (maker, axis) in self._nodes:
                continue
            self._nodes[maker, axis] = of_inputs
            for value, place in zip(maker.inputs, of_inputs, strict=True):
                axes = self._of_inputs(value, place)
                if axes is not None and value.maker is not None:
                    todo.append((value.maker, place, axes))
                elif value.constant is None or place is not None:
                    self.inputs[value, place] = None

    def run(
        self,
        here: dict[tuple[Value, int | None], Any],
        positions: jax.Array,
        without_rows: Callable[[Equation, list, list], list],
    ) -> None:
        """Adds values of the rows at some positions to the inputs, in order."""
        for equation, axis in sorted(self._nodes, key=lambda node: node[0].number):
            of_inputs = self._nodes[equation, axis]
            pairs = zip(equation.inputs, of_inputs, strict=True)
            inputs = [here.get((x, place), x.constant) for x, place in pairs]
            if axis is None:
                results = without_rows(equation, of_inputs, inputs)
            else:
                results = cuts.for_rows(equation, inputs, axis, positions)
            keys = ((x, axis) for x in equation.outputs)
            here.update(zip(keys, results, strict=True))


class _Region(_Block):
    """A pass over the blocks of a component."""

    def __init__(self, plan: cuts.Component, turn: int, area: float):
        super().__init__()
        self.plan, self._turn, self._area = plan, turn, area
        self.outputs: dict[Value, int | None] = {}

    def _of_inputs(self, value: Value, axis: int | None) -> list[int | None] | None:
        cut = self.plan.block(value, axis)
        if cut is not None and (value in self.plan.rows or cut.turn >= self._turn):
            return cut.of_inputs
        if axis is None or not cuts.is_mask(self._area, value):
            return None
        return cuts.of_rows(_maker(value), value, axis)

    def blocks(self, values: dict[Value, Any], limit: int) -> dict[Value, Any]:
        """Runs the region; returns its outputs."""
        large = self.plan.rows.items()
        (length,) = {x.shape[axis] for x, axis in large}
        widest = max(x.size // length for x, _ in large)
        rows = _rows(length, max(1, limit // 4 // widest))
        stacked = {x: axis for x, axis in self.outputs.items() if axis is not None}
        sums = [x for x, axis in self.outputs.items() if axis is None]
        join = dict.fromkeys(cuts.SUMS, jnp.add) | cuts.REDUCTIONS

        def block(totals: list, positions: jax.Array, is_new: jax.Array):
            here, span = {}, tiles.Span(positions[0], rows)
            for value, axis in self.inputs:
                x = jnp.asarray(cuts.read(value, values))
                here[value, axis] = x if axis is None else tiles.take(x, span, axis)
            summed = functools.partial(_summed, is_new if length % rows else None)
            self.run(here, positions, summed)
            totals = [
                join[_maker(x).name](total, here[x, None].astype(total.dtype))
                for x, total in zip(sums, totals, strict=True)
            ]
            return totals, [here[place] for place in stacked.items()]

        begin = [self._of_no_rows(x, values) for x in sums]
        totals, parts = tiles.over_rows(block, begin, length, rows, [*stacked.values()])
        pairs = zip(sums, totals, strict=True)
        totals = {x: total.astype(x.aval.dtype) for x, total in pairs}
        return dict(zip(stacked, parts, strict=True)) | totals

    def _of_no_rows(self, value: Value, values: dict[Value, Any]) -> jax.Array:
        """Computes a sum of no rows: zeros, or what rows are added to."""
        maker, inputs = _maker(value), []
        for x, axis in zip(maker.inputs, self.plan.cuts[maker].of_inputs, strict=True):
            if axis is None:
                inputs.append(cuts.read(x, values))
            else:
                shape = (*x.shape[:axis], 0, *x.shape[axis + 1 :])
                inputs.append(jnp.zeros(shape, x.aval.dtype))
        return cuts.outputs(maker, inputs)[0].astype(_sum_dtype(value))


def _summed(is_new: Any, equation: Equation, of_inputs: list, inputs: list) -> list:
    """Computes a block's part of a sum over all rows."""
    # The last input is masked: what is summed, or one of the factors.
    if is_new is not None and equation.name in cuts.SUMS:
        shape = [1] * inputs[-1].ndim
        shape[of_inputs[-1]] = -1
        inputs[-1] = jnp.where(is_new.reshape(shape), inputs[-1], 0)
    if equation.name == "scatter-add":
        inputs[0] = jnp.zeros_like(inputs[0])  # what is added to is there before
    if equation.name != "dot_general":
        return cuts.outputs(equation, inputs)
    dtype = jnp.dtype(_sum_dtype(equation.outputs[0]))
    params = equation.params | {"preferred_element_type": dtype}
    return [equation.eqn.primitive.bind(*inputs, **params)]


def _maker(value: Value) -> Equation:
    assert value.maker is not None
    return value.maker


def _rows(length: int, largest: int) -> int:
    """Chooses the rows of a block: a divisor of the length, if one is near."""
    largest = min(largest, length)
    near = range(largest, largest // 2, -1)
    return next((rows for rows in near if length % rows == 0), largest)


def _sum_dtype(value: Value) -> Any:
    """Returns the dtype of a sum over blocks: at least float32."""
    dtype, is_float = value.aval.dtype, jnp.issubdtype(value.aval.dtype, jnp.floating)
    return jnp.promote_types(dtype, jnp.float32) if is_float else dtype


class Rows(_Block):
    """How any rows of large values follow from smaller values of a level.

    Weights of attention, for example, follow from queries, keys and the lengths of
    texts, all of them variables of the level that are there before an equation.
    """

    def __init__(self, values: Sequence[tuple[Value, int]], index: int, area: float):
        """Args: values, each with its axis of rows; the equation; queries x keys."""
        super().__init__()
        self._values, self._index, self._area = values, index, area
        for value, axis in values:
            of_inputs = cuts.of_rows(_maker(value), value, axis)
            if of_inputs is None:
                self.inputs[value, axis] = None
            else:
                self.enter(_maker(value), axis, of_inputs)
        read = [x for x, _ in self.inputs if x.constant is None]
        is_whole = not dict(values).keys().isdisjoint(read)
        self.is_possible = all(map(self._is_there, read)) and not is_whole
        self.variables = [x.variable for x in read]

    def _is_there(self, value: Value) -> bool:
        return value.variable is not None and value.index <= self._index

    def _of_inputs(self, value: Value, axis: int | None) -> list[int | None] | None:
        is_small = value.size < self._area // 2
        if value.maker is None or self._is_there(value) and (is_small or axis is None):
            return None
        if axis is None:
            return [None for _ in value.maker.inputs]
        return cuts.of_rows(value.maker, value, axis)

    def __call__(self, variables: Sequence, positions: jax.Array) -> list:
        """Computes the rows at some positions, from the values of the variables."""
        values, here = iter(variables), {}
        for value, axis in self.inputs:
            x = next(values) if value.constant is None else jnp.asarray(value.constant)
            here[value, axis] = x if axis is None else jnp.take(x, positions, axis)
        self.run(here, positions, lambda maker, _, inputs: cuts.outputs(maker, inputs))
        return [here[key] for key in self._values]


def run(closed: core.ClosedJaxpr, arguments: Sequence, limit: int) -> list:
    """Runs a program with its components in blocks; returns the outputs."""
    program, order = _planned(closed, limit)
    values = dict(zip(program.inputs, arguments, strict=True))
    for unit in order:
        if isinstance(unit, _Region):
            values.update(unit.blocks(values, limit))
        else:
            cuts.run([unit], values)
    return [cuts.read(x, values) for x in program.outputs]


def whole(closed: core.ClosedJaxpr, limit: int) -> list[str]:
    """Lists the values of all queries and keys that a program makes, with the maker."""
    shapes = cuts.seeds(closed.jaxpr, limit)
    both = [collections.Counter(sorted(shape)[-2:]) for shape in shapes]
    lines: dict[str, None] = {}
    for unit in _planned(closed, limit)[1]:
        is_region = isinstance(unit, _Region)
        name, rows = ("blocks", unit.plan.rows) if is_region else (unit.name, ())
        for value in unit.outputs:
            counts = collections.Counter(value.shape)
            if value in rows or any(lengths <= counts for lengths in both):
                lines[f"{value.aval.str_short()} of {name}"] = None
    return [*lines]


def _planned(closed: core.ClosedJaxpr, limit: int) -> tuple[Graph, list]:
    """Returns a program, and the equations and regions to run in order."""
    program = levels.graph(closed.jaxpr, closed.consts, barred=limit, has_sites=False)
    for equation in program.equations:
        if equation.name == "scan":
            _move_masks(equation, limit)
    area = cuts.least_area(closed.jaxpr, limit)
    plans = [
        min((cuts.Component(program, rows) for rows in choices), key=lambda x: x.cost)
        for choices in cuts.large(program, limit, area)
    ]
    while True:
        units = _units(program, plans, area)
        regions = [unit for unit in units if isinstance(unit, _Region)]
        useful = {x.plan for x in regions if x.outputs.keys() - x.plan.rows.keys()}
        if len(useful) < len(plans):
            # The values of the others are whole anyway.
            plans = [plan for plan in plans if plan in useful]
            continue
        try:
            return program, [*graphlib.TopologicalSorter(units).static_order()]
        except graphlib.CycleError as error:
            # A region would need its own outputs: the component is left whole.
            cyclic = next(x for x in error.args[1] if isinstance(x, _Region))
            plans = [plan for plan in plans if plan is not cyclic.plan]


def _units(program: Graph, plans: list[cuts.Component], area: float) -> dict[Any, set]:
    """Finds what to run for the outputs: equations and regions, and what each needs."""
    # Without keys, a region computes the blocks that it needs, and others the value.
    plan_of = {x: plan for plan in plans for x in plan.cuts if x and plan.has_keys(x)}
    regions: dict[tuple[cuts.Component, int], _Region] = {}
    makers: dict[Value, Any] = {}
    units: dict[Any, list[Value]] = {}
    todo = list(program.outputs)
    for value in todo:
        maker = value.maker
        if maker is None or value in makers:
            continue
        unit, plan, needs = maker, plan_of.get(maker), maker.inputs
        if plan is not None:
            cut = plan.cuts[maker]
            new = _Region(plan, cut.turn, area)
            unit = regions.setdefault((plan, cut.turn), new)
            unit.outputs[value] = cut.axis
            unit.enter(maker, cut.axis, cut.of_inputs)
            needs = [x for x, _ in unit.inputs]
        makers[value], units[unit] = unit, needs
        todo += needs
    return {x: {makers[y] for y in needs if y in makers} for x, needs in units.items()}


def recipe(
    values: Sequence[Value], is_large: Callable[[Value], bool]
) -> tuple[list[Value], Callable[[Sequence], list]]:
    """Finds the small values that large ones are computed from, and how."""
    small, steps, todo = {}, {}, list(values)
    for value in todo:
        if value.maker is not None and is_large(value):
            todo += [] if value.maker in steps else value.maker.inputs
            steps[value.maker] = None
        elif value.constant is None:
            small[value] = None
    ordered = sorted(steps, key=lambda equation: equation.number)

    def again(inputs: Sequence) -> list:
        here = dict(zip(small, inputs, strict=True))
        for equation in ordered:
            if equation.name == "site":  # it was passed when the value was made
                pairs = zip(equation.outputs, equation.inputs, strict=True)
                here.update({x: cuts.read(same, here) for x, same in pairs})
            else:
                cuts.run([equation], here)
        return [cuts.read(x, here) for x in values]

    return [*small], again


def _move_masks(scan: Equation, limit: int) -> None:
    """Lets the body of a scan compute the masks that its attention reads."""
    (body,) = jaxprs.inner(scan.eqn)
    area = cuts.least_area(body.jaxpr, limit)
    num_consts, num_carry = jaxprs.carried(scan.eqn)
    consts, rest = scan.inputs[:num_consts], scan.inputs[num_consts:]
    if not any(cuts.is_mask(area, x) for x in consts):
        return
    small, again = recipe(consts, functools.partial(cuts.is_mask, area))
    options = {key: scan.params[key] for key in ("length", "reverse", "unroll")}

    def inside(shared: list, *others: Any) -> list:
        return core.jaxpr_as_fun(body)(*again(shared), *others)

    @jax.jit
    def scanned(shared: list, init: list, rows: list) -> tuple[list, list]:
        def step(carry: list, row: list) -> tuple[list, list]:
            closed = jax.make_jaxpr(inside)(shared, *carry, *row)
            outputs = run(closed, [*shared, *carry, *row], limit)
            return outputs[:num_carry], outputs[num_carry:]

        return lax.scan(step, init, rows, **options)

    groups = small, rest[:num_carry], rest[num_carry:]
    closed = jax.make_jaxpr(scanned)(*([x.aval for x in group] for group in groups))
    scan.eqn = closed.eqns[0].replace(source_info=scan.eqn.source_info)
    scan.inputs = [*small, *rest]
