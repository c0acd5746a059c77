"""Runs a traced program again, with reads and edits at its sites.

JAX runs a level without reads and edits unchanged, with its custom gradients; in the
other levels JAX runs the equations between two sites. A change is a function of the
value and the number of its layer.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from mha_haiku.core import display
from mha_haiku.core.site_primitive import site_p
from mha_haiku.core.sites import blocks, jaxprs, site_survey
from mha_haiku.core.sites.jaxprs import under_vmaps


@dataclasses.dataclass(frozen=True)
class Resume:
    """An edit of the inputs of layers that starts a run at one of them.

    Scanned layers before it are skipped; looped ones are dead code, which XLA drops.
    """

    first: int | Array  # the number of the layer, as for `edit`; may be traced
    value: Any  # its input, with the structure of the site's value

    def __call__(self, value: Any, number: int | Array | None) -> Any:
        if isinstance(number, int) and isinstance(self.first, int):
            return self.value if number == self.first else value
        return jax.tree.map(
            lambda new, old: jnp.where(number == self.first, new, old),
            self.value,
            value,
        )


def with_layer(change: Callable) -> Callable:
    """Adapts a change that takes only the value to also take a number."""
    parameters = inspect.signature(change).parameters.values()
    required = [
        x
        for x in parameters
        if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
        and x.default is x.empty
    ]
    if len(required) > 1:
        return change
    return lambda value, layer: change(value)


def run(
    level: site_survey.Level, turns: tuple, *args
) -> tuple[list, dict[tuple[str, site_survey.Address], Any]]:
    """Runs a level at the turns of the enclosing scans, from the outermost.

    Returns its outputs, and the values read, by name and address.
    """
    jaxpr, seen = level.closed.jaxpr, {}
    values = dict(zip(jaxpr.constvars, level.closed.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atom: core.Var | core.Literal) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    stops = [stop for stop in level.stops if stop.is_active]
    inner = {
        index: levels
        for index, levels in level.inner.items()
        if any(stop.is_active for nested in levels for stop in nested.all_stops())
    }
    last_use = _last_uses(jaxpr, stops)
    begin = 0
    for index in sorted(
        {*inner, *(stop.site.index for stop in stops), len(jaxpr.eqns)}
    ):
        _run_plain(jaxpr, begin, index, last_use, values)
        begin = index
        for stop in (stop for stop in stops if stop.site.index == index):
            # Computations of an edit belong to the layer, too, in case of a second
            # look.
            with jax.named_scope(stop.scope or "/"):
                inputs = [read(x) for x in stop.site.inputs]
                leaves = _passed(stop, inputs, turns, seen)
            values.update(zip(stop.site.outputs, leaves, strict=True))
            begin = index + (stop.group is None)
        if index in inner:
            eqn = jaxpr.eqns[index]
            with jax.named_scope(jaxprs.path(eqn) or "/"):
                outputs, inside = _run_nested(
                    eqn, inner[index], [read(x) for x in eqn.invars], turns
                )
            seen |= inside
            has_edits = any(stop.edits for stop in inner[index][0].all_stops())
            if eqn.primitive.name in jaxprs.CUSTOM and not has_edits:
                continue  # it runs unchanged, and keeps its custom gradient
            values.update(zip(eqn.outvars, outputs, strict=True))
            begin = index + 1
    return [read(x) for x in jaxpr.outvars], seen


def _run_plain(
    jaxpr: core.Jaxpr,
    begin: int,
    end: int,
    last_use: dict[core.Var, int],
    values: dict[core.Var, Any],
) -> None:
    # JAX itself runs equations without reads and edits, which keeps their rules: how to
    # bind primitives one by one differs between versions of JAX.
    eqns = jaxpr.eqns[begin:end]
    made = dict.fromkeys(
        x for eqn in eqns for x in eqn.outvars if not isinstance(x, core.DropVar)
    )
    read = (x for eqn in eqns for x in jaxprs.variables(eqn.invars))
    inputs = dict.fromkeys(x for x in read if x not in made)
    outputs = [x for x in made if last_use.get(x, -1) >= end]
    part = jaxprs.part(jaxpr, inputs, outputs, eqns)
    results = jaxprs.bound(part, [values[x] for x in inputs])
    values.update(zip(outputs, results, strict=True))


def _last_uses(jaxpr: core.Jaxpr, stops: list[site_survey.Stop]) -> dict[core.Var, int]:
    reads: list[tuple] = [*enumerate(eqn.invars for eqn in jaxpr.eqns)]
    reads += [(stop.site.index, stop.site.inputs) for stop in stops]
    reads += [(len(jaxpr.eqns), jaxpr.outvars)]
    reads = sorted(reads, key=operator.itemgetter(0))
    return {x: index for index, atoms in reads for x in jaxprs.variables(atoms)}


def _run_nested(
    eqn: core.JaxprEqn, levels: list[site_survey.Level], inputs: list, turns: tuple
) -> tuple[list, dict]:
    """Runs an equation that holds levels; returns its outputs and the values read."""
    name, params = eqn.primitive.name, eqn.params
    body = functools.partial(run, levels[0], turns)
    if name == jaxprs.BLOCKWISE:
        return blocks.of_numbers(body, params["limit"])(*inputs)
    if name in jaxprs.REMAT:
        options = {key: params[key] for key in ("policy", "prevent_cse")}
        return jax.checkpoint(body, **options)(*inputs)
    if name in ("jit", "pjit"):
        shardings = params["in_shardings"]
        is_given = all(isinstance(x, jax.sharding.Sharding) for x in shardings)
        body = jax.jit(body, **({"in_shardings": shardings} if is_given else {}))
    if name in (*jaxprs.CALLS, *jaxprs.CUSTOM):
        return body(*inputs)
    if name == "scan":
        return _scanned(eqn, levels[0], inputs, turns)
    if name == "cond":
        return _branched(levels, inputs, turns)
    if name == "while":
        return _repeated(eqn, levels, inputs, turns), {}
    if name == "shard_map":
        return _sharded(eqn, levels[0], inputs, turns)
    inside = [stop.names[0] for level in levels for stop in level.all_stops()]
    raise ValueError(
        f"the site {inside[0]!r} is inside {name}, which cannot be run again with "
        "changes; call look or edit on the function inside it."
    )


def _scanned(
    eqn: core.JaxprEqn, level: site_survey.Level, inputs: list, turns: tuple
) -> tuple[list, dict]:
    params, length = eqn.params, eqn.params["length"]
    num_consts, num_carry = jaxprs.carried(eqn)
    num_unscanned = num_consts + num_carry
    fixed, carry = inputs[:num_consts], inputs[num_consts:num_unscanned]
    resumed = [
        edit
        for stop in level.all_stops()
        for edit in stop.edits
        if isinstance(edit.change, Resume)
    ]

    def step(carry: list, x: Any):
        turn, x = x

        def whole(carry: list):
            outputs, seen = run(level, (*turns, turn), *fixed, *carry, *x)
            return outputs[:num_carry], (outputs[num_carry:], seen)

        if not resumed:
            return whole(carry)

        def skipped(carry: list):
            _, rest = jax.eval_shape(whole, carry)
            return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)

        numbers = jnp.asarray(resumed[0].numbers)[(*turns, turn)]
        runs = numbers.max() >= resumed[0].change.first
        return jax.lax.cond(runs, whole, skipped, carry)

    carry, (stacked, seen) = jax.lax.scan(
        step,
        carry,
        (jnp.arange(length), inputs[num_unscanned:]),
        length=length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    by_turn = {}
    for (name, address), value in seen.items():
        before, _, after = name.rpartition(site_survey.TURN)
        for i in range(length):
            by_turn[f"{before}{i}{after}", address] = jax.tree.map(
                lambda x, i=i: jax.lax.index_in_dim(x, i, keepdims=False), value
            )
    return [*carry, *stacked], by_turn


def _branched(
    levels: list[site_survey.Level], inputs: list, turns: tuple
) -> tuple[list, dict]:
    index, *inputs = inputs
    seen = [jax.eval_shape(functools.partial(run, x, turns), *inputs) for x in levels]
    every = functools.reduce(operator.or_, (values for _, values in seen))

    def unseen(x: jax.ShapeDtypeStruct):  # the value in a branch that was not taken
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.full(x.shape, jnp.nan if is_float else 0, x.dtype)

    def taken(level: site_survey.Level, *inputs) -> tuple[list, dict]:
        outputs, values = run(level, turns, *inputs)
        return outputs, jax.tree.map(unseen, every) | values

    branches = [functools.partial(taken, level) for level in levels]
    return jax.lax.switch(index, branches, *inputs)


def _repeated(
    eqn: core.JaxprEqn, levels: list[site_survey.Level], inputs: list, turns: tuple
) -> list:
    test, body = levels
    for_test = eqn.params["cond_nconsts"]
    for_body = for_test + eqn.params["body_nconsts"]

    def goes_on(carry: list) -> Array:
        return run(test, turns, *inputs[:for_test], *carry)[0][0]

    # Under vmap, with an axis in front, each example keeps the carry of its end.
    def step(carry: list) -> list:
        goes = goes_on(carry)

        def kept(new: Array, old: Array) -> Array:
            axes = tuple(range(goes.ndim, jnp.ndim(new)))
            return jnp.where(jnp.expand_dims(goes, axes), new, old)

        changed = run(body, turns, *inputs[for_test:for_body], *carry)[0]
        return [*map(kept, changed, carry)]

    return jax.lax.while_loop(lambda x: goes_on(x).any(), step, inputs[for_body:])


def _sharded(
    eqn: Any, level: site_survey.Level, inputs: list, turns: tuple
) -> tuple[list, dict]:
    """Runs a shard_map; values read have an axis of the devices in front."""
    params = eqn.params
    mesh = params["mesh"]
    axes = tuple(x for x in mesh.axis_names if x in params["newly_manual_axes"])

    def body(*inputs):
        outputs, seen = run(level, turns, *inputs)
        return outputs, jax.tree.map(lambda x: jnp.asarray(x)[None], seen)

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), jax.sharding.PartitionSpec(axes)),
        check_vma=params["check_vma"],
        axis_names=set(axes),
    )
    return mapped(*inputs)


# --- The reads and edits at a site


def _passed(stop: site_survey.Stop, leaves: list, turns: tuple, seen: dict) -> list:
    """Edits the leaves of a site, and adds the values read to `seen`."""
    original, params = leaves, stop.site.params
    for edit in stop.edits:
        name = stop.names[edit.facet].replace(site_survey.TURN, "*")
        changed = functools.partial(_chosen, edit, turns, name)
        leaves, params = _edited(leaves, params, params["facets"][edit.facet], changed)
    layer = site_survey.number_at(stop.layers(), turns)
    site = stop.site._replace(params=params)
    for i, address, function in stop.reads:
        facet = params["facets"][i]
        read = lambda value, x=facet, f=function: f(x.read(value), layer)  # noqa: E731
        seen[stop.names[i], address] = site.function_of(read)(*leaves)
    leaves = site_p.bind(*leaves, **params)
    if params["tree"] == stop.site.params["tree"]:
        return leaves

    # The program continues with a value of the structure that it expects.
    def fitted(original: list, *leaves):
        value = jax.tree.unflatten(stop.site.params["tree"], original)
        changed = jax.tree.unflatten(params["tree"], leaves)
        return jax.tree.leaves(params["fit"](value, changed))

    for old, new in zip(stop.site.params["batched"], params["batched"], strict=True):
        fitted = jax.vmap(fitted, (list(old), *new), list(old))
    return fitted(original, *leaves)


def _chosen(edit: site_survey.Edit, turns: tuple, name: str, view: Any) -> Any:
    number = site_survey.number_at(edit.numbers, turns)

    def changed(view: Any) -> Any:
        after = edit.change(view, number)
        if _form(view) != _form(after):
            raise ValueError(
                f"the edit of {name!r} must return a value like its argument: "
                f"{display.value(view)}, got {display.value(after)}."
            )
        return _like(view, after)

    if edit.chosen.all():
        return changed(view)
    return jax.lax.cond(jnp.asarray(edit.chosen)[turns], changed, lambda x: x, view)


def _edited(
    leaves: list, params: dict[str, Any], facet: Any, change: Callable
) -> tuple[list, dict[str, Any]]:
    """Changes one facet of a site; returns the leaves and their parameters."""

    def changed(*leaves):
        value = jax.tree.unflatten(params["tree"], leaves)
        return facet.write(value, change(facet.read(value)))

    batched = params["batched"]
    mapped = under_vmaps(changed, batched, own_axes=False)
    shapes = jax.eval_shape(mapped, *leaves) if batched else None
    if batched and jax.tree.structure(shapes) == params["tree"]:
        kept = lambda *leaves: jax.tree.leaves(changed(*leaves))  # noqa: E731
        return under_vmaps(kept, batched, own_axes=True)(*leaves), params
    leaves, tree = jax.tree.flatten(mapped(*leaves))
    count = len(leaves)
    return leaves, params | {
        "tree": tree,
        "kept": tuple(range(count)),
        "batched": ((0,) * count,) * len(batched),
    }


def _form(view: Any) -> tuple:
    """Returns what an edit must keep: the shape of a map, the structure of a tree."""
    structure, leaves = jax.tree.structure(view), jax.tree.leaves(view)
    if hasattr(view, "shape") and not jax.tree_util.treedef_is_leaf(structure):
        return type(view), view.shape
    return structure, [*map(jnp.shape, leaves)]


def _like(before: Any, after: Any) -> Any:
    """Casts an edited view to the dtypes that it had."""

    def cast(x: Any, y: Any):
        dtype = jnp.result_type(x)
        return y if jnp.result_type(y) == dtype else jnp.asarray(y, dtype)

    if jax.tree.structure(before) != jax.tree.structure(after):
        return after
    return jax.tree.map(cast, before, after)
