"""Patching: the effect of putting a part of one run into another.

The two runs read a clean and a corrupted example, which differ in what determines the
answer. Activation patching puts one activation into the other run; path patching
changes only what one head reads from another. The batches of the subject are the clean
examples, whose targets the metric uses in all runs; `corrupted` has the same number of
batches, with the same shapes and lengths, and the examples with index i are pair i.

B batch, T positions, P attention parts, H heads of a part, V value size per head, L
layers, N pairs of examples, E edges.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, models, sites
from mha_haiku.lab.heads import (
    ablation_values,
    circuits,
    edits,
    programs,
    running,
)
from mha_haiku.records.means import PerExample
from mha_haiku.training import tasks

Array = jax.Array
Heads = Sequence[tuple[int, int]]
Place = tuple[int, int]

KINDS = (*circuits.KINDS, "logits")  # how an edge is read
LOGITS = (-1, -1)  # the logits, among receiving heads


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Changes(PerExample):
    """The changes of the metric by patching."""

    base: np.ndarray  # `[N]`, the metric of the run that is patched
    other: np.ndarray  # `[N]`, the metric of the run that patches come from
    unit: str = dataclasses.field(default="change of the metric", kw_only=True)

    @property
    def share(self) -> np.ndarray:
        """`[...]`, the mean as a share of the change by patching everything."""
        return self.mean / (self.other - self.base).mean()

    def _numbers(self, place: tuple[int, ...]) -> dict[str, float]:
        """Reads the numbers at one place of the arrays, by name."""
        names = ("mean", "standard_error", "share")
        return {name: float(getattr(self, name)[place]) for name in names}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patched(Changes):
    """The changes of the metric by patching one place at a time.

    Example:
      >>> patched = mh.heads.activation_patching(measured, corrupted)
      >>> patched.axes
      ('layer', 'head')
      >>> abs(patched.share.round(2))
      array([[0.78, 0.  ],
             [1.  , 0.  ]])
    """

    # The axes of `per_example` after N, among "layer" (the attention part, for heads),
    # "head" and "position".
    axes: tuple[str, ...]
    kinds: tuple[str, ...] = ()  # of the parts; () if there is one kind
    tokens: tuple[str, ...] = ()  # at the positions, for one pair of texts

    def rows(self) -> list[dict[str, int | float]]:
        """Lists a row for each patched place, with its `axes` and its numbers."""
        return [
            dict(zip(self.axes, place, strict=True)) | self._numbers(tuple(place))
            for place in np.argwhere(~np.isnan(self.mean)).tolist()
        ]


class Cost(NamedTuple):
    """The cost of a measure for a pair of examples, in passes through the model.

    Example:
      >>> mh.heads.edge_patching(measured, corrupted).cost  # of 29 edges
      Cost(forward=31, backward=0)
      >>> mh.heads.edge_attribution(measured, corrupted).cost
      Cost(forward=3, backward=2)
    """

    forward: int
    backward: int = 0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Edges(Changes):
    """Edges with numbers: the change of the clean run's metric by patching an edge.

    Example:
      >>> edges = mh.heads.path_patching(measured, corrupted, senders=[(0, 0)])
      >>> strongest = edges.strength.argmax()
      >>> edges.receivers[strongest].tolist(), str(edges.kinds[strongest])
      ([1, 0], 'k')
    """

    senders: np.ndarray  # `[E, 2]`, part and head that write; see also `heads.graph`
    receivers: np.ndarray  # `[E, 2]`, part and head that read; `LOGITS` for the logits
    kinds: np.ndarray  # `[E]`: "q", "k", "v", "feed_forward" or "logits"
    cost: Cost = dataclasses.field(default=Cost(0), kw_only=True)
    # `[E]` booleans, from a measure that chooses edges itself
    kept: np.ndarray | None = dataclasses.field(default=None, kw_only=True)

    @property
    def strength(self) -> np.ndarray:
        """`[E]`: the magnitude of the mean; the mean, if the measure chose edges."""
        return np.abs(self.mean) if self.kept is None else self.mean

    def rows(self) -> list[dict[str, int | float | str]]:
        """Lists a row for each edge: its ends, its kind and its numbers."""
        ends = ("sender_layer", "sender_head", "receiver_layer", "receiver_head")
        places = np.concatenate([self.senders, self.receivers], axis=1).tolist()
        return [
            dict(zip(ends, place, strict=True))
            | {"kind": str(kind)}
            | self._numbers((i,))
            for i, (place, kind) in enumerate(zip(places, self.kinds, strict=True))
        ]


def activation_patching(
    subject: running.Measured,
    corrupted: Iterable[tasks.Example],
    *,
    what: str = "heads",
    per_position: bool = False,
    into: str = "clean",
) -> Patched:
    """Computes the change of the metric when one activation is from the other run.

    Everything after the patched activation is recomputed.

    Args:
      subject: The model to measure, with the clean examples.
      corrupted: The other examples of the pairs.
      what: "heads" to patch a head's output, or "layers" to patch the input of a layer.
      per_position: Patch one position at a time instead of all at once.
      into: The run that is patched: "clean" shows what breaks the answer, "corrupted"
        what restores it.

    Raises:
      TypeError: If batches can be iterated over only once.
      ValueError: If batches do not pair, a choice is unknown, or `what` is "layers" and
        the model is not a single stack of layers.

    Source: Meng et al. 2022, section 2.1, https://arxiv.org/abs/2202.05262; Vig et al.
    2020, https://arxiv.org/abs/2004.12265, for heads.

    Example:
      >>> patched = mh.heads.activation_patching(measured, corrupted)
      >>> abs(patched.mean.round(1))  # nats, [L, H]
      array([[4.4, 0. ],
             [5.6, 0. ]])
    """
    checks.choice("what", what, ("heads", "layers"))
    checks.choice("into", into, ("clean", "corrupted"))
    program = _activations(
        subject.model,
        metric=subject.metric,
        what=what,
        per_position=per_position,
        into=into,
    )
    changes, base, other = over_pairs(subject, corrupted, program)
    axes = ("layer", "head") if what == "heads" else ("layer",)
    axes = (*axes, "position") if per_position else axes
    kinds = running.kinds_measured(subject) if what == "heads" else ()
    return Patched(changes, base, other, axes, tuple(kinds))


@running.compiled
def _activations(model, params, clean, corrupted, *, metric, what, per_position, into):
    """Computes changes `[B, P, H]` or `[B, L]` (and T), and both metrics."""
    examples = (clean, corrupted) if into == "clean" else (corrupted, clean)
    pair = both(model, params, *examples, programs.AT)
    ours, theirs = (
        programs.Clean.of(
            model,
            params,
            example,
            lambda x, _: metric(x, clean),
            ablation_values.zero,
            seen,
        )
        for example, seen in zip(examples, pair, strict=True)
    )
    if what == "heads":
        ours = ours._replace(values=[*theirs.heads.values()])
        changes = ours.ablated(per_position=per_position)
    else:
        changes = _of_layers(ours, theirs, per_position)
    return changes, ours.before, theirs.before


def _of_layers(ours, theirs, per_position) -> Array:
    """Computes changes by the streams of another run, `[B, L]` or `[B, L, T]`."""
    if not ours.streams:
        raise ValueError(
            "what must be 'heads' for a model without the streams of a single stack "
            "of layers, got 'layers'."
        )
    layers = [*zip(theirs.streams.values(), ours.streams.values(), strict=True)]
    places = np.arange(layers[0][0].shape[1])
    positions = places if per_position else np.array([-1])  # -1 for all

    def of_layer(layer, streams):
        def patched(position):
            at = (position < 0) | (places == position)
            stream = jnp.where(at[None, :, None], *streams)
            return ours.run(ours.from_layer(layer, stream))

        return programs.over(patched, positions, ours.example)

    after = ours.each_layer(of_layer, layers) - ours.before[None]
    changes = after.T.reshape(-1, len(layers), len(positions))
    return changes if per_position else changes[..., 0]


def path_patching(
    subject: running.Measured,
    corrupted: Iterable[tasks.Example],
    *,
    senders: Heads | None = None,
    receivers: Heads | None = None,
    kinds: Sequence[str] = KINDS,
) -> Edges:
    """Computes the change of the metric when one head reads another's corrupted output.

    An edge goes from a head to the queries, keys or values of a later head, or to the
    logits. In the clean run the sender's output is replaced by its output in the
    corrupted run, and all other heads are held at their clean outputs: so the change
    reaches later streams only through residual connections, norms and feed-forward
    parts, which are recomputed. The receiver reads this stream for its queries, say,
    and the clean one for the rest; its output is put into the clean run, and everything
    after it is recomputed. For the logits the metric is that of the held run. Gates of
    attention are read with the queries.

    An edge takes two runs of the model. Memory does not grow with the number of edges.

    Args:
      subject: The model to measure, with the clean examples.
      corrupted: The other examples of the pairs.
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
        checks.choice("kinds", kind, KINDS)
    example = next(iter(subject.batches))
    counts = running.num_heads(subject.model, subject.params, example)
    known = subject.model, subject.params, example
    parts = running.kinds_of(*known) or [""] * len(counts)
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
        edges += [(head, LOGITS, "logits") for head in direct]
    if not edges:
        raise ValueError(
            f"there are no edges of kinds {tuple(kinds)} from senders to receivers."
        )
    numbers = np.array(
        [(*sender, *receiver, KINDS.index(kind)) for sender, receiver, kind in edges]
    )
    program = _edges(subject.model, metric=subject.metric)
    changes = over_pairs(subject, corrupted, program, numbers)
    cost = Cost(2 + 2 * len(edges))
    return Edges(*changes, *map(np.array, zip(*edges, strict=True)), cost=cost)


@running.compiled
def _edges(model, params, clean, corrupted, edges, *, metric):
    """Returns changes `[B, E]`, and both metrics."""
    # An edge `[5]` is part and head of its sender, part and head of its receiver, and
    # the kind.
    at = ["*/heads", *(f"*/{name}" for names in READ.values() for name in names)]
    pair = both(model, params, clean, corrupted, at)
    (base, ours), (other, theirs) = pair
    before, after = (metric(x.logits, clean) for x in (base, other))
    parts = [name for name in ours if name.endswith("/heads")]
    heads = [(part, ours[name], theirs[name]) for part, name in enumerate(parts)]
    read = places_read(ours, parts)

    def held(sender):
        """Returns the output and what heads read, if only the sender changes."""

        def replaced(_, values):
            part, clean_heads, other = values
            is_sender = is_head(sender, part, clean_heads)
            return jnp.where(is_sender, other, clean_heads)

        changed = edits.on_parts(parts, heads, replaced)
        run = sites.edit(functools.partial(running.run, model, params), changed)
        return sites.look(run, list(read), strict=False)(clean)

    def change(edge):
        sender, receiver, kind = edge[:2], edge[2:4], edge[4]
        output, changed = held(sender)

        # All heads of the receiver's part read the changed values; the others are then
        # set back to their clean outputs.
        def reread(before, new):
            part, kind_read, other = new
            return jnp.where((part == receiver[0]) & (kind == kind_read), other, before)

        def restored(values, known):
            part, clean_heads, _ = known
            is_other = (part == receiver[0]) & ~is_head(receiver, part, clean_heads)
            return jnp.where(is_other, clean_heads, values)

        new = [(*place, changed[name]) for name, place in read.items()]
        patched = edits.on_parts(read, new, reread)
        patched |= edits.on_parts(parts, heads, restored)
        after = running.run_edited(model, params, clean, patched)
        is_direct = kind == KINDS.index("logits")
        logits = jnp.where(is_direct, output.logits, after.logits)
        return metric(logits, clean) - before

    return programs.over(change, edges, clean).T, before, after


# The sites that read an edge of a kind; gates read what queries read.
READ = {"q": ("query", "gates"), "k": ("key",), "v": ("value",)}


def places_read(names: Iterable[str], parts: Sequence[str]) -> dict[str, Place]:
    """Finds the part and the index of the kind of each site that heads read."""
    return {
        name: (parts.index(f"{path}/heads"), kind)
        for name in names
        for path, _, end in [name.rpartition("/")]
        for kind, ends in enumerate(READ.values())
        if end in ends
    }


def is_head(head: Any, part: int, values: Array) -> Array:
    """Marks a head among the heads of a part, booleans `[1, 1, H, 1]`."""
    is_it = (part == head[0]) & (jnp.arange(values.shape[-2]) == head[1])
    return is_it[None, None, :, None]


def _checked(name, heads, counts) -> list[tuple[int, ...]]:
    """Checks and lists the wanted heads, by default all heads."""
    every = [(part, head) for part, size in enumerate(counts) for head in range(size)]
    if heads is None:
        return [*every]
    heads = [tuple(map(operator.index, head)) for head in heads]
    for head in heads:
        if head not in every:
            raise ValueError(
                f"{name} must be pairs of a part and one of its heads; the parts have "
                f"{counts} heads, got {head}."
            )
    return heads


def over_pairs(
    subject: running.Measured,
    corrupted: Iterable[tasks.Example],
    program: Callable,
    *arrays: jax.typing.ArrayLike,
) -> tuple[np.ndarray, ...]:
    """Runs a program on all pairs of batches; results are float64 `[N, ...]`."""
    for batches in (subject.batches, corrupted):
        running.check_batches(batches)
    cleans, others = list(subject.batches), list(corrupted)
    if len(cleans) != len(others):
        raise ValueError(
            "corrupted must have the number of batches of the clean examples, "
            f"{len(cleans)}, got {len(others)}."
        )
    # A metric reads only the clean targets, which may be vectors instead of tokens.
    pairs = [
        (clean, other._replace(targets=clean.targets, weights=clean.weights))
        for clean, other in zip(cleans, others, strict=True)
    ]
    for clean, other in pairs:
        shapes = [jax.tree.map(np.shape, x.model_inputs()) for x in (clean, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "corrupted must have inputs with the shapes of the clean examples, "
                f"{shapes[0]}, got {shapes[1]}."
            )
        for name in ("lengths", "decoder_lengths"):
            both = [running.fetched(getattr(x, name)) for x in (clean, other)]
            if both[0] is not None and (at := np.flatnonzero(both[0] != both[1])).size:
                raise ValueError(
                    f"corrupted must have the {name} of the clean examples, "
                    f"{both[0][at[0]]} for example {at[0]}, got {both[1][at[0]]}."
                )
    results = running.over(pairs, lambda pair: program(subject.params, *pair, *arrays))
    return jax.tree.map(lambda *x: np.concatenate(x).astype(np.float64), *results)


def both(
    model: models.Model,
    params: Any,
    one: tasks.Example,
    other: tasks.Example,
    at: Sequence[str],
) -> list[tuple[Any, dict[str, Array]]]:
    """Applies `running.look` to two batches; the model is compiled once."""
    pair = jax.tree.map(lambda x, y: jnp.stack([x, y]), one, other)
    results = jax.lax.map(
        lambda example: running.look(model, params, example, at, strict=False), pair
    )
    return [jax.tree.map(lambda x, i=i: x[i], results) for i in range(2)]
