"""How much a run needs each of its heads, by several measures, on held-out examples.

N examples, B batch, L layers, H heads of a layer.
"""

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mha_haiku import checks, heads, models, tasks
from mha_haiku.runs import files, folders, progress
from mha_haiku.studies import workbench
from mha_haiku.training import losses

_BATCH_POSITIONS = 2**12  # of all examples in a batch

METRICS = ("loss", "accuracy")
CLOSINGS = ("zero", "mean", "resample")


def _confidence(of, closing):
    del closing
    return heads.statistic(of)


MEASURES: dict[str, Callable] = {
    "ablation": lambda of, closing: heads.ablation(of, closing=closing),
    "gradient": lambda of, closing: heads.gradient(of, closing=closing),
    "attribution": lambda of, closing: heads.attribution(of, closing=closing),
    "confidence": _confidence,
}


class HeadImportance(NamedTuple):
    """How much a run needs each of its heads.

    Attributes:
      title: Which task and step, and what is measured.
      head_names: For each layer the names of its heads.
      measures: By their names.
      rank_intervals: Bootstrap intervals of ranks, `[L, H, 2]`, by measure.
      agreement: `[M, M]`, Spearman's rank correlation of the measures.
    """

    title: str
    head_names: tuple[tuple[int, ...], ...]
    measures: dict[str, heads.Importance]
    rank_intervals: dict[str, np.ndarray]
    agreement: np.ndarray


def measure(
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    examples: int = 128,
    metric: str = "loss",
    closing: str = "mean",
    measures: Sequence[str] | None = None,
) -> HeadImportance:
    """Runs a trained model on held-out examples and measures its heads.

    On a terminal a bar on stderr shows the progress.

    Args:
      workdir: The run's folder.
      step: Which checkpoint; None means the newest.
      examples: N.
      metric: What ablation is the change of: "loss", or "accuracy" (then its fall). The
        measures by gradients are always of the loss.
      closing: What a closed head passes on: "zero", "mean" or "resample".
      measures: Names of `MEASURES`; None means all.

    Raises:
      ConfigError: If there is no such run or step, or a choice is none.
    """
    with checks.user_mistakes():
        checks.positive_integer("examples", examples)
        checks.choice("metric", metric, METRICS)
        checks.choice("closing", closing, CLOSINGS)
        wanted = list(MEASURES) if measures is None else list(measures)
        for name in wanted:
            checks.choice("measures", name, MEASURES)
    run = workbench.placed(looped(folders.load_run(workdir, step)))
    close = closing_of(run, closing, examples)
    found = {}
    for name in wanted:
        is_ablation = name == "ablation"
        of = subject(
            run, examples, metric=metric if is_ablation else "loss", shown_as=name
        )
        found[name] = MEASURES[name](of, close)
    means = [each for each in found.values()]
    agreement = [[heads.rank_correlation(a, b) for b in means] for a in means]
    plural = "" if examples == 1 else "s"
    return HeadImportance(
        f"{run.task.name}, step {run.step}: {examples} held-out example{plural}, "
        f"ablation of the {metric}, closed heads pass on {_PASSED[closing]}",
        tuple(layer.names for layer in models.heads_of_layers(run.config.model)),
        found,
        {name: heads.rank_intervals(each) for name, each in found.items()},
        np.array(agreement),
    )


_PASSED = {"zero": "zeros", "mean": "their mean", "resample": "another example's"}


def looped(run: folders.Run) -> folders.Run:
    """Returns the run with layers that are looped over, so that each can be reached."""
    if not run.config.model.scan_layers:
        return run
    config = run.config.copy_and_resolve_references()
    config.model.scan_layers = False
    model = folders.make_model(config, run.task)
    return run._replace(config=config, model=model, params=models.unstacked(run.params))


def subject(
    run: folders.Run, examples: int, *, metric: str = "loss", shown_as: str = ""
) -> heads.Subject:
    """Returns the run as what head measures look at.

    Args:
      run: The run.
      examples: How many held-out examples, rounded up to whole batches.
      metric: A name of `METRICS`.
      shown_as: What the bar shows the progress of; "" for none.
    """
    of_task = {"loss": loss_of_examples, "accuracy": _mistakes(run.task)}[metric]
    return heads.Subject(
        run.model, of_task, run.params, _Batches(run, examples, shown_as)
    )


def closing_of(run: folders.Run, name: str, examples: int) -> heads.Closing:
    """Returns what closed heads of a run pass on.

    Args:
      run: The run.
      name: A name of `CLOSINGS`.
      examples: How many held-out examples a mean is over.
    """
    if name == "mean":
        batches = _Batches(run, examples, "means of heads")
        return heads.closing.mean(run.model, run.params, batches)
    return getattr(heads.closing, name)


def loss_of_examples(logits, example: tasks.Example):
    """Returns the mean cross-entropy of each example's targets, `[B]` nats."""
    weights = example.weights
    each = jnp.where(weights > 0, losses.cross_entropy(logits, example.targets), 0)
    return _mean(each * weights, weights)


def _mistakes(task):
    def share_wrong(logits, example):
        wrong = jnp.where(task.correct(logits, example), 0.0, 1.0)
        return _mean(wrong * example.weights, example.weights)

    return share_wrong


def _mean(values, weights):
    axes = tuple(range(1, weights.ndim))
    return values.sum(axes) / jnp.maximum(weights.sum(axes), 1)


class _Batches:
    """Batches of held-out examples, which can be gone through again and again."""

    def __init__(self, run, examples: int, name: str):
        self._run, self._progress = run, name
        length = run.task.sequence_length
        size = max(1, min(examples, _BATCH_POSITIONS // length))
        self._size = workbench.whole_batch(run, size)
        self._count = -(-examples // self._size)

    def __iter__(self) -> Iterator[tasks.Example]:
        held_out = workbench.held_out(self._run)
        places = range(self._count)
        if self._progress:
            places = progress.over(places, name=self._progress, unit="batch")
        for i in places:
            yield held_out(range(i * self._size, (i + 1) * self._size))


def write(found: HeadImportance, folder: str | os.PathLike) -> Path:
    """Writes head_importance.csv: a line per head, with errors and ranks.

    Args:
      found: What to write.
      folder: Where to; made where it is missing.

    Returns:
      The path of the file.

    Raises:
      ConfigError: If it cannot be written.
    """
    ends = ("", "_standard_error", "_rank_low", "_rank_high")
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    names = [f"{name}{end}" for name in found.measures for end in ends]
    lines.writerow(["layer", "head", *names])
    for i, names in enumerate(found.head_names):
        for place, head in enumerate(names):
            numbers = []
            for name, each in found.measures.items():
                low, high = found.rank_intervals[name][i, place]
                mean, error = each.mean[i, place], each.standard_error[i, place]
                numbers += [f"{x:.9g}" for x in (mean, error, low, high)]
            lines.writerow([i, head, *numbers])
    return files.write(Path(folder) / "head_importance.csv", text.getvalue())


def table(found: HeadImportance) -> str:
    """Returns a line of text per head, and below how far the measures agree.

    Args:
      found: What to show.
    """
    heading = "layer head" + "".join(
        f"{name:>24}{'rank':>10}" for name in found.measures
    )
    lines = [heading]
    for i, names in enumerate(found.head_names):
        for place, head in enumerate(names):
            line = f"{i:>5} {head:>4}"
            for name, each in found.measures.items():
                low, high = found.rank_intervals[name][i, place]
                mean, error = each.mean[i, place], each.standard_error[i, place]
                line += (
                    f"{f'{mean:.4g} ± {error:.2g}':>24}{f'{low:.0f}-{high:.0f}':>10}"
                )
            lines.append(line)
    lines += ["", "Agreement (Spearman's rank correlation):"]
    for name, row in zip(found.measures, found.agreement, strict=True):
        lines.append(f"{name:>12}" + "".join(f"{x:>8.2f}" for x in row))
    return "\n".join(lines)
