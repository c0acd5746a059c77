"""Progress: tqdm's bar on stderr, and lines above it."""

import sys
from collections.abc import Collection, Iterator
from typing import Any, TextIO

import tqdm

_SECONDS_BETWEEN_LINES = 10.0


def bar(total: int, *, unit: str, name: str, leave: bool = False) -> tqdm.tqdm:
    """Makes a bar; in a pipe or a file it is written every ten seconds."""
    wait = 0.0 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
    return tqdm.tqdm(
        total=total,
        unit=unit,
        desc=name,
        leave=leave,
        file=sys.stderr,
        dynamic_ncols=True,
        mininterval=max(wait, 0.1),
        delay=wait,
    )


def over(items: Collection[Any], *, name: str, unit: str = "step") -> Iterator[Any]:
    """Yields a known number of items, and shows how many are done; see `bar`."""
    say(f"{name}: compiling")
    with bar(len(items), unit=unit, name=name) as progress:
        for item in items:
            yield item
            progress.update()


def say(what: str) -> None:
    """Prints on stderr what begins now, such as "compiling"."""
    _print(f"{what} ...", sys.stderr)


def tell(line: str) -> None:
    """Prints a result on stdout, above a bar that is there."""
    _print(line, sys.stdout)


def times(seconds: float, share: float) -> str:
    """Formats the times elapsed and left: "00:12 elapsed, 01:40 left".

    In `seconds` a `share` above 0 of the work was done.
    """
    elapsed, left = map(tqdm.tqdm.format_interval, (seconds, seconds / share - seconds))
    return f"{elapsed} elapsed, {left} left"


def _print(line: str, file: TextIO) -> None:
    tqdm.tqdm.write(line, file=file)  # above a bar that is there
    file.flush()
