"""Objects as pages, tables and figures: what notebooks, browsers and papers show."""

import importlib
from typing import TYPE_CHECKING, Any

from mha_haiku import display

if TYPE_CHECKING:
    from mha_haiku.viewing.plotting import plot
    from mha_haiku.viewing.showing import View, show

__all__ = ["View", "html", "plot", "show"]

# The package's face imports this package for its html(); the rest can wait.
_PLACES = {"View": "showing", "plot": "plotting", "show": "showing"}


def html(value: Any) -> str:
    """Returns what a notebook shows of an object."""
    from mha_haiku.viewing import shown

    return shown.html(value)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


display.register_html(html)
