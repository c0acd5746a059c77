"""Measures and draws how much a trained run needs each of its heads.

Run: python -m experiments.head_importance --workdir=runs/sort --metric=accuracy

The measures are ablation (what ablating a head costs), the gradient of its gate,
integrated gradients and its confidence, on held-out examples. It prints a line per head
and how far the measures agree, and writes head_importance.csv and head_importance.png.
"""

import functools
import pathlib
import sys

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        **shared_flags.RUN,
        "examples": (int, 128, "Number of held-out examples to average over."),
        "metric": (
            str,
            None,
            "Ablation measures the change of this: loss, accuracy, exact_match or "
            "drift; the run's own if left out.",
        ),
        **shared_flags.ABLATION_VALUE,
        "out": (str, None, "Folder to write to; <workdir>/heads if left out."),
        **shared_flags.PICTURES,
        **shared_flags.DISTRIBUTED,
    }
)


def main() -> None:
    from mha_haiku.subjects.studies import head_importance
    from mha_haiku.subjects.studies.workbench import Bench
    from mha_haiku.training.devices import cluster

    formats = shared_flags.formats(FLAGS)
    result = head_importance.measure(
        Bench.load(FLAGS.workdir, FLAGS.step),
        examples=FLAGS.examples,
        metric=FLAGS.metric,
        ablation_value=FLAGS.ablation_value,
    )
    if not cluster.leave():
        return
    folder = FLAGS.out or pathlib.Path(FLAGS.workdir, "heads")
    written = head_importance.write(result, folder, formats)
    print(result.title, result.text(), sep="\n\n")
    print("\nNumbers, and heads by layer:", *written, sep="\n  ")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
