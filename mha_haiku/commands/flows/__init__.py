"""Commands that do more than answer one question about a run."""

from mha_haiku.commands.flows import (  # noqa: F401  (each enters its commands)
    dumping,
    generating,
    importing,
    rolling,
    shrinking,
    training,
)
