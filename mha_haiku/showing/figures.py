"""Maps as figures: the heads of layers in a grid, and a picture of each layer of a run.

P query and Q key bins, which are single positions in a whole map.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mha_haiku.core import checks
from mha_haiku.records import labels
from mha_haiku.records.map_set import Axis, MapSet
from mha_haiku.showing import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Up to this many positions the axes show tokens; above it, position numbers.
_MOST_TOKENS = 64
# With more keys than this most weights are small, and a square-root scale shows them.
_MOST_LINEAR = 32

_LONGEST_TOKEN = 16
_SMALLEST = 6.0  # points of a label
_SIDE = 2.2  # inches of a panel
_MOST_PANELS = 256


def pictures(
    maps: MapSet, formats: Sequence[str] = ("png",)
) -> Iterator[tuple[str, bytes]]:
    """Yields file names and bytes of pictures of layers with heads, in each format.

    They show the first example, on one color scale; the page has the mean.
    """
    example = maps.examples[0]
    count = len(maps.inputs)
    which = f" (the first of {count} in index.html)" if count > 1 else ""
    keys = max(example.axes(layer).keys.bins for layer in maps.layers)
    largest = max(float(np.max(x, initial=0.0)) for x in example.weights)
    for place, layer in enumerate(maps.layers):
        axes = example.axes(layer)
        note = "One color scale for all layers."
        if axes.alignment is not None:
            note += " Frames: where the task says that a row should look."
        draw = functools.partial(
            of_example,
            maps.only(0, [place]),
            scale=_scale(keys),
            largest=largest,
            # Room for all tokens.
            side=max([_SIDE, *(0.1 * x.bins for x in axes[:2] if _has_tokens(x))]),
            title=f"{maps.name}: {layer.name}, {example.name}{which}",
            note=f"{note} {axes.pooling}",
        )
        number = place if layer.number is None else layer.number
        for kind in formats if layer.heads else ():
            name = f"{layer.kind or 'layer'}_{number:02d}.{kind}"
            yield name, canvas.content(draw, kind)


def of_example(
    maps: MapSet,
    *,
    scale: str | None = None,
    size: tuple[float, float] | None = None,
    title: str | None = None,
    note: str = "",
    largest: float | None = None,
    side: float = _SIDE,
) -> "Figure":
    """Draws the heads of a set of one example, whose layers have the same axes.

    Tokens are shown up to 64 positions. The scale is "linear" or "root" (small weights
    are seen), by default "linear" up to 32 keys, else "root". It ends at `largest`, by
    default the largest weight of these maps. The size is in inches, by default from the
    number of heads and a panel's `side`. The note is a line below the title.
    """
    import matplotlib.colors

    (one,) = maps.examples
    signed = any((weights < 0).any() for weights in one.weights)
    first, *others = maps.layers
    sides = one.axes(first)
    queries, keys, aligned = sides.queries, sides.keys, sides.aligned_cells()
    places = [(i, h) for i, x in enumerate(maps.layers) for h in range(len(x.heads))]
    count, widths = len(places), {len(layer.heads) for layer in maps.layers}
    if not 0 < count <= _MOST_PANELS:
        raise ValueError(
            f"heads and layer must choose from 1 to {_MOST_PANELS} maps for a figure, "
            f"got {count}."
        )
    if others and len(widths) == 1 and max(widths) > 1:  # a row for each layer
        columns = max(widths)
    else:
        columns = count if count <= 4 else math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    if title is None and not others and (first.kind or first.name.startswith("layer")):
        title = first.name
    if size is None:
        tall = side * min(3.0, max(0.3, queries.bins / keys.bins))
        size = (columns * side + 1.6, rows * (tall + 0.3) + (1.2 if note else 0.7))
    scale = _scale(keys.bins) if scale is None else scale
    if largest is None:
        largest = max(
            float(np.nanmax(np.abs(one.weights[i][h]), initial=0.0)) for i, h in places
        )
    # Rounded up, so that the top of the bar carries a number: 1 rather than 0.998.
    top = canvas.rounded_up(largest)
    power = 1.0 if scale == "linear" else 0.5
    norm = matplotlib.colors.PowerNorm(power, vmin=0.0, vmax=top)
    if signed:  # 0 is in the middle
        bends = functools.partial(_bent, power), functools.partial(_bent, 1 / power)
        norm = matplotlib.colors.FuncNorm(bends, vmin=-top, vmax=top, clip=True)

    sheet = canvas.sheet(*size, title=_literal(title or ""), note=note)
    grid = sheet.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    images = []
    for axes, (i, h) in zip(grid.flat, places, strict=False):
        layer = maps.layers[i]
        axes.set_facecolor(canvas.absent())
        image = axes.imshow(
            np.ma.masked_invalid(one.drawn(i)[h].astype(np.float32)),
            norm=norm,
            cmap="RdBu_r" if signed else "viridis",
            interpolation="nearest",
        )
        images.append(image)
        if aligned is not None:
            canvas.frames(axes, aligned)
        name = f"{layer.name}, " if others else ""
        name = _literal(f"{name}head {layer.heads[h]}", 40)
        axes.set_title(name, fontsize=9, parse_math=False)
    for axes in list(grid.flat)[count:]:
        axes.set_axis_off()
    left = list(grid[:, 0])
    # The lowest panels of all columns.
    low = [grid[(count - 1 - i) // columns, i] for i in range(columns)]
    for axes in left:
        axes.set_ylabel(_named("query", queries), fontsize=8)
    for axes in low:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(_named("key", keys), fontsize=8)
    bar = sheet.colorbar(images[-1], ax=grid.ravel().tolist(), shrink=0.8)
    how = "" if scale == "linear" else " (square-root scale)"
    bar.set_label(f"attention weight{how}", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    for _ in range(2):  # labels take room from the panels, whose cells are smaller then
        sheet.draw_without_rendering()
        box = left[0].get_window_extent()
        inches = box.height / sheet.dpi, box.width / sheet.dpi
        for axes in left:
            _label(axes, queries, "y", inches[0])
        for axes in low:
            _label(axes, keys, "x", inches[1])
    return sheet


def of_picture(
    maps: MapSet,
    query: int | str,
    *,
    size: tuple[float, float] | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws the picture of a set of one example under the weights of a query.

    The query is a position, or the text of the last of some. The mean of all heads is
    above a row for each layer; titles have the share that is on the picture.
    """
    (one,) = maps.examples
    sides = one.axes(maps.layers[0])
    texts = sides.keys.tokens
    # Of several parts of a picture the last one, which is the whole.
    places = {x: i for i, x in enumerate(texts) if labels.PATCH.fullmatch(x)}
    if sides.images is None or not places or sides.keys.is_pooled:
        raise ValueError("query= is for maps whose keys are patches of a picture.")
    at = _place(sides.queries, query)
    corners = [tuple(map(int, x.split(","))) for x in places]
    rows, columns = (1 + max(x) for x in zip(*corners, strict=True))
    order = [places[f"{i},{j}"] for i in range(rows) for j in range(columns)]
    patches = sides.images[order].reshape(rows, columns, *sides.images.shape[1:])
    picture = np.concatenate(np.concatenate(patches, 1), 1)
    is_image = np.array([labels.is_of_image(x) for x in texts])
    panels = {
        (1 + i, h): (f"{layer.name}, head {head}", one.weights[i][h][at])
        for i, layer in enumerate(maps.layers)
        for h, head in enumerate(layer.heads)
    }
    panels[0, 0] = "mean of heads", np.mean([x for _, x in panels.values()], 0)
    lines, across = (1 + max(x) for x in zip(*panels, strict=True))
    size = size or (across * _SIDE + 0.4, lines * (_SIDE * rows / columns + 0.3) + 0.5)
    if title is None:
        title = f"Where {sides.queries.tokens[at].strip()!r} looks in the picture"
    sheet = canvas.sheet(*size, title=_literal(title))
    grid = sheet.subplots(lines, across, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    height, width = (x - 0.5 for x in picture.shape[:2])
    style = {"cmap": "viridis", "alpha": 0.6, "interpolation": "nearest", "vmin": 0}
    for place, (name, weights) in panels.items():
        cells = weights[order].reshape(rows, columns)
        grid[place].imshow(picture)
        grid[place].imshow(cells, extent=(-0.5, width, height, -0.5), **style)
        share = weights[is_image].sum() / max(weights.sum(), 1e-30)
        name = _literal(f"{name}: {share:.0%}", 60)
        grid[place].set_title(name, fontsize=8, parse_math=False)
    return sheet


def _place(queries: Axis, query: int | str) -> int:
    if not isinstance(query, str):
        return checks.integer_in("query", query, -queries.bins, queries.bins - 1)
    texts = [x.strip() for x in queries.tokens]
    checks.choice("query", query.strip(), [*dict.fromkeys(texts)])
    return len(texts) - 1 - texts[::-1].index(query.strip())


def _named(side: str, axis: Axis) -> str:
    return f"{side}: {axis.label}" if axis.label else side


def _label(axes: "Axes", axis: Axis, which: str, inches: float) -> None:
    """Labels the bins along one side of a panel, as many as its inches have room for.

    Labels are tokens if there are few bins, else numbers.
    """
    bins = axis.bins
    set_ticks = axes.set_xticks if which == "x" else axes.set_yticks
    points = max(_SMALLEST, min(9.0, 72 * 0.8 * inches / bins))
    has_tokens = _has_tokens(axis)
    if has_tokens:
        names = [_literal(x, _LONGEST_TOKEN) for x in labels.pieces(axis.tokens)]
        lines = points
    else:
        names = [str(edge) for edge in axis.edges[:bins]]
        points = 7
        lines = points if which == "y" else 0.7 * points * len(names[-1])
    step = math.ceil(1.1 * lines * bins / (72 * inches))
    places = range(0, bins, step if has_tokens else max(step, _step(bins)))
    is_turned = which == "x" and has_tokens and max(map(len, names)) > 1
    style = {"fontsize": points, "parse_math": False, "rotation": 90 * is_turned}
    set_ticks(places, [names[i] for i in places], **style)
    axes.tick_params(length=2, pad=2)


def _has_tokens(axis: Axis) -> bool:
    return any(axis.tokens) and not axis.is_pooled and axis.bins <= _MOST_TOKENS


def _bent(power: float, x: np.ndarray) -> np.ndarray:
    return np.sign(x) * np.abs(x) ** power


def _scale(num_keys: int) -> str:
    return "linear" if num_keys <= _MOST_LINEAR else "root"


def _step(cells: int) -> int:
    """Returns the distance of the cells with a label, of which there are at most 9."""
    steps = (step * 10**power for power in range(9) for step in (1, 2, 5))
    return next(step for step in steps if cells / step <= 9)


def _literal(text: str, longest: int = 200) -> str:
    return labels.drawable(labels.one_line(text), canvas.fonts()[1], longest)
