"""`mh.show` and `mh.plot`: maps, subjects, runs and answers as pages and figures.

L layers, H heads of a layer.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mha_haiku.core import attention, checks, display, models
from mha_haiku.lab import maps, statistics, text_maps
from mha_haiku.records import Layer, labels
from mha_haiku.records.map_set import Dossier, MapSet
from mha_haiku.showing import (
    canvas,
    figures,
    head_figures,
    markup,
    plots,
    readings,
    views,
)
from mha_haiku.subjects import computation, dossiers, edge_figures, observers  # noqa: F401
from mha_haiku.subjects.subject import Subject, has_task
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training.runs import folders

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_TITLE = 80  # characters of a text


def show(
    maps_or_run: Any,
    *,
    heads: int | Sequence[int] | None = None,
    tokens: Any = None,
    key_tokens: Any = None,
    compare: Any = None,
    budget: int = views.BUDGET,
) -> readings.View:
    """Shows attention maps, a run, or numbers of heads.

    Maps become an interactive page, whole up to 512 positions and pooled beyond. If it
    exceeds the budget, parts are left out or pooled, and the page says so. A map is
    read in one pass; nothing is downloaded.

    Args:
      maps_or_run: An `AttentionMap`, a list of them (layers), a dict of them by path
        (as from `look`), or a model's output with its maps; a subject or one of its
        answers; a `MapSet`; a run, or the path of its folder; statistics, importance,
        roles, or a mask.
      heads: A head of each layer, or a list of heads. Defaults to all.
      tokens: The text (or numbers) of each query, `[T]`, or of each example `[N, T]`; a
        string has one for each character. N counts all batch axes. For an
        encoder-decoder these are the tokens that the decoder reads.
      key_tokens: Text (or numbers) of the keys. Defaults to `tokens` if T is S. For an
        encoder-decoder these are the tokens of the source.
      compare: Another object of the same kind and sizes, such as maps after training;
        or a dict of one such object by its name.
      budget: Maximum number of bytes.

    Raises:
      TypeError: If the object cannot be shown.
      ValueError: If tokens do not fit the maps, maps in one view differ in
        size or are being traced, there are no heads, queries or keys, or the budget is
        below the size of an empty page.

    Example:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4))
      >>> _, attention_map = mh.attend(query, key, value)
      >>> view = mh.show(attention_map, tokens="abcde")  # view.save("map.html")
      >>> "</html>" in view.html
      True
    """
    checks.positive_integer("budget", budget)
    texts = {"tokens": tokens, "key_tokens": key_tokens}
    all_maps = text_maps.text_maps(maps_or_run, **texts)
    if all_maps is not None and compare is None:
        one = maps.map_set(all_maps)
        whole = Dossier(_title(all_maps, one), (one,))
    elif all_maps is not None:
        whole = _compared(all_maps, compare, **texts)
    elif not has_own(maps_or_run):
        return readings.view(maps_or_run, **texts, compare=compare, heads=heads)
    else:
        for name, text in texts.items():
            if text is not None:
                raise ValueError(
                    f"{name} must be None for a run, which has its own examples; "
                    "show(run.maps(text), tokens=...) shows others."
                )
        whole = dossier_of(maps_or_run, compare)
    sets = tuple(_of_heads(each, heads) for each in whole.sets)
    return views.of_dossier(whole._replace(sets=sets), budget=budget)


def _compared(all_maps: text_maps.TextMaps, compare: Any, **texts: Any) -> Dossier:
    other_name, compare = named(compare)
    other = text_maps.text_maps(compare, **texts)
    if other is None:
        raise TypeError(
            "compare must be attention maps, as what is shown, got "
            f"{type(compare).__name__}."
        )
    ends = (list(text_maps.layers_of(x.maps).values())[-1] for x in (all_maps, other))
    text_maps.check_sizes(dict(zip(("maps", "compare"), ends, strict=True)))
    if other.tokens is other.key_tokens is None:
        unknown = {name: getattr(all_maps, name) for name in texts}
        other = dataclasses.replace(other, **unknown)
    first, second = (
        maps.map_set(all_maps, name=all_maps.name or "first"),
        maps.map_set(other, name=other_name or "second"),
    )
    # The page has one text for both.
    tokens, others = (
        [(x.queries.tokens, x.keys.tokens) for x in each.examples]
        for each in (first, second)
    )
    if tokens != others and any(map(any, tokens)):
        raise ValueError(
            "compare must be maps of the same text, got "
            f"{_spelled(others)} for {_spelled(tokens)}.\nShow each text by itself, or "
            "give tokens= that suit both."
        )
    return Dossier(_title(all_maps, first), (first, second))


def _spelled(sides: Sequence[tuple]) -> str:
    queries, keys = sides[0]
    return repr(labels.beginning(keys or queries, _LONGEST_TITLE))


def _title(all_maps: text_maps.TextMaps, shown_set: MapSet) -> str:
    tokens = shown_set.examples[0].keys.tokens
    text = labels.beginning(tokens, _LONGEST_TITLE)
    if len(shown_set.inputs) > 1 and text:
        text += f" (and {len(shown_set.inputs) - 1} more)"
    name = all_maps.name.rpartition("/")[2]  # of a repository or a folder
    if title := ": ".join(filter(None, (name, text))):
        return title
    of_layers = text_maps.layers_of(all_maps.maps)
    first = next(iter(of_layers.values()))
    layers = f"{len(of_layers)} layers, " if len(of_layers) > 1 else ""
    shape = " x ".join(map(str, first.shape[-3:]))
    return f"Attention, {layers}{shape}, mask {first.weighting.mask}"


def plot(
    what: Any,
    *,
    heads: int | Sequence[int] | None = None,
    layer: int | str | None = None,
    example: int = 0,
    tokens: Any = None,
    key_tokens: Any = None,
    query: int | str | None = None,
    size: tuple[float, float] | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws a figure fit for a paper, without a window.

    `figure.savefig("map.pdf")` writes it, in vectors with text as text if the format
    has them; a notebook displays it.

    Args:
      what: Attention maps, a `MapSet`, or a subject, a run or its folder, whose maps
        are of held-out examples, as in `show`; statistics, importance or roles; the
        result of a verb (`subject.importance()`, ...); or the path of a run's
        `metrics.jsonl` or `maps.npz`.
      heads: A head of each layer, or a list of heads. Defaults to all, in a grid.
      layer: Layer of the maps, from 0. Defaults to all layers, one row per layer. For
        an encoder-decoder also "cross.0", or "cross" for all of a kind, which is the
        default.
      example: Example of the maps, counted over all batch axes.
      tokens: Labels of the maps: the text of each query, `[T]`, or `[N, T]` for several
        examples.
      key_tokens: The text of each key. Defaults to `tokens` if T is S.
      query: Position, or text, of the query under whose weights a picture is drawn.
      size: Width and height in inches. The default depends on the content.
      title: Title of the figure. Defaults to a description of it.

    Raises:
      TypeError: If there is no figure of `what`.
      ValueError: If there is no such head, layer or example, tokens do not fit,
        or an argument does not apply to this figure.
      ModuleNotFoundError: If matplotlib is not installed.

    Example:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4))
      >>> figure = mh.plot(mh.attend(query, key, value)[1], heads=1, tokens="abcde")
      >>> len(figure.axes)  # figure.savefig("map.pdf")
      2
    """
    if size is not None:
        if not isinstance(size, Sequence) or len(size) != 2:
            raise ValueError(f"size must be (width, height) in inches, got {size!r}.")
        width, height = (checks.positive_number("size", x) for x in size)
        size = width, height
    texts = {"tokens": tokens, "key_tokens": key_tokens}
    all_maps = text_maps.text_maps(what, **texts)
    with canvas.style():
        if all_maps is not None:
            of_layers = text_maps.layers_of(all_maps.maps)
            count = math.prod(list(of_layers.values())[-1].shape[:-3])
            checks.integer_in("example", example, 0, count - 1)
            layers = _chosen_layers(list(of_layers), layer)
            whole = maps.map_set(
                all_maps, layers=layers, only=example, has_numbers=False
            )
        elif _is_saved(what) or (has_own(what) and not _is_file(what)):
            if tokens is not None or key_tokens is not None:
                raise ValueError(
                    "tokens must be None for saved maps, which have their own."
                )
            whole = MapSet.load(what) if _is_saved(what) else map_set_of(what)
            checks.integer_in("example", example, 0, len(whole.examples) - 1)
            whole = whole.only(example, _chosen_layers(whole.layers, layer))
        else:
            of_maps = dict(heads=heads, layer=layer, example=example or None, **texts)
            of_maps["query"] = query
            for name, value in of_maps.items():
                if value is not None:
                    raise ValueError(
                        f"{name}= is for attention maps, and not for "
                        f"{type(what).__name__}."
                    )
            figure = plots.figure_of(what, title=title)
            if size is not None:
                figure.set_size_inches(size)
            return figure
        whole, options = _of_heads(whole, heads), {"size": size, "title": title}
        if query is not None:
            return figures.of_picture(whole, query, **options)
        return figures.of_example(whole, **options)


def _chosen_layers(layers: Sequence[Layer], layer: int | str | None) -> list[int]:
    """Returns the indices of a layer, or of all layers of a kind."""
    kinds = [x.kind for x in layers]
    if layer is None:
        return [i for i, kind in enumerate(kinds) if kind == kinds[-1]]
    if not isinstance(layer, str):
        return [checks.integer_in("layer", layer, 0, len(layers) - 1)]
    if layer in kinds:
        return [i for i, kind in enumerate(kinds) if kind == layer]
    names = [x.name.removeprefix("layer ") for x in layers]
    addresses = [name.replace(" ", ".") for name in names]
    checks.choice("layer", layer, [*dict.fromkeys(filter(None, kinds)), *addresses])
    return [addresses.index(layer)]


def _is_file(what: Any) -> bool:
    return isinstance(what, str | os.PathLike) and not Path(what).is_dir()


def _is_saved(what: Any) -> bool:
    return _is_file(what) and Path(what).name == "maps.npz"


def html(value: Any) -> str:
    """Renders an object for a notebook, or its short `repr` if it is traced.

    This is a map's page, or a table, or a sentence that says why it cannot be shown.
    """
    if display.is_traced(value):
        return markup.preformatted(repr(value))
    try:
        if isinstance(value, MapSet) or text_maps.text_maps(value) is not None:
            return show(value).inline
        return readings.fragment(value)
    except ValueError as error:
        why = markup.tag("div", f"Not shown: {error}")
        return markup.tag("div", markup.preformatted(repr(value)), why)


def has_own(value: Any) -> bool:
    """Checks whether an object has maps without inputs."""
    return isinstance(value, MapSet | Subject | folders.Run | str | os.PathLike)


def map_set_of(value: Any, **options: Any) -> MapSet:
    """Collects maps, and numbers of heads, over the held-out examples of a run.

    Options are as of `dumps.measured`.
    """
    if isinstance(value, MapSet):
        return value
    if isinstance(value, str | os.PathLike):
        value = folders.load_run(value)
    if isinstance(value, folders.Run):
        cache = _programs(value.model)
        value = Subject.of_run(value, value.task.name).replace(cache=cache)
    if not isinstance(value, Subject):
        kind = type(value).__name__
        raise TypeError(f"compare must be a run or its folder, got {kind}.")
    if not has_task(value):
        raise ValueError(f"{value.name} has no task: show its maps of inputs.")
    config = value.config.replace(attention=dict(dtype="float32"))
    return dumps.measured(
        value.replace(config=config, progress=computation.silent),
        means=False,
        weights=value.task.sequence_length <= maps.WHOLE,
        devices=jax.local_devices()[:1],
        **options,
    )


@functools.lru_cache(maxsize=32)
def _programs(model: models.Model) -> dict:
    """Returns a cache, so that a run which is shown again does not compile again."""
    return {}


def dossier_of(value: Any, compare: Any = None) -> Dossier:
    """Makes the dossier of an object that has maps without inputs.

    They are the maps that were saved in a run's folder, if there are any.
    `compare` is another such object, or a dict of one by its name, or None.
    """
    if isinstance(value, str | os.PathLike):
        folder = folders.Folder(checks.as_path(value)).attention
        if (folder / "maps.npz").exists():
            whole = dossiers.of_folder(folder)
            if compare is None:
                return whole
            value = dataclasses.replace(whole.sets[-1], name=whole.title)
    first = map_set_of(value, importance=True)
    if compare is None:
        alone = dataclasses.replace(first, name="", step=None)
        return Dossier(first.name, (alone,))
    other_name, compare = named(compare)
    other = dossier_of(compare)
    names = [first.name, other_name or other.title]
    if names[0] == names[1]:
        names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    pairs = zip((first, other.sets[-1]), names, strict=True)
    both = tuple(dataclasses.replace(x, name=name, step=None) for x, name in pairs)
    return Dossier(f"{first.name} and {other.title}", both)


def _of_heads(whole: MapSet, heads: int | Sequence[int] | None) -> MapSet:
    """Keeps heads by their names, which are their numbers in the unpruned model."""
    if heads is None:
        return whole
    numbers = np.ravel(heads).tolist()
    if not numbers:
        raise ValueError("heads must be a number or a list of them, got none.")
    names = sorted({name for layer in whole.layers for name in layer.heads}, key=int)
    return whole.of_heads([checks.choice("heads", str(x), names) for x in numbers])


def named(value: Any) -> tuple[str, Any]:
    """Splits a shown value into its name, or "", and the value itself."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, value),) = value.items()
        return str(name), value
    return "", value


# --- Statistics of one map


@readings.fragment.register
def _(record: attention.Statistics) -> markup.Html:
    return readings.of_one_layer(statistics.heads_of(record))


@plots.figure_of.register(attention.Statistics)
def _(what: attention.Statistics, *, title: str | None) -> "Figure":
    record = statistics.heads_of(what)
    return head_figures.picture(record, title=title or "Statistics of heads")


# --- In a notebook, by itself


@readings.fragment.register
def _(run: folders.Run) -> markup.Html:
    title = f"Run of {run.config.task.name}, step {run.step:,}"
    return readings.fragment(Subject.of_run(run, title))


@readings.fragment.register
def _(subject: Subject) -> markup.Html:
    """Describes a subject."""
    count = sum(x.size for x in jax.tree.leaves(subject.params))
    rows = [("model", subject.model.description), ("parameters", f"{count:,}")]
    note = "subject.show(text) shows its maps."
    if has_task(subject):
        config = subject.config
        task = f"{config.task.name}, {subject.task.sequence_length} positions"
        step = f"{subject.step:,} of {config.training.steps:,}"
        rows = [("task", task), *rows, ("step", step)]
        rows.append(("precision", config.model.precision))
        note = "mh.show of it shows its maps on held-out examples."
    return markup.block(subject.name, markup.plain_table(rows), note=note)


# --- As a figure


@plots.figure_of.register(str | os.PathLike)
def _(what: Any, *, title: str | None) -> "Figure":
    path = checks.as_path(what)
    checks.choice("what", path.name, ["metrics.jsonl", "maps.npz"])
    picture = observers.learning_curve(path)
    if picture is None:
        raise checks.ConfigError(f"{path} has no lines.")
    return plots.drawn(picture, title)
