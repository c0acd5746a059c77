"""Paths and circuits of heads, in any function in which sites find attention.

An edge goes from a head to the queries, keys or values of a later head, or to the
logits. It carries what the head wrote through everything but heads: residual
connections, norms and feed-forward parts are recomputed. The direct effect of the
inputs, around all heads, comes from the clean run. For models of known architecture
`edge_measures` also has feed-forward parts and embeddings as nodes.

B batch, T positions, P attention parts, H heads of a part, V value size per head, S all
heads, E edges, X patterns of edges.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, models, sites
from mha_haiku.lab.heads import (
    circuits,
    clean_runs,
    edge_measures,
    edits,
    model_runs,
    patching,
)
from mha_haiku.lab.heads import graph as graphs
from mha_haiku.lab.heads.model_runs import Batches, Measured
from mha_haiku.training import tasks

Array = jax.Array
Example = tasks.Example


class _HeadRuns:
    """A clean and a corrupted run, and runs of the clean inputs with changed heads."""

    def __init__(
        self,
        model: models.Model,
        params: Any,
        clean: Example,
        corrupted: Example,
        metric: model_runs.Metric,
    ):
        model, params = model_runs.compact(model, params)
        names = [name for names in graphs.READ.values() for name in names]
        at = ["*/heads", *(f"*/{name}" for name in names)]
        pair = patching.both(model, params, clean, corrupted, at)
        outputs, (ours, theirs) = zip(*pair, strict=True)
        self._run = functools.partial(model_runs.run, model, params)
        self.example = clean
        self.metric = lambda logits: metric(logits, clean)
        self.before, self.after = (self.metric(x.logits) for x in outputs)
        self.parts = [name for name in ours if name.rpartition("/")[2] == "heads"]
        # By the sites that heads read, the part and the index of the kind.
        self.read = {
            site: (part, kind)
            for part, path in enumerate(x.removesuffix("heads") for x in self.parts)
            for kind, names in enumerate(graphs.READ.values())
            for name in names
            if (site := f"{path}{name}") in ours
        }
        self.heads = [ours[name] for name in self.parts]
        self.corrupted = [theirs[name] for name in self.parts]

    def patched(self, node: Array) -> list[Array]:
        """Returns the outputs of heads, of one head from the corrupted run."""
        pairs = enumerate(zip(self.heads, self.corrupted, strict=True))
        return [jnp.where(_is_head(node, i, x), other, x) for i, (x, other) in pairs]

    def with_heads(self, heads: Sequence[Array]) -> tuple[Any, dict[str, Array]]:
        """Computes the output, and what heads read, from given outputs of all heads."""
        changed = edits.on_parts(self.parts, heads, lambda _, value: value)
        run = model_runs.editing(self._run, changed, self.example)
        look = model_runs.looking(run, [tuple(self.read)], self.example)
        return look(self.example)

    def reading(
        self, values: dict[str, Array], where: Callable[[Any, Any], Any]
    ) -> edits.Edits:
        """Makes the edits by which `where(part, kind)` heads read new values."""

        def replaced(before: Array, new: tuple[tuple[Any, Any], Array]) -> Array:
            at, value = new
            return jnp.where(where(*at), value, before)

        new = [(at, values[name]) for name, at in self.read.items()]
        return edits.on_parts(self.read, new, replaced)

    def edited(self, changed: edits.Edits) -> Any:
        """Computes the output of an edited run."""
        return model_runs.editing(self._run, changed, self.example)(self.example)

    def computed(self, changed: edits.Edits) -> list[Array]:
        """Computes heads in an edited run, also those that are set for what follows."""
        # `look` is inside `edit`, and so sees computed values, not those that are set.
        look = model_runs.looking(self._run, [tuple(self.parts)], self.example)
        _, seen = model_runs.editing(look, changed, self.example)(self.example)
        return [seen[name] for name in self.parts]


def _is_head(head: Any, part: int | Array, values: Array) -> Array:
    """Marks a head among the heads of a part, booleans `[1, 1, H, 1]`."""
    is_it = (part == head[0]) & (jnp.arange(values.shape[-2]) == head[1])
    return is_it[None, None, :, None]


def _program(function: Callable) -> Callable:
    return edge_measures.program(function, _HeadRuns)


def path_patching(
    subject: Measured,
    corrupted: Batches,
    *,
    senders: Sequence[tuple[int, int]] | None = None,
    receivers: Sequence[tuple[int, int]] | None = None,
    kinds: str | Sequence[str] = (*circuits.KINDS, "logits"),
) -> patching.Edges:
    """Computes the change of the metric when one head reads another's corrupted output.

    An edge goes from a head to the queries, keys or values of a later head, or to the
    logits. In the clean run the sender's output is replaced by its output in the
    corrupted run, and all other heads are held at their clean outputs: so the change
    reaches later streams only through residual connections, norms and feed-forward
    parts, which are recomputed. The receiver reads this stream for its queries, say,
    and the clean one for the rest; its output is put into the clean run, and everything
    after it is recomputed. For the logits the metric of the held run counts. Gates of
    attention are read with the queries.

    An edge takes two runs of the model. Memory does not grow with the number of edges.

    Args:
      senders: Pairs of a part's index and a head. Defaults to all heads.
      receivers: Pairs like the senders. Defaults to all heads.
      kinds: Kinds of edges, among "q", "k", "v" and "logits".

    Returns:
      All edges among these: to higher layers, and from an encoder to keys and values of
      cross-attention.

    Raises:
      TypeError: If batches can be iterated over only once.
      ValueError: If batches do not pair, or there is no such head, kind or edge.

    Source: Wang et al. 2022, section 3.1, https://arxiv.org/abs/2211.00593; Goldowsky-
    Dill et al. 2023, section 2, https://arxiv.org/abs/2304.05969.

    Example:
      >>> one, other = [(0, 0)], [(1, 0)]
      >>> edges = mh.heads.path_patching(
      ...     measured, corrupted, senders=one, receivers=other, kinds="qkv"
      ... )
      >>> dict(zip(edges.kinds.tolist(), abs(edges.mean.round(1)).tolist()))
      {'q': 0.0, 'k': 4.4, 'v': 0.0}
    """
    for kind in kinds:
        checks.choice("kinds", kind, (*circuits.KINDS, "logits"))
    model, params, example = subject.model, subject.params, next(iter(subject.batches))
    counts = model_runs.num_heads(model, params, example)
    parts = model_runs.kinds_of(model, params, example) or [""] * len(counts)
    writers = _checked("senders", senders, counts)
    readers = _checked("receivers", receivers, counts)
    edges = [
        (sender, receiver, kind)
        for sender in writers
        for receiver in readers
        for kind in circuits.kinds_read(parts, sender[0], receiver[0])
        if kind in kinds
    ]
    if "logits" in kinds:  # which do not read an encoder
        direct = [head for head in writers if parts[head[0]] != "encoder"]
        edges += [(head, graphs.LOGITS, "logits") for head in direct]
    if not edges:
        raise ValueError(
            f"there are no edges of kinds {tuple(kinds)} from senders to receivers."
        )
    numbers = [(*one, *other, graphs.KINDS.index(kind)) for one, other, kind in edges]
    program = _paths(model, metric=subject.metric)
    changes = patching.over_pairs(subject, corrupted, program, np.array(numbers))
    return patching.Edges(*changes, *map(np.array, zip(*edges, strict=True)))


def _checked(
    name: str, heads: Sequence[tuple[int, ...]] | None, counts: Sequence[int]
) -> list[tuple[int, ...]]:
    every = _nodes(counts)
    if heads is None:
        return every
    heads = [tuple(map(operator.index, head)) for head in heads]
    for head in heads:
        if head not in every:
            raise ValueError(
                f"{name} must be pairs of a part and one of its heads; the parts have "
                f"{counts} heads, got {head}."
            )
    return heads


def _nodes(counts: Sequence[int]) -> list[tuple[int, int]]:
    return [(part, head) for part, size in enumerate(counts) for head in range(size)]


@_program
def _paths(runs: _HeadRuns, edges: Array) -> tuple[Array]:
    """Returns changes `[B, E]`."""

    # An edge `[5]` is part and head of its sender, part and head of its receiver, and
    # the kind.
    def change(edge: Array) -> Array:
        sender, receiver, kind = edge[:2], edge[2:4], edge[4]
        output, read = runs.with_heads(runs.patched(sender))

        # All heads of the receiver's part read the changed values; the others are then
        # set back to their clean outputs.
        def restored(values: Array, part_and_whole: tuple[int | Array, Array]) -> Array:
            part, whole = part_and_whole
            is_other = (part == receiver[0]) & ~_is_head(receiver, part, whole)
            return jnp.where(is_other, whole, values)

        is_read = lambda *at: (at[0] == receiver[0]) & (at[1] == kind)  # noqa: E731
        changed = runs.reading(read, is_read)
        changed |= edits.on_parts(runs.parts, enumerate(runs.heads), restored)
        through = runs.edited(changed)
        is_direct = kind == graphs.KINDS.index("logits")
        logits = jnp.where(is_direct, output.logits, through.logits)
        return runs.metric(logits) - runs.before

    return (clean_runs.over(change, edges, runs.example).T,)


def circuit_of_heads(
    subject: Measured, corrupted: Batches, *, edges: int
) -> edge_measures.Circuit:
    """Finds the circuit of the strongest edges between heads.

    Edges are ranked by the change of the receiver's output when one is patched, times
    the slope of the metric by that output. In `only` and `without` every head reads
    what its edges carry. `Edges.other` is the metric with all edges patched.

    Ranking the edges takes 4 runs of the model per head, testing the circuit 12. Memory
    does not grow with the number of heads.

    Arguments are as in `path_patching`; `edges` is the largest number of edges of the
    circuit.

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
    nodes = np.array(graph.writers)
    direct, read, before, _ = patching.over_pairs(subject, corrupted, program, nodes)
    # `[N, S, R]`: readers are ordered as in the graph, by kind and then by head.
    worth = np.concatenate([read.reshape(*read.shape[:2], -1), direct[..., None]], -1)
    changes = worth[:, *graph.places.T]
    kept = edge_measures.strongest(graph, np.abs(changes.mean(0)), edges)
    patterns = np.stack([kept, ~kept, np.zeros_like(kept)])
    only, without, other = with_head_edges(subject, corrupted, patterns).T
    every = patching.Edges(changes, before, other, *graph.ends)
    return edge_measures.Circuit(every, kept, only, without, "head_edge_attribution")


def graph_of_heads(subject: Measured) -> graphs.Graph:
    """Builds the graph of the heads of a model; all of them may read the inputs."""
    example = next(iter(subject.batches))
    counts = model_runs.num_heads(subject.model, subject.params, example)
    if not counts:
        raise ValueError("the model has no heads: no attention was found in it.")
    rank = np.argsort(_order(subject.model, subject.params, example))
    nodes = _nodes(counts)
    place = np.array([rank[part] for part, _ in nodes])
    read = [(node, kind) for kind in circuits.KINDS for node in nodes]
    exists = np.tile(place[:, None] < place[None], (1, len(circuits.KINDS)))
    exists = np.concatenate([exists, np.ones((len(nodes), 1), bool)], 1)
    starts = {str(i): slice(i, i + 1) for i in range(len(nodes))}
    readers = (*read, (graphs.LOGITS, "logits"))
    return graphs.Graph((), tuple(nodes), readers, exists, starts)


def with_head_edges(
    subject: Measured, corrupted: Batches, kept: np.ndarray
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


def _order(model: models.Model, params: Any, example: Example) -> list[int]:
    """Lists the indices of attention parts in the order of the program."""
    look = sites.look(functools.partial(model_runs.run, model), ["*/heads"])
    names = jax.eval_shape(look, params, example)[1]
    paths = list(model_runs.parts(model, params, example))
    return [paths.index(name.rpartition("/")[0]) for name in names]


@_program
def _attributed(runs: _HeadRuns, nodes: Array) -> tuple[Array, Array]:
    """Returns direct changes `[B, S]`, and changes by kind `[B, S, 3, S]`."""

    def moved(shifts: list[Array]) -> Array:
        changed = edits.on_parts(runs.parts, shifts, jnp.add)
        return runs.metric(runs.edited(changed).logits)

    zeros = jax.tree.map(jnp.zeros_like, runs.heads)
    slopes = jax.grad(lambda shifts: moved(shifts).sum())(zeros)
    held = edits.on_parts(runs.parts, runs.heads, lambda _, value: value)

    def of_node(node: Array) -> tuple[Array, Array]:
        output, read = runs.with_heads(runs.patched(node))

        def of_kind(kind: Array) -> Array:
            new = runs.computed(held | runs.reading(read, lambda _, x: x == kind))
            worth = [
                (slope * (x - whole)).sum((1, 3))
                for slope, x, whole in zip(slopes, new, runs.heads, strict=True)
            ]
            return jnp.concatenate(worth, 1)

        by_kind = jax.lax.map(of_kind, jnp.arange(len(circuits.KINDS)))
        return runs.metric(output.logits) - runs.before, by_kind

    direct, by_kind = jax.lax.map(of_node, nodes)
    return direct.T, jnp.moveaxis(by_kind, 2, 0)


@_program
def _with_edges(runs: _HeadRuns, kept: Array, places: Array) -> tuple[Array]:
    """Returns the metric `[B, X]`; `places` has index, part and head of each head."""
    sizes = np.cumsum([x.shape[-2] for x in runs.heads])

    def mixed(now: list[Array], shares: Any) -> list[Array]:
        """Mixes heads of this run, with shares `[S]`, and of the corrupted run."""
        shares = jnp.split(shares[None, None, :, None], sizes[:-1], 2)
        return [
            share * x + (1 - share) * other
            for share, x, other in zip(shares, now, runs.corrupted, strict=True)
        ]

    def patched(kept: Array) -> Array:
        def step(now: list[Array], place: Array) -> tuple[list[Array], None]:
            number, part, head = place

            def of_kind(kind: Array) -> dict[str, Array]:
                shares = kept[:, kind * sizes[-1] + number]
                return runs.with_heads(mixed(now, shares))[1]

            by_kind = jax.lax.map(of_kind, jnp.arange(len(circuits.KINDS)))
            values = {name: x[runs.read[name][1]] for name, x in by_kind.items()}
            new = runs.computed(runs.reading(values, lambda at, _: at == part))
            return [
                jnp.where(_is_head((part, head), i, x), x, before)
                for i, (x, before) in enumerate(zip(new, now, strict=True))
            ], None

        now, _ = jax.lax.scan(step, runs.heads, places)
        output, _ = runs.with_heads(mixed(now, kept[:, -1]))
        return runs.metric(output.logits)

    return (clean_runs.over(patched, kept, runs.example).T,)
