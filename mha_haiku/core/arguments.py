"""Checks arguments against the annotations of their parameters, where a call comes in.

A wrong type is an error that names the parameter, and not one from deep inside.
"""

import collections.abc
import contextlib
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from mha_haiku.core import checks

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MOST_CHECKED = 100  # items of a list
_NUMBERS = {int: ("an integer", "iu"), float: ("a number", "iuf")}
_NAMES = {
    bool: "True or False",
    str: "a text",
    types.NoneType: "None",
    collections.abc.Mapping: "a dict",
    collections.abc.Callable: "a function",
}
_LISTS = list, collections.abc.Sequence, collections.abc.Iterable


def checked(function: _Function) -> _Function:
    """Decorates a function: an argument of another type than annotated is refused.

    Arrays, type variables and `Any` are not checked.

    Raises:
      TypeError: From the function, with the parameter, its type and what came.

    Example:
      >>> @checked
      ... def double(count: int) -> int:
      ...     return 2 * count
      ...
      >>> double("3")
      Traceback (most recent call last):
      TypeError: count must be an integer, got '3'.
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        # Not where the function is defined, since names may be defined after it.
        try:
            return typing.get_type_hints(function)
        except NameError:  # of an import for types alone
            return {}

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        bound = {}
        with contextlib.suppress(TypeError):  # Python says better what is missing
            bound = signature.bind(*args, **options).arguments
        for name, value in bound.items():
            kind = signature.parameters[name].kind
            is_one = kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
            default = signature.parameters[name].default
            if is_one and name in hints() and value is not default:
                check(name, value, hints()[name])
        return function(*args, **options)

    return typing.cast(_Function, call)


def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name; any if they are unknown."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return inspect.signature(lambda *_, **options: options).parameters


def check_all(module: dict[str, Any]) -> None:
    """Decorates the public functions of a module, `globals()`, which has `__all__`."""
    for name in module["__all__"]:
        if inspect.isfunction(module[name]):
            module[name] = checked(module[name])


def check(name: str, value: Any, hint: Any) -> None:
    """Raises TypeError if a value is not of an annotated type."""
    if not fits(value, hint):
        raise TypeError(f"{name} must be {_said(hint)}, got {checks.shown(value)}.")


def fits(value: Any, hint: Any) -> bool:
    """Checks whether a value is of an annotated type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if hint in _NUMBERS:
        is_scalar = getattr(value, "shape", None) == ()
        if is_scalar and hasattr(value, "dtype"):
            return np.dtype(value.dtype).kind in _NUMBERS[hint][1]
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint is None:
        return value is None
    if origin in _LISTS:
        return _is_list(value, parts[0])
    if origin is tuple:
        return _is_tuple(value, parts)
    if origin is collections.abc.Callable or hint is Callable:
        return callable(value)
    if origin is collections.abc.Mapping:
        is_dict = isinstance(value, origin)
        return is_dict and all(fits(x, parts[1]) for x in value.values())
    if origin is not None:  # a dict, or a class with parameters
        return not isinstance(origin, type) or isinstance(value, origin)
    if not isinstance(hint, type) or hint.__module__.startswith(("jax", "numpy")):
        return True  # not a class, or one of arrays, which are made from others
    try:
        return isinstance(value, hint)
    except TypeError:  # a protocol
        return True


def _is_list(value: Any, item: Any) -> bool:
    if isinstance(value, str | bytes | collections.abc.Mapping):
        return False
    if hasattr(value, "dtype"):
        kind = np.dtype(value.dtype).kind
        if item is Any:
            return value.ndim > 0
        if kinds := {str: "U", bool: "b", int: "iu", float: "iuf"}.get(item):
            return value.ndim > 0 and kind in kinds
        return value.ndim > 1 and all(fits(x, item) for x in value[:_MOST_CHECKED])
    if not isinstance(value, collections.abc.Sequence):
        return isinstance(value, collections.abc.Iterable)
    return item is Any or all(fits(x, item) for x in value[:_MOST_CHECKED])


def _is_tuple(value: Any, parts: tuple) -> bool:
    if not isinstance(value, tuple | list) and not hasattr(value, "dtype"):
        return False
    if parts[-1:] == (Ellipsis,):
        return _is_list(value, parts[0])
    return len(value) == len(parts) and all(map(fits, value, parts))


def _said(hint: Any, *, many: bool = False) -> str:
    """Names a type in words, one value of it or many."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_said(part, many=many) for part in parts))
    plain = _NAMES.get(origin or hint)
    name = getattr(origin or hint, "__name__", str(hint))
    one = plain or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
    if hint in _NUMBERS:
        one = _NUMBERS[hint][0]
    elif origin in _LISTS:
        one = f"a list of {_said(parts[0], many=True)}"
    elif origin is collections.abc.Mapping:
        one = f"a dict of {_said(parts[1], many=True)}"
    elif origin is tuple and Ellipsis not in parts:
        one = f"a tuple of {len(parts)}"
        if len(set(parts)) == 1 and Any not in parts:
            one += f" {_said(parts[0], many=True)}"
    elif hint is Any:
        one = "a value"
    if not many:
        return one
    if hint is bool:
        return "booleans"
    noun, *rest = one.partition(" ")[2].split(" of ", 1)
    return " of ".join([f"{noun}s", *rest]) if noun else one
