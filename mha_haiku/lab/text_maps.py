"""Attention maps with the texts along their sides, as a user gives them.

B... batch axes, N examples (of all of them), H heads, T query and S key positions.
"""

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import attention, display, models
from mha_haiku.core.attention import map_sites
from mha_haiku.lab.heads import model_runs
from mha_haiku.records import Layer
from mha_haiku.records.heads import Columns


class Side(NamedTuple):
    """The texts along the maps of a kind of layers, of N examples."""

    tokens: Sequence[Sequence[str]]  # of T queries
    key_tokens: Sequence[Sequence[str]]  # of S keys
    images: Sequence[np.ndarray] = ()  # of the keys


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
    tokens: Any = None  # the text of T queries, as `mh.show` takes it
    key_tokens: Any = None  # of S keys
    images: Sequence[np.ndarray] = ()  # of the keys of each example, uint8
    # Of kinds of layers, other than the last, that have neither text.
    sides: Mapping[str, Side] = dataclasses.field(default_factory=dict)
    why: tuple[Any, ...] = ()  # of one text, `heads.why.Cells`, which the page shows
    name: str = ""  # of the model, for the title of a page
    columns: Columns = dataclasses.field(default_factory=dict)  # numbers of all heads
    missing: tuple[tuple[str, str], ...] = ()  # as in a `MapSet`

    _repr_html_, show, plot = display.html, display.show, display.plot

    @property
    def names(self) -> list[str]:
        """The name of each map."""
        if isinstance(self.maps, Mapping):
            return list(self.maps)
        return [f"layer {i}" for i in range(len(self.maps))]

    def __getitem__(self, layer: Any) -> Any:
        if isinstance(layer, slice):
            return [self[place] for place in range(len(self))[layer]]
        place = self.names.index(layer) if isinstance(layer, str) else layer
        # A field would change the type of the tree, and every program compile anew.
        one = copy.copy(self._list()[place])
        object.__setattr__(one, "_place", (self, place))
        return one

    def __len__(self) -> int:
        return len(self.maps)

    def __repr__(self) -> str:
        first = self._list()[0].shape if len(self) else ()
        layers = display.count(len(self), "layer")
        return f"TextMaps({layers} of shape {first}, (B, H, T, S))"

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
        whole, place = getattr(value, "_place", (TextMaps(value), None))
        value = _with_texts(whole, place)
    texts = {name: text for name, text in texts.items() if text is not None}
    return dataclasses.replace(value, **texts)


def _with_texts(whole: TextMaps, place: Any) -> TextMaps:
    """Takes a layer of maps, with its name and the texts of its kind."""
    if place is None:
        return whole
    layer, one = [*layers_of(whole.maps).items()][place]
    tokens, key_tokens, images = whole.tokens, whole.key_tokens, whole.images
    if layer.kind in whole.sides:
        tokens, key_tokens, images = whole.sides[layer.kind]
    elif layer.kind == "encoder":
        tokens, key_tokens = key_tokens, None
    elif layer.kind == "decoder":
        key_tokens = None
    return TextMaps({layer.name: one}, tokens, key_tokens, images, name=whole.name)


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
        kinds = model_runs.kinds_by_path([str(name) for name in value])
        if not isinstance(value, Mapping) or len(set(kinds)) == 1:
            kinds = [""] * len(value)
        else:
            kinds = _by_size(kinds, list(value.values()))
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
    result = {}
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
        result[Layer(name, tuple(map(str, range(attention_map.shape[-3]))), kind)] = (
            attention_map
        )
    for kind in dict.fromkeys(kinds):
        check_sizes({x.name: y for x, y in result.items() if x.kind == kind})
        if not any(x.heads for x in result if x.kind == kind):
            raise ValueError("maps must have heads, got none in any of them.")
    return result


def _by_size(kinds: Sequence[str], maps: Sequence[Any]) -> list[str]:
    """Makes kinds of the sizes in a tower, such as windows of a picture."""
    sizes = [" x ".join(map(str, getattr(x, "shape", ())[-2:])) for x in maps]
    pairs = [*zip(kinds, sizes, strict=True)]
    alone = {x for x in kinds if len({size for y, size in pairs if x == y}) == 1}
    alone |= {*models.KINDS}
    return [kind if kind in alone else f"{kind} {size}" for kind, size in pairs]


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


def texts(name: str, tokens: Any, count: int, length: int) -> tuple:
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
    return tuple(tuple(str(x) for x in map(_plain, row)) for row in rows)


def token_ids(
    tokens: Sequence[Sequence[str]], batch_shape: Sequence[int]
) -> np.ndarray:
    """Makes `[B..., T]` integers, the same for equal texts."""
    texts = np.array(tokens[: math.prod(batch_shape)])
    _, ids = np.unique(texts, return_inverse=True)
    return ids.reshape(*batch_shape, texts.shape[1]).astype(np.int32)


def marked(
    tokens: Sequence[Sequence[str]],
    batch_shape: Sequence[int],
    is_marked: Callable[[str], bool],
    start: int = 0,
) -> np.ndarray | None:
    """Marks tokens `[B..., T]` from a position on, None without any."""
    rows = tokens[: math.prod(batch_shape)]
    marks = np.array([[is_marked(token) for token in row] for row in rows])
    marks[:, :start] = False
    return marks.reshape(*batch_shape, -1) if marks.any() else None


def _are_maps(value: Any) -> bool:
    if isinstance(value, attention.AttentionMap | models.Output):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return is_list and any(isinstance(x, attention.AttentionMap) for x in value)


def _is_weights(value: Any) -> bool:
    """Checks whether a value is an array of floats with four axes, of any library."""
    if isinstance(value, attention.AttentionMap) or not hasattr(value, "dtype"):
        return False
    return len(value.shape) == 4 and "float" in str(value.dtype)


def _map_of_weights(value: Any) -> attention.AttentionMap:
    if hasattr(value, "detach"):
        value = value.detach().cpu().float()
    return map_sites.map_of_weights(np.asarray(value))


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


def _plain(value: Any) -> Any:
    """Makes lists and numbers of arrays of any library; leaves other values."""
    return value.tolist() if hasattr(value, "tolist") else value
