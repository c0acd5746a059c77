"""Attention maps as records: the only maker of a `MapSet`.

`see` observes a map inside a program; `map_set` reads maps that were computed, with the
texts along them, and `joined` makes the set of what was observed of all layers.

B... batch axes, N examples (of all of them), L layers, H heads, T query and S key
positions, P and Q bins of these.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mha_haiku.core import attention, display, models, tiles
from mha_haiku.core.attention import sited
from mha_haiku.lab import heads
from mha_haiku.lab.heads import alignment, running
from mha_haiku.records import Column, Heads, Layer, labels, means
from mha_haiku.records.heads import OFFSET, ROLE
from mha_haiku.records.map_set import Axes, Axis, Example, MapSet, Why

Array = jax.Array
# Names and labels of statistics where it is known which positions they are of.
NAMES = {
    "chosen_positions": (
        "separators",
        "attention on special tokens after the first position, such as [SEP]",
    )
}


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


class Seen(NamedTuple):
    """Maps and statistics of the heads of one layer, for each of N examples.

    Attributes:
      numbers: Statistics and shares of alignments by name, `[N, H]`.
      evidence: Evidence of roles, `[N, H, ...]`; see `heads.role_evidence`. {} for
        pooled maps.
      places: The key with the largest weight of each query, `[N, H, T]`, in whole maps
        of cross-attention, for `aligned`; else None.
      weights: `[N, H, P, Q]`, or None if only numbers are wanted.
      masked: Booleans `[N, 1, P, Q]`, or `[N, H, P, Q]` where heads differ; None where
        examples start at different positions.
    """

    numbers: dict[str, Any]
    evidence: dict[str, Any]
    places: Any = None
    weights: Any = None
    masked: Any = None

    def aligned(self, alignments: Mapping[str, np.ndarray]) -> "Seen":
        """Adds how often heads look where they should, `[N, T, S]` by name."""
        if self.places is None:
            return self
        shares = {x: alignment.shares(self.places, y) for x, y in alignments.items()}
        evidence = self.evidence | alignment.evidence(shares)
        return self._replace(
            numbers=self.numbers | shares, evidence=evidence, places=None
        )

    def of_heads(self, chosen: Any) -> "Seen":
        """Keeps some heads."""
        masked = self.masked
        if masked is not None and masked.shape[1] > 1:
            masked = masked[:, chosen]
        others = self._replace(masked=None)
        return jax.tree.map(lambda x: x[:, chosen], others)._replace(masked=masked)


def known(
    attention_map: attention.AttentionMap,
    kind: str = "",
    *,
    tokens: Array | np.ndarray | None = None,
    separators: Array | np.ndarray | None = None,
    lengths: Array | np.ndarray | None = None,
) -> Seen:
    """Measures the heads of a whole map; arguments as of `see`."""
    statistics = attention_map.statistics(tokens=tokens, positions=separators)
    evidence = heads.role_evidence(
        attention_map, statistics, kind, tokens=tokens, lengths=lengths
    )
    places = attention_map.top(1).positions[..., 0] if kind == "cross" else None
    numbers, places = _flat((per_head(statistics), places), attention_map)
    return Seen(numbers, evidence, places)


def see(
    attention_map: attention.AttentionMap,
    *,
    examples: Any = slice(None),
    bins: int | None = None,
    kind: str = "",
    tokens: Array | np.ndarray | None = None,
    separators: Array | np.ndarray | None = None,
    lengths: Array | np.ndarray | None = None,
    has_numbers: bool = True,
) -> Seen:
    """Observes a map `[B..., H, T, S]` to show, inside a program.

    Args:
      attention_map: The map.
      examples: Which of the N examples.
      bins: Maximum rows and columns of a pooled map; None for a whole map.
      kind: The kind of its layer, for the roles of heads, which whole maps have.
      tokens: The tokens of the queries, which some statistics and roles need.
      separators: `[B..., S]` booleans, keys that are separators, for a role.
      lengths: Numbers of valid keys. Defaults to all keys.
      has_numbers: Whether there are statistics, in the same pass as a pooled map.
    """
    told = Seen({}, {})
    masked = pooled = None
    if bins is not None:
        num_queries, num_keys = attention_map.shape[-2:]
        pooled = min(bins, num_queries), min(bins, num_keys)
    if pooled is None:
        weights = attention_map.weights()
        if has_numbers:
            told = known(
                attention_map,
                kind,
                tokens=tokens,
                separators=separators,
                lengths=lengths,
            )
    elif has_numbers:
        statistics = attention_map.statistics(pooled=pooled, tokens=tokens)
        weights = statistics.pooled
        told = Seen(_flat(per_head(statistics), attention_map), {})
    else:
        weights = attention_map.pooled(*pooled)
    origin = attention_map.weighting.origin
    if not np.ndim(origin.query) and not np.ndim(origin.key):
        masked = masked_cells(attention_map, *(pooled or ()))
    weights, masked = _flat((weights, masked), attention_map)
    told = told._replace(weights=weights, masked=masked)
    return jax.tree.map(lambda x: x[examples], told)


def masked_cells(
    attention_map: attention.AttentionMap,
    rows: int | None = None,
    columns: int | None = None,
) -> Array:
    """Marks cells without weight because the mask forbids it, `[B..., H, P, Q]`.

    H is 1 if all heads have the same mask. If the map is pooled to at most `bins` rows
    and columns, a cell counts as masked if it lies outside of the keys between the
    first and the last that a query of its bin may attend to.
    """
    mask, origin = attention_map.weighting.mask, attention_map.weighting.origin
    *batch, heads, num_queries, num_keys = attention_map.shape
    if not mask.has_heads():
        heads = 1
    if rows is None or columns is None:
        at = origin.at(np.arange(num_queries), np.arange(num_keys))
        masked = tiles.lifted(~mask.aligned_tile(*at), len(batch) + 3)
        return jnp.broadcast_to(masked, (*batch, heads, num_queries, num_keys))
    query_edges = attention.bin_edges(num_queries, rows)
    key_edges = jnp.asarray(attention.bin_edges(num_keys, columns))[None]

    def of_head(index: Array) -> Array:
        *example, head = jnp.unravel_index(index, (*batch, heads))
        own = mask.at_head(tuple(example), head)
        keys = origin.key, origin.key + num_keys
        ranges = [
            own.key_range((origin.query + start, origin.query + stop), keys)
            for start, stop in zip(
                query_edges[:-1].tolist(), query_edges[1:].tolist(), strict=True
            )
        ]
        first, last = jnp.asarray(ranges).T[..., None] - origin.key
        return (
            (key_edges[:, 1:] <= first) | (key_edges[:, :-1] >= last) | (first >= last)
        )

    masked = jax.vmap(of_head)(jnp.arange(math.prod(batch) * heads))
    return masked.reshape(*batch, heads, *masked.shape[1:])


def _flat(tree: Any, attention_map: attention.AttentionMap) -> Any:
    """Merges the batch axes of arrays, which the map has too, into one."""
    batch_shape = attention_map.shape[:-3]
    count, axes = math.prod(batch_shape), len(batch_shape)
    return jax.tree.map(lambda x: x.reshape(count, *x.shape[axes:]), tree)


# Outside of any other program; what has one shape compiles once.
see_alone = jax.jit(see, static_argnames=("bins", "kind", "has_numbers"))


def joined(
    name: str,
    layers: Sequence[Layer],
    seen: Sequence[Seen],
    examples: Sequence[Example],
    *,
    step: int | None = None,
    dtype: DTypeLike = np.float32,
) -> MapSet:
    """Joins the observations of L layers to a set, on the host.

    The N examples have everything but their maps. Their axes may be shorter than the
    maps: the other rows and columns are padding and left out. Weights get `dtype`.
    """
    columns = [range(len(layer.heads)) for layer in layers]
    known = summary([layer_seen.numbers for layer_seen in seen], columns)
    filled = [_filled(x, n, layers, seen, dtype) for n, x in enumerate(examples)]
    weights = [x for example in filled for x in example.weights]
    are_shares = all(((x >= 0) & (x <= 1)).all() for x in weights)
    if all(layer_seen.evidence for layer_seen in seen):
        found = roles(seen).columns
        known |= {name: found[name] for name in (ROLE, OFFSET) if name in found}
    return MapSet(
        name, tuple(layers), tuple(filled), step, known, are_shares=are_shares
    )


def _filled(
    example: Example,
    n: int,
    layers: Sequence[Layer],
    seen: Sequence[Seen],
    dtype: DTypeLike,
) -> Example:
    weights, masked = [], []
    for layer, layer_seen in zip(layers, seen, strict=True):
        axes = example.axes(layer)
        part = np.s_[..., : axes.queries.bins, : axes.keys.bins]
        weights.append(layer_seen.weights[n][part].astype(dtype))
        hidden = layer_seen.masked
        if hidden is not None:
            hidden = hidden[n][part]
            # One for all heads where they have the same, even if known only by head.
            hidden = hidden[0] if (hidden == hidden[:1]).all() else hidden
            # The same array where layers have the same mask, which is stored once then.
            known = (x for x in masked if x is not None and np.array_equal(x, hidden))
            hidden = next(known, hidden)
        masked.append(hidden)
    return example._replace(weights=tuple(weights), masked=tuple(masked))


def roles(of_layers: Sequence[Seen], **options: Any) -> heads.Heads:
    """Finds the roles of heads, over all examples; see `heads.roles_of_evidence`."""
    sums = [{x: y.sum(0) for x, y in seen.evidence.items()} for seen in of_layers]
    return heads.roles_of_evidence(sums, **options)


def per_head(statistics: attention.Statistics) -> dict[str, jax.Array]:
    """Collects the numbers that have one value per head, `[N, H]`, by name.

    They are NaN for an example in which every query is fully masked.
    """
    numbers = {name: getattr(statistics, name) for name in attention.STATISTICS}
    is_empty = statistics.num_queries == 0
    return {
        name: jnp.where(is_empty, np.nan, values)
        for name, values in numbers.items()
        if values is not None and name != "num_queries"
    }


def summary(
    statistics: Sequence[Mapping[str, np.ndarray]],
    columns: Sequence[Sequence[int]],
    *,
    names: Mapping[str, tuple[str, str]] = NAMES,
) -> dict[str, Column]:
    """Averages each statistic over examples, `[L, H]`, with standard errors.

    For each layer pass the result of `per_head`, `[N, H]`, where H may differ and a
    number may be missing, and the column of each head in the result, such as its index
    in the unpruned layer. `names` has other names and labels of statistics.
    """
    num_heads = 1 + max(max(places, default=-1) for places in columns)

    def over_layers(mean: Callable[[np.ndarray], np.ndarray], name: str) -> np.ndarray:
        rows = np.full((len(statistics), num_heads), np.nan)
        for row, layer, places in zip(rows, statistics, columns, strict=True):
            if name in layer:
                row[list(places)] = mean(layer[name])
        return rows

    given = dict.fromkeys(name for layer in statistics for name in layer)
    known = attention.STATISTICS
    found = {}
    for name in [
        *(x for x in given if x not in known),
        *(x for x in known if x in given),
    ]:
        entry = known.get(name)
        unit = alignment.UNIT if entry is None else entry.unit
        label = alignment.label(name) if entry is None else entry.label
        mean, error = (over_layers(x, name) for x in (means.mean, means.standard_error))
        name, label = names.get(name, (name, label))
        found[name] = Column(mean, unit, label, error)
    return found


def heads_of(statistics: attention.Statistics) -> Heads:
    """Averages each statistic over examples, `[1, H]`, with standard errors."""
    count = np.asarray(statistics.num_queries)
    if not count.size:
        raise ValueError(f"there are no examples or no heads: {statistics!r}.")
    means = {}
    for name in attention.STATISTICS:
        values = getattr(statistics, name)
        # Of statistics per query the mean; they are 0 where the query is masked.
        if values is not None and np.ndim(values) > count.ndim:
            means[name] = np.asarray(values).sum(-1) / np.maximum(count, 1)
    means = dataclasses.replace(statistics, values=statistics.values | means)
    found = per_head(means) | {"num_queries": count}
    num_heads = count.shape[-1]
    layer = {
        name: np.reshape(values, (-1, num_heads)) for name, values in found.items()
    }
    examples = math.prod(count.shape[:-1])
    over = "" if examples == 1 else f", means over {examples} examples"
    return Heads.of(
        f"Statistics of {num_heads} heads{over}",
        summary([layer], [range(num_heads)], names={}),
        notes=("Of queries that see a key",),
    )


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
    bins = None if is_whole else _BINS
    seen, sizes = [], {}
    for layer, attention_map in pairs:
        of_layer = see_alone(
            attention_map,
            examples=np.array(shown),
            bins=bins,
            kind=layer.kind,
            tokens=tokens,
            separators=separators,
            has_numbers=has_numbers,
        )
        seen.append(jax.device_get(of_layer))
        sizes[layer.kind] = attention_map.shape[-2:]
    places = np.transpose(np.unravel_index(shown, batch_shape or (1,))).tolist()
    sides = {"encoder": (keys, keys), "decoder": (queries, queries)}
    examples = []
    for example, place in zip(shown, places, strict=True):
        axes = {}
        for kind, lengths in sizes.items():
            texts = sides.get(kind, (queries, keys))
            pairs_of_sides = zip(texts, lengths, strict=True)
            texts = (x[example] if x else [""] * size for x, size in pairs_of_sides)
            rows, columns = (axis(text, bins) for text in texts)
            axes[kind] = Axes(rows, columns)
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
    whole = joined(name, [layer for layer, _ in pairs], seen, examples)
    return with_why(whole, found.why) if found.why and only is None else whole


def axis(
    texts: Sequence[str],
    bins: int | None = None,
    *,
    length: int | None = None,
    label: str = "",
    notes: Sequence[str] = (),
) -> Axis:
    """Makes the axis of T texts, pooled to at most `bins` bins and cut at `length`."""
    size = len(texts)
    length = size if length is None else length
    edges = attention.bin_edges(size, min(size, bins or size))
    edges = np.minimum(edges[: np.searchsorted(edges[:-1], length) + 1], length)
    return Axis(tuple(texts[:length]), edges, label, tuple(notes[:length]))


def with_why(shown: MapSet, why: Sequence[heads.why.Cells]) -> MapSet:
    """Adds to the first example why its heads look where they do."""
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
