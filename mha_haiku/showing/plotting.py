"""`plot`: one figure of maps, statistics, importance, or of a run's files.

L layers, H heads of a layer.
"""

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_haiku.core import attention, checks
from mha_haiku.records import Layer
from mha_haiku.records.map_set import MapSet
from mha_haiku.showing import drawing, figures, head_figures, sets, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PANELS = 256


def plot(
    what: Any,
    *,
    head: int | Sequence[int] | None = None,
    layer: int | str | None = None,
    example: int = 0,
    tokens: Any = None,
    key_tokens: Any = None,
    colors: str | None = None,
    scale: str | None = None,
    size: tuple[float, float] | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws a figure fit for a paper, without a window.

    `figure.savefig("map.pdf")` writes it, in vectors with text as text if the format
    has them; a notebook displays it.

    Args:
      what: Attention maps, a `MapSet`, or a subject, a run or its folder, whose maps
        are of held-out examples, as in `show`; statistics, importance or roles; the
        result of a verb (`subject.importance()`, ...); or the path of a run's file:
        `metrics.jsonl`, `timeline.jsonl`, `pruning.csv` or `maps.npz`.
      head: Head of the maps, or a list of heads. Defaults to all, in a grid.
      layer: Layer of the maps, from 0. Defaults to all layers, one row per layer. For
        an encoder-decoder also "cross.0", or "cross" for all of a kind, which is the
        default.
      example: Example of the maps, counted over all batch axes.
      tokens: Labels of the maps: the text of each query, `[T]`, or `[N, T]` for several
        examples.
      key_tokens: The text of each key. Defaults to `tokens` if T is S.
      colors: Name of matplotlib's color map for maps.
      scale: Color scale of maps: "linear", "root" or "log". The default
        depends on the number of keys.
      size: Width and height in inches. The default depends on the content.
      title: Title of the figure. Defaults to a description of it.

    Raises:
      TypeError: If there is no figure of `what`.
      ValueError: If there is no such head, layer, example, color map or scale, tokens
        do not fit, or an argument does not apply to this figure.
      ModuleNotFoundError: If matplotlib is not installed.

    Example:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4))
      >>> figure = mh.plot(mh.attend(query, key, value)[1], head=1, tokens="abcde")
      >>> len(figure.axes)  # figure.savefig("map.pdf")
      2
    """
    if size is not None:
        if not isinstance(size, Sequence) or len(size) != 2:
            raise ValueError(f"size must be (width, height) in inches, got {size!r}.")
        width, height = (checks.positive_number("size", x) for x in size)
        size = width, height
    texts = {"tokens": tokens, "key_tokens": key_tokens}
    found = sets.text_maps(what, **texts)
    with drawing.style():
        if found is not None:
            maps = sets.layers_of(found.maps)
            count = math.prod(list(maps.values())[-1].shape[:-3])
            checks.integer_in("example", example, 0, count - 1)
            chosen = _chosen_layers(list(maps), layer)
            whole = sets.map_set(found, layers=chosen, only=example, has_numbers=False)
        elif _is_saved(what) or (sets.has_own(what) and not _is_file(what)):
            if tokens is not None or key_tokens is not None:
                raise ValueError(
                    "tokens must be None for saved maps, which have their own."
                )
            whole = MapSet.load(what) if _is_saved(what) else sets.map_set_of(what)
            checks.integer_in("example", example, 0, len(whole.examples) - 1)
            whole = whole.only(example, _chosen_layers(whole.layers, layer))
        else:
            of_maps = dict(head=head, layer=layer, colors=colors, scale=scale)
            of_maps |= {**texts, "example": example or None}
            for name, value in of_maps.items():
                if value is not None:
                    raise ValueError(
                        f"{name} is for attention maps, and not for "
                        f"{type(what).__name__}."
                    )
            figure = figure_of(what, title=title)
            if size is not None:
                figure.set_size_inches(size)
            return figure
        if head is not None:
            whole = sets.with_heads(whole, head if np.ndim(head) else [head])
        count = sum(len(each.heads) for each in whole.layers)
        if count > _MOST_PANELS:
            raise ValueError(
                f"head and layer must choose at most {_MOST_PANELS} maps for a figure, "
                f"got {count}."
            )
        return figures.of_example(
            whole, colors=colors, scale=scale, size=size, title=title
        )


def _chosen_layers(layers: Sequence[Layer], wanted: int | str | None) -> list[int]:
    """Returns the indices of the wanted layers, which are of one kind."""
    kinds = [layer.kind for layer in layers]
    if wanted is None:
        return [i for i, kind in enumerate(kinds) if kind == kinds[-1]]
    if not isinstance(wanted, str):
        return [checks.integer_in("layer", wanted, 0, len(layers) - 1)]
    if wanted in kinds:
        return [i for i, kind in enumerate(kinds) if kind == wanted]
    names = [layer.name.removeprefix("layer ") for layer in layers]
    addresses = [name.replace(" ", ".") for name in names]
    checks.choice("layer", wanted, [*dict.fromkeys(filter(None, kinds)), *addresses])
    return [addresses.index(wanted)]


def _is_file(what: Any) -> bool:
    return isinstance(what, str | os.PathLike) and not Path(what).is_dir()


def _is_saved(what: Any) -> bool:
    return _is_file(what) and Path(what).name == "maps.npz"


@functools.singledispatch
def figure_of(what: Any, *, title: str | None) -> "Figure":
    """Draws objects that are not maps."""
    if isinstance(picture := getattr(what, "picture", None), functools.partial):
        return drawn(picture, title)
    raise TypeError(
        "what must be attention maps, statistics, importance, roles, the result of a "
        "study or the path of a file that a run has written, got "
        f"{type(what).__name__}."
    )


@figure_of.register(attention.Statistics)
def _(what: attention.Statistics, *, title: str | None) -> "Figure":
    found = shown.heads_of(what)
    return head_figures.picture(found, title=title or "Statistics of heads")


def drawn(picture: functools.partial, title: str | None) -> "Figure":
    """Draws a picture, with `title` instead of its title if there is one."""
    return picture() if title is None else picture(title=title)
