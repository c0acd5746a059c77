"""The code that a docstring shows, to be run by a test."""

import inspect
import textwrap
from typing import Any


def code_of(documented: Any) -> str:
    """Returns the indented lines of a docstring."""
    lines = inspect.getdoc(documented).splitlines()
    code = [line for line in lines if line.startswith("    ") or not line.strip()]
    return textwrap.dedent("\n".join(code))
