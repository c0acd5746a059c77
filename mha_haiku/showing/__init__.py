"""Maps, runs and numbers of heads as pages, tables and figures."""

from mha_haiku.showing import measurements as _answers  # noqa: F401  (shows itself)
from mha_haiku.showing.readings import View

__all__ = ["View"]
