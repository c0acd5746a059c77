"""Attention of any program in blocks of queries.

`blockwise(f)` is a call of f, of which every transformation of JAX, and `look` and
`edit`, see the program as it is. Only where it is compiled does it run in blocks, as
`regions` describes. So derivatives are derivatives of f, with its custom gradients.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from mha_haiku.core.sites import cuts, jaxprs, levels, regions, traces

_NUMBER = 4  # bytes
_LOOPS = ("scan", "while", "cond")


def blockwise(function: Callable, *, limit: int = _NUMBER * regions.LIMIT) -> Callable:
    """Returns the same function, without large arrays of all queries and all keys.

    Where scores of attention, or logits of which only sums over the vocabulary are
    used, would take more than `limit` bytes, they are computed for blocks of queries:
    memory then grows with the length, not with its square. No form of attention is
    asked for. It composes with all transformations of JAX, and with `look` and `edit`,
    in any order; `mh.sites(mh.blockwise(f), x)` says what is left whole, and why.

    Args:
      function: Any JAX function.
      limit: Bytes, of float32. A function without larger values is left as it is.

    Example:
      >>> def attend(x):  # [T, K]
      ...     return jax.nn.softmax(x @ x.T) @ x
      ...
      >>> x = jnp.ones((4096, 2))
      >>> mh.blockwise(attend, limit=2**20)(x).shape
      (4096, 2)
    """
    return of_numbers(function, limit // _NUMBER)


def of_numbers(function: Callable, limit: int) -> Callable:
    """Returns `blockwise` for values of more than `limit` numbers."""

    def walk(function: Callable, args: tuple, kwargs: dict) -> tuple[Any, None]:
        closed, arrays, _, whole = traces.trace(function, args, kwargs)
        return whole(call(closed, arrays, limit)), None

    run = traces.transformed(function, walk)
    return functools.wraps(function)(lambda *args, **kwargs: run(*args, **kwargs)[0])


def call(
    closed: core.ClosedJaxpr, arguments: Sequence, limit: int, *, always: bool = False
) -> list:
    """Runs a program, in blocks where it has values of more than `limit` numbers.

    With `always` it is a call also if no such value is seen: a function may only run
    when it is transposed.
    """
    if closed.effects or not (always or any(cuts.seeds(closed.jaxpr, limit))):
        return jaxprs.bound(closed, arguments)
    # Constants may be values of an enclosing trace, and so become arguments.
    jaxpr = closed.jaxpr
    eqns = [_with_blocks_inside(eqn, limit) for eqn in jaxpr.eqns]
    inputs = *jaxpr.constvars, *jaxpr.invars
    whole = jaxprs.part(jaxpr, inputs, jaxpr.outvars, eqns)
    arguments = [jnp.asarray(x) for x in (*closed.consts, *arguments)]
    return blockwise_p.bind(*arguments, jaxpr=whole, limit=limit)


def _with_blocks_inside(eqn: core.JaxprEqn, limit: int) -> core.JaxprEqn:
    """Makes the bodies of a loop, a branch or a remat calls of their own."""
    # So each is differentiated as a call. Other calls are parts of this one.
    is_call = eqn.primitive.name in jaxprs.CALLS
    if not is_call and eqn.primitive.name not in (*jaxprs.REMAT, *_LOOPS):
        return eqn

    def changed(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(changed, value))
        is_closed = isinstance(value, core.ClosedJaxpr)  # from jax 0.12 on all are
        if isinstance(value, core.Jaxpr) and not is_closed:
            return changed(core.ClosedJaxpr(value, ())).jaxpr
        if not is_closed or not any(cuts.seeds(value.jaxpr, limit)):
            return value
        if is_call:
            eqns = [_with_blocks_inside(x, limit) for x in value.jaxpr.eqns]
            return value.replace(jaxpr=value.jaxpr.replace(eqns=eqns))
        body = functools.partial(call, value, limit=limit)
        return jax.make_jaxpr(lambda *inputs: body(inputs))(*value.in_avals)

    return eqn.replace(params={key: changed(x) for key, x in eqn.params.items()})


blockwise_p = core.Primitive(jaxprs.BLOCKWISE)
blockwise_p.multiple_results = True


def _run(*arguments: Any, jaxpr: core.ClosedJaxpr, limit: int) -> list:
    return regions.run(jaxpr, arguments, limit)


blockwise_p.def_impl(jax.jit(_run, static_argnames=("jaxpr", "limit")))
blockwise_p.def_abstract_eval(lambda *_, jaxpr, limit: jaxpr.out_avals)
mlir.register_lowering(blockwise_p, mlir.lower_fun(_run, multiple_results=True))


def _batched(arguments: Sequence, axes: Sequence, *, jaxpr: Any, limit: int) -> tuple:
    function = jax.vmap(core.jaxpr_as_fun(jaxpr), tuple(axes))
    closed = jax.make_jaxpr(function)(*arguments)
    return call(closed, arguments, limit), [0] * len(jaxpr.out_avals)


batching.primitive_batchers[blockwise_p] = _batched


@functools.lru_cache(64)
def _linearized(jaxpr: core.ClosedJaxpr, varied: tuple[int, ...], limit: int) -> tuple:
    """Splits a derivative into a program of the inputs and a linear one of tangents.

    The first returns the results and what the second needs before the tangents of
    `varied` inputs, apart from inputs, whose numbers are returned, too. The last is
    which results have tangents.
    """
    function, trees = core.jaxpr_as_fun(jaxpr), []

    def forward(*primals):
        def of_varied(*changing):
            inputs = dict(enumerate(primals)) | dict(zip(varied, changing, strict=True))
            return function(*inputs.values())

        outputs, linear = jax.linearize(of_varied, *(primals[i] for i in varied))
        leaves, tree = jax.tree.flatten(linear)
        trees.append(tree)
        return [*outputs, *leaves]

    whole = jax.make_jaxpr(forward)(*jaxpr.in_avals)
    count = len(jaxpr.out_avals)
    program = levels.graph(whole.jaxpr, whole.consts, enters_custom=False)
    area = cuts.least_area(whole.jaxpr, limit)
    large = {x for rows, _ in cuts.large(program, limit, area) for x in rows}
    # Large results are computed again, from these.
    sources, again = regions.recipe(
        program.outputs[count:], lambda x: x in large or cuts.is_mask(area, x)
    )
    number = {value: i for i, value in enumerate(program.inputs)}
    places = [number.get(x) for x in sources]
    results = [*program.outputs[:count], *(x for x in sources if x not in number)]

    def shortened(*primals):
        values = dict(zip(program.inputs, primals, strict=True))
        cuts.run(program.equations, values)
        return [cuts.read(x, values) for x in results]

    first = jax.make_jaxpr(shortened)(*jaxpr.in_avals)
    are_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in jaxpr.out_avals]

    def linear(residuals: Sequence, tangents: Sequence) -> list:
        outputs = jax.tree.unflatten(trees[-1], again(residuals))(*tangents)
        return [*itertools.compress(outputs, are_float)]

    tangents = [jaxpr.in_avals[i] for i in varied]
    second = jax.make_jaxpr(linear)([x.aval for x in sources], tangents)
    return first, second, places, are_float


def _jvp(primals: Sequence, tangents: Sequence, *, jaxpr: Any, limit: int) -> tuple:
    varied = tuple(
        i
        for i, x in enumerate(jaxpr.in_avals)
        if not isinstance(tangents[i], ad.Zero) and jnp.issubdtype(x.dtype, jnp.inexact)
    )
    first, second, places, are_float = _linearized(jaxpr, varied, limit)
    results = call(first, primals, limit)
    count = len(jaxpr.out_avals)
    outputs, made = results[:count], iter(results[count:])
    # An input that were a result, too, would be stacked by a loop, and have a batch.
    residuals = [next(made) if i is None else primals[i] for i in places]
    changing = [tangents[i] for i in varied]
    changes = iter(call(second, [*residuals, *changing], limit, always=True))
    return outputs, [
        next(changes) if is_float else ad.Zero(jax.typeof(x).to_tangent_aval())
        for x, is_float in zip(outputs, are_float, strict=True)
    ]


ad.primitive_jvps[blockwise_p] = _jvp


def _transposed(cotangents: Sequence, *arguments: Any, jaxpr: Any, limit: int) -> list:
    are_linear = [ad.is_undefined_primal(x) for x in arguments]
    residuals = [x for x in arguments if not ad.is_undefined_primal(x)]
    tangents = [x.aval for x in arguments if ad.is_undefined_primal(x)]
    cotangents = [ad.instantiate_zeros(x) for x in cotangents]

    def transposed(residuals: Sequence, cotangents: Sequence) -> tuple:
        def linear(*tangents):
            sources = iter(residuals), iter(tangents)
            inputs = [next(sources[is_linear]) for is_linear in are_linear]
            return core.jaxpr_as_fun(jaxpr)(*inputs)

        return jax.linear_transpose(linear, *tangents)(cotangents)

    closed = jax.make_jaxpr(transposed)(residuals, cotangents)
    results = iter(call(closed, [*residuals, *cotangents], limit))
    return [next(results) if is_linear else None for is_linear in are_linear]


ad.primitive_transposes[blockwise_p] = _transposed
