"""A run on disk: its folder, config, lock, log, checkpoints and training loop."""

from mha_haiku.runs.configuration import default_config
from mha_haiku.runs.folders import Run, load_run
from mha_haiku.runs.loop import Observer, train
from mha_haiku.runs.opening import Summary
from mha_haiku.runs.trainers import NonFiniteLossError

load = load_run

__all__ = [
    "NonFiniteLossError",
    "Observer",
    "Run",
    "Summary",
    "default_config",
    "load",
    "load_run",
    "train",
]
