"""Progress: a bar on a terminal, elsewhere lines with the time left."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 1.0


class Bar:
    """Progress towards a known total, on stderr.

    On a terminal it is tqdm's bar. In a pipe or a file it prints a line every ten
    seconds, with the time elapsed and the time left. While it is entered, it does so
    between two calls of `advance` too: a step and its compilation can take minutes.
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

        `doing` is what happens until the first `advance`, such as "compiling". With
        `leave` the bar stays on the terminal. Without `prints` the caller prints its
        own lines where there is no terminal.
        """
        import tqdm

        self.place = start
        self.total = total
        self.is_drawn = sys.stderr.isatty()
        self._name, self._doing, self._note = name, doing, ""
        self._prints = prints
        self._beat = contextlib.ExitStack()
        self._opened = self._last_line = time.perf_counter()
        self._timed_from = start, self._opened
        self._bar = tqdm.tqdm(
            total=total,
            initial=start,
            desc=name or None,
            unit=unit,
            file=sys.stderr,
            disable=not self.is_drawn,
            leave=leave,
            dynamic_ncols=True,
        )
        if doing:
            self._bar.set_postfix_str(doing)
            if not self.is_drawn:
                say(f"{name}: {doing}" if name else doing)

    def __enter__(self) -> "Bar":
        if self.is_drawn:
            self._beat.enter_context(_repeatedly(self._bar.refresh))
        elif self._prints:
            self._beat.enter_context(_repeatedly(self._print_line))
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def advance(self, count: int = 1) -> None:
        self.place += count
        if self._doing:  # the first step, with its compilation, is left out of rates
            self._doing = ""
            self._bar.set_postfix_str("", refresh=False)
            self._bar.n = self.place
            self.start_clock()
        else:
            self._bar.update(count)
        if self._prints and not self.is_drawn:
            self._print_line()

    def _print_line(self) -> None:
        """Prints the count, or what happens before the first, if a line is due."""
        now = time.perf_counter()
        if now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        name = f"{self._name} " if self._name else ""
        doing = "".join(f"{text}, " for text in (self._doing, self._note) if text)
        place = f"{name}{self.place}/{self.total}"
        _print(f"{place}, {doing}{self.times()}", sys.stderr)

    def start_clock(self) -> None:
        """Makes rate and time left count from here."""
        self._timed_from = self.place, time.perf_counter()
        self._bar.initial = self._bar.last_print_n = self.place
        self._bar.unpause()
        self._bar.refresh()

    def note(self, text: str) -> None:
        """Shows a text next to the bar, or in the lines."""
        self._note = text
        self._bar.set_postfix_str(text)

    def tell(self, line: str) -> None:
        """Prints a result on stdout, above the bar."""
        tell(line)
        self._last_line = time.perf_counter()

    def times(self) -> str:
        """Formats the times elapsed and left: "0:12 elapsed, 1:40 left"."""
        now = time.perf_counter()
        text = f"{_clock(now - self._opened)} elapsed"
        place, began = self._timed_from
        if place < self.place < self.total:
            left = (now - began) / (self.place - place) * (self.total - self.place)
            text += f", {_clock(left)} left"
        return text

    def close(self) -> None:
        """Removes the bar, unless `leave` was given."""
        self._beat.close()
        self._bar.close()


def over(items: Iterable[Any], *, name: str, unit: str = "step") -> Iterator[Any]:
    """Yields items of known number, and shows how many are done; see `Bar`."""
    with Bar(len(items), unit=unit, name=name, doing="compiling") as bar:
        for item in items:
            yield item
            bar.advance()


def say(what: str) -> None:
    """Prints on stderr what begins now, such as "compiling"."""
    _print(f"{what} ...", sys.stderr)


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Says while entered what is done, after a second and then every ten."""
    began = time.perf_counter()
    last = began - _SECONDS_BETWEEN_LINES

    def still():
        nonlocal last
        now = time.perf_counter()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            say(f"{what}, {_clock(now - began)} elapsed")

    with _repeatedly(still):
        yield


def tell(line: str) -> None:
    """Prints a result on stdout, above a bar that is there."""
    _print(line, sys.stdout)


@contextlib.contextmanager
def _repeatedly(act: Callable[[], None]) -> Iterator[None]:
    """Calls a function at each look while entered, in a thread of its own."""
    ended = threading.Event()

    def repeat():
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _print(line: str, file: TextIO) -> None:
    import tqdm

    tqdm.tqdm.write(line, file=file)  # above a bar that is there
    file.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
