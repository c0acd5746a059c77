"""Edits and reads the facets of a site while a program runs.

A change is a function of the value and the number of its layer.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mha_haiku.core import display
from mha_haiku.core.marking import site_p
from mha_haiku.core.sites import naming, surveying
from mha_haiku.core.sites.jaxprs import under_vmaps


@dataclasses.dataclass(frozen=True)
class Resume:
    """An edit that starts a run at a layer, with a given input.

    Scanned layers before it are skipped; looped ones are dead code, which XLA drops.
    """

    layer: int | Array  # the first layer that runs; may be traced
    value: Any  # its input, with the structure of the site's value

    def __call__(self, value: Any, layer: int | Array | None) -> Any:
        if isinstance(layer, int) and isinstance(self.layer, int):
            return self.value if layer == self.layer else value
        return jax.tree.map(
            lambda new, old: jnp.where(layer == self.layer, new, old), self.value, value
        )


def with_layer(change: Callable) -> Callable:
    """Adapts a change that takes only the value to also take the layer."""
    if isinstance(change, Resume):
        return change
    try:
        parameters = inspect.signature(change).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return lambda value, layer: change(value)
    required = [
        x
        for x in parameters
        if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
        and x.default is x.empty
    ]
    if len(required) > 1:
        return change
    return lambda value, layer: change(value)


def passed(
    stop: surveying.Stop,
    leaves: list,
    turns: tuple,
    seen: dict[tuple[str, str], Any],
) -> list:
    """Edits the leaves of a site, and adds the values read to `seen`."""
    original, params = leaves, stop.site.params
    layer = naming.layer(stop.names[0], turns)
    for i, change, chosen in stop.edits:
        name = stop.names[i].replace(naming.TURN, "*")
        changed = functools.partial(_chosen, change, chosen, turns, layer, name)
        leaves, params = _edited(leaves, params, params["facets"][i], changed)
    for i, pattern, function in stop.reads:
        facet, tree = params["facets"][i], params["tree"]

        def read(*leaves, facet=facet, tree=tree, function=function):
            return function(facet.read(jax.tree.unflatten(tree, leaves)), layer)

        mapped = under_vmaps(read, params["batched"], own_axes=False)
        seen[stop.names[i], pattern] = mapped(*leaves)
    leaves = site_p.bind(*leaves, **params)
    if params["tree"] == stop.site.params["tree"]:
        return leaves

    # The program continues with a value of the structure that it expects.
    def fitted(original, *leaves):
        value = jax.tree.unflatten(stop.site.params["tree"], original)
        changed = jax.tree.unflatten(params["tree"], leaves)
        return jax.tree.leaves(params["fit"](value, changed))

    for old, new in zip(stop.site.params["batched"], params["batched"], strict=True):
        fitted = jax.vmap(fitted, (list(old), *new), list(old))
    return fitted(original, *leaves)


def _chosen(change, chosen, turns, layer, name, view):
    """Changes a view at the chosen turns of the scans."""
    if chosen.all():
        changed = change(view, layer)
        _check(name, view, changed)
        return _like(view, changed)
    _check(name, view, jax.eval_shape(lambda: change(view, layer)))
    return jax.lax.cond(
        jnp.asarray(chosen)[turns],
        lambda view: _like(view, change(view, layer)),
        lambda view: view,
        view,
    )


def _edited(leaves, params, facet, change) -> tuple[list, dict[str, Any]]:
    """Changes one facet of a site; returns the leaves and their parameters."""
    trees = []

    def changed(*leaves):
        value = jax.tree.unflatten(params["tree"], leaves)
        value = facet.write(value, change(facet.read(value)))
        leaves, tree = jax.tree.flatten(value)
        trees.append(tree)
        return leaves

    batched = params["batched"]
    if batched:
        jax.eval_shape(under_vmaps(changed, batched, own_axes=False), *leaves)
        if trees[-1] == params["tree"]:
            return under_vmaps(changed, batched, own_axes=True)(*leaves), params
    leaves = under_vmaps(changed, batched, own_axes=False)(*leaves)
    count = len(leaves)
    return leaves, params | {
        "tree": trees[-1],
        "kept": tuple(range(count)),
        "batched": ((0,) * count,) * len(batched),
    }


def _check(name, before, after) -> None:
    if _form(before) != _form(after):
        raise ValueError(
            f"the edit of {name!r} must return a value like its argument: "
            f"{display.value(before)}, got {display.value(after)}."
        )


def _form(view) -> tuple:
    """Returns what an edit must keep: the shape of a map, the structure of a tree."""
    structure, leaves = jax.tree.structure(view), jax.tree.leaves(view)
    if hasattr(view, "shape") and not jax.tree_util.treedef_is_leaf(structure):
        return type(view), view.shape
    return structure, [*map(jnp.shape, leaves)]


def _like(before, after):
    """Casts an edited view to the dtypes that it had."""

    def cast(x, y):
        dtype = jnp.result_type(x)
        return y if jnp.result_type(y) == dtype else jnp.asarray(y, dtype)

    if jax.tree.structure(before) != jax.tree.structure(after):
        return after
    return jax.tree.map(cast, before, after)
