"""Maps, runs and numbers of heads as pages, tables and figures.

All objects with maps become a `MapSet` (`records.map_set`, made in `lab.maps`), the
only form that is drawn. Every number has a name, a unit and a label (`records.Column`),
so that a new one is drawn without a change here. 0 is on every color scale, and the
same numbers give the same bytes. Maps of more than 512 positions are pooled to 128 bins
in the pass that computes their statistics; a page is fitted to a number of bytes
(`byte_budget`). In a notebook a page is a closed frame, with a picture below it where
frames are stripped; tables have inline styles and no script, so that they survive a
notebook's sanitizer. Text from outside passes through `markup.tag` or the JSON of
`page`, and to matplotlib with `parse_math=False`. matplotlib is imported inside of
functions, and pyplot never.

To display a class: `_repr_html_ = display.html` in it, and functions registered with
`readings.fragment` and `plots.figure_of`; numbers in rows and columns need
`measurements.shows` alone. The page's scripts are in `viewer/`.
"""

from mha_haiku.showing import measurements as _answers  # noqa: F401  (shows itself)
from mha_haiku.showing.readings import View

__all__ = ["View"]
