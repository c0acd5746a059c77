"""Commands that do more than answer one question about a run."""

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from mha_haiku.commands.groups import Cache, Config, Pictures, Processes, Run
from mha_haiku.commands.signatures import options_of
from mha_haiku.commands.table import command, place, tell
from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects import dossiers, entry_points, imported_runs, observers
from mha_haiku.subjects.subject import Subject, check_task
from mha_haiku.subjects.verbs import VERBS, dumps, saved_models
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import files, progress


@command
def train(
    *,
    config: Config,
    override_config: bool = False,
    pictures: Pictures,
    cache: Cache,
    processes: Processes,
) -> int:
    """Trains a model and writes its attention maps.

    Run: python -m mha_haiku train --config=configs/reverse.py
         python -m mha_haiku train --workdir=runs/gpt --config.data.path=book.txt

    The same command on a folder with a run resumes that run. The second command trains
    an imported or pruned run further, with --config.optimizer.learning_rate and others;
    --config.optimizer.frozen=embedding,encoder/layer_0 freezes some parameters.

    Args:
      override_config: Resume a run even though its config was different.
    """
    resolved, workdir = config.value, config.folder
    summary = entry_points.train_observed(
        resolved, workdir, override_config=override_config
    )
    if summary.interrupted:  # no maps then, which take a while
        if cluster.leave():  # only the first process prints
            print("Interrupted; the same command resumes from here.", file=sys.stderr)
            dump = dossiers.command("dump_attention", workdir)
            print(f"Its maps so far: {dump}", file=sys.stderr)
        return 130
    maps = dumps.dump(Subject.of_folder(workdir))
    if not cluster.leave():
        return 0
    progress.say("drawing")
    dumps.write_report(maps.parent, pictures.format)
    for picture in observers.draw(workdir, pictures.format):
        print(f"Picture:        {picture}")
    print(f"Summary:        {workdir / 'summary.json'}")
    print(f"Attention maps: {maps.parent / 'index.html'}")
    return 0


@command
def import_model(
    *, source: str, workdir: str, sequence_length: int | None = None, path: str = ""
) -> None:
    """Makes a run of a pretrained model, for all other commands.

    Run: python -m mha_haiku import_model --source=models/distilgpt2 --workdir=runs/gpt

    The source is a folder in the layout of Hugging Face (config.json,
    model.safetensors, tokenizer.json), a .gguf file, package:NAME of an installed
    package that ships a model, or a name on the hub, owner/name. Families: BERT,
    GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma.

    Causal and masked language models are measured by their loss, and can be trained on.
    Models without words to predict, as encoders of sentences, are measured by their
    drift: one minus the cosine of a sentence's vector with the whole model's vector.

    Args:
      source: Folder, .gguf file, package:NAME or name on the hub.
      workdir: Folder of the new run.
      sequence_length: Tokens in an example of the measurements; default: 128, 64 for
        sentences.
      path: UTF-8 file, or folder of files, with the text of the examples; default:
        Python's documentation.
    """
    progress.say("importing")
    made = imported_runs.write(
        source, workdir, sequence_length=sequence_length, path=path
    )
    most = imported_runs.most_positions(made.config)
    print(f"{made}\n{made.task.sequence_length} of at most {most} positions")
    print(f"Run: {workdir}")


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
    sources = {"--text": text, "--text_file": text_file, "--tokens": tokens}
    sources |= {"--examples": examples, "--indices": indices}
    flags = [flag for flag, value in sources.items() if value is not None]
    if len(flags) > 1:
        raise ConfigError(f"Give {' or '.join(flags)}, not both.")
    if text_file is not None:
        text = checks.text_of(text_file, f"--text_file={text_file}")
    elif text is not None and os.path.isfile(os.path.expanduser(text)):
        raise ConfigError(f"--text={text} is a file. Did you mean --text_file={text}?")
    if out is not None:
        place(out, run.workdir, "attention")  # before the work
    maps = dumps.dump(
        run.subject(),
        layers=layers,
        heads=heads,
        examples=examples if indices is None else indices,
        own=tokens if text is None else text,
        out=out,
        weights=weights,
    )
    if cluster.leave():
        dumps.write_report(maps.parent, pictures.format)
        print(f"Attention maps: {maps.parent / 'index.html'}")


@command
@options_of(functools.partial(VERBS["sweep"].function, None))
def prune_heads(
    *,
    run: Run,
    sweep: bool = False,
    sizes: int | None = None,
    steps: int = 0,
    out: str | None = None,
    pictures: Pictures,
    **options: Any,
) -> None:
    """Removes the heads that a trained run needs least, and measures loss and speed.

    Run: python -m mha_haiku prune_heads --workdir=runs/sort --sweep
         python -m mha_haiku prune_heads --workdir=runs/sort --keep=0.5 --out=runs/small
         python -m mha_haiku prune_heads --workdir=runs/sort --metric_drop=0.01

    --keep keeps that share of the heads; --metric_drop keeps as few heads as possible
    without a larger fall of the held-out accuracy (exact match, where answers are
    sequences). The pruned model is saved as a new run, which --steps trains further.
    --sweep prints and draws the whole curve, or the curve up to --keep or
    --metric_drop.

    Args:
      sweep: Measure models of decreasing size without saving any.
      sizes: Number of models of a sweep, at most, next to the whole one; default: 12.
      steps: Further training steps of the pruned model.
      out: Folder of the pruned run; <workdir>_pruned by default.
    """
    if not (sweep or options["keep"] is not None or options["metric_drop"] is not None):
        raise ConfigError("Give --sweep, or one of --keep and --metric_drop.")
    if sizes is not None and not sweep:
        raise ConfigError("--sizes needs --sweep; without it one model is pruned.")
    if sweep and (steps or out is not None):
        name = "--steps" if steps else "--out"
        raise ConfigError(f"{name} does not fit --sweep, which saves no pruned model.")
    folder = checks.as_path(out or files.beside(run.workdir, "_pruned"))
    if sweep:
        folder = place(None, run.workdir, "heads")
    else:
        saved_models.check_free(folder, steps=steps)  # before the work
        sizes = 1
    if sizes is not None:
        options["sizes"] = sizes
    result = run.subject().sweep(**options)
    if sweep:
        tell(result, folder, pictures.format)
    else:
        print(result.text())
        smallest = check_task(result.smallest, "prune")
        saved = saved_models.save_run(smallest, folder, steps=steps)
        print(f"\nPruned run: {saved}")


@command
@options_of(functools.partial(VERBS["learn_gates"].function, None))
def learn_gates(*, run: Run, **options: Any) -> None:
    """Removes heads of a trained run by learned gates; compares with a new training.

    Run: python -m mha_haiku learn_gates --workdir=runs/induction_two_layers

    The run should have converged. Hard-concrete gates are trained together with the
    model, with a penalty per open gate. Heads whose gates are shut are pruned, and the
    rest is tuned. Then the same architecture is trained from scratch for as many steps.
    All three are saved as new runs: gated, pruned and scratch. The same command resumes
    after an interruption.
    """
    result = run.subject().learn_gates(**options)
    print(result.text())
    if folder := result.smallest.folder:
        print(f"\nRuns: {folder.root.parent}")
