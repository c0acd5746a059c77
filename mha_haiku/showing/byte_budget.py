"""Fits a dossier into a number of bytes: rounded, pooled, then fewer examples.

H heads, P query and Q key bins.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from mha_haiku.records import Layer
from mha_haiku.records.map_set import Axes, Dossier, Example, MapSet

_ROUNDINGS = (0.004, 0.016)  # multiples to round weights to
_LEGIBLE_BINS = 64  # kept as long as there are several examples
_FEWEST_BINS = 8
_Sided = TypeVar("_Sided", Axes, Example)


def cuts(whole: Dossier, budget: int) -> Iterator[Dossier]:
    """Yields ever smaller cuts of a dossier, down to one small example.

    It is rounded first, and no longer says why heads look there; then each cut has half
    of the cells along a side, or of the examples.
    """
    yield whole
    whole = whole._replace(sets=tuple(map(_without_why, whole.sets)))
    for rounding in _ROUNDINGS:
        whole = whole._replace(rounding=rounding)
        yield whole
    examples, join = _num_examples(whole), 1
    bins = min(
        axis.bins
        for maps in whole.sets
        for example in maps.examples
        for layer in maps.layers
        for axis in example.axes(layer)[:2]
    )
    while bins // (2 * join) >= _LEGIBLE_BINS:
        yield cut(whole, examples, join := 2 * join, budget)
    while examples > 1:
        yield cut(whole, examples := examples // 2, join, budget)
    while bins // (2 * join) >= _FEWEST_BINS:
        yield cut(whole, examples, join := 2 * join, budget)


def _num_examples(whole: Dossier) -> int:
    return max(1, *(len(maps.inputs) for maps in whole.sets))


def _without_why(maps: MapSet) -> MapSet:
    examples = tuple(example._replace(why=None) for example in maps.examples)
    return dataclasses.replace(maps, examples=examples)


def cut(whole: Dossier, examples: int, join: int, budget: int) -> Dossier:
    """Keeps some examples of each set, and makes `join` bins one.

    A note says which examples are left out.
    """
    total, notes, sets = _num_examples(whole), whole.notes, []
    if examples < total:
        fit = f"fit the {budget:,} bytes of this view."
        notes = (*notes, f"Of {total} examples the first {examples} {fit}")
    for each in whole.sets:
        kept = (*each.inputs[:examples], *(x for x in each.examples if x.is_mean))
        kept = tuple(_joined(x, each.layers, join) for x in kept)
        sets.append(dataclasses.replace(each, examples=kept))
    return whole._replace(sets=tuple(sets), notes=notes)


def _joined(example: Example, layers: tuple[Layer, ...], join: int) -> Example:
    def coarser(axes: _Sided) -> _Sided:
        queries, keys = (
            axis._replace(edges=np.append(axis.edges[:-1:join], axis.edges[-1]))
            for axis in (axes.queries, axes.keys)
        )
        return axes._replace(queries=queries, keys=keys)

    if join == 1:
        return example
    return coarser(example)._replace(
        kinds={kind: coarser(axes) for kind, axes in example.kinds.items()},
        weights=tuple(
            _joined_weights(weights, example.axes(layer).queries.edges, join)
            for weights, layer in zip(example.weights, layers, strict=True)
        ),
        masked=example.masked
        and tuple(_joined_mask(masked, join) for masked in example.masked),
    )


def _joined_weights(weights: np.ndarray, edges: np.ndarray, join: int) -> np.ndarray:
    """Joins bins of maps `[H, P, Q]`: sums over keys, means over queries."""
    # A bin counts with its number of queries, or not at all where none of them sees:
    # no weight but 0. Rows of a difference of maps sum to 0, too, and count.
    rows = np.arange(0, weights.shape[-2], join)
    columns = np.arange(0, weights.shape[-1], join)
    count = np.where((weights == 0).all(-1), 0, np.diff(edges))[..., None]
    total = np.add.reduceat(weights * count, rows, axis=-2)
    total = np.add.reduceat(total, columns, axis=-1)
    count = np.add.reduceat(count, rows, axis=-2)
    return (total / np.maximum(count, 1)).astype(weights.dtype)


def _joined_mask(masked: np.ndarray | None, join: int) -> np.ndarray | None:
    if masked is None:
        return None
    for axis in (-2, -1):
        starts = np.arange(0, masked.shape[axis], join)
        masked = np.logical_and.reduceat(masked, starts, axis=axis)
    return masked
