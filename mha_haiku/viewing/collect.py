"""From attention maps to what a page shows: arrays on the host, pooled where needed.

Weights are whole up to `WHOLE` positions and pooled beyond.

`B...` batch axes, N examples (all of `B...`), L layers, H heads, T query and S key
positions, P query and Q key bins.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, checks, display, models
from mha_haiku.attention import scores
from mha_haiku.report import dossier
from mha_haiku.studies import zoom

WHOLE = 512  # positions, up to which maps are taken whole
_BINS = 128  # of longer ones
_MOST_EXAMPLES = 16
_MOST_CHANNEL_NUMBERS = 2**21  # of a layer, up to which a page has queries and keys


class Sides(NamedTuple):
    """What stands along the maps of N examples; () where nothing is known.

    Attributes:
      queries: For each example the text of its T queries.
      keys: Likewise of its S keys.
      images: For each example a `dossier.Images` or None.
    """

    queries: tuple[tuple[str, ...], ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    images: tuple[dossier.Images | None, ...] = ()


_NOTHING = Sides()


def sides(
    attention_map: attention.AttentionMap,
    tokens: Any,
    key_tokens: Any = None,
    images: Any = None,
) -> Sides:
    """Returns what stands along the sides of a map; arguments as of `show`.

    Raises:
      ValueError: If there are not as many texts or images as examples and positions, or
        values of images are out of range.
    """
    *batch_shape, _, num_queries, num_keys = attention_map.shape
    count = math.prod(batch_shape)
    queries = _texts("tokens", tokens, count, num_queries)
    keys = _texts("key_tokens", key_tokens, count, num_keys)
    if not keys and num_queries == num_keys:
        keys = queries
    return Sides(queries, keys, _all_images(images, count, num_keys))


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
) -> dict[str, attention.AttentionMap]:
    """Returns the map of each layer by its name.

    Raises:
      TypeError: If something else than maps is among them.
      ValueError: If there is none, maps are traced or differ in batch axes, T or S, or
        the names are not one for each.
    """
    value, kinds = _of_output(value), kinds_of(value)
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
    for kind in dict.fromkeys(kinds or [""]):
        own = dict(zip(found, kinds, strict=True)) if kinds else {}
        _check_sizes({x: y for x, y in found.items() if own.get(x, "") == kind})
    if names is not None:
        names = [names] if isinstance(names, str) else list(map(str, names))
        if len(set(names)) != len(found) or len(names) != len(found):
            raise ValueError(
                f"names must be {len(found)} different ones, a name for each map, got "
                f"{names!r}."
            )
        found = dict(zip(names, found.values(), strict=True))
    return found


def kinds_of(value: Any) -> tuple[str, ...]:
    """Returns the kind of each map of an encoder-decoder; () of other maps."""
    value = _of_output(value)
    if not isinstance(value, models.Maps):
        return ()
    pairs = zip(models.KINDS, value.kinds, strict=True)
    return tuple(kind for kind, count in pairs for _ in range(count))


def _of_output(value: Any) -> Any:
    return value.maps if isinstance(value, models.Output) else value


def map_set(
    maps: Mapping[str, attention.AttentionMap],
    sides: Sides = _NOTHING,
    *,
    wanted: Sequence[int] | None = None,
    only: int | None = None,
    name: str = "",
    kinds: Sequence[str] = (),
    has_numbers: bool = True,
) -> dossier.MapSet:
    """Returns what maps hold, from one pass over each.

    Args:
      maps: By the names of their layers; see `named_maps`.
      sides: What stands along them.
      wanted: Which heads of every layer; None: all.
      only: Which one of the examples; None: the first ones.
      name: Of the set.
      kinds: The kind of each map, where there are several. `sides` are those of the
        cross maps then.
      has_numbers: Whether there are statistics of the heads, which take a second to
        compile.

    Raises:
      ValueError: If there is no such head.
    """
    kinds = kinds or ("",) * len(maps)
    batch_shape = next(iter(maps.values())).shape[:-3]
    count = min(math.prod(batch_shape), _MOST_EXAMPLES)
    shown = list(range(count)) if only is None else [only]
    is_whole = all(max(each.shape[-2:]) <= WHOLE for each in maps.values())
    bins = None if is_whole else (_BINS, _BINS)
    edges = {
        kind: [
            attention.bin_edges(size, size if is_whole else _BINS)
            for size in each.shape[-2:]
        ]
        for kind, each in zip(kinds, maps.values(), strict=True)
    }
    chosen = [
        _chosen_heads(layer, each.shape[-3], wanted) for layer, each in maps.items()
    ]
    options = {"bins": bins, "has_numbers": has_numbers}
    observed = [
        jax.device_get(_observed(each, np.array(shown), np.array(own, int), **options))
        for each, own in zip(maps.values(), chosen, strict=True)
    ]
    numbers = {}
    if has_numbers:
        columns = [range(len(own)) for own in chosen]
        numbers = zoom.summary([part.numbers for part in observed], columns)
    axes = [
        {kind: _axes(sides, kind, example, edges[kind]) for kind in edges}
        for example in shown
    ]
    places = np.transpose(np.unravel_index(shown, batch_shape or (1,)))
    examples = tuple(
        dossier.Example(
            "example " + ", ".join(map(str, place)),
            *axes[i].get("decoder", axes[i][kinds[0]])[:2],
            tuple(part.weights[i] for part in observed),
            tuple(x.masked if x.masked is None else x.masked[i] for x in observed),
            images=sides.images[example] if sides.images else None,
            channels=_channels(observed, i),
            kinds={kind: each for kind, each in axes[i].items() if kind},
        )
        for i, (example, place) in enumerate(zip(shown, places, strict=True))
    )
    layers = tuple(
        dossier.Layer(layer, tuple(map(str, own)), kind)
        for layer, own, kind in zip(maps, chosen, kinds, strict=True)
    )
    return dossier.MapSet(name, layers, examples, numbers=numbers)


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


def _chosen_heads(name, num_heads, wanted) -> list[int]:
    if wanted is None:
        return list(range(num_heads))
    if not np.ndim(wanted) or not len(wanted):
        raise ValueError(f"heads must be a list of heads, as [0, 2], got {wanted!r}.")
    for head in wanted:
        checks.integer_in(f"heads of {name}", head, 0, num_heads - 1)
    return [int(head) for head in wanted]


class _Observed(NamedTuple):
    weights: Any  # [N, H, P, Q]
    masked: Any  # [N, P, Q], or [N, H, P, Q] where heads differ; None: not known
    numbers: Any  # by the names of statistics [N, H]
    channels: Any  # as `zoom.channels` gives them; None where they are not shown


@functools.partial(jax.jit, static_argnames=("bins", "has_numbers"))
def _observed(attention_map, examples, chosen, *, bins, has_numbers) -> _Observed:
    """Returns what is shown of some examples and heads."""
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape

    def picked(x, heads=chosen):
        return x.reshape(-1, *x.shape[len(batch_shape) :])[examples][:, heads]

    if not num_heads:
        cells = bins or (num_queries, num_keys)
        none = jnp.zeros((len(examples), 0))
        return _Observed(jnp.zeros((*none.shape, *cells)), None, {}, None)
    pooled = bins and tuple(map(min, bins, (num_queries, num_keys)))
    numbers = {}
    if has_numbers:
        statistics = attention_map.statistics(pooled=pooled)
        numbers = jax.tree.map(picked, zoom.per_head(statistics))
    if pooled is None:
        weights = attention_map.weights()
    else:
        weights = statistics.pooled if has_numbers else attention_map.pooled(*pooled)
    masked, origin = None, attention_map.origin
    if not np.ndim(origin.query) and not np.ndim(origin.key) and len(chosen):
        masked = zoom.masked_cells(attention_map, *(pooled or ()))
        masked = picked(masked, chosen if masked.shape[-3] > 1 else 0)
    channels, size = None, attention_map.query.shape[-1]
    amount = len(examples) * num_heads * (num_queries + num_keys) * size
    is_product = isinstance(attention_map.score, scores.DotProduct)
    if pooled is None and is_product and amount <= _MOST_CHANNEL_NUMBERS:
        *sides, exact = zoom.channels(attention_map)
        channels = *(picked(x).astype(jnp.float32) for x in sides), exact
    return _Observed(picked(weights), masked, numbers, channels)


def _channels(observed, example) -> tuple | None:
    channels = [part.channels for part in observed]
    if not any(channels):
        return None
    return tuple(
        own and dossier.Channels(own[0][example], own[1][example], bool(own[2]))
        for own in channels
    )


def _axes(sides, kind, example, edges) -> dossier.Axes:
    """Returns what stands along the maps of a kind of layers."""
    texts = {
        "encoder": (sides.keys, sides.keys),
        "decoder": (sides.queries, sides.queries),
    }.get(kind, (sides.queries, sides.keys))
    return dossier.Axes(
        *(
            dossier.Axis(own[example] if own else ("",) * int(each[-1]), each)
            for own, each in zip(texts, edges, strict=True)
        )
    )


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
            f"{name} must be those of {count} examples, or of one for all, got "
            f"{len(rows)}."
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


def _all_images(images: Any, count: int, length: int) -> tuple:
    """Returns N `dossier.Images`; () where there are none."""
    if images is None:
        return ()
    is_one = hasattr(images, "shape") or isinstance(images, dossier.Images)
    rows = [images] * count if is_one else list(images)
    if len(rows) != count:
        raise ValueError(
            f"images must be those of {count} examples, or of one for all, got "
            f"{len(rows)}."
        )
    return tuple(_images(each, length) for each in rows)


def _images(images: Any, length: int) -> dossier.Images:
    if isinstance(images, dossier.Images):
        return images
    pixels = np.asarray(images)
    is_grey, is_coloured = pixels.ndim == 3, pixels.ndim == 4 and pixels.shape[-1] == 3
    if not (is_grey or is_coloured) or len(pixels) != length:
        raise ValueError(
            f"images must be [S, h, w] or [S, h, w, 3] with S = {length} positions, "
            f"got shape {pixels.shape}."
        )
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
    return dossier.Images(pixels.astype(np.uint8))
