"""A level of a program with its calls spelled out, as a graph of values and equations.

`jnp.where` is a call, and a softmax or a product may be one. What is computed inside of
a call has a variable of the level only where the call returns it.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from mha_haiku.core.sites import jaxprs
from mha_haiku.core.sites.site import SEEN

_CALLS = {*jaxprs.CALLS, *jaxprs.CUSTOM, *jaxprs.REMAT}


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """What a variable or a literal stands for."""

    aval: Any  # its shape and dtype
    # The equation that computes it; None for inputs and literals.
    maker: "Equation | None" = None
    # Whether it comes out of a product or a loop: it is no mere parameter.
    is_made: bool = False
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
    outputs: list[Value] = dataclasses.field(default_factory=list)  # what it computes

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params


def equations(jaxpr: core.Jaxpr) -> list[Equation]:
    """Returns the equations of a level, in order; for calls, those that are inside."""
    result, count = [], itertools.count()

    def value_of(atom, values):
        return Value(atom.aval) if isinstance(atom, core.Literal) else values[atom]

    def enter(jaxpr, values, index, calls):
        for number, eqn in enumerate(jaxpr.eqns):
            place = number if index is None else index
            inputs = [value_of(x, values) for x in eqn.invars]
            name, inner = eqn.primitive.name, jaxprs.inner(eqn)
            if name in _CALLS:
                (called,) = inner
                within = {x: Value(x.aval) for x in called.constvars}
                within.update(zip(called.invars, inputs, strict=True))
                enter(called, within, place, (*calls, next(count)))
                outputs = [value_of(x, within) for x in called.outvars]
            else:
                equation = Equation(eqn, name, place, calls, inputs)
                result.append(equation)
                is_made = bool(inner) or name in ("dot_general", "conv_general_dilated")
                is_made = is_made or any(x.is_made for x in inputs)
                outputs = [Value(x.aval, equation, is_made) for x in eqn.outvars]
                equation.outputs = outputs
                for x in inputs:
                    x.users.append(equation)
            for variable, value in zip(eqn.outvars, outputs, strict=True):
                values[variable] = value
                is_held = index is None and not isinstance(variable, core.DropVar)
                if is_held and value.variable is None:
                    value.variable, value.index = variable, place + 1

    values = {x: Value(x.aval, variable=x) for x in (*jaxpr.constvars, *jaxpr.invars)}
    enter(jaxpr, values, None, ())
    for x in jaxpr.outvars:
        value_of(x, values).is_output = True
    return result


def primitives(jaxpr: core.Jaxpr) -> set[str]:
    """Returns the primitives of a level and of its calls, but for sites' attention."""
    names = set()
    for eqn in jaxpr.eqns:
        if SEEN in jaxprs.path(eqn):
            continue
        names.add(eqn.primitive.name)
        if eqn.primitive.name in _CALLS:
            names |= primitives(*jaxprs.inner(eqn))
    return names
