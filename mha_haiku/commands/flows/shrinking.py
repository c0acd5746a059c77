"""`prune_heads` and `learn_gates`."""

import functools
import pathlib
from typing import Any

from mha_haiku.commands.groups import Pictures, Run
from mha_haiku.commands.signatures import options_of
from mha_haiku.commands.table import command, tell
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects.verbs import VERBS, saving


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
    --keep_units=0.5 prunes each layer's hidden units too, before the heads. --sweep
    prints and draws the whole curve, or the curve up to --keep or --metric_drop.

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
    folder = pathlib.Path(out or run.workdir.rstrip("/") + "_pruned")
    if not sweep:
        saving.check_free(folder, steps=steps)  # before the work
        sizes = 1
    if sizes is not None:
        options["sizes"] = sizes
    result = run.subject().sweep(**options)
    if sweep:
        tell(result, pathlib.Path(run.workdir, "heads"), pictures.format)
    else:
        print(result.text())
        saved = saving.save_run(result.smallest, folder, steps=steps)
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
    print(f"\nRuns: {result.smallest.folder.root.parent}")
