"""How programs are cut in blocks of rows, for `regions`.

`links` tells which axes of an equation's output are axes of its inputs, `of_rows` and
`of_sum` which blocks of its inputs a block of the output, or a sum over a block,
follows from, and `for_rows` computes a block.

A matrix product whose result is large compared with both operands has an axis of
queries and an axis of keys: the scores of attention, or logits. What is computed from
it, while both axes are there, is a component. All the way the axis of queries is like a
batch axis, so that it can be cut. No form of attention is recognized for this.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

from mha_haiku.core.sites import jaxprs
from mha_haiku.core.sites.levels import Equation, Graph, Value

ELEMENTWISE = {
    *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to", "and", "or"),
    *("not", "xor", "add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg"),
    *("sign", "abs", "pow", "integer_pow", "square", "one_minus_square", "sqrt"),
    *("rsqrt", "cbrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic"),
    *("tanh", "tan", "sin", "cos", "sinh", "cosh", "asin", "acos", "atan", "atan2"),
    *("asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "floor", "ceil", "round"),
    *("is_finite", "select_n", "clamp", "nextafter", "convert_element_type", "name"),
    *("reduce_precision", "copy", "copy_p", "stop_gradient", "sharding_constraint"),
    *("pvary", "shift_left", "shift_right_logical", "shift_right_arithmetic"),
    *("population_count", "real", "imag", "conj", "complex"),
}
REDUCTIONS: dict[str, Callable] = {
    "reduce_sum": jax.numpy.add,
    "reduce_max": jax.numpy.maximum,
    "reduce_min": jax.numpy.minimum,
    "reduce_and": jax.numpy.logical_and,
    "reduce_or": jax.numpy.logical_or,
}
# Rows that come twice change these, not the largest and smallest numbers.
SUMS = {"dot_general", "scatter-add", "reduce_sum"}
_REDUCED = {*REDUCTIONS, "reduce_prod", "argmax", "argmin"}
# The parameter with the axes that these work along.
_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
    **{"sort": "dimension", "rev": "dimensions", "concatenate": "dimension"},
    "split": "axis",
}
_RESIZED = {"slice", "dynamic_slice", "pad"}
# The parameter with the number of rows that these return, or read.
SIZES = {
    **{"broadcast_in_dim": "shape", "reshape": "new_sizes", "iota": "shape"},
    **{"slice": "limit_indices", "dynamic_slice": "slice_sizes"},
    "gather": "slice_sizes",
}
# Primitives that make no sense of their input's numbers, or little: computed again for
# each block, not kept.
PULLED = ELEMENTWISE | {
    *("broadcast_in_dim", "reshape", "iota", "transpose", "squeeze", "gather"),
    *("scatter-add", "concatenate", "slice", "pad", "rev", "cumsum"),
}
OF_ROWS = {*PULLED, *REDUCTIONS}
# A product is a seed if its result has so many times the numbers of its operands, in
# which the hidden values of a feed-forward layer have at most 4, and logits have dozens
# of times the numbers of what the tokens are.
_GROWTH = 4
_GROWTH_OF_TOKENS = 16


def run(equations: Iterable[Equation], values: dict[Value, Any]) -> None:
    """Runs equations in their order, and adds what they compute to the values."""
    for equation in equations:
        with jax.named_scope(jaxprs.path(equation.eqn) or "/"):
            results = outputs(equation, [read(x, values) for x in equation.inputs])
        values.update(zip(equation.outputs, results, strict=True))


def read(value: Value, values: dict[Value, Any]) -> Any:
    """Returns a value of the program, or its constant."""
    return values[value] if value.constant is None else value.constant


def outputs(equation: Equation, inputs: list) -> list:
    """Computes the outputs of an equation."""
    eqn = equation.eqn
    held = jaxprs.inner(eqn)
    if not held:
        results = eqn.primitive.bind(*inputs, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]
    # Primitives that hold programs differ in how they are bound.
    pairs = zip(eqn.invars, inputs, strict=True)
    values = {x: value for x, value in pairs if not isinstance(x, core.Literal)}
    part = jaxprs.part(held[0].jaxpr, values, eqn.outvars, [eqn])
    return jaxprs.bound(part, [*values.values()])


# --- Axes


def links(equation: Equation, position: int, output: Value) -> list[int | None] | None:
    """Returns the axis of an input for each axis of an output, None for a new one.

    Returns None where that is not known.
    """
    params, name = equation.params, equation.name
    shape, size = equation.inputs[position].shape, len(output.shape)
    none: list[int | None] = [None] * size
    same: list[int | None] = [*range(size)] if len(shape) == size else none
    if name == "dot_general":
        free: list[list] = [[None] * len(equation.free(side)) for side in (0, 1)]
        free[position] = equation.free(position)
        return [*equation.shared(position), *free[0], *free[1]]
    if name == "transpose":
        return list(params["permutation"])
    if name == "broadcast_in_dim":
        places = {j: i for i, j in enumerate(params["broadcast_dimensions"])}
        axes = [places.get(j) for j in range(size)]
        pairs = zip(axes, output.shape, strict=True)
        return [None if i is None or shape[i] != n else i for i, n in pairs]
    if name == "squeeze" or name in _REDUCED:
        gone = params["dimensions" if name == "squeeze" else "axes"]
        return [i for i in range(len(shape)) if i not in gone]
    if name == "reshape":
        return _reshaped(shape, output.shape)
    if name in ("gather", "scatter-add"):
        of_operand, of_indices = _windows(equation)
        if name == "gather":
            return (of_operand, of_indices)[position]
        at = {i: axis for axis, i in enumerate(of_operand) if i is not None}
        of_updates = [at.get(i) for i in range(size)]
        of_these = [None if axis is None else of_indices[axis] for axis in of_updates]
        return (same, of_these, of_updates)[position]
    if name == "top_k" or name in _ALONG or name in _RESIZED:
        # Other inputs are numbers: where a slice begins, or what it is padded with.
        return same
    if name in ("site", "optimization_barrier"):
        return same if equation.outputs.index(output) == position else none
    if name in ELEMENTWISE:
        # An axis of size 1 is the same for all.
        is_same = [i is not None and shape[i] == output.shape[i] for i in same]
        return [i if x else None for i, x in zip(same, is_same, strict=True)]
    # What is kept is the same with any axes of calls, which other programs inline.
    is_alike = name in jaxprs.CUSTOM and shape == output.shape
    return same if is_alike else None


def _reshaped(before: tuple, after: tuple) -> list[int | None]:
    # An axis is the same with the same size, and as many numbers before it.
    first, second = (
        zip(np.cumprod((1, *shape)), shape, strict=False) for shape in (before, after)
    )
    at = {place: axis for axis, place in enumerate(first) if place[1] > 1}
    return [at.get(place) for place in second]


def _windows(equation: Equation) -> tuple[list[int | None], list[int | None]]:
    """Finds the axes of the operand, and of the indices, that axes of windows are.

    Windows are what a gather returns, or what a scatter adds.
    """
    numbers = equation.params["dimension_numbers"]
    operand, indices, *updates = equation.inputs
    if updates:
        windows, own = updates[0].shape, numbers.update_window_dims
        placed, gone = (
            numbers.scatter_dims_to_operand_dims,
            numbers.inserted_window_dims,
        )
        batches = numbers.scatter_indices_batching_dims
    else:
        windows, own = equation.outputs[0].shape, numbers.offset_dims
        placed, gone = numbers.start_index_map, numbers.collapsed_slice_dims
        batches = numbers.start_indices_batching_dims
    shared = dict(zip(batches, numbers.operand_batching_dims, strict=True))
    gone = {*gone, *numbers.operand_batching_dims}
    left = iter([i for i in range(len(operand.shape)) if i not in gone])
    rest = iter(range(len(indices.shape) - 1))
    of_operand, of_indices = [], []
    for axis, size in enumerate(windows):
        i, j = (next(left), None) if axis in own else (None, next(rest))
        is_whole = i is not None and size == operand.shape[i] and i not in placed
        of_operand.append(i if is_whole else shared.get(j))  # type: ignore[arg-type]
        of_indices.append(j)
    return of_operand, of_indices


def of_rows(equation: Equation, output: Value, axis: int) -> list[int | None] | None:
    """Finds the axes along which blocks of the inputs make a block of an output.

    None if a block of the output needs more, or that is not known.
    """
    params, name = equation.params, equation.name
    linked = [links(equation, n, output) for n in range(len(equation.inputs))]
    axes = [None if x is None else x[axis] for x in linked]
    is_cut = name != "top_k" or axis != len(output.shape) - 1
    if name in _ALONG:
        is_cut = axis not in np.atleast_1d(params[_ALONG[name]])
    elif name in _RESIZED:
        is_cut = equation.inputs[0].shape[axis] == output.shape[axis]
    elif name == "scatter-add":
        is_cut = axes[2] is not None
    has_rows = name in ("broadcast_in_dim", "iota") or any(x is not None for x in axes)
    return axes if is_cut and has_rows and None not in linked else None


def of_sum(equation: Equation, position: int, axis: int) -> list[int | None] | None:
    """Finds the axes of the inputs that are summed over along with an input's axis.

    Or over which the largest is found. None if the equation does neither.
    """
    axes: list[int | None] = [None] * len(equation.inputs)
    axes[position] = axis
    if equation.name == "dot_general" and axis in equation.contracted(position):
        place = equation.contracted(position).index(axis)
        axes[1 - position] = equation.contracted(1 - position)[place]
    elif equation.name == "scatter-add" and position == 2:
        axes[1] = _windows(equation)[1][axis]
        return None if axes[1] is None else axes
    elif equation.name not in REDUCTIONS or axis not in equation.params["axes"]:
        return None
    return axes


def for_rows(equation: Equation, values: list, axis: int, positions: jax.Array) -> list:
    """Computes the outputs for some rows, their positions along an axis of theirs."""
    params, name, (output, *_) = equation.params, equation.name, equation.outputs
    place: int | None = axis
    if name == "gather":
        is_window = axis in params["dimension_numbers"].offset_dims
        place = _windows(equation)[0][axis] if is_window else None
    if name == "iota" and params["dimension"] == axis:
        shape = (*output.shape[:axis], len(positions), *output.shape[axis + 1 :])
        x = positions.astype(params["dtype"])
        return [lax.broadcast_in_dim(x, shape, (axis,))]
    if name in SIZES and place is not None:
        sizes = list(params[SIZES[name]])
        sizes[place] = len(positions)
        params = params | {SIZES[name]: tuple(sizes)}
        return [equation.eqn.primitive.bind(*values, **params)]
    return values if name == "sharding_constraint" else outputs(equation, values)


# --- Components: values of all queries and all keys, and their passes


def seeds(jaxpr: core.Jaxpr, limit: int) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of products of all queries and all keys, also inside calls."""
    for eqn in jaxprs.walk(jaxpr):
        if _is_seed(eqn, limit):
            yield getattr(eqn.outvars[0].aval, "shape", ())


def least_area(jaxpr: core.Jaxpr, limit: int) -> float:
    """Finds the least number of queries times keys; inf without a product of both."""
    areas = (math.prod(sorted(shape)[-2:]) for shape in seeds(jaxpr, limit))
    return min(areas, default=math.inf)


def _is_seed(eqn: Any, limit: int) -> bool:
    """Checks whether an equation may be a product of all queries and all keys."""
    if eqn.primitive.name != "dot_general" or eqn.outvars[0].aval.size <= limit:
        return False
    _, (shared, _) = eqn.params["dimension_numbers"]
    size, operands = eqn.outvars[0].aval.size, [x.aval.size for x in eqn.invars]
    is_large = bool(shared) and size >= _GROWTH * sum(operands)
    return is_large or size >= _GROWTH_OF_TOKENS * min(operands)


def is_mask(area: float, value: Value) -> bool:
    """Checks whether a value is large, but computed from small ones at little cost."""
    maker = value.maker
    return value.size >= area / 2 and maker is not None and maker.name in PULLED


class Cut(NamedTuple):
    """How an equation is computed for blocks of rows."""

    turn: int  # the pass
    axis: int | None  # of the outputs; None where the rows are summed
    of_inputs: list[int | None]


class Component:
    """The values that have an axis of queries and one of keys of the same attention.

    Their axes `rows` are cut in blocks. A value of a block that needs a sum over all
    blocks is computed in a further pass, in which scores are computed again: gradients
    take two.
    """

    def __init__(self, program: Graph, rows: dict[Value, int]):
        self.rows = dict(rows)
        # An equation that is not in here is run by itself, before or after.
        self.cuts: dict[Equation | None, Cut] = {}
        # The first pass in which a whole value is there.
        self.complete: dict[Value, int] = {}
        self.num_whole = 0  # values that an equation needs whole
        for equation in program.equations:
            self._enter(equation)

    @property
    def cost(self) -> tuple[int, int, int]:
        """Compares two ways of cutting: by whole values, passes, sums over blocks."""
        count = max((cut.turn for cut in self.cuts.values()), default=0)
        summed = sum(cut.axis is None for cut in self.cuts.values())
        return self.num_whole, count, summed

    def block(self, value: Value, axis: int | None) -> Cut | None:
        """Returns how blocks of a value along an axis are computed, if they are."""
        cut = None if axis is None else self.cuts.get(value.maker)
        return cut if cut is not None and cut.axis == axis else None

    def has_keys(self, equation: Equation) -> bool:
        """Checks whether an equation has values of queries and keys."""
        return any(x in self.rows for x in (*equation.inputs, *equation.outputs))

    def _enter(self, equation: Equation) -> None:
        late = max((self.complete.get(x, 0) for x in equation.inputs), default=0)
        cut = self._cut(equation, late)
        if cut is None:
            values = *equation.inputs, *equation.outputs
            self.num_whole += sum(x in self.rows for x in values)
            for output in equation.outputs:
                self.rows.pop(output, None)
        else:
            self.cuts[equation] = cut
            late = cut.turn + 1
        self.complete.update(dict.fromkeys(equation.outputs, late))

    def _cut(self, equation: Equation, late: int) -> Cut | None:
        has_keys = self.has_keys(equation)
        # Products, and what may stand for a layer, are computed once, not by block.
        if not has_keys and not (late and equation.name in OF_ROWS):
            return None
        before = {}  # the axes of the inputs that are cut
        for n, value in enumerate(equation.inputs):
            cut = self.cuts.get(value.maker)
            if cut is not None and (value in self.rows or not has_keys):
                if cut.axis is not None:
                    before[n] = cut.axis
        if not equation.outputs or not (before or has_keys):
            return None
        output = equation.outputs[0]
        is_row = output in self.rows
        for axis in [self.rows[output]] if is_row else range(len(output.shape)):
            of_inputs = of_rows(equation, output, axis)
            if of_inputs is None:
                continue
            if all(of_inputs[n] == place for n, place in before.items()):
                break
        else:
            axis, of_inputs = None, None
            if before and has_keys and len(equation.outputs) == 1:
                of_inputs = of_sum(equation, *min(before.items()))
        if of_inputs is None:
            return None
        turn = 0
        for value, place in zip(equation.inputs, of_inputs, strict=True):
            cut = self.block(value, place)
            turn = max(turn, self.complete.get(value, 0) if cut is None else cut.turn)
        # What has no keys is computed in blocks only where a pass needs it at once.
        return Cut(turn, axis, of_inputs) if has_keys or turn < late else None


def large(program: Graph, limit: int, area: float) -> list[tuple[dict, ...]]:
    """Finds the values with queries and keys of each attention, and their axes.

    For each there are two choices of what is cut: either axis, by value. A mask that is
    summed, or whose largest number is found, is a component of its own.
    """
    axes: dict[Value, dict[int, int]] = {}
    joined: list[int] = []  # a union of sets: axes with the same label are the same

    def label(axis: int) -> int:
        while joined[axis] != axis:
            axis = joined[axis]
        return axis

    masks: dict[Value, list[int]] = {}
    for equation in program.equations:
        marked = [(n, axes[x]) for n, x in enumerate(equation.inputs) if x in axes]
        if not marked:
            if _is_seed(equation.eqn, limit):
                # The longest axes of the result that come from either operand.
                (output,), begin = equation.outputs, len(equation.shared(0))
                middle = begin + len(equation.free(0))
                sides = range(begin, middle), range(middle, len(output.shape))
                if all(sides):
                    both = [max(x, key=output.shape.__getitem__) for x in sides]
                    axes[output] = {x: len(joined) + i for i, x in enumerate(both)}
                    joined += axes[output].values()
            elif equation.name not in PULLED:
                for x in equation.inputs:
                    if is_mask(area, x):
                        places = sorted(range(len(x.shape)), key=x.shape.__getitem__)
                        masks[x] = places[-2:]
            continue
        for output in equation.outputs:
            after: dict[int, int] = {}
            for n, before in marked:
                linked = links(equation, n, output) or ()
                mine = {j: before[i] for j, i in enumerate(linked) if i in before}
                if equation.name == "dot_general" and len(mine) < 2:
                    continue
                for j, axis in mine.items():
                    joined[label(after.setdefault(j, axis))] = label(axis)
            if len(after) == 2:
                axes[output] = after
    groups = collections.defaultdict(dict)
    for value, pair in axes.items():
        place_of = {label(axis): place for place, axis in pair.items()}
        groups[frozenset(place_of)][value] = place_of
    attention = [
        tuple({v: x[axis] for v, x in values.items()} for axis in key)
        for key, values in groups.items()
        if len(key) == 2  # else an axis is of queries and of keys
    ]
    return attention + [tuple({x: axis} for axis in two) for x, two in masks.items()]
