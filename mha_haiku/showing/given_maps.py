"""From attention maps to what a page shows: arrays on the host, pooled where needed.

Weights are whole up to `WHOLE` positions and pooled beyond.

N examples (all of the batch axes), T query and S key positions.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import attention, display, models
from mha_haiku.core.attention import scores
from mha_haiku.lab import heads
from mha_haiku.showing import collecting
from mha_haiku.showing.map_set import Axes, Axis, Example, Images, Layer, MapSet, Why

WHOLE = 512  # positions, up to which maps are taken whole
_BINS = 128  # of longer ones
_MOST_EXAMPLES = 16
_MOST_CHANNEL_NUMBERS = 2**21  # of a layer, up to which a page has queries and keys


class Sides(NamedTuple):
    """What stands along the maps of N examples; () where nothing is known.

    Attributes:
      queries: Text, for each example, of its T queries.
      keys: Text, for each example, of its S keys.
      images: An `Images` or None for each example.
    """

    queries: tuple[tuple[str, ...], ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    images: tuple[Images | None, ...] = ()


_NOTHING = Sides()


def sides(
    attention_map: attention.AttentionMap,
    tokens: Any,
    key_tokens: Any = None,
    images: Any = None,
) -> Sides:
    """Returns what stands along the sides of a map; arguments as of `show`."""
    *batch_shape, _, num_queries, num_keys = attention_map.shape
    count = math.prod(batch_shape)
    queries = _texts("tokens", tokens, count, num_queries)
    keys = _texts("key_tokens", key_tokens, count, num_keys)
    if not keys and num_queries == num_keys:
        keys = queries
    return Sides(queries, keys, _all_images(images, count))


def is_maps(value: Any) -> bool:
    """Returns whether a value is a map, or maps in something."""
    if isinstance(value, attention.AttentionMap | models.Output):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return is_list and any(isinstance(x, attention.AttentionMap) for x in value)


def named_maps(
    value: Any, names: Sequence[str] | None = None
) -> tuple[dict[str, attention.AttentionMap], tuple[str, ...]]:
    """Returns the map of each layer by its name, and of an encoder-decoder its kind.

    All maps, or where there are kinds all maps of a kind, must have equal sizes.
    """
    value = value.maps if isinstance(value, models.Output) else value
    kinds: tuple[str, ...] = ()
    if isinstance(value, models.Maps):
        pairs = zip(models.KINDS, value.kinds, strict=True)
        kinds = tuple(kind for kind, count in pairs for _ in range(count))
    if isinstance(value, attention.AttentionMap):
        found = {"attention": value}
    elif kinds:
        found = {
            f"{kind} {i - kinds.index(kind)}": value[i] for i, kind in enumerate(kinds)
        }
    elif isinstance(value, Mapping):
        found = {str(name): each for name, each in value.items()}
    elif isinstance(value, list | tuple):
        found = {f"layer {i}": each for i, each in enumerate(value)}
    else:
        raise TypeError(
            "maps must be an AttentionMap, a list or a dict of them, got "
            f"{type(value).__name__}."
        )
    if not found:
        raise ValueError("maps must not be empty.")
    for name, each in found.items():
        if not isinstance(each, attention.AttentionMap):
            raise TypeError(
                f"maps must be AttentionMaps, got {type(each).__name__} for {name!r}."
            )
        if display.is_traced(each):
            raise ValueError(
                f"maps must be known to be shown, got one that is traced: {each!r}; "
                "return it from the compiled function."
            )
    kind_of = dict(zip(found, kinds, strict=True)) if kinds else {}
    for kind in dict.fromkeys(kinds or [""]):
        _check_sizes({x: y for x, y in found.items() if kind_of.get(x, "") == kind})
    if names is not None:
        names = [names] if isinstance(names, str) else list(map(str, names))
        if len(set(names)) != len(found) or len(names) != len(found):
            raise ValueError(
                f"names must be {len(found)} different ones, a name for each map, got "
                f"{names!r}."
            )
        found = dict(zip(names, found.values(), strict=True))
    return found, kinds


def map_set(
    maps: Mapping[str, attention.AttentionMap],
    sides: Sides = _NOTHING,
    *,
    only: int | None = None,
    name: str = "",
    kinds: Sequence[str] = (),
    has_numbers: bool = True,
) -> MapSet:
    """Reads what maps hold, in one pass over each.

    Maps and their kinds are as of `named_maps`; where there are kinds, `sides` are for
    the cross maps. `only` is the index of one example; None: the first ones. Without
    `has_numbers` there are no statistics of the heads, which take a second to compile.
    """
    kinds = kinds or ("",) * len(maps)
    batch_shape = next(iter(maps.values())).shape[:-3]
    count = min(math.prod(batch_shape), _MOST_EXAMPLES)
    shown = list(range(count)) if only is None else [only]
    is_whole = all(max(each.shape[-2:]) <= WHOLE for each in maps.values())
    layers, seen, edges = [], [], {}
    for (layer, each), kind in zip(maps.items(), kinds, strict=True):
        found = collecting.see_alone(
            each,
            examples=np.array(shown),
            bins=None if is_whole else _BINS,
            kind=kind,
            tokens=_token_ids(sides, each) if has_numbers and is_whole else None,
            has_numbers=has_numbers,
            has_channels=_has_channels(each, len(shown)),
        )
        seen.append(jax.device_get(found))
        layers.append(Layer(layer, tuple(map(str, range(each.shape[-3]))), kind))
        edges[kind] = [
            attention.bin_edges(size, size if is_whole else _BINS)
            for size in each.shape[-2:]
        ]
    places = np.transpose(np.unravel_index(shown, batch_shape or (1,))).tolist()
    examples = []
    for example, place in zip(shown, places, strict=True):
        axes = {kind: _axes(sides, kind, example, edges[kind]) for kind in edges}
        queries, keys, *_ = axes.get("decoder", axes[kinds[0]])
        examples.append(
            Example(
                "example " + ", ".join(map(str, place)),
                queries,
                keys,
                (),
                images=sides.images[example] if sides.images else None,
                kinds={kind: each for kind, each in axes.items() if kind},
            )
        )
    return collecting.map_set(name, layers, seen, examples)


def with_why(shown: MapSet, why: Sequence[heads.why.Cells]) -> MapSet:
    """Returns a set whose first example says why its heads look there."""
    if not why:
        return shown
    cells, scores, pairs, terms = [], [], [], []
    for each in why:
        for part, own in each.scores.items():
            at = np.argwhere(np.isfinite(own))
            h, r = at.T
            place = np.full(len(at), part), h, each.queries[r], each.keys[part][h, r]
            cells.append(np.stack(place, -1))
            scores.append(own[h, r])
            pairs.append(each.pairs[part][h, r])
            terms.append(each.terms[part][h, r])
    arrays = map(np.concatenate, (cells, scores, pairs, terms))
    first, *others = shown.examples
    first = first._replace(why=Why(tuple(map(str, why[0].components)), *arrays))
    return dataclasses.replace(shown, examples=(first, *others))


def _has_channels(attention_map, count) -> bool:
    """Returns whether queries and keys of so many examples are shown."""
    *_, num_heads, num_queries, num_keys = attention_map.shape
    size = attention_map.query.shape[-1]
    amount = count * num_heads * (num_queries + num_keys) * size
    is_product = isinstance(attention_map.weighting.score, scores.DotProduct)
    return is_product and 0 < amount <= _MOST_CHANNEL_NUMBERS


def check_same_sizes(
    maps: Mapping[str, attention.AttentionMap],
    others: Mapping[str, attention.AttentionMap],
) -> None:
    """Raises ValueError if maps that are compared differ in batch axes, T or S."""
    first, second = (list(each.values())[-1].shape for each in (maps, others))
    if (first[:-3], first[-2:]) != (second[:-3], second[-2:]):
        raise ValueError(
            "compare must have the batch axes, T and S of the maps, which are of shape "
            f"{first}, got {second}."
        )


def _check_sizes(maps) -> None:
    (first, one), *others = maps.items()
    *batch_shape, _, num_queries, num_keys = one.shape
    if 0 in batch_shape or not num_queries or not num_keys:
        raise ValueError(
            f"maps must have examples, queries and keys, got shape {one.shape}, which "
            "is (B..., H, T, S)."
        )
    for name, each in others:
        if (each.shape[:-3], each.shape[-2:]) != (one.shape[:-3], one.shape[-2:]):
            raise ValueError(
                "maps in one view must have the same batch axes, T and S, got "
                f"{one.shape} for {first!r} and {each.shape} for {name!r}, which are "
                "(B..., H, T, S)."
            )
    if not any(each.shape[-3] for each in maps.values()):
        raise ValueError("maps must have heads, got none in any of them.")


def _axes(sides, kind, example, edges) -> Axes:
    """Returns what stands along the maps of a kind of layers."""
    texts = {
        "encoder": (sides.keys, sides.keys),
        "decoder": (sides.queries, sides.queries),
    }.get(kind, (sides.queries, sides.keys))
    return Axes(
        *(
            Axis(own[example] if own else ("",) * int(each[-1]), each)
            for own, each in zip(texts, edges, strict=True)
        )
    )


def _token_ids(sides, attention_map) -> np.ndarray | None:
    """Returns `[B..., T]` integers, the same for equal texts; None: not known."""
    *batch_shape, _, num_queries, num_keys = attention_map.shape
    if not sides.queries or sides.queries != sides.keys or sides.images:
        return None
    _, ids = np.unique(np.array(sides.queries), return_inverse=True)
    ids = ids.reshape(-1, num_queries)[: math.prod(batch_shape)]
    return ids.reshape(*batch_shape, num_queries).astype(np.int32)


def _texts(name: str, tokens: Any, count: int, length: int) -> tuple:
    """Returns N tuples of T strings; () where the tokens are None."""
    if tokens is None:
        return ()
    if isinstance(tokens, jax.Array):
        tokens = np.asarray(tokens)
    tokens = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
    is_nested = bool(tokens) and all(
        isinstance(x, list | tuple | np.ndarray | jax.Array) for x in tokens
    )
    rows = [list(row) for row in tokens] if is_nested else [tokens] * count
    if len(rows) < count:
        raise ValueError(
            f"{name} must be of {count} examples, or of one for all, got {len(rows)}."
        )
    for i, row in enumerate(rows):
        if len(row) != length:
            example = f" for example {i}" if is_nested else ""
            raise ValueError(
                f"{name} must be {length}, one for each position of the map, got "
                f"{len(row)}{example}."
            )
    return tuple(
        tuple(
            x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x)
            for x in row
        )
        for row in rows
    )


def _all_images(images: Any, count: int) -> tuple:
    """Returns N `Images`; () where there are none."""
    if images is None:
        return ()
    is_one = hasattr(images, "shape") or isinstance(images, Images)
    rows = [images] * count if is_one else list(images)
    if len(rows) != count:
        raise ValueError(
            f"images must be of {count} examples, or of one for all, got {len(rows)}."
        )
    return tuple(map(_images, rows))


def _images(images: Any) -> Images:
    """Converts pixels to `Images`; their shape is checked with all else of a set."""
    if isinstance(images, Images):
        return images
    pixels = np.asarray(images)
    if pixels.dtype.kind == "f":
        if not (pixels.min(initial=0) >= 0 and pixels.max(initial=0) <= 1):
            raise ValueError(
                "images of floats must be from 0 to 1, got "
                f"{pixels.min()} to {pixels.max()}."
            )
        pixels = np.round(255 * pixels)
    elif (
        pixels.dtype.kind not in "iub"
        or pixels.min(initial=0) < 0
        or pixels.max(initial=0) > 255
    ):
        raise ValueError(f"images must be integers from 0 to 255, got {pixels.dtype}.")
    return Images(pixels.astype(np.uint8))
