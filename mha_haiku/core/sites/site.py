"""A site: a value worth looking at, with a name where it is computed.

A site is an equation of the traced program that passes its values on. Compiled programs
hold nothing of it: it is lowered to its own inputs, and what nothing reads is dropped
leaf by leaf, as if the site were not there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mha_haiku.core.sites.primitive import parameters, site_p

SEEN = "mha_haiku_attention"
"""Named scope around attention that has a site already, which recognition skips."""


class Facet(NamedTuple):
    """One way to look at the value of a site, and to change it."""

    name: str  # the last part of the name, such as "map" or "weights"
    read: Callable[[Any], Any]  # from the value of the site to what is seen
    # From the value of the site and a changed view to the changed value; None where it
    # can only be looked at.
    write: Callable[[Any, Any], Any] | None
    advice: str = ""  # what to edit instead, where it can only be looked at


def site(name: str, value: Any) -> Any:
    """Returns the value, which `look` and `edit` then find by its name.

    Args:
      name: What it is called. In front of it stands the path of the modules, or of the
        `jax.named_scope`s, in which the site is: "heads" in the attention of layer 2
        is "encoder/layer_2/attention/heads".
      value: Arrays, in any pytree.
    """
    return faceted(value, (Facet(name, _itself, _replaced),))


def faceted(
    value: Any,
    facets: tuple[Facet, ...],
    fit: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Returns the value of a site that can be looked at in several ways.

    `fit` goes from the value and a changed one of another structure to one of its own,
    with which the program continues; None: facets keep the structure.
    """
    leaves, tree = jax.tree.flatten(value)
    if not leaves:
        return value
    leaves = site_p.bind(*leaves, **parameters(tree, facets, fit))
    return jax.tree.unflatten(tree, leaves)


def _itself(value):
    return value


def _replaced(value, changed):
    del value
    return changed
