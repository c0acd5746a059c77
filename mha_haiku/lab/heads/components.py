"""A model as a linear map of what its heads and feed-forward parts write.

With the factors of norms held constant (those of queries and keys too), queries, keys
and values are linear in the components of the residual stream. This uses only sites:
the model runs again on single components, with the same factors, and a run with all
components at zero checks that this makes it linear. The functions here are traced;
`why` asks and answers on the host.

B batch, T query positions, S key positions, H heads of a part, K query/key and V value
size per head, R queries, P attention parts, M components.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, models
from mha_haiku.core.attention import scores
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.lab.heads import circuits, edits, model_runs
from mha_haiku.training import tasks

Array = jax.Array

LINEAR = 1e-3  # the tolerance for rounding of a linear model
_EMBEDDINGS = ("embedding", "decoder_embedding")
_SOURCES = (*_EMBEDDINGS, "*/heads", "*/feed_forward/output")


class Component(NamedTuple):
    """A term of the residual stream.

    Attributes:
      kind: "token", "position", "head", "feed-forward" or "biases" ("decoder token" and
        "decoder position" if there is a decoder); in functions also "embedding", not
        split, or "rest", which is everything without a site.
      layer: The attention part of a head, or the layer of a feed-forward part.
      head: The index of a head.
      source: The position that the head reads, if it is split by source.
    """

    kind: str
    layer: int = -1
    head: int = -1
    source: int = -1

    def __str__(self) -> str:
        if self.kind == "head":
            at = f" at position {self.source}" if self.source >= 0 else ""
            return f"layer {self.layer}, head {self.head}{at}"
        return f"{self.kind} {self.layer}" if self.layer >= 0 else self.kind


class Projections(NamedTuple):
    """The queries, keys and values of a map, with a key and a value per query head."""

    query: Array  # [B, T, H, K]
    key: Array  # [B, S, H, K]
    value: Array  # [B, S, H, V]; V is 0 if values are not known

    @classmethod
    def of(cls, map_: attention.AttentionMap) -> "Projections":
        """Takes the queries, keys and values of all heads from an attention map."""
        value = map_.key[..., :0] if map_.value is None else map_.value
        both = (scores.repeat_heads(x, map_.shape[-3]) for x in (map_.key, value))
        return cls(map_.query, *both)


class Held:
    """A run, and its queries, keys and values as linear functions of components.

    Attributes:
      components: M components; the last one is the remainder, "biases" or "rest".
      maps: The attention maps that have heads, by name.
      part: The attention part of each map.
      shapes: The shapes of the maps of all parts, including those without heads.
      sources: The outputs of components, by the name of their site.
      heads: The names of the sites of heads, one per part.
    """

    def __init__(
        self,
        model: models.Model,
        params: Any,
        example: tasks.Example,
        read: Callable[..., Any] | None = None,
    ):
        """Runs the model; `read` reads the wanted values, like `read_maps`."""
        model = model_runs.shown(model)
        self._given, self._read = (model, params, example), read or read_maps
        at = [*map(_tokens_of, _EMBEDDINGS), *_SOURCES, "*/factor", "*/map"]
        _, values = model_runs.look(*self._given, at, strict=False)
        maps = [name for name in values if _last(name) == "map"]
        if not maps:
            raise ValueError("model must have visible attention: it has no site */map.")
        self.shapes = [values[name].shape for name in maps]
        self.part = {n: i for i, n in enumerate(maps) if values[n].shape[-3]}
        self.maps = {name: values[name] for name in self.part}
        self._embeddings = [name for name in values if _last(name) in _EMBEDDINGS]
        self.heads = [name for name in values if _last(name) == "heads"]
        self._units = [name for name in values if name.endswith("feed_forward/output")]
        others = [name for name in values if name in {*self.heads, *self._units}]
        self.sources = {name: values[name] for name in (*self._embeddings, *others)}
        self._factors = {n: x for n, x in values.items() if n.endswith("/factor")}
        self.components: tuple[Component, ...] = ()
        self._stacks = {}  # the components of a site: [B, T, m, X]
        for name, value in self.sources.items():
            of_site, self._stacks[name] = self._components(name, value, values)
            self.components += of_site
        is_whole = "embedding" in map(_last, self._embeddings)
        self.components += (Component("biases" if is_whole else "rest"),)

    def linearized(self) -> "Held":
        """Linearizes the run: sets `ends` (the wanted values), `push` and `pull`."""
        self._of = jax.jit(functools.partial(self._run, read=self._read))
        # From the values of sources to their contributions to `ends`.
        self.ends, self.push = jax.linearize(self._of, self.sources)
        self._pull = jax.linear_transpose(self.push, self.sources)
        return self

    def curvature(self) -> Array:
        """Computes how far components add up to something else than the model's values.

        The result is relative to the largest value.
        """
        start = self._of(jax.tree.map(jnp.zeros_like, self.sources))
        values = self._read(*self._given)  # of the run itself, in which nothing is set

        def share(end: Array, first: Array, change: Array) -> Array:
            far = jnp.abs(end - first - change).max(initial=0)
            return far / jnp.abs(end).max(initial=1e-30)

        shares = jax.tree.map(share, values, start, self.push(self.sources))
        return jnp.stack(jax.tree.leaves(shares)).max()

    def pull(self, cotangents: dict[str, Any]) -> dict[str, Array]:
        """Computes gradients by `sources` of the sum of products with cotangents.

        Cotangents are `Projections._asdict()` by the name of a map, without those that
        are 0, or logits.
        """
        every = jax.tree.map(jnp.zeros_like, self.ends)
        for name, x in cotangents.items():
            x = every[name]._replace(**x) if isinstance(x, dict) else x
            every[name] = jax.tree.map(lambda x, y: x.astype(y.dtype), x, every[name])
        return self._pull(every)[0]

    def parts(self, gradients: dict[str, Array]) -> Array:
        """Multiplies components by gradients: terms `[M - 1, B, L]` by position.

        L is the largest number of positions of a component.
        """
        terms = []
        for name, stack in self._stacks.items():
            gradient = gradients[name]
            gradient = gradient if name in self.heads else gradient[..., None, :]
            terms.append(jnp.moveaxis((stack * gradient).sum(-1), -1, 0))
        longest = max(x.shape[-1] for x in terms)
        pads = ([(0, 0), (0, 0), (0, longest - x.shape[-1])] for x in terms)
        return jnp.concatenate(list(map(jnp.pad, terms, pads)))

    def single(self, m: Array) -> dict[str, Array]:
        """Computes the values of the sites with only component m."""
        result, first = {}, 0
        for name, stack in self._stacks.items():
            stop = first + stack.shape[-2]
            alone = stack * (jnp.arange(first, stop) == m).reshape(1, 1, -1, 1)
            result[name] = alone if name in self.heads else alone.sum(-2)
            first = stop
        return result

    def _run(self, components: dict[str, Array], read: Callable[..., Any]) -> Any:
        """Runs the model with given values of component sites, and reads the result."""
        values = components | self._factors
        changes = edits.on_parts(values, values.values(), lambda _, value: value)
        model, params, example = self._given
        edited = model._replace(apply=model_runs.editing(model.apply, changes, example))
        return read(edited, params, example)

    def _components(
        self, name: str, value: Array, values: dict[str, Any]
    ) -> tuple[tuple[Component, ...], Array]:
        if name in self.heads:
            part, count = self.heads.index(name), value.shape[-2]
            return tuple(Component("head", part, h) for h in range(count)), value
        if name in self._units:
            component = Component("feed-forward", self._units.index(name))
            return (component,), value[..., None, :]
        side, tokens = _last(name).removesuffix("embedding"), _tokens_of(name)
        side = side.replace("_", " ")
        if tokens not in values:
            return (Component(f"{side}embedding"),), value[..., None, :]

        def embed(x: Array) -> Array:
            read = lambda *arguments: model_runs.look(*arguments, at=[(name,)])[1][name]  # noqa: E731
            return self._run({tokens: x}, read)

        of_tokens = jax.jvp(embed, (values[tokens],), (values[tokens],))[1]
        both = Component(f"{side}token"), Component(f"{side}position")
        return both, jnp.stack([of_tokens, value - of_tokens], -2)


def is_set(model: models.Model) -> bool:
    """Checks whether a model has one logit for each element of a set."""
    return model.config is not None and model.config.family == "set_classifier"


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _tokens_of(name: str) -> str:
    return name.replace("embedding", "token_embedding")


def check_linear(curvature: Any) -> None:
    """Raises ValueError if a model was not linear, by `Held.curvature` of its run."""
    far = float(curvature)
    if not far < LINEAR:
        raise ValueError(
            "the model must be linear in what its heads and feed-forward parts write, "
            f"with the factors of norms held, but is {far:.1%} off.\nA norm, embedding "
            'or feed-forward part has no site. Name it: mh.site("factor", x) for the '
            'factor of a norm, mh.site("embedding", x), '
            'mh.site("feed_forward/output", x).'
        )


def read_maps(
    model: models.Model, params: Any, example: tasks.Example
) -> dict[str, Projections]:
    """Reads queries, keys and values of all maps of a run, by name."""
    return dict(model_runs.look(model, params, example, {"*/map": Projections.of})[1])


def scales(map_: attention.AttentionMap) -> tuple[Array, Array]:
    """Computes the factors of queries, `[B, T, H, 1]`, and of keys.

    Raises:
      ValueError: If the score is not a scaled product.
    """
    score, (query, key, _) = map_.weighting.score, Projections.of(map_)
    ones = [jnp.ones((*x.shape[:-1], 1), map_.dtype) for x in (query, key)]
    if isinstance(score, scores.Sigmoid):
        score = scores.DotProduct(score.scale, None)
    if not isinstance(score, scores.DotProduct):
        raise ValueError(
            "the score must be a scaled product of queries and keys, which splits into "
            f"pairs of components, got {type(score).__name__}."
        )
    # Recognized attention, of which only weights are known, has a scale of 0.
    return ones[0] * (score.scale_of(query.shape[-1]) or 1.0), ones[1]


class CellNumbers(NamedTuple):
    """Numbers of cells, `[H, R]`: R queries of an example, with a key per head."""

    keys: Array
    scores: Array  # before a soft cap, with `positions`; -inf if the key is not seen
    positions: Array  # the bias of positions
    scales: Array  # factors of products of queries and keys
    weights: Array

    @classmethod
    def of(cls, map_: attention.AttentionMap, rows: Array, key: Array) -> "CellNumbers":
        """Computes the numbers at a key; -n is the key of the n-th largest weight."""
        num_heads, num_queries, num_keys = map_.shape[-3:]
        shape = num_heads, len(rows), num_keys
        weights = map_.tile(rows, slice(None))[0]

        # Faster to compile than a sort; of any sign.
        def without_largest(_: Array, left: Array) -> Array:
            largest = left.argmax(-1)[..., None] == jnp.arange(num_keys)[None, None]
            return jnp.where(largest, -jnp.inf, left)

        left = jax.lax.fori_loop(0, jnp.maximum(-key - 1, 0), without_largest, weights)
        keys = jnp.where(key < 0, left.argmax(-1), key)

        def at(tile: Array) -> Array:  # [H, R], of [..., R, S]
            tile = jnp.broadcast_to(tile.reshape(-1, *tile.shape[-2:]), shape)
            return jnp.take_along_axis(tile, keys[..., None], -1)[..., 0]

        mask, bias, score, *_ = map_.weighting
        places = map_.checked_origin().at(rows, jnp.arange(num_keys))
        seen = at(mask.aligned_tile(*places)) & (key >= -num_keys)
        seen &= (rows < num_queries)[None] & (keys < num_keys)
        is_recognized = isinstance(score, scores.DotProduct) and score.scale == 0
        positions = jnp.zeros(keys.shape, map_.dtype)
        if bias is not None and not is_recognized:
            positions = at(bias.aligned_tile(*places))
        query, key, _ = Projections.of(map_)
        query, key = at_rows(query, rows), at_keys(key, keys)
        of_queries, of_keys = scales(map_)
        factors = (at_rows(of_queries, rows) * at_keys(of_keys, keys))[..., 0]
        products = (query * key).sum(-1, dtype=map_.dtype) * factors + positions
        products = jnp.where(seen, products, -jnp.inf)
        return cls(keys, products, positions, factors, at(weights))


def at_rows(x: Array, rows: Array) -> Array:
    """Takes the rows `[H, R, K]` out of `[1, T, H, K]`."""
    return jnp.take(x[0], rows, axis=0, mode="clip").swapaxes(0, 1)


def at_keys(x: Array, keys: Array) -> Array:
    """Takes `[H, R, K]` out of `[1, S, H, K]`, at keys `[H, R]`."""
    return jnp.take_along_axis(x[0].swapaxes(0, 1), keys[..., None], 1, mode="clip")


def one(shape: tuple[int, ...], *places: Any) -> Array:
    """Makes an array with 1 at `places` of its last axes, and 0 elsewhere."""
    result = jnp.ones(())
    for size, place in zip(shape[-len(places) :], places, strict=True):
        result = jnp.multiply.outer(result, jnp.arange(size) == place)
    return jnp.broadcast_to(result, shape)


# --- The programs of `why`


@model_runs.compiled
def split_cell(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    layer: Array,
    head: Array,
    query: Array,
    key: Array,
    *,
    splits: bool,
) -> dict[str, Any]:
    """Computes the numbers of a cell, and the parts of its query and key."""
    held = Held(model, params, example).linearized()
    numbers = [
        jnp.stack([x[head, 0] * 1.0 for x in CellNumbers.of(map_, query[None], key)])
        for map_ in held.maps.values()
    ]
    is_own = np.array(list(held.part.values()))[:, None] == layer
    cell = CellNumbers(*jnp.where(is_own, jnp.stack(numbers), 0).sum(0))
    ends = ("query", query), ("key", cell.keys.astype(int))
    sides = [_side(held, layer, head, *end, splits) for end in ends]
    return {"cell": cell, "sides": sides, "curvature": held.curvature()}


def _side(
    held: Held, layer: Array, head: Array, name: str, at: Array, splits: bool
) -> dict[str, Any]:
    """Computes a query or key, its parts, and the arrays that split it by source."""
    wholes = {end: getattr(held.ends[end], name) for end in held.maps}
    rows = jnp.stack([at, jnp.maximum(at - 1, 0)])  # smeared keys read two positions
    first = jnp.stack([True, at > 0])[:, None, None]

    def chosen(end: str, *places: Array) -> Array:
        whole = wholes[end]
        return one(whole.shape, *places) * (held.part[end] == layer)

    def of_channel(channel: Array) -> tuple[Array, list[Array]]:
        at_channel = {end: {name: chosen(end, at, head, channel)} for end in wholes}
        gradients = held.pull(at_channel)
        kept = [gradients[name][0, rows] * first for name in held.heads if splits]
        return held.parts(gradients)[:, 0].sum(-1), kept

    size = max(x.shape[-1] for x in wholes.values())
    parts, gradients = jax.lax.map(of_channel, jnp.arange(size))
    ends = wholes.items()
    whole = sum(jnp.where(held.part[x] == layer, y[0, at, head], 0) for x, y in ends)
    result = {"parts": parts.T, "whole": whole, "splits": {}}
    for name, map_ in held.maps.items() if splits else ():
        # The factors of the gradients of heads: weights, gates and values.
        weights, gates = map_.tile(rows, slice(None))[0], map_.weighting.gates
        gates = jnp.ones(()) if gates is None else gates[0, rows]
        factors = weights, gates, Projections.of(map_).value[0]
        result["splits"][held.part[name]] = (gradients[held.part[name]], *factors)
    return result


@model_runs.compiled
def largest_pairs(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    rows: Array,
    key: Array,
    *,
    count: int,
) -> dict[str, Any]:
    """Computes the numbers of cells of all heads, and their largest pairs of parts."""
    held = Held(model, params, example).linearized()
    numbers = {n: CellNumbers.of(map_, rows, key) for n, map_ in held.maps.items()}

    def chosen(ends: dict[str, Projections]) -> dict[str, tuple[Array, Array]]:
        return {
            name: (at_rows(ends[name].query, rows), at_keys(ends[name].key, cell.keys))
            for name, cell in numbers.items()
        }

    numbered = jnp.arange(len(held.components) - 1)
    parts = jax.lax.map(lambda m: chosen(held.push(held.single(m))), numbered)
    wholes = chosen(held.ends)

    def largest(sides_and_scales: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        query, key, scale = sides_and_scales
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
    sides_and_scales = *map(jnp.concatenate, sides), jnp.concatenate(scales)
    # A single loop over the cells of all parts, which compiles once.
    best, result, first = jax.lax.map(largest, sides_and_scales), [], 0
    for cell in numbers.values():
        cells_ = slice(first, first + cell.scales.size)
        shaped = (x[cells_].reshape(*cell.scales.shape, *x.shape[1:]) for x in best)
        result.append((cell.keys, cell.scores, cell.positions, cell.weights, *shaped))
        first = cells_.stop
    return {"cells": result, "curvature": held.curvature()}


@model_runs.compiled
def split_output(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    layer: Array,
    head: Array,
    query: Array,
    answer: Array,
    *,
    is_logit: bool,
) -> dict[str, Any]:
    """Computes the terms of a head's output, or of its direct share of a logit."""

    def both(*run: Any) -> dict[str, Any]:
        return read_maps(*run) | {"logits": model_runs.run(*run).logits}

    held = Held(model, params, example, both if is_logit else None).linearized()
    if is_logit:
        shape = held.ends["logits"].shape
        places = (query, answer) if len(shape) == 3 else (answer,)
        places = (query,) if is_set(model) else places
        gradients = held.pull({"logits": one(shape, *places)})
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
        weights = weights * one(weights.shape[:1], head)[:, None] * is_own
        cotangents[name] = {"value": jnp.einsum("hs,v->shv", weights, along)[None]}
    terms = held.parts(held.pull(cotangents))[:, 0]  # [M, S]
    whole = jnp.zeros(terms.shape[1:])
    for name, cotangent in cotangents.items():
        of_part = (held.ends[name].value * cotangent["value"]).sum((0, 2, 3))
        whole += jnp.pad(of_part, (0, len(whole) - len(of_part)))
    result = {"terms": terms, "whole": whole, "total": total}
    return result | {"curvature": held.curvature()}


@model_runs.compiled
def sums_read(
    model: models.Model, params: Any, example: tasks.Example
) -> dict[str, Any]:
    """Computes the sums over the queries of an example that `why.Reads` averages."""
    held = Held(model, params, example).linearized()
    places, targets, norms, counts = [], {}, [], []
    for name, map_ in held.maps.items():
        part = held.part[name]
        output = held.sources[name.removesuffix("map") + "heads"]
        kind = model_runs.kind_of(name)
        map_ = model_runs.without_padding(map_, model, example, kind)
        targets[name], valid = _targets(map_, output, example, kind)
        norms.append(jnp.square(output * valid).sum((1, 3)))
        counts.append(valid[..., 0, 0].sum(1))
        heads = range(map_.shape[-3])
        places += [(part, h, j) for j in range(len(Projections._fields)) for h in heads]

    def of_head(place: tuple[Array, Array, Array]) -> Array:
        part, head, kind = place
        cotangents, whole = {}, 0.0
        for name, target in targets.items():
            is_head = one(target.query.shape[-2:-1], head)
            is_head = is_head[None, None, :, None] * (part == held.part[name])
            of_kind = (x * is_head * (kind == j) for j, x in enumerate(target))
            of_kind = Projections(*of_kind)
            ends = zip(of_kind, held.ends[name], strict=True)
            whole += sum((x * y).sum((1, 2, 3)) for x, y in ends)
            cotangents[name] = of_kind._asdict()
        parts = held.parts(held.pull(cotangents)).sum(-1)  # [M, B]
        return jnp.concatenate([parts, (whole - parts.sum(0))[None]])

    places = np.array(places)
    sums = jax.lax.map(of_head, tuple(map(jnp.asarray, places.T)))  # [..., M, B]
    num_heads = max(map_.shape[-3] for map_ in held.maps.values())
    shape = len(example.inputs), len(held.shapes), num_heads
    by = {}
    for j, kind in enumerate(circuits.KINDS):
        parts, heads, _ = places[places[:, 2] == j].T
        values = jnp.moveaxis(sums[places[:, 2] == j], -1, 0)
        by[kind] = jnp.full((*shape, values.shape[-1]), jnp.nan)
        by[kind] = by[kind].at[:, parts, heads].set(values)
    norms = jnp.zeros(shape).at[:, parts, heads].set(jnp.concatenate(norms, 1))
    with_heads = list(held.part.values())
    counts = jnp.zeros(shape[:2]).at[:, with_heads].set(jnp.stack(counts, 1))
    return {"sums": (by, norms, counts), "curvature": held.curvature()}


def _targets(
    map_: attention.AttentionMap, output: Array, example: tasks.Example, kind: str
) -> tuple[Projections, Array]:
    """Computes the factors of queries, keys and values, and the valid queries."""
    query, key, _ = Projections.of(map_)
    of_queries, of_keys = scales(map_)
    plain = map_.weighting._replace(
        bias=None, score=scores.dot_product(0.0), normalizer=None, gates=None
    )

    # The map with equal weights on all visible keys.
    def with_sums(logs: Array) -> attention.AttentionMap:
        return dataclasses.replace(map_, weighting=plain, log_sum=LogSum.rounded(logs))

    counts = with_sums(jnp.zeros_like(map_.logsumexp)).row_sums()
    uniform = with_sums(jnp.log(counts))
    by_query = [jnp.moveaxis(x, -1, -2)[..., None] for x in (map_.row_sums(), counts)]
    sums = by_query[0]  # with a sink, both maps have the row sum of the map
    valid = model_runs.valid(map_.shape[-2], example, kind)[..., None, None]
    valid = valid & (by_query[1] > 0)
    query, key = query * of_queries * valid, key * of_keys
    at_query = map_.apply(key) - sums * uniform.apply(key)
    at_key = map_.apply_transposed(query) - uniform.apply_transposed(sums * query)
    output, gates = output * valid, map_.weighting.gates
    at_value = map_.apply_transposed(output if gates is None else output * gates)
    return Projections(at_query * of_queries * valid, at_key * of_keys, at_value), valid
