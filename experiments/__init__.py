"""Scripts: each runs one command of the library."""

import os
import signal


def main(name: str) -> None:
    """Runs a command; Ctrl-C ends it in a line while libraries are imported, too."""

    def end(number, frame):
        os.write(2, b"Interrupted.\n")
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # under nohup it is ignored
        signal.signal(signal.SIGINT, end)
    from mha_haiku.commands import main as run

    signal.signal(signal.SIGINT, before)
    run(name)
