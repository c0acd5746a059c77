"""Maps, runs and numbers of heads as pages, tables and figures."""

from mha_haiku.viewing import answers as _answers  # noqa: F401  (shows itself)
from mha_haiku.viewing.plotting import plot
from mha_haiku.viewing.showing import show
from mha_haiku.viewing.shown import html
from mha_haiku.viewing.view import View

__all__ = ["View", "html", "plot", "show"]
