"""What notebooks, pages and papers get of a subject and of its answers.

L layers, H heads of a layer, T positions.
"""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mha_haiku import attention, heads, models, studies, subjects
from mha_haiku.attention import sited
from mha_haiku.report import drawing
from mha_haiku.viewing import markup, plotting, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NODES = 64


@shown.fragment.register
def _(subject: subjects.Subject) -> markup.Html:
    rows = [("model", subject.model.description)]
    if subject.run is not None:
        config, task = subject.run.config, subject.run.task
        rows.append(("task", f"{task.name}, {task.sequence_length} positions"))
        rows.append(("step", f"{subject.run.step:,} of {config.training.steps:,}"))
    count = sum(x.size for x in jax.tree.leaves(subject.params))
    rows.append(("parameters", f"{count:,}"))
    parts = [markup.plain_table(rows)]
    if subject.model.config is not None:
        names = [place.names for place in models.heads_of_layers(subject.model.config)]
        parts.append(shown.of_parameters(subject.params, names))
    return markup.block(
        subject.name, *parts, note="subject.show(text) shows its maps of a text."
    )


@shown.fragment.register
def _(statistics: studies.head_statistics.HeadStatistics) -> markup.Html:
    return markup.block(statistics.title, markup.preformatted(statistics.text()))


@shown.fragment.register
def _(patched: heads.Patched) -> markup.Html:
    values, rows, columns = _grid(patched)
    return markup.block(
        f"Patching: {patched.unit}, means of {len(patched.base)} pairs",
        markup.heat_table(
            values,
            rows=rows,
            columns=columns,
            scales=[drawing.Scale.of(values)] * len(rows),
        ),
        note="From what is changed: each cell is one activation of the other text.",
    )


@shown.fragment.register
def _(edges: heads.Edges) -> markup.Html:
    values, rows, columns = _edge_grid(edges)
    return markup.block(
        f"Paths between heads: {edges.unit}, means of {len(edges.base)} pairs",
        markup.heat_table(
            values,
            rows=rows,
            columns=columns,
            scales=[drawing.Scale.of(values)] * len(rows),
        ),
        note="Rows write, columns read, by queries (q), keys (k) or values (v).",
    )


@shown.fragment.register
def _(lens: subjects.Lens) -> markup.Html:
    return markup.block(
        "Logit lens: the likeliest next token after each layer",
        markup.heat_table(
            lens.probabilities,
            rows=lens.names,
            columns=[_visible(x) for x in lens.tokens],
            scales=[drawing.Scale(0.0, 1.0, "viridis")] * len(lens.names),
            shown=np.vectorize(_visible, otypes=[str])(lens.texts),
        ),
        note="The colour is the probability. Columns are the tokens that are read.",
    )


@shown.fragment.register
def _(strongest: subjects.Strongest) -> markup.Html:
    rows = strongest.rows()
    columns = list(rows[0]) if rows else []
    table = [
        [f"{x:.3g}" if isinstance(x, float) else _visible(str(x)) for x in row.values()]
        for row in rows
    ]
    return markup.block(
        f"Layer {strongest.layer}, head {strongest.head}: largest {strongest.by}",
        markup.plain_table(table, columns=columns),
        note="Positions count from 0; the text ends at the query.",
    )


@shown.fragment.register
def _(circuits: subjects.Circuits) -> markup.Html:
    values, rows, columns = _pairs(circuits)
    return markup.block(
        f"{circuits.kind.upper()}-composition of heads, from weights alone",
        markup.heat_table(
            values,
            rows=rows,
            columns=columns,
            scales=[drawing.Scale.of(values)] * len(rows),
        ),
        note="Rows write, columns read; layer and head. Random weights are not at 0.",
    )


@plotting.figure_of.register(subjects.Circuits)
def _(what: subjects.Circuits, *, title: str | None) -> "Figure":
    title = title or f"{what.kind.upper()}-composition"
    return _heat(*_pairs(what), title, "composition")


def _pairs(circuits) -> tuple[np.ndarray, list[str], list[str]]:
    """Returns the scores as a table, with the names of rows and columns."""
    senders, receivers = circuits.pairs()
    if not senders:
        raise ValueError("there are no two layers of which one reads the other.")
    values = np.array([[circuits.scores[*a, *b] for b in receivers] for a in senders])
    names = [[f"{layer}.{head}" for layer, head in x] for x in (senders, receivers)]
    return values, *names


@plotting.figure_of.register(heads.Patched)
def _(what: heads.Patched, *, title: str | None) -> "Figure":
    values, rows, columns = _grid(what)
    return _heat(values, rows, columns, title or "Activation patching", what.unit)


@plotting.figure_of.register(subjects.Lens)
def _(what: subjects.Lens, *, title: str | None) -> "Figure":
    texts = np.vectorize(_visible, otypes=[str])(what.texts)
    columns = [_visible(x) for x in what.tokens]
    title = title or "Logit lens"
    return _heat(what.probabilities, what.names, columns, title, "probability", texts)


@plotting.figure_of.register(subjects.Strongest)
def _(what: subjects.Strongest, *, title: str | None) -> "Figure":
    labels = []
    for row in what.rows():
        ends = [
            f"{_visible(row[f'{end} token'])} ({row[end]})" if what.tokens else row[end]
            for end in ("query", "key")
        ]
        labels.append(f"example {row['example']}: {ends[0]} to {ends[1]}")
    title = title or f"Layer {what.layer}, head {what.head}: strongest examples"
    sheet = drawing.sheet(5.5, max(1.8, 0.25 * len(labels) + 1.2), title=title)
    axes = sheet.subplots()
    axes.barh(range(len(labels)), what.values)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    units = {"weight": "largest weight of the query", "size": "norm of the output"}
    axes.set_xlabel(units[what.by])
    return sheet


@plotting.figure_of.register(heads.Edges)
def _(what: heads.Edges, *, title: str | None) -> "Figure":
    """Draws a graph of the strongest edges, and next to it all of them as cells."""
    values, rows, columns = _edge_grid(what)
    sheet = drawing.sheet(
        6 + 0.3 * len(columns), max(3.0, 0.25 * len(rows) + 1.5), title=title or "Paths"
    )
    graph, cells = sheet.subplots(1, 2)
    ends = np.concatenate([what.senders, what.receivers])
    top = ends[:, 0].max() + 1
    mean = what.mean
    largest = np.nanmax(np.abs(mean))
    for i in np.argsort(-np.abs(mean))[:_MOST_NODES]:
        (x0, y0), (x1, y1) = (
            (each[1], top if each[0] < 0 else each[0])
            for each in (what.senders[i], what.receivers[i])
        )
        x1 = ends[:, 1].max() / 2 if what.receivers[i][0] < 0 else x1
        share = abs(mean[i]) / largest if largest else 0.0
        colour = "tab:red" if mean[i] > 0 else "tab:blue"
        graph.plot([x0, x1], [y0, y1], color=colour, linewidth=3 * share, alpha=0.7)
    nodes = np.unique(ends[ends[:, 0] >= 0], axis=0)
    graph.scatter(nodes[:, 1], nodes[:, 0], s=60, color="0.3", zorder=3)
    graph.set_xlabel("head")
    graph.set_xticks(sorted(set(nodes[:, 1].tolist())))
    graph.set_ylabel("layer")
    layers = sorted(set(nodes[:, 0].tolist()))
    graph.set_yticks([*layers, top], [*map(str, layers), "logits"])
    graph.set_title("red raises the metric, blue lowers it")
    _cells(cells, values, rows, columns, what.unit)
    return sheet


def _heat(values, rows, columns, title, unit, texts=None) -> "Figure":
    width = max(4.0, (0.75 if texts is not None else 0.4) * len(columns) + 2)
    sheet = drawing.sheet(width, max(2.0, 0.3 * len(rows) + 1.4), title=title)
    axes = sheet.subplots()
    _cells(axes, values, rows, columns, unit)
    if texts is not None:
        for (i, j), text in np.ndenumerate(texts):
            colour = "white" if values[i, j] < 0.6 else "black"
            axes.text(
                j, i, text, ha="center", va="center", fontsize="x-small", color=colour
            )
    return sheet


def _cells(axes, values, rows, columns, unit) -> None:
    scale = drawing.Scale.of(values, unit if unit in ("probability",) else "nats")
    image = axes.imshow(
        values, cmap=scale.colours, vmin=scale.low, vmax=scale.high, aspect="auto"
    )
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.figure.colorbar(image, ax=axes, label=unit)


def _grid(patched) -> tuple[np.ndarray, list[str], list[str]]:
    """Returns the means as a table, with the names of rows and columns."""
    mean, axes = patched.mean, patched.axes
    positions = list(map(_visible, patched.tokens))
    if axes == ("layer",):
        return mean[:, None], _layers(patched, len(mean)), [patched.unit]
    if axes == ("layer", "head"):
        columns = [f"head {i}" for i in range(mean.shape[1])]
        return mean, _layers(patched, len(mean)), columns
    positions = positions or [str(i) for i in range(mean.shape[-1])]
    if axes == ("layer", "position"):
        return mean, _layers(patched, len(mean)), positions
    rows = [
        f"{layer}, head {head}"
        for layer in _layers(patched, len(mean))
        for head in range(mean.shape[1])
    ]
    return mean.reshape(-1, mean.shape[-1]), rows, positions


def _layers(patched, count) -> list[str]:
    return [heads.running.label(patched.kinds, i) for i in range(count)]


def _edge_grid(edges) -> tuple[np.ndarray, list[str], list[str]]:
    """Returns the means by sender and by receiver with its kind."""
    senders = list(dict.fromkeys(map(tuple, edges.senders.tolist())))
    receivers = [
        (*receiver, kind)
        for receiver, kind in zip(
            edges.receivers.tolist(), edges.kinds.tolist(), strict=True
        )
    ]
    columns = sorted(set(receivers), key=lambda each: (each[0] < 0, each))
    values = np.full((len(senders), len(columns)), np.nan)
    for i, receiver in enumerate(receivers):
        row = senders.index(tuple(edges.senders[i].tolist()))
        values[row, columns.index(receiver)] = edges.mean[i]
    names = ["logits" if x < 0 else f"{x}.{h} {kind}" for x, h, kind in columns]
    return values, [f"{layer}.{head}" for layer, head in senders], names


def _visible(text: str) -> str:
    text = str(text)
    return text.strip() or repr(text)[1:-1].replace(" ", "␣")


def as_shown(value: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the maps in an answer, and what stands along them, by `show`'s arguments.

    Plain arrays of weights `[B, H, T, S]`, such as `outputs.attentions` of
    transformers, become maps; anything else is returned as it is.
    """
    if _is_weights(value):
        return sited.map_of_weights(_array(value), are_shares=True), {}
    if isinstance(value, list | tuple) and value and all(map(_is_weights, value)):
        return [as_shown(each)[0] for each in value], {}
    if not isinstance(value, subjects.TextMaps):
        return value, {}
    sides = {"tokens": value.tokens, "key_tokens": value.key_tokens}
    return value.maps, {name: x for name, x in sides.items() if x}


def _is_weights(value) -> bool:
    """Returns whether a value is an array of floats with four axes, of any library."""
    if isinstance(value, attention.AttentionMap) or not hasattr(value, "dtype"):
        return False
    return len(value.shape) == 4 and "float" in str(value.dtype)


def _array(value) -> np.ndarray:
    """Returns an array of jax, NumPy or torch as one of NumPy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().float()
    weights = np.asarray(value)
    if not (weights >= 0).all():
        raise ValueError("weights [B, H, T, S] must be at least 0.")
    return weights


def compared(compare: Any) -> Any:
    """Returns what is compared, by its name if it has one, as `show` takes it."""
    if isinstance(compare, dict):
        return {name: run_of(as_shown(each)[0]) for name, each in compare.items()}
    if isinstance(compare, subjects.Subject):
        return {compare.name: run_of(compare)}
    return as_shown(compare)[0]


def run_of(value: Any) -> Any:
    """Returns the run of a subject that has one; anything else as it is."""
    if isinstance(value, subjects.Subject) and value.run is not None:
        return value.run._replace(params=value.params)
    return value
