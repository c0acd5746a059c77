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

import abc
import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, display, models
from mha_haiku.lab.heads import circuits, components, model_runs
from mha_haiku.lab.heads.components import Component, Held
from mha_haiku.lab.heads.model_runs import Batches
from mha_haiku.records import Result
from mha_haiku.training import tasks

HELD = (
    "Held: the factors of norms, of queries and keys too. Scores are those before a "
    "soft cap; rotary positions are in each pair."
)
MOST_SPLIT = 8  # with sources=True, the heads in this number of terms are split


class Answer(Result, abc.ABC):
    """The base of answers whose rows are terms, the largest first."""

    file_name = "why"

    @abc.abstractmethod
    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row per number, as a dict by the names of columns."""

    def text(self, count: int | None = 12) -> str:
        """Writes the title and the `count` largest rows; None means all rows."""
        return f"{self.title}\n{super().text(count)}"

    def __repr__(self) -> str:
        return self.text()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Terms(Answer):
    """A number of the model as a sum of terms `[M, M']`; host arrays.

    Attributes:
      place: The attention part, its head, and the position of the query (and the key).
      title: The question, and the number.
      labels: The labels of the rows and of the columns.
      terms: `[M, M']` float64.
      total: The number in the model.
    """

    place: tuple[int, ...]
    title: str
    labels: tuple[tuple[Any, ...], tuple[Any, ...]]
    terms: np.ndarray
    total: float
    names = ("source", "component")

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row for each term that is not 0, at most `count` rows."""
        rows = []
        for (i, j), x in np.ndenumerate(self.terms):
            labels = (str(self.labels[0][i]), str(self.labels[1][j]))
            rows.append({"term": float(x)} | dict(zip(self.names, labels, strict=True)))
        return _largest_first(rows, count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pairs(Terms):
    """The score of a query and a key as a sum over pairs of components.

    `total` is the score before a soft cap and softmax, without a scale if attention was
    recognized in a function. `labels` are components of the query and of the key.

    Attributes:
      parts: The components: `[M, K]` of the query, times the score's scale, and
        `[M', K]` of the key. `terms` are their products.
      position: The bias of the two positions (ALiBi, other biases), added to the terms.
      weight: The weight of the key, in [0, 1].
    """

    parts: tuple[np.ndarray, np.ndarray]
    position: float
    weight: float
    names = ("query", "key")

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists the rows of `Terms.rows`, and a row for positions."""
        row = {"term": self.position, "query": "position", "key": "of the score"}
        return _largest_first([*super().rows(), row], count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Cells(Answer):
    """The largest pairs of many cells of all maps; host arrays.

    Arrays are by attention part, without parts that have no heads.

    Attributes:
      components: The M terms of queries and keys.
      queries: `[R]`, positions of the queries.
      keys: `[H, R]` by part, the position of the key of each cell.
      scores: `[H, R]`, the model's, as in `Pairs`; -inf if no key is seen.
      positions: `[H, R]`, the biases of the two positions.
      weights: `[H, R]`, the weight of the key, in [0, 1].
      pairs: `[H, R, count, 2]`, indices into `components`, query first.
      terms: `[H, R, count]`, their terms, in decreasing order of magnitude.
    """

    components: tuple[Component, ...]
    queries: np.ndarray
    keys: dict[int, np.ndarray]
    scores: dict[int, np.ndarray]
    positions: dict[int, np.ndarray]
    weights: dict[int, np.ndarray]
    pairs: dict[int, np.ndarray]
    terms: dict[int, np.ndarray]

    @property
    def title(self) -> str:
        """The title, with the number of cells."""
        count = sum(map(np.size, self.scores.values()))
        return f"The largest pairs of {display.count(count, 'cell')}"

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row for each cell, with its largest pair."""
        rows = []
        for part, terms in self.terms.items():
            for h, r in np.argwhere(np.isfinite(self.scores[part])).tolist():
                pair = self.pairs[part][h, r, 0]
                query, key = (str(self.components[m]) for m in pair)
                row = {"term": float(terms[h, r, 0]), "head": f"{part}.{h}"}
                row["at"] = f"{self.queries[r]} to {self.keys[part][h, r]}"
                rows.append(row | {"query": query, "key": key})
        return _largest_first(rows, count)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Reads(Answer):
    """The components that heads' queries, keys and values read, over a data set.

    For queries and keys the number is how much a component raises the scores of
    attended keys over the mean of all visible keys, `sum_s (p_s - 1 / n) score_s`,
    averaged over queries: the numbers of all components add up to the number of
    the whole score, and constants of a row do not count. For values it is the share of
    the head's output, `z_m . z / |z|^2`; shares add up to 1.

    Attributes:
      components: M components, the last one the biases.
      by: For "q", "k" and "v" `[N, P, H, M]` per example, NaN where there is no such
        head; for values the numerators of shares.
      norms: `[N, P, H]`, `|z|^2` summed over the queries of an example.
      counts: `[N, P]`, the number of its queries.
      composition: For "q", "k" and "v" `[P, H, P, H]`, `circuits.compositions` of the
        weights; {} for a function.
    """

    components: tuple[Component, ...]
    by: dict[str, np.ndarray]
    norms: np.ndarray
    counts: np.ndarray
    composition: dict[str, np.ndarray]

    @property
    def title(self) -> str:
        """The title, with the number of examples."""
        examples = display.count(len(self.norms), "example")
        return f"What heads read by queries, keys and values, {examples}"

    def mean(self, kind: str) -> np.ndarray:
        """Averages "q", "k" or "v" over all queries of all examples, `[P, H, M]`."""
        checks.choice("kind", kind, circuits.KINDS)
        divisor = self.norms if kind == "v" else self.counts[..., None]
        return self.by[kind].sum(0) / divisor.sum(0)[..., None]

    def graph(self, kind: str) -> np.ndarray:
        """Returns `[P, H, P, H]`, the earlier head first, as `circuits.compositions`.

        NaN if there is no such head, or the second does not come after the first.
        """
        mean = self.mean(kind)
        result = np.full((*mean.shape[:2], *mean.shape[:2]), np.nan)
        for m, component in enumerate(self.components):
            if component.kind == "head":
                by_head = np.where(mean[:, :, m] == 0, np.nan, mean[:, :, m])
                result[component.layer, component.head] = by_head
        return result

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """Lists a row per head and component, with the composition of weights.

        `count` is the largest number of rows for each of "q", "k" and "v".
        """
        rows = []
        for kind in self.by:
            weights, of_kind = self.composition.get(kind), []
            for (p, h, m), x in np.ndenumerate(self.mean(kind)):
                source, composition = self.components[m], float("nan")
                if source.kind == "head" and weights is not None:
                    composition = float(weights[source.layer, source.head, p, h])
                row = {"term": float(x), "head": f"{p}.{h}", "by": kind}
                row |= {"reads": str(source), "composition of weights": composition}
                of_kind.append(row)
            rows += _largest_first(of_kind, count)
        return rows


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
    held = _known(model, params, example)
    _, _, num_queries, num_keys = _shape_of(held, layer, head)
    query = _position("query", query, num_queries)
    key = -1 if key is None else _position("key", key, num_keys)
    split = set() if isinstance(sources, bool) else set(map(tuple, sources))
    for place in split:
        _shape_of(held, *place)
    program = components.split_cell(model, splits=bool(sources))
    values = _run(program, params, example, layer, head, query, key)
    # In the order of `CellNumbers`.
    place, score, bias, scale, weight = map(float, values["cell"])
    key = int(place)
    if not np.isfinite(score):
        raise ValueError(f"query {query} does not see key {key}: there is no score.")
    sides = [_with_rest(side["parts"], side["whole"]) for side in values["sides"]]
    if sources is True:
        largest = np.argsort(-np.abs(sides[0] @ sides[1].T), axis=None)[:MOST_SPLIT]
        split = np.concatenate(np.divmod(largest, len(sides[1]))).tolist()
        split = {held.components[m][1:3] for m in split}
    (queries, query_parts), (keys, key_parts) = (
        _split(held.components, parts, side["splits"], split)
        for side, parts in zip(values["sides"], sides, strict=True)
    )
    parts, place = (query_parts * scale, key_parts), (layer, head, query, key)
    title = "Layer {}, head {}, query {}, key {}: score ".format(*place)
    title += f"{score:.4g}, weight {weight:.3g}"
    terms = parts[0] @ key_parts.T
    size, kind = np.abs(terms).sum() + abs(bias), values["sides"][0]["parts"].dtype
    _check_whole("the score", terms.sum() + bias, score, size, kind)
    return Pairs(place, title, (queries, keys), terms, score, parts, bias, weight)


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
    held = _known(model, params, example)
    longest, most_keys = (max(x[i] for x in held.shapes) for i in (2, 3))
    key = -1 if key is None else key
    checks.integer_in("key", key, -most_keys, most_keys - 1)
    checks.positive_integer("count", count)
    queries = range(longest) if queries is None else queries
    places = np.array([_position("queries", t, longest) for t in queries], np.int32)
    count = min(count, len(held.components) ** 2)
    program = components.largest_pairs(model, count=count)
    values = _run(program, params, example, places, key)
    parts = [part for part, shape in enumerate(held.shapes) if shape[1]]
    by_part = zip(*values["cells"], strict=True)
    fields = (dict(zip(parts, arrays, strict=True)) for arrays in by_part)
    return Cells(held.components, places, *fields)


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
    held = _known(model, params, example)
    _, _, num_queries, num_keys = _shape_of(held, layer, head)
    query = _position("query", query, num_queries)
    if answer is not None and not components.is_set(model):
        model_runs.check_classes("answer", model, params, example, answer)
    unit, answer = ("output", -1) if answer is None else ("logit", answer)
    program = components.split_output(model, is_logit=unit == "logit")
    values = _run(program, params, example, layer, head, query, answer)
    terms = _with_rest(values["terms"], values["whole"]).T[:num_keys]
    total = float(values["total"])
    size, kind = np.abs(terms).sum(), values["total"].dtype
    _check_whole("what the head writes", terms.sum(), total, size, kind)
    title = f"Layer {layer}, head {head}, query {query}: {unit} {total:.4g}"
    sides = tuple(range(len(terms))), held.components
    return Terms((layer, head, query), title, sides, terms, total)


def reads(model: models.Model, params: Any, batches: Batches) -> Reads:
    """Computes what all heads read by queries, keys and values, over a data set.

    Queries that see nothing, and padding, do not count. It takes a pass over the maps
    and three backward passes through linear maps per head. `batches` are examples;
    other arguments and errors are as for `pairs`.
    """
    program = components.sums_read(model)
    results = model_runs.over(batches, lambda batch: program(params, batch))
    for result in results:
        components.check_linear(result["curvature"])
    held, config = _known(model, params, next(iter(batches))), model.config
    by, norms, counts = (
        jax.tree.map(lambda *x: np.concatenate(x, dtype=np.float64), *sums)
        for sums in zip(*(result["sums"] for result in results), strict=True)
    )
    composition = {}
    if config is not None:
        composition = {kind: circuits.compositions(model, params, kind) for kind in by}
    return Reads(held.components, by, norms, counts, composition)


def _known(model: models.Model, params: Any, example: tasks.Example) -> Held:
    """Traces a run for what needs no numbers: its components, and shapes of maps."""
    traces = []

    def trace(params: Any, example: tasks.Example):
        traces.append(Held(*model_runs.compact(model, params), example))

    jax.eval_shape(trace, params, example)
    return traces[0]


def _shape_of(held: Held, layer: int, head: int) -> tuple[int, ...]:
    """Returns the shape of a head's map; raises ValueError without such a head."""
    checks.integer_in("layer", layer, 0, len(held.shapes) - 1)
    checks.integer_in("head", head, 0, held.shapes[layer][1] - 1)
    return held.shapes[layer]


def _with_rest(parts: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Appends the rest of a whole to its parts `[M - 1, ...]`, in float64."""
    parts, whole = np.asarray(parts, np.float64), np.asarray(whole, np.float64)
    return np.concatenate([parts, (whole - parts.sum(0))[None]])


def _run(
    program: Callable, params: Any, example: tasks.Example, *numbers: int | np.ndarray
) -> dict[str, Any]:
    result = model_runs.fetched(program(params, example, *map(np.int32, numbers)))
    components.check_linear(result["curvature"])
    return result


def _position(name: str, value: int, length: int) -> int:
    checks.integer_in(name, value, -length, length - 1)
    return value % length


def _split(
    heads: Sequence[Component],
    parts: Iterable[np.ndarray],
    splits: Mapping[int, Sequence[np.ndarray]],
    of_heads: Container[tuple[int, ...]],
) -> tuple[tuple[Component, ...], np.ndarray]:
    """Splits the components of chosen heads, and their parts, by source position."""
    result = []
    for head, part in zip(heads, parts, strict=True):
        if head.kind != "head" or head[1:3] not in of_heads:
            result.append((head, part))
            continue
        of_head = (np.asarray(x, np.float64) for x in splits[head.layer])
        gradient, weights, gates, value = of_head
        if value.shape[-1] != gradient.shape[-1]:
            raise ValueError(f"sources must be heads with known values, got {head}.")
        factors = (x[..., head.head, :] for x in (gradient * gates, value))
        by_source = np.einsum("krv,sv,rs->sk", *factors, weights[head.head])
        size, kind = np.abs(by_source).sum(0).max(), splits[head.layer][0].dtype
        _check_whole(f"the part of {head}", by_source.sum(0), part, size, kind)
        result += [(head._replace(source=s), x) for s, x in enumerate(by_source)]
    labels, parts = zip(*result, strict=True)
    return labels, np.stack(parts)


def _check_whole(
    what: str,
    total: np.ndarray | float,
    whole: np.ndarray | float,
    size: float,
    dtype: Any,
):
    """Raises ValueError if terms do not add up to what they explain."""
    error = 16 * float(jnp.finfo(dtype).eps)
    far = np.abs(total - whole).max()
    if not far <= max(components.LINEAR, error) * size:
        raise ValueError(
            f"the terms of {what} must add up to it, but are {far:.4g} off, where "
            f"their magnitudes add up to {size:.4g}: an edit has changed it, or a site "
            "has another value than the program computes with."
        )


def _largest_first(
    rows: list[dict[str, Any]], count: int | None
) -> list[dict[str, Any]]:
    """Sorts rows by the magnitude of their terms, largest first, without zeros."""
    rows = [row for row in rows if abs(row["term"]) > 0]
    return sorted(rows, key=lambda row: -abs(row["term"]))[:count]
