"""Which edges of a run carry its answers, and how faithful they are alone."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.lab import heads
from mha_haiku.showing import answers, tables
from mha_haiku.subjects.studies.workbench import Bench


class StudiedCircuit(NamedTuple):
    """A circuit, and what it is a circuit of."""

    title: str
    circuit: heads.Circuit
    file_name = "circuit"

    def table(self) -> tables.Table:
        """Makes a table with a row per edge, the strongest first."""
        columns = [tables.Column(name) for name in ("sender", "receiver", "kind")]
        columns.append(tables.Column("value", self.circuit.edges.unit, "{:.4g}"))
        return tables.Table(columns, self.circuit.rows())

    def text(self) -> str:
        """Writes the table as text, with the worth of the circuit below it."""
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
        """Draws the graph."""
        title = f"{self.title}: {answers.headline(self.circuit)}"
        return functools.partial(answers.draw_circuit, self.circuit, title=title)


def measure(
    bench: Bench,
    *,
    examples: int = 32,
    metric: str | None = None,
    edges: int = 50,
    measure: str = "integrated_edge_attribution",
) -> StudiedCircuit:
    """Finds the circuit of a run on held-out examples; see `heads.circuit`.

    The corrupted example of a pair is the next one of the batch. The metric is "loss"
    or "drift"; None: the first that the task has.
    """
    with checks.user_mistakes():
        bench = bench.looped()
        of = bench.measured(examples, metric=metric)
        rolled = functools.partial(np.roll, shift=-1, axis=0)
        corrupted = [jax.tree.map(rolled, batch) for batch in of.batches]
        found = heads.circuit(of, corrupted, edges=edges, measure=measure)
    return StudiedCircuit(f"{bench.title}, {examples} pairs", found)
