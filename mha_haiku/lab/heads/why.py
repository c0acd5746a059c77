"""Why a head looks there: its scores, and what it writes, as sums over components.

The residual stream is a sum of components: the embedding of tokens, positions, each
earlier head, each earlier feed-forward part, biases. With the factors of norms held
(those of queries and keys too), queries, keys and values are linear in components, and
so a score is a sum over pairs of them, one at the query and one at the key. All comes
from sites: the model runs once more on single components, with the factors as they
were. Whether that was enough is checked by a run with all components at zero.

B batch, T query positions, S key positions, P attention parts, H heads of a part, K
query/key and V value size per head, N examples, M components.

Source: Elhage et al. 2021, "Path expansion of attention scores QK circuit",
https://transformer-circuits.pub/2021/framework/index.html.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, checks, display, models, sites
from mha_haiku.core.attention import other_scores, scores
from mha_haiku.lab.heads import circuits, edits, running
from mha_haiku.training import tasks

Array = jax.Array

HELD = (
    "Held: the factors of norms, of queries and keys too. Scores are those before a "
    "soft cap; rotary positions are in each pair."
)
MOST_SPLIT = 8  # terms of which the heads are split where sources=True
_LINEAR = 1e-3  # how far from linear a model may be, by rounding
_SOURCES = ("token_embedding", "decoder_token_embedding", "embedding")
_SOURCES += ("decoder_embedding", "*/heads", "*/feed_forward/output")


class Component(NamedTuple):
    """A term of the residual stream.

    Attributes:
      kind: "token", "position", "head", "feed-forward", or "biases"; of a function
        without the site "embedding" "rest", which is all that is in no site.
      layer: The attention part of a head, the layer of a feed-forward part.
      head: Its head.
      source: The position that the head reads, where it is split by these.
    """

    kind: str
    layer: int = -1
    head: int = -1
    source: int = -1

    def __str__(self) -> str:
        if self.kind == "head":
            at = f" of position {self.source}" if self.source >= 0 else ""
            return f"head {self.layer}.{self.head}{at}"
        return f"{self.kind} {self.layer}" if self.layer >= 0 else self.kind


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pairs:
    """The score of a query and a key as a sum over pairs of components; host arrays.

    Attributes:
      layer: The attention part.
      head: Its head.
      query: The position of the query.
      key: The position of the key.
      query_components: What the query is a sum of, M of them.
      key_components: What the key is a sum of.
      query_parts: `[M, K]` float64, times the score's scale.
      key_parts: `[M', K]` float64.
      position: What is added for the two positions (ALiBi and other biases).
      score: The model's own score, with `position`, before a soft cap and softmax;
        without a scale where attention was recognised in a function.
      weight: The weight of the key, in [0, 1].
      tokens: The text at each position of the queries; () where it is not known.
      key_tokens: The text at each position of the keys; (): as of the queries.
    """

    layer: int
    head: int
    query: int
    key: int
    query_components: tuple[Component, ...]
    key_components: tuple[Component, ...]
    query_parts: np.ndarray
    key_parts: np.ndarray
    position: float
    score: float
    weight: float
    tokens: tuple[str, ...] = ()
    key_tokens: tuple[str, ...] = ()

    _repr_html_, show, plot = display.html, display.show, display.plot

    @property
    def terms(self) -> np.ndarray:
        """`[M, M']` float64, the term of each pair; with `position` they add up."""
        return self.query_parts @ self.key_parts.T

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Returns a row for each term, the largest in size first.

        What positions add is the row of "position of the score".
        """
        terms = self.terms
        pairs = np.argwhere(terms).tolist()
        rows = [
            {
                "query side": str(self.query_components[i]),
                "key side": str(self.key_components[j]),
                "term": float(terms[i, j]),
            }
            for i, j in pairs
        ]
        if self.position:
            name = "position of the score"
            rows += [{"query side": name, "key side": name, "term": self.position}]
        return sorted(rows, key=lambda row: -abs(row["term"]))[:count]

    @property
    def title(self) -> str:
        """What is asked, in a line."""
        ends = [f"{self.query}", f"{self.key}"]
        if self.tokens:
            sides = self.tokens, self.key_tokens or self.tokens
            ends = [
                f"{i} {side[int(i)]!r}" for i, side in zip(ends, sides, strict=True)
            ]
        return (
            f"Layer {self.layer}, head {self.head}: query {ends[0]}, key {ends[1]}, "
            f"score {self.score:.4g}, weight {self.weight:.3g}"
        )

    def __repr__(self) -> str:
        return "\n".join(
            [self.title]
            + [
                f"{row['term']:>10.4g}  {row['query side']}  x  {row['key side']}"
                for row in self.rows(12)
            ]
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Cells:
    """The largest pairs of many cells of all maps; host arrays by attention part.

    Attributes:
      components: What queries and keys are sums of, M of them.
      queries: `[R]`, positions of the queries.
      keys: For each part `[H, R]`, the position of the key of each cell.
      scores: For each part `[H, R]`, the model's scores, as in `Pairs`; -inf where the
        query does not see the key.
      positions: For each part `[H, R]`, what is added for the two positions.
      weights: For each part `[H, R]`, the weight of the key, in [0, 1].
      pairs: For each part `[H, R, count, 2]`, places in `components`, query side first.
      terms: For each part `[H, R, count]`, their terms, the largest in size first.
    """

    components: tuple[Component, ...]
    queries: np.ndarray
    keys: list[np.ndarray]
    scores: list[np.ndarray]
    positions: list[np.ndarray]
    weights: list[np.ndarray]
    pairs: list[np.ndarray]
    terms: list[np.ndarray]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each cell, with its largest pair."""
        return [
            {
                "layer": part,
                "head": h,
                "query": int(self.queries[r]),
                "key": int(self.keys[part][h, r]),
                "score": float(score),
                "query side": str(self.components[self.pairs[part][h, r, 0, 0]]),
                "key side": str(self.components[self.pairs[part][h, r, 0, 1]]),
                "term": float(self.terms[part][h, r, 0]),
            }
            for part, own in enumerate(self.scores)
            for (h, r), score in np.ndenumerate(own)
            if np.isfinite(score)
        ]

    def __repr__(self) -> str:
        count = sum(x.size for x in self.scores)
        return f"Cells({count} cells of {len(self.scores)} layers)"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Written:
    """What a head writes for a query, by source position and component; host arrays.

    Attributes:
      layer: The attention part.
      head: Its head.
      query: The position of the query.
      unit: What the numbers are of: "output", along the head's output, which they add
        up to the length of; or "logit", what reaches a logit straight from the head.
      components: What values are sums of, M of them.
      terms: `[S, M]` float64: by source position and component.
      total: Their sum, as the model has it.
      tokens: The text at each source position; () where it is not known.
    """

    layer: int
    head: int
    query: int
    unit: str
    components: tuple[Component, ...]
    terms: np.ndarray
    total: float
    tokens: tuple[str, ...] = ()

    _repr_html_, show, plot = display.html, display.show, display.plot

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Returns a row for each source position and component, the largest first."""
        rows = [
            {"source": s, "token": self.tokens[s] if self.tokens else "", "term": x}
            | {"component": str(self.components[m])}
            for (s, m), x in np.ndenumerate(self.terms)
            if x
        ]
        return sorted(rows, key=lambda row: -abs(row["term"]))[:count]

    def __repr__(self) -> str:
        head = f"Layer {self.layer}, head {self.head}, query {self.query}"
        return "\n".join(
            [f"{head}: {self.unit} {self.total:.4g}"]
            + [
                f"{row['term']:>10.4g}  {row['component']}, from {row['source']} "
                f"{row['token']!r}"
                for row in self.rows(12)
            ]
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Reads:
    """What each head's queries, keys and values are made of, over a data set.

    By queries and keys it is how much a component raises the scores of the keys that
    are attended to over the mean of all keys that are seen, `sum_s (p_s - 1 / n)
    score_s`, a mean over queries: the numbers of all components add up to that of the
    whole score, and constants of a row do not count. By values it is the share of the
    head's output, `z_m . z / |z|^2`; shares add up to 1.

    Attributes:
      components: M components, the last one the biases.
      by: For "q", "k" and "v" `[N, P, H, M]` of each example, NaN where there is no
        such head; of values the numerators of shares.
      norms: `[N, P, H]`, `|z|^2` summed over the queries of an example.
      counts: `[N, P]`, its queries.
      composition: For "q", "k" and "v" `[P, H, P, H]`, `circuits.compositions` of the
        weights; {} of a function.
    """

    components: tuple[Component, ...]
    by: dict[str, np.ndarray]
    norms: np.ndarray
    counts: np.ndarray
    composition: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    _repr_html_, show, plot = display.html, display.show, display.plot

    def mean(self, kind: str) -> np.ndarray:
        """Returns `[P, H, M]` of "q", "k" or "v": over all queries of all examples."""
        checks.choice("kind", kind, circuits.KINDS)
        over = self.norms if kind == "v" else self.counts[..., None]
        return self.by[kind].sum(0) / over.sum(0)[..., None]

    def graph(self, kind: str) -> np.ndarray:
        """Returns `[P, H, P, H]`, the earlier head first, as `circuits.compositions`.

        NaN where there is no such head, or the second does not come after the first.
        """
        mean = self.mean(kind)
        result = np.full((*mean.shape[:2], *mean.shape[:2]), np.nan)
        for m, each in enumerate(self.components):
            if each.kind == "head":
                own = mean[:, :, m]
                result[each.layer, each.head] = np.where(own == 0, np.nan, own)
        return result

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Returns a row for each head and component, by size within each kind."""
        rows = []
        for kind in self.by:
            weights = self.composition.get(kind)
            own = []
            for (p, h, m), x in np.ndenumerate(self.mean(kind)):
                each = self.components[m]
                if not x or np.isnan(x):
                    continue
                row = {"kind": kind, "layer": p, "head": h, "reads": str(each)}
                row["measured"] = float(x)
                row["from weights"] = float("nan")
                if each.kind == "head" and weights is not None:
                    row["from weights"] = float(weights[each.layer, each.head, p, h])
                own.append(row)
            rows += sorted(own, key=lambda row: -abs(row["measured"]))[:count]
        return rows

    def __repr__(self) -> str:
        lines = [
            f"{row['measured']:>10.4g}  {row['layer']}.{row['head']} {row['kind']} "
            f"reads {row['reads']}"
            for row in self.rows(6)
        ]
        return "\n".join([f"Reads({len(self.counts)} examples)", *lines])


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
    """Returns the score of a query and a key as a sum over pairs of components.

    Memory does not grow with T S; time is that of 2 K backward passes through linear
    maps alone.

    Args:
      model: A model, of `models.build`, `interop.load`, or any function of the same
        arguments with the sites that are asked for.
      params: Its parameters.
      example: One example, B = 1.
      layer: The attention part.
      head: Its head.
      query: The position of the query.
      key: The position of the key; None: the one with the largest weight.
      sources: The earlier heads (part, head) that are split by the position that they
        read; True: those of the largest terms.

    Raises:
      ValueError: If there is no such place, the query does not see the key, the score
        is no scaled product of queries and keys, or the model is not linear with the
        factors of its norms held.
    """
    shapes = _shapes(model, params, example)
    _check_place(shapes, layer, head)
    num_queries, num_keys = shapes.maps[layer][2:]
    query = _position("query", query, num_queries)
    key = -1 if key is None else _position("key", key, num_keys)
    given = map(np.int32, (layer, head, query, key))
    program = _cell(model, splits=bool(sources))
    found = running.fetched(program(params, example, *given))
    _check_linear(found)
    numbers = _Numbers(*map(float, found["numbers"]))
    if not np.isfinite(numbers.scores):
        raise ValueError(
            f"query {query} does not see key {int(numbers.keys)}: there is no score."
        )
    sides = [_with_rest(side, shapes) for side in found["sides"]]
    if sources is True:
        terms = np.abs(sides[0][1] @ sides[1][1].T)
        largest = np.argsort(-terms, axis=None)[:MOST_SPLIT]
        chosen = np.unravel_index(largest, terms.shape)
        sources = {sides[0][0][m][1:3] for m in np.concatenate(chosen).tolist()} - {
            (-1, -1)
        }
    if sources:
        sides = [
            _split(side, own, set(map(tuple, sources)))
            for side, own in zip(found["sides"], sides, strict=True)
        ]
    (query_components, query_parts), (key_components, key_parts) = sides
    return Pairs(
        layer,
        head,
        query,
        int(numbers.keys),
        query_components,
        key_components,
        query_parts * numbers.scales,
        key_parts,
        numbers.positions,
        numbers.scores,
        numbers.weights,
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
    """Returns the largest pairs of every head at once, for some queries.

    Args:
      model: A model, as in `pairs`.
      params: Its parameters.
      example: One example, B = 1.
      queries: R positions of queries; None: all.
      key: The position of the key; None: for each head and query the key with the
        largest weight. Memory is that of R M D numbers for each part, not of T S M.
      count: How many pairs of each cell.

    Raises:
      ValueError: As `pairs` does.
    """
    shapes = _shapes(model, params, example)
    longest = max((shape[2] for shape in shapes.maps), default=0)
    queries = range(longest) if queries is None else queries
    queries = np.array([_position("queries", t, longest) for t in queries], np.int32)
    count = min(count, (len(shapes.components) + 1) ** 2)
    key = np.int32(-1 if key is None else key)
    found = running.fetched(_largest(model, count=count)(params, example, queries, key))
    _check_linear(found)
    components = (*shapes.components, shapes.rest)
    lists = zip(*found["cells"], strict=True)
    return Cells(components, queries, *map(list, lists))


def written(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    layer: int,
    head: int,
    query: int,
    *,
    answer: int | None = None,
) -> Written:
    """Returns what a head writes for a query, by source position and component.

    Its weights are held, as are the factors of norms.

    Args:
      model: A model, as in `pairs`.
      params: Its parameters.
      example: One example, B = 1.
      layer: The attention part.
      head: Its head.
      query: The position of the query.
      answer: The class whose logit, at the query, is asked for: what reaches it
        straight from the head; before a soft cap. None: the head's own output.

    Raises:
      ValueError: As `pairs` does.
    """
    shapes = _shapes(model, params, example)
    _check_place(shapes, layer, head)
    query = _position("query", query, shapes.maps[layer][2])
    program = _values(model, is_logit=answer is not None)
    given = (layer, head, query, -1 if answer is None else answer)
    found = running.fetched(program(params, example, *map(np.int32, given)))
    _check_linear(found)
    terms = np.concatenate([found["terms"], found["rest"][:, None]], 1)
    terms = terms[: shapes.maps[layer][-1]]
    return Written(
        layer,
        head,
        query,
        "output" if answer is None else "logit",
        (*shapes.components, shapes.rest),
        np.float64(terms),
        float(found["total"]),
    )


def reads(model: models.Model, params: Any, batches: Iterable[tasks.Example]) -> Reads:
    """Returns what all heads read by queries, keys and values, over a data set.

    Queries that see nothing, and padding, do not count. A pass over the maps, and three
    backward passes through linear maps for each head; no array of T S numbers is made
    but where attention is dense.

    Args:
      model: A model, as in `pairs`.
      params: Its parameters.
      batches: Batches of examples.

    Raises:
      ValueError: As `pairs` does.
    """
    found = running.over(batches, lambda batch: _sums(model)(params, batch))
    for each in found:
        _check_linear(each)
    shapes = _shapes(model, params, next(iter(batches)))
    by = {
        kind: np.concatenate([each[kind] for each in found]) for kind in circuits.KINDS
    }
    composition = {}
    if model.config is not None and not model.config.attention.differential:
        composition = {
            kind: circuits.compositions(model, params, kind) for kind in circuits.KINDS
        }
    return Reads(
        (*shapes.components, shapes.rest),
        {kind: np.float64(x) for kind, x in by.items()},
        np.concatenate([np.float64(each["norms"]) for each in found]),
        np.concatenate([np.float64(each["counts"]) for each in found]),
        composition,
    )


# --- The model as a linear map of its components; what follows is traced


class _Held:
    """A run, and the model as a function of components that is affine in them."""

    def __init__(self, model, params, example, read=None):
        """Runs the model; `read` is what is asked for, of a model and its inputs."""
        self.model, self.params, self.example = model, params, example
        at = {each: lambda x: x for each in (*_SOURCES, "*/factor", "*/map")}
        _, found = running.look(model, params, example, at, strict=False)
        self.maps = {n: x for n, x in found.items() if n.endswith("/map")}
        self.sources = {name: found[name] for name in _written(found)}
        self.heads = [name for name in self.sources if name.endswith("/heads")]
        self._factors = {n: x for n, x in found.items() if n.endswith("/factor")}
        self._order = list(found)
        self._tokens = self._token_parts(found)
        self._of = jax.jit(functools.partial(self.of, read=read or _maps))
        self.ends, self.push = jax.linearize(self._of, self.sources)
        self.pull = jax.linear_transpose(self.push, self.sources)

    @property
    def count(self):
        """M, the number of components."""
        return sum(
            2 if name in self._tokens else x.shape[-2] if name in self.heads else 1
            for name, x in self.sources.items()
        )

    def of(self, components, read):
        """Returns what is asked for, of the values of sites that components write."""
        own = components | self._factors
        # In the order of layers: JAX sorts arrays that it passes on by their names.
        names = sorted(own, key=self._order.index)
        values = [own[name] for name in names]
        changes = edits.on_parts(names, values, lambda _, given: given)
        model = self.model._replace(apply=sites.edit(self.model.apply, changes))
        return read(model, self.params, self.example)

    def curvature(self):
        """Returns how far it is from linear, a share of the largest value."""
        start = self._of(jax.tree.map(jnp.zeros_like, self.sources))
        pushed = self.push(self.sources)

        def share(end, first, change):
            if not end.size:
                return jnp.zeros(())
            far = jnp.abs(end - first - change).max()
            return far / jnp.maximum(jnp.abs(end).max(), 1e-30)

        shares = jax.tree.map(share, self.ends, start, pushed)
        return jnp.stack(jax.tree.leaves(shares)).max()

    def parts(self, cotangents) -> Array:
        """Returns `[M, B, L]`: what each component adds, by its position.

        That is, to the sum of products with `cotangents` of what is asked for; L is the
        largest number of positions.
        """
        (gradients,) = self.pull(cotangents)
        return self.dotted(gradients)

    def dotted(self, gradients) -> Array:
        """Returns the same from gradients of `sources`."""
        found = []
        for name, value in self.sources.items():
            gradient = gradients[name]
            if name in self._tokens:
                values = jnp.stack([self._tokens[name], value - self._tokens[name]], -2)
                gradient = gradient[..., None, :]
            else:
                values = value if name.endswith("/heads") else value[..., None, :]
                gradient = gradient.reshape(values.shape)
            found.append(jnp.moveaxis((values * gradient).sum(-1), -1, 0))
        longest = max(x.shape[-1] for x in found)
        padded = [
            jnp.pad(x, ((0, 0), (0, 0), (0, longest - x.shape[-1]))) for x in found
        ]
        return jnp.concatenate(padded)

    def single(self, m: Array) -> dict[str, Array]:
        """Returns the values of sites of component m alone."""
        result, first = {}, 0
        for name, value in self.sources.items():
            if name in self._tokens:
                tokens = self._tokens[name]
                own = tokens * (m == first) + (value - tokens) * (m == first + 1)
                count = 2
            elif name.endswith("/heads"):
                count = value.shape[-2]
                is_own = jnp.arange(first, first + count)[:, None] == m
                own = value * is_own.reshape(*(1,) * (value.ndim - 2), count, 1)
            else:
                own, count = value * (m == first), 1
            result[name], first = own.astype(value.dtype), first + count
        return result

    def _token_parts(self, found):
        """Returns what the embedding has of tokens alone, positions left out."""
        result = {}
        for name in ("embedding", "decoder_embedding"):
            if name not in found or _tokens_of(name) not in found:
                continue

            def embedded(*given, name=name):
                return running.look(*given, [name])[1][name]

            given = {_tokens_of(name): found[_tokens_of(name)]}

            def embed(given, embedded=embedded):
                return self.of(given, embedded)

            result[name] = jax.jvp(embed, (given,), (given,))[1]
        return result


class _Map(NamedTuple):
    """What is asked of a map, with a key and a value for each query head."""

    query: Array  # [B, T, H, K]
    key: Array  # [B, S, H, K]
    value: Array  # [B, S, H, V]

    @classmethod
    def of(cls, own: attention.AttentionMap) -> "_Map":
        """Returns queries, keys and values of a map."""
        num_heads = own.shape[-3]
        value = own.key[..., :0] if own.value is None else own.value
        return cls(
            own.query, *(scores.repeat_heads(x, num_heads) for x in (own.key, value))
        )


def _scales(own: attention.AttentionMap) -> tuple[Array, Array]:
    """Returns what queries and keys are multiplied by, `[B, T, H, 1]` and of keys."""
    score, (query, key, _) = own.weighting.score, _Map.of(own)
    ones = [jnp.ones((*x.shape[:-1], 1), own.dtype) for x in (query, key)]
    if isinstance(score, other_scores.Cosine):
        lengths = [jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
        scale = score.aligned(query.ndim - 3).scale[..., None, :, None]
        return scale / lengths[0], ones[1] / lengths[1]
    if isinstance(score, other_scores.Sigmoid):
        score = scores.DotProduct(score.scale, None)
    if not isinstance(score, scores.DotProduct):
        raise ValueError(
            "the score must be a scaled product of queries and keys, which splits into "
            f"pairs of components, got {type(score).__name__}."
        )
    scale = score.scale_of(query.shape[-1])
    return ones[0] * (scale or 1.0), ones[1]  # recognised attention has a scale of 0


class _Numbers(NamedTuple):
    """Numbers of cells, `[H, R]`: R queries of an example, with a key for each head."""

    keys: Array
    scores: Array
    positions: Array
    scales: Array
    weights: Array

    @classmethod
    def of(cls, own: attention.AttentionMap, rows: Array, key: Array) -> "_Numbers":
        """Returns the numbers at a key; -1: at the key with the largest weight."""
        num_heads, num_queries, num_keys = own.shape[-3:]
        shape = num_heads, len(rows), num_keys
        weights = own.tile(rows, slice(None))[0]
        largest = weights.argmax(-1)
        keys = jnp.where(key < 0, largest, key)

        def at(tile):  # [H, R], of [..., R, S]
            tile = jnp.broadcast_to(tile.reshape(-1, *tile.shape[-2:]), shape)
            return jnp.take_along_axis(tile, keys[..., None], -1)[..., 0]

        places = own.checked_origin().at(rows, jnp.arange(num_keys))
        seen = at(own.weighting.mask.aligned_tile(*places))
        seen &= (rows < num_queries)[None] & (keys < num_keys)
        positions = jnp.zeros(keys.shape, own.dtype)
        if own.weighting.bias is not None and not _is_recognised(own):
            positions = at(own.weighting.bias.aligned_tile(*places))
        query, key, _ = _Map.of(own)
        query, key = _at_rows(query, rows), _at_keys(key, keys)
        of_queries, of_keys = _scales(own)
        scales = _at_rows(of_queries, rows) * _at_keys(of_keys, keys)
        values = (query * key).sum(-1, dtype=own.dtype) * scales[..., 0] + positions
        values = jnp.where(seen, values, -jnp.inf)
        return cls(keys, values, positions, scales[..., 0], at(weights))


def _is_recognised(own: attention.AttentionMap) -> bool:
    score = own.weighting.score  # which a map of weights alone has no use for
    return isinstance(score, scores.DotProduct) and score.scale == 0


def _at_rows(x: Array, rows: Array) -> Array:
    """Returns `[H, R, K]` of `[1, T, H, K]`."""
    return jnp.take(x[0], rows, axis=0, mode="clip").swapaxes(0, 1)


def _at_keys(x: Array, keys: Array) -> Array:
    """Returns `[H, R, K]` of `[1, S, H, K]` and keys `[H, R]`."""
    return jnp.take_along_axis(x[0].swapaxes(0, 1), keys[..., None], 1, mode="clip")


def _gated(own: attention.AttentionMap, values: Array) -> Array:
    """Returns `[B, T, H, V]` times the gates."""
    gates = own.weighting.gates
    return values if gates is None else values * gates


def _one(shape, *places) -> Array:
    """Returns an array with 1 at places on its last axes, and 0 elsewhere."""
    result = jnp.ones(())
    for size, place in zip(shape[-len(places) :], places, strict=True):
        result = jnp.multiply.outer(result, jnp.arange(size) == place)
    return jnp.broadcast_to(result, shape)


@running.compiled
def _cell(model, params, example, place, head, query, key, *, splits):
    held = _Held(model, params, example)
    numbers = [
        _Numbers(*(x[head, 0] for x in _Numbers.of(own, query[None], key)))
        if own.shape[-3]
        else _Numbers(*map(jnp.zeros, [()] * 5))
        for own in held.maps.values()
    ]
    found = _Numbers(*(jnp.stack(x)[place] for x in zip(*numbers, strict=True)))
    at = query, found.keys.astype(int)
    sides = [
        _side(held, place, head, name, i, splits)
        for name, i in zip(("query", "key"), at, strict=True)
    ]
    return {"numbers": found, "sides": sides, "curvature": held.curvature()}


def _side(held, place, head, name, at, splits):
    """Returns a query or a key, its parts, and what splits these by source position."""
    # By the order of maps: arrays that JAX returns by name are sorted by these.
    wholes = {end: getattr(held.ends[end], name) for end in held.maps}
    rows = jnp.stack([at, jnp.maximum(at - 1, 0)])  # smeared keys read two positions
    first = jnp.stack([True, at > 0])[:, None, None]

    def of_channel(channel):
        cotangents = {}
        for i, (end, x) in enumerate(wholes.items()):
            chosen = (_one(x.shape, at, head, channel) * (i == place)).astype(x.dtype)
            zeros = jax.tree.map(jnp.zeros_like, held.ends[end])
            cotangents[end] = zeros._replace(**{name: chosen})
        (gradients,) = held.pull(cotangents)
        kept = [gradients[each][0, rows] * first for each in held.heads if splits]
        return held.dotted(gradients)[:, 0].sum(-1), kept

    size = max(x.shape[-1] for x in wholes.values())
    parts, gradients = jax.lax.map(of_channel, jnp.arange(size))
    whole = sum(
        jnp.pad(x[0, at, head], (0, size - x.shape[-1])) * (i == place)
        for i, x in enumerate(wholes.values())
        if x.shape[-2]
    )
    result = {"parts": parts.T, "whole": whole, "splits": []}
    for gradient, own in zip(gradients, held.maps.values(), strict=splits):
        if own.shape[-3]:
            gates = own.weighting.gates
            gates = 1.0 if gates is None else gates[0, rows][None]
            own_value = _Map.of(own).value[0]
            weights = own.tile(rows, slice(None))[0]
            result["splits"].append((gradient * gates, weights, own_value))
        else:
            result["splits"].append(None)
    return result


@running.compiled
def _largest(model, params, example, rows, key, *, count):
    held = _Held(model, params, example)
    maps = {name: own for name, own in held.maps.items() if own.shape[-3]}
    numbers = {name: _Numbers.of(own, rows, key) for name, own in maps.items()}

    def chosen(own, name):
        return _at_rows(own.query, rows), _at_keys(own.key, numbers[name].keys)

    def of_component(m):
        pushed = held.push(held.single(m))
        return {name: chosen(pushed[name], name) for name in maps}

    parts = jax.lax.map(of_component, jnp.arange(held.count))
    found = []
    for name, own in held.maps.items():
        if name not in maps:
            nothing = jnp.zeros((0, len(rows)))
            pairs_ = jnp.zeros((0, len(rows), count, 2), int)
            found.append((*[nothing] * 4, pairs_, pairs_[..., 0] * 0.0))
            continue
        of_numbers = numbers[name]
        query, key_ = (
            jnp.concatenate([x, (whole - x.sum(0))[None]])
            for x, whole in zip(parts[name], chosen(_Map.of(own), name), strict=True)
        )

        def of_cell(given):
            query, key, scale = given
            terms = jnp.matmul(query * scale, key.T, precision="highest")
            _, best = jax.lax.top_k(jnp.abs(terms).ravel(), count)
            places = jnp.stack(jnp.divmod(best, terms.shape[1]), -1)
            return places, terms.ravel()[best]

        def by_cell(x):
            return jnp.moveaxis(x, 0, 2).reshape(-1, x.shape[0], x.shape[-1])

        given = by_cell(query), by_cell(key_), of_numbers.scales.ravel()
        places, terms = jax.lax.map(of_cell, given)
        shape = of_numbers.scales.shape
        found.append(
            (
                *(of_numbers[i] for i in (0, 1, 2, 4)),
                places.reshape(*shape, count, 2),
                terms.reshape(*shape, count),
            )
        )
    return {"cells": found, "curvature": held.curvature()}


@running.compiled
def _values(model, params, example, place, head, query, answer, *, is_logit):
    held = _Held(model, params, example)
    curvature = held.curvature()
    if is_logit:
        logits = _Held(model, params, example, _logits)
        curvature = jnp.maximum(curvature, logits.curvature())
        end = logits.ends
        places = (query, answer) if end.ndim == 3 else (answer,)
        if logits.model.config is not None:  # one logit, of each element
            is_set = logits.model.config.family == "set_classifier"
            places = (query,) if is_set else places
        (gradients,) = logits.pull(_one(end.shape, *places).astype(end.dtype))
    along, total, cotangents = 0.0, 0.0, {}
    for i, name in enumerate(held.heads):
        output = held.sources[name]
        if output.shape[-2]:
            own = output[0, query, head]
            direction = own / jnp.maximum(jnp.linalg.norm(own), 1e-30)
            direction = gradients[name][0, query, head] if is_logit else direction
            along += (i == place) * direction
            total += (i == place) * (own * direction).sum()
    for i, (name, own) in enumerate(held.maps.items()):
        zeros = jax.tree.map(jnp.zeros_like, held.ends[name])
        if own.shape[-3]:
            gates = own.weighting.gates
            gates = 1.0 if gates is None else gates[0, query, head]
            weights = own.tile(query[None], slice(None))[0, head, 0]
            chosen = _one(own.shape[-3:-2], head) * (i == place)
            value = jnp.einsum("s,h,v->shv", weights, chosen, along * gates)
            zeros = zeros._replace(value=value[None].astype(zeros.value.dtype))
        cotangents[name] = zeros
    (gradients,) = held.pull(cotangents)
    terms = held.dotted(gradients)[:, 0].T
    whole = jnp.zeros(terms.shape[:1])
    for name, own in held.ends.items():
        each = (own.value * cotangents[name].value).sum((0, 2, 3))
        whole += jnp.pad(each, (0, len(whole) - len(each)))
    rest = whole - terms.sum(1)
    return {"terms": terms, "rest": rest, "total": total, "curvature": curvature}


@running.compiled
def _sums(model, params, example):
    held = _Held(model, params, example)
    targets, norms, counts, places = {}, [], [], []
    most = max(own.shape[-3] for own in held.maps.values())
    for i, (name, own) in enumerate(held.maps.items()):
        kind, num_heads = running.kind_of(name), own.shape[-3]
        if not num_heads:
            targets[name] = jax.tree.map(jnp.zeros_like, held.ends[name])
            norms.append(jnp.zeros((own.shape[0], most)))
            counts.append(jnp.zeros(own.shape[0]))
            continue
        places += [(i, h) for h in range(num_heads)]
        output = held.sources[held.heads[i]]
        targets[name], valid = _targets(own, output, example, kind)
        lengths = jnp.square(output * valid).sum((1, 3))
        norms.append(jnp.pad(lengths, ((0, 0), (0, most - num_heads))))
        counts.append(valid[..., 0, 0].sum(1))
    places = np.array(places)

    def of_head(given):
        place, head, kind = given
        chosen = {}
        for i, (name, own) in enumerate(targets.items()):
            is_own = _one(own.query.shape[-2:-1], head)[None, None, :, None]
            is_own *= i == place
            chosen[name] = _Map(
                *((x * is_own * (kind == j)).astype(x.dtype) for j, x in enumerate(own))
            )
        parts = held.parts(chosen).sum(-1)  # [M, B]
        wholes = jax.tree.map(lambda x, y: (x * y).sum((1, 2, 3)), chosen, held.ends)
        rest = sum(jax.tree.leaves(wholes)) - parts.sum(0)
        return jnp.concatenate([parts, rest[None]]).T

    result = {"curvature": held.curvature()}
    result |= {"norms": jnp.stack(norms, 1), "counts": jnp.stack(counts, 1)}
    shape = (len(result["norms"]), len(held.maps), most, held.count + 1)
    for j, kind in enumerate(circuits.KINDS):
        given = (*places.T, np.full(len(places), j))
        found = jax.lax.map(of_head, tuple(map(jnp.asarray, given)))
        result[kind] = (
            jnp.full(shape, jnp.nan)
            .at[:, places[:, 0], places[:, 1]]
            .set(jnp.moveaxis(found, 0, 1))
        )
    return result


def _targets(own, output, example, kind) -> tuple[_Map, Array]:
    """Returns what queries, keys and values are multiplied by, and valid queries."""
    query, key, value = _Map.of(own)
    of_queries, of_keys = _scales(own)
    valid = running.valid(own.shape[-2], example, kind)[..., None, None]
    plain = own.weighting._replace(
        bias=None, score=scores.dot_product(0.0), normalizer=None, gates=None
    )
    counts = dataclasses.replace(
        own, weighting=plain, logsumexp=jnp.zeros_like(own.logsumexp)
    ).row_sums()
    # With a sink, what is compared has the sum of the row.
    uniform = dataclasses.replace(
        own,
        weighting=plain,
        logsumexp=jnp.where(counts > 0, jnp.log(counts), -jnp.inf),
    )
    sums = jnp.moveaxis(own.row_sums(), -1, -2)[..., None]
    valid = valid & (jnp.moveaxis(counts, -1, -2)[..., None] > 0)
    query, key = query * of_queries * valid, key * of_keys
    at_query = own.apply(key) - sums * uniform.apply(key)
    at_key = own.apply_transposed(query) - uniform.apply_transposed(sums * query)
    at_value = own.apply_transposed(_gated(own, output * valid))
    return _Map(at_query * of_queries * valid, at_key * of_keys, at_value), valid


def _logits(model, params, example):
    """Returns the logits, before a soft cap."""
    output, found = running.look(
        model, params, example, ["uncapped_logits"], strict=False
    )
    return found.get("uncapped_logits", output.logits)


def _maps(model, params, example):
    return dict(running.look(model, params, example, {"*/map": _Map.of})[1])


# --- On the host


class _Shapes(NamedTuple):
    """What a model has: components without the rest, its name, and shapes of maps."""

    components: tuple[Component, ...]
    rest: Component
    maps: list[tuple[int, ...]]


def _shapes(model, params, example) -> _Shapes:
    def found(params, example):
        at = {each: lambda x: x for each in _SOURCES} | {"*/map": lambda own: own}
        own = running.compact(model, params)
        return running.look(*own, example, at, strict=False)[1]

    found = jax.eval_shape(found, params, example)
    maps = [x.shape for name, x in found.items() if name.endswith("/map")]
    if not maps:
        raise ValueError(
            "model must show its attention: mh.sites finds no site of the name map."
        )
    components, part, layer = [], 0, 0
    for name in _written(found):
        if name.endswith("/heads"):
            heads = range(found[name].shape[-2])
            components += [Component("head", part, h) for h in heads]
            part += 1
        elif name.endswith("/output"):
            components.append(Component("feed-forward", layer))
            layer += 1
        elif _tokens_of(name) in found:
            side = "decoder " if name.startswith("decoder") else ""
            components += [Component(f"{side}token"), Component(f"{side}position")]
        else:
            components.append(Component(name))
    is_whole = "embedding" in found
    return _Shapes(tuple(components), Component("biases" if is_whole else "rest"), maps)


def _written(found) -> list[str]:
    """Returns the names of the sites that write to the stream, embeddings first."""
    embeddings = [n for n in ("embedding", "decoder_embedding") if n in found]
    ends = "/heads", "feed_forward/output"
    return embeddings + [name for name in found if name.endswith(ends)]


def _tokens_of(name: str) -> str:
    return name.replace("embedding", "token_embedding")


def _check_linear(found) -> None:
    far = float(found["curvature"])
    if not far < _LINEAR:
        raise ValueError(
            "the model must be linear in what its heads and feed-forward parts write, "
            f"with the factors of norms held, but is {far:.1%} off: a norm, embedding "
            "or feed-forward part has no site that shows it. In a function of your own "
            'name them, mh.site("factor", x) what a norm multiplies by, '
            'mh.site("embedding", x), mh.site("feed_forward/output", x); without '
            "these only whole queries and keys are known, look(...) at */query and "
            "*/key."
        )


def _check_place(shapes, layer, head) -> None:
    checks.integer_in("layer", layer, 0, len(shapes.maps) - 1)
    checks.integer_in("head", head, 0, shapes.maps[layer][-3] - 1)


def _position(name, value, length) -> int:
    checks.integer_in(name, value, -length, length - 1)
    return value % length


def _with_rest(side, shapes) -> tuple[tuple[Component, ...], np.ndarray]:
    """Returns components and their parts `[M, K]`, float64."""
    parts, whole = np.float64(side["parts"]), np.float64(side["whole"])
    parts = np.concatenate([parts, (whole - parts.sum(0))[None]])
    return (*shapes.components, shapes.rest), parts


def _split(side, given, chosen) -> tuple[tuple[Component, ...], np.ndarray]:
    """Returns the same with chosen heads split by the position that they read."""
    components, parts = [], []
    for each, part in zip(*given, strict=True):
        if each.kind != "head" or each[1:3] not in chosen:
            components.append(each)
            parts.append(part[None])
            continue
        gradient, weights, value = side["splits"][each.layer]
        h = each.head
        if value.shape[-1] != gradient.shape[-1]:
            raise ValueError(f"sources must be of heads with known values, got {each}.")
        own = np.einsum(
            "krv,rs,sv->sk",
            *map(np.float64, (gradient[:, :, h], weights[h], value[:, h])),
        )
        components += [each._replace(source=s) for s in range(len(own))]
        parts.append(own)
    return tuple(components), np.concatenate(parts)
