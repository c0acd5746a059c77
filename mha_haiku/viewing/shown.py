"""What a notebook shows of each kind of object, and `show` of what is no map.

L layers, H heads of a layer. Tables have styles at their elements alone and no script.
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku import attention, display, heads, masks
from mha_haiku.report import drawing
from mha_haiku.viewing import collect, markup, parameters, pixels, showing

_MOST_MASK_CELLS = 64  # positions of a mask that are drawn
_MASK_SIDE = 128  # pixels
_MOST_MASKS = 8


def html(value: Any) -> str:
    """Returns what a notebook shows of an object; its short `repr` where it is traced.

    A map's page, or a table. What cannot be shown has a sentence that says why.
    """
    if display.is_traced(_arrays(value)):
        return markup.preformatted(repr(value))
    try:
        if collect.is_maps(value):
            return showing.show(value).inline
        return fragment(value)
    except ValueError as error:
        why = markup.tag("div", f"Not shown: {error}")
        return markup.tag("div", markup.preformatted(repr(value)), why)


def view(value: Any, *, budget: int, **given: Any) -> showing.View:
    """Returns the view of what is no attention map; arguments as of `show`."""
    if isinstance(value, str | os.PathLike) or _is_run(value):
        from mha_haiku.viewing import runs

        return runs.view(value, budget=budget, **given)
    given = {name: each for name, each in given.items() if each is not None}
    if parameters.is_parameters(value):
        names = given.pop("heads", None)
        content = parameters.fragment(value, names)
        title = "Parameters"
    else:
        content, title = fragment(value), type(value).__name__
    if given:
        raise ValueError(
            f"{next(iter(given))} must be None for {type(value).__name__}, which has "
            "no maps."
        )
    return showing.View(title, showing.document(title, content), content)


@functools.singledispatch
def fragment(value: Any) -> markup.Html:
    """Returns an object as HTML without a script.

    Raises:
      TypeError: If it is nothing that can be shown.
    """
    if _is_run(value):
        from mha_haiku.viewing import runs

        return runs.fragment(value)
    raise TypeError(
        "what is shown must be attention maps, a run or its folder, statistics, "
        f"importance, roles, a mask or parameters, got {type(value).__name__}."
    )


@fragment.register
def _(statistics: attention.Statistics) -> markup.Html:
    means, errors = means_of(statistics)
    values = np.array(list(means.values()))
    entries = [attention.STATISTICS[name] for name in means]
    table = markup.heat_table(
        values,
        rows=[
            markup.Column.of(f"{each.name}, {each.unit}", each.label)
            for each in entries
        ],
        columns=range_names(values.shape[1]),
        corner="head",
        scales=[
            drawing.Scale.of(row, each.unit)
            for row, each in zip(values, entries, strict=True)
        ],
        titles=with_errors(values, np.array(list(errors.values()))),
    )
    shape = np.shape(statistics.num_queries)
    count = math.prod(shape[:-1])
    over = "" if count == 1 else f", means over {count} examples"
    return markup.block(
        f"Statistics of {values.shape[1]} heads{over}",
        table,
        note="Of queries that see a key; each row has its own colour scale.",
    )


@fragment.register
def _(importance: heads.Importance) -> markup.Html:
    mean = np.asarray(importance.mean)
    if not mean.size:
        raise ValueError("there are no heads.")
    error = np.asarray(importance.standard_error)
    count = len(importance.per_example)
    table = markup.heat_table(
        mean,
        rows=[f"layer {i}" for i in range(len(mean))],
        columns=range_names(mean.shape[1]),
        corner="head",
        scales=[drawing.Scale.of(mean)] * len(mean),
        titles=with_errors(mean, error),
        shown=with_errors(mean, error) if mean.shape[1] <= 8 else None,
    )
    return markup.block(
        f"Importance of heads, mean ± standard error over {count} examples",
        table,
        note="In units of the metric that was measured; the larger, the more it "
        "matters.",
    )


@fragment.register
def _(roles: heads.Roles) -> markup.Html:
    names = np.asarray(roles.names)
    if not names.size:
        raise ValueError("there are no heads.")
    scores = deciding_scores(roles)
    text = np.where(names == "", "", names)
    numbers = np.vectorize(lambda x: "" if np.isnan(x) else f" {x:.2f}", otypes=[str])
    table = markup.heat_table(
        np.where(names == "", np.nan, np.nan_to_num(scores)),
        rows=[f"layer {i}" for i in range(len(names))],
        columns=range_names(names.shape[1]),
        corner="head",
        scales=[drawing.Scale(0.0, 1.0, "viridis")] * len(names),
        shown=np.char.add(text.astype(str), numbers(scores)),
    )
    seen = sorted(set(names.ravel()) & set(heads.ROLES))
    legend = "; ".join(f"{name}: {heads.ROLES[name].label}" for name in seen)
    return markup.block(
        "Roles of heads, with the scores that decide", table, note=legend
    )


@fragment.register
def _(mask: masks.Mask) -> markup.Html:
    batch_ndim = mask.batch_ndim()
    sizes = _mask_sizes(mask)
    cells = np.asarray(mask.tile(range(sizes[0]), range(sizes[1])))
    del batch_ndim
    drawn = cells.reshape(-1, *cells.shape[-2:])[:_MOST_MASKS].astype(float)
    image = pixels.thumbnails(
        np.where(drawn == 0, np.nan, drawn), columns=_MOST_MASKS, side=_MASK_SIDE
    )
    height, width, _ = image.shape
    picture = markup.picture(
        pixels.png(image), alt=repr(mask), width=width, height=height
    )
    more = "" if len(drawn) == np.prod(cells.shape[:-2]) else " Of the first ones."
    return markup.block(
        repr(mask),
        picture,
        note=f"Queries down, keys across, the first {sizes[0]} x {sizes[1]}; yellow "
        f"may attend, grey is masked.{more}",
    )


def means_of(
    statistics: attention.Statistics,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns each statistic of each head, `[H]`, and its standard error over examples.

    Statistics per query are averaged.

    Raises:
      ValueError: If there are no examples or no heads.
    """
    count = np.asarray(statistics.num_queries)
    if not count.size:
        raise ValueError(f"there are no examples or no heads: {statistics!r}.")
    by_head = -1, count.shape[-1]
    means, errors = {}, {}
    for name in attention.STATISTICS:
        each = getattr(statistics, name)
        if each is None:
            continue
        each = np.asarray(each, np.float64)
        if each.ndim > count.ndim:  # per query, 0 where it is masked
            each = each.sum(-1) / np.maximum(count, 1)
        if name != "num_queries":
            each = np.where(count == 0, np.nan, each)
        means[name] = heads.means.mean(each.reshape(by_head))
        errors[name] = heads.means.standard_error(each.reshape(by_head))
    return means, errors


def deciding_scores(roles: heads.Roles) -> np.ndarray:
    """Returns the score that decided each role, `[L, H]`; NaN where none did."""
    names = np.asarray(roles.names)
    scores = np.full(names.shape, np.nan)
    for name, role in heads.ROLES.items():
        score = roles.scores.get(role.score or name)
        if score is not None:
            scores = np.where(names == name, score, scores)
    return scores


def with_errors(values: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Returns the text of each number, with its standard error where that is known."""
    text = [
        drawing.number(value)
        + ("" if np.isnan(error) else f" ± {drawing.number(error)}")
        for value, error in zip(values.ravel(), errors.ravel(), strict=True)
    ]
    return np.array(text, object).reshape(values.shape)


def range_names(count: int) -> Sequence[str]:
    """Returns "0", "1", ..."""
    return [str(i) for i in range(count)]


def _mask_sizes(mask) -> tuple[int, int]:
    """Returns how many queries and keys of a mask are drawn."""
    known = [x for x in jax.tree.leaves(mask) if np.ndim(x)]
    sizes = [0, 0]
    for leaf in _parts(mask):
        if isinstance(leaf, masks.arrays.Dense):
            sizes = np.maximum(sizes, np.shape(leaf.values)[-2:])
        elif isinstance(leaf, masks.arrays.Segments):
            own = leaf.query_ids.shape[-1], leaf.key_ids.shape[-1]
            sizes = np.maximum(sizes, own)
    if not max(sizes):
        longest = max((int(np.max(x, initial=0)) for x in known), default=16)
        sizes = [max(16, longest)] * 2
    return tuple(min(_MOST_MASK_CELLS, max(1, int(size))) for size in sizes)


def _parts(mask):
    """Yields a mask and all masks inside of it."""
    yield mask
    for name in ("left", "right", "mask"):
        inner = getattr(mask, name, None)
        if isinstance(inner, masks.Mask):
            yield from _parts(inner)


def _arrays(value: Any) -> Any:
    """Returns what may be traced of a value."""
    return () if _is_run(value) else value


def _is_run(value: Any) -> bool:
    """Returns whether a value is a run, without importing what runs need."""
    return type(value).__module__ == "mha_haiku.runs.folders"
