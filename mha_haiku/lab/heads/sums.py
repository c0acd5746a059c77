"""Answers of `why`: numbers of a model as sums of terms, with rows of tables.

M components, R queries, H heads of a part, K query/key size per head, N examples, P
attention parts.
"""

import dataclasses
from typing import Any

import numpy as np

from mha_haiku.core import checks, display
from mha_haiku.lab.heads import circuits
from mha_haiku.lab.heads.components import Component


class Answer:
    """The base of answers: a title and the rows of a table, the largest first."""

    title: str
    _repr_html_, show, plot = display.html, display.show, display.plot

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row per number, as a dict by the names of columns."""
        raise NotImplementedError

    def __repr__(self) -> str:
        lines = [
            "  ".join(f"{x:10.4g}" if isinstance(x, float) else f"{x}" for x in cells)
            for cells in (row.values() for row in self.rows(12))
        ]
        return "\n".join([self.title, *lines])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Terms(Answer):
    """A number of the model as a sum of terms `[M, M']`; host arrays.

    Attributes:
      place: The attention part, its head, and the position of the query (and the key).
      title: The question, and the number.
      labels: The labels of the rows and of the columns.
      terms: `[M, M']` float64.
      total: The number in the model.
    """

    place: tuple[int, ...]
    title: str
    labels: tuple[tuple[Any, ...], tuple[Any, ...]]
    terms: np.ndarray
    total: float
    names = ("source", "component")

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row for each term that is not 0, at most `count` rows."""
        rows = []
        for (i, j), x in np.ndenumerate(self.terms):
            labels = (str(self.labels[0][i]), str(self.labels[1][j]))
            rows.append({"term": float(x)} | dict(zip(self.names, labels, strict=True)))
        return _largest_first(rows, count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pairs(Terms):
    """The score of a query and a key as a sum over pairs of components.

    `total` is the score before a soft cap and softmax, without a scale if attention was
    recognized in a function. `labels` are components of the query and of the key.

    Attributes:
      parts: The components: `[M, K]` of the query, times the score's scale, and
        `[M', K]` of the key. `terms` are their products.
      position: The bias of the two positions (ALiBi, other biases), added to the terms.
      weight: The weight of the key, in [0, 1].
    """

    parts: tuple[np.ndarray, np.ndarray]
    position: float
    weight: float
    names = ("query", "key")

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists the rows of `Terms.rows`, and a row for positions."""
        row = {"term": self.position, "query": "position", "key": "of the score"}
        return _largest_first([*super().rows(), row], count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Cells(Answer):
    """The largest pairs of many cells of all maps; host arrays.

    Arrays are by attention part, without parts that have no heads.

    Attributes:
      components: The M terms of queries and keys.
      queries: `[R]`, positions of the queries.
      keys: `[H, R]` by part, the position of the key of each cell.
      scores: `[H, R]`, the model's, as in `Pairs`; -inf if no key is seen.
      positions: `[H, R]`, the biases of the two positions.
      weights: `[H, R]`, the weight of the key, in [0, 1].
      pairs: `[H, R, count, 2]`, indices into `components`, query first.
      terms: `[H, R, count]`, their terms, in decreasing order of magnitude.
    """

    components: tuple[Component, ...]
    queries: np.ndarray
    keys: dict[int, np.ndarray]
    scores: dict[int, np.ndarray]
    positions: dict[int, np.ndarray]
    weights: dict[int, np.ndarray]
    pairs: dict[int, np.ndarray]
    terms: dict[int, np.ndarray]

    @property
    def title(self) -> str:
        """The title, with the number of cells."""
        count = sum(map(np.size, self.scores.values()))
        return f"The largest pairs of {count} cells"

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row for each cell, with its largest pair."""
        rows = []
        for part, terms in self.terms.items():
            for h, r in np.argwhere(np.isfinite(self.scores[part])).tolist():
                pair = self.pairs[part][h, r, 0]
                query, key = (str(self.components[m]) for m in pair)
                at = f"{part}.{h}: {self.queries[r]} to {self.keys[part][h, r]}"
                row = {"term": float(terms[h, r, 0]), "at": at}
                rows.append(row | {"query": query, "key": key})
        return _largest_first(rows, count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Reads(Answer):
    """The components that heads' queries, keys and values read, over a data set.

    For queries and keys the number is how much a component raises the scores of
    attended keys over the mean of all visible keys, `sum_s (p_s - 1 / n) score_s`,
    averaged over queries: the numbers of all components add up to that of the whole
    score, and constants of a row do not count. For values it is the share of the head's
    output, `z_m . z / |z|^2`; shares add up to 1.

    Attributes:
      components: M components, the last one the biases.
      by: For "q", "k" and "v" `[N, P, H, M]` per example, NaN where there is no such
        head; for values the numerators of shares.
      norms: `[N, P, H]`, `|z|^2` summed over the queries of an example.
      counts: `[N, P]`, the number of its queries.
      composition: For "q", "k" and "v" `[P, H, P, H]`, `circuits.compositions` of the
        weights; {} for a function.
    """

    components: tuple[Component, ...]
    by: dict[str, np.ndarray]
    norms: np.ndarray
    counts: np.ndarray
    composition: dict[str, np.ndarray]

    @property
    def title(self) -> str:
        """The title, with the number of examples."""
        return (
            f"What heads read by queries, keys and values, {len(self.norms)} examples"
        )

    def mean(self, kind: str) -> np.ndarray:
        """Averages "q", "k" or "v" over all queries of all examples, `[P, H, M]`."""
        checks.choice("kind", kind, circuits.KINDS)
        divisor = self.norms if kind == "v" else self.counts[..., None]
        return self.by[kind].sum(0) / divisor.sum(0)[..., None]

    def graph(self, kind: str) -> np.ndarray:
        """Returns `[P, H, P, H]`, the earlier head first, as `circuits.compositions`.

        NaN if there is no such head, or the second does not come after the first.
        """
        mean = self.mean(kind)
        result = np.full((*mean.shape[:2], *mean.shape[:2]), np.nan)
        for m, component in enumerate(self.components):
            if component.kind == "head":
                by_head = np.where(mean[:, :, m] == 0, np.nan, mean[:, :, m])
                result[component.layer, component.head] = by_head
        return result

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row per head and component, with the composition of weights.

        `count` is the largest number of rows for each of "q", "k" and "v".
        """
        rows = []
        for kind in self.by:
            weights, of_kind = self.composition.get(kind), []
            for (p, h, m), x in np.ndenumerate(self.mean(kind)):
                source, known = self.components[m], float("nan")
                if source.kind == "head" and weights is not None:
                    known = float(weights[source.layer, source.head, p, h])
                row = {"term": float(x), "head": f"{p}.{h}", "by": kind}
                row |= {"reads": str(source), "composition of weights": known}
                of_kind.append(row)
            rows += _largest_first(of_kind, count)
        return rows


def _largest_first(rows, count) -> list[dict[str, Any]]:
    """Sorts rows by the magnitude of their terms, largest first, without zeros."""
    rows = [row for row in rows if abs(row["term"]) > 0]
    return sorted(rows, key=lambda row: -abs(row["term"]))[:count]
