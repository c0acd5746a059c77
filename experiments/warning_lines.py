"""Warnings of mha_haiku are printed as lines `warning: ...` on stderr."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Shows the warnings of mha_haiku while entered."""
    logger, handler = logging.getLogger("mha_haiku"), _Lines()
    logger.addHandler(handler)
    # Other packages install handlers at the root logger, which would print them again.
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class _Lines(logging.Handler):
    """Writes a line per warning, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        import tqdm

        tqdm.tqdm.write(f"warning: {record.getMessage()}", file=sys.stderr)
