"""Short text for arrays, and the link from an object to the page that shows it.

A class whose objects can be shown declares

    _repr_html_, show, plot = display.html, display.show, display.plot

and one with a table `save = display.save`.

Nothing here computes: an array is described by its dtype and shape, even while it is
traced, and numbers are shown only if they are few and known on the host.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_MOST_NUMBERS = 8
_LONGEST = 60


_registered: dict[str, Callable] = {}


def register(**functions: Callable) -> None:
    """Registers the functions that `html`, `show`, `plot` and `save` call."""
    _registered.update(functions)


def html(value: Any) -> str:
    """Renders an object for a notebook, by the registered function."""
    return _registered["html"](value)


def show(value: Any, **options: Any) -> Any:
    """Shows the page of an object, by the registered function; see `mh.show`."""
    return _registered["show"](value, **options)


def plot(value: Any, **options: Any) -> Any:
    """Draws the figure of an object, by the registered function; see `mh.plot`."""
    return _registered["plot"](value, **options)


def save(
    value: Any, path: str | os.PathLike, formats: str | Sequence[str] = ("png",)
) -> list[Path]:
    """Writes the table as .csv and the picture in each format; returns the paths.

    Without matplotlib there is no picture.

    Args:
      value: A result.
      path: A folder, for all files; or one file, whose suffix says what is written:
        the table for .csv, a format of matplotlib for the picture. A path that ends
        with a slash is a folder.
      formats: Formats of the pictures in a folder, or one of them.

    Raises:
      ConfigError: If a file cannot be written.
      ValueError: If nothing of this result has the path's suffix, or matplotlib lacks
        a format; then nothing is written.
    """
    return _registered["save"](value, path, formats)


def numbers(x: Any) -> str:
    """Formats a few numbers as `[3, 6]` if they are known, else dtype and shape."""
    if getattr(x, "size", _MOST_NUMBERS + 1) > _MOST_NUMBERS or not is_known(x):
        return value(x)
    return str(np.asarray(x).tolist())


def value(x: Any) -> str:
    """Describes an array as `float32[2,4,6]`, any other value in a few words."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}[{','.join(map(str, shape))}]"
    if isinstance(x, tuple | list) and not hasattr(x, "_fields") and x:
        kinds = {type(part).__name__ for part in x}
        return f"{len(x)} of {kinds.pop()}" if len(kinds) == 1 else f"{len(x)} values"
    if isinstance(x, dict) and x:
        return f"{len(x)} by name"
    if callable(x) and hasattr(x, "__name__"):
        return x.__name__
    text = repr(x)
    return text if len(text) <= _LONGEST else f"{type(x).__name__}(...)"


def record(self: Any) -> str:
    """Describes a named tuple or a dataclass as `Name(field=float32[2], ...)`."""
    names = getattr(self, "_fields", None) or [
        field.name for field in dataclasses.fields(self)
    ]
    values = {name: getattr(self, name, None) for name in names}
    fields = (
        f"{name}={value(part)}"
        for name, part in values.items()
        if part is not None and not (isinstance(part, tuple) and not part)
    )
    return f"{type(self).__name__}({', '.join(fields)})"


def count(number: int, noun: str) -> str:
    """Writes a number of things: "1 layer", "2 layers"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def is_traced(tree: Any) -> bool:
    """Returns whether any array of a pytree is being traced."""
    import jax.core  # not with the module, so that the package is there at once

    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def is_known(x: Any) -> bool:
    """Returns whether the numbers of an array can be read on this host now."""
    import jax.core

    if not isinstance(x, jax.Array):
        return isinstance(x, np.ndarray | np.generic)
    if isinstance(x, jax.core.Tracer) or x.is_deleted():
        return False
    return x.is_fully_addressable
