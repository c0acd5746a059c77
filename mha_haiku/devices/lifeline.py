"""Connections between processes that break when one dies, so that the others end.

JAX notices a death by missing heartbeats, tens of seconds later, and aborts. Here every
process holds a connection to the first; the operating system closes it when either
dies.
"""

import os
import socket
import sys
import threading

_GOODBYE = b"."
_CONNECT_SECONDS = 10


class Lifelines:
    """The connections of this process; each is watched by a thread.

    Where one breaks, the process ends with status 1 and two lines on stderr.
    """

    def __init__(self):
        self._lines: list[socket.socket] = []
        self._server: socket.socket | None = None
        self._left = False

    def open(self) -> str:
        """Listens, on the first process; returns "host:port"."""
        self._server = socket.create_server(("", 0))
        return f"{socket.gethostname()}:{self._server.getsockname()[1]}"

    def accept(self, count: int) -> None:
        """Waits until `count` other processes have connected."""
        self._server.settimeout(_CONNECT_SECONDS)
        for _ in range(count):
            self._watch(self._server.accept()[0])

    def hold(self, host: str, port: int) -> None:
        """Connects to the first process."""
        self._watch(socket.create_connection((host, port), _CONNECT_SECONDS))

    def leave(self) -> None:
        """Announces the end, so that the others do not take it for a death."""
        self._left = True
        for line in self._lines:
            try:
                line.sendall(_GOODBYE)
            except OSError:
                pass  # gone already

    def _watch(self, line):
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._lines.append(line)
        threading.Thread(
            target=self._wait, args=(line,), daemon=True, name="lifeline"
        ).start()

    def _wait(self, line):
        try:
            said = line.recv(1)
        except OSError:
            said = b""
        if said == _GOODBYE or self._left:
            return
        print(
            "fault: another process has died, and training cannot go on without it.\n"
            "The same command on all of them resumes from the newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
