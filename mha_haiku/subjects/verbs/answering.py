"""Scores a model's answers to held-out examples.

N answers.
"""

from typing import NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.subjects import conversion
from mha_haiku.subjects.subject import RunSubject
from mha_haiku.subjects.verbs import generation


class Score(NamedTuple):
    """The scores of a model's answers to held-out examples."""

    job: generation.Job
    texts: list[generation.Text]  # N answers
    right: list[str]  # N right answers
    is_right: np.ndarray  # `[N]` booleans
    # The value of each score, and the ends of its 95 percent interval.
    values: dict[str, tuple[float, float, float]]

    def text(self, shown: int = 5) -> str:
        """Writes the scores as text, with some right and some wrong examples."""
        lines = [f"{self.job.subject.title}: {len(self.texts):,} held-out examples", ""]
        for name, (value, low, high) in self.values.items():
            lines.append(f"{name:<18} {value:.4f}  (95 %: {low:.4f} to {high:.4f})")
        for name, which in (("right", self.is_right), ("wrong", ~self.is_right)):
            places = np.flatnonzero(which)
            lines += ["", f"{name}: {len(places):,}"]
            for i in places[:shown].tolist():
                line = f"  {self.texts[i].given} -> {self.texts[i].text}"
                lines.append(
                    line if which is self.is_right else f"{line}  ({self.right[i]})"
                )
        return "\n".join(lines)


def score(
    subject: RunSubject,
    examples: int,
    strategy: generation.Strategy,
    *,
    tokens: int | None = None,
    seed: int = 0,
) -> Score:
    """Scores answers to held-out sources; arguments as in `generation.of_held_out`."""
    generation.check_given(subject, "source")
    with checks.user_mistakes():
        checks.integer_in("examples", examples, 1, 2**20)
    work, batch = generation.of_held_out(
        subject, range(examples), strategy, tokens=tokens, seed=seed
    )
    texts = list(generation.write(work, name="answers"))
    task, answers = subject.task, [text.tokens for text in texts]
    alone = [
        task.score([answer], jax.tree.map(lambda x, i=i: x[i : i + 1], batch))
        for i, answer in enumerate(answers)
    ]
    values = {
        name: (value, *_interval(value, np.array([scores[name] for scores in alone])))
        for name, value in task.score(answers, batch).items()
    }
    rows = conversion.rows_of(batch)
    right = [task.answer(row.targets) for row in rows]
    is_right = np.array(
        [
            task.until_end(answer) in task.right_answers(row)
            for answer, row in zip(answers, rows, strict=True)
        ]
    )
    return Score(work, texts, right, is_right, values)


def _interval(value: float, alone: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % interval of a score, from scores of single answers."""
    count, z = len(alone), 1.96
    # A share of the examples: Wilson 1927, doi:10.1080/01621459.1927.10502953.
    if np.isin(alone, (0, 1)).all():
        middle = (value + z**2 / (2 * count)) / (1 + z**2 / count)
        spread = value * (1 - value) / count + z**2 / (4 * count**2)
        half = z * np.sqrt(spread) / (1 + z**2 / count)
        return max(middle - half, 0.0), min(middle + half, 1.0)
    half = z * alone.std(ddof=1) / np.sqrt(count) if count > 1 else float("nan")
    ends = [value - half, value + half]
    return tuple(np.clip(ends, 0, max(1, alone.max())).tolist())
