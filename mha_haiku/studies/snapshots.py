"""Maps of the same examples at some steps of a training, to watch heads form."""

import functools
import shutil
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mha_haiku import tasks
from mha_haiku.runs import folders, loop
from mha_haiku.studies import attention_dump, dossiers
from mha_haiku.studies.workbench import Bench

if TYPE_CHECKING:
    import ml_collections


class Snapshots(loop.Observer):
    """Writes `attention/snapshots/<step>/maps.npz` at some of a run's reports.

    There are `config.attention.snapshots` of them, spread evenly in the logarithm of
    the step, from the first report to the end.
    """

    def __init__(self, config: "ml_collections.ConfigDict"):
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

    def begin(
        self,
        folder: folders.Folder,
        config: "ml_collections.ConfigDict",
        task: tasks.Task,
        step: int,
    ) -> None:
        """Removes snapshots of steps after `step`, which will be taken again."""
        self._folder = folder.snapshots
        for each in dossiers.steps_of(folder):
            if each > step:
                shutil.rmtree(self._folder / str(each))
        model = folders.make_model(config, task)  # in this process only
        run = folders.Run(config, task, model, None, step)
        self._bench = Bench(run, folder, progress=lambda iterable, **_: iterable)

    def wants(self, step: int) -> bool:
        """Returns whether `step` is one of the snapshots' steps."""
        return step in self.steps

    def look(self, step: int, params: Any) -> None:
        """Writes the maps at a step, unless they are there.

        Args:
          step: The step.
          params: The parameters at that step.
        """
        out = self._folder / str(step)
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
    """Returns steps that are spread evenly in their logarithm, the last one included.

    Args:
      last: The last step.
      every: All steps but the last are multiples of this.
      count: How many; there are fewer if there are not so many multiples.
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
