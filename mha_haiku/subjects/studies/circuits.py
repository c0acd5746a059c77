"""Which edges of a run carry its answers, and how faithful they are alone."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.lab import heads
from mha_haiku.showing import graphs, tables
from mha_haiku.subjects.studies import workbench
from mha_haiku.subjects.studies.workbench import Bench


class StudiedCircuit(NamedTuple):
    """A circuit, and what it is a circuit of."""

    title: str
    circuit: heads.Circuit

    def table(self) -> tables.Table:
        """Returns a row per edge, the strongest first."""
        columns = [tables.Column(name) for name in ("sender", "receiver", "kind")]
        columns.append(tables.Column("value", self.circuit.edges.unit, "{:.4g}"))
        return tables.Table(columns, self.circuit.rows())

    def text(self) -> str:
        """Returns the table as text, and below it what the circuit is worth."""
        found, cost = self.circuit, self.circuit.edges.cost
        edges = found.edges
        return (
            f"{self.table().text()}\n\n{found}\n"
            f"metric: {edges.base.mean():.4g} clean, {edges.other.mean():.4g} "
            f"corrupted, {found.only.mean():.4g} with the circuit alone, "
            f"{found.without.mean():.4g} without it\n"
            f"cost: {cost.forward:,} forward and {cost.backward:,} backward passes for "
            "each pair of examples"
        )

    @property
    def picture(self) -> functools.partial:
        """Gives the graph, as the bytes of a file."""
        title = f"{self.title}: {graphs.headline(self.circuit)}"
        return functools.partial(graphs.picture, self.circuit, title=title)


def measure(
    bench: Bench,
    *,
    examples: int = 32,
    metric: str | None = None,
    edges: int = 50,
    measure: str = "integrated_edge_attribution",
) -> StudiedCircuit:
    """Finds the circuit of a run on held-out examples.

    The corrupted example of a pair is the next one of the batch.

    Args:
      bench: The run.
      examples: N.
      metric: "loss", or "drift"; None: the first that the task has.
      edges: The most edges of the circuit.
      measure: A name of `heads.EDGE_MEASURES`.
    """
    with checks.user_mistakes():
        bench = bench.looped()
        of = bench.measured(examples, metric=metric)
        corrupted = [jax.tree.map(_next, batch) for batch in of.batches]
        found = heads.circuit(of, corrupted, edges=edges, measure=measure)
    return StudiedCircuit(f"{bench.title}, {examples} pairs", found)


def _next(values):
    return np.roll(values, -1, axis=0)


def write(
    result: StudiedCircuit,
    folder: str | os.PathLike,
    formats: Sequence[str] = ("png",),
) -> list[Path]:
    """Writes circuit.csv and a picture of the graph."""
    table, picture = result.table(), result.picture
    return workbench.write(folder, "circuit", table, picture, formats)
