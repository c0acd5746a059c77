"""Checks of arguments, with messages that name the argument and what was expected.

Every check returns its value, so that it can be used in an assignment, and raises
ValueError. For values from a config, a flag or a file, the checks are called inside
`user_mistakes()`, which raises ConfigError instead: scripts then exit with status 2,
and two lines instead of a traceback.
"""

import contextlib
import difflib
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_LONGEST = 80  # characters of a value shown in a message
_LARGEST = 3.4028235e38  # the largest float32, rounded up


class ConfigError(ValueError):
    """A user's mistake in a config, a flag or a file; scripts print it and exit 2."""


def shown(value: Any) -> str:
    """Shortens a value to at most 80 characters, for a message."""
    text, half = repr(value), _LONGEST // 2 - 2
    return text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"


def as_path(value: str | os.PathLike) -> Path:
    """Converts to a path; `~` is the user's home."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(f"{str(value)!r}: no user of that name has a home.") from None


def is_folder(path: str | os.PathLike) -> bool:
    """Checks whether a path is an existing folder, or ends with a slash."""
    is_named = os.fspath(path).endswith(("/", os.sep))
    return is_named or as_path(path).is_dir()


def text_of(path: str | os.PathLike, name: str | os.PathLike) -> str:
    r"""Reads a UTF-8 text file, called `name` in messages, whose lines end in `\n`.

    It has no byte order mark.
    """
    try:
        text = as_path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}.") from None
    except UnicodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error}.") from None
    return text.replace("\r\n", "\n")


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Raises a ValueError from inside as ConfigError; also a decorator.

    Only for checks: a fault in any other code would be reported as the user's mistake.
    Subclasses of ValueError (of JSON, of Unicode) are not converted.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise ConfigError(str(error)) from error


def write_file(
    path: str | os.PathLike, content: str | bytes | Callable[[BinaryIO], Any]
) -> Path:
    """Writes a file atomically; creates its folder if it is missing.

    A reader sees the old file or the new one, never a part, even if the process is
    killed: the content goes to another file, which is then renamed.

    `content` is text (UTF-8), bytes, or a function that writes to the open file. A file
    that cannot be written is a ConfigError.
    """
    path = as_path(path)
    # With the process's id, so that two processes writing the same file do not mix.
    partial = path.with_name(f".{path.name[:50]}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path} cannot be written: {reason}.") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def choice(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """Checks that `value` is one of `choices`, and returns it."""
    choices = tuple(choices)
    if value not in choices:
        listed = ", ".join(map(str, choices))
        suggestion = nearest(str(value), map(str, choices))
        raise ValueError(
            f"{name} must be one of {listed}; got {shown(value)}.{suggestion}"
        )
    return value


def positive_integer(name: str, value: Any) -> int:
    """Checks that `value` is an integer of at least 1, and returns it."""
    return integer_in(name, value, 1, None)


def non_negative_integer(name: str, value: Any) -> int:
    """Checks that `value` is an integer of at least 0, and returns it."""
    return integer_in(name, value, 0, None)


def integer_in(name: str, value: Any, low: int, high: int | None) -> int:
    """Checks that `value` is an integer from `low` to `high`, which may be None."""
    bounds = f"an integer of at least {low}"
    if high is not None:
        bounds = f"an integer from {low} to {high}"
    if (
        not _is_number(numbers.Integral, value)
        or value < low
        or (high is not None and value > high)
    ):
        raise ValueError(f"{name} must be {bounds}, got {shown(value)}.")
    return value


def number(name: str, value: Any) -> float:
    """Checks that `value` is a finite number, and returns it."""
    return _number(name, value, "a finite number", lambda x: True)


def positive_number(name: str, value: Any) -> float:
    """Checks that `value` is a finite number above 0, and returns it."""
    return _number(name, value, "a finite number above 0", lambda x: x > 0)


def non_negative_number(name: str, value: Any) -> float:
    """Checks that `value` is a finite number of at least 0, and returns it."""
    return _number(name, value, "a finite number of at least 0", lambda x: x >= 0)


def fraction(name: str, value: Any) -> float:
    """Checks that `value` is a number in [0, 1), and returns it."""
    return _number(name, value, "a number in [0, 1)", lambda x: 0 <= x < 1)


def share(name: str, value: Any) -> float:
    """Checks that `value` is a number in [0, 1], and returns it."""
    return _number(name, value, "a number in [0, 1]", lambda x: 0 <= x <= 1)


def nearest(word: str, words: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the closest of `words`, or "" if none is."""
    matches = difflib.get_close_matches(word, tuple(words), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def listed(names: Sequence[str], most: int = 8) -> str:
    """Lists the first of some names, and counts the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def lacks_and_has(missing: Sequence[str], unknown: Sequence[str], most: int = 8) -> str:
    """Returns "it lacks a, b; it also has c", or "" if there are no names."""
    parts = [("lacks", missing), ("also has", unknown)]
    return "; ".join(f"it {verb} {listed(x, most)}" for verb, x in parts if x)


def _is_number(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _number(
    name: str, value: Any, bounds: str, accepts: Callable[[float], bool]
) -> float:
    is_number, size = _is_number(numbers.Real, value), math.nan
    if is_number:  # integers are unbounded, float16 does not hold the bound
        size = abs(value if _is_number(numbers.Integral, value) else float(value))
    if math.inf > size > _LARGEST:
        bounds += f" and at most {_LARGEST:.2g}, as float32 holds"
    if not size <= _LARGEST or not accepts(value):
        raise ValueError(f"{name} must be {bounds}, got {shown(value)}.")
    return value
