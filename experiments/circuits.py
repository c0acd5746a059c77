"""Finds the edges that carry a run's answers, and says how faithful they are.

Run: python -m experiments.circuits --workdir=runs/induction_two_layers --edges=20
     python -m experiments.circuits --workdir=runs/smollm2 --edges=200
         --text="The capital of France is" --corrupted="The capital of Italy is"

An edge goes from the embedding, a head or a feed-forward part to the queries, keys or
values of a head, to a feed-forward part or to the logits. Without texts the pairs are
held-out examples, each with the next one. It prints a line per edge, and what remains
of the metric with these edges alone and without them, and writes circuit.csv and
circuit.png.
"""

import functools
import pathlib
import sys

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        **shared_flags.RUN,
        "edges": (int, 50, "The most edges of the circuit."),
        "measure": (
            str,
            "integrated_edge_attribution",
            "What edges are ranked by: a name of mh.heads.EDGE_MEASURES.",
        ),
        "examples": (int, 32, "Number of held-out examples to average over."),
        "metric": (str, None, "loss or drift; the run's own if left out."),
        "text": (str, None, "A clean text, in place of held-out examples."),
        "corrupted": (str, None, "The text of as many tokens that it is paired with."),
        "out": (str, None, "Folder to write to; <workdir>/heads if left out."),
        **shared_flags.PICTURES,
    }
)


def main() -> None:
    from mha_haiku.core import checks
    from mha_haiku.subjects.studies import circuits
    from mha_haiku.subjects.studies.workbench import Bench
    from mha_haiku.subjects.subject import Subject

    formats = shared_flags.formats(FLAGS)
    if (FLAGS.text is None) != (FLAGS.corrupted is None):
        raise checks.ConfigError("--text and --corrupted must be given together.")
    bench = Bench.load(FLAGS.workdir, FLAGS.step)
    how = {"edges": FLAGS.edges, "measure": FLAGS.measure}
    if FLAGS.text is None:
        result = circuits.measure(
            bench, examples=FLAGS.examples, metric=FLAGS.metric, **how
        )
    else:
        with checks.user_mistakes():
            subject = Subject.of_run(bench.run, bench.title)
            found = subject.circuit(FLAGS.text, FLAGS.corrupted, **how)
        title = f"{bench.title}, {FLAGS.text!r} and {FLAGS.corrupted!r}"
        result = circuits.StudiedCircuit(title, found)
    folder = FLAGS.out or pathlib.Path(FLAGS.workdir, "heads")
    written = circuits.write(result, folder, formats)
    print(result.title, result.text(), sep="\n\n")
    print("\nEdges, and the graph:", *written, sep="\n  ")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
