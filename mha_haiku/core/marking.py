"""A site: a value worth looking at, with a name where it is computed.

A site is an equation of the traced program that passes its values on. Compiled programs
hold nothing of it: it is lowered to its own inputs, and what nothing reads is dropped
leaf by leaf, as if the site were not there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval

SEEN = "mha_haiku_attention"
"""Named scope around attention that is marked already, which recognition skips."""


site_p = core.Primitive("site")
"""The equation that a site is in a traced program, under all transformations of JAX."""


class Facet(NamedTuple):
    """One way to look at the value of a site, and to change it."""

    name: str  # the last part of the name, such as "map" or "weights"
    # From the value of the site to what is seen.
    read: Callable[[Any], Any] = lambda value: value
    # From the value of the site and a changed view to the changed value; None where it
    # can only be looked at.
    write: Callable[[Any, Any], Any] | None = lambda value, changed: changed
    advice: str = ""  # what to edit instead, where it can only be looked at


def site(name: str, value: Any) -> Any:
    """Names a value, which `look` and `edit` then find.

    In front of the name stands the path of the modules, or of the `jax.named_scope`s,
    in which the site is: "heads" in the attention of layer 2 is
    "encoder/layer_2/attention/heads". The value is any pytree of arrays.

    Example:
      >>> def f(x):
      ...     return 2 * mh.site("half", x + 1)
      ...
      >>> float(mh.look(f, ["half"])(3.0)[1]["half"])
      4.0
    """
    return faceted(value, (Facet(name),))


def faceted(
    value: Any,
    facets: tuple[Facet, ...],
    fit: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Makes a value a site that can be looked at in several ways.

    `fit` makes of a changed value of another structure one of the value's, with which
    the program continues; None: facets keep the structure.
    """
    leaves, tree = jax.tree.flatten(value)
    if not leaves:
        return value
    leaves = site_p.bind(*leaves, **parameters(tree, facets, fit))
    return jax.tree.unflatten(tree, leaves)


def parameters(tree, facets: tuple, fit: Callable | None = None) -> dict:
    """Makes the parameters of a site's equation, all of whose leaves are there."""
    # `kept` says which leaves of the value are there (all, unless a transformation
    # dropped some), `batched` where each vmap around has the axis of each leaf, from
    # the innermost vmap out.
    kept = tuple(range(tree.num_leaves))
    return {"facets": facets, "fit": fit, "tree": tree, "kept": kept, "batched": ()}


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


site_p.multiple_results = True
site_p.def_impl(lambda *leaves, **_: list(leaves))
site_p.def_abstract_eval(lambda *leaves, **_: list(leaves))
mlir.register_lowering(site_p, lambda context, *leaves, **_: list(leaves))
ad.primitive_jvps[site_p] = _jvp
ad.primitive_transposes[site_p] = _transpose
batching.primitive_batchers[site_p] = _batch
partial_eval.dce_rules[site_p] = _drop_unused
