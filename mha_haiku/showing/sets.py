"""From anything that has attention maps to the `MapSet`s of a page.

Whoever has maps says here how they become a set: `map_set_of.register(Class)`.

H heads, T positions.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import attention, checks
from mha_haiku.core.attention import sited
from mha_haiku.showing.dossier import Dossier
from mha_haiku.showing.map_set import MapSet


class Given(NamedTuple):
    """Maps, and what is known of their sides.

    Attributes:
      maps: Maps as `mh.show` takes them; or anything else, where there are no maps.
      tokens: Labels as `mh.show` takes them.
      key_tokens: Labels as `mh.show` takes them.
      why: Why heads look there, `heads.why.Cells` of one example.
    """

    maps: Any
    tokens: Any = None
    key_tokens: Any = None
    why: tuple[Any, ...] = ()


@functools.singledispatch
def maps_of(value: Any) -> Given:
    """Returns the maps in a value, which is returned itself where there are none.

    Plain arrays of weights `[B, H, T, S]`, such as `outputs.attentions` of
    transformers, become maps.
    """
    if _is_weights(value):
        return Given(sited.map_of_weights(_array(value), are_shares=True))
    if isinstance(value, list | tuple) and value and all(map(_is_weights, value)):
        return Given([maps_of(each).maps for each in value])
    return Given(value)


def given(value: Any, tokens: Any = None, key_tokens: Any = None) -> Given:
    """Returns the maps in a value; tokens that are given replace those that it has."""
    maps, own, own_keys, why = maps_of(value)
    return Given(
        maps,
        own if tokens is None else tokens,
        own_keys if key_tokens is None else key_tokens,
        why,
    )


@functools.singledispatch
def map_set_of(value: Any) -> MapSet:
    """Returns the maps that something has by itself: a run, on held-out examples."""
    raise TypeError(f"compare must be a run or its folder, got {type(value).__name__}.")


@map_set_of.register
def _(value: MapSet) -> MapSet:
    return value


@functools.singledispatch
def dossier_of(value: Any, compare: Any = None) -> Dossier:
    """Returns what the page of something shows that has maps by itself.

    `compare` is another such thing, or a dict of one by its name; None: nothing.
    """
    return joined(value, compare)


def joined(value: Any, compare: Any = None) -> Dossier:
    """Joins one set, or two next to each other, to a dossier."""
    other_name, compare = named(compare)
    sets, names = [map_set_of(value)], [""]
    if compare is not None:
        sets.append(map_set_of(compare))
        names = [sets[0].name, other_name or sets[1].name]
        if names[0] == names[1]:
            names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    title = " and ".join(each.name for each in sets)
    pairs = zip(sets, names, strict=True)
    return Dossier(
        title, tuple(dataclasses.replace(x, name=n, step=None) for x, n in pairs)
    )


def has_own(value: Any) -> bool:
    """Returns whether something has maps by itself."""
    return map_set_of.dispatch(type(value)) is not map_set_of.dispatch(object)


def with_heads(maps: MapSet, heads: Any) -> MapSet:
    """Returns the set of some heads, by their names in the unpruned model."""
    if not np.ndim(heads) or not len(heads):
        raise ValueError(f"heads must be a list of heads, as [0, 2], got {heads!r}.")
    known = sorted({name for layer in maps.layers for name in layer.heads}, key=int)
    wanted = [checks.choice("heads", str(head), known) for head in heads]
    places = [
        [layer.heads.index(name) for name in wanted if name in layer.heads]
        for layer in maps.layers
    ]
    return maps.with_heads(places)


def named(value: Any) -> tuple[str, Any]:
    """Returns the name that is given to what is shown, "" for none, and that itself."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, value),) = value.items()
        return str(name), value
    return "", value


def _is_weights(value) -> bool:
    """Returns whether a value is an array of floats with four axes, of any library."""
    if isinstance(value, attention.AttentionMap) or not hasattr(value, "dtype"):
        return False
    return len(value.shape) == 4 and "float" in str(value.dtype)


def _array(value) -> np.ndarray:
    """Converts an array of jax, NumPy or torch to NumPy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().float()
    weights = np.asarray(value)
    if not (weights >= 0).all():
        raise ValueError("weights [B, H, T, S] must be at least 0.")
    return weights
