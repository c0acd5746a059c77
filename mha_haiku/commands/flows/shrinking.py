"""`prune_heads` and `learn_gates`."""

import pathlib

from mha_haiku.commands.groups import Pictures, Run
from mha_haiku.commands.table import command, tell
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects.verbs import saving


@command
def prune_heads(
    *,
    run: Run,
    sweep: bool = False,
    keep: float | None = None,
    metric_drop: float | None = None,
    keep_units: float = 1.0,
    order: str = "ablation",
    ablation_value: str = "zero",
    examples: int = 256,
    baseline: str | None = None,
    steps: int = 0,
    out: str | None = None,
    pictures: Pictures,
) -> None:
    """Removes the heads that a trained run needs least, and measures loss and speed.

    Run: python -m mha_haiku prune_heads --workdir=runs/sort --sweep
         python -m mha_haiku prune_heads --workdir=runs/sort --keep=0.5 --out=runs/small
         python -m mha_haiku prune_heads --workdir=runs/sort --metric_drop=0.01

    --keep keeps that share of the heads, and --metric_drop the fewest heads whose
    held-out accuracy (exact match, where answers are sequences) falls by at most that.
    The pruned model is saved as a new run, which --steps trains further.
    --keep_units=0.5 prunes each layer's hidden units too, before the heads. --sweep
    prints and draws the whole curve, or with one of the two the curve to there.

    Args:
      sweep: Measure models of decreasing size without saving any.
      keep: Share of the heads to keep, in [0, 1].
      metric_drop: Tolerated fall of held-out accuracy or exact match, or rise of the
        drift.
      keep_units: Share of each layer's hidden units to keep.
      order: Order of removal: greedy, random, or a measure.
      ablation_value: Output of ablated heads: zero, mean, resample.
      examples: Number of held-out examples that determine the order.
      baseline: Another order to compare with in a sweep: random.
      steps: Further training steps of the pruned model.
      out: Folder of the pruned run; <workdir>_pruned by default.
    """
    if not (sweep or keep is not None or metric_drop is not None):
        raise ConfigError("Give --sweep, or one of --keep and --metric_drop.")
    folder = pathlib.Path(out or run.workdir.rstrip("/") + "_pruned")
    if not sweep:
        saving.check_free(folder, steps=steps)  # before the work
    result = run.subject().sweep(
        keep=keep,
        metric_drop=metric_drop,
        keep_units=keep_units,
        order=order,
        ablation_value=ablation_value,
        examples=examples,
        baseline=baseline,
        **({} if sweep else {"sizes": 1}),
    )
    if sweep:
        tell(result, pathlib.Path(run.workdir, "heads"), pictures.format)
    else:
        print(result.text())
        saved = saving.save_run(result.smallest, folder, steps=steps)
        print(f"\nPruned run: {saved}")


@command
def learn_gates(
    *,
    run: Run,
    penalty: float = 0.01,
    steps: int = 500,
    tuning_steps: int = 500,
    scratch: bool = True,
    out: str | None = None,
) -> None:
    """Removes heads of a trained run by learned gates; compares with a new training.

    Run: python -m mha_haiku learn_gates --workdir=runs/induction_two_layers

    The run should have converged. Hard-concrete gates are trained together with the
    model, with a penalty per open gate. Heads whose gates are shut are pruned, and the
    rest is tuned. Then the same architecture is trained from scratch for as many steps.
    All three are saved as new runs: gated, pruned and scratch. The same command resumes
    where one was interrupted.

    Args:
      penalty: Penalty per open gate, in nats.
      steps: Training steps with gates.
      tuning_steps: Training steps of the pruned model.
      scratch: Whether to train the same model from scratch too.
      out: Folder of the new runs; <workdir>_gates by default.
    """
    folder = pathlib.Path(out or run.workdir.rstrip("/") + "_gates")
    result = run.subject().learn_gates(
        folder,
        penalty=penalty,
        steps=steps,
        tuning_steps=tuning_steps,
        scratch=scratch,
    )
    print(result.text())
    print(f"\nRuns: {folder}")
