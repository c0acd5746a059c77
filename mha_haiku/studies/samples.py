"""Texts that a run writes while it trains, to read what it has learnt."""

import json
from typing import TYPE_CHECKING, Any

from mha_haiku import tasks
from mha_haiku.runs import files, folders, loop, progress
from mha_haiku.studies import generation
from mha_haiku.studies.workbench import Bench

if TYPE_CHECKING:
    import ml_collections

_TOKENS = 48  # of a prompt, and of what is written behind it, at most
_SHOWN = 60  # characters of each


class Samples(loop.Observer):
    """Shows texts at each evaluation, and appends them to samples.jsonl.

    Causal models go on with the first half of held-out examples, encoder-decoders
    answer their sources: the same at every step, with the same seed. A line of
    samples.jsonl has the `step` and a `generation.Text`, of an answer the `right` one.
    Models that write no text, and `config.training.samples` of 0, make none.
    """

    def __init__(self, config: "ml_collections.ConfigDict"):
        """Takes the run's config, which is not looked at before the run checked it."""
        self._config = config

    @property
    def every(self) -> int:
        """Steps between two evaluations; 0 without samples."""
        training = self._config.training
        is_on = training.samples and generation.given(self._config)
        return training.evaluate_every if is_on else 0

    def begin(
        self,
        folder: folders.Folder,
        config: "ml_collections.ConfigDict",
        task: tasks.Task,
        step: int,
    ) -> None:
        """Opens the file and drops its lines of steps after `step`."""
        self._log = files.LineWriter(folder.samples, last_step=step)
        lines = files.read_lines(folder.samples)
        self._last = lines[-1]["step"] if lines else 0  # the model knows nothing at 0
        model = folders.make_model(config, task)  # in this process only
        run = folders.Run(config, task, model, None, step)
        kind = generation.given(config)
        self._job, examples = generation.of_held_out(
            Bench(run, folder),
            range(config.training.samples),
            generation.strategy(kind),
            most=_TOKENS,
        )
        self._right = [
            task.answer(generation.row_of(examples, i).targets)
            for i in range(config.training.samples if kind == "source" else 0)
        ]

    def wants(self, step: int) -> bool:
        """Returns whether the run is evaluated at `step`: where it goes on, too."""
        is_last = step == self._config.training.steps
        return step > 0 and (step % self.every == 0 or is_last)

    def look(self, step: int, params: Any) -> None:
        """Writes texts at a step, unless the file has that step already.

        Args:
          step: The step.
          params: The parameters at that step.
        """
        if step <= self._last:
            return
        job = self._job.with_params(params)
        for i, text in enumerate(generation.write(job)):
            right = {"right": self._right[i]} if self._right else {}
            self._log.append({"step": step, **text.record(), **right})
            progress.tell(self._line(step, text, **right))
        self._last = step

    def end(self) -> None:
        """Closes the file."""
        self._log.close()

    def _line(self, step, text, right=None) -> str:
        steps = self._config.training.steps
        line = f"step {step:>{len(str(steps))}}/{steps}  sample "
        line += f"{_quoted(text.given, is_end=right is None)} -> {_quoted(text.text)}"
        if right is None:
            return line
        return f"{line} ({'right' if text.text == right else _quoted(right)})"


def _quoted(text: str, *, is_end: bool = False) -> str:
    """Returns the beginning, or the end, of a text as one line with quotes around."""
    if len(text) > _SHOWN:
        text = f"...{text[-_SHOWN:]}" if is_end else f"{text[:_SHOWN]}..."
    return json.dumps(text, ensure_ascii=False)
