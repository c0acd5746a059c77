"""Why a head looks where it does: its scores and outputs, split into components.

The residual stream is a sum of components: the embedding of tokens, positions, earlier
heads, earlier feed-forward parts, biases. With the factors of norms held constant
(those of queries and keys too) a score is a sum over pairs of components, one at the
query and one at the key; `components` computes them, using only sites.

B batch, T query positions, S key positions, P attention parts, H heads of a part, K
query/key and V value size per head, R queries, N examples, M components.

Source: Elhage et al. 2021, "Path expansion of attention scores QK circuit",
https://transformer-circuits.pub/2021/framework/index.html.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.core.attention import scores
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.lab.heads import circuits, components, running
from mha_haiku.lab.heads.components import Component, Held, Map
from mha_haiku.lab.heads.sums import Answer, Cells, Pairs, Reads, Terms
from mha_haiku.training import tasks

Array = jax.Array

__all__ = [
    "HELD",
    "Answer",
    "Cells",
    "Pairs",
    "Reads",
    "Terms",
    "cells",
    "pairs",
    "reads",
    "written",
]

HELD = (
    "Held: the factors of norms, of queries and keys too. Scores are those before a "
    "soft cap; rotary positions are in each pair."
)
MOST_SPLIT = 8  # with sources=True, the heads in this number of terms are split


def pairs(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    layer: int,
    head: int,
    query: int,
    key: int | None = None,
    *,
    sources: bool | Sequence[tuple[int, int]] = False,
) -> Pairs:
    """Splits the score of a query and a key into a sum over pairs of components.

    It takes 2 K backward passes through linear maps; memory does not grow with T S.

    Args:
      model: A model from `models.build` or `interop.load`, or any function of the same
        arguments with the required sites.
      params: Its parameters.
      example: One example, B = 1.
      layer: The attention part.
      head: The index of the head.
      query: The position of the query.
      key: The position of the key. Defaults to the key with the largest weight.
      sources: The earlier heads (part, head) to split by the position that they read;
        True for those in the largest terms.

    Raises:
      ValueError: If there is no such place, the query does not see the key, the score
        is not a scaled product of queries and keys, or the model is not linear with the
        factors of its norms held.
    """
    known = _known(model, params, example)
    _, _, num_queries, num_keys = known.of(layer, head)
    query = _position("query", query, num_queries)
    key = -1 if key is None else _position("key", key, num_keys)
    for place in () if isinstance(sources, bool) else sources:
        known.of(*place)
    program = _cell(model, splits=bool(sources))
    found = _run(program, params, example, layer, head, query, key)
    # In the order of `components.Cells`.
    place, score, bias, scale, weight = map(float, found["cell"])
    key = int(place)
    if not np.isfinite(score):
        raise ValueError(f"query {query} does not see key {key}: there is no score.")
    sides = [_with_rest(side["parts"], side["whole"]) for side in found["sides"]]
    if sources is True:
        largest = np.argsort(-np.abs(sides[0] @ sides[1].T), axis=None)[:MOST_SPLIT]
        chosen = np.concatenate(np.divmod(largest, len(sides[1]))).tolist()
        sources = [known.components[m][1:3] for m in chosen]
    (query_labels, query_parts), (key_labels, key_parts) = (
        _split(known.components, parts, side["splits"], set(map(tuple, sources or ())))
        for side, parts in zip(found["sides"], sides, strict=True)
    )
    query_parts = query_parts * scale
    return Pairs(
        (layer, head, query, key),
        f"Layer {layer}, head {head}, query {query}, key {key}: score "
        f"{score:.4g}, weight {weight:.3g}",
        (query_labels, key_labels),
        query_parts @ key_parts.T,
        score,
        (query_parts, key_parts),
        bias,
        weight,
    )


def cells(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    queries: Sequence[int] | None = None,
    key: int | None = None,
    *,
    count: int = 5,
) -> Cells:
    """Finds the largest pairs of every head at once, for R queries.

    It takes M passes through linear maps, and memory of R M D numbers per part. The
    model and errors are as for `pairs`. A key of -n is, for each head and query, the
    one with the n-th largest weight, by default -1; `queries` defaults to all. `count`
    is the number of pairs per cell.
    """
    known = _known(model, params, example)
    longest, most_keys = (max(x[i] for x in known.shapes) for i in (2, 3))
    key = -1 if key is None else key
    checks.integer_in("key", key, -most_keys, most_keys - 1)
    checks.positive_integer("count", count)
    queries = range(longest) if queries is None else queries
    places = np.array([_position("queries", t, longest) for t in queries], np.int32)
    program = _largest(model, count=min(count, len(known.components) ** 2))
    found = _run(program, params, example, places, key)
    parts = [part for part, shape in enumerate(known.shapes) if shape[1]]
    by_part = zip(*found["cells"], strict=True)
    fields = (dict(zip(parts, arrays, strict=True)) for arrays in by_part)
    return Cells(known.components, places, *fields)


def written(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    layer: int,
    head: int,
    query: int,
    *,
    answer: int | None = None,
) -> Terms:
    """Splits a head's output for a query by source position and component.

    The head's weights and the factors of norms are held; other arguments and errors are
    as for `pairs`. With `answer`, a class, terms are the head's direct contribution to
    its logit at the query, before a soft cap. By default terms are along the head's
    output, and add up to its length.
    """
    known = _known(model, params, example)
    _, _, num_queries, num_keys = known.of(layer, head)
    query = _position("query", query, num_queries)
    is_set = model.config is not None and model.config.family == "set_classifier"
    if answer is not None and not is_set:
        running.check_classes("answer", model, params, example, answer)
    unit, answer = ("output", -1) if answer is None else ("logit", answer)
    program = _values(model, is_logit=unit == "logit")
    found = _run(program, params, example, layer, head, query, answer)
    terms = _with_rest(found["terms"], found["whole"]).T[:num_keys]
    total = float(found["total"])
    title = f"Layer {layer}, head {head}, query {query}: {unit} {total:.4g}"
    sides = tuple(range(len(terms))), known.components
    return Terms((layer, head, query), title, sides, terms, total)


def reads(model: models.Model, params: Any, batches: Iterable[tasks.Example]) -> Reads:
    """Computes what all heads read by queries, keys and values, over a data set.

    Queries that see nothing, and padding, do not count. It takes a pass over the maps
    and three backward passes through linear maps per head. `batches` are examples;
    other arguments and errors are as for `pairs`.
    """
    results = running.over(batches, lambda batch: _sums(model)(params, batch))
    for result in results:
        components.check_linear(result["curvature"])
    known, config = _known(model, params, next(iter(batches))), model.config
    by, norms, counts = (
        jax.tree.map(lambda *x: np.concatenate(x, dtype=np.float64), *sums)
        for sums in zip(*(result["sums"] for result in results), strict=True)
    )
    composition = {}
    if config is not None and not config.attention.differential:
        composition = {kind: circuits.compositions(model, params, kind) for kind in by}
    return Reads(known.components, by, norms, counts, composition)


# --- Programs


@running.compiled
def _cell(model, params, example, layer, head, query, key, *, splits):
    held = Held(model, params, example).linearized()
    numbers = [
        jnp.stack(
            [x[head, 0] * 1.0 for x in components.Cells.of(map_, query[None], key)]
        )
        for map_ in held.maps.values()
    ]
    is_own = np.array(list(held.part.values()))[:, None] == layer
    cell = components.Cells(*jnp.where(is_own, jnp.stack(numbers), 0).sum(0))
    ends = ("query", query), ("key", cell.keys.astype(int))
    sides = [_side(held, layer, head, *end, splits) for end in ends]
    return {"cell": cell, "sides": sides, "curvature": held.curvature()}


def _side(held, layer, head, name, at, splits):
    """Computes a query or key, its parts, and the arrays that split it by source."""
    wholes = {end: getattr(held.ends[end], name) for end in held.maps}
    rows = jnp.stack([at, jnp.maximum(at - 1, 0)])  # smeared keys read two positions
    first = jnp.stack([True, at > 0])[:, None, None]

    def chosen(end, *places):
        whole = wholes[end]
        return components.one(whole.shape, *places) * (held.part[end] == layer)

    def of_channel(channel):
        at_channel = {end: {name: chosen(end, at, head, channel)} for end in wholes}
        gradients = held.pull(at_channel)
        kept = [gradients[name][0, rows] * first for name in held.heads if splits]
        return held.parts(gradients)[:, 0].sum(-1), kept

    size = max(x.shape[-1] for x in wholes.values())
    parts, gradients = jax.lax.map(of_channel, jnp.arange(size))
    whole = sum(
        jnp.where(held.part[end] == layer, x[0, at, head], 0)
        for end, x in wholes.items()
    )
    # The factors of the gradients of heads: weights, gates and values.
    splits = {
        held.part[name]: (
            gradients[held.part[name]],
            map_.tile(rows, slice(None))[0],
            jnp.ones(())
            if map_.weighting.gates is None
            else map_.weighting.gates[0, rows],
            Map.of(map_).value[0],
        )
        for name, map_ in held.maps.items()
        if splits
    }
    return {"parts": parts.T, "whole": whole, "splits": splits}


@running.compiled
def _largest(model, params, example, rows, key, *, count):
    held = Held(model, params, example).linearized()
    numbers = {n: components.Cells.of(map_, rows, key) for n, map_ in held.maps.items()}

    def chosen(ends):
        return {
            name: (
                components.at_rows(ends[name].query, rows),
                components.at_keys(ends[name].key, cell.keys),
            )
            for name, cell in numbers.items()
        }

    numbered = jnp.arange(len(held.components) - 1)
    parts = jax.lax.map(lambda m: chosen(held.push(held.single(m))), numbered)
    wholes = chosen(held.ends)

    def largest(given):
        query, key, scale = given
        terms = jnp.matmul(query * scale, key.T, precision="highest")
        _, best = jax.lax.top_k(jnp.abs(terms).ravel(), count)
        return jnp.stack(jnp.divmod(best, len(key)), -1), terms.ravel()[best]

    sides, size = ([], []), max(map_.key.shape[-1] for map_ in held.maps.values())
    for name in numbers:
        for side, x, whole in zip(sides, parts[name], wholes[name], strict=True):
            x = jnp.concatenate([x, (whole - x.sum(0))[None]])  # [M, H, R, K]
            x = jnp.moveaxis(x, 0, 2).reshape(-1, len(x), x.shape[-1])
            side.append(jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[-1]))))
    scales = [cell.scales.ravel() for cell in numbers.values()]
    given = *map(jnp.concatenate, sides), jnp.concatenate(scales)
    # A single loop over the cells of all parts, which compiles once.
    best, found, first = jax.lax.map(largest, given), [], 0
    for cell in numbers.values():
        cells_ = slice(first, first + cell.scales.size)
        shaped = (x[cells_].reshape(*cell.scales.shape, *x.shape[1:]) for x in best)
        found.append((cell.keys, cell.scores, cell.positions, cell.weights, *shaped))
        first = cells_.stop
    return {"cells": found, "curvature": held.curvature()}


@running.compiled
def _values(model, params, example, layer, head, query, answer, *, is_logit):
    def both(*run):
        return components.read_maps(*run) | components.read_logits(*run)

    held = Held(model, params, example, both if is_logit else None).linearized()
    if is_logit:
        shape = held.ends["logits"].shape
        places = (query, answer) if len(shape) == 3 else (answer,)
        if model.config is not None and model.config.family == "set_classifier":
            places = (query,)  # one logit per element
        gradients = held.pull({"logits": components.one(shape, *places)})
    total, cotangents = 0.0, {}
    for name, map_ in held.maps.items():
        output = held.sources[name.removesuffix("map") + "heads"][0, query, head]
        if is_logit:
            along = gradients[name.removesuffix("map") + "heads"][0, query, head]
        else:
            along = output / jnp.maximum(jnp.linalg.norm(output), 1e-30)
        is_own = held.part[name] == layer
        total += is_own * (output * along).sum()
        if map_.weighting.gates is not None:
            along = along * map_.weighting.gates[0, query, head]
        weights = map_.tile(query[None], slice(None))[0, :, 0]
        weights = weights * components.one(weights.shape[:1], head)[:, None] * is_own
        cotangents[name] = {"value": jnp.einsum("hs,v->shv", weights, along)[None]}
    terms = held.parts(held.pull(cotangents))[:, 0]  # [M, S]
    whole = jnp.zeros(terms.shape[1:])
    for name, cotangent in cotangents.items():
        of_part = (held.ends[name].value * cotangent["value"]).sum((0, 2, 3))
        whole += jnp.pad(of_part, (0, len(whole) - len(of_part)))
    result = {"terms": terms, "whole": whole, "total": total}
    return result | {"curvature": held.curvature()}


@running.compiled
def _sums(model, params, example):
    held = Held(model, params, example).linearized()
    places, targets, norms, counts = [], {}, [], []
    for name, map_ in held.maps.items():
        part = held.part[name]
        output = held.sources[name.removesuffix("map") + "heads"]
        targets[name], valid = _targets(map_, output, example, running.kind_of(name))
        norms.append(jnp.square(output * valid).sum((1, 3)))
        counts.append(valid[..., 0, 0].sum(1))
        heads = range(map_.shape[-3])
        places += [(part, h, j) for j in range(len(Map._fields)) for h in heads]

    def of_head(given):
        part, head, kind = given
        cotangents, whole = {}, 0.0
        for name, target in targets.items():
            is_head = components.one(target.query.shape[-2:-1], head)
            is_head = is_head[None, None, :, None] * (part == held.part[name])
            chosen = Map(*(x * is_head * (kind == j) for j, x in enumerate(target)))
            products = jax.tree.map(
                lambda x, y: (x * y).sum((1, 2, 3)), chosen, held.ends[name]
            )
            cotangents[name], whole = chosen._asdict(), whole + sum(products)
        parts = held.parts(held.pull(cotangents)).sum(-1)  # [M, B]
        return jnp.concatenate([parts, (whole - parts.sum(0))[None]])

    places = np.array(places)
    found = jax.lax.map(of_head, tuple(map(jnp.asarray, places.T)))  # [..., M, B]
    num_heads = max(map_.shape[-3] for map_ in held.maps.values())
    shape = len(example.inputs), len(held.shapes), num_heads
    by = {}
    for j, kind in enumerate(circuits.KINDS):
        parts, heads, _ = places[places[:, 2] == j].T
        values = jnp.moveaxis(found[places[:, 2] == j], -1, 0)
        by[kind] = jnp.full((*shape, values.shape[-1]), jnp.nan)
        by[kind] = by[kind].at[:, parts, heads].set(values)
    sums = by, jnp.zeros(shape).at[:, parts, heads].set(jnp.concatenate(norms, 1))
    counts = (
        jnp.zeros(shape[:2]).at[:, list(held.part.values())].set(jnp.stack(counts, 1))
    )
    return {"sums": (*sums, counts), "curvature": held.curvature()}


def _targets(map_, output, example, kind) -> tuple[Map, Array]:
    """Computes the factors of queries, keys and values, and the valid queries."""
    query, key, _ = Map.of(map_)
    of_queries, of_keys = components.scales(map_)
    plain = map_.weighting._replace(
        bias=None, score=scores.dot_product(0.0), normalizer=None, gates=None
    )

    def with_sums(logs):  # the map with equal weights on all visible keys
        return dataclasses.replace(map_, weighting=plain, log_sum=LogSum.rounded(logs))

    counts = with_sums(jnp.zeros_like(map_.logsumexp)).row_sums()
    uniform = with_sums(jnp.log(counts))
    by_query = [jnp.moveaxis(x, -1, -2)[..., None] for x in (map_.row_sums(), counts)]
    sums = by_query[0]  # with a sink, both maps have the row sum of the map
    valid = running.valid(map_.shape[-2], example, kind)[..., None, None]
    valid = valid & (by_query[1] > 0)
    query, key = query * of_queries * valid, key * of_keys
    at_query = map_.apply(key) - sums * uniform.apply(key)
    at_key = map_.apply_transposed(query) - uniform.apply_transposed(sums * query)
    output, gates = output * valid, map_.weighting.gates
    at_value = map_.apply_transposed(output if gates is None else output * gates)
    return Map(at_query * of_queries * valid, at_key * of_keys, at_value), valid


# --- On the host


class _Known(NamedTuple):
    """The facts about a model that need no run."""

    components: tuple[Component, ...]
    shapes: list[tuple[int, ...]]  # of the maps of all parts

    def of(self, layer: int, head: int) -> tuple[int, ...]:
        """Returns the shape of a head's map; raises ValueError without such a head."""
        checks.integer_in("layer", layer, 0, len(self.shapes) - 1)
        checks.integer_in("head", head, 0, self.shapes[layer][1] - 1)
        return self.shapes[layer]


def _known(model, params, example) -> _Known:
    found = []

    def trace(params, example):
        held = Held(*running.compact(model, params), example)
        found.append(_Known(held.components, held.shapes))

    jax.eval_shape(trace, params, example)
    return found[0]


def _with_rest(parts, whole) -> np.ndarray:
    """Appends the rest of a whole to its parts `[M - 1, ...]`, in float64."""
    parts, whole = np.asarray(parts, np.float64), np.asarray(whole, np.float64)
    return np.concatenate([parts, (whole - parts.sum(0))[None]])


def _run(program, params, example, *numbers):
    result = running.fetched(program(params, example, *map(np.int32, numbers)))
    components.check_linear(result["curvature"])
    return result


def _position(name, value, length) -> int:
    checks.integer_in(name, value, -length, length - 1)
    return value % length


def _split(known, parts, splits, chosen) -> tuple[tuple[Component, ...], np.ndarray]:
    """Splits the components of chosen heads, and their parts, by source position."""
    result = []
    for head, part in zip(known, parts, strict=True):
        if head.kind != "head" or head[1:3] not in chosen:
            result.append((head, part))
            continue
        of_head = (np.asarray(x, np.float64) for x in splits[head.layer])
        gradient, weights, gates, value = of_head
        if value.shape[-1] != gradient.shape[-1]:
            raise ValueError(f"sources must be heads with known values, got {head}.")
        factors = (x[..., head.head, :] for x in (gradient * gates, value))
        by_source = np.einsum("krv,sv,rs->sk", *factors, weights[head.head])
        result += [(head._replace(source=s), x) for s, x in enumerate(by_source)]
    labels, parts = zip(*result, strict=True)
    return labels, np.stack(parts)
