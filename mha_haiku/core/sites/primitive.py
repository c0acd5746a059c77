"""The equation that a site is in a traced program, under all transformations of JAX."""

from collections.abc import Callable

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval


def under_vmaps(
    function: Callable, batched: tuple[tuple, ...], *, own_axes: bool
) -> Callable:
    """Returns a function of a site's leaves as under the vmaps around the site.

    With `own_axes` results have the axes of these vmaps where leaves do; else in front.
    """
    for axes in batched:
        function = jax.vmap(function, axes, list(axes) if own_axes else 0)
    return function


def parameters(tree, facets: tuple, fit: Callable | None = None) -> dict:
    """Returns the parameters of a site's equation, all of whose leaves are there.

    They are `facets` and `fit`, the `tree` of the value, which of its leaves are `kept`
    (all, unless a transformation dropped some), and where each vmap around has the axis
    of each leaf, from the innermost vmap out.
    """
    kept = tuple(range(tree.num_leaves))
    return {"facets": facets, "fit": fit, "tree": tree, "kept": kept, "batched": ()}


site_p = core.Primitive("site")
site_p.multiple_results = True
site_p.def_impl(lambda *leaves, **_: list(leaves))
site_p.def_abstract_eval(lambda *leaves, **_: list(leaves))
mlir.register_lowering(site_p, lambda context, *leaves, **_: list(leaves))


def _jvp(primals, tangents, **params):
    return site_p.bind(*primals, **params), list(tangents)


def _transpose(cotangents, *_, **__):
    return list(cotangents)


def _batch(leaves, axes, *, batched, **params):
    return site_p.bind(*leaves, batched=(*batched, tuple(axes)), **params), axes


def _drop_unused(used, *rest):
    """Keeps the leaves that something reads; JAX's own rule keeps all or none."""
    eqn = rest[-1]
    if not any(used):
        return [False] * len(used), None

    def kept(values):
        return tuple(x for x, is_used in zip(values, used, strict=True) if is_used)

    params = dict(
        eqn.params,
        kept=kept(eqn.params["kept"]),
        batched=tuple(map(kept, eqn.params["batched"])),
    )
    invars, outvars = list(kept(eqn.invars)), list(kept(eqn.outvars))
    return list(used), eqn.replace(invars=invars, outvars=outvars, params=params)


ad.primitive_jvps[site_p] = _jvp
ad.primitive_transposes[site_p] = _transpose
batching.primitive_batchers[site_p] = _batch
partial_eval.dce_rules[site_p] = _drop_unused
