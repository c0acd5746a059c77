"""A run on disk: its folder, config, lock, log, checkpoints and training loop."""

from mha_haiku.training.runs.configuration import RunConfig, default_config
from mha_haiku.training.runs.folders import Run, load_run
from mha_haiku.training.runs.loop import Observer, Summary, train
from mha_haiku.training.runs.trainers import NonFiniteLossError

load = load_run

__all__ = [
    "NonFiniteLossError",
    "Observer",
    "Run",
    "RunConfig",
    "Summary",
    "default_config",
    "load",
    "load_run",
    "train",
]
