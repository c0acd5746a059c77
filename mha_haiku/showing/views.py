"""Views of dossiers: a page for a browser, and the same in a frame for a notebook."""

import numpy as np

from mha_haiku.records.map_set import Dossier
from mha_haiku.showing import byte_budget, markup, page
from mha_haiku.showing.readings import View

BUDGET = 1_000_000  # bytes of a view in a notebook, of which a cell should have no more
_HEIGHT = 680  # pixels of a page inside of a notebook
_MOST_THUMBNAILS = 48
_PICTURE = 560  # pixels of the longer side, about
_THUMBNAILS_BETWEEN = (56, 320)  # pixels of a thumbnail's side


def of_dossier(whole: Dossier, *, budget: int) -> View:
    """Renders as much of a dossier as fits the budget, in bytes.

    Raises:
      ValueError: If not even the smallest cut fits.
    """
    size = 0
    for part in byte_budget.cuts(whole, budget):
        html = page.render(part)
        inline = _inline(part, html)
        if (size := len(inline.encode())) <= budget:
            return View(whole.title, html, inline)
    raise ValueError(f"budget must be at least {size:,} bytes here, got {budget:,}.")


def _inline(whole: Dossier, html: str) -> str:
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


def _thumbnails(whole: Dossier) -> markup.Html:
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
