"""A run on disk: its folder, config, lock, log, checkpoints and training loop."""

from mha_haiku.runs.configuration import default_config
from mha_haiku.runs.folders import Run, load_run
from mha_haiku.runs.loop import Observer, train
from mha_haiku.runs.opening import SeedsSummary, Summary
from mha_haiku.runs.seeds import Trained, train_seeds
from mha_haiku.runs.trainers import NonFiniteLossError

load = load_run

__all__ = [
    "NonFiniteLossError",
    "Observer",
    "Run",
    "SeedsSummary",
    "Summary",
    "Trained",
    "default_config",
    "load",
    "load_run",
    "train",
    "train_seeds",
]
