"""Roles of heads: names for known attention patterns.

B batch, T positions, L layers, H heads of a layer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, models, tiles
from mha_haiku.lab.heads import alignment, model_runs
from mha_haiku.lab.heads.model_runs import Batches
from mha_haiku.records.heads import OFFSET, ROLE, Column, Heads
from mha_haiku.records.roles import NO_CLEAR_ROLE, ROLES
from mha_haiku.training import tasks

Array = jax.Array

_NEAR = ("previous_token", "next_token", "own_position")  # offsets with a role
_LONGEST = max(map(len, ROLES))
# The largest offset, and distance from the anti-diagonal, that is counted separately.
_FARTHEST = 128
# The scores that decide the roles: name and label.
SCORES = {role.score or name: role.label for name, role in ROLES.items()}


def roles(
    model: models.Model,
    params: Any,
    batches: Batches,
    *,
    separators: Sequence[int] = (),
    pictures: Sequence[int] = (),
    align: alignment.Align | None = None,
) -> Heads:
    """Finds the role of each head on some data.

    The columns are `role`, a name and the score that decided it (NaN if none did); the
    scores by the names of `SCORES`, in [0, 1], NaN if a kind of heads has no such
    score; and `offset`, the most frequent t - s of a query t and the key s with its
    largest weight, up to 128 positions.

    `separators` are tokens (in an encoder-decoder, of its source), `pictures` are those
    in whose places there are pictures, and `align` says where cross heads should look,
    as a task's `alignments` do.

    Source: positional heads (0.9) Voita et al. 2019, section 5.1,
    https://arxiv.org/abs/1905.09418; sinks Clark et al. 2019, section 3.2,
    https://arxiv.org/abs/1906.04341; induction Olsson et al. 2022,
    https://arxiv.org/abs/2209.11895.

    Example:
      >>> mh.heads.roles(model, params, batches)["role"].names.tolist()
      [['previous_token', 'no_clear_role'], ['induction', 'no_clear_role']]
    """
    observe = _observed(model, marks=(tuple(separators), tuple(pictures)))

    def of_batch(example: tasks.Example) -> list[dict[str, Array]]:
        aligned = None
        if align is not None and example.decoder_inputs is not None:
            shape = *example.decoder_inputs.shape, example.inputs.shape[1]
            alignments = alignment.of_batch(align, model_runs.fetched(example))
            # If nothing is known, uses the same program as for other batches.
            aligned = alignments.get("aligned", np.zeros(shape, bool))
        return observe(params, example, aligned)

    sums = model_runs.over(batches, of_batch)
    total = jax.tree.map(lambda *x: sum(map(np.float64, x)), *sums)
    example = next(iter(batches)) if model.config is None else None
    kinds = model_runs.kinds_of(model, params, example)
    result = roles_of_evidence(total, kinds=kinds)
    if model.config is None:
        return result
    return result.named([x.names for x in models.heads_of_layers(model.config)])


def role_of(scores: Mapping[str, float]) -> str:
    """Chooses the role whose score is furthest on the way from its threshold to 1.

    Scores are by the names of `SCORES`; "no_clear_role" if none reaches its threshold.
    A head that reaches the threshold of "previous_token", "next_token" or
    "own_position" is not "positional", which is for other offsets.

    Example:
      >>> mh.heads.role_of({"previous_token": 0.6, "first_token": 0.9})
      'first_token'
      >>> mh.heads.role_of({"previous_token": 0.6, "positional": 1.0})
      'previous_token'
      >>> mh.heads.role_of({"previous_token": 0.2, "first_token": 0.3})
      'no_clear_role'
    """
    margins: dict[str, float] = {}
    for name, role in ROLES.items():
        score = scores.get(role.score or name, -1.0)
        if role.threshold <= score < role.limit:
            margins[name] = (score - role.threshold) / (1 - role.threshold)
    if any(name in margins for name in _NEAR):
        margins.pop("positional", None)
    return max(margins, key=margins.__getitem__, default=NO_CLEAR_ROLE)


@model_runs.compiled
def _observed(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    aligned: Array | None,
    *,
    marks: model_runs.Marks,
) -> list[dict[str, Array]]:
    """Sums `role_evidence` over a batch, for each map."""

    def summed(attention_map: attention.AttentionMap, kind: str) -> dict[str, Array]:
        counted = attention_map, model, example, kind, marks
        attention_map, told = model_runs.counted_map(*counted)
        positions = told.pop("separators")
        statistics = attention_map.statistics(
            tokens=told["tokens"], positions=positions
        )
        evidence = role_evidence(attention_map, statistics, **told, aligned=aligned)
        return jax.tree.map(lambda x: x.sum(0), evidence)

    at = model_runs.by_kind(summed, model, params, example)
    return list(model_runs.look(model, params, example, at)[1].values())


def role_evidence(
    attention_map: attention.AttentionMap,
    statistics: attention.Statistics,
    kind: str = "",
    *,
    tokens: Array | np.ndarray | None = None,
    lengths: Array | np.ndarray | None = None,
    pictures: Array | np.ndarray | None = None,
    aligned: Array | np.ndarray | None = None,
) -> dict[str, Array]:
    """Computes the evidence for roles of a map's heads, to be summed over examples.

    Args:
      attention_map: A map of N examples in total.
      statistics: `attention_map.statistics(tokens=..., positions=separators)`.
      kind: The kind of its layer.
      tokens: `[B..., T]`, at the queries, if known.
      lengths: `[N]`, numbers of valid keys. Defaults to all keys.
      pictures: `[B..., S]` booleans, keys that are image tokens.
      aligned: Booleans `[N, T, S]`, where rows of cross-attention should look.

    Returns:
      By the names of `SCORES`: `[N, H, 2]`, the score and its divisor, which is 0 for
      an example that does not count; or, for shares of the most frequent offset or sum
      of positions, `[N, H, 258]` counts, the last one of all others.

    Example:
      >>> attention_map = model.apply(params, None, tokens, is_training=False).maps[1]
      >>> statistics = attention_map.statistics(tokens=tokens)
      >>> found = mh.heads.role_evidence(attention_map, statistics, tokens=tokens)
      >>> score, count = found["induction"].sum(0).T
      >>> np.asarray(score / count).round(2)  # [H]
      array([1.  , 0.14], dtype=float32)
    """
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape
    lines = math.prod(batch_shape), num_heads
    weights, places = (x.reshape(*lines, num_queries) for x in attention_map.top(1))
    seen = weights > 0  # not fully masked
    rows = jnp.arange(num_queries)[None, None]
    # The mean entropy of equal weights on unmasked keys, of queries that have a key.
    weighting, origin = attention_map.weighting, attention_map.weighting.origin
    keys = weighting.mask.key_counts(num_queries, num_keys, origin)
    keys = tiles.lifted(keys, len(batch_shape) + 2)
    most = jnp.log(jnp.maximum(keys, 1)).sum(-1) / jnp.maximum((keys > 0).sum(-1), 1)
    scores = {
        "first_token": statistics.first_token,
        "separator": statistics.chosen_positions,
        "relative_entropy": statistics.values["entropy"] / jnp.maximum(most, 1e-9),
    }
    if kind == "cross":
        scores["monotonic"] = _correlations(rows, places, seen)
    else:
        scores |= {
            "previous_token": statistics.previous_token,
            "next_token": statistics.next_token,
            "own_position": statistics.own_position,
            "induction": statistics.after_same_token,
        }
    shares = dict.fromkeys(scores, seen.any(-1))
    if tokens is not None:
        tokens = tokens.reshape(lines[0], num_queries)
        repeated = _repeated(tokens, seen.any(1))[:, None]
        shares["induction"] = jnp.broadcast_to(repeated, lines)
    result: dict[str, Any] = {
        name: jnp.stack([x.reshape(lines), shares[name]], -1)
        for name, x in scores.items()
        if x is not None
    }
    if pictures is not None and kind != "cross":
        result["on_image"] = _on_image(attention_map, pictures).reshape(*lines, 2)
    if kind == "cross" and aligned is not None:
        right = alignment.shares(jnp.where(seen, places, -1), aligned)
        result |= alignment.evidence({"aligned": right})
    last = num_keys if lengths is None else jnp.asarray(lengths)[:, None, None]
    return result | {
        "positional": _counts(rows + (origin.query - origin.key) - places, seen),
        "anti_diagonal": _counts(rows + places - (last - 1), seen),
    }


def _on_image(
    attention_map: attention.AttentionMap, pictures: Array | np.ndarray
) -> Array:
    """Averages the share of words that see one, `[B..., H, 2]` with whether some do."""
    pictures = jnp.asarray(pictures)[..., None]
    on = attention_map.apply(1.0 * pictures[..., None])[..., 0]  # [B..., T, H]
    sees = (on > 0) & ~pictures  # a masked weight is 0
    share = (on * sees).sum(-2) / jnp.maximum(sees.sum(-2), 1)
    return jnp.stack([share, sees.any(-2)], -1)


def _counts(values: Array, seen: Array) -> Array:
    """Counts -128 to 128 among seen values, and all others."""
    # By comparisons, so that examples on several devices are counted where they are.
    offsets = jnp.arange(-_FARTHEST, _FARTHEST + 1).reshape(*(1,) * values.ndim, -1)
    is_there = (values[..., None] == offsets) & seen[..., None]
    counts = is_there.sum(-2, dtype=jnp.float32)
    others = seen.sum(-1, dtype=jnp.float32) - counts.sum(-1)
    return jnp.concatenate([counts, others[..., None]], -1)


def _repeated(tokens: Any, counted: Array) -> Array:
    """Computes the share `[B]` of counted queries whose token has occurred before."""
    # A stable sort puts equal tokens next to each other, in the order of their
    # positions: all but the first of a group have occurred before. A second sort
    # restores the order.
    places = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, tokens.ndim - 1)
    in_order, places = jax.lax.sort((tokens, places), num_keys=1, is_stable=True)
    same = jnp.pad(in_order[:, 1:] == in_order[:, :-1], ((0, 0), (1, 0)))
    _, again = jax.lax.sort((places, same), num_keys=1)
    return (again & counted).sum(-1) / jnp.maximum(counted.sum(-1), 1)


def _correlations(rows: Array, places: Array, seen: Array) -> Array:
    """Correlates positions of seen queries with positions of their keys, `[B, H]`.

    The correlation is 0 if all keys or all queries are at one position.
    """
    count = jnp.maximum(seen.sum(-1, keepdims=True), 1)

    def centered(x: Array) -> Array:
        mean = jnp.where(seen, x, 0).sum(-1, keepdims=True) / count
        return jnp.where(seen, x - mean, 0)

    x, y = centered(rows), centered(places)
    squares = (x**2).sum(-1) * (y**2).sum(-1)
    return (x * y).sum(-1) / jnp.sqrt(jnp.where(squares > 0, squares, jnp.inf))


def roles_of_evidence(
    evidence: Sequence[Mapping[str, np.ndarray]],
    *,
    columns: Sequence[Sequence[int]] | None = None,
    kinds: Sequence[str] = (),
) -> Heads:
    """Finds roles from sums over examples of `role_evidence`, `[H, ...]` per layer.

    `columns` has, for each layer, the columns of its heads in the result. By default
    they are in order.

    Example:
      >>> def evidence(each):
      ...     statistics = each.statistics(tokens=tokens)
      ...     found = mh.heads.role_evidence(each, statistics, tokens=tokens)
      ...     return jax.tree.map(lambda x: x.sum(0), found)  # over examples
      >>> sums = [evidence(attention_map) for attention_map in subject.maps(tokens)]
      >>> mh.heads.roles_of_evidence(sums)["role"].names.tolist()
      [['previous_token', 'no_clear_role'], ['induction', 'no_clear_role']]
    """
    if columns is None:
        columns = [range(len(sums["positional"])) for sums in evidence]
    shape = len(evidence), 1 + max((h for row in columns for h in row), default=-1)
    names, deciding = np.full(shape, "", dtype=object), np.full(shape, np.nan)
    values = {name: np.full(shape, np.nan) for name in [*SCORES, OFFSET]}
    for i, (sums, places) in enumerate(zip(evidence, columns, strict=True)):
        scores = _scores(sums)
        offsets = sums["positional"][:, :-1].argmax(-1) - _FARTHEST
        for name, x in (*scores.items(), (OFFSET, offsets)):
            values[name][i, list(places)] = x
        for h, place in enumerate(places):
            of_head = {name: x[h] for name, x in scores.items()}
            names[i, place] = name = role_of(of_head)
            if name != NO_CLEAR_ROLE:
                deciding[i, place] = of_head[ROLES[name].score or name]
    told = {name: ("", label) for name, label in SCORES.items()}
    told[OFFSET] = "positions", "most frequent offset of a query's key"
    role = Column(deciding, "score", "score that decides the role", names=names)
    measured = {x: y for x, y in values.items() if not np.isnan(y).all()}
    entries = {ROLE: role} | {x: Column(y, *told[x]) for x, y in measured.items()}
    meanings = {
        name: f"at least {role.threshold:g} of: {role.label}"
        for name, role in ROLES.items()
    }
    meanings[NO_CLEAR_ROLE] = "none of the roles"
    notes = (f"role {x:<{_LONGEST}}  {y}" for x, y in meanings.items() if x in names)
    return Heads.of("Roles of heads", entries, tuple(kinds), notes=tuple(notes))


def _scores(sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes the scores of the heads of a layer, `[H]`, from sums of evidence."""
    scores = {
        name: x[:, 0] / np.maximum(x[:, 1], 1e-9)
        if x.shape[-1] == 2
        else x[:, :-1].max(-1) / np.maximum(x.sum(-1), 1)
        for name, x in sums.items()
    }
    if "aligned" in scores:  # NaN if nothing is known
        has_aligned = sums["aligned"][:, 1] > 0
        scores["aligned"] = np.where(has_aligned, scores["aligned"], np.nan)
    if "monotonic" in scores:  # or decreasing, as long as all examples are
        scores["monotonic"] = np.abs(scores["monotonic"])
    return scores
