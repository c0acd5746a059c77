"""What goes on in spite of something is told in a line `warning: ...` on stderr."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Shows the warnings of mha_haiku while entered."""
    logger, handler = logging.getLogger("mha_haiku"), _Lines()
    logger.addHandler(handler)
    # Other packages install handlers of their own at the root, which would repeat it.
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class _Lines(logging.Handler):
    """Writes a line per warning, above a progress bar that is there."""

    def emit(self, record: logging.LogRecord) -> None:
        import tqdm

        tqdm.tqdm.write(f"warning: {record.getMessage()}", file=sys.stderr)
