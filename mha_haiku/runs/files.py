"""Files that are either whole or not there."""

import io
import os
from pathlib import Path

from mha_haiku.checks import ConfigError


def write(path: Path, text: io.StringIO) -> Path:
    """Writes a text, making the folder where it is missing, and returns the path.

    Args:
      path: Where to.
      text: What.

    Raises:
      ConfigError: If it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text.getvalue(), encoding="utf-8", newline="")
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
    return path
