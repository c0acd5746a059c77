"""Numbers of a model as sums of terms: what `why` answers, as records and their rows.

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
    """What shows itself as a title and the rows of a table, the largest first."""

    title: str
    _repr_html_, show, plot = display.html, display.show, display.plot

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row for each number, by the names of its columns."""
        raise NotImplementedError

    def __repr__(self) -> str:
        lines = [
            "  ".join(f"{x:10.4g}" if isinstance(x, float) else f"{x}" for x in each)
            for each in (row.values() for row in self.rows(12))
        ]
        return "\n".join([self.title, *lines])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Terms(Answer):
    """A number of the model as a sum of terms `[M, M']`; host arrays.

    Attributes:
      place: The attention part, its head, and the position of the query (and the key).
      title: What is asked, and the number.
      labels: What the rows are of, and the columns.
      terms: `[M, M']` float64.
      total: The number itself, as the model has it.
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
            own = (str(self.labels[0][i]), str(self.labels[1][j]))
            rows.append({"term": float(x)} | dict(zip(self.names, own, strict=True)))
        return _largest_first(rows, count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pairs(Terms):
    """The score of a query and a key as a sum over pairs of components.

    `total` is the score before a soft cap and softmax; without a scale where attention
    was recognised in a function. `labels` are components of the query and of the key.

    Attributes:
      parts: What they are: `[M, K]` of the query, times the score's scale, and
        `[M', K]` of the key. `terms` are their products.
      position: What is added to the terms for the two positions (ALiBi, other biases).
      weight: The weight of the key, in [0, 1].
    """

    parts: tuple[np.ndarray, np.ndarray]
    position: float
    weight: float
    names = ("query", "key")

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists the rows of `Terms.rows`, and a row for positions."""
        own = {"term": self.position, "query": "position", "key": "of the score"}
        return _largest_first([*super().rows(), own], count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Cells(Answer):
    """The largest pairs of many cells of all maps; host arrays.

    Arrays are by attention part, of which those without heads are not there.

    Attributes:
      components: What queries and keys are sums of, M of them.
      queries: `[R]`, positions of the queries.
      keys: `[H, R]` by part, the position of the key of each cell.
      scores: `[H, R]`, the model's, as in `Pairs`; -inf where no key is seen.
      positions: `[H, R]`, what is added for the two positions.
      weights: `[H, R]`, the weight of the key, in [0, 1].
      pairs: `[H, R, count, 2]`, places in `components`, query side first.
      terms: `[H, R, count]`, their terms, the largest in size first.
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
        for part, own in self.terms.items():
            for h, r in np.argwhere(np.isfinite(self.scores[part])).tolist():
                query, key = (
                    str(self.components[m]) for m in self.pairs[part][h, r, 0]
                )
                at = f"{part}.{h}: {self.queries[r]} to {self.keys[part][h, r]}"
                row = {
                    "term": float(own[h, r, 0]),
                    "at": at,
                    "query": query,
                    "key": key,
                }
                rows.append(row)
        return _largest_first(rows, count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Reads(Answer):
    """What each head's queries, keys and values are made of, over a data set.

    By queries and keys it is how much a component raises the scores of the keys that
    are attended to over the mean of all keys that are seen, `sum_s (p_s - 1 / n)
    score_s`, a mean over queries: the numbers of all components add up to the whole
    score's, and constants of a row do not count. By values it is the share of the
    head's output, `z_m . z / |z|^2`; shares add up to 1.

    Attributes:
      components: M components, the last one the biases.
      by: For "q", "k" and "v" `[N, P, H, M]` of each example, NaN where there is no
        such head; of values the numerators of shares.
      norms: `[N, P, H]`, `|z|^2` summed over the queries of an example.
      counts: `[N, P]`, its queries.
      composition: For "q", "k" and "v" `[P, H, P, H]`, `circuits.compositions` of the
        weights; {} of a function.
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
        over = self.norms if kind == "v" else self.counts[..., None]
        return self.by[kind].sum(0) / over.sum(0)[..., None]

    def graph(self, kind: str) -> np.ndarray:
        """Returns `[P, H, P, H]`, the earlier head first, as `circuits.compositions`.

        NaN where there is no such head, or the second does not come after the first.
        """
        mean = self.mean(kind)
        result = np.full((*mean.shape[:2], *mean.shape[:2]), np.nan)
        for m, each in enumerate(self.components):
            if each.kind == "head":
                own = mean[:, :, m]
                result[each.layer, each.head] = np.where(own == 0, np.nan, own)
        return result

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row for each head and component, with weights' composition.

        `count` is the largest number of rows for each of "q", "k" and "v".
        """
        rows = []
        for kind in self.by:
            weights, own = self.composition.get(kind), []
            for (p, h, m), x in np.ndenumerate(self.mean(kind)):
                each, known = self.components[m], float("nan")
                if each.kind == "head" and weights is not None:
                    known = float(weights[each.layer, each.head, p, h])
                row = {"term": float(x), "head": f"{p}.{h}", "by": kind}
                own.append(row | {"reads": str(each), "composition of weights": known})
            rows += _largest_first(own, count)
        return rows


def _largest_first(rows, count) -> list[dict[str, Any]]:
    """Sorts rows by the size of their terms, largest first, without terms of 0."""
    rows = [row for row in rows if abs(row["term"]) > 0]
    return sorted(rows, key=lambda row: -abs(row["term"]))[:count]
