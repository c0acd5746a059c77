"""Equations of a program for blocks of rows, for `regions`.

`links` tells which axes of an equation's output are axes of its inputs, and `for_rows`
computes a block of the output from blocks of the inputs.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from mha_haiku.core.sites import jaxprs, levels
from mha_haiku.core.sites.levels import Equation, Value

_COMPARISONS = {
    *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to"),
    *("and", "or", "not", "xor"),
}
ELEMENTWISE = _COMPARISONS | {
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg", "sign", "abs"),
    *("pow", "integer_pow", "square", "one_minus_square", "sqrt", "rsqrt", "cbrt"),
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "tanh", "tan", "sin"),
    *("cos", "sinh", "cosh", "asin", "acos", "atan", "atan2", "asinh", "acosh"),
    *("atanh", "erf", "erfc", "erf_inv"),
    *("floor", "ceil", "round", "is_finite", "select_n", "clamp", "nextafter"),
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient"),
    *("name", "sharding_constraint", "pvary", "shift_left", "shift_right_logical"),
    *("shift_right_arithmetic", "population_count", "real", "imag", "conj", "complex"),
}
_REDUCTIONS: dict[str, Callable] = {
    "reduce_sum": jax.numpy.add,
    "reduce_max": jax.numpy.maximum,
    "reduce_min": jax.numpy.minimum,
    "reduce_and": jax.numpy.logical_and,
    "reduce_or": jax.numpy.logical_or,
}
_REDUCED = {*_REDUCTIONS, "reduce_prod", "argmax", "argmin"}
# The parameter with the axes that these work along.
_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
    **{"sort": "dimension", "rev": "dimensions", "concatenate": "dimension"},
    "split": "axis",
}
_RESIZED = {"slice", "dynamic_slice", "pad"}
# Primitives that make no sense of their input's numbers, or little: computed again for
# each block, not kept.
PULLED = ELEMENTWISE | {
    *("broadcast_in_dim", "reshape", "iota", "transpose", "squeeze", "gather"),
    *("scatter-add", "concatenate", "slice", "pad", "rev", "cumsum"),
}


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
    if name == "dot_general":
        result: list[int | None] = list(equation.shared(position))
        for side in (0, 1):
            free = equation.free(side)
            result += free if side == position else [None] * len(free)
        return result
    if name == "transpose":
        return list(params["permutation"])
    if name == "broadcast_in_dim":
        result = [None] * size
        for i, j in enumerate(params["broadcast_dimensions"]):
            if shape[i] == output.shape[j]:
                result[j] = i
        return result
    if name == "squeeze":
        return [i for i in range(len(shape)) if i not in params["dimensions"]]
    if name in _REDUCED:
        return [i for i in range(len(shape)) if i not in params["axes"]]
    if name == "reshape":
        return _reshaped(shape, output.shape)
    if name == "gather":
        return _gathered(equation, position, output)
    if name == "scatter-add":
        return _scattered(equation, position, output)
    if name == "top_k" or name in _ALONG or name in _RESIZED:
        # Other inputs are numbers: where a slice begins, or what it is padded with.
        return list(range(size)) if len(shape) == size else none
    if name in ("site", "optimization_barrier"):
        is_same = equation.outputs.index(output) == position
        return list(range(size)) if is_same else none
    if name in jaxprs.CUSTOM:
        return _through(equation, position, equation.outputs.index(output))
    if name in ELEMENTWISE:
        # An axis of size 1 is the same for all.
        axes = range(size) if len(shape) == size else ()
        same = [i if shape[i] == output.shape[i] else None for i in axes]
        return same or none
    return None


def _through(equation: Equation, position: int, number: int) -> list[int | None] | None:
    """Follows the axes of an input of a call to an output."""
    (closed,) = jaxprs.inner(equation.eqn)
    program = levels.graph(closed.jaxpr, closed.consts)
    value = program.inputs[position]
    found: dict[Value, list[int | None]] = {value: [*range(len(value.shape))]}
    for inside in program.equations:
        for n, value in enumerate(inside.inputs):
            for output in inside.outputs if value in found else ():
                linked = links(inside, n, output) or [None] * len(output.shape)
                axes = [None if i is None else found[value][i] for i in linked]
                before = found.get(output, axes)
                pairs = zip(before, axes, strict=True)
                found[output] = [j if i is None else i for i, j in pairs]
    return found.get(program.outputs[number])


def _reshaped(before: tuple, after: tuple) -> list[int | None]:
    def starts(shape: tuple) -> Iterator[tuple[int, int, int]]:
        count = 1
        for axis, size in enumerate(shape):
            yield axis, count, size
            count *= size

    at = {(count, size): axis for axis, count, size in starts(before) if size > 1}
    return [at.get((count, size)) for _, count, size in starts(after)]


def _gathered(
    equation: Equation, position: int, output: Value
) -> list[int | None] | None:
    numbers = equation.params["dimension_numbers"]
    indices = equation.inputs[1].shape
    rest = [i for i in range(len(output.shape)) if i not in numbers.offset_dims]
    of_indices: list[int | None] = [None] * len(output.shape)
    for axis, i in zip(rest, range(len(indices) - 1), strict=True):
        of_indices[axis] = i
    if position == 1:
        return of_indices
    shared = dict(
        zip(
            numbers.start_indices_batching_dims,
            numbers.operand_batching_dims,
            strict=True,
        )
    )
    of_operand = [shared.get(i) for i in of_indices]  # type: ignore[arg-type]
    kept = [
        i
        for i in range(len(equation.inputs[0].shape))
        if i not in numbers.collapsed_slice_dims
        and i not in numbers.operand_batching_dims
    ]
    for axis, i in zip(numbers.offset_dims, kept, strict=True):
        whole = equation.params["slice_sizes"][i] == equation.inputs[0].shape[i]
        of_operand[axis] = i if whole and i not in numbers.start_index_map else None
    return of_operand


def _scattered(equation: Equation, position: int, output: Value) -> list[int | None]:
    numbers, size = equation.params["dimension_numbers"], len(output.shape)
    if position == 0:
        return list(range(size))
    shared = dict(
        zip(
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
            strict=True,
        )
    )
    if position == 1:
        return [shared.get(i) for i in range(size)]
    updates, rest = equation.inputs[2].shape, _scattered_axes(equation)
    of_updates = [rest[shared[i]] if i in shared else None for i in range(size)]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windowed = [i for i in range(size) if i not in gone]
    for i, j in zip(windowed, numbers.update_window_dims, strict=True):
        is_placed = i in numbers.scatter_dims_to_operand_dims
        is_whole = updates[j] == output.shape[i] and not is_placed
        of_updates[i] = j if is_whole else None
    return of_updates


def _scattered_axes(equation: Equation) -> list[int]:
    """Lists the axes of a scatter's updates that are axes of the indices."""
    window = equation.params["dimension_numbers"].update_window_dims
    return [i for i in range(len(equation.inputs[2].shape)) if i not in window]


def keeps_rows(equation: Equation, output: Value, axis: int) -> bool:
    """Checks whether an output's axis may be cut in blocks, each computed alone."""
    params, name = equation.params, equation.name
    if name in _ALONG:
        along = params[_ALONG[name]]
        return axis not in (along if isinstance(along, tuple) else (along,))
    if name == "top_k":
        return axis != len(output.shape) - 1
    if name in _RESIZED:
        return equation.inputs[0].shape[axis] == output.shape[axis]
    if name == "scatter-add":
        return _scattered(equation, 2, output)[axis] is not None
    return True


def sums(equation: Equation, position: int, axis: int) -> bool:
    """Checks whether an equation sums over an input's axis, or finds the largest."""
    params, name = equation.params, equation.name
    if name == "dot_general":
        return axis in equation.contracted(position)
    if name == "scatter-add":
        return position == 2 and axis in _scattered_axes(equation)
    return name in _REDUCTIONS and axis in params["axes"]


def join(equation: Equation, first: jax.Array, second: jax.Array) -> jax.Array:
    """Joins the results of two blocks of rows that an equation sums over."""
    return _REDUCTIONS.get(equation.name, jax.numpy.add)(first, second)


def summed_axes(equation: Equation, position: int, axis: int) -> list[int | None]:
    """Finds the axis of each input that is summed over along with an input's axis."""
    axes: list[int | None] = [None] * len(equation.inputs)
    axes[position] = axis
    if equation.name == "dot_general":
        place = equation.contracted(position).index(axis)
        axes[1 - position] = equation.contracted(1 - position)[place]
    if equation.name == "scatter-add":
        axes[1] = _scattered_axes(equation).index(axis)
    return axes


def neutral(equation: Equation, dtype: Any) -> Any:
    """Returns the number that changes no result of a reduction."""
    if equation.name == "reduce_and":
        return np.array(True)
    if equation.name in ("reduce_max", "reduce_min"):
        sign = -1 if equation.name == "reduce_max" else 1
        if np.issubdtype(dtype, np.integer):
            limits = np.iinfo(dtype)
            return np.array(limits.min if sign < 0 else limits.max, dtype)
        return np.array(sign * np.inf).astype(dtype)
    return np.zeros((), dtype)


def for_rows(equation: Equation, values: list, axis: int, positions: jax.Array) -> list:
    """Computes the outputs for some rows, their positions along an axis of theirs."""
    params, name, rows = equation.params, equation.name, len(positions)
    shape = list(equation.outputs[0].shape)
    shape[axis] = rows
    if name == "broadcast_in_dim":
        return [lax.broadcast_in_dim(values[0], shape, params["broadcast_dimensions"])]
    if name == "reshape":
        return [lax.reshape(values[0], shape)]
    if name == "iota":
        if params["dimension"] == axis:
            x = positions.astype(params["dtype"])
            return [lax.broadcast_in_dim(x, shape, (axis,))]
        return [lax.broadcasted_iota(params["dtype"], shape, params["dimension"])]
    if name == "slice":
        limits = list(params["limit_indices"])
        limits[axis] = rows
        return [
            lax.slice(values[0], params["start_indices"], limits, params["strides"])
        ]
    if name == "dynamic_slice":
        return [lax.dynamic_slice(values[0], values[1:], shape)]
    if name == "gather":
        sizes = list(params["slice_sizes"])
        linked = links(equation, 0, equation.outputs[0])
        if linked is not None and linked[axis] is not None:
            if axis in params["dimension_numbers"].offset_dims:
                sizes[linked[axis]] = rows  # type: ignore[call-overload]
        numbers = params | {"slice_sizes": tuple(sizes)}
        return [equation.eqn.primitive.bind(*values, **numbers)]
    if name == "sharding_constraint":
        return values
    return outputs(equation, values)
