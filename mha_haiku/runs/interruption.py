"""Ctrl-C and SIGTERM: the first is a request to stop, the second stops at once."""

import signal
import threading


class Interruption:
    """While entered, notes the first SIGINT or SIGTERM in `requested`.

    The second raises KeyboardInterrupt. The handlers that were there come back on
    leaving. Outside the main thread, where Python allows no handlers, nothing changes.
    """

    def __init__(self):
        self.requested = False
        self._before = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and cannot be put back.
            if handler is not None:
                signal.signal(number, handler)
        self._before = {}

    def _handle(self, number, frame) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
