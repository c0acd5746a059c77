"""Progress: tqdm's bar on a terminal, elsewhere a line of it every ten seconds."""

import contextlib
import sys
import threading
from collections.abc import Collection, Iterator
from typing import Any, TextIO

import tqdm

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BEFORE_A_WORD = 2.0
_TIMES = "{elapsed} elapsed, {remaining} left"


class Bar(tqdm.tqdm):
    """Progress toward a known total, on stderr.

    On a terminal it is tqdm's bar; in a pipe or a file it prints a line every ten
    seconds, with the time elapsed and the time left. Work before the first `update`,
    such as a compilation, does not count in times and rates.
    """

    def __init__(
        self,
        total: int,
        *,
        unit: str,
        name: str = "",
        start: int = 0,
        doing: str = "",
        leave: bool = False,
        prints: bool = True,
    ):
        """Opens the bar, which counts from `start` to `total`, and starts its clock.

        `doing` describes the work until the first `update`. With `leave` the bar stays
        on the terminal. Without `prints` there are no lines in a pipe.
        """
        self.is_drawn = sys.stderr.isatty()
        self._doing = bool(doing)
        if self.is_drawn:
            where: dict[str, Any] = {"file": sys.stderr, "dynamic_ncols": True}
        else:
            seconds = _SECONDS_BETWEEN_LINES
            where = {"file": _Lines(sys.stderr), "mininterval": seconds, "miniters": 1}
            where["delay"] = seconds if prints else float("inf")
            where["bar_format"] = "{desc}{n_fmt}/{total_fmt}, " + _TIMES + "{postfix}"
            if doing:
                say(f"{name}: {doing}" if name else doing)
        super().__init__(
            total=total,
            initial=start,
            desc=f"{name}: " if name else None,
            unit=unit,
            leave=leave and self.is_drawn,
            **where,
        )
        if doing and self.is_drawn:
            self.set_postfix_str(doing)

    def update(self, count: int = 1) -> None:
        if self._doing:
            self._doing = False
            self.n += count
            self.note("")
            self.start_clock()
        else:
            super().update(count)

    def start_clock(self) -> None:
        """Makes times and the rate count from here."""
        self.initial = self.last_print_n = self.n
        now = self._time()  # pyright: ignore[reportAttributeAccessIssue]
        self.start_t = self.last_print_t = now

    def note(self, text: str) -> None:
        """Shows a text next to the bar, or in the lines."""
        self.set_postfix_str(text, refresh=self.is_drawn)

    def times(self) -> str:
        """Formats the times elapsed and left: "00:12 elapsed, 01:40 left"."""
        return self.format_meter(**{**self.format_dict, "bar_format": _TIMES})


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


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Shows what is being done while entered, if that takes long."""
    timer = threading.Timer(_SECONDS_BEFORE_A_WORD, say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell(line: str) -> None:
    """Prints a result on stdout, above a bar that is there."""
    _print(line, sys.stdout)


def _print(line: str, file: TextIO) -> None:
    tqdm.tqdm.write(line, file=file)  # above a bar that is there
    file.flush()
