"""Progress: tqdm's bar on a terminal, elsewhere a line of it every ten seconds."""

import sys
from collections.abc import Collection, Iterator
from typing import Any, TextIO

import tqdm

_SECONDS_BETWEEN_LINES = 10.0
_TIMES = "{elapsed} elapsed, {remaining} left"


class Bar(tqdm.tqdm):
    """Progress toward a known total, on stderr.

    On a terminal it is tqdm's bar; in a pipe or a file it prints a line every ten
    seconds, with the time elapsed and the time left. Work before the first `update`,
    which `doing` describes, does not count in times and rates.
    """

    def __init__(
        self, total: int, *, unit: str, name: str = "", doing: str, leave: bool = False
    ):
        self._is_drawn, self._begins = sys.stderr.isatty(), True
        if self._is_drawn:
            where: dict[str, Any] = {"file": sys.stderr, "dynamic_ncols": True}
        else:
            seconds = _SECONDS_BETWEEN_LINES
            where = {"file": _Lines(sys.stderr), "mininterval": seconds, "miniters": 1}
            where["delay"] = seconds
            where["bar_format"] = "{desc}{n_fmt}/{total_fmt}, " + _TIMES + "{postfix}"
            say(f"{name}: {doing}" if name else doing)
        super().__init__(
            total=total,
            desc=f"{name}: " if name else None,
            unit=unit,
            leave=leave and self._is_drawn,
            **where,
        )
        if self._is_drawn:
            self.set_postfix_str(doing)

    def update(self, count: int = 1) -> None:
        if not self._begins:
            super().update(count)
            return
        self._begins = False
        self.n += count
        self.note("")
        self.initial = self.last_print_n = self.n
        now = self._time()  # pyright: ignore[reportAttributeAccessIssue]
        self.start_t = self.last_print_t = now

    def note(self, text: str) -> None:
        """Shows a text next to the bar, or in the lines."""
        self.set_postfix_str(text, refresh=self._is_drawn)


class _Lines:
    """A file with a line for each picture of a bar that is written to it."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> None:
        if text := text.strip():
            self._file.write(f"{text}\n")

    def flush(self) -> None:
        self._file.flush()


def over(items: Collection[Any], *, name: str, unit: str = "step") -> Iterator[Any]:
    """Yields a known number of items, and shows how many are done; see `Bar`."""
    with Bar(len(items), unit=unit, name=name, doing="compiling") as bar:
        for item in items:
            yield item
            bar.update()


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
