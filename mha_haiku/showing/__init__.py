"""Maps, runs and numbers of heads as pages, tables and figures."""

from mha_haiku.records.map_set import MapSet
from mha_haiku.showing import measurements as _answers  # noqa: F401  (shows itself)
from mha_haiku.showing.plotting import plot
from mha_haiku.showing.showing import show
from mha_haiku.showing.shown import View, html

__all__ = ["MapSet", "View", "html", "plot", "show"]
