"""Named, invertible changes between our arrays and theirs.

A change is a pair of functions, from their arrays to ours and back. Both take a list of
arrays and a `Place`. Linear maps of torch are `[out, in]`, ours are `[in, out]`.

D width, H heads, K size of a head.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import models


class Place(NamedTuple):
    """The place of an array in a model."""

    config: models.ModelConfig
    theirs: Mapping[str, Any]  # the contents of `config.json`, checked
    layer: int  # the layer's number; 0 outside of layers


Arrays = list[np.ndarray]


class Change(NamedTuple):
    """A transformation of arrays and its inverse."""

    to_ours: Callable[[Arrays, Place], Arrays]
    to_theirs: Callable[[Arrays, Place], Arrays]


def _each(to_ours: Callable, to_theirs: Callable) -> Change:
    """Makes the change that maps every array by itself, in any place."""
    return Change(
        lambda arrays, place: [to_ours(x) for x in arrays],
        lambda arrays, place: [to_theirs(x) for x in arrays],
    )


def chain(*changes: Change) -> Change:
    """Chains the changes, in the order in which arrays load."""

    def to_ours(arrays, place):
        for change in changes:
            arrays = change.to_ours(arrays, place)
        return arrays

    def to_theirs(arrays, place):
        for change in reversed(changes):
            arrays = change.to_theirs(arrays, place)
        return arrays

    return Change(to_ours, to_theirs)


as_it_is = _each(lambda x: x, lambda x: x)
transposed = _each(lambda x: x.T, lambda x: x.T)
# Norms of Gemma store their scale minus 1.
scale_less_one = _each(
    lambda x: x.astype(np.float32) + np.float32(1),
    lambda x: x.astype(np.float32) - np.float32(1),
)
# Queries, keys and values side by side, along the last axis.
thirds = Change(
    lambda arrays, place: np.split(arrays[0], 3, -1),
    lambda arrays, place: [np.concatenate(arrays, -1)],
)
# A convolution whose stride is its size is a linear map of patches; theirs is
# [D, channels, P, P].
convolution = Change(
    lambda arrays, place: [x.reshape(len(x), -1).T for x in arrays],
    lambda arrays, place: [
        x.T.reshape(x.shape[1], -1, *place.config.embedding.image[-1:] * 2)
        for x in arrays
    ],
)


def _class_token_to_ours(arrays, place):
    positions, token, bias = arrays
    ours = positions[0].astype(np.float32)
    ours[0] += token[0, 0].astype(np.float32) - bias.astype(np.float32)
    return [ours, bias]


# A class token before the patches is a patch of zeros, which the embedding turns into
# its bias: the rest of the token goes into the first position.
class_token = Change(
    _class_token_to_ours,
    lambda arrays, place: [arrays[0][None], arrays[1].reshape(1, 1, -1), arrays[1]],
)


def rows_from(first: Callable[[Place], int]) -> Change:
    """Makes the change that leaves out the unused rows before `first(place)`."""
    return Change(
        lambda arrays, place: [x[first(place) :] for x in arrays],
        lambda arrays, place: [np.pad(x, [(first(place), 0), (0, 0)]) for x in arrays],
    )


def by_heads(order: Callable[[Place], np.ndarray]) -> Change:
    """Makes the change from `[H 3 K, ...]` to three of `[H K, ...]`, by heads.

    GPT-NeoX stores a head's query, key and value one after the other. Mixing this up
    with `thirds` gives wrong numbers and no error. `order(place)` has the features
    `[K]` of queries and keys in the order that puts rotary pairs K/2 apart.
    """

    def to_ours(arrays, place):
        (x,) = arrays
        features = order(place)
        parts = x.reshape(place.config.attention.num_heads, 3, -1, *x.shape[1:])
        query, key, value = np.moveaxis(parts, 1, 0)
        parts = query[:, features], key[:, features], value
        return [part.reshape(-1, *x.shape[1:]) for part in parts]

    def to_theirs(arrays, place):
        features = np.argsort(order(place))
        num_heads, rest = place.config.attention.num_heads, arrays[0].shape[1:]
        query, key, value = (x.reshape(num_heads, -1, *rest) for x in arrays)
        parts = np.stack([query[:, features], key[:, features], value], axis=1)
        return [parts.reshape(-1, *rest)]

    return Change(to_ours, to_theirs)
