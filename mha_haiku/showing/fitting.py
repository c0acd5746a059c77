"""Fits a dossier into a number of bytes: rounded, pooled, then fewer examples.

H heads, P query and Q key bins.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from mha_haiku.records import Layer
from mha_haiku.records.map_set import Axes, Dossier, Example, MapSet

# Multiples to round weights to, and the share of the bytes that remains, for maps of a
# pretrained model with 6 layers of 12 heads, 128 positions.
_ROUNDINGS = {0.0: 1.0, 0.004: 0.42, 0.016: 0.21}
_BYTES_PER_CELL = 0.2  # of a page of such maps, at least, before they are rounded
_LEGIBLE_BINS = 64  # kept as long as there are several examples
_FEWEST_BINS = 16
_Sided = TypeVar("_Sided", Axes, Example)


class Cut(NamedTuple):
    """The part of a dossier that is shown.

    Attributes:
      examples: Number of examples of each set.
      join: Number of bins, along queries and keys, that become one.
      rounding: Weights are rounded to multiples of this.
      has_why: Whether the page says why heads look there.
    """

    examples: int
    join: int = 1
    rounding: float = 0.0
    has_why: bool = True

    @property
    def size(self) -> float:
        """The approximate size of the page, relative to other cuts."""
        return self.examples * _ROUNDINGS[self.rounding] / self.join**2


def fitted(
    whole: Dossier, budget: int, render: Callable[[Dossier], str]
) -> tuple[Dossier, str]:
    """Returns the largest cut of a dossier that fits, and its rendering.

    Raises:
      ValueError: If not even the smallest cut fits.
    """
    cuts = list(_cuts(whole))
    cells = sum(x.size for maps in whole.sets for x in maps.examples[0].weights)
    bytes_per_size = _BYTES_PER_CELL * cells
    for cut in cuts:
        # Not rendered if it cannot fit, as a part of a page has a fixed size.
        if cut.size * bytes_per_size > budget and cut is not cuts[-1]:
            continue
        shown = cut_to(whole, cut, budget)
        content = render(shown)
        size = len(content.encode())
        if size <= budget:
            return shown, content
        bytes_per_size = max(bytes_per_size, 0.8 * size / cut.size)
    raise ValueError(f"budget must be at least {size:,} bytes here, got {budget:,}.")


def _cuts(whole: Dossier) -> Iterator[Cut]:
    """Yields ever smaller cuts, from all of a dossier to one small example."""
    cut = Cut(_num_examples(whole))
    yield cut
    cut = cut._replace(has_why=False)
    for rounding in _ROUNDINGS:
        cut = cut._replace(rounding=rounding)
        yield cut
    while _bins(whole, cut.join + 1) >= _LEGIBLE_BINS:
        cut = cut._replace(join=cut.join + 1)
        yield cut
    while cut.examples > 1:
        cut = cut._replace(examples=cut.examples - 1)
        yield cut
    while _bins(whole, cut.join + 1) >= _FEWEST_BINS:
        cut = cut._replace(join=cut.join + 1)
        yield cut


def _bins(whole: Dossier, join: int) -> int:
    """Counts the fewest bins along a side if `join` of them become one."""
    return min(
        axis.bins // join
        for maps in whole.sets
        for example in maps.examples
        for layer in maps.layers
        for axis in example.axes(layer)[:2]
    )


def _num_examples(whole: Dossier) -> int:
    return max(1, *(len(maps.inputs) for maps in whole.sets))


def cut_to(whole: Dossier, cut: Cut, budget: int) -> Dossier:
    """Cuts a dossier, with a note that says what is left out."""
    total, notes = _num_examples(whole), whole.notes
    if cut.examples < total:
        fit = f"fit the {budget:,} bytes of this view."
        notes = (*notes, f"Of {total} examples the first {cut.examples} {fit}")
    sets = tuple(_cut_set(maps, cut) for maps in whole.sets)
    rounding = max(whole.rounding, cut.rounding)
    return whole._replace(rounding=rounding, sets=sets, notes=notes)


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

    example = example if cut.has_why else example._replace(why=None)
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
