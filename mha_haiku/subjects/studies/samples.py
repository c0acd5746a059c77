"""Texts that a run writes while it trains, to read what it has learnt."""

import json
from typing import Any

from mha_haiku.subjects.studies import generation, workbench
from mha_haiku.training.runs import configuration, files, progress

_TOKENS = 48  # of a prompt, and of what is written behind it, at most
_SHOWN = 60  # characters of each


class Samples(workbench.TrainingStudy):
    """Shows texts at each evaluation, and appends them to samples.jsonl.

    Causal models continue the first half of held-out examples, encoder-decoders
    answer their sources: the same at every step, with the same seed. A line of
    samples.jsonl has the `step`, a `generation.Text`, and the `right` answer.
    """

    def __init__(self, config: configuration.RunConfig):
        """Takes the run's config, which is not looked at before the run checked it."""
        self._config = config

    @property
    def every(self) -> int:
        """Steps between two evaluations; 0 without samples."""
        training = self._config.training
        is_on = training.samples and generation.given(self._config)
        return training.evaluate_every if is_on else 0

    def start(self, step: int) -> None:
        """Opens the file and drops its lines of steps after `step`."""
        folder, run = self._bench.folder, self._bench.run
        self._log = files.LineWriter(folder.samples, last_step=step)
        lines = files.read_lines(folder.samples)
        self._last = lines[-1]["step"] if lines else 0  # the model knows nothing at 0
        kind = generation.given(run.config)
        self._job, examples = generation.of_held_out(
            self._bench,
            range(run.config.training.samples),
            generation.strategy(kind),
            most=_TOKENS,
        )
        rows = workbench.rows_of(examples) if kind == "source" else ()
        self._right = [run.task.answer(row.targets) for row in rows]

    def wants(self, step: int) -> bool:
        """Checks whether the run is evaluated at `step`, also after a resume."""
        is_last = step == self._config.training.steps
        return step > 0 and (step % self.every == 0 or is_last)

    def look(self, step: int, params: Any) -> None:
        """Writes texts at a step, unless the file has that step already."""
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
    """Quotes the beginning, or the end, of a text as one line."""
    if len(text) > _SHOWN:
        text = f"...{text[-_SHOWN:]}" if is_end else f"{text[:_SHOWN]}..."
    return json.dumps(text, ensure_ascii=False)
