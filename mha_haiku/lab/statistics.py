"""Statistics of heads as columns: means over examples, with standard errors.

N examples, L layers, H heads.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention
from mha_haiku.lab.heads import alignment
from mha_haiku.records import Column, Heads, means

# Names and labels of statistics where it is known which positions they are of.
NAMES = {
    "chosen_positions": (
        "separator",
        "attention on special tokens after the first position, such as [SEP]",
    )
}


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

    all_names = dict.fromkeys(name for layer in statistics for name in layer)
    registered = attention.STATISTICS
    result = {}
    for name in [
        *(x for x in all_names if x not in registered),
        *(x for x in registered if x in all_names),
    ]:
        entry = registered.get(name)
        unit = entry.unit if entry else "" if name in names else alignment.UNIT
        label = alignment.label(name) if entry is None else entry.label
        mean, error = (over_layers(x, name) for x in (means.mean, means.standard_error))
        name, label = names.get(name, (name, label))
        result[name] = Column(mean, unit, label, error)
    return result


def heads_of(statistics: attention.Statistics) -> Heads:
    """Averages each statistic over examples, `[1, H]`, with standard errors."""
    count = np.asarray(statistics.num_queries)
    if not count.size:
        raise ValueError(f"there are no examples or no heads: {statistics!r}.")
    means = {}
    for name, entry in attention.STATISTICS.items():
        values = getattr(statistics, name)
        # Statistics per query are 0 where the query is masked.
        if values is not None and np.ndim(values) > count.ndim:
            means[name] = np.asarray(values).sum(-1) / np.maximum(count, 1)
            if entry.is_largest:
                is_seen = np.asarray(statistics.largest_weight) != 0
                means[name] = np.max(values, -1, where=is_seen, initial=-np.inf)
    means = dataclasses.replace(statistics, values=statistics.values | means)
    columns = per_head(means) | {"num_queries": count}
    num_heads = count.shape[-1]
    layer = {
        name: np.reshape(values, (-1, num_heads)) for name, values in columns.items()
    }
    examples = math.prod(count.shape[:-1])
    over = "" if examples == 1 else f", means over {examples} examples"
    return Heads.of(
        f"Statistics of {num_heads} heads{over}",
        summary([layer], [range(num_heads)], names={}),
        notes=("Of queries that see a key",),
    )
