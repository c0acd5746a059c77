"""Commands: functions and verbs of `Subject` with their signatures as flags.

`python -m mha_haiku` lists them. A file in `experiments/` runs one. Flags, defaults and
`--help` are the signature and the docstring of a verb with `command=`, or of a function
with keyword parameters, decorated by `command` (`table`):

    @command
    def count_heads(*, run: groups.Run, layer: int = 0) -> None:
        '''Counts the heads of a layer of a run.

Args:
          layer: The layer.
        '''

Flags that commands share are the fields of a dataclass (`groups`). Nothing is computed
here, and no flag is global, so that commands can be imported together.
"""  # noqa: D214

import importlib
from typing import TYPE_CHECKING, Any

from mha_haiku.commands.overview import choose

if TYPE_CHECKING:
    from mha_haiku.commands.table import command, commands, end, main, program, run

__all__ = ["choose", "command", "commands", "end", "main", "program", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for commands in ("generation", "workflows"):
        importlib.import_module(f"{__name__}.{commands}")
    return getattr(importlib.import_module(f"{__name__}.table"), name)
