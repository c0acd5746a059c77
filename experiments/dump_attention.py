"""Writes the attention maps of a trained run, as arrays and pictures.

Run: python -m experiments.dump_attention --workdir=runs/reverse --layers=0 --heads=0

Maps of long inputs are pooled, unless --weights is given. They are written to maps.npz
with statistics of each head over the same examples, which
mha_haiku.MapSet.load reads. Maps of your own --text, --text_file or
--tokens go into a folder next to the maps of held-out examples.
"""

import functools
import os
import sys

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        **shared_flags.RUN,
        **shared_flags.LAYERS,
        "heads": (list, None, "Heads of each layer, as 0,2; all if left out."),
        "examples": (int, None, "Number of held-out examples; default: the config's."),
        "indices": (list, None, "Indices of held-out examples instead, as 0,2."),
        "text": (str, None, "Text to show instead of held-out examples."),
        "text_file": (str, None, "File with the text to show."),
        "tokens": (list, None, "Token ids to show instead of examples, as 4,1,2."),
        "out": (
            str,
            None,
            "Folder to write to; <workdir>/attention, or own_text there.",
        ),
        "channels": (bool, False, "Write queries and keys of whole maps too."),
        "weights": (bool, False, "Write whole maps of long inputs too."),
        **shared_flags.PICTURES,
        **shared_flags.DISTRIBUTED,
    }
)


def main() -> None:
    from mha_haiku.core.checks import ConfigError
    from mha_haiku.subjects.studies import attention_dump
    from mha_haiku.subjects.studies.workbench import Bench
    from mha_haiku.training.devices import cluster

    formats = shared_flags.formats(FLAGS)
    if FLAGS.examples is not None and FLAGS.indices is not None:
        raise ConfigError("Give --examples or --indices, not both.")
    own = _own()
    maps = attention_dump.dump(
        Bench.load(FLAGS.workdir, FLAGS.step),
        layers=FLAGS.layers,
        heads=FLAGS.heads,
        examples=FLAGS.examples if FLAGS.indices is None else FLAGS.indices,
        own=own,
        out=FLAGS.out,
        weights=FLAGS.weights,
        channels=FLAGS.channels,
    )
    if not cluster.leave():
        return
    attention_dump.write_report(maps.parent, formats)
    print(f"Attention maps: {maps.parent / 'index.html'}")


def _own() -> str | list[int] | None:
    """Returns the text of --text or --text_file, or --tokens."""
    from mha_haiku.core import checks

    names = ("text", "text_file", "tokens")
    given = [f"--{name}" for name in names if getattr(FLAGS, name) is not None]
    if len(given) > 1:
        raise checks.ConfigError(f"Give {' or '.join(given)}, not both.")
    if FLAGS.text_file is not None:
        return checks.text_of(FLAGS.text_file, f"--text_file={FLAGS.text_file}")
    if FLAGS.text is not None and _is_file(FLAGS.text):
        raise checks.ConfigError(
            f"--text={FLAGS.text} is a file. Did you mean --text_file={FLAGS.text}?"
        )
    return FLAGS.tokens if FLAGS.text is None else FLAGS.text


def _is_file(text: str) -> bool:
    return os.path.isfile(os.path.expanduser(text))


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
