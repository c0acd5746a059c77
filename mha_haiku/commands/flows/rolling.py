"""`rollout`."""

import pathlib

from mha_haiku.commands import config_files
from mha_haiku.commands.groups import Pictures, Run
from mha_haiku.commands.table import command, tell
from mha_haiku.core import checks
from mha_haiku.subjects.verbs.rollout import PUBLISHED
from mha_haiku.training.runs import loop


@command
def rollout(
    *,
    run: Run,
    train: bool = False,
    examples: int = 256,
    flow_examples: int | None = None,
    out: str | None = None,
    pictures: Pictures,
) -> None:
    """Compares roll-out and raw attention with the effect of replacing inputs.

    Run: python -m mha_haiku rollout --workdir=runs/rollout --train

    With --train it first trains configs/papers/rollout.py in that folder, unless the
    run exists. It prints the correlations, and writes rollout.csv and rollout.png; for
    that run it also shows the correlations of Abnar and Zuidema (2020). It accepts any
    run with tokens as inputs and an answer at each position.

    Args:
      train: Train configs/papers/rollout.py there first.
      examples: Number of held-out examples.
      flow_examples: Number of these for which flow is computed; default: 32, or all if
        fewer.
      out: Folder to write to; <workdir>/attention by default.
    """
    with checks.user_mistakes():
        checks.positive_integer("--examples", examples)
        if flow_examples is not None:
            name = "--flow_examples, at most as many as --examples,"
            checks.integer_in(name, flow_examples, 1, examples)
    paper = config_files.load("configs/papers/rollout.py")
    if train:
        loop.train_whole(paper, run.workdir)
    subject = run.subject()
    config = subject.config
    is_paper = (config.task, config.model) == (paper.task, paper.model)
    result = subject.rollout(
        examples=examples,
        flow_examples=flow_examples,
        published=PUBLISHED if is_paper else None,
    )
    tell(result, out or pathlib.Path(run.workdir, "attention"), pictures.format)
