"""How well measures rank inputs, as a table of text and as a picture.

L layers. What is shown is a mean and its standard error, `[L, 2]` by the name of the
measure, beside published means, `(L',)` by name.
"""

import importlib.util
import io
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

Means = Mapping[str, np.ndarray]
Published = Mapping[str, Sequence[float]]

_WIDTH = 13


def table(changes: Means, drops: Means, published: Published) -> str:
    """Returns a line of text per measure, with a column for each layer.

    Args:
      changes: Correlations with the sizes of changes.
      drops: Correlations with how much the probability falls.
      published: What the paper found, with the sizes of changes.
    """
    size = max(len(x) for x in (*changes.values(), *published.values()))
    heading = [f"layer {i + 1}" for i in range(size)]
    lines = [" " * 20 + "".join(f"{x:>{_WIDTH}}" for x in heading)]

    def block(title, means, show):
        lines.append(title)
        for name, numbers in means.items():
            cells = "".join(f"{show(x):>{_WIDTH}}" for x in numbers)
            lines.append(f"  {name:<18}{cells}")

    block("with the size of the change, published", published, lambda x: f"{x:.2f}")
    block("with the size of the change, ours", changes, _with_error)
    block("with the drop, ours", drops, _with_error)
    return "\n".join(lines)


def write(
    folder: str | os.PathLike, changes: Means, published: Published, *, title: str
) -> pathlib.Path | None:
    """Writes rollout.png: the correlations of each measure, by layer.

    Args:
      folder: Where the picture goes.
      changes: Correlations with the sizes of changes.
      published: What the paper found.
      title: Of which run, and over what.

    Returns:
      The picture; None, with a warning logged, where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        message = "No picture: matplotlib is missing (pip install 'mha_haiku[plots]')."
        logging.getLogger(__name__).warning(message)
        return None
    path = pathlib.Path(folder) / "rollout.png"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(picture(changes, published, title=title))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def picture(changes: Means, published: Published, *, title: str) -> bytes:
    """Returns the picture that `write` writes, as the bytes of a PNG file."""
    import matplotlib
    from matplotlib import figure, ticker

    drawn = io.BytesIO()
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.usetex": False}):
        sheet = figure.Figure((6.4, 4.2), dpi=120, facecolor="white")
        axes = sheet.add_axes((0.1, 0.12, 0.6, 0.76))
        for i, (name, numbers) in enumerate(changes.items()):
            layers = np.arange(1, len(numbers) + 1)
            style = {"color": f"C{i}", "capsize": 2, "marker": "o", "markersize": 3}
            axes.errorbar(layers, *numbers.T, label=name, **style)
            if name in published:
                layers = range(1, len(published[name]) + 1)
                label = f"{name}, published"
                axes.plot(layers, published[name], "--", color=f"C{i}", label=label)
        axes.axhline(0, color="0.8", linewidth=1, zorder=0)
        axes.set_xlabel("up to layer (raw: of layer)")
        axes.set_ylabel("Spearman correlation with the size of the change")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=7)
        sheet.text(0.02, 0.97, title, va="top", fontsize=10, parse_math=False)
        # Without the version of matplotlib, the same numbers give the same file.
        sheet.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()


def _with_error(numbers) -> str:
    mean, error = numbers
    return f"{mean:.2f} ± {error:.2f}"
