"""Attention as data: maps, the text or images under them, numbers per head.

A `MapSet` has layers with heads, numbers per head, and examples with their maps.
Commands save and load it, notebooks make it, and pages, figures and tables show it. It
consists of plain arrays in named parts, so that other sources of maps can be shown too.

Dimensions: L layers, H heads (of a layer), T query and S key positions, P query and Q
key bins, which are single positions in a whole map.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mha_haiku.core import display
from mha_haiku.records import Column, Heads, Layer, archive, heads

MOST_LIKELIEST = 3


class Axis(NamedTuple):
    """The positions along one side of a map.

    Attributes:
      tokens: `[T]` the text of each position, "" where it is not known.
      edges: `[P + 1]` integers that rise from 0 to T: bin `i` covers positions
        `edges[i]:edges[i + 1]`.
      label: The relation of tokens to positions: "token predicted"; "" for inputs.
      notes: `[T]` a note next to the token of each position: 'reads "v"'; or ().
    """

    tokens: tuple[str, ...]
    edges: np.ndarray
    label: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def whole(cls, tokens: Iterable[str]) -> "Axis":
        """Makes the axis whose bins are single positions."""
        tokens = tuple(tokens)
        return cls(tokens, np.arange(len(tokens) + 1))

    @property
    def bins(self) -> int:
        """P, the number of bins."""
        return len(self.edges) - 1

    @property
    def is_pooled(self) -> bool:
        """Whether a bin covers more than one position."""
        return self.bins < len(self.tokens)


class Axes(NamedTuple):
    """The axes of the maps of one kind of layers.

    Attributes:
      queries: The rows.
      keys: The columns.
      alignment: Booleans `[T, S]` of positions (not bins): the keys that a query should
        look at, as the task knows; None where it does not.
      has_answers: Whether these queries give the example's answers.
      images: Images of the keys, as in `Example`.
    """

    queries: Axis
    keys: Axis
    alignment: np.ndarray | None = None
    has_answers: bool = True
    images: np.ndarray | None = None

    @property
    def pooling(self) -> str:
        """A sentence on what a cell covers if maps are pooled, else ""."""
        queries, keys = (int(np.diff(x.edges).max(initial=1)) for x in self[:2])
        if max(queries, keys) == 1:
            return ""
        return (
            f"Pooled: a cell is the weight of up to {queries} queries, averaged, on up "
            f"to {keys} keys together."
        )

    def aligned_cells(self) -> np.ndarray | None:
        """Marks the cells `[P, Q]` with an aligned pair of positions; or None."""
        if self.alignment is None:
            return None
        starts = self.queries.edges[:-1], self.keys.edges[:-1]
        rows = np.logical_or.reduceat(self.alignment, starts[0], axis=0)
        return np.logical_or.reduceat(rows, starts[1], axis=1)


class Why(NamedTuple):
    """Why heads look there: the largest terms of the scores of N cells.

    Attributes:
      components: The components of queries and keys: "token", "layer 0, head 3".
      cells: `[N, 4]` integers: layer, head, positions of query and key.
      scores: `[N]`.
      pairs: `[N, n, 2]` integers, places in `components`, at the query and at the key.
      terms: `[N, n]`, the largest in size first.
    """

    components: tuple[str, ...]
    cells: np.ndarray
    scores: np.ndarray
    pairs: np.ndarray
    terms: np.ndarray

    def of_heads(self, rows: Sequence[Sequence[int]]) -> "Why":
        """Keeps the cells of some heads of each layer, which are counted anew."""
        kept = np.array([h in rows[i] for i, h, *_ in self.cells], bool)
        one = Why(self.components, *(x[kept] for x in self[1:]))
        cells = [[i, rows[i].index(h), *at] for i, h, *at in one.cells.tolist()]
        return one._replace(cells=np.array(cells, int).reshape(-1, 4))


class Answers(NamedTuple):
    """A model's answer at each position.

    Attributes:
      targets: `[T]`, or `[1]` for the whole input; "" where there is none.
      likeliest: Up to three answers for each of these, the likeliest first, with their
        probabilities (NaN where they are not known).
      whole: Whether the whole input has one answer.
    """

    targets: tuple[str, ...]
    likeliest: tuple[tuple[tuple[str, float], ...], ...]
    whole: bool = False


class Example(NamedTuple):
    """The maps of one input.

    Attributes:
      name: "held-out example 3".
      queries: Positions of the rows.
      keys: Positions of the columns.
      weights: Weights of each layer, `[H, P, Q]`; NaN weights are shown as such.
      masked: For each layer booleans `[P, Q]` or `[H, P, Q]`, true where no query may
        attend to any key of the cell; None where it is not known.
      note: A note on the example.
      answers: The model's answers, or None.
      images: Images of the keys, uint8 `[S, h, w]` or `[S, h, w, 3]`, or None.
      is_mean: Whether it is the mean of examples, and not an input.
      kinds: Axes by the kind of a layer, if they are not `queries` and `keys`.
      why: Why heads look there, or None.
    """

    name: str
    queries: Axis
    keys: Axis
    weights: tuple[np.ndarray, ...]
    masked: tuple[np.ndarray | None, ...] | None = None
    note: str = ""
    answers: Answers | None = None
    images: np.ndarray | None = None
    is_mean: bool = False
    kinds: Mapping[str, Axes] = {}
    why: Why | None = None

    def axes(self, layer: "Layer") -> Axes:
        """Returns the axes along the maps of a layer."""
        own = Axes(self.queries, self.keys, images=self.images)
        return self.kinds.get(layer.kind) or own

    def masked_cells(self, layer: int) -> np.ndarray | None:
        """Returns `masked` of a layer, `[P, Q]` or `[H, P, Q]`, or None."""
        return self.masked[layer] if self.masked else None

    def of_heads(self, rows: Sequence[Sequence[int]]) -> "Example":
        """Keeps some heads of each layer."""

        def kept(x: np.ndarray | None, row: Sequence[int]) -> np.ndarray | None:
            return x if x is None or x.ndim == 2 else x[list(row)]

        return self._replace(
            weights=tuple(map(kept, self.weights, rows)),
            masked=self.masked and tuple(map(kept, self.masked, rows)),
            why=self.why and self.why.of_heads(rows),
        )

    def drawn(self, layer: int) -> np.ndarray:
        """Returns the weights of a layer, NaN where a mask leaves none."""
        weights, masked = self.weights[layer], self.masked_cells(layer)
        if masked is None:
            return weights
        # Elsewhere a weight shows that a mask is wrong.
        return np.where(masked & (weights == 0), np.nan, weights)


@dataclasses.dataclass(frozen=True, repr=False)
class MapSet:
    """The maps of one model on some examples.

    Attributes:
      name: "reverse, step 300", "pruned".
      layers: `[L]`.
      examples: `[N]`; empty if only numbers are known.
      step: The training step; None if the set is not a moment of a training.
      columns: Numbers per head, as in `Heads`: `[L, H]` as in `layers`; layers with
        fewer heads end with NaN.
      missing: Pairs of a missing result ("importance") and the command to compute it.
      are_shares: Whether all weights are from 0 to 1, as they are after a softmax.
    """

    name: str
    layers: tuple[Layer, ...]
    examples: tuple[Example, ...]
    step: int | None = None
    columns: Mapping[str, Column] = dataclasses.field(default_factory=dict)
    missing: tuple[tuple[str, str], ...] = ()
    are_shares: bool = False

    def __repr__(self) -> str:
        num_layers, num_heads = self.shape
        parts = display.count(num_layers, "layer")
        parts += f" of up to {display.count(num_heads, 'head')}"
        parts += f", {display.count(len(self.examples), 'example')}"
        parts += f", {display.count(len(self.heads.numbers), 'statistic')}"
        return f"MapSet({self.name!r}: {parts})"

    _repr_html_, show, plot = display.html, display.show, display.plot

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "MapSet":
        """Loads the set in a file of `save`.

        Raises:
          ConfigError: If the file is missing, damaged or of another version.
        """
        command = "python -m mha_haiku dump_attention --workdir=..."
        return archive.load(path, cls, written_by=command)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the set, whole or not at all, as `records.archive` does.

        Raises:
          ConfigError: If it cannot be written.
        """
        return archive.save(path, self)

    @property
    def heads(self) -> Heads:
        """The numbers of the heads, without the maps."""
        return Heads(self.name, self.layers, self.columns, self.step)

    @property
    def shape(self) -> tuple[int, int]:
        """L and the largest H, the shape of numbers per head."""
        return len(self.layers), max((len(x.heads) for x in self.layers), default=0)

    @property
    def inputs(self) -> tuple[Example, ...]:
        """The examples without the mean of examples."""
        return tuple(example for example in self.examples if not example.is_mean)

    @property
    def mean(self) -> Example | None:
        """The mean of examples, or None."""
        return next((example for example in self.examples if example.is_mean), None)

    def of_heads(self, names: Sequence[str]) -> "MapSet":
        """Keeps the heads of these names in each layer, in their order."""
        rows = [[x.heads.index(y) for y in names if y in x.heads] for x in self.layers]
        places = [[(i, h) for h in row] for i, row in enumerate(rows)]
        pairs = zip(self.layers, rows, strict=True)
        return dataclasses.replace(
            self,
            layers=tuple(
                x._replace(heads=tuple(x.heads[h] for h in row)) for x, row in pairs
            ),
            examples=tuple(x.of_heads(rows) for x in self.examples),
            columns=heads.columns_at(places, self.columns),
        )

    def only(self, example: int, layers: Sequence[int]) -> "MapSet":
        """Takes an example's maps of some layers, and nothing else."""
        one = self.examples[example]
        one = one._replace(
            why=None,
            weights=tuple(one.weights[i] for i in layers),
            masked=tuple(one.masked_cells(i) for i in layers),
        )
        return MapSet(self.name, tuple(self.layers[i] for i in layers), (one,))


class Dossier(NamedTuple):
    """The content of one page: sets of maps that belong together.

    Attributes:
      title: The title.
      sets: One map set or more. Sets with a step are shown one after the other, others
        next to each other.
      notes: Notes on the whole content.
      rounding: Weights may be rounded to multiples of this, to save room.
    """

    title: str
    sets: tuple[MapSet, ...]
    notes: tuple[str, ...] = ()
    rounding: float = 0.0
