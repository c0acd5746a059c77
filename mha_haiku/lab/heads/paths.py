"""Path patching: what one head, reading of another what a second run has, changes.

B batch, T positions, P attention parts, H heads of a part, V value size per head, N
examples, E edges.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, sites
from mha_haiku.lab.heads import circuits, edits, paired_runs, programs, running
from mha_haiku.training import tasks

Array = jax.Array
Heads = Sequence[tuple[int, int]]

KINDS = (*circuits.KINDS, "logits")  # through which an edge is read
LOGITS = (-1, -1)  # stands for the logits among receiving heads


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Edges(paired_runs.Changes):
    """What it changes in the clean run to patch each edge; `per_example` is `[N, E]`.

    Attributes:
      senders: `[E, 2]`, part and head that write.
      receivers: `[E, 2]`, part and head that read; -1 and -1 for the logits.
      kinds: `[E]`, through which they read: "q", "k" and "v", or "logits".
      unit: The unit of the changes.
    """

    senders: np.ndarray
    receivers: np.ndarray
    kinds: np.ndarray
    unit: str = "change of the metric"

    def rows(self) -> list[dict[str, int | float | str]]:
        """Returns a row for each edge: its ends, its kind and its numbers."""
        ends = ("sender_layer", "sender_head", "receiver_layer", "receiver_head")
        places = np.concatenate([self.senders, self.receivers], axis=1).tolist()
        return [
            dict(zip(ends, place, strict=True))
            | {"kind": str(kind)}
            | self.numbers((i,))
            for i, (place, kind) in enumerate(zip(places, self.kinds, strict=True))
        ]


def path_patching(
    of: running.Measured,
    corrupted: Iterable[tasks.Example],
    *,
    senders: Heads | None = None,
    receivers: Heads | None = None,
    kinds: Sequence[str] = KINDS,
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
    For the logits the metric is that of the held run. Where attention is gated, gates
    are made of what queries are made of, and are read with them.

    Each edge takes two runs of the model, in the first of which no attention and no
    feed-forward part that is held is computed. Some edges run at once, in memory that
    does not grow with their number.

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
      keys and values of cross-attention. `base` is of the clean run, `other` of the
      corrupted one.

    Raises:
      TypeError: If batches can be gone through only once.
      ValueError: If batches do not pair, there is no such head, kind or edge, or
        feed-forward parts of a model that `models.build` did not make should be held.

    Source: Wang et al. 2022, section 3.1, https://arxiv.org/abs/2211.00593; Goldowsky-
    Dill et al. 2023, section 2, https://arxiv.org/abs/2304.05969.
    """
    for kind in kinds:
        checks.choice("kinds", kind, KINDS)
    if of.model.config is None and not through_units:
        raise ValueError(
            "through_units must be True for a model that models.build did not make, "
            "whose feed-forward parts cannot be held."
        )
    example = next(iter(of.batches))
    counts = running.num_heads(of.model, of.params, example)
    parts = running.kinds_of(of.model) or [""] * len(counts)
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
    program = _changes(of.model, metric=of.metric, through_units=through_units)
    changes = paired_runs.over_pairs(
        of, corrupted, lambda params, *pair: program(params, *pair, numbers)
    )
    return Edges(*changes, *map(np.array, zip(*edges, strict=True)))


@running.compiled
def _changes(model, params, clean, corrupted, edges, *, metric, through_units):
    """Returns changes `[B, E]` by edges `[E, 5]`, and both metrics.

    An edge is part and head of its sender and of its receiver, and the kind.
    """
    at = ["*/heads", *(f"*/{name}" for names in _READ.values() for name in names)]
    if not through_units:
        at.append("feed_forward/output")
    pair = paired_runs.both(model, params, clean, corrupted, at)
    (base, ours), (other, theirs) = pair
    before, after = (metric(x.logits, clean) for x in (base, other))
    parts = [name for name in ours if name.endswith("/heads")]
    units = [name for name in ours if name.endswith("feed_forward/output")]
    heads = [(part, ours[name], theirs[name]) for part, name in enumerate(parts)]
    read = {
        name: (parts.index(f"{path}/heads"), kind)
        for name in ours
        for path, _, end in [name.rpartition("/")]
        for kind, ends in enumerate(_READ.values())
        if end in ends
    }
    units_held = edits.on_parts(units, [ours[name] for name in units], _replaced)

    def held(sender):
        """Returns what is read, and logits, where only the sender has changed."""

        def passed(_, given):
            part, own, other = given
            return jnp.where(_is_head(sender, part, own), other, own)

        changed = edits.on_parts(parts, heads, passed) | units_held
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
            is_kept = (part == receiver[0]) & ~_is_head(receiver, part, own)
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
_READ = {"q": ("query", "gates"), "k": ("key",), "v": ("value",)}


def _replaced(_, other) -> Array:
    return other


def _is_head(head, part, values) -> Array:
    """Returns which of a part's heads is this one, booleans `[1, 1, H, 1]`."""
    is_it = (part == head[0]) & (jnp.arange(values.shape[-2]) == head[1])
    return is_it[None, None, :, None]


def _checked(name, heads, counts) -> list[tuple[int, int]]:
    """Returns the heads that are asked for, or all."""
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
