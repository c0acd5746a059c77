"""Compares roll-out and raw attention with the effect of replacing inputs.

Run: python -m experiments.rollout --workdir=runs/rollout --train

With --train it first trains configs/papers/rollout.py in that folder, unless it has
been. It prints the correlations, and writes rollout.csv and rollout.png; for that run
next to the correlations of Abnar and Zuidema (2020). It takes any run with tokens as
inputs and an answer at each position.
"""

import functools
import pathlib
import sys

from . import command_line, config_files, shared_flags

FLAGS = command_line.flag_values(
    {
        **shared_flags.WORKDIR,
        "train": (bool, False, "Train configs/papers/rollout.py there first."),
        "step": (int, None, "Step of a checkpoint; the newest by default."),
        "examples": (int, 256, "Number of held-out examples."),
        "flow_examples": (
            int,
            None,
            "Number of these for which flow is computed; default: 32, or all if fewer.",
        ),
        "out": (str, None, "Folder to write to; <workdir>/attention by default."),
        **shared_flags.PICTURES,
    }
)


def main() -> None:
    from mha_haiku.core import checks
    from mha_haiku.subjects.studies import workbench
    from mha_haiku.training.runs import loop

    from . import rollout_study

    formats = shared_flags.formats(FLAGS)
    with checks.user_mistakes():
        checks.positive_integer("--examples", FLAGS.examples)
        if FLAGS.flow_examples is not None:
            name = "--flow_examples, at most as many as --examples,"
            checks.integer_in(name, FLAGS.flow_examples, 1, FLAGS.examples)
    paper = config_files.load("configs/papers/rollout.py")
    if FLAGS.train:
        loop.train(paper, FLAGS.workdir)
    bench = workbench.Bench.load(FLAGS.workdir, FLAGS.step)
    config = bench.run.config
    is_paper = (config.task, config.model) == (paper.task, paper.model)
    study = rollout_study.measure(
        bench,
        examples=FLAGS.examples,
        flow_examples=FLAGS.flow_examples,
        published=rollout_study.PUBLISHED if is_paper else None,
    )
    folder = FLAGS.out or pathlib.Path(FLAGS.workdir, "attention")
    written = workbench.write(study, folder, formats)
    table = study.table().text()
    print(study.title, table, rollout_study.verdict(study), sep="\n\n")
    print("\nNumbers, and their curves:", *written, sep="\n  ")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
