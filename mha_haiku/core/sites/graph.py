"""What recognition reads: a level of a program as a graph, and its axes followed.

Calls are spelled out: `jnp.where` is one, and a softmax or a product may be. What is
computed inside of a call has a variable of the level only where the call returns it.
Equations of the same primitive, parameters and inputs have outputs of the same number.

An axis is a tuple of factors of its size, numbers that are known to `Axes`. A reshape
from `[B, T, H * V]` to `[B, T, H, V]` splits a factor in two, for all who hold it. Axes
of size 1 have no factors: they may come and go. A `Layout` shows a value in canonical
axes.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mha_haiku.core.sites import jaxprs

Array = jax.Array

Axis = tuple[int, ...]

# How many values a walk may pass; between a softmax and its products lie a few.
FARTHEST = 100

# An axis of the output may be longer or shorter than the input's.
_RESIZING = {"slice", "dynamic_slice", "concatenate", "pad", "split"}
_REORDERING = {"sort", "rev", "gather", "scatter", "cumsum", "cumlogsumexp", "cumprod"}
_CALLS = {*jaxprs.CALLS, *jaxprs.CUSTOM, *jaxprs.REMAT}
# What returns the same numbers, in another form.
NEUTRAL = {
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient"),
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "sharding_constraint"),
    *("optimization_barrier", "name", "pvary", "site"),
}
# What attention begins and ends with, and what holds it.
_TELLING = {"dot_general", "exp", "exp2", *_CALLS}


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """What a variable or a literal stands for."""

    aval: Any  # its shape and dtype
    number: int  # the same for values that are equal since they are computed alike
    # The equation that computes it; None for inputs and literals.
    maker: "Equation | None" = None
    # Whether it comes out of a product or a loop: it is no mere parameter.
    is_made: bool = False
    is_random: bool = False  # whether random bits made it
    # The equations that read it.
    users: list["Equation"] = dataclasses.field(default_factory=list)
    # The variable of the level that holds it, if one does.
    variable: core.Var | None = None
    index: int = 0  # the first equation of the level that may read the variable
    is_output: bool = False  # whether the level returns it

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; () for what is no array, such as a token."""
        return getattr(self.aval, "shape", ())

    @property
    def is_data(self) -> bool:
        return bool(self.shape) and jnp.issubdtype(self.aval.dtype, jnp.inexact)


@dataclasses.dataclass(eq=False, slots=True)
class Equation:
    """An equation of the level, or of a call in it."""

    eqn: core.JaxprEqn
    name: str  # the name of its primitive
    index: int  # its place in the level, or the place of the call
    calls: tuple[int, ...]  # a number for each call around it, from the outermost
    inputs: list[Value]  # what it reads
    # Whether it is of an attention that has its own sites; of products, exponentials
    # and what is in calls.
    has_sites: bool
    outputs: list[Value] = dataclasses.field(default_factory=list)  # what it computes

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params


def equations(jaxpr: core.Jaxpr) -> list[Equation]:
    """Lists the equations of a level, in order; for calls, the equations inside."""
    result, count = [], itertools.count()
    numbers: dict[Any, int] = {}

    def number(*key):
        try:
            return numbers.setdefault(key, len(numbers))
        except TypeError:  # not hashable
            return numbers.setdefault(object(), len(numbers))

    def value_of(atom, values):
        if not isinstance(atom, core.Literal):
            return values[atom]
        return Value(atom.aval, number(atom.aval, np.asarray(atom.val).tobytes()))

    def given(variables, **held):
        return {x: Value(x.aval, number(x), **held) for x in variables}

    def enter(jaxpr, values, index, calls, is_seen=False):
        for place, eqn in enumerate(jaxpr.eqns):
            place = place if index is None else index
            inputs = [value_of(x, values) for x in eqn.invars]
            name, inner = eqn.primitive.name, jaxprs.inner(eqn)
            has_own = is_seen or (name in _TELLING and jaxprs.is_marked(eqn))
            joined = _joined(name, eqn.params, inputs)
            if name in _CALLS:
                called = inner[0].jaxpr
                within = given(called.constvars)
                within.update(zip(called.invars, inputs, strict=True))
                enter(called, within, place, (*calls, next(count)), has_own)
                outputs = [value_of(x, within) for x in called.outvars]
            elif joined:
                source, called = joined
                within = dict(zip(called.invars, [source], strict=True))
                enter(called, within, place, calls, has_own)
                outputs = [value_of(x, within) for x in called.outvars]
            else:
                equation = Equation(eqn, name, place, calls, inputs, has_own)
                result.append(equation)
                is_made = bool(inner) or name in ("dot_general", "conv_general_dilated")
                is_made = is_made or any(x.is_made for x in inputs)
                is_random = _is_random(name) or any(x.is_random for x in inputs)
                read = object() if eqn.effects else tuple(x.number for x in inputs)
                key = eqn.primitive, tuple(eqn.params.items()), read
                outputs = [
                    Value(x.aval, number(*key, i), equation, is_made, is_random)
                    for i, x in enumerate(eqn.outvars)
                ]
                equation.outputs = outputs
                for x in inputs:
                    x.users.append(equation)
            for variable, value in zip(eqn.outvars, outputs, strict=True):
                values[variable] = value
                is_held = index is None and not isinstance(variable, core.DropVar)
                if is_held and value.variable is None:
                    value.variable, value.index = variable, place + 1

    values = {
        x: Value(x.aval, number(x), variable=x)
        for x in (*jaxpr.constvars, *jaxpr.invars)
    }
    enter(jaxpr, values, None, ())
    for x in jaxpr.outvars:
        value_of(x, values).is_output = True
    return result


def _is_random(name: str) -> bool:
    return name.startswith(("random_", "threefry", "rng_"))


def _joined(name, params, pieces) -> tuple[Value, core.Jaxpr] | None:
    """Writes a concatenation of all pieces of a value as reshapes of the value."""
    # Pieces of a split, or slices, that were maybe reshaped alike: heads that are taken
    # apart, and put together along another axis.
    if name not in ("concatenate", "stack") or len(pieces) < 2:
        return None
    chain: list[Equation] = []
    while True:
        makers = [piece.maker for piece in pieces]
        first = makers[0]
        if first is None or any(x is None or x.name != first.name for x in makers):
            return None
        if first.name not in ("squeeze", "reshape", "transpose", "broadcast_in_dim"):
            break
        if any(x.params != first.params for x in makers):
            return None
        chain.append(first)
        pieces = [maker.inputs[0] for maker in makers]
    source, shape = first.inputs[0], pieces[0].shape
    differing = [i for i, size in enumerate(shape) if size != source.shape[i]]
    if len(differing) != 1 or any(x.inputs[0] is not source for x in makers):
        return None
    (axis,) = differing
    starts = [i * shape[axis] for i in range(len(pieces))]
    if first.name == "split":
        is_whole = all(x is y for x, y in zip(pieces, first.outputs, strict=False))
    elif first.name == "slice" and not set(first.params["strides"] or ()) - {1}:
        is_whole = starts == [x.params["start_indices"][axis] for x in makers]
    else:
        return None
    sizes = {piece.shape for piece in pieces}
    if (
        not is_whole
        or len(sizes) > 1
        or len(pieces) * shape[axis] != source.shape[axis]
    ):
        return None

    def reshaped(x):
        x = x.reshape(*shape[:axis], len(pieces), *shape[axis:])
        x = jnp.moveaxis(x, axis, 0)
        for equation in reversed(chain):
            bind = functools.partial(equation.eqn.primitive.bind, **equation.params)
            x = jax.vmap(bind)(x)
        if name == "stack":
            return jnp.moveaxis(x, 0, params["axis"])
        place = params["dimension"]
        x = jnp.moveaxis(x, 0, place)
        return x.reshape(*x.shape[:place], -1, *x.shape[place + 2 :])

    return source, jax.make_jaxpr(reshaped)(source.aval).jaxpr


def primitives(jaxpr: core.Jaxpr) -> set[str]:
    """Returns the primitives of a level and of its calls, but for sites' attention."""

    def enters(eqn):
        return eqn.primitive.name in _CALLS and not jaxprs.is_marked(eqn)

    walk = jaxprs.walk(jaxpr, enters)
    return {eqn.primitive.name for eqn in walk if not jaxprs.is_marked(eqn)}


class Step(NamedTuple):
    """A value on a walk."""

    value: Value
    axes: list[Axis]
    # Axes that the walk must not lose: the axis of keys, say.
    marks: tuple[Axis, ...] = ()


class Axes:
    """The factors of axes."""

    def __init__(self):
        self._sizes: list[int] = []
        self._parts: dict[int, Axis] = {}

    def new(self, size: int) -> Axis:
        if size == 1:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def of(self, *axes: Iterable[int]) -> Axis:
        """Lists the factors of axes, in order, after all splits."""
        result = []
        for factor in itertools.chain.from_iterable(axes):
            parts = self._parts.get(factor)
            result += [factor] if parts is None else self.of(parts)
        return tuple(result)

    def size(self, axis: Iterable[int]) -> int:
        return math.prod(self._sizes[x] for x in self.of(axis))

    def start(self, value: Value, *marked: int) -> Step:
        """Makes a step to begin with, some of whose axes are marked."""
        axes = [self.new(size) for size in value.shape]
        return Step(value, axes, tuple(axes[i] for i in marked))

    def back(self, equation: Equation, position: int, step: Step) -> Step | None:
        """Steps from an equation's output back to an input; None if marks end."""
        value, marks = equation.inputs[position], step.marks
        if equation.name == "reshape":
            axes = self._regrouped(step.axes, value.shape)
            return None if axes is None else Step(value, axes, marks)
        linked = links(equation, position, step.value)
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
        return Step(value, axes, marks) if has_marks else None

    def ahead(self, equation: Equation, position: int, step: Step) -> Step | None:
        """Steps from an equation's input ahead to its output."""
        value = equation.outputs[position if len(equation.outputs) > 1 else 0]
        if equation.name == "reshape":
            axes = self._regrouped(step.axes, value.shape)
            return None if axes is None else Step(value, axes, step.marks)
        linked = links(equation, position, value)
        if linked is None:
            return None
        axes = [
            step.axes[link]
            if link is not None and step.value.shape[link] == size
            else self.new(size)
            for link, size in zip(linked, value.shape, strict=True)
        ]
        return Step(value, axes, step.marks)

    def walk(
        self,
        step: Step | None,
        passing: Callable[[Equation, Value], list[int]],
        goal: Callable[[Equation, Step], Any],
        seen: set[Value] | None = None,
    ) -> tuple[list[Step], Any] | None:
        """Walks back to a goal, depth first: the steps, and what the goal gives.

        `passing` goes from an equation and its output to the inputs that may be passed;
        `goal` from an equation and the step that is its output to what is sought, or
        None. Values in `seen` were passed before.
        """
        seen = set() if seen is None else seen
        equation = step and step.value.maker
        if equation is None or step.value in seen or len(seen) > FARTHEST:
            return None
        seen.add(step.value)
        found = goal(equation, step)
        if found is not None:
            return [step], found
        for position in passing(equation, step.value):
            before = self.back(equation, position, step)
            walk = self.walk(before, passing, goal, seen)
            if walk is not None:
                return [step, *walk[0]], walk[1]
        return None

    def _regrouped(self, axes, shape) -> list[Axis] | None:
        """Regroups the axes for a reshape; None if sizes have no common factors."""
        rest, result = list(self.of(*axes)), []
        for size in shape:
            axis = []
            while size > 1:
                factor = rest.pop(0)
                own = self._sizes[factor]
                if own > size and own % size == 0:
                    self._parts[factor] = self.new(size) + self.new(own // size)
                    (factor, inner), own = self._parts[factor], size
                    rest.insert(0, inner)
                if size % own:
                    return None
                axis.append(factor)
                size //= own
            result.append(tuple(axis))
        return result


def free(product: Equation, side: int) -> list[int]:
    """Lists the axes of an operand that are neither contracted nor shared."""
    contracted, shared = product.params["dimension_numbers"]
    taken = {*contracted[side], *shared[side]}
    return [i for i in range(len(product.inputs[side].shape)) if i not in taken]


def links(equation, position, output) -> list[int | None] | None:
    """Returns which axis of an input each of an output is, None for a new one."""
    # None for the whole where that cannot be said. An axis of size 1 may be stretched.
    params, name = equation.params, equation.name
    shape = equation.inputs[position].shape
    if name == "dot_general":
        result = list(params["dimension_numbers"][1][position])
        for side in (0, 1):
            own = free(equation, side)
            result += own if side == position else [None] * len(own)
        return result
    if name == "transpose":
        return list(params["permutation"])
    if name == "broadcast_in_dim":
        result = [None] * len(output.shape)
        for i, j in enumerate(params["broadcast_dimensions"]):
            result[j] = i
        return result
    if name in ("squeeze", "reduce_sum"):
        gone = params["dimensions" if name == "squeeze" else "axes"]
        return [i for i in range(len(shape)) if i not in gone]
    if name in _REORDERING:
        return None
    if not shape:
        return [None] * len(output.shape)
    if len(shape) != len(output.shape):
        return None
    sizes = zip(shape, output.shape, strict=True)
    if name in _RESIZING or all(own in (1, size) for own, size in sizes):
        return list(range(len(shape)))
    return None


def before_reshape(equation: Equation, axis: int) -> int | None:
    """Finds the axis of the input from which an axis comes; None for a new one."""
    value, (output,) = equation.inputs[0], equation.outputs

    def places(shape):
        # How many elements stand before an axis; how many axes of size 1 do there.
        sizes, counts = [1, *itertools.accumulate(shape, int.__mul__)], {}
        for size, count in zip(shape, sizes, strict=False):
            nth = counts.setdefault(count, 0)
            counts[count] += size == 1
            yield count, nth

    count, nth = list(places(output.shape))[axis]
    for i, (start, its) in enumerate(places(value.shape)):
        size = value.shape[i]
        if output.shape[axis] == 1 and (size, start, its) == (1, count, nth):
            return i
        if output.shape[axis] > 1 and start <= count < start * size:
            return i
    return None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a value of any axes is shown in canonical ones."""

    shape: tuple[int, ...]  # its shape in the program
    factors: tuple[int, ...]  # the sizes into which its axes are split
    order: tuple[int, ...]  # these factors in the order of canonical axes
    canonical: tuple[int, ...]  # the shape that is shown
    is_aligned: bool  # whether consecutive heads of queries share a head of this

    @classmethod
    def of(
        cls,
        axes: Axes,
        step: Step,
        groups: tuple[Axis | None, ...],
        heads: Axis,
    ) -> "Layout | None":
        """Finds the layout of a value; None where it has other axes than these.

        `groups` are the canonical axes; None among them: all that is left. A group of
        which the value has nothing is an axis of size 1.
        """
        factors, heads = axes.of(*step.axes), axes.of(heads)
        given = axes.of(*(group for group in groups if group is not None))
        rest = [x for x in dict.fromkeys((*heads, *factors)) if x not in given]
        rest = [x for x in rest if x in factors]
        shown = [
            rest if group is None else [x for x in axes.of(group) if x in factors]
            for group in groups
        ]
        order = [factors.index(x) for group in shown for x in group]
        if sorted(order) != list(range(len(factors))):
            return None
        return cls(
            step.value.shape,
            tuple(axes.size([x]) for x in factors),
            tuple(order),
            tuple(axes.size(group) for group in shown),
            tuple(rest) == heads[: len(rest)],
        )

    def shown(self, value: Array) -> Array:
        return _reordered(value, self.factors, self.order, self.canonical)

    def hidden(self, value: Array, changed: Array) -> Array:
        del value
        factors = tuple(self.factors[i] for i in self.order)
        back = tuple(np.argsort(self.order).tolist())
        return _reordered(changed, factors, back, self.shape)


def _reordered(value, factors, order, shape) -> Array:
    """Gives a value other axes; no step is traced that changes nothing."""
    if value.shape != factors:
        value = jax.lax.reshape(value, factors)
    if order != tuple(range(len(order))):
        value = jax.lax.transpose(value, order)
    return value if value.shape == shape else jax.lax.reshape(value, shape)


def fitting(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Picks the layouts of weights and of the operands that may make them."""
    *_, num_heads, num_queries, num_keys = layouts["weights"].canonical
    result = {"weights": layouts["weights"]}
    lengths = {"query": num_queries, "key": num_keys, "value": num_keys}
    for name in lengths.keys() & layouts.keys():
        *_, length, own_heads, _ = layouts[name].canonical
        is_grouped = name != "query" and num_heads % own_heads == 0
        has_heads = own_heads in (1, num_heads)
        has_heads = has_heads or (is_grouped and layouts[name].is_aligned)
        if has_heads and length == lengths[name]:
            result[name] = layouts[name]
    return result


def map_of(layouts: dict[str, Layout], make_map: Callable, values: dict) -> Any:
    """Makes the map of weights, and of what else is known by name."""
    shown = {name: layouts[name].shown(x) for name, x in values.items()}
    weights = shown.pop("weights")
    *batch, num_heads, _, _ = weights.shape
    for name, x in shown.items():
        length, own_heads, size = x.shape[-3:]
        own_heads = num_heads if name == "query" else own_heads
        whole = (*batch, length, own_heads, size)
        shown[name] = x if x.shape == whole else jnp.broadcast_to(x, whole)
    return make_map(weights, **shown)
