"""Draws the pictures of the guide's page "How it works", light and dark.

Run: python scripts/pictures.py

Maps are computed by the package; the rest are boxes and arrows.
"""

import pathlib
import sys
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

import mha_haiku as mh  # noqa: E402
from mha_haiku import commands  # noqa: E402

FOLDER = ROOT / "experiments" / "pictures"
_T = 24  # positions of the maps
_TILE = 4
_BLUE, _RED, _GRAY = "tab:blue", "tab:red", "0.5"


def main(*, out: str = str(FOLDER)) -> None:
    """Draws the pictures.

    Args:
      out: Folder of the pictures.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in _PICTURES.items():
        for ending, style in (("", "default"), ("_dark", "dark_background")):
            with pyplot.style.context(style):
                figure = pyplot.figure(figsize=(8, 3), layout="constrained")
                draw(figure)
                path = folder / f"{name}{ending}.png"
                figure.savefig(path, dpi=110, metadata={"Software": None})
                pyplot.close(figure)
        print(path)


def _map() -> mh.AttentionMap:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, _T, 1, 8))
    return mh.attend(2 * query, key, key, mask=mh.masks.causal())[1]


def draw_map(figure) -> None:
    """Draws a whole map, and its factors."""
    attention_map = _map()
    weights, query, key, logs = figure.subplots(1, 4, width_ratios=(6, 2, 2, 1.6))
    weights.imshow(attention_map.weights()[0, 0])
    weights.set_title("never made: T x S weights", fontsize=10)
    weights.set(xlabel="key", ylabel="query")
    for axes, values, title in (
        (query, attention_map.query[0, :, 0], "kept: queries"),
        (key, attention_map.key[0, :, 0], "keys"),
        (logs, np.array(attention_map.logsumexp[0, 0])[:, None], "logsumexp"),
    ):
        axes.imshow(values, cmap="RdBu_r", aspect="auto")
        axes.set_title(title, fontsize=10)
        axes.set(xticks=[], yticks=[])


def draw_fold(figure) -> None:
    """Draws the tiles of a map, in the order of the walk, and their sum."""
    whole, sums = figure.subplots(1, 2, width_ratios=(2, 3))
    weights = np.array(_map().weights()[0, 0])
    whole.imshow(weights)
    count = _T // _TILE
    for row in range(count):
        for column in range(count):
            corner = column * _TILE - 0.5, row * _TILE - 0.5
            is_walked = column <= row
            whole.add_patch(
                _rectangle(corner, _TILE, None if is_walked else _GRAY, "0.7")
            )
            middle = corner[0] + _TILE / 2, corner[1] + _TILE / 2
            number = row * (row + 1) // 2 + column + 1
            said = str(number) if is_walked else "skipped"
            style = {"ha": "center", "va": "center", "color": "white"}
            whole.text(*middle, said, fontsize=9 if is_walked else 5, **style)
    whole.set(title="one walk over the tiles", xticks=[], yticks=[])
    entropy = -np.where(weights > 0, weights * np.log(np.maximum(weights, 1e-30)), 0)
    parts = entropy.reshape(count, _TILE, count, _TILE).sum((1, 3)) / _T
    steps = parts[np.tril_indices(count)].cumsum()
    sums.step(np.arange(1, len(steps) + 1), steps, where="mid", color=_BLUE)
    sums.axhline(float(_map().statistics().entropy[0, 0]), color=_RED, linestyle="--")
    sums.set(
        title="entropy of the head, nats", xlabel="tiles walked over", ylim=(0, None)
    )


def draw_sites(figure) -> None:
    """Draws a layer as values with names, one of them edited."""
    names = ["layer_0/stream", "attention/scores", "attention/weights"]
    names += ["attention/heads", "layer_1/stream"]
    _chain(figure, names, marked=(3,))
    axes = figure.axes[0]
    axes.text(2, 1.0, 'mh.look(f, at=["*/weights"])', ha="center", color=_BLUE)
    axes.annotate("", (2, 0.32), (2, 0.9), arrowprops=_arrow(_BLUE, "<-"))
    axes.text(3.4, -1.0, 'mh.edit(f, ablate("layer_0/attention", 3))', color=_RED)
    axes.annotate("", (3, -0.32), (3.35, -0.9), arrowprops=_arrow(_RED))
    axes.texts[-2].set_ha("center")


def draw_recognition(figure) -> None:
    """Draws the program of an unmarked attention, and the sites recognized in it."""
    lines = ["s = dot(query, key)", "e = exp(s - max)", "p = e / sum(e)"]
    lines += ["h = dot(p, value)"]
    _chain(figure, lines, family="monospace")
    axes = figure.axes[0]
    for place, name in ((0, "scores"), (2, "weights"), (3, "heads")):
        axes.text(place, -0.95, name, ha="center", color=_RED, weight="bold")
        axes.annotate("", (place, -0.32), (place, -0.8), arrowprops=_arrow(_RED, "<-"))
    said = "exponentials over their own sum, which reach a product: attention"
    axes.text(1.5, 0.9, said, ha="center", color=_RED)
    axes.plot([0.6, 3.4], [0.7, 0.7], color=_RED, linewidth=1)


def draw_subject(figure) -> None:
    """Draws the sources of a subject, its verbs, and their answers."""
    columns = [
        [
            "a run on disk",
            "pretrained weights",
            "a function of JAX",
            "a PyTorch module",
        ],
        ["Subject:\nmodel, parameters,\nedits, inputs, metric"],
        ["importance()", "roles()", "why()", "patch(), circuit()"],
        ["Heads", "maps"],
        ["table, CSV", "figure", "page", "file"],
    ]
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.5, 4.5), ylim=(-0.7, 3.7))
    for i, column in enumerate(columns):
        places = np.linspace(3, 0, len(column)) if len(column) > 2 else [1.5]
        places = [2.2, 0.8] if len(column) == 2 else places
        for place, name in zip(places, column, strict=True):
            _box(axes, (i, place), name, _RED if i == 1 else _BLUE)
        if i:
            axes.annotate(
                "", (i - 0.42, 1.5), (i - 0.58, 1.5), arrowprops=_arrow(_GRAY)
            )


def _chain(figure, names: Sequence[str], marked=(), family=None) -> None:
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(-1.3, 1.3))
    for i, name in enumerate(names):
        _box(axes, (i, 0), name, _RED if i in marked else _BLUE, family=family)
        if i:
            ends = (i - 0.4, 0), (i - 0.6, 0)
            axes.annotate("", *ends, arrowprops=_arrow(_GRAY))


def _box(axes, place, text: str, color: str, family=None) -> None:
    box = {"boxstyle": "round,pad=0.4", "facecolor": "none", "edgecolor": color}
    style = {"ha": "center", "va": "center", "fontsize": 8, "family": family}
    axes.text(*place, text, bbox=box, **style)


def _arrow(color: str, kind: str = "->") -> dict:
    return {"arrowstyle": kind, "color": color}


def _rectangle(corner, side, fill, edge):
    from matplotlib import patches

    options = {"facecolor": fill or "none", "edgecolor": edge, "linewidth": 0.8}
    return patches.Rectangle(corner, side, side, **options)


_PICTURES: dict[str, Callable] = {
    "how_1_map": draw_map,
    "how_2_fold": draw_fold,
    "how_3_sites": draw_sites,
    "how_4_recognition": draw_recognition,
    "how_5_subject": draw_subject,
}

if __name__ == "__main__":
    sys.exit(commands.program(main, __doc__)(sys.argv))
