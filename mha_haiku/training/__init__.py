"""Training: a run from a config to its summary, and what can be read back from it."""

from mha_haiku.training.attention_dump import dump
from mha_haiku.training.loop import train
from mha_haiku.training.opening import Summary
from mha_haiku.training.progress import NonFiniteLossError
from mha_haiku.training.run import Run, load_run

__all__ = ["NonFiniteLossError", "Run", "Summary", "dump", "load_run", "train"]
