"""`dump_attention`."""

import os
from collections.abc import Sequence

from mha_haiku.commands.groups import Pictures, Processes, Run
from mha_haiku.commands.table import command
from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects.verbs import dumping
from mha_haiku.training.devices import cluster


@command
def dump_attention(
    *,
    run: Run,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    examples: int | None = None,
    indices: Sequence[int] | None = None,
    text: str | None = None,
    text_file: str | None = None,
    tokens: Sequence[int] | None = None,
    out: str | None = None,
    weights: bool = False,
    pictures: Pictures,
    processes: Processes,
) -> None:
    """Writes the attention maps of a trained run, as arrays and pictures.

    Run: python -m mha_haiku dump_attention --workdir=runs/reverse --layers=0 --heads=0

    Maps of long inputs are pooled, unless --weights is set. They are written to
    maps.npz with statistics of each head over the same examples, for
    mha_haiku.MapSet.load. Maps of your own --text, --text_file or --tokens go into a
    folder next to the maps of held-out examples.

    Args:
      layers: Layers, as 0,2 or, of an encoder-decoder, cross.0,decoder; default: all.
      heads: Heads of each layer, as 0,2; all if left out.
      examples: Number of held-out examples; default: the config's.
      indices: Indices of held-out examples instead, as 0,2.
      text: Text to show instead of held-out examples.
      text_file: File with the text to show.
      tokens: Token ids to show instead of examples, as 4,1,2.
      out: Folder to write to; <workdir>/attention, or own_text there.
      weights: Write whole maps of long inputs too.
    """
    if examples is not None and indices is not None:
        raise ConfigError("Give --examples or --indices, not both.")
    sources = {"--text": text, "--text_file": text_file, "--tokens": tokens}
    flags = [flag for flag, value in sources.items() if value is not None]
    if len(flags) > 1:
        raise ConfigError(f"Give {' or '.join(flags)}, not both.")
    if text_file is not None:
        text = checks.text_of(text_file, f"--text_file={text_file}")
    elif text is not None and os.path.isfile(os.path.expanduser(text)):
        raise ConfigError(f"--text={text} is a file. Did you mean --text_file={text}?")
    maps = dumping.dump(
        run.subject(),
        layers=layers,
        heads=heads,
        examples=examples if indices is None else indices,
        own=tokens if text is None else text,
        out=out,
        weights=weights,
    )
    if cluster.leave():
        dumping.write_report(maps.parent, pictures.format)
        print(f"Attention maps: {maps.parent / 'index.html'}")
