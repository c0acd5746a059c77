"""Prints and draws what each head of a trained run does, over held-out examples.

Run: python -m experiments.head_statistics --workdir=runs/reverse --examples=256

It prints a line per head, and writes head_statistics.csv, with all statistics and their
standard errors, and head_statistics.png, heads by layer.
"""

import functools
import pathlib
import sys

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        **shared_flags.RUN,
        "examples": (int, 64, "Number of held-out examples to average over."),
        **shared_flags.LAYERS,
        "out": (str, None, "Folder to write to; <workdir>/attention if left out."),
        **shared_flags.PICTURES,
        **shared_flags.DISTRIBUTED,
    }
)


def main() -> None:
    from mha_haiku.subjects.studies import head_statistics
    from mha_haiku.subjects.studies.workbench import Bench
    from mha_haiku.training.devices import cluster

    formats = shared_flags.formats(FLAGS)
    result = head_statistics.measure(
        Bench.load(FLAGS.workdir, FLAGS.step),
        examples=FLAGS.examples,
        layers=FLAGS.layers,
    )
    if not cluster.leave():
        return
    folder = FLAGS.out or pathlib.Path(FLAGS.workdir, "attention")
    written = head_statistics.write(result, folder, formats)
    print(result.title, result.text(), sep="\n\n")
    print(
        "\nAll statistics with standard errors, and heads by layer:",
        *written,
        sep="\n  ",
    )


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
