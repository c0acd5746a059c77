"""Equations and sites of a traced program: their contents and their places."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from mha_haiku.core import site_primitive
from mha_haiku.core.site_primitive import Facet

BLOCKWISE = "blockwise"
CALLS = ("jit", "pjit", "closed_call", "core_call", BLOCKWISE)
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
REMAT = ("checkpoint", "remat", "remat2")


class Site(NamedTuple):
    """A site of a level of a program."""

    index: int  # the equation that it comes before, or that it is
    inputs: list[core.Var]  # the variables of its leaves
    outputs: list[core.Var]  # the variables of its results
    params: dict[str, Any]  # the parameters of a site's equation

    @classmethod
    def of(cls, index: int, variables: Any, facet: Facet) -> "Site":
        """Makes a site of variables, a pytree, before an equation."""
        leaves, tree = jax.tree.flatten(variables)
        return cls(index, leaves, leaves, site_primitive.parameters(tree, (facet,)))

    def function_of(self, function: Callable) -> Callable:
        """Makes a function of the site's leaves from a function of its value."""
        params = self.params

        def of_leaves(*leaves):
            return function(jax.tree.unflatten(params["tree"], leaves))

        return under_vmaps(of_leaves, params["batched"], own_axes=False)

    def after_edits(self) -> "Site":
        """Returns the site if other views of the same attention are edited."""
        facets = [
            x if x.read_edited is None else x._replace(read=x.read_edited)
            for x in self.params["facets"]
        ]
        return self._replace(params=self.params | {"facets": tuple(facets)})


def under_vmaps(
    function: Callable, batched: tuple[tuple, ...], *, own_axes: bool
) -> Callable:
    """Puts a function of a site's leaves under the vmaps around the site."""
    # With `own_axes` results have the axes of vmaps where leaves have them, else in
    # front.
    for axes in batched:
        function = jax.vmap(function, axes, list(axes) if own_axes else 0)
    return function


def inner(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """Lists the jaxprs inside an equation, in the order of its parameters."""
    params, name = eqn.params, eqn.primitive.name
    if not eqn.primitive.multiple_results:
        return []  # every call, loop and branch may return several values
    if name == "while":
        held = [params["cond_jaxpr"], params["body_jaxpr"]]
    elif name in CUSTOM:
        held = [params.get("call_jaxpr") or params["fun_jaxpr"]]
    else:
        held = []
        for value in params.values():
            held += value if isinstance(value, tuple | list) else [value]
    # Only the equations of an open jaxpr with constants (of a kernel) are read.
    return [
        value
        if isinstance(value, core.ClosedJaxpr)  # from jax 0.12 on all are
        else core.ClosedJaxpr(value, (None,) * len(value.constvars))
        for value in held
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr)
    ]


def walk(
    jaxpr: core.Jaxpr, enters: Callable[[core.JaxprEqn], bool] = lambda eqn: True
) -> Iterator[core.JaxprEqn]:
    """Yields all equations, and after an equation the equations inside, if entered."""
    for eqn in jaxpr.eqns:
        yield eqn
        for closed in inner(eqn) if enters(eqn) else ():
            yield from walk(closed.jaxpr, enters)


def carried(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Counts the constants and the carried values of a scan."""
    # Compares ranks, since the parameters that tell constants, carry and scanned inputs
    # apart differ between versions: a scanned input has one more axis outside than
    # inside.
    (body,) = inner(eqn)

    def count(outside: Sequence[Any], inside: Sequence[Any]):
        pairs = zip(outside, inside, strict=True)
        return sum(x.aval.ndim == y.aval.ndim for x, y in pairs)

    num_carry = count(eqn.outvars, body.jaxpr.outvars)
    return count(eqn.invars, body.jaxpr.invars) - num_carry, num_carry


def bound(call: core.ClosedJaxpr, inputs: Sequence) -> list:
    """Binds a jaxpr's equations to the program being traced; returns the outputs."""
    staged = [isinstance(x, partial_eval.DynamicJaxprTracer) for x in inputs]
    if not staged or not all(staged):
        return core.jaxpr_as_fun(call)(*inputs)
    # JAX copies an inlined call equation by equation. jaxpr_as_fun would bind every
    # primitive again, with shape rules, which takes more than twice as long.
    primitive, params = _inlined_call(jax.sharding.get_abstract_mesh())
    counts = {"in": len(inputs), "donated": len(inputs), "out": len(call.out_avals)}
    sized = {
        key: params[key] * counts[key.split("_")[0]]
        for key in params
        if key.endswith(("_shardings", "_layouts", "_invars"))
    }
    return primitive.bind(*inputs, **params | sized | {"jaxpr": call})


@functools.lru_cache(16)
def _inlined_call(mesh: jax.sharding.AbstractMesh) -> tuple[core.Primitive, dict]:
    """Finds the primitive of an inlined call, and its parameters for one input."""
    del mesh  # part of the cache key, since the parameters depend on it
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0).eqns
    is_flag = isinstance(eqn.params["inline"], bool)  # before jax 0.12
    if is_flag:
        return eqn.primitive, eqn.params | {"inline": True}
    inline = jax.Inline  # pyright: ignore[reportAttributeAccessIssue]
    return eqn.primitive, eqn.params | {"inline": inline.JAX_EARLY}


def part(
    jaxpr: core.Jaxpr,
    inputs: Iterable[core.Var],
    outputs: Sequence[core.Var],
    eqns: list[core.JaxprEqn],
) -> core.ClosedJaxpr:
    """Makes a program of equations of a jaxpr."""
    debug = jaxpr.debug_info
    debug = debug.with_unknown_names()
    effects = jaxpr.effects
    some = core.Jaxpr((), [*inputs], [*outputs], eqns, effects, debug_info=debug)
    return core.ClosedJaxpr(some, ())


def path(eqn: core.JaxprEqn) -> str:
    """Returns the path of modules, `encoder/layer_0` for `jvp(encoder)/layer_0`.

    Names of C++, such as `aten::softmax`, are operations of other libraries, not
    modules: they end a path.
    """
    return _path(str(eqn.source_info.name_stack))


def is_parameter(eqn: core.JaxprEqn) -> bool:
    """Checks whether an equation marks a parameter."""
    is_name = eqn.primitive.name == "name"
    return is_name and eqn.params["name"] == site_primitive.PARAMETER


def variables(atoms: Iterable) -> list[core.Var]:
    """Returns the variables among the inputs of an equation."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def of_data(jaxpr: core.Jaxpr, inputs: Iterable[core.Var]) -> set[core.Var]:
    """Finds the variables that depend on inputs, apart from what marks parameters."""
    result = set(inputs)
    for eqn in jaxpr.eqns:
        if not (is_parameter(eqn) or result.isdisjoint(variables(eqn.invars))):
            result.update(eqn.outvars)
    return result


def data_inside(
    eqn: core.JaxprEqn, jaxpr: core.Jaxpr, data: set[core.Var]
) -> list[core.Var]:
    """Finds the inputs of a jaxpr inside an equation that depend on data.

    None in a while loop, whose inputs may be parameters.
    """
    if eqn.primitive.name == "while":
        return []
    pairs = zip(reversed(eqn.invars), reversed(jaxpr.invars), strict=False)
    return [x for atom, x in pairs if not data.isdisjoint(variables([atom]))]


def is_marked(eqn: core.JaxprEqn) -> bool:
    """Checks whether an equation is in an attention that already has sites."""
    return site_primitive.SEEN in path(eqn)


@functools.lru_cache(2**14)
def _path(stack: str) -> str:
    before = None
    while stack != before:
        stack, before = re.sub(r"\w+\(([^()]*)\)", r"\1", stack), stack
    parts = filter(None, stack.split("/"))
    return "/".join(itertools.takewhile(lambda part: "::" not in part, parts))
