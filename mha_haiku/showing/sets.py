"""Converts objects with attention maps to the `MapSet`s of a page.

A class with maps registers how they become a set: `map_set_of.register(Class)`. Weights
of maps in memory are whole up to `WHOLE` positions and pooled beyond.

N examples (all of the batch axes), H heads, T query and S key positions.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku.core import attention, checks, display, models
from mha_haiku.core.attention import sited
from mha_haiku.lab import heads
from mha_haiku.lab.heads import running
from mha_haiku.records import Layer
from mha_haiku.records.map_set import Axes, Axis, Dossier, Example, MapSet, Why
from mha_haiku.showing import collecting, labels

WHOLE = 512  # positions, up to which maps are taken whole
_BINS = 128  # of longer ones
_LONGEST_NAME = 40  # characters of the text in the name of an example
_MOST_EXAMPLES = 16

_Tokens = tuple[tuple[str, ...], ...]  # the T texts of N examples


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TextMaps(Sequence):
    """Attention maps, one per layer, with texts or images along their sides.

    `maps[2].weights()[0, 3]` is the map of head 3 in layer 2, `[T, S]`.

    Example:
      >>> maps = subject.maps(tokens[0])
      >>> maps
      TextMaps(2 layers of shape (1, 2, 9, 9), (B, H, T, S))
      >>> maps[1].weights()[0, 0, -1].argmax()  # where head (1, 0) looks at the end
      Array(5, dtype=int32)
    """

    maps: Any  # `models.Output.maps`, or by name of a function without known layers
    # The text of T queries and S keys, and pictures of keys, as `mh.show` takes them.
    tokens: Any = None
    key_tokens: Any = None
    images: Any = None
    why: tuple[Any, ...] = ()  # of one text, `heads.why.Cells`, which the page shows
    name: str = ""  # of the model, for the title of a page

    _repr_html_, show, plot = display.html, display.show, display.plot

    @property
    def names(self) -> list[str]:
        """The name of each map."""
        if isinstance(self.maps, Mapping):
            return list(self.maps)
        return [f"layer {i}" for i in range(len(self.maps))]

    def __getitem__(self, layer: Any) -> attention.AttentionMap:
        return self.maps[layer] if isinstance(layer, str) else self._list()[layer]

    def __len__(self) -> int:
        return len(self.maps)

    def __repr__(self) -> str:
        first = self._list()[0].shape if len(self) else ()
        return f"TextMaps({len(self)} layers of shape {first}, (B, H, T, S))"

    def _list(self) -> list[attention.AttentionMap]:
        is_named = isinstance(self.maps, Mapping)
        return list(self.maps.values() if is_named else self.maps)


def text_maps(value: Any, **texts: Any) -> TextMaps | None:
    """Finds the maps in a value, or None if it has none.

    Plain arrays of weights `[B, H, T, S]`, such as `outputs.attentions` of
    transformers, become maps. Texts that are not None replace the value's own.
    """
    if not isinstance(value, TextMaps):
        is_list = isinstance(value, list | tuple) and len(value)
        if _is_weights(value):
            value = _map_of_weights(value)
        elif is_list and all(map(_is_weights, value)):
            value = [_map_of_weights(weights) for weights in value]
        if not _are_maps(value):
            return None
        value = TextMaps(value)
    texts = {name: text for name, text in texts.items() if text is not None}
    return dataclasses.replace(value, **texts)


@functools.singledispatch
def map_set_of(value: Any) -> MapSet:
    """Collects the maps of an object without inputs: a run, on held-out examples."""
    raise TypeError(f"compare must be a run or its folder, got {type(value).__name__}.")


@map_set_of.register
def _(value: MapSet) -> MapSet:
    return value


@functools.singledispatch
def dossier_of(value: Any, compare: Any = None) -> Dossier:
    """Makes the dossier of an object that has maps without inputs.

    `compare` is another such object, or a dict of one by its name, or None.
    """
    return joined(value, compare)


def joined(value: Any, compare: Any = None) -> Dossier:
    """Joins one set, or two next to each other, to a dossier."""
    other_name, compare = named(compare)
    sets, names = [map_set_of(value)], [""]
    if compare is not None:
        other = dossier_of(compare)
        sets.append(dataclasses.replace(other.sets[-1], name=other.title))
        names = [sets[0].name, other_name or sets[1].name]
        if names[0] == names[1]:
            names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    pairs = zip(sets, names, strict=True)
    shown = tuple(dataclasses.replace(x, name=n, step=None) for x, n in pairs)
    return Dossier(" and ".join(maps.name for maps in sets), shown)


def has_own(value: Any) -> bool:
    """Checks whether an object has maps without inputs."""
    return map_set_of.dispatch(type(value)) is not map_set_of.dispatch(object)


def with_heads(maps: MapSet, heads: Any) -> MapSet:
    """Keeps some heads, by their names in the unpruned model."""
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
    """Splits a shown value into its name, or "", and the value itself."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, value),) = value.items()
        return str(name), value
    return "", value


def _are_maps(value: Any) -> bool:
    """Checks whether a value is a map, or a container of maps."""
    if isinstance(value, attention.AttentionMap | models.Output):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return is_list and any(isinstance(x, attention.AttentionMap) for x in value)


def layers_of(value: Any) -> dict[Layer, attention.AttentionMap]:
    """Returns the map of each layer. All maps of a kind must have equal sizes."""
    value = value.maps if isinstance(value, models.Output) else value
    if isinstance(value, attention.AttentionMap):
        value = {"attention": value}
    if isinstance(value, models.Maps):
        pairs = zip(models.KINDS, value.kinds, strict=True)
        kinds = tuple(kind for kind, count in pairs for _ in range(count))
    elif isinstance(value, Mapping | list | tuple):
        # Of a wrapped encoder-decoder, modules have the names.
        kinds = [running.kind_of(str(name)) for name in value]
        if not isinstance(value, Mapping) or len(set(kinds)) == 1:
            kinds = [""] * len(value)
    else:
        raise TypeError(
            "maps must be an AttentionMap, a list or a dict of them, got "
            f"{type(value).__name__}."
        )
    if not kinds:
        raise ValueError("maps must not be empty.")
    named = isinstance(value, Mapping)
    names = (
        _short(list(map(str, value)), kinds)
        if named
        else [layer.name for layer in Layer.of_kinds(kinds, [()] * len(kinds))]
    )
    value = value.values() if named else value
    found = {}
    for name, kind, attention_map in zip(names, kinds, value, strict=True):
        if not isinstance(attention_map, attention.AttentionMap):
            raise TypeError(
                f"maps must be AttentionMaps, got {type(attention_map).__name__} for "
                f"{name!r}."
            )
        if display.is_traced(attention_map):
            raise ValueError(
                "maps must be known to be shown, got one that is traced: "
                f"{attention_map!r}; return it from the compiled function."
            )
        found[Layer(name, tuple(map(str, range(attention_map.shape[-3]))), kind)] = (
            attention_map
        )
    if len({layer.name for layer in found}) != len(kinds):
        names = ", ".join(layer.name for layer in found)
        raise ValueError(f"names of maps must differ, got {names}.")
    for kind in dict.fromkeys(kinds):
        check_sizes({x.name: y for x, y in found.items() if x.kind == kind})
        if not any(x.heads for x in found if x.kind == kind):
            raise ValueError("maps must have heads, got none in any of them.")
    return found


def map_set(
    found: TextMaps,
    *,
    layers: Sequence[int] | None = None,
    only: int | None = None,
    name: str = "",
    has_numbers: bool = True,
) -> MapSet:
    """Reads maps, in one pass over each.

    If there are several kinds of layers, the texts belong to cross maps. `layers` are
    the places of the layers that are read, and `only` is the index of one example; by
    default all layers, the first examples. Without `has_numbers` there are no
    statistics of the heads, which take a second to compile.
    """
    pairs = list(layers_of(found.maps).items())
    # The last: with a decoder that is a cross map, which has both texts.
    *batch_shape, _, num_queries, num_keys = pairs[-1][1].shape
    count = math.prod(batch_shape)
    queries = _texts("tokens", found.tokens, count, num_queries)
    keys = _texts("key_tokens", found.key_tokens, count, num_keys)
    if not keys and num_queries == num_keys:
        keys = queries
    images = _all_images(found.images, count)
    has_ids = has_numbers and queries and queries == keys and not images
    pairs = [pairs[i] for i in (range(len(pairs)) if layers is None else layers)]
    shown = list(range(min(count, _MOST_EXAMPLES))) if only is None else [only]
    is_whole = all(max(attention_map.shape[-2:]) <= WHOLE for _, attention_map in pairs)
    tokens = separators = None
    if has_ids and is_whole:
        tokens = _token_ids(queries, batch_shape)
        separators = _separators(keys, batch_shape)
    seen, edges = [], {}
    for layer, attention_map in pairs:
        of_layer = collecting.see_alone(
            attention_map,
            examples=np.array(shown),
            bins=None if is_whole else _BINS,
            kind=layer.kind,
            tokens=tokens,
            separators=separators,
            has_numbers=has_numbers,
        )
        seen.append(jax.device_get(of_layer))
        edges[layer.kind] = [
            attention.bin_edges(size, size if is_whole else _BINS)
            for size in attention_map.shape[-2:]
        ]
    places = np.transpose(np.unravel_index(shown, batch_shape or (1,))).tolist()
    sides = {"encoder": (keys, keys), "decoder": (queries, queries)}
    examples = []
    for example, place in zip(shown, places, strict=True):
        axes = {
            kind: _axes(sides.get(kind, (queries, keys)), example, own)
            for kind, own in edges.items()
        }
        main = axes.get("decoder", next(iter(axes.values())))
        text = labels.beginning(main.keys.tokens, _LONGEST_NAME) if count > 1 else ""
        named = "example " + ", ".join(map(str, place))
        examples.append(
            Example(
                ": ".join(filter(None, (named, text))),
                main.queries,
                main.keys,
                (),
                images=images[example] if images else None,
                kinds={kind: sides for kind, sides in axes.items() if kind},
            )
        )
    return collecting.map_set(name, [layer for layer, _ in pairs], seen, examples)


def with_why(shown: MapSet, why: Sequence[heads.why.Cells]) -> MapSet:
    """Adds to the first example why its heads look where they do."""
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


def _is_weights(value: Any) -> bool:
    """Checks whether a value is an array of floats with four axes, of any library."""
    if isinstance(value, attention.AttentionMap) or not hasattr(value, "dtype"):
        return False
    return len(value.shape) == 4 and "float" in str(value.dtype)


def _map_of_weights(value: Any) -> attention.AttentionMap:
    """Makes the map of weights, an array of jax, NumPy or torch."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().float()
    weights = np.asarray(value)
    sums = weights.sum(-1)
    are_shares = (weights >= 0).all() and (np.isclose(sums, 1) | (sums == 0)).all()
    return sited.map_of_weights(weights, are_shares=bool(are_shares))


def check_sizes(maps: Mapping[str, attention.AttentionMap]) -> None:
    """Raises ValueError if maps in one view, by name, differ in batch axes, T or S."""
    (first, one), *others = maps.items()
    *batch_shape, _, num_queries, num_keys = one.shape
    if 0 in batch_shape or not num_queries or not num_keys:
        raise ValueError(
            f"maps must have examples, queries and keys, got shape {one.shape}, which "
            "is (B..., H, T, S)."
        )
    for name, other in others:
        if (other.shape[:-3], other.shape[-2:]) != (one.shape[:-3], one.shape[-2:]):
            raise ValueError(
                "maps in one view must have the same batch axes, T and S, got "
                f"{one.shape} for {first!r} and {other.shape} for {name!r}, which are "
                "(B..., H, T, S)."
            )


def _axes(
    texts: tuple[_Tokens, _Tokens], example: int, edges: Sequence[np.ndarray]
) -> Axes:
    """Makes the axes along the maps of a kind of layers."""
    queries, keys = (
        Axis(x[example] if x else ("",) * int(own[-1]), own)
        for x, own in zip(texts, edges, strict=True)
    )
    return Axes(queries, keys)


def _token_ids(tokens: _Tokens | np.ndarray, batch_shape: Sequence[int]) -> np.ndarray:
    """Makes `[B..., T]` integers, the same for equal texts."""
    tokens = np.array(tokens[: math.prod(batch_shape)])
    _, ids = np.unique(tokens, return_inverse=True)
    return ids.reshape(*batch_shape, tokens.shape[1]).astype(np.int32)


def _separators(tokens: _Tokens, batch_shape: Sequence[int]) -> np.ndarray | None:
    """Marks special tokens `[B..., T]` past the first position, None without any."""
    rows = tokens[: math.prod(batch_shape)]
    marked = np.array([[labels.is_special(token) for token in row] for row in rows])
    marked[:, 0] = False  # a head that attends to it has another role
    return marked.reshape(*batch_shape, -1) if marked.any() else None


def _short(names: list[str], kinds: Sequence[str]) -> list[str]:
    """Leaves out the modules with which all paths of a kind begin or end."""
    short = []
    for name, kind in zip(names, kinds, strict=True):
        alike = [x.split("/") for x, y in zip(names, kinds, strict=True) if y == kind]
        parts = name.split("/")
        if len(alike) > 1:
            start, end = (
                len(os.path.commonprefix(rows))
                for rows in (alike, [row[::-1] for row in alike])
            )
            parts = parts[start : len(parts) - end]
        short.append(" ".join(filter(None, (kind, "/".join(parts)))))
    return short if len(set(short)) == len(names) else names


def _texts(name: str, tokens: Any, count: int, length: int) -> tuple:
    """Converts tokens to N tuples of T strings; () where the tokens are None."""
    if tokens is None:
        return ()
    tokens = [_plain(x) for x in _plain(tokens)]
    is_nested = bool(tokens) and all(isinstance(x, list | tuple) for x in tokens)
    rows = tokens if is_nested else [tokens] * count
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
            for x in map(_plain, row)
        )
        for row in rows
    )


def _plain(value: Any) -> Any:
    """Makes lists and numbers of arrays of any library; leaves other values."""
    return value.tolist() if hasattr(value, "tolist") else value


def _all_images(images: Any, count: int) -> tuple:
    """Makes the pixels of N examples; () where there are none."""
    if images is None:
        return ()
    rows = [images] * count if hasattr(images, "shape") else list(images)
    if len(rows) != count:
        raise ValueError(
            f"images must be of {count} examples, or of one for all, got {len(rows)}."
        )
    return tuple(map(_images, rows))


def _images(images: Any) -> np.ndarray:
    """Converts pixels to bytes; their shape is checked with the set."""
    pixels = np.asarray(images)
    wanted = "be integers from 0 to 255, or floats from 0 to 1"
    if pixels.dtype.kind not in "fiub":
        raise ValueError(f"images must {wanted}, got {pixels.dtype}.")
    low, high = pixels.min(initial=0), pixels.max(initial=0)
    is_share = pixels.dtype.kind == "f"
    if not 0 <= low <= high <= (1 if is_share else 255):
        raise ValueError(
            f"images must {wanted}, got {pixels.dtype} from {low} to {high}."
        )
    return np.round(255 * pixels if is_share else pixels).astype(np.uint8)
