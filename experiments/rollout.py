"""Compares roll-out and raw attention with what blanking inputs out changes.

Run: python -m experiments.rollout --workdir=runs/rollout --train

With --train it first trains configs/papers/rollout.py there, unless that is done. It
prints the correlations beside those of Abnar and Zuidema (2020), and writes rollout.csv
and rollout.png. Any run with tokens and an answer at positions will do.
"""

import functools
import pathlib
import sys

from experiments import command_line, config_files

FLAGS = command_line.flag_values(
    {
        "workdir": (str, None, "Folder of the run."),
        "train": (bool, False, "Train configs/papers/rollout.py there first."),
        "step": (int, None, "Step of a checkpoint; the newest if left out."),
        "examples": (int, 256, "How many held-out examples are looked at."),
        "flow_examples": (int, 32, "For how many of them flow is computed."),
        "out": (str, None, "Folder to write; <workdir>/attention if left out."),
    }
)


def main() -> None:
    command_line.require("workdir", FLAGS.workdir, "It is the folder of a trained run.")
    from mha_haiku.report import rollout as report
    from mha_haiku.runs import loop
    from mha_haiku.studies import rollouts

    if FLAGS.train:
        loop.train(config_files.load("configs/papers/rollout.py"), FLAGS.workdir)
    study = rollouts.measure(
        FLAGS.workdir,
        step=FLAGS.step,
        examples=FLAGS.examples,
        flow_examples=FLAGS.flow_examples,
    )
    folder = FLAGS.out or pathlib.Path(FLAGS.workdir, "attention")
    numbers = rollouts.write(study, folder)
    changes, drops = map(rollouts.summary, (study.changes, study.drops))
    published = rollouts.PUBLISHED
    title = f"{study.title}: means over {study.num_examples} held-out examples"
    picture = report.write(numbers.parent, changes, published, title=title)
    print(title, report.table(changes, drops, published), sep="\n\n")
    print(f"\n{rollouts.verdict(study)}\n\nAll numbers: {numbers}")
    if picture is not None:
        print(f"Picture:     {picture}")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
