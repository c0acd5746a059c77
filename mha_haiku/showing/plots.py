"""The figure of an object that is no map."""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@functools.singledispatch
def figure_of(what: Any, *, title: str | None) -> "Figure":
    """Draws objects that are not maps."""
    if isinstance(picture := getattr(what, "picture", None), functools.partial):
        return drawn(picture, title)
    raise TypeError(
        "what must be attention maps, statistics, importance, roles, the result of a "
        "study or the path of a file that a run has written, got "
        f"{type(what).__name__}."
    )


def drawn(picture: functools.partial, title: str | None) -> "Figure":
    """Draws a picture, with `title` instead of its title if there is one."""
    return picture() if title is None else picture(title=title)
