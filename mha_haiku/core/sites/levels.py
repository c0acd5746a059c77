"""A level of a program as a graph of values and equations, for recognition.

Calls are inlined: `jnp.where` is a call, and a softmax or a product may be. A value
computed inside a call has a variable of the level only if the call returns it.
Equations with the same primitive, parameters and inputs have outputs with the same
number.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mha_haiku.core.sites import jaxprs

_CALLS = {*jaxprs.CALLS, *jaxprs.CUSTOM, *jaxprs.REMAT}
# Primitives that return the same numbers, in another form.
NEUTRAL = {
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient"),
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "sharding_constraint"),
    *("optimization_barrier", "name", "pvary", "site"),
}
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
EXPONENTIALS = {"exp", "exp2"}
# Primitives that attention begins and ends with, or that contain it.
_TELLING = {"dot_general", *EXPONENTIALS, *_CALLS}


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """The value of a variable or a literal."""

    aval: Any  # its shape and dtype
    number: int  # the same for values that are equal by the same computation
    # The equation that computes it; None for inputs and literals.
    maker: "Equation | None" = None
    # Sets of values are bits of integers: a program has thousands of values, which
    # depend on nearly all earlier ones. Arrays of floats have the bit of their number,
    # or of the first output of their equation.
    bit: int = 0
    behind: int = 0  # the value and all that it depends on
    by_product: int = 0  # what it depends on through a product or a loop
    is_random: bool = False  # whether it is computed from random bits
    is_of_data: bool = False  # whether it is known to depend on more than parameters
    # The equations that read it.
    users: list["Equation"] = dataclasses.field(default_factory=list)
    # The variable of the level that holds it, if one does.
    variable: core.Var | None = None
    index: int = 0  # the first equation of the level that may read the variable
    is_output: bool = False  # whether the level returns it
    constant: Any = None  # the array or number of a literal or a constant

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; () if it is not an array, such as a token."""
        return getattr(self.aval, "shape", ())

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def is_readable(self, index: int) -> bool:
        """Checks whether a variable holds it before an equation of the level."""
        return self.variable is not None and self.index <= index

    @property
    def is_data(self) -> bool:
        return _is_data(self.aval)

    @property
    def is_made(self) -> bool:
        """Whether a product or a loop computes it, so that it is no parameter."""
        return self.by_product > 0


@dataclasses.dataclass(eq=False, slots=True)
class Equation:
    """An equation of the level, or of a call in it."""

    eqn: core.JaxprEqn
    name: str  # the name of its primitive
    index: int  # its index in the level, or the index of the call
    calls: tuple[int, ...]  # a number for each call around it, from the outermost
    inputs: list[Value]  # the values it reads
    # Whether it is in an attention that already has sites; only known for products,
    # exponentials and equations in calls.
    is_marked: bool
    outputs: list[Value] = dataclasses.field(default_factory=list)
    number: int = 0  # its place among all equations of the level and its calls

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product, or a loop or a kernel that may hold one."""
        return self.name in _PRODUCTS or bool(jaxprs.inner(self.eqn))

    def contracted(self, side: int) -> tuple[int, ...]:
        """Returns the axes of an operand over which a matrix product sums."""
        return self.params["dimension_numbers"][0][side]

    def shared(self, side: int) -> tuple[int, ...]:
        """Returns the axes of an operand that are batches of a matrix product."""
        return self.params["dimension_numbers"][1][side]

    def free(self, side: int) -> list[int]:
        """Returns the other axes of an operand of a matrix product."""
        others = {*self.contracted(side), *self.shared(side)}
        return [i for i in range(len(self.inputs[side].shape)) if i not in others]

    def neutral(self, output: Value) -> list[int]:
        """Finds the input with the same numbers as an output, in another form."""
        if self.name not in NEUTRAL:
            return []
        return [self.outputs.index(output) if len(self.outputs) > 1 else 0]

    def made(self, output: Value) -> list[int]:
        """Lists the inputs of an output that are computed by products or loops."""
        if len(self.outputs) > 1:
            return self.neutral(output)
        return [i for i, x in enumerate(self.inputs) if x.is_made]


def origin(value: Value) -> Value:
    """Finds the first value that has the same numbers."""
    while value.maker is not None and (places := value.maker.neutral(value)):
        value = value.maker.inputs[places[0]]
    return value


def forms(value: Value) -> Iterator[Value]:
    """Yields a value, and all later values with the same numbers."""
    yield value
    for user in dict.fromkeys(value.users):
        for output in user.outputs:
            if any(user.inputs[i] is value for i in user.neutral(output)):
                yield from forms(output)


class Graph(NamedTuple):
    """A level without calls."""

    inputs: list[Value]
    outputs: list[Value]
    equations: list[Equation]  # in order


def graph(
    jaxpr: core.Jaxpr,
    consts: Sequence,
    data: Set[core.Var] = frozenset(),
    *,
    barred: int | None = None,
    has_sites: bool = True,
    enters_custom: bool = True,
) -> Graph:
    """Makes the graph of a level; for calls, it has the equations inside.

    `data` are from `jaxprs.of_data`.
    With `barred`, inputs of `jax.checkpoint` are behind a barrier, apart from values of
    so many numbers: XLA would merge what is computed again with what was computed at
    first, and keep it. Without `has_sites`, sites are left out; without
    `enters_custom`, calls with custom gradients are equations.
    """
    entered = _CALLS if enters_custom else _CALLS.difference(jaxprs.CUSTOM)
    result, count = [], itertools.count()
    numbers: dict[Any, int] = {}
    places: dict[int, int] = {}  # of bits, by number

    def number(*key):
        try:
            return numbers.setdefault(key, len(numbers))
        except TypeError:  # not hashable
            return numbers.setdefault(object(), len(numbers))

    def bit_of(number: int) -> int:
        return 1 << places.setdefault(number, len(places))

    def value_of(atom: core.Var | core.Literal, values: dict[core.Var, Value]):
        if not isinstance(atom, core.Literal):
            return values[atom]
        key = atom.aval, np.asarray(atom.val).tobytes()
        return Value(atom.aval, number(*key), constant=atom.val)

    def behind_barrier(value: Value, index: int, calls: tuple[int, ...]) -> Value:
        if barred is None or value.maker is None or value.size >= barred:
            return value
        (eqn,) = jax.make_jaxpr(jax.lax.optimization_barrier)(value.aval).eqns
        equation = Equation(eqn, eqn.primitive.name, index, calls, [value], False)
        equation.number = len(result)
        equation.outputs = [dataclasses.replace(value, maker=equation, users=[])]
        result.append(equation)
        return equation.outputs[0]

    def enter(
        jaxpr: core.Jaxpr,
        values: dict[core.Var, Value],
        index: int | None,
        calls: tuple[int, ...],
        is_marked: bool = False,
    ):
        for place, eqn in enumerate(jaxpr.eqns):
            place = place if index is None else index
            inputs = [value_of(x, values) for x in eqn.invars]
            name, inner = eqn.primitive.name, jaxprs.inner(eqn)
            marked = is_marked or (name in _TELLING and jaxprs.is_marked(eqn))
            spelled = _joined(name, eqn.params, inputs)
            if name in entered:
                if name in jaxprs.REMAT and eqn.params["prevent_cse"]:
                    inputs = [behind_barrier(x, place, calls) for x in inputs]
                spelled = inner[0], inputs
            if spelled:
                called, arguments = spelled
                within = {
                    x: Value(x.aval, number(x), constant=constant)
                    for x, constant in zip(
                        called.jaxpr.constvars, called.consts, strict=True
                    )
                }
                within.update(zip(called.jaxpr.invars, arguments, strict=True))
                around = (*calls, next(count)) if name in _CALLS else calls
                enter(called.jaxpr, within, place, around, marked)
                outputs = [value_of(x, within) for x in called.jaxpr.outvars]
            elif name == "site" and not has_sites:
                outputs = inputs
            elif name == "optimization_barrier" and barred is not None:
                outputs = [behind_barrier(x, place, calls) for x in inputs]
            else:
                equation = Equation(eqn, name, place, calls, inputs, marked)
                equation.number = len(result)
                result.append(equation)
                behind, by_product, is_of_data = 0, 0, False
                is_random = name.startswith(("random_", "threefry", "rng_"))
                for x in inputs:
                    behind, by_product = behind | x.behind, by_product | x.by_product
                    is_random = is_random or x.is_random
                    is_of_data = is_of_data or x.is_of_data
                    x.users.append(equation)
                read = object() if eqn.effects else tuple(x.number for x in inputs)
                key = eqn.primitive, tuple(eqn.params.items()), read
                numbers_of = [number(*key, i) for i in range(len(eqn.outvars))]
                is_data = any(_is_data(x.aval) for x in eqn.outvars)
                bit = bit_of(numbers_of[0]) if is_data else 0
                outputs = [
                    Value(
                        x.aval,
                        numbers_of[i],
                        equation,
                        bit,
                        behind | bit,
                        behind if equation.is_product else by_product,
                        is_random,
                        is_of_data and not jaxprs.is_parameter(eqn),
                    )
                    for i, x in enumerate(eqn.outvars)
                ]
                equation.outputs = outputs
            for variable, value in zip(eqn.outvars, outputs, strict=True):
                values[variable] = value
                is_held = index is None and not isinstance(variable, core.DropVar)
                if is_held and value.variable is None:
                    value.variable, value.index = variable, place + 1

    values = {
        x: Value(x.aval, number(x), variable=x, is_of_data=x in data)
        for x in (*jaxpr.constvars, *jaxpr.invars)
    }
    for x in values.values():
        x.bit = x.behind = bit_of(x.number) if x.is_data else 0
    for x, constant in zip(jaxpr.constvars, consts, strict=False):
        values[x].constant = constant
    inputs = [values[x] for x in jaxpr.invars]
    enter(jaxpr, values, None, ())
    outputs = [value_of(x, values) for x in jaxpr.outvars]
    for x in outputs:
        x.is_output = True
    return Graph(inputs, outputs, result)


def union(sets: Iterable[int]) -> int:
    """Returns the union of sets of values, which are bits."""
    return functools.reduce(operator.or_, sets, 0)


@functools.lru_cache(2**12)
def _is_data(aval: Any) -> bool:
    return bool(getattr(aval, "shape", ())) and jnp.issubdtype(aval.dtype, jnp.inexact)


def _joined(
    name: str, params: dict[str, Any], pieces: list[Any]
) -> tuple[core.ClosedJaxpr, list[Value]] | None:
    """Rewrites a concatenation of all pieces of a value as reshapes of the value."""
    # The pieces come from a split, or are slices, perhaps all reshaped in the same way:
    # heads that are split and stacked along another axis.
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
    if first.name not in ("split", "slice"):
        return None
    source, shape = first.inputs[0], pieces[0].shape
    differing = [i for i, size in enumerate(shape) if size != source.shape[i]]
    if len(differing) != 1 or any(x.inputs[0] is not source for x in makers):
        return None
    (axis,) = differing
    if first.name == "split":
        places = [y.outputs.index(x) for x, y in zip(pieces, makers, strict=True)]
        starts = [place * shape[axis] for place in places]
    else:
        starts = [x.params["start_indices"][axis] for x in makers]
    is_whole = len(pieces) * shape[axis] == source.shape[axis]
    is_whole = is_whole and starts == [i * shape[axis] for i in range(len(pieces))]
    if not is_whole or len({piece.shape for piece in pieces}) > 1:
        return None

    def reshaped(x: jax.Array):
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

    return jax.make_jaxpr(reshaped)(source.aval), [source]
