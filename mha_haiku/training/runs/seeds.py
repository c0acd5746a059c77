"""A config trained with several seeds, for questions that one run cannot answer."""

import contextlib
import os
import tempfile
from typing import Any, NamedTuple

from mha_haiku.core import checks
from mha_haiku.training.runs import configuration, folders, loop, metrics_log, trainers


class Trained(NamedTuple):
    """A run that has ended."""

    seed: int  # its `config.seed`
    run: folders.Run  # with the parameters of its last step
    reports: list[dict[str, Any]]  # by step; see `MetricsLog.report`


def train_seeds(
    config: configuration.RunConfig,
    seeds: int,
    workdir: str | os.PathLike | None = None,
    **options: Any,
) -> list[Trained]:
    """Trains a config with `seeds` seeds, from `config.seed` on, in one program.

    Options are those of `loop.train`; in place of a `workdir` None is a temporary
    folder, of which nothing is left. The runs share one model and one task, so that
    what is compiled for the model of one serves all.

    Raises:
      KeyboardInterrupt: If training is interrupted; in a `workdir` it is resumed.
      NonFiniteLossError: If a run failed; the others are in `workdir`.
    """
    seeds = checks.positive_integer("seeds", seeds)
    config = config.replace(training=dict(seeds=seeds))
    with contextlib.ExitStack() as stack:
        if workdir is None:
            workdir = stack.enter_context(tempfile.TemporaryDirectory())
        summary = loop.train(config, workdir, **options)
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
    shared = dict(model=trained[0].run.model, task=trained[0].run.task)
    return [each._replace(run=each.run._replace(**shared)) for each in trained]
