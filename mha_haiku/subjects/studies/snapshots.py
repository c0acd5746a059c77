"""Maps of the same examples at some steps of a training, to watch heads form."""

import functools
import shutil
from typing import Any

import jax
import numpy as np

from mha_haiku.subjects.studies import attention_dump, dossiers, workbench
from mha_haiku.training.runs import configuration


class Snapshots(workbench.TrainingStudy):
    """Writes `attention/snapshots/<step>/maps.npz` at some of a run's reports.

    There are `config.attention.snapshots` of them, spread evenly in the logarithm of
    the step, from the first report to the end.
    """

    def __init__(self, config: configuration.RunConfig):
        """Takes the run's config, which is not looked at before the run checked it."""
        self._config = config

    @property
    def every(self) -> int:
        """Steps between two reports; 0 without snapshots."""
        config = self._config
        return config.training.report_every if config.attention.snapshots else 0

    @functools.cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps of all snapshots."""
        training = self._config.training
        count = self._config.attention.snapshots
        return spread(training.steps, training.report_every, count)

    def start(self, step: int) -> None:
        """Removes snapshots of steps after `step`, which will be taken again."""
        folder = self._bench.folder
        for each in dossiers.steps_of(folder):
            if each > step:
                shutil.rmtree(folder.snapshots / str(each))

    def wants(self, step: int) -> bool:
        """Checks whether `step` is one of the snapshots' steps."""
        return step in self.steps

    def look(self, step: int, params: Any) -> None:
        """Writes the maps at a step, unless they are there."""
        out = self._bench.folder.snapshots / str(step)
        if (out / "maps.npz").exists():
            return
        run = self._bench.run._replace(params=params, step=step)
        attention_dump.dump(
            self._bench.with_run(run),
            out=out,
            means=False,
            devices=jax.local_devices()[:1],
        )


def spread(last: int, every: int, count: int) -> tuple[int, ...]:
    """Spreads `count` steps evenly in their logarithm, with the last one included.

    All but the last are multiples of `every`; if there are too few, there are fewer.
    """
    reports = -(-last // every)
    count = min(count, reports)
    numbers: list[int] = []
    for i, number in enumerate(np.geomspace(1, reports, count).tolist()):
        # All different, and room for those that follow.
        above = numbers[-1] + 1 if numbers else 1
        most = reports - (count - 1 - i)
        numbers.append(min(max(round(number), above), most))
    if count == 1:
        numbers = [reports]
    return tuple(min(number * every, last) for number in numbers)
