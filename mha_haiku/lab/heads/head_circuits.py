"""Circuits of heads, in any function in which sites find attention.

An edge goes from a head to the queries, keys or values of a later head, or to the
logits. It carries what the head wrote through everything but heads: residual
connections, norms and feed-forward parts are recomputed. The direct effect of the
inputs, around all heads, comes from the clean run. For models of known architecture
`edge_measures` also has feed-forward parts and embeddings as nodes.

B batch, T positions, P attention parts, H heads of a part, V value size per head, S all
heads, E edges, X patterns of edges.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, sites
from mha_haiku.lab.heads import edge_measures, edits, patching, programs, running
from mha_haiku.lab.heads import graph as graphs
from mha_haiku.training import tasks

Array = jax.Array
_KINDS = ("q", "k", "v")


def circuit_of_heads(
    subject: running.Measured, corrupted: Iterable[tasks.Example], *, edges: int
) -> edge_measures.Circuit:
    """Finds the circuit of the strongest edges between heads.

    Edges are ranked by the change of the receiver's output when one is patched, times
    the slope of the metric by that output. In `only` and `without` every head reads
    what its edges carry. `Edges.other` is the metric with all edges patched.

    Ranking the edges takes 4 runs of the model per head, testing the circuit 12. Memory
    does not grow with the number of heads.

    Args:
      subject: The model to measure, with the clean examples.
      corrupted: The other examples of the pairs.
      edges: The largest number of edges of the circuit.

    Raises:
      TypeError: If batches can be iterated over only once.
      ValueError: If batches do not pair, or the model has no heads.

    Source: edges as in Wang et al. 2022, section 3.1, https://arxiv.org/abs/2211.00593;
    slopes as in Syed et al. 2023, section 3, https://arxiv.org/abs/2310.10348.

    Example:
      >>> mh.heads.circuit_of_heads(measured, corrupted, edges=2)
      Circuit(2 of 16 edges by head_edge_attribution: faithfulness 1.000, ...
    """
    checks.positive_integer("edges", edges)
    graph = graph_of_heads(subject)
    program = _attributed(subject.model, metric=subject.metric)
    direct, read, before = patching.over_pairs(
        subject, corrupted, program, np.array(graph.writers)
    )
    # `[N, S, R]`: readers are ordered as in the graph, by kind and then by head.
    worth = np.concatenate([read.reshape(*read.shape[:2], -1), direct[..., None]], -1)
    changes = worth[:, *graph.places.T]
    kept = edge_measures.strongest(graph, np.abs(changes.mean(0)), edges)
    nothing = np.zeros_like(kept)
    only, without, other = with_head_edges(
        subject, corrupted, np.stack([kept, ~kept, nothing])
    ).T
    count = len(graph.writers)
    cost = patching.Cost(3 + 4 * count, 1)
    every = patching.Edges(changes, before, other, *graph.ends, cost=cost)
    return edge_measures.Circuit(every, kept, only, without, "head_edge_attribution")


def graph_of_heads(subject: running.Measured) -> graphs.Graph:
    """Builds the graph of the heads of a model; all of them may read the inputs."""
    example = next(iter(subject.batches))
    counts = running.num_heads(subject.model, subject.params, example)
    if not counts:
        raise ValueError("the model has no heads: no attention was found in it.")
    rank = np.argsort(_order(subject.model, subject.params, example))
    nodes = [(part, head) for part, size in enumerate(counts) for head in range(size)]
    place = np.array([rank[part] for part, _ in nodes])
    read = [(node, kind) for kind in _KINDS for node in nodes]
    exists = np.tile(place[:, None] < place[None], (1, len(_KINDS)))
    exists = np.concatenate([exists, np.ones((len(nodes), 1), bool)], 1)
    starts = {str(i): slice(i, i + 1) for i in range(len(nodes))}
    readers = (*read, (graphs.LOGITS, "logits"))
    return graphs.Graph((), tuple(nodes), readers, exists, starts)


def with_head_edges(
    subject: running.Measured, corrupted: Iterable[tasks.Example], kept: np.ndarray
) -> np.ndarray:
    """Computes the metric with some edges kept and all others patched, `[N, X]`.

    `kept` is `[X, E]` booleans, in the order of the edges of `graph_of_heads`.

    Example:
      >>> kept = np.stack([np.ones(16), np.zeros(16)])  # all edges, and none
      >>> mh.heads.with_head_edges(measured, corrupted, kept).mean(0).round(1)
      array([0. , 5.6])
    """
    graph = graph_of_heads(subject)
    by_reader = np.zeros((len(kept), *graph.exists.shape), np.float32)
    by_reader[:, *graph.places.T] = kept
    example = next(iter(subject.batches))
    order = _order(subject.model, subject.params, example)
    nodes = sorted(enumerate(graph.writers), key=lambda x: order.index(x[1][0]))
    places = np.array([(i, *node) for i, node in nodes])
    program = _with_edges(subject.model, metric=subject.metric)
    return patching.over_pairs(subject, corrupted, program, by_reader, places)[0]


def _order(model, params, example) -> list[int]:
    """Lists the indices of attention parts in the order of the program."""
    look = sites.look(functools.partial(running.run, model), ["*/heads"])
    names = jax.eval_shape(look, params, example)[1]
    known = list(running.parts(model, params, example))
    return [known.index(name.removesuffix("/heads")) for name in names]


class _Pair:
    """A clean and a corrupted run, and runs of the clean inputs with changed heads."""

    def __init__(self, model, params, clean, corrupted):
        names = [name for names in patching.READ.values() for name in names]
        at = ["*/heads", *(f"*/{name}" for name in names)]
        pair = patching.both(model, params, clean, corrupted, at)
        (self.output, ours), (_, theirs) = pair
        self._run = functools.partial(running.run, model, params)
        self._clean = clean
        self.parts = [name for name in ours if name.endswith("/heads")]
        self.read = patching.places_read(ours, self.parts)
        self.heads = [ours[name] for name in self.parts]
        self.corrupted = [theirs[name] for name in self.parts]
        self.values = {name: ours[name] for name in self.read}

    def with_heads(self, heads) -> tuple[Any, dict[str, Array]]:
        """Computes the output, and what heads read, from given outputs of all heads."""
        changed = edits.on_parts(self.parts, heads, lambda _, value: value)
        run = sites.edit(self._run, changed)
        return sites.look(run, list(self.read), strict=False)(self._clean)

    def reading(self, values, heads=None, part=None) -> list[Array]:
        """Computes heads from new queries, keys and values, of one part or of all."""

        def replaced(before, new):
            at, value = new
            return value if part is None else jnp.where(at == part, value, before)

        new = [(at, values[name]) for name, (at, _) in self.read.items()]
        changed = edits.on_parts(self.read, new, replaced)
        if heads is not None:
            changed |= edits.on_parts(self.parts, heads, lambda _, value: value)
        # `look` is inside `edit`, and so sees computed values, not those that are set.
        look = sites.look(self._run, self.parts)
        _, seen = sites.edit(look, changed)(self._clean)
        return [seen[name] for name in self.parts]


@running.compiled
def _attributed(model, params, clean, corrupted, nodes, *, metric):
    """Returns direct changes `[B, S]`, changes by kind `[B, S, 3, S]`, and metrics."""
    pair = _Pair(model, params, clean, corrupted)
    before = metric(pair.output.logits, clean)

    def moved(shifts):
        changed = edits.on_parts(pair.parts, shifts, jnp.add)
        return metric(running.run_edited(model, params, clean, changed).logits, clean)

    slopes = jax.grad(lambda shifts: moved(shifts).sum())(
        [jnp.zeros_like(x) for x in pair.heads]
    )

    def of_node(node):
        heads = [
            jnp.where(patching.is_head(node, part, x), other, x)
            for part, (x, other) in enumerate(
                zip(pair.heads, pair.corrupted, strict=True)
            )
        ]
        output, changed = pair.with_heads(heads)

        def of_kind(kind):
            values = {
                name: jnp.where(kind == kind_read, changed[name], pair.values[name])
                for name, (_, kind_read) in pair.read.items()
            }
            new = pair.reading(values, pair.heads)
            worth = [
                (slope * (x - whole)).sum((1, 3))
                for slope, x, whole in zip(slopes, new, pair.heads, strict=True)
            ]
            return jnp.concatenate(worth, 1)

        by_kind = jax.lax.map(of_kind, jnp.arange(len(_KINDS)))
        return metric(output.logits, clean) - before, by_kind

    direct, by_kind = jax.lax.map(of_node, nodes)
    return direct.T, jnp.moveaxis(by_kind, 2, 0), before


@running.compiled
def _with_edges(model, params, clean, corrupted, kept, places, *, metric):
    """Returns the metric `[B, X]`; `places` has index, part and head of each head."""
    pair = _Pair(model, params, clean, corrupted)
    sizes = np.cumsum([x.shape[-2] for x in pair.heads])[:-1]
    count = sum(x.shape[-2] for x in pair.heads)

    def mixed(now, shares):
        """Mixes heads of this run, with shares `[S]`, and of the corrupted run."""
        shares = jnp.split(shares[None, None, :, None], sizes, 2)
        return [
            share * x + (1 - share) * other
            for share, x, other in zip(shares, now, pair.corrupted, strict=True)
        ]

    def patched(kept):
        def step(now, place):
            number, part, head = place

            def of_kind(kind):
                shares = kept[:, kind * count + number]
                return pair.with_heads(mixed(now, shares))[1]

            by_kind = jax.lax.map(of_kind, jnp.arange(len(_KINDS)))
            values = {
                name: by_kind[name][kind] for name, (_, kind) in pair.read.items()
            }
            new = pair.reading(values, part=part)
            return [
                jnp.where(patching.is_head((part, head), i, x), x, before)
                for i, (x, before) in enumerate(zip(new, now, strict=True))
            ], None

        now, _ = jax.lax.scan(step, pair.heads, places)
        output, _ = pair.with_heads(mixed(now, kept[:, -1]))
        return metric(output.logits, clean)

    return (programs.over(patched, kept, clean).T,)
