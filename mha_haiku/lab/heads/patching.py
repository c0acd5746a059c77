"""Patching: what changes in the answer if a part of one run is put into another.

The two runs read a clean and a corrupted example, which differ in what the model should
answer by. Activation patching puts one activation into the other run; path patching
changes what one head alone reads of another. The batches of the subject are the clean
examples, whose targets the metric takes in all runs; `corrupted` are as many batches of
the same shapes and lengths, and example i of both is pair i.

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

KINDS = (*circuits.KINDS, "logits")  # through which an edge is read
LOGITS = (-1, -1)  # stands for the logits among receiving heads


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Changes(PerExample):
    """The changes of the metric by each patched thing."""

    base: np.ndarray  # `[N]`, the metric of the run that is changed
    other: np.ndarray  # `[N]`, the metric of the run where the patches come from
    unit: str = dataclasses.field(default="change of the metric", kw_only=True)

    @property
    def share(self) -> np.ndarray:
        """`[...]`, the mean over the change by patching all: 0 is none, 1 all of it."""
        return self.mean / (self.other - self.base).mean()

    def _numbers(self, place: tuple[int, ...]) -> dict[str, float]:
        """Reads the numbers of one place of the arrays, by their names."""
        names = ("mean", "standard_error", "share")
        return {name: float(getattr(self, name)[place]) for name in names}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patched(Changes):
    """The change of the metric by patching each place.

    Example:
      >>> patched = mh.heads.activation_patching(measured, corrupted)
      >>> patched.axes
      ('layer', 'head')
      >>> abs(patched.share.round(2))
      array([[0.78, 0.  ],
             [1.  , 0.  ]])
    """

    # The axes of `per_example` after N: of "layer" (which part, for heads), "head" and
    # "position".
    axes: tuple[str, ...]
    kinds: tuple[str, ...] = ()  # of each part; () where there is one kind
    tokens: tuple[str, ...] = ()  # at each position, of one pair of texts

    def rows(self) -> list[dict[str, int | float]]:
        """Lists a row for each patched place, with its `axes` and its numbers."""
        return [
            dict(zip(self.axes, place, strict=True)) | self._numbers(tuple(place))
            for place in np.argwhere(~np.isnan(self.mean)).tolist()
        ]


class Cost(NamedTuple):
    """What a measure runs for each pair of examples, in passes through the model.

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
    """What each edge is worth: the change of the clean run's metric by patching it.

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
    # `[E]` booleans, of a measure that chooses edges itself
    kept: np.ndarray | None = dataclasses.field(default=None, kw_only=True)

    @property
    def strength(self) -> np.ndarray:
        """`[E]`: the size of the mean change; the mean, if the measure chose edges."""
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
    """Measures what changes when one activation is taken from the other run.

    All that follows the patched activation is computed anew.

    Args:
      subject: The model to measure, with the clean examples.
      corrupted: The other examples of the pairs.
      what: "heads" or "layers": a head's output, or the input of a layer of one stack.
      per_position: Whether each position is patched alone; else all at once.
      into: The run that gets activations of the other: "clean", what breaks the
        answer, or "corrupted", what mends it.

    Raises:
      TypeError: If batches can be iterated over only once.
      ValueError: If batches do not pair, there is no such choice, or layers are asked
        for of a model that is not one stack of them.

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
    changes = over_pairs(subject, corrupted, program)
    axes = ("layer", "head") if what == "heads" else ("layer",)
    axes = (*axes, "position") if per_position else axes
    kinds = running.kinds_measured(subject) if what == "heads" else ()
    return Patched(*changes, axes, tuple(kinds))


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
            "what must be 'heads' for a model that has no streams of one stack of "
            "layers, got 'layers'."
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
    """Measures what changes when one head reads another as it is in the other run.

    An edge goes from a head to the queries, keys or values of a later head, or to the
    logits. In the clean run the sender passes on its output of the corrupted run, and
    all other heads are held at their clean outputs: so the change reaches later streams
    through residual connections, norms and feed-forward parts (which are computed anew)
    alone. The receiver reads this stream for its queries, say, and the clean one for
    the rest; its output is put into the clean run, and all that follows is computed
    anew. For the logits the metric is taken of the held run. Gates of attention are
    read with the queries.

    Each edge takes two runs of the model. Memory does not grow with their number.

    Args:
      subject: The model to measure, with the clean examples.
      corrupted: The other examples of the pairs.
      senders: Pairs of a part's index and a head; None: all.
      receivers: Pairs like the senders; None: all.
      kinds: Kinds of edges, of "q", "k", "v" and "logits".

    Returns:
      All edges that there are among these: to layers above, and from an encoder to keys
      and values of cross-attention.

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
    senders = _checked("senders", senders, counts)
    receivers = _checked("receivers", receivers, counts)
    edges = [
        (sender, receiver, kind)
        for sender in senders
        for receiver in receivers
        for kind in circuits.kinds_read(parts, sender[0], receiver[0])
        if kind in kinds
    ]
    if "logits" in kinds:  # which do not read an encoder
        direct = [head for head in senders if parts[head[0]] != "encoder"]
        edges += [(head, LOGITS, "logits") for head in direct]
    if not edges:
        raise ValueError(
            f"senders and receivers must have edges of kinds {tuple(kinds)}, got none."
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
    # An edge `[5]` is part and head of its sender and of its receiver, and the kind.
    at = ["*/heads", *(f"*/{name}" for names in READ.values() for name in names)]
    pair = both(model, params, clean, corrupted, at)
    (base, ours), (other, theirs) = pair
    before, after = (metric(x.logits, clean) for x in (base, other))
    parts = [name for name in ours if name.endswith("/heads")]
    heads = [(part, ours[name], theirs[name]) for part, name in enumerate(parts)]
    read = places_read(ours, parts)

    def held(sender):
        """Returns what is read, and logits, where only the sender has changed."""

        def passed(_, given):
            part, own, other = given
            return jnp.where(is_head(sender, part, own), other, own)

        changed = edits.on_parts(parts, heads, passed)
        run = sites.edit(functools.partial(running.run, model, params), changed)
        return sites.look(run, list(read), strict=False)(clean)

    def change(edge):
        sender, receiver, kind = edge[:2], edge[2:4], edge[4]
        output, changed = held(sender)

        # The whole part of the receiver reads the changed values; its other heads are
        # then set back to their clean outputs.
        def read_anew(own, given):
            part, own_kind, other = given
            return jnp.where((part == receiver[0]) & (kind == own_kind), other, own)

        def kept_but_one(values, given):
            part, own, _ = given
            is_kept = (part == receiver[0]) & ~is_head(receiver, part, own)
            return jnp.where(is_kept, own, values)

        anew = [(*place, changed[name]) for name, place in read.items()]
        patched = edits.on_parts(read, anew, read_anew)
        patched |= edits.on_parts(parts, heads, kept_but_one)
        after = running.run_edited(model, params, clean, patched)
        is_direct = kind == KINDS.index("logits")
        logits = jnp.where(is_direct, output.logits, after.logits)
        return metric(logits, clean) - before

    return programs.over(change, edges, clean).T, before, after


# Of which sites an edge of a kind is read; gates are made of what queries are.
READ = {"q": ("query", "gates"), "k": ("key",), "v": ("value",)}


def places_read(names: Iterable[str], parts: Sequence[str]) -> dict[str, Place]:
    """Finds the part and the number of the kind of each site that heads read."""
    return {
        name: (parts.index(f"{path}/heads"), kind)
        for name in names
        for path, _, end in [name.rpartition("/")]
        for kind, ends in enumerate(READ.values())
        if end in ends
    }


def is_head(head: Any, part: int, values: Array) -> Array:
    """Marks the given head among a part's heads, booleans `[1, 1, H, 1]`."""
    is_it = (part == head[0]) & (jnp.arange(values.shape[-2]) == head[1])
    return is_it[None, None, :, None]


def _checked(name, heads, counts) -> list[tuple[int, int]]:
    """Checks and lists the wanted heads, or lists all for None."""
    every = [(part, head) for part, size in enumerate(counts) for head in range(size)]
    if heads is None:
        return every
    heads = [tuple(map(operator.index, head)) for head in heads]
    for head in heads:
        if head not in every:
            raise ValueError(
                f"{name} must be pairs of a part and one of its heads, of which there "
                f"are {counts}, got {head}."
            )
    return heads


def over_pairs(
    subject: running.Measured,
    corrupted: Iterable[tasks.Example],
    program: Callable,
    *arrays: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Runs a program on all pairs of batches; results are float64 `[N, ...]`."""
    for batches in (subject.batches, corrupted):
        running.check_batches(batches)
    cleans, others = list(subject.batches), list(corrupted)
    if len(cleans) != len(others):
        raise ValueError(
            "corrupted must have as many batches as the clean examples, "
            f"{len(cleans)}, got {len(others)}."
        )
    # A metric reads the clean targets alone, which may be other than tokens: vectors.
    pairs = [
        (clean, other._replace(targets=clean.targets, weights=clean.weights))
        for clean, other in zip(cleans, others, strict=True)
    ]
    for clean, other in pairs:
        shapes = [jax.tree.map(np.shape, x.model_inputs()) for x in (clean, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "corrupted must have inputs of the shapes of the clean examples', "
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
    found = jax.lax.map(
        lambda example: running.look(model, params, example, at, strict=False), pair
    )
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(2)]
