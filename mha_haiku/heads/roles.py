"""What heads do: names for the patterns that are known.

B batch, T positions, L layers, H heads of a layer.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, models, tasks
from mha_haiku.heads import subject

Array = jax.Array


class Role(NamedTuple):
    """What a head can be.

    Attributes:
      threshold: The score from which on a head has the role.
      label: What is scored, in [0, 1], as a mean over queries and examples.
      limit: The score from which on it is another role.
      score: The name of the score, where it is not that of the role.
    """

    threshold: float
    label: str
    limit: float = float("inf")
    score: str | None = None


ROLES = {
    "previous_token": Role(0.5, "mass on the position before the query's"),
    "next_token": Role(0.5, "mass on the position after the query's"),
    "own_position": Role(0.5, "mass on the query's own position: near the identity"),
    "first_token": Role(0.5, "mass on position 0, a sink"),
    "separator": Role(0.5, "mass on the separators that are given, a sink"),
    # Queries whose token is new count 0 in `Statistics.induction`, and not at all here.
    "induction": Role(
        0.5,
        "mass on what followed the token before, of queries whose token has occurred",
        score="induction_of_repeated",
    ),
    "positional": Role(0.9, "share of queries with the largest weight at one offset"),
    "uniform": Role(
        0.95, "entropy, of that of equal weights", score="relative_entropy"
    ),
    "broad": Role(
        0.75, "entropy, of that of equal weights", limit=0.95, score="relative_entropy"
    ),
}
MIXED = "mixed"
# The scores that roles are given by: name and label.
SCORES = {role.score or name: role.label for name, role in ROLES.items()}


class Roles(NamedTuple):
    """The roles of heads.

    Attributes:
      names: `[L, H]` of text: the role whose score is furthest above its threshold,
        relative to what is left above that; "mixed" where none reaches it, and "" where
        there is no head.
      scores: By the names of `SCORES`, `[L, H]` in [0, 1], NaN where there is no head;
        without those of separators and induction where there are no tokens for them.
      offsets: `[L, H]` integers, t - s: where the largest weight is most often.
    """

    names: np.ndarray
    scores: dict[str, np.ndarray]
    offsets: np.ndarray


def roles(
    model: models.Model,
    params: Any,
    batches: Iterable[tasks.Example],
    *,
    separators: Sequence[int] = (),
) -> Roles:
    """Returns what each head does on some data.

    Args:
      model: The model.
      params: Its parameters.
      batches: The data.
      separators: Tokens that count as separators.

    Source: positional heads (0.9) Voita et al. 2019, section 5.1,
    https://arxiv.org/abs/1905.09418; sinks Clark et al. 2019, section 3.2,
    https://arxiv.org/abs/1906.04341; induction Olsson et al. 2022,
    https://arxiv.org/abs/2209.11895.
    """
    observe = _observer(model, tuple(separators))
    found = subject.over(batches, lambda example: observe(params, example))
    found = jax.tree.map(np.float64, found)
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), found)
    scores, offsets = zip(*total, strict=True)
    means = [
        {name: x / max(count, 1e-9) for name, (x, count) in layer.items()}
        for layer in scores
    ]
    return _named(means, offsets)


@functools.lru_cache(maxsize=8)
def _observer(model, separators):
    """Returns what observes a batch; kept, so that observing again is quick."""

    @jax.jit
    def observe(params, example):
        output = subject.run(model, params, example)
        chosen = jnp.array(separators, jnp.int32)
        return [_observed(each, example, chosen) for each in output.maps]

    return observe


def _observed(attention_map, example, separators):
    """Returns sums over a batch: of scores by name, and counts of offsets.

    Of a score it is the sum `[H]`, and of what there is a sum: all examples, or of
    induction the shares of queries whose token has occurred before.
    """
    is_tokens = jnp.issubdtype(example.inputs.dtype, jnp.integer)
    tokens = example.inputs if is_tokens else None
    positions = jnp.isin(tokens, separators) if is_tokens and separators.size else None
    found = attention_map.statistics(tokens=tokens, positions=positions)
    *_, num_queries, num_keys = attention_map.shape
    weights, places = attention_map.top(1)
    seen = weights[..., 0] > 0
    rows = jnp.arange(num_queries).reshape(*(1,) * (seen.ndim - 1), -1)
    offset = rows - places[..., 0] + num_keys - 1
    num_heads, num_offsets = attention_map.shape[-3], num_queries + num_keys - 1
    heads = jnp.arange(num_heads)[None, :, None]
    slot = jnp.where(seen, heads * num_offsets + offset, num_heads * num_offsets)
    counts = jnp.bincount(slot.reshape(-1), length=num_heads * num_offsets)
    most = _entropy_of_equal_weights(attention_map)
    entropy = found.entropy / jnp.maximum(most, 1e-9)
    scores = {
        "previous_token": found.previous_position,
        "next_token": found.next_position,
        "own_position": found.own_position,
        "first_token": found.first_position,
        "separator": found.chosen_positions,
        "induction_of_repeated": found.induction,
        "relative_entropy": entropy,
    }
    shares = dict.fromkeys(scores, jnp.ones(len(example.inputs)))
    if is_tokens:
        shares["induction_of_repeated"] = _repeated(tokens, seen.any(1))
    sums = {
        name: (x.sum(0), shares[name].sum())
        for name, x in scores.items()
        if x is not None
    }
    return sums, counts.reshape(num_heads, num_offsets)


def _repeated(tokens, counted) -> Array:
    """Returns the share of the queries that count whose token has occurred before.

    Args:
      tokens: `[B, T]`.
      counted: `[B, T]` booleans.

    Returns:
      `[B]` in [0, 1].
    """
    order = jnp.argsort(tokens, axis=-1, stable=True)
    in_order = jnp.take_along_axis(tokens, order, -1)
    same = jnp.pad(in_order[:, 1:] == in_order[:, :-1], ((0, 0), (1, 0)))
    again = jnp.zeros_like(same).at[jnp.arange(len(tokens))[:, None], order].set(same)
    return (again & counted).sum(-1) / jnp.maximum(counted.sum(-1), 1)


def _entropy_of_equal_weights(attention_map) -> Array:
    """Returns the mean entropy `[B, 1]` of rows that attend to all they see alike."""
    zeros = jnp.zeros((*attention_map.query.shape[:-2], 1, 1))
    keys = jnp.zeros((*attention_map.key.shape[:-2], 1, 1))
    _, equal = attention.attend(zeros, keys, keys, mask=attention_map.mask)
    return equal.statistics().entropy


def _named(scores, counts) -> Roles:
    """Returns roles from mean scores and counts of offsets, by layer."""
    widest = max(len(layer) for layer in counts)
    shape = (len(counts), widest)
    names = np.full(shape, "", dtype=object)
    offsets = np.zeros(shape, int)
    found = {name: np.full(shape, np.nan) for name in SCORES}
    for i, (layer, of_heads) in enumerate(zip(scores, counts, strict=True)):
        for h, of_head in enumerate(of_heads):
            own = {name: float(x[h]) for name, x in layer.items()}
            own["positional"] = float(of_head.max() / max(of_head.sum(), 1))
            # T + S - 1 offsets, of which S - 1 stand before the query's own position.
            offsets[i, h] = int(of_head.argmax()) - (len(of_head) - 1) // 2
            names[i, h] = _role(own)
            for name, value in own.items():
                found[name][i, h] = value
    known = {name: x for name, x in found.items() if not np.isnan(x).all()}
    return Roles(names, known, offsets)


def _role(scores: dict[str, float]) -> str:
    margins = {}
    for name, role in ROLES.items():
        score = scores.get(role.score or name, -1.0)
        if role.threshold <= score < role.limit:
            margins[name] = (score - role.threshold) / (1 - role.threshold)
    return max(margins, key=margins.get, default=MIXED)
