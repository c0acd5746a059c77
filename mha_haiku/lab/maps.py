"""Attention maps as records: the only maker of a `MapSet`.

`see` observes a map inside a program. `map_set` reads maps that were computed, with the
texts along them; `examples_of` makes the examples of a task, and `joined` the set of
what was observed of all layers.

B... batch axes, N examples (of all of them), L layers, H heads, T query and S key
positions, P and Q bins of these.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mha_haiku.core import attention, tiles
from mha_haiku.lab import heads, statistics, text_maps
from mha_haiku.lab.heads import alignment
from mha_haiku.records import Layer, labels
from mha_haiku.records.heads import OFFSET, ROLE
from mha_haiku.records.map_set import Answers, Axes, Axis, Example, MapSet, Why
from mha_haiku.training import tasks

Array = jax.Array

WHOLE = 512  # positions, up to which maps are taken whole
_BINS = 128  # of longer ones
_LONGEST_NAME = 40  # characters of the text in the name of an example
_MOST_EXAMPLES = 16


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


def known(
    attention_map: attention.AttentionMap,
    kind: str = "",
    *,
    tokens: Array | np.ndarray | None = None,
    separators: Array | np.ndarray | None = None,
    pictures: Array | np.ndarray | None = None,
    lengths: Array | np.ndarray | None = None,
) -> Seen:
    """Measures the heads of a whole map `[B..., H, T, S]`.

    Args:
      attention_map: The map.
      kind: The kind of its layer, for the roles of heads.
      tokens: The tokens of the queries, which some statistics and roles need.
      separators: `[B..., S]` booleans, keys that are separators, for a role.
      pictures: `[B..., S]` booleans, keys that are image tokens.
      lengths: Numbers of valid keys. Defaults to all keys.
    """
    stats = attention_map.statistics(tokens=tokens, positions=separators)
    evidence = heads.role_evidence(
        attention_map,
        stats,
        kind,
        tokens=tokens,
        lengths=lengths,
        pictures=pictures,
    )
    places = attention_map.top(1).positions[..., 0] if kind == "cross" else None
    numbers, places = _flat((statistics.per_head(stats), places), attention_map)
    if "on_image" in evidence:
        share, has_words = jnp.moveaxis(evidence["on_image"], -1, 0)
        numbers["on_image"] = jnp.where(has_words > 0, share, jnp.nan)
    return Seen(numbers, evidence, places)


def see(
    attention_map: attention.AttentionMap,
    *,
    examples: Any = slice(None),
    bins: int | None = None,
    has_numbers: bool = True,
    **options: Any,
) -> Seen:
    """Observes a map to show, inside a program.

    Args:
      attention_map: The map.
      examples: Which of the N examples.
      bins: Maximum rows and columns of a pooled map; None for a whole map.
      has_numbers: Whether there are statistics, in the same pass as a pooled map.
      **options: As of `known`; a pooled map has no roles.
    """
    seen = Seen({}, {})
    pooled = None
    if bins is not None:
        num_queries, num_keys = attention_map.shape[-2:]
        pooled = min(bins, num_queries), min(bins, num_keys)
    if pooled is None:
        weights = attention_map.weights()
        if has_numbers:
            seen = known(attention_map, **options)
    elif has_numbers:
        tokens = options.get("tokens")
        stats = attention_map.statistics(pooled=pooled, tokens=tokens)
        weights = stats.pooled
        seen = Seen(_flat(statistics.per_head(stats), attention_map), {})
    else:
        weights = attention_map.pooled(*pooled)
    origin, masked = attention_map.weighting.origin, None
    if not np.ndim(origin.query) and not np.ndim(origin.key):
        masked = masked_cells(attention_map, *(pooled or ()))
    weights, masked = _flat((weights, masked), attention_map)
    seen = seen._replace(weights=weights, masked=masked)
    return jax.tree.map(lambda x: x[examples], seen)


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
    *batch, num_heads, num_queries, num_keys = attention_map.shape
    if not mask.has_heads():
        num_heads = 1
    if rows is None or columns is None:
        at = origin.at(np.arange(num_queries), np.arange(num_keys))
        masked = tiles.lifted(~mask.aligned_tile(*at), len(batch) + 3)
        return jnp.broadcast_to(masked, (*batch, num_heads, num_queries, num_keys))
    query_edges = attention.bin_edges(num_queries, rows)
    key_edges = jnp.asarray(attention.bin_edges(num_keys, columns))[None]

    def of_head(index: Array) -> Array:
        *example, head = jnp.unravel_index(index, (*batch, num_heads))
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

    masked = jax.vmap(of_head)(jnp.arange(math.prod(batch) * num_heads))
    return masked.reshape(*batch, num_heads, *masked.shape[1:])


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

    Axes of the N examples may be shorter than the maps: the other rows and columns are
    padding and left out. Weights get `dtype`.
    """
    columns = [range(len(layer.heads)) for layer in layers]
    numbers = statistics.summary([x.numbers for x in seen], columns)
    filled = [_filled(x, n, layers, seen, dtype) for n, x in enumerate(examples)]
    weights = [x for example in filled for x in example.weights]
    are_shares = all(((x >= 0) & (x <= 1)).all() for x in weights)
    if all(layer_seen.evidence for layer_seen in seen):
        extra = roles(seen).columns
        numbers |= {name: extra[name] for name in (ROLE, OFFSET) if name in extra}
    return MapSet(
        name, tuple(layers), tuple(filled), step, numbers, are_shares=are_shares
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
            equal = (x for x in masked if x is not None and np.array_equal(x, hidden))
            hidden = next(equal, hidden)
        masked.append(hidden)
    return example._replace(weights=tuple(weights), masked=tuple(masked))


def roles(of_layers: Sequence[Seen], **options: Any) -> heads.Heads:
    """Finds the roles of heads, over all examples; see `heads.roles_of_evidence`."""
    sums = [{x: y.sum(0) for x, y in seen.evidence.items()} for seen in of_layers]
    return heads.roles_of_evidence(sums, **options)


def map_set(
    texts: text_maps.TextMaps,
    *,
    layers: Sequence[int] | None = None,
    only: int | None = None,
    name: str = "",
    has_numbers: bool = True,
) -> MapSet:
    """Reads maps, in one pass over each.

    With several kinds of layers the texts belong to the last one, to cross maps, but
    for those kinds that have their own `sides`. `layers` are indices of layers, and
    `only` is the index of one example; by default all layers, the first examples.
    Without `has_numbers` there are no statistics, which take a second.
    """
    pairs = list(text_maps.layers_of(texts.maps).items())
    # The last: with a decoder that is a cross map, which has both texts.
    last, (*batch_shape, _, num_queries, num_keys) = pairs[-1][0], pairs[-1][1].shape
    count = math.prod(batch_shape)
    queries = text_maps.texts("tokens", texts.tokens, count, num_queries)
    keys = text_maps.texts("key_tokens", texts.key_tokens, count, num_keys)
    if not keys and num_queries == num_keys:
        keys = queries
    has_text = texts.sides or not texts.images
    has_ids = has_numbers and queries and queries == keys and has_text
    if layers is not None:
        pairs = [pairs[i] for i in layers]
    longest = max(max(attention_map.shape[-2:]) for _, attention_map in pairs)
    bins = None if longest <= WHOLE else _BINS
    marks: dict[str, Any] = {}
    if has_ids and bins is None:
        marks["tokens"] = text_maps.token_ids(queries, batch_shape)
        # A head that attends to the first position has another role.
        told: dict[str, Any] = {"separators": (labels.is_special, 1)}
        told |= {"pictures": (labels.is_of_image,)} if texts.sides else {}
        for key, which in told.items():
            marks[key] = text_maps.marked(keys, batch_shape, *which)
    rows = list(range(min(count, _MOST_EXAMPLES))) if only is None else [only]
    seen = []
    for layer, attention_map in pairs:
        options = {"bins": bins, "has_numbers": has_numbers}
        options |= marks if not texts.sides or layer.kind == last.kind else {}
        options["kind"] = "cross" if layer.kind.endswith("cross") else layer.kind
        # Of several parts of a picture the last one, which is the whole.
        total = math.prod(attention_map.shape[:-3])
        places = (np.array(rows) + 1) * max(1, total // count) - 1
        options["examples"] = np.minimum(places, total - 1)
        # Each is on the host before the next is read.
        seen.append(jax.device_get(see_alone(attention_map, **options)))
    examples, has_kinds = [], any(x.kind for x, _ in pairs) and not texts.sides
    for n in rows:
        place = ", ".join(map(str, np.unravel_index(n, batch_shape or (1,))))
        of_keys = keys[n] if keys else [""] * num_keys
        of_queries = queries[n] if queries else [""] * num_queries
        text = labels.beginning(of_queries if has_kinds else of_keys, _LONGEST_NAME)
        own: Any = {} if has_kinds else {"kinds": _kinds(texts.sides, n, bins)}
        examples.append(
            example(
                f"example {place}" + (f": {text}" if text and count > 1 else ""),
                of_keys,
                of_queries,
                has_kinds=has_kinds,
                bins=bins,
                images=texts.images[n] if texts.images else None,
                **own,
            )
        )
    whole = joined(name, [layer for layer, _ in pairs], seen, examples)
    columns = {**whole.columns, **texts.columns}
    whole = dataclasses.replace(whole, columns=columns, missing=texts.missing)
    return with_why(whole, texts.why) if texts.why and only is None else whole


def _kinds(
    sides: Mapping[str, text_maps.Side], n: int, bins: int | None
) -> dict[str, Axes]:
    """Makes the axes of an example's other towers."""

    def axes(side: text_maps.Side) -> Axes:
        queries, keys = (_axis(x[n], bins) for x in side[:2])
        return Axes(queries, keys, None, False, side.images[n] if side.images else None)

    return {kind: axes(side) for kind, side in sides.items()}


def examples_of(
    task: tasks.Task,
    batch: tasks.Example,
    names: Sequence[str],
    answers: tuple[np.ndarray, np.ndarray] | None,
    alignment: np.ndarray | None,
    *,
    bins: int | None,
    is_own: bool,
) -> list[Example]:
    """Makes the examples of a batch on the host, without their maps.

    `answers` are the likeliest classes and their probabilities, None of a model without
    logits; `alignment` is `[N, T, S]`. A user's text (`is_own`) has answers everywhere.
    """
    classes = np.asarray(batch.targets).reshape(len(names), -1)
    counts = np.asarray(batch.weights).reshape(classes.shape) > 0

    def target(n: int, t: int) -> str:
        return task.class_label(int(classes[n, t])) if counts[n, t] else ""

    def likeliest(n: int, t: int) -> tuple[tuple[str, float], ...]:
        if answers is None or not (is_own or counts[n, t]):
            return ()
        best, shares = (x.reshape(*classes.shape, -1)[n, t].tolist() for x in answers)
        pairs = zip(map(task.class_label, best), shares, strict=True)
        return tuple(pair for pair in pairs if pair[0])

    examples = []
    for n, name in enumerate(names):
        row = jax.tree.map(operator.itemgetter(n), batch)
        texts, lengths = [task.labels(row)], [row.lengths]
        if row.decoder_inputs is not None:
            texts.append(task.decoder_labels(row))
            lengths.append(row.decoder_lengths)
        sizes = list(map(len, texts))
        pairs = zip(lengths, sizes, strict=True)
        lengths = [size if x is None else max(1, int(x)) for x, size in pairs]
        if row.decoder_inputs is not None:
            texts.append(list(map(task.class_label, classes[n].tolist())))
        whole = classes.shape[1] == 1 < sizes[-1]
        places = [(n, t) for t in range(1 if whole else lengths[-1])]
        sides = ("",) if len(sizes) == 1 else ("source ", "target ")
        padded = zip(sides, sizes, lengths, strict=True)
        cuts = [f"its last {x - y} {side}positions" for side, x, y in padded if x > y]
        images = task.images(row)
        examples.append(
            example(
                name,
                *texts,
                has_kinds=len(texts) > 1,
                lengths=lengths,
                bins=bins,
                alignment=None if alignment is None else alignment[n],
                note=f"{' and '.join(cuts)} are padding" if cuts else "",
                answers=Answers(
                    tuple(target(*x) for x in places),
                    tuple(likeliest(*x) for x in places),
                    whole,
                ),
                images=None if images is None else images[: lengths[0]],
            )
        )
    return examples


def example(
    name: str,
    keys: Sequence[str],
    queries: Sequence[str] | None = None,
    predicted: Sequence[str] | None = None,
    *,
    has_kinds: bool = False,
    lengths: Sequence[int | None] = (None, None),
    bins: int | None = None,
    alignment: np.ndarray | None = None,
    **fields: Any,
) -> Example:
    """Makes an example without maps: the axes of each kind of layers.

    Args:
      name: Its name.
      keys: The text of each key; with kinds, of the encoder.
      queries: The text of each query; with kinds, what the decoder reads. Defaults to
        the keys.
      predicted: What the decoder should predict: the names of rows of cross maps.
      has_kinds: Whether layers are of an encoder and a decoder.
      lengths: Numbers of valid keys and queries; the rest is padding. Default to all.
      bins: Maximum number of bins of an axis. Defaults to all positions.
      alignment: `[T, S]`, of cross maps.
      **fields: Other fields of the example.
    """
    source = _axis(keys, bins, lengths[0])
    if not has_kinds:
        rows = source if queries is None else _axis(queries, bins)
        return Example(name, rows, source, (), **fields)
    assert queries is not None  # of a decoder
    reading = predicting = _axis(queries, bins, lengths[1])
    if predicted is not None:
        source = source._replace(label="source token")
        predicting = _axis(predicted, bins, lengths[1])._replace(
            label="token predicted", notes=_said("reads", reading)
        )
        reading = reading._replace(
            label="token read", notes=_said("predicts", predicting)
        )
    if alignment is not None:
        alignment = alignment[: len(reading.tokens), : len(source.tokens)]
    kinds = {
        "encoder": Axes(source, source, has_answers=False),
        "cross": Axes(predicting, source, alignment),
    }
    return Example(name, reading, reading, (), kinds=kinds, **fields)


def _axis(texts: Sequence[str], bins: int | None, length: int | None = None) -> Axis:
    """Makes the axis of T texts, pooled to at most `bins` bins and cut at `length`."""
    size = len(texts)
    length = size if length is None else length
    edges = attention.bin_edges(size, min(size, bins or size))
    edges = np.minimum(edges[: np.searchsorted(edges[:-1], length) + 1], length)
    return Axis(tuple(texts[:length]), edges)


def _said(verb: str, axis: Axis) -> tuple[str, ...]:
    return tuple(f"{verb} “{labels.visible(x)}”" if x else "" for x in axis.tokens)


def with_why(record: MapSet, why: Sequence[heads.why.Cells]) -> MapSet:
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
    first, *others = record.examples
    first = first._replace(why=Why(tuple(map(str, why[0].components)), *arrays))
    return dataclasses.replace(record, examples=(first, *others))
