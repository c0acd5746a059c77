"""Removes the heads that a trained run needs least, and measures loss and speed.

Run: python -m experiments.prune_heads --workdir=runs/sort --sweep
     python -m experiments.prune_heads --workdir=runs/sort --keep=0.5 --out=runs/small
     python -m experiments.prune_heads --workdir=runs/sort --metric_drop=0.01

--keep keeps that share of the heads, and --metric_drop the fewest heads whose held-out
accuracy (exact match, where answers are sequences) falls by at most that. The pruned
model is saved as a new run, which --steps trains further. --keep_units=0.5 prunes each
layer's hidden units too, before the heads. --sweep prints and draws the whole curve, or
with one of the two the curve to there.
"""

import functools
import pathlib
import sys

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        **shared_flags.RUN,
        "sweep": (bool, False, "Measure models of falling size, and save none."),
        "keep": (float, None, "Share of the heads to keep, in [0, 1]."),
        "metric_drop": (
            float,
            None,
            "How far the held-out accuracy or exact match may fall, or the drift rise.",
        ),
        "keep_units": (float, 1.0, "Share of each layer's hidden units to keep."),
        "order": (str, "ablation", "Order of removal: greedy, random, or a measure."),
        **shared_flags.ABLATION_VALUE,
        "examples": (int, 256, "Number of held-out examples that determine the order."),
        "baseline": (str, None, "Another order to draw in a sweep, too: random."),
        "steps": (int, 0, "Further training steps of the pruned model."),
        "out": (str, None, "Folder of the pruned run; <workdir>_pruned if left out."),
        **shared_flags.PICTURES,
    }
)


def main() -> None:
    from mha_haiku.subjects.studies import pruning
    from mha_haiku.subjects.studies.workbench import Bench

    formats = shared_flags.formats(FLAGS)
    asked = pruning.Request(*(FLAGS[x].value for x in pruning.Request._fields))
    out = pathlib.Path(FLAGS.out or FLAGS.workdir.rstrip("/") + "_pruned")
    if not FLAGS.sweep:
        pruning.check_free(out, steps=FLAGS.steps)  # before the work
    pruning.check(asked)
    result = pruning.prune(Bench.load(FLAGS.workdir, FLAGS.step), asked)
    print(pruning.text(result))
    if FLAGS.sweep:
        written = pruning.write(result, pathlib.Path(FLAGS.workdir, "heads"), formats)
        print("\nNumbers, and the curve:", *written, sep="\n  ")
        return
    print(f"\nPruned run: {pruning.save(result.run, out, steps=FLAGS.steps)}")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
