"""Fits a dossier into a number of bytes: rounded, pooled, then fewer examples.

H heads, P query and Q key bins.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from mha_haiku.records import Layer
from mha_haiku.records.map_set import Axes, Dossier, Example, MapSet

_ROUNDINGS = (0.004, 0.016)  # multiples to round weights to
_LEGIBLE_BINS = 64  # kept as long as there are several examples
_FEWEST_BINS = 8
_Sided = TypeVar("_Sided", Axes, Example)


class Cut(NamedTuple):
    """The part of a dossier that is shown.

    Attributes:
      examples: Number of examples of each set.
      join: Number of bins, along queries and keys, that become one.
      rounding: Weights are rounded to multiples of this; then the page does not say why
        heads look there.
    """

    examples: int
    join: int = 1
    rounding: float = 0.0


def fitted(
    whole: Dossier, budget: int, render: Callable[[Dossier], str]
) -> tuple[Dossier, str]:
    """Returns the largest cut of a dossier that fits, and its rendering.

    Raises:
      ValueError: If not even the smallest cut fits.
    """
    shown, cuts = whole, _cuts(whole)
    while True:
        content = render(shown)
        if (size := len(content.encode())) <= budget:
            return shown, content
        if (cut := next(cuts, None)) is None:
            break
        shown = cut_to(whole, cut, budget)
    raise ValueError(f"budget must be at least {size:,} bytes here, got {budget:,}.")


def _cuts(whole: Dossier) -> Iterator[Cut]:
    """Yields ever smaller cuts of a dossier, down to one small example.

    After the rounding each has half of the cells along a side, or of the examples.
    """
    cut = Cut(_num_examples(whole))
    for rounding in _ROUNDINGS:
        cut = cut._replace(rounding=rounding)
        yield cut
    bins = min(
        axis.bins
        for maps in whole.sets
        for example in maps.examples
        for layer in maps.layers
        for axis in example.axes(layer)[:2]
    )
    while bins // (2 * cut.join) >= _LEGIBLE_BINS:
        cut = cut._replace(join=2 * cut.join)
        yield cut
    while cut.examples > 1:
        cut = cut._replace(examples=cut.examples // 2)
        yield cut
    while bins // (2 * cut.join) >= _FEWEST_BINS:
        cut = cut._replace(join=2 * cut.join)
        yield cut


def _num_examples(whole: Dossier) -> int:
    return max(1, *(len(maps.inputs) for maps in whole.sets))


def cut_to(whole: Dossier, cut: Cut, budget: int) -> Dossier:
    """Cuts a dossier, with a note that says what is left out."""
    total, notes = _num_examples(whole), whole.notes
    if cut.examples < total:
        fit = f"fit the {budget:,} bytes of this view."
        notes = (*notes, f"Of {total} examples the first {cut.examples} {fit}")
    sets = tuple(_cut_set(maps, cut) for maps in whole.sets)
    return whole._replace(rounding=cut.rounding, sets=sets, notes=notes)


def _cut_set(each: MapSet, cut: Cut) -> MapSet:
    kept = (*each.inputs[: cut.examples], *(x for x in each.examples if x.is_mean))
    examples = tuple(_cut_example(x, each.layers, cut) for x in kept)
    return dataclasses.replace(each, examples=examples)


def _cut_example(example: Example, layers: tuple[Layer, ...], cut: Cut) -> Example:
    def joined(axes: _Sided) -> _Sided:
        queries, keys = (
            axis._replace(edges=np.append(axis.edges[: -1 : cut.join], axis.edges[-1]))
            for axis in (axes.queries, axes.keys)
        )
        return axes._replace(queries=queries, keys=keys)

    example = example._replace(why=None) if cut.rounding else example
    if cut.join == 1:
        return example
    return joined(example)._replace(
        kinds={kind: joined(axes) for kind, axes in example.kinds.items()},
        weights=tuple(
            _joined_weights(weights, example.axes(layer).queries.edges, cut.join)
            for weights, layer in zip(example.weights, layers, strict=True)
        ),
        masked=example.masked
        and tuple(_joined_mask(masked, cut.join) for masked in example.masked),
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
