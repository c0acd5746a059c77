"""Explains attention: the terms of a head's score, its outputs and its inputs."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from mha_haiku.core import attention, checks, models
from mha_haiku.lab import heads
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects import answers, computation, conversion, encoding
from mha_haiku.subjects.subject import (
    EXAMPLES,
    Subject,
    check_parameters,
    part_index,
    parts_of,
    refuse,
    verb,
)
from mha_haiku.training import tasks


@verb
def why(
    subject: Subject,
    inputs: Any,
    *,
    layer: int | None = None,
    head: int | None = None,
    query: int = -1,
    key: int | None = None,
    **options: Any,
) -> heads.why.Pairs | heads.why.Cells:
    """Explains why a head looks at a key: its score by pairs of components.

    Inputs are one text, or one row of tokens. The key defaults to the one with the
    largest weight. Without a layer the largest pairs of all heads are returned.
    Options are as in `heads.why.pairs`, or in `heads.why.cells`.

    Raises:
      ValueError: If there is no such place, or the query does not see the key.
    """
    batch = conversion.one(subject, inputs)
    model_and_batch = subject.model, subject.params, batch
    if layer is None:
        if head is not None:
            raise ValueError(f"head must be None without a layer, got {head!r}.")
        return heads.why.cells(*model_and_batch, [query], key, **options)
    head = checks.non_negative_integer("head", head)
    parts = parts_of(subject, batch)
    part = part_index(parts, layer)
    result = heads.why.pairs(*model_and_batch, part, head, query, key, **options)
    sides = conversion.labels(subject, batch, parts[part].kind)
    places = zip(sides, result.place[2:], strict=True)
    texts = [side[0][i] for side, i in places if side]
    title = result.title.replace(f"Layer {part}", f"Layer {layer}", 1)
    return dataclasses.replace(result, title=" ".join([title, *map(repr, texts)]))


@verb
def writes(
    subject: Subject,
    inputs: Any,
    *,
    layer: int,
    head: int,
    query: int = -1,
    answer: Any = None,
) -> heads.why.Terms:
    """Splits a head's output by source position and component.

    Arguments are as in `why`; with `answer`, a token or its text, it splits its logit.
    """
    batch = conversion.one(subject, inputs)
    parts = parts_of(subject, batch)
    part = part_index(parts, layer)
    token = None if answer is None else encoding.one_token(subject.codec, answer)
    place = subject.model, subject.params, batch, part, head, query
    result = heads.why.written(*place, answer=token)
    (texts,) = conversion.labels(subject, batch, parts[part].kind)[1] or [()]
    sources = tuple(f"{i} {text!r}" for i, text in enumerate(texts))
    labels = sources or result.labels[0], result.labels[1]
    title = result.title.replace(f"Layer {part}", f"Layer {layer}", 1)
    return dataclasses.replace(result, labels=labels, title=title)


@verb
def reads(subject: Subject, examples: Any = EXAMPLES) -> heads.why.Reads:
    """Measures which components each head's queries, keys and values read.

    Examples are as in `strongest`; next to it is the composition from weights.
    """
    check_parameters(subject, "reads")
    batches = computation.batches_given(subject, examples, targets=False)
    batches = batches or [subject.examples(examples)]
    return heads.why.reads(subject.model, subject.params, batches)


@verb
def strongest(
    subject: Subject, layer: int, head: int, examples: Any = 256, *, count: int = 10
) -> answers.Strongest:
    """Finds where in the data a head attends most, of queries that see several keys.

    Args:
      subject: The model.
      layer: The layer, of all attention parts.
      head: Number of the head in its layer.
      examples: Number of examples to search, or inputs: a list of texts.
      count: Number of places to return, each from another example.

    Raises:
      ValueError: If there is no such layer or head, or the count is below 1.
    """
    checks.positive_integer("count", count)
    batches = computation.batches_given(subject, examples, targets=False)
    batches = batches or [subject.examples(examples)]
    parts = parts_of(subject, batches[0])
    part = parts[part_index(parts, layer)]
    checks.integer_in("head", head, 0, len(part.names) - 1)
    path, kind = part.path, part.kind
    program = _strongest(subject.model, path, kind)
    places: list[tuple[np.ndarray, ...]] = []  # queries, keys and weights of batches
    texts: tuple[list, list] = [], []  # of the sides of maps
    for batch in batches:
        largest = program(subject.params, batch)
        weights, keys = (np.asarray(x)[:, head] for x in largest)
        if len(keys) != len(batch.inputs):
            why = "has windows of its inputs as rows, whose places are not known"
            refuse(subject, "strongest", why)
        # The largest weight of a query that sees one key is always 1.
        sees = keys[..., -1] >= 0
        valid = model_runs.valid(sees.shape[1], batch, model_runs.kind_of(path))
        values = np.where(sees & np.asarray(valid), weights, -np.inf)
        best, n = values.argmax(-1), np.arange(len(values))
        places.append((best, keys[n, best, 0], values[n, best]))
        for side, names in zip(
            texts, conversion.labels(subject, batch, kind), strict=True
        ):
            side.extend(names or [()] * len(values))
    queries, keys, weights = map(np.concatenate, zip(*places, strict=True))
    order = np.argsort(-weights, kind="stable")
    order = order[np.isfinite(weights[order])][:count]
    queries, keys, weights = (x[order] for x in (queries, keys, weights))
    sides = (tuple(side[i] for i in order) for side in texts)
    tokens, key_tokens = (side if any(side) else () for side in sides)
    return answers.Strongest(
        layer, head, order, queries, keys, weights, tokens, key_tokens
    )


@functools.lru_cache(maxsize=8)
def _strongest(model: models.Model, path: str, kind: str):
    """Makes a program: each query's largest weight, and its two keys."""

    @jax.jit  # which does not keep what else the model computes
    def run(params: Any, batch: tasks.Example):
        def largest(attention_map: attention.AttentionMap):
            attention_map = model_runs.without_padding(
                attention_map, model, batch, kind
            )
            top = attention_map.top(min(2, attention_map.shape[-1]))
            return top.weights[..., 0], top.positions

        name = f"{path}/map".removeprefix("/")
        return model_runs.look(model, params, batch, {(name,): largest})[1][name]

    return run
