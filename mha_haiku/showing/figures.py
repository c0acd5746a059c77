"""Maps as pictures: one of each layer of a run, and grids of heads for a paper.

In the picture of a layer each head has a panel for the first example, with its tokens
on both axes where they are legible, and one below it for the mean over many examples
where the run saved that. All pictures of a run share one colour scale, so that layers
can be compared. On cross maps frames show where the rows should look, if that is known.

P query and Q key bins, which are single positions in a whole map.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mha_haiku.core import checks
from mha_haiku.showing import drawing, labels
from mha_haiku.showing.map_set import Axis, MapSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_BAR_INCHES = 1.0  # the colour bar, its numbers and its name
# Up to this many positions the axes show tokens; above it, position numbers.
_MOST_TOKENS = 64
_LONGEST_TOKEN = 12  # characters
# With more keys than this most weights are small, and a square-root scale shows them.
_MOST_LINEAR = 32

SCALES = ("linear", "root", "log")
_MOST_PANELS = 256
_LONGEST_TOKEN_OF_PANELS = 16
_SMALLEST = 6.0  # points of a label
_SIDE = 2.2  # inches of a panel


def pictures(
    maps: MapSet, formats: Sequence[str] = ("png",)
) -> Iterator[tuple[str, bytes]]:
    """Yields each layer's pictures, one of each format: file names and bytes."""
    scale = _shared_scale(maps)
    draw = drawing.picture(layer_figure)
    for place, layer in enumerate(maps.layers):
        number = place if layer.number is None else layer.number
        for kind in formats:
            name = f"{layer.kind or 'layer'}_{number:02d}.{kind}"
            yield name, draw(maps, place, scale, format=kind)


def layer_figure(maps: MapSet, layer: int, scale: "Normalize") -> "Figure":
    """Draws the heads of one layer, on a scale from 0 to the largest weight."""
    from matplotlib import cm

    heads, example, mean = maps.layers[layer].heads, maps.examples[0], maps.mean
    axes = example.axes(maps.layers[layer])
    bands = 2 if heads and mean is not None else 1
    rows, columns = _grid(len(heads))
    across, down, margin = _panel_inches(axes[:2])
    step_across, step_down = across + margin + 0.2, down + margin + 0.35
    width = columns * step_across + _BAR_INCHES
    heading = _heading(maps, layer, width)
    top = 0.25 + 0.21 * len(heading)
    height = top + rows * bands * step_down
    sheet = drawing.figure_class()((width, height), dpi=drawing.DOTS_PER_INCH)

    def panel(row: int, column: int, title: str) -> "Axes":
        left = column * step_across + margin
        bottom = height - top - row * step_down - 0.3 - down
        place = (left / width, bottom / height, across / width, down / height)
        drawn = sheet.add_axes(place)
        drawn.set_title(_literal(title), fontsize=10, parse_math=False)
        return drawn

    for head, name in enumerate(heads):
        row, column = divmod(head, columns)
        drawn = panel(row * bands, column, f"head {name}")
        tokens = _has_tokens(axes[:2])
        _draw(drawn, example.weights[layer][head], scale, axes[:2], tokens)
        if (aligned := axes.aligned_cells()) is not None:
            drawing.frames(drawn, aligned)
        if mean is not None:
            sides = mean.axes(maps.layers[layer])[:2]
            drawn = panel(row * bands + 1, column, f"head {name}, {mean.name}")
            _draw(drawn, mean.weights[layer][head], scale, sides, False)
    if not heads:
        panel(0, 0, "this layer has no heads left").set_axis_off()
    tall = min(height - top - 0.8, 5.0)
    bar = sheet.add_axes(
        (1 - (_BAR_INCHES - 0.2) / width, 1 - (top + 0.3 + tall) / height)
        + (0.18 / width, tall / height)
    )
    sheet.colorbar(cm.ScalarMappable(scale, "viridis"), cax=bar)
    how = "" if scale.gamma == 1 else " (square-root scale)"
    bar.set_ylabel(f"attention weight{how}", fontsize=9)
    sheet.text(
        0.15 / width,
        1 - 0.12 / height,
        "\n".join(heading),
        va="top",
        fontsize=11,
        linespacing=1.3,
        parse_math=False,
    )
    return sheet


def _heading(maps: MapSet, layer: int, width: float) -> list[str]:
    """Wraps the lines above the panels to a figure `width` inches wide."""
    example, count = maps.examples[0], len(maps.inputs)
    which = f"{maps.layers[layer].name}, {example.name}"
    if count > 1:
        which += f" (the first of {count} in index.html)"
    lines = [maps.name, which, "One colour scale for all layers."]
    axes = example.axes(maps.layers[layer])
    if axes.alignment is not None:
        lines.append("Frames: where the task says that a row should look.")
    if maps.is_pooled:
        queries, keys = (int(np.diff(axis.edges).max()) for axis in axes[:2])
        lines.append(
            f"Pooled: a cell is the weight of up to {queries} queries, averaged, "
            f"on up to {keys} keys together."
        )
    wide = max(30, int(11 * width))
    return [part for line in lines for part in textwrap.wrap(_literal(line), wide)]


def _draw(
    panel: "Axes",
    weights: np.ndarray,
    scale: "Normalize",
    sides: Sequence[Axis],
    has_tokens: bool,
) -> None:
    """Draws a map with its tokens on both sides, or else with positions."""
    panel.set_axis_on()
    panel.imshow(
        weights.astype(np.float32), norm=scale, cmap="viridis", interpolation="nearest"
    )
    query, key = (side.label for side in sides)
    panel.set_xlabel(f"key: {key}" if key else "key (attended to)", fontsize=9)
    panel.set_ylabel(f"query: {query}" if query else "query (attends)", fontsize=9)
    queries, keys = sides
    if not has_tokens:
        _number_axis(panel.set_xticks, keys, sides)
        _number_axis(panel.set_yticks, queries, sides)
        return
    size = {"fontsize": _token_points(sides), "parse_math": False}
    turned = 90 if max(map(len, _tokens(keys))) > 1 else 0
    panel.set_xticks(range(keys.bins), _tokens(keys), rotation=turned, **size)
    panel.set_yticks(range(queries.bins), _tokens(queries), **size)
    panel.tick_params(length=2, pad=2)


def _has_tokens(sides: Sequence[Axis]) -> bool:
    return all(not x.is_pooled and x.bins <= _MOST_TOKENS for x in sides)


def _number_axis(set_ticks: Callable, axis: Axis, sides: Sequence[Axis]) -> None:
    """Puts the position at which a cell starts on some of the cells."""
    step = _step(axis.bins)
    if any(each.is_pooled for each in sides):
        step = 2 ** math.ceil(math.log2(max(axis.bins / 8, 1)))
    shown = range(0, axis.bins, step)
    set_ticks(shown, [str(axis.edges[cell]) for cell in shown], fontsize=8)


def _step(cells: int) -> int:
    """Returns the distance of the cells that are named by position, at most nine."""
    steps = (step * 10**power for power in range(9) for step in (1, 2, 5))
    return next(step for step in steps if cells / step <= 9)


def _literal(text: str, longest: int = 200) -> str:
    return labels.drawable(labels.one_line(text), drawing.fonts()[1], longest)


def _tokens(side: Axis) -> list[str]:
    return [_literal(labels.visible(x), _LONGEST_TOKEN) for x in side.tokens]


def _grid(num_heads: int) -> tuple[int, int]:
    """Returns the rows and columns of a near-square grid, or of one row up to 4."""
    if num_heads <= 4:
        return 1, max(1, num_heads)
    near = math.ceil(math.sqrt(num_heads))
    columns = min(near, near + 1, key=lambda columns: -num_heads % columns)
    return math.ceil(num_heads / columns), columns


def _panel_inches(sides: Sequence[Axis]) -> tuple[float, float, float]:
    """Computes width and height of a panel, and the margin that its labels need."""
    rows, columns = (axis.bins for axis in sides)
    cells = max(rows, columns)
    side, margin = 2.8, 0.65
    if _has_tokens(sides):
        longest = max(len(token) for side in sides for token in _tokens(side))
        label = longest * _token_points(sides) * 0.75 / 72
        side, margin = _whole_panel_inches(cells), 0.4 + max(0.2, label)
    # Cells are square, but no side is so short that its name finds no room.
    return side * max(0.45, columns / cells), side * max(0.45, rows / cells), margin


def _whole_panel_inches(cells: int) -> float:
    return max(2.8, 0.095 * cells)


def _token_points(sides: Sequence[Axis]) -> float:
    """Computes the font size at which tokens do not touch each other."""
    cells = max(axis.bins for axis in sides)
    return min(10.0, 72 * 0.95 * _whole_panel_inches(cells) / cells)


def _shared_scale(maps: MapSet) -> "Normalize":
    shown = [maps.examples[0], *filter(None, [maps.mean])]
    largest = max(
        (float(x.max()) for each in shown for x in each.weights if x.size), default=1
    )
    axes = (each.axes(layer) for each in maps.examples for layer in maps.layers)
    keys = max(each.keys.bins for each in axes)
    return _norm(largest, "linear" if keys <= _MOST_LINEAR else "root")


def _norm(largest: float, scale: str) -> "Normalize":
    from matplotlib import colors

    # Rounded up, so that the top of the bar carries a number: 1 rather than 0.998.
    top = drawing.rounded_up(largest)
    if scale == "log":
        return colors.LogNorm(1e-4 * top, top, clip=True)
    return colors.PowerNorm(1.0 if scale == "linear" else 0.5, vmin=0.0, vmax=top)


def of_example(
    maps: MapSet,
    *,
    colours: str | None = None,
    scale: str | None = None,
    size: tuple[float, float] | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws the heads of a set of one example, whose layers have the same axes.

    Tokens are shown up to 64 positions. The scale is "linear", "root" (small weights
    are seen) or "log" (very small ones too); None: "linear" up to 32 keys, else "root".
    The size is in inches; None: by the number of heads.
    """
    import matplotlib

    colours = colours or "viridis"
    checks.choice("colours", colours, list(matplotlib.colormaps))
    if scale is not None:
        checks.choice("scale", scale, SCALES)
    (one,) = maps.examples
    first, *others = maps.layers
    sides = one.axes(first)
    queries, keys, aligned = sides.queries, sides.keys, sides.aligned_cells()
    places = [(i, h) for i, x in enumerate(maps.layers) for h in range(len(x.heads))]
    count, widths = len(places), {len(layer.heads) for layer in maps.layers}
    if not places:
        raise ValueError("maps must have heads, got none in any of them.")
    if count > _MOST_PANELS:
        raise ValueError(
            f"head and layer must choose at most {_MOST_PANELS} maps for a figure, got "
            f"{count}."
        )
    if others and len(widths) == 1 and max(widths) > 1:  # a row for each layer
        columns = max(widths)
    else:
        columns = count if count <= 4 else math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    if title is None and not others and (first.kind or first.name.startswith("layer")):
        title = first.name
    if size is None:
        tall = _SIDE * min(3.0, max(0.3, queries.bins / keys.bins))
        size = (columns * _SIDE + 1.6, rows * (tall + 0.3) + 0.7)
    if scale is None:
        scale = "linear" if keys.bins <= _MOST_LINEAR else "root"
    largest = max(float(np.nanmax(x, initial=0.0)) for x in one.weights)
    norm = _norm(largest, scale)

    sheet = drawing.sheet(*size, title=_literal(title or ""))
    grid = sheet.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for axes, (i, h) in zip(grid.flat, places, strict=False):
        layer, weights, masked = maps.layers[i], one.weights[i][h], one.masked_cells(i)
        hidden = np.isnan(weights)
        if masked is not None:
            masked = masked[h] if masked.ndim == 3 else masked
            hidden = hidden | (masked & (weights == 0))
        axes.set_facecolor(drawing.absent())
        image = axes.imshow(
            np.ma.masked_array(weights.astype(np.float32), hidden),
            norm=norm,
            cmap=colours,
            interpolation="nearest",
        )
        if aligned is not None:
            drawing.frames(axes, aligned)
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
    bar = sheet.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8)
    how = {"linear": "", "root": " (square-root scale)", "log": " (log scale)"}
    bar.set_label(f"attention weight{how[scale]}", fontsize=8)
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


def _named(side: str, axis: Axis) -> str:
    return f"{side}: {axis.label}" if axis.label else side


def _label(axes: "Axes", axis: Axis, which: str, inches: float) -> None:
    """Names the bins along one side of so many inches, as many as it has room for.

    By tokens where there are few bins, else by number.
    """
    bins = axis.bins
    set_ticks = axes.set_xticks if which == "x" else axes.set_yticks
    points = max(_SMALLEST, min(9.0, 72 * 0.8 * inches / bins))
    has_tokens = any(axis.tokens) and not axis.is_pooled and bins <= _MOST_TOKENS
    if has_tokens:
        names = [_literal(_word(x), _LONGEST_TOKEN_OF_PANELS) for x in axis.tokens]
        lines = points
    else:
        names = [str(edge) for edge in axis.edges[:bins]]
        points = 7
        lines = points if which == "y" else 0.7 * points * len(names[-1])
    step = math.ceil(1.1 * lines * bins / (72 * inches))
    shown = range(0, bins, step if has_tokens else max(step, _step(bins)))
    is_turned = which == "x" and has_tokens and max(map(len, names)) > 1
    style = {"fontsize": points, "parse_math": False, "rotation": 90 * is_turned}
    set_ticks(shown, [names[i] for i in shown], **style)
    axes.tick_params(length=2, pad=2)


def _word(token: str) -> str:
    """Labels a token, without the space that marks its start."""
    return labels.visible(token[1:] if token[:1] == " " and token[1:] else token)
