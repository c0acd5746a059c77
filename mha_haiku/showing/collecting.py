"""The one way from attention maps to a `MapSet`: for runs, notebooks and figures.

`see` observes a map inside of a program, and `map_set` joins on the host what was seen
of all layers with what is known of the examples.

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

from mha_haiku.core import attention
from mha_haiku.lab import heads
from mha_haiku.lab.heads import alignment, means
from mha_haiku.showing import zoom
from mha_haiku.showing.map_set import (
    Channels,
    Example,
    Layer,
    MapSet,
    Patch,
    PerHead,
    Roles,
)

Array = jax.Array


class Known(NamedTuple):
    """What is known of the heads of one layer, on each of N examples.

    Attributes:
      numbers: Statistics and shares of alignments by name, `[N, H]`.
      evidence: Evidence of roles, `[N, H, ...]`; see `heads.role_evidence`. {} for
        pooled maps.
      places: The key with the largest weight of each query, `[N, H, T]`, in whole maps
        of cross-attention, for `aligned`; else None.
    """

    numbers: dict[str, Any]
    evidence: dict[str, Any]
    places: Any = None

    def aligned(self, alignments: Mapping[str, np.ndarray]) -> "Known":
        """Adds how often heads look where they should, `[N, T, S]` by name."""
        if self.places is None:
            return self
        shares = {x: alignment.shares(self.places, y) for x, y in alignments.items()}
        evidence = self.evidence | alignment.evidence(shares)
        return Known(self.numbers | shares, evidence)


def known(
    attention_map: attention.AttentionMap,
    kind: str = "",
    *,
    tokens: Array | None = None,
    lengths: Array | None = None,
) -> Known:
    """Measures the heads of a whole map; arguments as of `see`."""
    statistics = attention_map.statistics(tokens=tokens)
    evidence = heads.role_evidence(
        attention_map, statistics, kind, tokens=tokens, lengths=lengths
    )
    places = attention_map.top(1).positions[..., 0] if kind == "cross" else None
    numbers, places = _flat((per_head(statistics), places), attention_map)
    return Known(numbers, evidence, places)


class Seen(NamedTuple):
    """What is shown of the map of one layer.

    Attributes:
      weights: `[N, H, P, Q]`.
      known: Numbers and roles of its heads.
      masked: Booleans `[N, 1, P, Q]`, or `[N, H, P, Q]` where heads differ; None where
        examples start at different positions.
      patches: Finer parts of a pooled map; None without them.
      channels: The scaled queries `[N, H, T, K]`, the keys, and for each head whether
        their products are the whole scores; None without them.
    """

    weights: Any
    known: Known
    masked: Any
    patches: zoom.Patches | None
    channels: tuple[Any, Any, Any] | None

    def of_heads(self, chosen: Any) -> "Seen":
        """Keeps some heads."""
        masked = self.masked
        if masked is not None and masked.shape[1] > 1:
            masked = masked[:, chosen]
        others = self._replace(masked=None)
        return jax.tree.map(lambda x: x[:, chosen], others)._replace(masked=masked)


def see(
    attention_map: attention.AttentionMap,
    *,
    examples: Any = slice(None),
    bins: int | None = None,
    kind: str = "",
    tokens: Array | None = None,
    lengths: Array | None = None,
    has_numbers: bool = True,
    has_patches: bool = False,
    has_channels: bool = False,
    gathered: Callable[[Any], Any] = lambda tree: tree,
) -> Seen:
    """Collects what is shown of a map `[B..., H, T, S]`, inside of a program.

    Args:
      attention_map: The map.
      examples: Which of the N examples.
      bins: The largest number of rows and columns of a pooled map; None: it is whole.
      kind: The kind of its layer, for the roles of heads, which whole maps have.
      tokens: The tokens of the queries, which some statistics and roles need.
      lengths: Numbers of valid keys; None: all are.
      has_numbers: Whether there are statistics, in the same pass as a pooled map.
      has_patches: Whether a pooled map has finer parts.
      has_channels: Whether a whole map has its queries and keys.
      gathered: Makes arrays whole on every device: where patches lie depends on data.
    """
    told = Known({}, {})
    patches = masked = channels = pooled = None
    if bins is not None:
        pooled = tuple(min(bins, size) for size in attention_map.shape[-2:])
    if pooled is None:
        weights = attention_map.weights()
        if has_numbers:
            told = known(attention_map, kind, tokens=tokens, lengths=lengths)
        if has_channels:
            query, key, exact = zoom.channels(attention_map)
            channels = query, key, jnp.full(query.shape[:-2], exact)
    elif has_numbers:
        statistics = attention_map.statistics(pooled=pooled, tokens=tokens)
        weights = statistics.pooled
        told = Known(_flat(per_head(statistics), attention_map), {})
    else:
        weights = attention_map.pooled(*pooled)
    if pooled is not None and has_patches:
        patches = zoom.patches(*gathered((attention_map, weights)))
    origin = attention_map.weighting.origin
    if not np.ndim(origin.query) and not np.ndim(origin.key):
        masked = zoom.masked_cells(attention_map, *(pooled or ()))
    weights, *others = _flat((weights, masked, patches, channels), attention_map)
    return jax.tree.map(lambda x: x[examples], Seen(weights, told, *others))


def _flat(tree: Any, attention_map: attention.AttentionMap) -> Any:
    """Merges the batch axes of arrays, which the map has too, into one."""
    batch_shape = attention_map.shape[:-3]
    count, axes = math.prod(batch_shape), len(batch_shape)
    return jax.tree.map(lambda x: x.reshape(count, *x.shape[axes:]), tree)


# Outside of any other program; what has one shape compiles once.
see_alone = jax.jit(
    see, static_argnames=("bins", "kind", "has_numbers", "has_patches", "has_channels")
)


def map_set(
    name: str,
    layers: Sequence[Layer],
    seen: Sequence[Seen],
    examples: Sequence[Example],
    *,
    step: int | None = None,
    dtype: DTypeLike = np.float32,
) -> MapSet:
    """Joins what was seen of L layers to a set, on the host.

    The N examples have all but their maps. Their axes may be shorter than the maps:
    the other rows and columns are padding and left out. Weights and channels get
    `dtype`.
    """
    columns = [range(len(layer.heads)) for layer in layers]
    numbers = summary([each.known.numbers for each in seen], columns)
    filled = (_filled(x, n, layers, seen, dtype) for n, x in enumerate(examples))
    told = None
    if all(each.known.evidence for each in seen):
        found = roles([each.known for each in seen])
        told = Roles(found.names, found.deciding)
    return MapSet(name, tuple(layers), tuple(filled), step, numbers, told)


def _filled(example, n, layers, seen, dtype) -> Example:
    weights, masked, channels, patches = [], [], [], []
    for i, (layer, each) in enumerate(zip(layers, seen, strict=True)):
        axes = example.axes(layer)
        part = np.s_[..., : axes.queries.bins, : axes.keys.bins]
        weights.append(each.weights[n][part].astype(dtype))
        hidden = each.masked
        if hidden is not None:
            hidden = hidden[n, 0] if hidden.shape[1] == 1 else hidden[n]
            hidden = hidden[part]
            # The same array where layers have the same mask, which is stored once then.
            known = (x for x in masked if x is not None and np.array_equal(x, hidden))
            hidden = next(known, hidden)
        masked.append(hidden)
        lengths = len(axes.queries.tokens), len(axes.keys.tokens)
        if each.channels is None:
            channels.append(None)
        else:
            sides = zip(each.channels[:2], lengths, strict=True)
            query, key = (x[n, :, :size].astype(dtype) for x, size in sides)
            channels.append(Channels(query, key, bool(each.channels[2].all())))
        if each.patches is not None:
            patches += _patches(i, *(x[n] for x in each.patches), lengths, dtype)
    return example._replace(
        weights=tuple(weights),
        masked=tuple(masked),
        channels=tuple(channels) if any(channels) else None,
        patches=tuple(patches),
    )


def _patches(layer, places, weights, lengths, dtype) -> list[Patch]:
    """Makes the patches of a layer, without the cells past the end."""
    patches = []
    for head, number in np.ndindex(*places.shape[:2]):
        query, key, width = places[head, number].tolist()
        steps = np.arange(weights.shape[-1] + 1) * width
        edges = [
            np.unique(np.minimum(first + steps, length))
            for first, length in zip((query, key), lengths, strict=True)
        ]
        rows, columns = (len(each) - 1 for each in edges)
        part = weights[head, number, :rows, :columns].astype(dtype)
        if part.size and part.any():
            patches.append(Patch(layer, head, *edges, part))
    return patches


def roles(of_layers: Sequence[Known], **options: Any) -> heads.Roles:
    """Finds the roles of heads, over all examples; see `heads.roles_of_evidence`."""
    sums = [{x: y.sum(0) for x, y in each.evidence.items()} for each in of_layers]
    return heads.roles_of_evidence(sums, **options)


def per_head(statistics: attention.Statistics) -> dict[str, jax.Array]:
    """Collects the numbers that are one per head, `[N, H]`, by their names.

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
) -> dict[str, PerHead]:
    """Averages each statistic over examples, `[L, H]`, with standard errors.

    For each layer there are the result of `per_head`, `[N, H]`, where H may differ and
    a number be missing, and the column of each head in the result, such as its index in
    the unpruned layer.
    """
    num_heads = 1 + max(max(places, default=-1) for places in columns)

    def over_layers(mean, name):
        rows = np.full((len(statistics), num_heads), np.nan)
        for row, layer, places in zip(rows, statistics, columns, strict=True):
            if name in layer:
                row[list(places)] = mean(layer[name])
        return rows

    names = dict.fromkeys(name for layer in statistics for name in layer)
    known = attention.STATISTICS
    found = {}
    for name in [
        *(x for x in names if x not in known),
        *(x for x in known if x in names),
    ]:
        entry = known.get(name)
        unit = alignment.UNIT if entry is None else entry.unit
        label = alignment.label(name) if entry is None else entry.label
        mean, error = (over_layers(x, name) for x in (means.mean, means.standard_error))
        found[name] = PerHead(mean, unit, label, error)
    return found
