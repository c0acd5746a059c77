"""Removes heads of a trained run by learned gates; compares with training from scratch.

Run: python -m experiments.learn_gates --workdir=runs/induction_two_layers --penalty=0.1

The run should have converged. Hard-concrete gates are trained together with the model,
with a penalty per open gate. Heads whose gates are shut are pruned, and the rest is
tuned. Then the same architecture is trained from scratch for as many steps. Both are
saved as new runs.
"""

import functools
import pathlib
import sys

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        **shared_flags.WORKDIR,
        "penalty": (float, 0.01, "Penalty per open gate, in nats."),
        "steps": (int, 500, "Training steps with gates."),
        "tuning_steps": (int, 500, "Training steps of the pruned model."),
        "scratch": (bool, True, "Whether to train the same model from scratch too."),
        "out": (str, None, "Folder of the new runs; <workdir>_gates by default."),
    }
)


def main() -> None:
    from mha_haiku.subjects.studies import gate_learning
    from mha_haiku.subjects.studies.workbench import Bench

    out = pathlib.Path(FLAGS.out or FLAGS.workdir.rstrip("/") + "_gates")
    result = gate_learning.learn(
        Bench.load(FLAGS.workdir),
        out,
        penalty=FLAGS.penalty,
        steps=FLAGS.steps,
        tuning_steps=FLAGS.tuning_steps,
        from_scratch=FLAGS.scratch,
    )
    print(result.text())
    print(f"\nRuns: {out}")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
