"""`show`: maps, runs and numbers of heads as one view for notebooks and files."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mha_haiku.core import checks
from mha_haiku.records import map_set
from mha_haiku.showing import fitting, labels, markup, page, sets, shown
from mha_haiku.showing.shown import View

BUDGET = 1_000_000  # bytes of a view in a notebook, of which a cell should have no more
_LONGEST_TITLE = 80  # characters of a text
_HEIGHT = 680  # pixels of a page inside of a notebook
_MOST_THUMBNAILS = 48
_PICTURE = 560  # pixels of the longer side, about
_THUMBNAILS_BETWEEN = (56, 320)  # pixels of a thumbnail's side


def show(
    maps_or_run: Any,
    *,
    tokens: Any = None,
    key_tokens: Any = None,
    images: Any = None,
    heads: Sequence[int] | None = None,
    compare: Any = None,
    budget: int = BUDGET,
) -> View:
    """Shows attention maps, a run, or numbers of heads.

    Maps become an interactive page, whole up to 512 positions and pooled beyond. If it
    exceeds the budget, parts are left out or pooled, and the page says so. A map is
    read in one pass; nothing is downloaded.

    Args:
      maps_or_run: An `AttentionMap`, a list of them (layers), a dict of them by path
        (as from `look`), or a model's output with its maps; a subject or one of its
        answers; a `MapSet`; a run, or the path of its folder; statistics, importance,
        roles, a mask, or a model's parameters.
      tokens: The text (or numbers) of each query, `[T]`, or of each example `[N, T]`; a
        string has one for each character. N counts all batch axes. For an
        encoder-decoder these are the tokens that the decoder reads.
      key_tokens: Text (or numbers) of the keys. Defaults to `tokens` if T is S. For an
        encoder-decoder these are the tokens of the source.
      images: A picture for each key position, uint8 or floats from 0 to 1, `[S, h, w]`
        or `[S, h, w, 3]`, or a list of N of these.
      heads: Heads to show of each layer. Defaults to all.
      compare: Another object of the same kind and sizes, such as maps after training;
        or a dict of one such object by its name.
      budget: Maximum number of bytes.

    Raises:
      TypeError: If the object cannot be shown.
      ValueError: If tokens or images do not fit the maps, maps in one view differ in
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
    texts = {"tokens": tokens, "key_tokens": key_tokens, "images": images}
    found = sets.text_maps(maps_or_run, **texts)
    if found is not None:
        whole = _of_maps(found, compare, **texts)
    elif not sets.has_own(maps_or_run):
        return shown.view(maps_or_run, **texts, heads=heads, compare=compare)
    else:
        for name, text in texts.items():
            if text is not None:
                raise ValueError(
                    f"{name} must be None for a run, which has its own examples; "
                    "show(run.maps(text), tokens=...) shows others."
                )
        whole = sets.dossier_of(maps_or_run, compare)
    if heads is not None:
        chosen = tuple(sets.with_heads(maps, heads) for maps in whole.sets)
        whole = whole._replace(sets=chosen)
    return of_dossier(whole, budget=budget)


def of_dossier(whole: map_set.Dossier, *, budget: int) -> View:
    """Renders as much of a dossier as fits the budget."""
    pages = {}

    def render(shown: map_set.Dossier) -> str:
        html = page.render(shown)
        inline = _inline(shown, html)
        pages[inline] = html
        return inline

    _, inline = fitting.fitted(whole.check(), budget, render)
    return View(whole.title, pages[inline], inline)


def _of_maps(found: sets.TextMaps, compare: Any, **texts: Any) -> map_set.Dossier:
    if compare is None:
        shown_set = sets.with_why(sets.map_set(found), found.why)
        return map_set.Dossier(_title(found, shown_set), (shown_set,))
    other_name, compare = sets.named(compare)
    other = sets.text_maps(compare, **texts)
    if other is None:
        raise TypeError(
            "compare must be attention maps, as what is shown, got "
            f"{type(compare).__name__}."
        )
    ends = (list(sets.layers_of(x.maps).values())[-1] for x in (found, other))
    sets.check_sizes(dict(zip(("maps", "compare"), ends, strict=True)))
    unknown = {name: getattr(found, name) for name in texts}
    if other.tokens is other.key_tokens is None:
        other = dataclasses.replace(other, **unknown)
    both = (
        sets.with_why(sets.map_set(found, name=found.name or "first"), found.why),
        sets.map_set(other, name=other_name or "second"),
    )
    # The page has one text for both.
    tokens, others = (
        [(x.queries.tokens, x.keys.tokens) for x in each.examples] for each in both
    )
    if tokens != others and any(map(any, tokens)):
        raise ValueError(
            "compare must be maps of the same text, got "
            f"{_spelled(others)} for {_spelled(tokens)}.\nShow each text by itself, or "
            "give tokens= that suit both."
        )
    return map_set.Dossier(_title(found, both[0]), both)


def _spelled(sides: Sequence[tuple]) -> str:
    queries, keys = sides[0]
    return repr(labels.beginning(keys or queries, _LONGEST_TITLE))


def _title(found: sets.TextMaps, shown_set: map_set.MapSet) -> str:
    """Names the model and its first text, or the sizes if neither is known."""
    tokens = shown_set.examples[0].keys.tokens
    text = labels.beginning(tokens, _LONGEST_TITLE)
    if len(shown_set.inputs) > 1 and text:
        text += f" (and {len(shown_set.inputs) - 1} more)"
    name = found.name.rpartition("/")[2]  # of a repository or a folder
    if title := ": ".join(filter(None, (name, text))):
        return title
    maps = sets.layers_of(found.maps)
    first = next(iter(maps.values()))
    layers = f"{len(maps)} layers, " if len(maps) > 1 else ""
    shape = " x ".join(map(str, first.shape[-3:]))
    return f"Attention, {layers}{shape}, mask {first.weighting.mask}"


def _inline(whole: map_set.Dossier, html: str) -> str:
    """Embeds a page: a frame above a picture, which is seen without frames."""
    # The frame has its document inside, so that it is alive after the notebook was
    # saved and opened again, and no rights of the page around it. Picture and frame
    # are in one place of a grid: software that strips frames leaves the picture.
    escaped = html.replace("&", "&amp;").replace("'", "&#39;")
    title = markup.escaped(whole.title)
    frame = (
        f'<iframe title="{title}" sandbox="allow-scripts" '
        f'style="grid-area:1/1;width:100%;height:{_HEIGHT}px;border:0;'
        f"background:Canvas;resize:vertical;position:relative\" srcdoc='{escaped}'>"
        "</iframe>"
    )
    below = markup.tag("div", _thumbnails(whole), style="grid-area:1/1;min-width:0")
    return f'<div style="display:grid">{below}{frame}</div>'


def _thumbnails(whole: map_set.Dossier) -> markup.Html:
    """Draws small maps of the first example, of the last kind with heads."""
    example = whole.sets[0].examples[0]
    kind = [layer.kind for layer in whole.sets[0].layers if layer.heads][-1]
    maps, layers = [], []
    for i, layer in enumerate(whole.sets[0].layers):
        if layer.kind == kind:
            maps.extend(example.drawn(i))
            layers.append(layer)
    across = len(layers[0].heads) if len(layers) > 1 else min(len(maps), 8)
    maps = maps[:_MOST_THUMBNAILS]
    rows = -(-len(maps) // max(1, across))
    side = int(np.clip(_PICTURE // max(1, rows, across), *_THUMBNAILS_BETWEEN))
    image = markup.thumbnails(np.stack(maps), columns=max(1, across), side=side)
    note = "The heads of the first example. The page with all of it needs scripts."
    picture = markup.picture(image, alt=whole.title)
    return markup.block(whole.title, picture, note=note)
