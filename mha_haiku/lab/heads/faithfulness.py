"""A circuit of a model, at a budget of edges, and how faithful it is.

N pairs of examples, E edges, X patterns of edges.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np

from mha_haiku.core import checks, display
from mha_haiku.lab.heads import edge_measures, edge_runs, patching, programs, running
from mha_haiku.lab.heads import graph as graphs
from mha_haiku.training import tasks


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """Some edges of a model, and what remains of the metric with them, or without.

    Attributes:
      edges: All E edges, and what each is worth by the measure.
      kept: `[E]` booleans, the edges of the circuit.
      only: `[N]`, the metric where all other edges are patched.
      without: `[N]`, the metric where the edges of the circuit are patched.
      measure: The name of the measure.
    """

    edges: patching.Edges
    kept: np.ndarray
    only: np.ndarray
    without: np.ndarray
    measure: str

    _repr_html_, show, plot = display.html, display.show, display.plot

    @property
    def faithfulness(self) -> float:
        """The share that the circuit alone keeps: 1 all, 0 as if all were patched.

        Source: Hanna et al. 2024, section 4, https://arxiv.org/abs/2403.17806.
        """
        return self._share(self.only)

    @property
    def rest(self) -> float:
        """The share that remains without the circuit, in the same unit."""
        return self._share(self.without)

    def _share(self, metric) -> float:
        corrupted, whole = self.edges.other.mean(), self.edges.base.mean()
        return float((metric.mean() - corrupted) / (whole - corrupted))

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each edge of the circuit, the strongest first."""
        edges = self.edges
        order = np.argsort(-np.where(self.kept, edges.strength, -np.inf), kind="stable")
        return [
            {
                "sender": graphs.label(edges.senders[i]),
                "receiver": graphs.label(edges.receivers[i]),
                "kind": str(edges.kinds[i]),
                "value": float(edges.mean[i]),
            }
            for i in order[: self.kept.sum()]
        ]

    def __repr__(self) -> str:
        return (
            f"Circuit({self.kept.sum():,} of {len(self.kept):,} edges by "
            f"{self.measure}: faithfulness {self.faithfulness:.3f}, "
            f"{self.rest:.3f} without them)"
        )


def circuit(
    subject: running.Measured,
    corrupted: Iterable[tasks.Example],
    *,
    edges: int,
    measure: str = "integrated_edge_attribution",
    **options: Any,
) -> Circuit:
    """Finds the circuit of the strongest edges.

    Edges that are on no way from an embedding to the logits through other edges of the
    circuit change nothing; they are left out, and others take their place.

    Args:
      subject: The model to measure, with the clean examples.
      corrupted: The other examples of the pairs.
      edges: The most edges of the circuit.
      measure: A name of `heads.EDGE_MEASURES`.
      **options: Of the measure.

    Raises:
      ValueError: If the measure is unknown, or as the measure says.
    """
    checks.choice("measure", measure, edge_measures.EDGE_MEASURES)
    checks.positive_integer("edges", edges)
    graph = graphs.of_model(subject.model)
    found = edge_measures.EDGE_MEASURES[measure](subject, corrupted, **options)
    kept = strongest(graph, found.strength, edges)
    both = with_edges(subject, corrupted, np.stack([kept, ~kept]))
    return Circuit(found, kept, *both.T, measure)


def strongest(graph: graphs.Graph, strength: np.ndarray, edges: int) -> np.ndarray:
    """Chooses the edges of a circuit, `[E]` booleans, by their strength `[E]`.

    From the logits back, the strongest edge into a node that is reached comes next. So
    many are taken that at most `edges` of them are on a way from an embedding.

    Source: Hanna et al. 2024, greedy search, https://arxiv.org/abs/2403.17806.
    """
    place = {node: i for i, node in enumerate((*graph.writers, graphs.LOGITS))}
    ends = [place[node] for node, _ in graph.readers]
    ends = [(writer, ends[reader]) for writer, reader in graph.places.tolist()]
    into: dict[int, list] = {}
    for edge, (_, reader) in enumerate(ends):
        into.setdefault(reader, []).append((-strength[edge], edge))
    order, heap = [], into.pop(place[graphs.LOGITS])
    heapq.heapify(heap)
    while heap:
        _, edge = heapq.heappop(heap)
        order.append(edge)
        for each in into.pop(ends[edge][0], ()):
            heapq.heappush(heap, each)
    first = {stack.start for stack in graph.stacks.values()}

    def used(count):
        # Edges stand in the order in which the model computes what reads.
        reached, result = set(first), []
        for edge in sorted(order[:count]):
            if ends[edge][0] in reached:
                reached.add(ends[edge][1])
                result.append(edge)
        return result

    # More edges are never fewer used.
    count = bisect.bisect_right(
        range(len(order) + 1), edges, key=lambda n: len(used(n))
    )
    kept = np.zeros(len(ends), bool)
    kept[used(count - 1)] = True
    return kept


def with_edges(
    subject: running.Measured, corrupted: Iterable[tasks.Example], kept: np.ndarray
) -> np.ndarray:
    """Measures the metric with some edges kept and all others patched, `[N, X]`.

    Args:
      subject: The model to measure, with the clean examples.
      corrupted: The other examples of the pairs.
      kept: `[X, E]`, booleans or numbers from 0 to 1; edges as `heads.graph` has them.

    Raises:
      TypeError: If batches can be iterated over only once.
      ValueError: If batches do not pair, or the model is no graph.
    """
    program = _with_edges(subject.model, metric=subject.metric)
    return patching.over_pairs(subject, corrupted, program, np.float32(kept))[0]


@edge_measures.compiled_whole
def _with_edges(model, params, clean, corrupted, kept, *, metric):
    pair = edge_runs.Pair(model, params, clean, corrupted, metric)
    return (programs.over(pair.patched, kept, clean).T,)
