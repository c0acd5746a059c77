"""Measures of the importance of edges, and the circuits of the strongest edges.

A measure is a function with the decorator `_offered`, which registers it in
`EDGE_MEASURES`. It takes a `Measured`, which has the clean examples, and the corrupted
examples of the pairs, and returns `Edges`: a number per edge, ranked by
`Edges.strength`. It raises TypeError if batches can be iterated over only
once, and ValueError if they do not pair or the model is not a graph. `graph.py` defines
edges, `edge_runs.py` what they carry in a run with patched edges.

B batch, N pairs of examples, E edges, X patterns of edges.
"""

import bisect
import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mha_haiku.core import checks, models
from mha_haiku.lab.heads import clean_runs, edge_runs, model_runs, patching
from mha_haiku.lab.heads import graph as graphs
from mha_haiku.lab.heads.model_runs import Batches, Measured
from mha_haiku.records import Result, tables
from mha_haiku.training import tasks

Array = jax.Array
Edges = patching.Edges
EdgeMeasure = Callable[..., Edges]
_Function = TypeVar("_Function", bound=EdgeMeasure)

EDGE_MEASURES: dict[str, EdgeMeasure] = {}
"""By name, the functions `measure(subject, corrupted)`, with options by keyword."""


def _offered(function: _Function) -> _Function:
    EDGE_MEASURES[function.__name__] = function
    return function


def program(
    function: Callable, of_runs: Callable = edge_runs.EdgeRuns, **options: bool
) -> Callable:
    """Compiles a function of runs and arrays; results are its, and both metrics.

    `of_runs(model, params, clean, corrupted, metric, **options)` makes the runs.
    """

    @functools.partial(model_runs.compiled, compacts=False)
    def compiled(
        model: models.Model,
        params: Any,
        clean: tasks.Example,
        corrupted: tasks.Example,
        *arrays: Array,
        metric: model_runs.Metric,
    ) -> tuple[Array, ...]:
        runs = of_runs(model, params, clean, corrupted, metric, **options)
        return (*function(runs, *arrays), runs.before, runs.after)

    return compiled


@_offered
def edge_patching(subject: Measured, corrupted: Batches) -> Edges:
    """Computes the change of the metric when one edge is patched, for each edge.

    The receiver reads the sender's output of the corrupted run; everything after it is
    recomputed. `edge_attribution` estimates the same numbers; this takes E runs.

    Source: Conmy et al. 2023, section 2, https://arxiv.org/abs/2304.14997.

    Example:
      >>> edges = mh.heads.edge_patching(measured, corrupted)
      >>> f"{np.sum(edges.mean > 0.1)} of {len(edges.mean)} edges matter"
      '5 of 29 edges matter'
    """
    edges = np.arange(graphs.of_model(subject.model).num_edges)
    return _edges(subject, corrupted, _patched_one_by_one, edges)


@program
def _patched_one_by_one(runs: edge_runs.EdgeRuns, edges: Array) -> tuple[Array]:
    run = lambda edge: runs.patched(jnp.ones(len(edges)).at[edge].set(0))  # noqa: E731
    return ((clean_runs.over(run, edges, runs.example) - runs.before[None]).T,)


@_offered
def edge_attribution(subject: Measured, corrupted: Batches) -> Edges:
    """Runs attribution patching, EAP: the change by patching an edge, at first order.

    It is the slope of the metric by the receiver's input, times what patching adds to
    this input. Memory grows with B T D times the number of nodes and readers.

    Source: Syed et al. 2023, section 3, https://arxiv.org/abs/2310.10348.

    Example:
      >>> mh.heads.edge_attribution(measured, corrupted).mean.shape
      (29,)
    """
    return integrated_edge_attribution(subject, corrupted, steps=1)


@_offered
def integrated_edge_attribution(
    subject: Measured, corrupted: Batches, *, steps: int = 5
) -> Edges:
    """Computes `edge_attribution` with integrated gradients, EAP-IG.

    Slopes are averages over `steps` inputs on the line from the corrupted embeddings to
    the clean ones, which are the last.

    Source: Hanna et al. 2024, eq. 4, https://arxiv.org/abs/2403.17806.

    Example:
      >>> edges = mh.heads.integrated_edge_attribution(measured, corrupted, steps=3)
      >>> f"{np.sum(edges.mean > 0.1)} of {len(edges.mean)} edges matter"
      '5 of 29 edges matter'
    """
    checks.positive_integer("steps", steps)
    shares = np.float32(np.arange(1, steps) / steps)  # without 1, the clean input
    return _edges(subject, corrupted, _slopes, shares)


@functools.partial(program, runs_clean=False)
def _slopes(runs: edge_runs.EdgeRuns, shares: Array) -> tuple[Array]:
    def add(total: Array, share: Array) -> tuple[Array, None]:
        return total + runs.slopes(share), None

    edges = runs.slopes()
    if len(shares):
        edges, _ = jax.lax.scan(add, edges, shares)
    return (edges / (1 + len(shares)),)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Circuit(Result):
    """A subset of a model's edges, and the metric with only them, and without them.

    Attributes:
      edges: All E edges, with their numbers by the measure.
      kept: `[E]` booleans, the edges of the circuit.
      only: `[N]`, the metric when all other edges are patched.
      without: `[N]`, the metric when the edges of the circuit are patched.
      measure: The name of the measure.
      title: The model and the texts.

    Example:
      >>> circuit = mh.heads.circuit_of_heads(measured, corrupted, edges=2)
      >>> round(circuit.faithfulness, 2)
      1.0
      >>> [(row["sender"], row["receiver"], row["kind"]) for row in circuit.rows()]
      [('1.0', 'logits', 'logits'), ('0.0', '1.0', 'k')]
    """

    edges: Edges
    kept: np.ndarray
    only: np.ndarray
    without: np.ndarray
    measure: str
    title: str = ""
    file_name = "circuit"

    @property
    def faithfulness(self) -> float:
        """The share of the metric kept by the circuit: 1 with all edges, 0 with none.

        Source: Hanna et al. 2024, section 4, https://arxiv.org/abs/2403.17806.
        """
        return self._share(self.only)

    @property
    def rest(self) -> float:
        """The share of the metric kept without the circuit, on the same scale."""
        return self._share(self.without)

    def _share(self, metric: np.ndarray) -> float:
        corrupted, whole = self.edges.other.mean(), self.edges.base.mean()
        return float((metric.mean() - corrupted) / (whole - corrupted))

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each edge of the circuit, the strongest first."""
        edges = self.edges
        order = np.argsort(-np.where(self.kept, edges.strength, -np.inf), kind="stable")
        rows = []
        for i in order[: self.kept.sum()]:
            ends = graphs.label(edges.senders[i]), graphs.label(edges.receivers[i])
            row = *ends, str(edges.kinds[i]), float(edges.mean[i])
            names = ("sender", "receiver", "kind", "value")
            rows.append(dict(zip(names, row, strict=True)))
        return rows

    def table(self) -> tables.Table:
        """Makes a table with a row per edge, the strongest first."""
        columns = [tables.Column(name) for name in ("sender", "receiver", "kind")]
        columns.append(tables.Column("value", self.edges.unit, "{:.4g}"))
        return tables.Table(columns, self.rows())

    def text(self, count: int | None = 20) -> str:
        """Writes the table as text, with the faithfulness of the circuit below it."""
        edges = self.edges
        return (
            f"{super().text(count)}\n\n{self}\n"
            f"metric: {edges.base.mean():.4g} clean, {edges.other.mean():.4g} "
            f"corrupted, {self.only.mean():.4g} with the circuit alone, "
            f"{self.without.mean():.4g} without it"
        )

    def __repr__(self) -> str:
        return (
            f"Circuit({self.kept.sum():,} of {len(self.kept):,} edges by "
            f"{self.measure}: faithfulness {self.faithfulness:.3f}, "
            f"{self.rest:.3f} without them)"
        )


def circuit(
    subject: Measured,
    corrupted: Batches,
    *,
    edges: int,
    measure: str = "integrated_edge_attribution",
    **options: Any,
) -> Circuit:
    """Finds the circuit of the strongest edges.

    Edges that are not on a path of the circuit from an embedding to the logits have no
    effect; they are excluded, and others take their place.

    Args:
      edges: The largest number of edges of the circuit.
      measure: A name in `heads.EDGE_MEASURES`.
      **options: Options of the measure.

    Raises:
      ValueError: If the measure is unknown, or from the measure.

    Example:
      >>> mh.heads.circuit(measured, corrupted, edges=6)
      Circuit(5 of 29 edges by integrated_edge_attribution: faithfulness 1.000, ...
    """
    checks.choice("measure", measure, EDGE_MEASURES)
    checks.positive_integer("edges", edges)
    graph = graphs.of_model(subject.model)
    measured = EDGE_MEASURES[measure](subject, corrupted, **options)
    kept = strongest(graph, measured.strength, edges)
    only, without = with_edges(subject, corrupted, np.stack([kept, ~kept])).T
    return Circuit(measured, kept, only, without, measure)


def strongest(graph: graphs.Graph, strength: np.ndarray, edges: int) -> np.ndarray:
    """Chooses the edges of a circuit, `[E]` booleans, by their strength `[E]`.

    From the logits back, it adds the strongest edge into a node that is already
    reached, as long as at most `edges` of the edges are on a path from an embedding.

    Source: Hanna et al. 2024, greedy search, https://arxiv.org/abs/2403.17806.

    Example:
      >>> graph = mh.heads.graph.of_model(model)
      >>> edges = mh.heads.edge_patching(measured, corrupted)
      >>> f"{mh.heads.strongest(graph, edges.strength, edges=6).sum()} edges"
      '5 edges'
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
        for earlier in into.pop(ends[edge][0], ()):
            heapq.heappush(heap, earlier)
    first = {stack.start for stack in graph.stacks.values()}

    def used(count: int) -> list[int]:
        # Edges are in the order in which the model computes their readers.
        reached, result = set(first), []
        for edge in sorted(order[:count]):
            if ends[edge][0] in reached:
                reached.add(ends[edge][1])
                result.append(edge)
        return result

    # The number of used edges never falls with the number of edges.
    counts = range(len(order) + 1)
    count = bisect.bisect_right(counts, edges, key=lambda n: len(used(n)))
    kept = np.zeros(len(ends), bool)
    kept[used(count - 1)] = True
    return kept


def with_edges(subject: Measured, corrupted: Batches, kept: np.ndarray) -> np.ndarray:
    """Computes the metric with some edges kept and all others patched, `[N, X]`.

    `kept` is `[X, E]`, booleans or numbers from 0 to 1, in the order of `heads.graph`.

    Raises:
      TypeError: If batches can be iterated over only once.
      ValueError: If batches do not pair, the model is not a graph, or `kept` does not
        fit its edges.

    Example:
      >>> kept = np.stack([np.ones(29), np.zeros(29)])  # all edges, and none
      >>> mh.heads.with_edges(measured, corrupted, kept).mean(0).round(1)
      array([0. , 5.6])
    """
    kept = np.asarray(kept, np.float32)
    count = graphs.of_model(subject.model).num_edges
    if kept.ndim != 2 or kept.shape[1] != count:
        raise ValueError(f"kept must be [X, E], E = {count}, got shape {kept.shape}.")
    program = _with_edges(subject.model, metric=subject.metric)
    return patching.over_pairs(subject, corrupted, program, kept)[0]


@program
def _with_edges(runs: edge_runs.EdgeRuns, kept: Array) -> tuple[Array]:
    return (clean_runs.over(runs.patched, kept, runs.example).T,)


def _edges(
    subject: Measured, corrupted: Batches, program: Callable, *arrays: ArrayLike
) -> Edges:
    """Measures all edges by a program that returns their numbers."""
    program = program(subject.model, metric=subject.metric)
    numbers, base, other = patching.over_pairs(subject, corrupted, program, *arrays)
    return Edges(numbers, base, other, *graphs.of_model(subject.model).ends)
