"""Commands: functions and verbs of `Subject` with their signatures as flags.

`python -m mha_haiku` lists them. A file in `experiments/` runs one.
"""

from mha_haiku.commands import generation, workflows  # noqa: F401  (enter commands)
from mha_haiku.commands.table import choose, command, commands, main, program, run

__all__ = ["choose", "command", "commands", "main", "program", "run"]
