"""A config trained with several seeds, for questions that one run cannot answer."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from mha_haiku.core import checks
from mha_haiku.training import tasks
from mha_haiku.training.runs import (
    configuration,
    folders,
    loop,
    metrics_log,
    trainers,
)


class Trained(NamedTuple):
    """A run that has ended.

    Attributes:
      seed: The run's `config.seed`.
      run: The run, with the parameters of its last step.
      reports: What it reported while it trained, by step; see `MetricsLog.report`.
    """

    seed: int
    run: folders.Run
    reports: list[dict[str, Any]]


def train_seeds(
    config: configuration.RunConfig,
    seeds: int,
    workdir: str | os.PathLike | None = None,
    *,
    task: tasks.Task | None = None,
    override_config: bool = False,
    observers: Sequence[loop.Observer] = (),
    devices: Sequence[jax.Device] | None = None,
) -> list[Trained]:
    """Trains a config with `seeds` seeds, from `config.seed` on, in one program.

    Takes the arguments of `loop.train`; in place of a `workdir` None is a temporary
    folder, of which nothing is left.

    Returns:
      The runs, by seed. They share one model and one task, so that what is compiled for
      the model of one serves all.

    Raises:
      KeyboardInterrupt: If training is interrupted; in a `workdir` it is resumed.
      NonFiniteLossError: If a run failed; the others are in `workdir`.
      ConfigError: See `loop.train`.
    """
    seeds = checks.positive_integer("seeds", seeds)
    config = config.replace(training=dict(seeds=seeds))
    with contextlib.ExitStack() as stack:
        if workdir is None:
            workdir = stack.enter_context(tempfile.TemporaryDirectory())
        summary = loop.train(
            config,
            workdir,
            task=task,
            override_config=override_config,
            observers=observers,
            devices=devices,
        )
        if summary.interrupted:
            raise KeyboardInterrupt
        root = folders.Folder(checks.as_path(workdir))
        failed = {} if seeds == 1 else summary.failed
        if failed:
            raise trainers.NonFiniteLossError(
                "\n".join(f"Seed {seed}: {why}" for seed, why in failed.items())
            )
        trained = [
            Trained(
                own.seed,
                folders.load_run(folder.root),
                metrics_log.read(folder.metrics),
            )
            for own, folder in folders.of_runs(root, config)
        ]
    first = trained[0].run
    return [
        each._replace(run=each.run._replace(model=first.model, task=first.task))
        for each in trained
    ]
