"""What the head measures look at: a model, its data, and a number per example.

B batch, T positions, L layers, H heads of a layer, V value size per head, N examples.
Of an encoder-decoder L counts the attention parts of all kinds.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import models, tasks

Array = jax.Array

# So many layers are compiled one by one: it takes seconds, and saves the scan.
FEW_LAYERS = 6

# From the logits of a batch and the batch itself to a number per example, `[B]`, the
# lower the better; negate an accuracy.
Metric = Callable[[Array, tasks.Example], Array]


class Subject(NamedTuple):
    """What is measured.

    Attributes:
      model: The model; `models.build` makes one, and any other pure functions of the
        same arguments serve as well.
      metric: How badly the model does on each example of a batch.
      params: The model's parameters.
      batches: Batches of examples, all of one size, that can be iterated over more
        than once: a list, say, but no generator. A `tqdm` around a list shows progress.
    """

    model: models.Model
    metric: Metric
    params: Any
    batches: Iterable[tasks.Example]


def over(batches: Iterable[tasks.Example], function: Callable) -> list[Any]:
    """Returns the results of a function on each batch, as host arrays.

    Args:
      batches: As a `Subject` has them.
      function: From a batch to a tree of arrays.

    Raises:
      TypeError: If the batches can be gone through only once, like a generator.
      ValueError: If there are none.
    """
    if iter(batches) is batches:
        refuse_generator(batches)
    results = [fetched(function(example)) for example in batches]
    if not results:
        raise ValueError("batches must not be empty.")
    return results


def refuse_generator(batches: Any) -> None:
    """Raises TypeError about batches that can be gone through only once."""
    raise TypeError(
        "batches must be a list, or something else that can be gone through again, "
        f"got {type(batches).__name__}; list(batches) makes one."
    )


def run(model: models.Model, params: Any, example: tasks.Example, **options) -> Any:
    """Returns the model's `Output` on a batch, without dropout.

    Args:
      model: The model.
      params: Its parameters.
      example: The batch.
      **options: `interventions`, `start`; see `models.Model`.
    """
    given = example.model_inputs()
    inputs = given.pop("inputs")  # by place: a model's function may name it otherwise
    return model.apply(params, None, inputs, **given, is_training=False, **options)


def compact(model: models.Model, params: Any) -> tuple[models.Model, Any]:
    """Returns a model of the same numbers that compiles fast, and its parameters.

    A model of many layers that are alike becomes the one that scans them: one layer is
    compiled for all. For programs, which call it once: parameters are copied.

    Args:
      model: The model.
      params: Its parameters.
    """
    if model.scanned is None:
        return model, params
    is_deep = any(f"layer_{FEW_LAYERS}/" in module for module in params)
    return (model.scanned, models.stacked(params)) if is_deep else (model, params)


def of_maps(maps: Sequence[Any], function: Callable) -> list[Any]:
    """Returns a function of each attention map, a tree of arrays.

    Maps of many layers that are alike are stacked and looped over, so that the function
    is compiled once for them.

    Args:
      maps: One per layer.
      function: Of a map.
    """
    kinds: dict[Any, list[int]] = {}
    for i, each in enumerate(maps):
        leaves, structure = jax.tree.flatten(each)
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        kinds.setdefault((structure, shapes), []).append(i)
    results = [None] * len(maps)
    for layers in kinds.values():
        own = [maps[i] for i in layers]
        if len(own) > FEW_LAYERS:
            looped = jax.lax.map(function, jax.tree.map(lambda *x: jnp.stack(x), *own))
            found = [jax.tree.map(lambda x, j=j: x[j], looped) for j in range(len(own))]
        else:
            found = map(function, own)
        for i, result in zip(layers, found, strict=True):
            results[i] = result
    return results


def of_kinds(maps: Sequence[Any], function: Callable) -> list[Any]:
    """Returns a function of each attention map and its kind, a tree of arrays.

    Args:
      maps: `Output.maps`.
      function: Of a map, and by keyword `kind`: one of `models.KINDS`, or "" in models
        of one kind. What stands at queries and keys depends on it.
    """
    results = []
    for kind, group in itertools.groupby(
        zip(kinds(maps), maps, strict=True), operator.itemgetter(0)
    ):
        own = [each for _, each in group]
        results += of_maps(own, functools.partial(function, kind=kind))
    return results


def kinds(maps: Sequence[Any]) -> list[str]:
    """Returns the kind of each attention map of an `Output`; "" where there is one."""
    if not isinstance(maps, models.Maps):
        return [""] * len(maps)
    counts = zip(models.KINDS, maps.kinds, strict=True)
    return [kind for kind, count in counts for _ in range(count)]


def kinds_of(model: models.Model, params: Any, example: tasks.Example) -> list[str]:
    """Returns the kind of each layer of a model; [] where there is one kind."""
    if example.decoder_inputs is None:
        return []
    known = _known_kinds(model)
    if not known:  # tracing takes a while, so once for a model
        known += kinds(_abstract(model, params, example).maps)
    return known


@functools.lru_cache(maxsize=8)
def _known_kinds(model) -> list[str]:
    return []


def label(kinds: Sequence[str], layer: int) -> str:
    """Returns what a layer among those of all kinds is called: "cross 0", "layer 3".

    Args:
      kinds: The kind of each layer; (): there is one kind.
      layer: Its index.
    """
    if not kinds:
        return f"layer {layer}"
    return f"{kinds[layer]} {layer - list(kinds).index(kinds[layer])}"


def queries(example: tasks.Example, kind: str) -> tuple[Array, Array | None]:
    """Returns what stands at the queries of maps of a kind, and how many are valid.

    Args:
      example: The batch.
      kind: As in `of_kinds`.

    Returns:
      Tokens `[B, T]` or features `[B, T, D]`, and `[B]`; None: all are valid.
    """
    if kind in ("decoder", "cross"):
        return example.decoder_inputs, example.decoder_lengths
    return example.inputs, example.lengths


def tokens(example: tasks.Example, kind: str) -> Array | None:
    """Returns the tokens `[B, T]` at queries and keys of maps of a kind.

    Args:
      example: The batch.
      kind: As in `of_kinds`.

    Returns:
      None where there are features, or where queries and keys are of different texts.
    """
    own, _ = queries(example, kind)
    is_tokens = jnp.issubdtype(own.dtype, jnp.integer)
    return own if is_tokens and kind != "cross" else None


def num_heads(model: models.Model, params: Any, example: tasks.Example) -> list[int]:
    """Returns the number of heads of each layer."""
    return [each.shape[-3] for each in _abstract(model, params, example).maps]


def _abstract(model, params, example):
    return jax.eval_shape(lambda params, x: run(model, params, x), params, example)


def head_outputs(attention_map: Any) -> Array:
    """Returns what each head passes on, `[B, T, H, V]`: its weights times its values.

    Where attention is gated, times its gates too.

    Args:
      attention_map: A map with `value`.
    """
    value = attention_map.value
    if value is None:
        raise ValueError(
            "the map has no value, and a head's output is weights times values."
        )
    *batch_shape, heads, length, _ = attention_map.shape
    if not heads:
        shape = (*batch_shape, length, 0, value.shape[-1])
        return jnp.zeros(shape, value.dtype)
    value = value.repeat(heads // value.shape[-2], axis=-2)
    outputs = attention_map.apply(value).astype(value.dtype)
    return outputs if attention_map.gates is None else outputs * attention_map.gates


def fetched(tree: Any) -> Any:
    """Returns arrays as host arrays, gathered where several processes share them."""
    if all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def padded(layers: Sequence[np.ndarray]) -> np.ndarray:
    """Returns `[N, L, H]` float64 from L arrays `[N, H]`, NaN where heads are fewer."""
    widest = max(layer.shape[-1] for layer in layers)
    result = np.full((len(layers[0]), len(layers), widest), np.nan)
    for i, layer in enumerate(layers):
        result[:, i, : layer.shape[-1]] = layer
    return result
