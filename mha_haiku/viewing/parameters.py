"""A model's parameters by layer and head, as tables.

H heads of a layer; other letters as in `modules.anatomy`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku.modules import anatomy
from mha_haiku.report import drawing
from mha_haiku.viewing import markup


def is_parameters(value: Any) -> bool:
    """Returns whether a value looks like Haiku's parameters: arrays by two names."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(module, Mapping) for module in value.values())
        and all(
            hasattr(array, "shape") and hasattr(array, "dtype")
            for module in value.values()
            for array in module.values()
        )
    )


def fragment(
    params: Mapping[str, Mapping[str, Any]],
    heads: Sequence[Any] | Sequence[Sequence[Any]] | None = None,
) -> markup.Html:
    """Returns the sizes of all parameters, and of each head how large they are.

    Args:
      params: By the names of modules and of their parameters.
      heads: The names of the heads of a layer, or a list of such for each layer: how
        many there are is not known from the parameters. None: sizes alone.

    Raises:
      ValueError: If a parameter does not hold that many heads.
    """
    total = sum(_size(array) for module in params.values() for array in module.values())
    nbytes = sum(
        _size(array) * np.dtype(array.dtype).itemsize
        for module in params.values()
        for array in module.values()
    )
    parts = [_sizes_table(params)]
    if heads is not None:
        parts.append(_heads_table(params, heads))
    title = f"{total:,} parameters, {nbytes / 1e6:,.1f} MB"
    return markup.block(title, *parts)


def head_norms(
    params: Mapping[str, Mapping[str, Any]], heads: Sequence[Sequence[Any]]
) -> np.ndarray:
    """Returns the norm of each head's own parameters, `[L, H]`.

    That is the root of the sum of squares of the queries' and the output's weights (and
    biases and scores) that belong to the head alone; NaN where a layer has fewer heads.

    Raises:
      ValueError: If a parameter does not hold that many heads.
    """
    squares = np.zeros((len(heads), max(map(len, heads), default=0)))
    for module, arrays in params.items():
        layer = anatomy.layer_of(module)
        for name, array in arrays.items() if layer else ():
            axis = anatomy.axis_of(module, name)
            if axis is None or axis.holds != anatomy.HEADS:
                continue
            stacked = layer.index is None
            values = np.asarray(array, np.float64)
            for i, each in enumerate(values if stacked else [values]):
                place = i if stacked else layer.index
                if place >= len(heads):
                    raise ValueError(
                        f"heads must be those of each layer, got {len(heads)} lists "
                        f"and a layer {place}."
                    )
                count = len(heads[place])
                if count:
                    squares[place, :count] += _of_heads(each, axis, count, module)
    for row, names in zip(squares, heads, strict=True):
        row[len(names) :] = np.nan
    return np.sqrt(squares)


def _of_heads(values, axis, count, module) -> np.ndarray:
    size = values.shape[axis.place]
    if size % count:
        raise ValueError(
            f"heads must divide the axis of {size} of {module!r}, got {count} heads."
        )
    values = np.moveaxis(values, axis.place, 0).reshape(count, -1)
    return (values**2).sum(-1)


def _size(array) -> int:
    return math.prod(array.shape)


def _sizes_table(params) -> markup.Html:
    """Returns a row per layer and part: names, shapes and number of parameters."""
    rows = []
    for module, arrays in params.items():
        shapes = ", ".join(
            f"{name} {'x'.join(map(str, array.shape)) or 'scalar'}"
            for name, array in arrays.items()
        )
        dtypes = sorted({str(array.dtype) for array in arrays.values()})
        count = sum(map(_size, arrays.values()))
        rows.append((module, shapes, ", ".join(dtypes), f"{count:,}"))
    table = markup.plain_table(
        rows, columns=("module", "shapes", "dtype", "parameters")
    )
    summary = markup.tag("summary", f"{len(rows)} modules")
    return markup.tag("details", summary, table)


def _heads_table(params, heads) -> markup.Html:
    if not len(heads):
        raise ValueError("heads must not be empty.")
    if not isinstance(heads[0], Sequence) or isinstance(heads[0], str):
        heads = [list(heads)] * _num_layers(params)
    norms = head_norms(params, heads)
    names = np.full(norms.shape, "", object)
    for i, row in enumerate(heads):
        for j, name in enumerate(row):
            names[i, j] = f"head {name}: {norms[i, j]:.3g}"
    table = markup.heat_table(
        norms,
        rows=[f"layer {i}" for i in range(len(norms))],
        columns=[str(i) for i in range(norms.shape[1])],
        corner="head",
        scales=[drawing.Scale.of(norms)] * len(norms),
        titles=names,
    )
    note = "Norm of each head's own weights, those of queries and of its output."
    return markup.tag("div", markup.tag("div", note), table)


def _num_layers(params) -> int:
    layers = [(anatomy.layer_of(module), module) for module in params]
    indices = [
        layer.index + 1 for layer, _ in layers if layer and layer.index is not None
    ]
    stacked = [
        jax.tree.leaves(params[module])[0].shape[0]
        for layer, module in layers
        if layer and layer.index is None
    ]
    return max([*indices, *stacked], default=0)
