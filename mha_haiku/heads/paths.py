"""Path patching: what one head, reading of another what a second run has, changes.

B batch, T positions, P attention parts, H heads of a part, V value size per head, N
examples, E edges.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, checks, tasks
from mha_haiku.core import sites
from mha_haiku.heads import circuits, edits, paired_runs, programs, subject

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
    """

    senders: np.ndarray
    receivers: np.ndarray
    kinds: np.ndarray

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
    of: subject.Subject,
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
    counts = subject.num_heads(of.model, of.params, example)
    parts = subject.kinds_of(of.model) or [""] * len(counts)
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
    program = functools.partial(
        _program(of.model, of.metric, through_units), _numbered(edges, counts)
    )
    changes = paired_runs.over_pairs(of, corrupted, program)
    return Edges(*changes, *map(np.array, zip(*edges, strict=True)))


@functools.lru_cache(maxsize=8)
def _program(model, metric, through_units) -> Callable:
    """Returns a program of edges, as `_numbered`, and a pair to changes `[B, E]`."""
    at = ["*/heads", "*/map"]
    if not through_units:
        at.append("feed_forward/output")

    @jax.jit
    def program(edges, params, clean, corrupted):
        own, params = subject.compact(model, params)
        pair = paired_runs.both(own, params, clean, corrupted, at)
        (base, ours), (other, theirs) = pair
        before, after = (metric(x.logits, clean) for x in (base, other))
        heads, maps, units = (
            [name for name in ours if name.endswith(end)]
            for end in ("/heads", "/map", "feed_forward/output")
        )
        counts = [ours[name].shape[-2] for name in heads]
        clean_maps = [ours[name] for name in maps]
        units_held = edits.on_parts(
            units, [ours[name] for name in units], lambda _, output: output
        )

        def held(sender):
            """Returns logits and maps where only the sender passes on a change."""
            passed = [
                jnp.where(here[None, None, :, None] > 0, theirs[name], ours[name])
                for here, name in zip(
                    paired_runs.single(sender, counts), heads, strict=True
                )
            ]
            changed = edits.on_parts(heads, passed, lambda _, output: output)
            run = functools.partial(subject.run, own, params)
            looked = sites.look(sites.edit(run, changed | units_held), maps)
            output, found = looked(clean)
            return output.logits, [found[name] for name in maps]

        def change(edge):
            sender, receiver, kind = edge
            logits, changed = held(sender)
            passed = _read_anew(kind, receiver, counts, clean_maps, changed)
            gates = [1 - here for here in paired_runs.single(receiver, counts)]
            patched = edits.on_parts(
                heads,
                list(zip(gates, passed, strict=True)),
                lambda values, own: edits.gated(values, *own),
            )
            output = subject.run_edited(own, params, clean, patched)
            is_direct = kind == KINDS.index("logits")
            return metric(jnp.where(is_direct, logits, output.logits), clean) - before

        return programs.over(change, edges, clean).T, before, after

    return program


def _read_anew(kind, receiver, counts, clean, changed) -> list[Array]:
    """Returns what heads pass on that read q, k or v of a changed stream.

    Args:
      kind: Which of the three, by its place; another number for none.
      receiver: The head, counted over all parts. Of parts that are alike only its own
        is computed, and stands for all.
      counts: H of each part.
      clean: The parts' maps.
      changed: Their maps in the changed stream.

    Returns:
      P arrays `[B, T, H, V]`.
    """
    part = jnp.searchsorted(np.cumsum(counts), receiver, side="right")
    passed: list = [None] * len(counts)
    for group in _alike(clean):
        place = jnp.argmax(jnp.array(group) == part)
        own, other = (
            jax.tree.map(lambda *x, i=place: jnp.stack(x)[i], *[maps[i] for i in group])
            for maps in (clean, changed)
        )
        anew = _read_of(kind, own, other)
        for i in group:
            passed[i] = anew
    return passed


def _alike(maps) -> list[list[int]]:
    """Returns the indices of maps in groups of the same structure and shapes."""
    groups: dict = {}
    for i, each in enumerate(maps):
        leaves, structure = jax.tree.flatten(each)
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        groups.setdefault((structure, shapes), []).append(i)
    return list(groups.values())


def _read_of(kind, clean, changed) -> Array:
    """Returns what the heads of one part pass on, `[B, T, H, V]`; see `_read_anew`."""
    if not clean.shape[-3]:
        return clean.outputs()

    def read(name, through):
        own = getattr(clean, name)
        if own is None:
            return None
        is_changed = kind == KINDS.index(through)
        return jnp.where(is_changed, getattr(changed, name), own)

    passed, _ = attention.attend(
        read("query", "q"),
        read("key", "k"),
        read("value", "v"),
        mask=clean.mask,
        bias=clean.bias,
        score=clean.score,
        normalizer=clean.normalizer,
        gates=read("gates", "q"),
        first_query=clean.origin.query,
    )
    return passed


def _numbered(edges, counts) -> np.ndarray:
    """Returns `[E, 3]`: sender and receiver, counted over all parts, and the kind.

    Args:
      edges: Sender, receiver and kind of each.
      counts: H of each part.
    """
    before = np.cumsum([0, *counts])
    numbers = [
        (
            before[sender[0]] + sender[1],
            -1 if receiver == LOGITS else before[receiver[0]] + receiver[1],
            KINDS.index(kind),
        )
        for sender, receiver, kind in edges
    ]
    return np.array(numbers, np.int32)


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
