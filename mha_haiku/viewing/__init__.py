"""Objects as pages, tables and figures: what notebooks, browsers and papers show."""

import importlib
from collections.abc import Callable
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

    if type(value).__module__.startswith("mha_haiku.attention"):
        return shown.html(value)  # a map need not wait for the rest
    from mha_haiku.viewing import answers

    return shown.html(answers.as_shown(value)[0])


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def _later(name: str) -> Callable:
    """Returns a function that imports the real one when it is called."""
    return lambda value, **options: __getattr__(name)(value, **options)


display.register(html=html, show=_later("show"), plot=_later("plot"))
