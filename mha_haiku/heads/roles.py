"""What heads do: names for the attention patterns that are known.

B batch, T positions, L layers, H heads of a layer.
"""

import collections
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, display, models, tasks
from mha_haiku.heads import alignment, subject

Array = jax.Array


class Role(NamedTuple):
    """What a head can be.

    Attributes:
      threshold: The lowest score of the role.
      label: What is scored, in [0, 1], as a mean over queries and examples.
      limit: Scores must be below this.
      score: The name of the score; None: the name of the role.
    """

    threshold: float
    label: str
    limit: float = float("inf")
    score: str | None = None


ROLES = {
    # Of cross-attention alone, if the task says where its rows should look.
    "aligned": Role(0.5, alignment.label("aligned")),
    "previous_token": Role(0.5, "mass on the position before the query's"),
    "next_token": Role(0.5, "mass on the position after the query's"),
    "own_position": Role(0.5, "mass on the query's own position: near the identity"),
    "first_token": Role(0.5, "mass on position 0, a sink"),
    "separator": Role(0.5, "mass on the separators that are given, a sink"),
    # `Statistics.induction` is a mean over all queries, here over those whose token has
    # occurred before.
    "induction": Role(
        0.5,
        "mass on what followed the token before, of queries whose token has occurred",
        score="induction_of_repeated",
    ),
    "positional": Role(0.9, "share of queries with the largest weight at one offset"),
    # Of cross-attention alone, whose positions are those of two texts.
    "monotonic": Role(
        0.9, "correlation, up or down, of a query's place and its largest weight's"
    ),
    "uniform": Role(
        0.95, "entropy, as a share of that of equal weights", score="relative_entropy"
    ),
    "broad": Role(
        0.75,
        "entropy, as a share of that of equal weights",
        limit=0.95,
        score="relative_entropy",
    ),
}
MIXED = "mixed"
# The scores that decide the roles: name and label.
SCORES = {role.score or name: role.label for name, role in ROLES.items()}


class Roles(NamedTuple):
    """The roles of heads.

    Attributes:
      names: `[L, H]` strings: the role whose score goes furthest from its threshold (0)
        to 1; "mixed" where no score reaches its threshold, "" where there is no head.
      scores: By the names of `SCORES`, `[L, H]` in [0, 1], NaN where there is no head,
        or none such for its kind; without "separator" if none are given, and without
        scores of tokens if inputs are features.
      offsets: `[L, H]` integers, the most frequent t - s of a query t and the key s
        with its largest weight.
      kinds: The kind of each of the L layers; () where there is one kind.
    """

    names: np.ndarray
    scores: dict[str, np.ndarray]
    offsets: np.ndarray
    kinds: tuple[str, ...] = ()

    def __repr__(self) -> str:
        counts = collections.Counter(name for name in np.ravel(self.names) if name)
        shown = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        return f"Roles({len(self.names)} layers, heads: {shown or 'none'})"

    _repr_html_, show, plot = display.html, display.show, display.plot


def roles(
    model: models.Model,
    params: Any,
    batches: Iterable[tasks.Example],
    *,
    separators: Sequence[int] = (),
    align: alignment.Align | None = None,
) -> Roles:
    """Returns the role of each head on some data.

    A cross head can be aligned, monotonic, positional, uniform or broad, or a sink of
    the first token or of separators.

    Args:
      model: The model.
      params: Its parameters.
      batches: The data.
      separators: Tokens that count as separators; of an encoder-decoder in its source.
      align: Where cross heads should look, such as a task's `alignments`.

    Source: positional heads (0.9) Voita et al. 2019, section 5.1,
    https://arxiv.org/abs/1905.09418; sinks Clark et al. 2019, section 3.2,
    https://arxiv.org/abs/1906.04341; induction Olsson et al. 2022,
    https://arxiv.org/abs/2209.11895.
    """
    observe = _observed(model, separators=tuple(separators))

    def of_batch(example):
        aligned = None
        if align is not None and example.decoder_inputs is not None:
            shape = *example.decoder_inputs.shape, example.inputs.shape[1]
            known = alignment.of_batch(align, subject.fetched(example))
            # Where nothing is known, the same program as for other batches.
            aligned = known.get("aligned", np.zeros(shape, bool))
        return observe(params, example, aligned)

    sums = jax.tree.map(np.float64, subject.over(batches, of_batch))
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), sums)
    return _named(total)._replace(kinds=tuple(subject.kinds_of(model)))


def role_of(scores: Mapping[str, float]) -> tuple[str, float]:
    """Returns the role whose score goes furthest from its threshold to 1; its score.

    Args:
      scores: Of one head, by the names of `SCORES`.

    Returns:
      "mixed" and NaN where no score reaches its threshold.
    """
    margins = {}
    for name, role in ROLES.items():
        score = scores.get(role.score or name, -1.0)
        if role.threshold <= score < role.limit:
            margins[name] = (score - role.threshold) / (1 - role.threshold)
    best = max(margins, key=margins.get, default=MIXED)
    return best, scores[ROLES[best].score or best] if margins else math.nan


@subject.compiled
def _observed(model, params, example, aligned, *, separators):
    """Returns for each map the sums of scores over a batch, and counts of offsets."""
    separators = jnp.array(separators, jnp.int32)
    sums = functools.partial(
        _sums, example=example, separators=separators, aligned=aligned
    )
    at = subject.by_kind(sums, model)
    return list(subject.look(model, params, example, at)[1].values())


def _sums(attention_map, kind, example, separators, aligned):
    """Returns sums of scores over a batch, by name, and counts of offsets.

    Each score is a pair: its sum `[H]`, and the number to divide by. That is the number
    of examples with a query that sees something, or for induction the sum of the shares
    of queries that count.
    """
    tokens = subject.tokens(example, kind)
    of_source = jnp.issubdtype(example.inputs.dtype, jnp.integer) and kind != "decoder"
    positions = None
    if of_source and separators.size:
        positions = jnp.isin(example.inputs, separators)
    statistics = attention_map.statistics(tokens=tokens, positions=positions)
    *_, num_queries, num_keys = attention_map.shape
    weights, places = attention_map.top(1)
    seen = weights[..., 0] > 0  # not fully masked
    rows = jnp.arange(num_queries).reshape(*(1,) * (seen.ndim - 1), -1)
    widest = max(num_queries, num_keys)
    offset = rows - places[..., 0] + widest - 1
    num_heads, num_offsets = attention_map.shape[-3], 2 * widest - 1
    heads = jnp.arange(num_heads)[None, :, None]
    # One histogram for all heads: a bin per head and offset. Fully masked queries go to
    # a bin past the end, which bincount drops.
    slot = jnp.where(seen, heads * num_offsets + offset, num_heads * num_offsets)
    counts = jnp.bincount(slot.reshape(-1), length=num_heads * num_offsets)
    most = _entropy_of_equal_weights(attention_map)
    entropy = statistics.entropy / jnp.maximum(most, 1e-9)
    scores = {
        "first_token": statistics.first_position,
        "separator": statistics.chosen_positions,
        "relative_entropy": entropy,
    }
    if kind == "cross":
        scores["monotonic"] = _correlations(rows, places[..., 0], seen)
    else:
        scores |= {
            "previous_token": statistics.previous_position,
            "next_token": statistics.next_position,
            "own_position": statistics.own_position,
            "induction_of_repeated": statistics.induction,
        }
    shares = dict.fromkeys(scores, seen.any(-1))
    if tokens is not None:
        shares["induction_of_repeated"] = _repeated(tokens, seen.any(1))
    if kind == "cross" and aligned is not None:
        has_key = aligned.any(-1)[:, None]
        right = jnp.take_along_axis(aligned[:, None], places, -1)[..., 0] & seen
        scores["aligned"] = right.sum(-1) / jnp.maximum(has_key.sum(-1), 1)
        shares["aligned"] = has_key.any(-1)
    sums = {
        name: (x.sum(0), shares[name].sum(0, dtype=jnp.float32))
        for name, x in scores.items()
        if x is not None
    }
    return sums, counts.reshape(num_heads, num_offsets)


def _repeated(tokens, counted) -> Array:
    """Returns the share `[B]` of counted queries whose token has occurred before."""
    # A stable sort puts equal tokens side by side, in the order of their positions: all
    # but the first of each group have occurred before.
    order = jnp.argsort(tokens, axis=-1, stable=True)
    in_order = jnp.take_along_axis(tokens, order, -1)
    same = jnp.pad(in_order[:, 1:] == in_order[:, :-1], ((0, 0), (1, 0)))
    again = jnp.zeros_like(same).at[jnp.arange(len(tokens))[:, None], order].set(same)
    return (again & counted).sum(-1) / jnp.maximum(counted.sum(-1), 1)


def _correlations(rows, places, seen) -> Array:
    """Returns correlations `[B, H]` of the places of queries and of their keys.

    Of those queries that are seen; 0 where all keys or all queries are at one place.
    """
    count = jnp.maximum(seen.sum(-1, keepdims=True), 1)
    x, y = (
        jnp.where(
            seen, each - jnp.where(seen, each, 0).sum(-1, keepdims=True) / count, 0
        )
        for each in (rows, places)
    )
    squares = (x**2).sum(-1) * (y**2).sum(-1)
    return (x * y).sum(-1) / jnp.sqrt(jnp.where(squares > 0, squares, jnp.inf))


def _entropy_of_equal_weights(attention_map) -> Array:
    """Returns the mean entropy `[B, 1]` of equal weights on all unmasked keys."""
    zeros = jnp.zeros((*attention_map.query.shape[:-2], 1, 1))
    keys = jnp.zeros((*attention_map.key.shape[:-2], 1, 1))
    _, equal = attention.attend(zeros, keys, keys, mask=attention_map.mask)
    return equal.statistics().entropy


def _named(sums) -> Roles:
    """Returns roles from what `_sums` gives for each layer, over all batches."""
    shape = len(sums), max(len(counts) for _, counts in sums)
    names, offsets = np.full(shape, "", dtype=object), np.zeros(shape, int)
    values = {name: np.full(shape, np.nan) for name in SCORES}
    for i, (scores, counts) in enumerate(sums):
        num_heads, num_offsets = counts.shape
        own = {name: x / np.maximum(count, 1e-9) for name, (x, count) in scores.items()}
        if "aligned" in own and not scores["aligned"][1].all():
            own["aligned"] = np.full(num_heads, np.nan)  # nothing is known
        own["positional"] = counts.max(-1) / np.maximum(counts.sum(-1), 1)
        if "monotonic" in own:  # downwards too, as long as all examples do
            own["monotonic"] = np.abs(own["monotonic"])
        # The bin in the middle is offset 0.
        offsets[i, :num_heads] = counts.argmax(-1) - (num_offsets - 1) // 2
        for name, x in own.items():
            values[name][i, :num_heads] = x
        for h in range(num_heads):
            names[i, h], _ = role_of({name: x[h] for name, x in own.items()})
    known = {name: x for name, x in values.items() if not np.isnan(x).all()}
    return Roles(names, known, offsets)
