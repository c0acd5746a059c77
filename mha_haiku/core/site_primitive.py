"""Sites: intermediate values of a program that have a name.

A site is an equation of the traced program that returns its inputs. It leaves nothing
in compiled programs: it is lowered to its inputs, and leaves that nothing reads are
dropped one by one, as if the site were not there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval

PARAMETER = "mha_haiku_parameter"
"""Name that marks parameters, which recognition tells from data."""

SEEN = "mha_haiku_attention"
"""Named scope of attention that already has sites, which recognition skips."""


site_p = core.Primitive("site")
"""The primitive of a site, with rules for all transformations of JAX."""


class Facet(NamedTuple):
    """A view of the value of a site, which can be read and perhaps changed."""

    name: str  # the last part of the name, such as "map" or "weights"
    # From the value of the site to the view.
    read: Callable[[Any], Any] = lambda value: value
    # From the value of the site and a changed view to the changed value, or None if the
    # view is read-only.
    write: Callable[[Any, Any], Any] | None = lambda value, changed: changed
    advice: str = ""  # what to edit instead, if the view is read-only
    # What reads the view if other views of the same attention are edited, if that
    # differs from `read`.
    read_edited: Callable[[Any], Any] | None = None


def site(name: str, value: Any) -> Any:
    """Names a value, so that `look` and `edit` can find it.

    The full name begins with the path of the modules, or of the `jax.named_scope`s,
    around the site: "heads" in the attention of layer 2 is
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
    """Makes a value a site with several views.

    `fit` converts a changed value of another structure to the structure of the value,
    with which the program continues. It is not needed if facets keep the structure.
    """
    leaves, tree = jax.tree.flatten(value)
    if not leaves:
        return value
    leaves = site_p.bind(*leaves, **parameters(tree, facets, fit))
    return jax.tree.unflatten(tree, leaves)


def parameters(tree: Any, facets: tuple, fit: Callable | None = None) -> dict:
    """Makes the parameters of a site's equation, with all leaves present."""
    # `kept` lists the leaves that are present (all, unless a transformation dropped
    # some), `batched` has the batch axes of the leaves for each enclosing vmap, from
    # the innermost out.
    kept = tuple(range(tree.num_leaves))
    return {"facets": facets, "fit": fit, "tree": tree, "kept": kept, "batched": ()}


def mark_parameters(tree: Any) -> Any:
    """Marks arrays as parameters of the program being traced; it stays the same."""

    def mark(x: Any) -> Any:
        dtype = getattr(x, "dtype", None)  # None for an activation, say
        is_number = dtype is not None and jnp.issubdtype(dtype, np.number)
        return ad_checkpoint.checkpoint_name(x, PARAMETER) if is_number else x

    return jax.tree.map(mark, tree)


def _jvp(primals: Sequence, tangents: Sequence, **params) -> tuple[list, list]:
    return site_p.bind(*primals, **params), list(tangents)


def _transpose(cotangents: Sequence, *_, **__) -> list:
    return list(cotangents)


def _batch(
    leaves: Sequence, axes: Sequence, *, batched: tuple[tuple, ...], **params
) -> tuple[list, Sequence]:
    return site_p.bind(*leaves, batched=(*batched, tuple(axes)), **params), axes


def _drop_unused(
    used: Sequence[bool], *rest
) -> tuple[list[bool], core.JaxprEqn | None]:
    """Keeps the leaves that something reads; JAX's own rule keeps all or none."""
    eqn = rest[-1]
    if not any(used):
        return [False] * len(used), None

    def kept(values: Sequence):
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
