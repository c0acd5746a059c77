"""A function of parameters without some of its heads, as a smaller program.

A slice of a parameter goes if it acts on the output through the removed heads alone:
its gradient is exactly 0 where these are ablated, and is not where they almost are. So
neither names nor layouts of projections matter, and what heads share stays: keys and
values of a group, until its last head goes. Slices are followed through the traced
program, up to the products that sum over them. Where a primitive has no rule here,
zeros fill the places of what was cut off.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mha_haiku.core import models, sites
from mha_haiku.core.attention import implementations
from mha_haiku.core.sites import cuts, jaxprs, levels, traces
from mha_haiku.lab.heads import edits, model_runs
from mha_haiku.training import tasks

# Gates of almost ablated heads: units and experts that others switch stay as they are.
_ALMOST = 2.0**-16
_DRAWS = 8  # of weights of the output, whose slopes are measured
_MOST = 1e3  # larger parameters are constants, such as the scores of masks
# What is 0 where all inputs are.
_LINEAR = levels.NEUTRAL | cuts.SUMS | {"add", "neg", "slice", "split", "concatenate"}

Kept = dict[int, np.ndarray]  # the sorted indices that are left, of axes that are cut
# What an equation takes of its inputs, what it returns, and parameters that differ.
_Plan = tuple[list[Kept], list[Kept], dict[str, Any]] | None


class _Slice(NamedTuple):
    """A value of a program that is cut along some axes; None is zeros."""

    value: Any
    kept: Kept = {}

    def filled(self, whole: Any) -> Any:
        if self.value is not None and not self.kept:
            return self.value
        zeros, at = (
            jnp.zeros(whole.shape, whole.dtype),
            _indices(self.kept, whole.shape),
        )
        return zeros if self.value is None else zeros.at[np.ix_(*at)].set(self.value)

    def taken(self, kept: Kept) -> Any:
        """Cuts the value down to fewer indices."""
        value = self.value
        for axis, indices in kept.items():
            before = _indices(self.kept, value.shape)[axis]
            if len(indices) < len(before):
                value = value.take(np.searchsorted(before, indices), axis, mode="clip")
        return value


def _indices(kept: Kept, shape: Sequence[int]) -> list[np.ndarray]:
    return [kept.get(axis, np.arange(size)) for axis, size in enumerate(shape)]


def without_heads(
    model: models.Model, params: Any, example: tasks.Example, gates: np.ndarray
) -> tuple[models.Model, Any, Callable[[Any], Any]]:
    """Removes the heads of a function whose gates `[P, H]` are 0, of P attention parts.

    Heads that share parameters with others stay, so compare with `ablated_output`.
    Returns the smaller model, its parameters, and a function that fills such parameters
    with zeros, up to the shapes of the whole model.
    """
    leaves, tree = jax.tree.flatten(params)
    all_kept = _kept(model, params, example, gates)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def slices(params: Any) -> list[_Slice]:
        pairs = zip(jax.tree.leaves(params), all_kept, strict=True)
        return [_Slice(None) if y is None else _Slice(x, y) for x, y in pairs]

    def run(params: Any, *args: Any, **options: Any) -> Any:
        whole = tree.unflatten(shapes), *args
        with implementations.apart(True):
            closed, arrays, _, output_of = traces.trace(model.apply, whole, options)
        inputs = [*slices(params), *map(_Slice, arrays[len(shapes) :])]
        return output_of(map(_Slice.filled, _run(closed, inputs), closed.out_avals))

    def filled(params: Any) -> Any:
        return tree.unflatten(map(_Slice.filled, slices(params), shapes))

    left = [
        x[:0] if y is None else _Slice(x).taken(y)
        for x, y in zip(leaves, all_kept, strict=True)
    ]
    return model._replace(apply=sites.blockwise(run)), tree.unflatten(left), filled


def _gated(
    model: models.Model, params: Any, example: tasks.Example, gates: jax.Array
) -> jax.Array:
    counts = model_runs.parts(model, params, example)
    names = [f"{path}/heads".removeprefix("/") for path in counts]
    rows = [x[:n] for x, n in zip(gates, counts.values(), strict=True)]
    changes = edits.on_parts(names, rows, edits.gated)
    return model_runs.run_edited(model, params, example, changes).logits


ablated_output = model_runs.compiled(_gated)  # a program, for gates `[P, H]`


@model_runs.compiled
def _acting(
    model: models.Model, params: Any, example: tasks.Example, gates: jax.Array
) -> list[list[jax.Array]]:
    """Marks the indices that act on the output, of each axis of each parameter."""
    key = jax.random.key(0)

    def moved(x: jax.Array) -> jax.Array:  # a parameter of zeros would stop gradients
        noise = abs(jax.random.normal(key, x.shape)) / 50
        is_constant = not jnp.issubdtype(x.dtype, jnp.floating) or abs(x) > _MOST
        return jnp.where(is_constant, x, x + noise.astype(x.dtype))

    def acting(key: jax.Array) -> list[list[jax.Array]]:
        def score(params: Any) -> jax.Array:
            output = _gated(model, params, example, gates)
            return (output * jax.random.normal(key, output.shape)).sum()

        slopes = jax.tree.leaves(jax.grad(score, allow_int=True)(start))
        return [_sides(x != 0) if x.dtype != jax.dtypes.float0 else [] for x in slopes]

    start = jax.tree.map(moved, params)
    # The slope of a bias of keys, which moves all scores of a query alike, is rounding,
    # of which some is 0; seldom in all of these.
    marks = jax.lax.map(acting, jax.random.split(key, _DRAWS))
    return jax.tree.map(lambda x: x.any(0), marks)


def _sides(marks: Any) -> list[Any]:
    axes = range(marks.ndim)
    return [marks.any(tuple(j for j in axes if j != i)) for i in axes]


def _kept(
    model: models.Model, params: Any, example: tasks.Example, gates: np.ndarray
) -> list[Kept | None]:
    """Finds what is left of each parameter; None if that is nothing."""
    runs = [_acting(model)(params, example, np.maximum(gates, x)) for x in (_ALMOST, 0)]
    result: list[Kept | None] = []
    for pairs in map(zip, *jax.device_get(runs)):
        kept: Kept = {}
        for axis, (acts, stays) in enumerate(pairs):
            gone = acts & ~stays if stays.any() else acts | acts.any()
            kept |= {axis: np.flatnonzero(~gone)} if gone.any() else {}
        result.append(kept if all(map(len, kept.values())) else None)
    return result


def _run(closed: core.ClosedJaxpr, inputs: Iterable[_Slice]) -> list[_Slice]:
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, map(_Slice, closed.consts), strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> _Slice:
        return _Slice(atom.val) if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        with jax.named_scope(jaxprs.path(eqn) or "/"):
            results = _step(eqn, [*map(read, eqn.invars)])
        values.update(zip(eqn.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def _step(eqn: core.JaxprEqn, inputs: list[_Slice]) -> list[_Slice]:
    name, are_zeros = eqn.primitive.name, [x.value is None for x in inputs]
    if any(are_zeros) or any(x.kept for x in inputs):
        if name in (*jaxprs.CALLS, *jaxprs.CUSTOM, *jaxprs.REMAT):
            return _run(jaxprs.inner(eqn)[0], inputs)
        is_product = any(are_zeros) and name in ("mul", "dot_general")
        if is_product or all(are_zeros) and name in _LINEAR:
            return [_Slice(None)] * len(eqn.outvars)
    rows = ([levels.Value(x.aval, 0) for x in y] for y in (eqn.invars, eqn.outvars))
    before, after = rows
    equation = levels.Equation(eqn, name, 0, (), before, False, after)
    kept = [x.kept for x in inputs]
    by_marks = name in ("reshape", "split") or eqn.params.get("strides", 0) is None
    planned = any(kept) and (_of_places if by_marks else _of_axes)(equation, kept)
    if not planned:
        values = [x.filled(y.aval) for x, y in zip(inputs, before, strict=True)]
        return [*map(_Slice, cuts.outputs(equation, values))]
    takes, results, params = planned
    equation.eqn = eqn.replace(params=eqn.params | params)
    values = [
        x.filled(y.aval) if x.value is None else x.taken(take)
        for x, y, take in zip(inputs, before, takes, strict=True)
    ]
    return [*map(_Slice, cuts.outputs(equation, values), results)]


def _of_axes(equation: levels.Equation, kept: list[Kept]) -> _Plan:
    """Plans an equation that keeps the axes of slices, or sums over them."""
    name, inputs = equation.name, [Kept() for _ in kept]
    outputs: list[Kept] = [{} for _ in equation.outputs]

    def cut(places: Sequence[int | None] | None) -> list[np.ndarray]:
        rows = [*zip(kept, inputs, places or (), strict=False)]
        some = [x[i] for x, _, i in rows if i in x]
        # What one input lacks, none needs.
        both = [functools.reduce(np.intersect1d, some)] if some else []
        for _, own, i in rows if both else ():
            own.update({} if i is None else {i: both[0]})
        return both

    for output, own in zip(equation.outputs, outputs, strict=True):
        for axis in range(len(output.shape)):
            own.update((axis, x) for x in cut(cuts.of_rows(equation, output, axis)))
    for n, before in enumerate(kept):
        for axis in before.keys() - inputs[n].keys():
            if name not in cuts.SUMS or not cut(cuts.of_sum(equation, n, axis)):
                return None
    own = (outputs if name == "broadcast_in_dim" else inputs)[0]
    sizes = enumerate(equation.params[cuts.SIZES[name]] if name in cuts.SIZES else ())
    shape = tuple(len(own[i]) if i in own else size for i, size in sizes)
    return inputs, outputs, {cuts.SIZES[name]: shape} if shape else {}


def _of_places(equation: levels.Equation, kept: list[Kept]) -> _Plan:
    """Plans an equation that moves numbers, by where it moves marks of what is left."""
    (value,), rows = equation.inputs, _indices(kept[0], equation.inputs[0].shape)
    marks = np.zeros(value.shape, bool)
    marks[np.ix_(*rows)] = True
    with jax.ensure_compile_time_eval():
        moved = [*map(np.asarray, cuts.outputs(equation, [marks]))]
    sides = [*map(_sides, moved)]
    sizes = [tuple(int(x.sum()) for x in y) for y in sides]
    if [x.sum() for x in moved] != [math.prod(x) or -1 for x in sizes]:
        return None  # not slices
    left = [{i: x.nonzero()[0] for i, x in enumerate(y) if not x.all()} for y in sides]
    name, params = equation.name, equation.params
    if name == "reshape":
        return kept, left, {"new_sizes": sizes[0]}
    if name == "split":
        return kept, left, {"sizes": tuple(x[params["axis"]] for x in sizes)}
    names = "start_indices", "limit_indices"
    bounds = {x: tuple(map(int, map(np.searchsorted, rows, params[x]))) for x in names}
    return kept, left, bounds
