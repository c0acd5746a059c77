"""Writes the attention maps of a run that has been trained, as arrays and pictures.

Run: python -m experiments.dump_attention --workdir=runs/reverse --layers=0 --heads=0

Long inputs get pooled maps, unless --weights asks for all. What each head does, in
numbers over the same examples, is in statistics.npz.
"""

import functools
import sys

from experiments import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        "workdir": (str, None, "Folder of the run."),
        "step": (int, None, "Step of a checkpoint; the newest if left out."),
        "layers": (list, None, "Layers, as 0,2; all if left out."),
        "heads": (list, None, "Heads of each layer, as 0,2; all if left out."),
        "examples": (list, None, "Held-out examples, as 0,2; the first if left out."),
        "text": (str, None, "Text to show in place of samples."),
        "tokens": (list, None, "Token ids to show in place of samples, as 4,1,2."),
        "out": (str, None, "Folder to write; <workdir>/attention if left out."),
        "weights": (bool, False, "Write whole maps also of long inputs."),
        **shared_flags.DISTRIBUTED,
    }
)


def main() -> None:
    command_line.require("workdir", FLAGS.workdir, "It is the folder of a trained run.")
    from mha_haiku import report
    from mha_haiku.devices import cluster
    from mha_haiku.studies import attention_dump

    maps = attention_dump.dump(
        FLAGS.workdir,
        step=FLAGS.step,
        layers=FLAGS.layers,
        heads=FLAGS.heads,
        examples=FLAGS.examples,
        text=FLAGS.text,
        tokens=FLAGS.tokens,
        out=FLAGS.out,
        weights=FLAGS.weights,
    )
    if not cluster.leave():
        return
    report.write(maps.parent)
    print(f"Attention maps: {maps.parent / 'index.html'}")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
