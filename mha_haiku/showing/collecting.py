"""Collects attention maps in a `MapSet`, for runs, notebooks and figures.

`see` observes a map inside a program, and `map_set` joins on the host the observations
of all layers with the examples.

B... batch axes, N examples (of all of them), L layers, H heads, T query and S key
positions, P and Q bins of these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mha_haiku.core import attention, tiles
from mha_haiku.lab import heads
from mha_haiku.lab.heads import alignment
from mha_haiku.records import Column, Layer, means
from mha_haiku.records.heads import OFFSET, ROLE
from mha_haiku.records.map_set import Example, MapSet

Array = jax.Array
# Names and labels of statistics where it is known which positions they are of.
NAMES = {
    "chosen_positions": (
        "separators",
        "attention on special tokens after the first position, such as [SEP]",
    )
}


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


def map_set(
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
