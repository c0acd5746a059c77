"""Objects as pages, tables and figures: what notebooks, browsers and papers show."""

from mha_haiku.viewing.plotting import plot
from mha_haiku.viewing.showing import View, show
from mha_haiku.viewing.shown import html

__all__ = ["View", "html", "plot", "show"]
