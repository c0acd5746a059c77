"""Patching: what of one run, put into another, changes the answer.

B batch, T positions, P attention parts, H heads of a part, V value size per head, D
width, L layers, N examples, E edges. Examples come in pairs, a clean and a corrupted
one, that differ in what the model should answer by.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, checks, display, models, modules, tasks
from mha_haiku.heads import circuits, means, programs, subject

Array = jax.Array
Heads = Sequence[tuple[int, int]]
Row = dict[str, int | float | str | None]

LOGITS = (-1, -1)  # stands for the logits among receiving heads
_READ = (*circuits.KINDS, "logits")


class Patching(NamedTuple):
    """What it changes to patch each place.

    Attributes:
      per_example: The change of the metric `[N, ...]`, with an axis for each of `axes`;
        NaN where a part has fewer heads or positions.
      axes: Of "layer" (which part, for heads), "head" and "position".
      base: `[N]`, the metric of the run that was patched.
      other: `[N]`, that of the run where the patches are from.
      kinds: The kind of each part; () where there is one kind.
    """

    per_example: np.ndarray
    axes: tuple[str, ...]
    base: np.ndarray
    other: np.ndarray
    kinds: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return display.record(self)

    @property
    def mean(self) -> np.ndarray:
        """The mean over the examples."""
        return means.mean(self.per_example)

    @property
    def standard_error(self) -> np.ndarray:
        """Of the mean, from the spread of the examples; NaN for one."""
        return means.standard_error(self.per_example)

    @property
    def share(self) -> np.ndarray:
        """The mean over that of patching everything: 0 none of it, 1 all of it."""
        return self.mean / (self.other - self.base).mean()

    def rows(self) -> list[Row]:
        """Returns a row for each patched place, by `axes` and its numbers."""
        numbers = {
            "mean": self.mean,
            "standard_error": self.standard_error,
            "share": self.share,
        }
        return [
            dict(zip(self.axes, place, strict=True))
            | {name: float(x[place]) for name, x in numbers.items()}
            for place in np.ndindex(self.mean.shape)
            if not np.isnan(self.mean[place])
        ]


class Edges(NamedTuple):
    """What it changes to patch each edge between heads.

    Attributes:
      senders: `[E, 2]`, part and head that write.
      receivers: `[E, 2]`, part and head that read; -1 and -1 for the logits.
      kinds: `[E]`, through which they read: "q", "k" and "v", or "logits".
      per_example: `[N, E]`, the change of the metric.
      clean: `[N]`, the metric of the clean run, which is patched.
      corrupted: `[N]`, that of the corrupted run.
    """

    senders: np.ndarray
    receivers: np.ndarray
    kinds: np.ndarray
    per_example: np.ndarray
    clean: np.ndarray
    corrupted: np.ndarray

    def __repr__(self) -> str:
        return display.record(self)

    @property
    def mean(self) -> np.ndarray:
        """`[E]`, over the examples."""
        return means.mean(self.per_example)

    @property
    def standard_error(self) -> np.ndarray:
        """`[E]`, of the mean, from the spread of the examples; NaN for one."""
        return means.standard_error(self.per_example)

    @property
    def share(self) -> np.ndarray:
        """`[E]`, the mean over that of patching everything."""
        return self.mean / (self.corrupted - self.clean).mean()

    def rows(self) -> list[Row]:
        """Returns a row for each edge: its ends, its kind and its numbers."""
        ends = ("sender_layer", "sender_head", "receiver_layer", "receiver_head")
        numbers = zip(self.mean, self.standard_error, self.share, strict=True)
        names = ("mean", "standard_error", "share")
        places = np.concatenate([self.senders, self.receivers], axis=1).tolist()
        return [
            dict(zip(ends, place, strict=True))
            | {"kind": str(kind)}
            | dict(zip(names, map(float, own), strict=True))
            for place, kind, own in zip(places, self.kinds, numbers, strict=True)
        ]


def activation_patching(
    of: subject.Subject,
    corrupted: Iterable[tasks.Example],
    *,
    what: str = "heads",
    per_position: bool = False,
    into: str = "clean",
) -> Patching:
    """Returns what changes when one activation is that of the other run.

    Everything behind the patched activation is computed anew.

    Args:
      of: What is measured; its batches are the clean examples. The metric takes the
        clean example in all runs, so its targets are what is asked for.
      corrupted: As many batches of the same shapes: example i is the other one of a
        pair.
      what: "heads": what a head passes on; "layers": the residual stream in front of a
        layer, of a model that can `start` from there.
      per_position: Whether each position is patched alone; else all at once.
      into: Which run is patched, "clean" or "corrupted", with activations of the other:
        what breaks the answer, or what mends it.

    Raises:
      ValueError: If batches do not pair, or the model has no layers to start from.

    Source: Meng et al. 2022, section 2.1, https://arxiv.org/abs/2202.05262; Vig et al.
    2020, https://arxiv.org/abs/2004.12265, for heads.
    """
    checks.choice("what", what, ("heads", "layers"))
    checks.choice("into", into, ("clean", "corrupted"))
    subject.refuse_gates(of.model)
    make = _patched_heads if what == "heads" else _patched_layers
    program = make(of.model, of.metric, per_position, into == "clean")
    changes, base, other = _over_pairs(of, corrupted, program)
    axes, kinds = ("layer", "position"), ()
    if what == "heads":
        axes, kinds = ("layer", "head", "position"), _kinds(of)
    if not per_position:
        axes, changes = axes[:-1], changes[..., 0]
    return Patching(changes, axes, base, other, kinds)


def path_patching(
    of: subject.Subject,
    corrupted: Iterable[tasks.Example],
    *,
    senders: Heads | None = None,
    receivers: Heads | None = None,
    kinds: Sequence[str] = _READ,
    through_units: bool = False,
) -> Edges:
    """Returns what changes when one head reads of another what the other run has.

    An edge goes from a head to what a later head's queries, keys or values are made of,
    or to the logits. In the clean run the sender passes on what it does in the
    corrupted one, and all other heads and all feed-forward parts are held at what they
    do in the clean run: so the change reaches later residual streams by itself, through
    residual connections and norms (which are computed anew) alone. The receiver reads
    this stream for its queries, say, and the clean one for the rest. What it then
    passes on is put into the clean run, in which everything behind it is computed anew.
    For the logits the metric is that of the held run.

    Edges are run some at once, in memory that does not grow with their number: each
    takes a run to the receivers and one more for each kind.

    Args:
      of: What is measured; its batches are the clean examples, by whose targets the
        metric goes.
      corrupted: As many batches of the same shapes: example i is the other one of a
        pair.
      senders: Pairs of a part's index and a head; None: all.
      receivers: Likewise.
      kinds: Of "q", "k", "v" and "logits".
      through_units: Whether feed-forward parts in between pass the sender's change on
        (a path through them counts as direct, as Wang et al. have it), in place of
        being held.

    Returns:
      All edges of these that there are: to layers above, and those of an encoder to
      keys and values of cross-attention.

    Raises:
      ValueError: If batches do not pair, there is no such head or kind, or feed-forward
        parts of a model that `models.build` did not make should be held.

    Source: Wang et al. 2022, section 3.1, https://arxiv.org/abs/2211.00593; Goldowsky-
    Dill et al. 2023, section 2, https://arxiv.org/abs/2304.05969.
    """
    for kind in kinds:
        checks.choice("kinds", kind, _READ)
    if of.model.config is None and not through_units:
        raise ValueError(
            "through_units must be True for a model that models.build did not make, "
            "whose feed-forward parts cannot be held."
        )
    _check_maps(of.model, kinds)
    places = _places(of)
    senders, receivers = (
        _checked(name, given, places)
        for name, given in (("senders", senders), ("receivers", receivers))
    )
    edges = [
        (sender, receiver, kind)
        for sender in senders
        for receiver in receivers
        for kind in circuits.kinds_read(places[sender[0]], places[receiver[0]])
        if kind in kinds
    ]
    if "logits" in kinds:  # which do not read an encoder
        direct = [head for head in senders if places[head[0]].kind != "encoder"]
        edges += [(head, LOGITS, "logits") for head in direct]
    if not edges:
        raise ValueError(
            f"senders and receivers must have edges of kinds {tuple(kinds)}, got none."
        )
    before = np.cumsum([0, *(len(place.names) for place in places)])
    rows = [
        (
            before[sender[0]] + sender[1],
            -1 if receiver == LOGITS else before[receiver[0]] + receiver[1],
            _READ.index(kind),
        )
        for sender, receiver, kind in edges
    ]
    rows = np.array(rows, np.int32)
    program = _patched_paths(of.model, of.metric, through_units)
    found, clean, other = _over_pairs(of, corrupted, functools.partial(program, rows))
    senders, receivers, kinds = zip(*edges, strict=True)
    return Edges(*map(np.array, (senders, receivers, kinds)), found, clean, other)


@functools.lru_cache(maxsize=8)
def _patched_heads(model, metric, per_position, into_clean) -> Callable:
    """Returns a program of a pair of batches to changes `[B, P, H, T or 1]`."""

    @jax.jit
    def program(params, clean, corrupted):
        own, params = subject.compact(model, params)
        patched, giving = (clean, corrupted) if into_clean else (corrupted, clean)
        base, other = _both(own, params, patched, giving)
        before, after = (metric(x.logits, clean) for x in (base, other))
        replacement = [subject.head_outputs(each) for each in other.maps]
        shapes = [each.shape[-3:-1] for each in base.maps]  # H and T of each part
        positions = max(t for _, t in shapes) if per_position else 1

        def change(row):
            head, position = row
            gates = []
            for is_head, (_, t) in zip(_split(head, shapes), shapes, strict=True):
                at = (jnp.arange(t) == position) if per_position else jnp.ones(t)
                gate = 1 - at[:, None] * is_head[None]
                gates.append(jnp.broadcast_to(gate, (len(before), *gate.shape)))
            given = modules.Interventions(gates, replacement)
            output = subject.run(own, params, patched, interventions=given)
            return metric(output.logits, clean) - before

        count = sum(h for h, _ in shapes)
        rows = jnp.repeat(jnp.arange(count), positions)
        rows = rows, jnp.tile(jnp.arange(positions), count)
        changes = programs.over(change, rows, clean).T
        changes = changes.reshape(len(before), count, positions)
        return _padded(changes, shapes), before, after

    return program


@functools.lru_cache(maxsize=8)
def _patched_layers(model, metric, per_position, into_clean) -> Callable:
    """Returns a program of a pair of batches to changes `[B, L, T or 1]`."""

    @jax.jit
    def program(params, clean, corrupted):
        own, params = subject.compact(model, params)
        patched, giving = (clean, corrupted) if into_clean else (corrupted, clean)
        base, other = _both(own, params, patched, giving)
        if not base.hidden:
            raise ValueError(
                "what must be 'heads' for a model that cannot start from the input of "
                "a layer, got 'layers'."
            )
        before, after = (metric(x.logits, clean) for x in (base, other))
        length = base.hidden[0].shape[1]

        def of_layer(layer):
            i, theirs, ours = layer

            def change(position):
                at = (
                    jnp.arange(length) == position if per_position else jnp.ones(length)
                )
                hidden = jnp.where(at[None, :, None] > 0, theirs, ours)
                output = subject.run(own, params, patched, start=(i, hidden))
                return metric(output.logits, clean) - before

            positions = jnp.arange(length if per_position else 1)
            return programs.over(change, positions, clean).T

        layers = range(len(base.hidden)), other.hidden, base.hidden
        if own is model and not (model.config and model.config.scan_layers):
            changes = jnp.stack([of_layer(x) for x in zip(*layers, strict=True)])
        else:  # one layer is compiled, and which one runs first is an array
            changes = jax.lax.map(of_layer, tuple(jnp.stack([*x]) for x in layers))
        return changes.swapaxes(0, 1), before, after

    return program


@functools.lru_cache(maxsize=8)
def _patched_paths(model, metric, through_units) -> Callable:
    """Returns a program of edges `[E, 3]` and a pair of batches to changes `[B, E]`.

    An edge is the sender and the receiver, counted over all parts, and the place of its
    kind in `_READ`.
    """

    @jax.jit
    def program(edges, params, clean, corrupted):
        own, params = subject.compact(model, params)
        base, other = _both(own, params, clean, corrupted)
        before, after = (metric(x.logits, clean) for x in (base, other))
        ours, theirs = (
            [subject.head_outputs(each) for each in x.maps] for x in (base, other)
        )
        shapes = [each.shape[-3:-1] for each in base.maps]
        size, example, units_of = len(before), clean, None
        if not through_units:
            # The clean batch in front of the changed one, from which the hidden units
            # of both are taken.
            example = jax.tree.map(lambda x: jnp.concatenate([x, x]), clean)
            own_units = jnp.tile(jnp.arange(size), 2)
            units_of = [own_units] * models.num_all_layers(model.config)

        def held(sender):
            passed = [
                jnp.where(is_head[None, None, :, None] > 0, x, y)
                for is_head, x, y in zip(
                    _split(sender, shapes), theirs, ours, strict=True
                )
            ]
            if not through_units:
                passed = [jnp.concatenate(x) for x in zip(ours, passed, strict=True)]
            closed = [jnp.zeros(count) for count, _ in shapes]
            given = modules.Interventions(closed, passed, units_of=units_of)
            output = subject.run(own, params, example, interventions=given)
            return output.logits[-size:], output.maps

        def change(edge):
            sender, receiver, kind = edge
            logits, maps = held(sender)
            passed = [
                _passed(kind, size, *pair) for pair in zip(base.maps, maps, strict=True)
            ]
            gates = [1 - is_head for is_head in _split(receiver, shapes)]
            given = modules.Interventions(gates, passed)
            output = subject.run(own, params, clean, interventions=given)
            is_direct = kind == _READ.index("logits")
            return metric(jnp.where(is_direct, logits, output.logits), clean) - before

        return programs.over(change, edges, example).T, before, after

    return program


def _both(model, params, one, other) -> tuple:
    """Returns the outputs of two batches, from one compiled model."""
    pair = jax.tree.map(lambda x, y: jnp.stack([x, y]), one, other)
    outputs = jax.lax.map(functools.partial(subject.run, model, params), pair)
    return tuple(jax.tree.map(lambda x, i=i: x[i], outputs) for i in range(2))


def _passed(kind, size, clean, changed) -> Array:
    """Returns what heads pass on that read q, k or v from another stream.

    Args:
      kind: Which of the three, by its place; another number for none.
      size: B.
      clean: Their map.
      changed: Their map in the other stream, the last of whose examples count.

    Returns:
      `[B, T, H, V]`.
    """
    if not clean.shape[-3]:
        return subject.head_outputs(clean)
    streams = [
        jnp.where(kind == i, getattr(changed, name)[-size:], getattr(clean, name))
        for i, name in enumerate(("query", "key", "value"))
    ]
    passed, _ = attention.attend(
        *streams,
        mask=clean.mask,
        bias=clean.bias,
        score=clean.score,
        first_query=clean.origin.query,
    )
    return passed


def _split(head, shapes) -> list[Array]:
    """Returns 1 at a head, counted over all parts, and 0 elsewhere: P arrays `[H]`."""
    counts = [count for count, _ in shapes]
    return jnp.split(jax.nn.one_hot(head, sum(counts)), np.cumsum(counts)[:-1])


def _padded(changes, shapes) -> Array:
    """Returns `[B, P, H, T]` of `[B, P H, T]`, NaN where there is no such place."""
    longest = changes.shape[-1]
    result = jnp.full(
        (len(changes), len(shapes), max(h for h, _ in shapes), longest), jnp.nan
    )
    first = 0
    for part, (h, t) in enumerate(shapes):
        t = min(t, longest)
        result = result.at[:, part, :h, :t].set(changes[:, first : first + h, :t])
        first += h
    return result


def _check_maps(model, kinds) -> None:
    """Refuses models of which maps do not tell what other queries and keys give."""
    subject.refuse_gates(model)
    own = {} if model.config is None else model.config.attention
    sinks, normalizer = own.get("sinks"), own.get("normalizer", "softmax")
    if (sinks is not None or normalizer != "softmax") and set(kinds) != {"logits"}:
        raise ValueError(
            "kinds must be logits alone for a model with attention.sinks or without "
            "softmax's normalizer, of which maps know no more than the denominators, "
            f"got {tuple(kinds)}."
        )


def _over_pairs(of, corrupted, program) -> tuple:
    """Returns the results of a program of pairs of batches, of all examples."""
    for batches in (of.batches, corrupted):
        if iter(batches) is batches:
            subject.refuse_generator(batches)
    pairs = list(zip(of.batches, corrupted, strict=True))
    for clean, other in pairs:
        shapes = [jax.tree.map(np.shape, x.model_inputs()) for x in (clean, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "corrupted must have inputs of the shapes of the clean examples', "
                f"{shapes[0]}, got {shapes[1]}."
            )
    results = subject.over(pairs, lambda pair: program(of.params, *pair))
    return jax.tree.map(lambda *x: np.concatenate(x).astype(np.float64), *results)


def _kinds(of) -> tuple[str, ...]:
    example = next(iter(of.batches))
    return tuple(subject.kinds_of(of.model, of.params, example))


def _places(of) -> list[models.LayerHeads]:
    """Returns the heads of each part."""
    example = next(iter(of.batches))
    counts = subject.num_heads(of.model, of.params, example)
    kinds = _kinds(of) or ("",) * len(counts)
    return [
        models.LayerHeads(tuple(range(count)), 0, None, (), kind, kinds[:i].count(kind))
        for i, (count, kind) in enumerate(zip(counts, kinds, strict=True))
    ]


def _checked(name, heads, places) -> list[tuple[int, int]]:
    """Returns the heads that are asked for, or all."""
    sizes = [len(place.names) for place in places]
    every = [(i, h) for i, size in enumerate(sizes) for h in range(size)]
    if heads is None:
        return every
    heads = [tuple(map(int, head)) for head in heads]
    for head in heads:
        if head not in every:
            raise ValueError(
                f"{name} must be pairs of a part and one of its heads, of which there "
                f"are {sizes}, got {head}."
            )
    return heads
