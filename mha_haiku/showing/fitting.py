"""What is left out of a dossier, or pooled, so that its page fits a number of bytes.

H heads, P query and Q key bins.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mha_haiku.showing import map_set
from mha_haiku.showing.map_set import Dossier, MapSet

# To what multiples weights are rounded, and what share of the bytes is left then: of
# maps of a pretrained model with 6 layers of 12 heads, 128 positions.
_ROUNDINGS = {0.0: 1.0, 0.002: 0.57, 0.004: 0.42, 0.008: 0.31, 0.016: 0.21}
_FEWEST_BINS = 16
_BYTES_PER_CELL = 0.15  # of a page of such maps, rounded; for a first guess
_PATCH_BYTES = 300  # of a patch without its weights
_STEPS = 40


class Cut(NamedTuple):
    """How much of a dossier is shown.

    Attributes:
      examples: How many examples of each set.
      heads: How many heads of a layer, at most.
      join: How many bins, along queries and keys, become one.
      rounding: Weights are rounded to multiples of this.
      channels: Whether there are queries and keys, and why heads look there.
      patches: How many finer parts there are, those with the most mass.
    """

    examples: int
    heads: int
    join: int = 1
    rounding: float = 0.0
    channels: bool = True
    patches: int = 2**31


def fitted(
    whole: Dossier, budget: int, render: Callable[[Dossier], str]
) -> tuple[Dossier, str]:
    """Cuts a dossier to what fits; also returns what was rendered of it.

    Queries and keys go first. Then weights are rounded, to 0.016 at most; examples are
    left out, all but one and the mean; and finer parts, which never take more than a
    third of the budget, in bytes. Then the grain becomes coarser, and last there are
    fewer heads. The page says so.
    """
    cut = _guess(whole, budget)
    for _ in range(_STEPS):
        shown = _with(whole, cut, budget)
        content = render(shown)
        size = len(content.encode())
        if size <= budget:
            return shown, content
        cut = _smaller(whole, cut, size / budget)
        if cut is None:
            raise ValueError(
                f"budget must be at least {size:,} bytes here, got {budget:,}."
            )
    raise ValueError(f"budget must be above {budget:,} bytes here.")


def _guess(whole, budget) -> Cut:
    """Guesses what may fit, so that a page is not rendered many times."""
    num_examples = _num_examples(whole)
    num_heads = max(len(layer.heads) for each in whole.sets for layer in each.layers)
    cells = sum(
        sum(weights.size for weights in each.examples[0].weights) for each in whole.sets
    )
    room = budget / _BYTES_PER_CELL
    cut = Cut(max(1, min(num_examples, int(room // max(cells, 1)))), num_heads)
    parts = _patches(whole)
    if parts:
        size = sum(patch.weights.size for patch in parts) / len(parts)
        cut = cut._replace(patches=int(budget / 3 / (_PATCH_BYTES + size / 2)))
    while cells / cut.join**2 > 4 * room and _bins(whole, cut.join + 1) >= _FEWEST_BINS:
        cut = cut._replace(join=cut.join + 1)
    return cut


def _smaller(whole, cut, excess) -> Cut | None:
    """Returns a cut that is smaller by about a factor `excess`; None: there is none."""
    if cut.channels and any(each.channels or each.why for each in _examples(whole)):
        return cut._replace(channels=False)
    coarser = [each for each in _ROUNDINGS if each > cut.rounding]
    if coarser:
        left = {each: _ROUNDINGS[each] / _ROUNDINGS[cut.rounding] for each in coarser}
        enough = [each for each in coarser if excess * left[each] <= 1]
        return cut._replace(rounding=(enough or coarser[-1:])[0])
    if cut.examples > 1:
        return cut._replace(examples=max(1, int(cut.examples / max(excess, 1.2))))
    if patches := min(cut.patches, len(_patches(whole))):
        return cut._replace(patches=patches // 2)
    if _bins(whole, cut.join + 1) >= _FEWEST_BINS:
        return cut._replace(join=cut.join + 1)
    if cut.heads > 1:
        return cut._replace(heads=max(1, int(cut.heads / max(excess, 1.2))))
    return None


def _bins(whole, join) -> int:
    """Counts the fewest bins along a side if `join` of them become one."""
    return min(
        axis.bins // join
        for each in whole.sets
        for example in each.examples
        for layer in each.layers
        for axis in example.axes(layer)[:2]
    )


def _num_examples(whole) -> int:
    return max(1, *(len(each.inputs) for each in whole.sets))


def _examples(whole) -> list[map_set.Example]:
    return [example for each in whole.sets for example in each.examples]


def _patches(whole) -> list[map_set.Patch]:
    return [patch for example in _examples(whole) for patch in example.patches]


def _mass(patch) -> float:
    return float(np.nansum(patch.weights * np.diff(patch.query_edges)[:, None]))


def _with(whole, cut, budget) -> Dossier:
    # The mass that a patch must have more of to be shown.
    masses = sorted(map(_mass, _patches(whole)), reverse=True)
    least = masses[cut.patches] if cut.patches < len(masses) else -1.0
    sets = tuple(_cut_set(each, cut, least) for each in whole.sets)
    return whole._replace(
        rounding=max(whole.rounding, cut.rounding),
        sets=sets,
        notes=(*whole.notes, *_notes(whole, cut, budget)),
    )


def _notes(whole, cut, budget) -> list[str]:
    """Says what a page leaves out."""
    notes = []
    fits = f"fit the {budget:,} bytes of this view"
    total = _num_examples(whole)
    if cut.examples < total:
        notes.append(f"Of {total} examples the first {cut.examples} {fits}.")
    total = max(len(layer.heads) for each in whole.sets for layer in each.layers)
    if cut.heads < total:
        notes.append(f"Of {total} heads of a layer the first {cut.heads} {fits}.")
    return notes


def _cut_set(each: MapSet, cut: Cut, least: float) -> MapSet:
    kept = (*each.inputs[: cut.examples], *(x for x in each.examples if x.is_mean))
    heads = [range(len(layer.heads))[: cut.heads] for layer in each.layers]
    each = dataclasses.replace(each, examples=kept).with_heads(heads)
    examples = tuple(_cut_example(x, each.layers, cut, least) for x in each.examples)
    return dataclasses.replace(each, examples=examples)


def _cut_example(example, layers, cut, least):
    def joined(axes):
        queries, keys = (
            axis._replace(edges=_joined(axis.edges, cut.join))
            for axis in (axes.queries, axes.keys)
        )
        return axes._replace(queries=queries, keys=keys)

    return joined(example)._replace(
        kinds={kind: joined(axes) for kind, axes in example.kinds.items()},
        weights=tuple(
            _joined_weights(weights, example.axes(layer).queries.edges, cut.join)
            for weights, layer in zip(example.weights, layers, strict=True)
        ),
        masked=tuple(_joined_mask(masked, cut.join) for masked in example.masked),
        patches=tuple(patch for patch in example.patches if _mass(patch) > least),
        channels=example.channels if cut.channels else None,
        why=example.why if cut.channels else None,
    )


def _joined(edges: np.ndarray, join: int) -> np.ndarray:
    return np.append(edges[:-1:join], edges[-1])


def _joined_weights(weights, edges, join) -> np.ndarray:
    """Joins bins of maps `[H, P, Q]`: sums over keys, means over queries."""
    # A bin counts with its number of queries, or not at all where none of them sees.
    if join == 1:
        return weights
    rows = np.arange(0, weights.shape[-2], join)
    columns = np.arange(0, weights.shape[-1], join)
    count = np.where(weights.sum(-1) == 0, 0, np.diff(edges))[..., None]
    total = np.add.reduceat(weights * count, rows, axis=-2)
    total = np.add.reduceat(total, columns, axis=-1)
    count = np.add.reduceat(count, rows, axis=-2)
    return (total / np.maximum(count, 1)).astype(weights.dtype)


def _joined_mask(masked, join) -> np.ndarray | None:
    if masked is None:
        return None
    for axis in (-2, -1):
        starts = np.arange(0, masked.shape[axis], join)
        masked = np.logical_and.reduceat(masked, starts, axis=axis)
    return masked
