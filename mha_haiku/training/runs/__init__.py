"""A run on disk: its folder, config, lock, log, checkpoints and training loop."""

from mha_haiku.training.runs.configuration import RunConfig, default_config
from mha_haiku.training.runs.folders import Run, load_run
from mha_haiku.training.runs.loop import Observer, Trained, train, train_seeds
from mha_haiku.training.runs.starting import SeedsSummary, Summary
from mha_haiku.training.runs.trainers import NonFiniteLossError

load = load_run

__all__ = [
    "NonFiniteLossError",
    "Observer",
    "Run",
    "RunConfig",
    "SeedsSummary",
    "Summary",
    "Trained",
    "default_config",
    "load",
    "load_run",
    "train",
    "train_seeds",
]
