"""What each head of a run does, in numbers: means over held-out examples.

Dimensions: N examples, L layers, H heads, T positions.
"""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, checks, models, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.runs import files, folders, progress
from mha_haiku.studies import workbench

_BATCH_POSITIONS = 2**13  # of all examples in a batch
# What is one number per head is a mean of what heads do; these are not.
_NO_MEANS = ("received", "num_queries", "pooled")


class HeadStatistics(NamedTuple):
    """What the heads of a run do.

    Attributes:
      title: Which task and step.
      layers: The L layers.
      num_examples: How many held-out examples the means are over.
      means: By the names of `attention.Statistics`, `[L, H]` float64. Columns are heads
        by the names that they had before any were pruned, NaN where a layer lacks one.
        Without `same_token` and `induction` where inputs are no tokens.
      standard_errors: The standard errors of `means`; NaN for one example.
    """

    title: str
    layers: tuple[int, ...]
    num_examples: int
    means: dict[str, np.ndarray]
    standard_errors: dict[str, np.ndarray]


def measure(
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    examples: int = 64,
    layers: Sequence[int] | None = None,
) -> HeadStatistics:
    """Runs a trained model on held-out examples and returns what its heads do.

    No map is held, so inputs may have any length. Padding does not count, and every
    example counts the same. On a terminal a bar on stderr shows the progress.

    Args:
      workdir: The run's folder.
      step: Which checkpoint; None means the newest.
      examples: N.
      layers: Which layers; None means all.

    Raises:
      ConfigError: If there is no such run, step or layer, or `examples` is below 1.
    """
    with checks.user_mistakes():
        checks.positive_integer("examples", examples)
    run = workbench.placed(folders.load_run(workdir, step))
    layers = chosen("layers", layers, run.config.model.num_layers)

    def observe(params, example):
        output = run.model.apply(
            params, None, example.inputs, lengths=example.lengths, is_training=False
        )
        tokens = tokens_of(run.task, example)
        return [per_head(output.maps[i].statistics(tokens=tokens)) for i in layers]

    observe = workbench.program(run, observe)
    batch_size = max(1, min(examples, _BATCH_POSITIONS // run.task.sequence_length))
    batch_size = workbench.whole_batch(run, batch_size)
    held_out = workbench.held_out(run)
    batches = []
    with progress.Bar(
        examples, unit="example", name="head statistics", doing="compiling"
    ) as bar:
        for start in range(0, examples, batch_size):
            example = held_out(range(start, start + batch_size))
            batches.append(jax.device_get(observe(run.params, example)))
            bar.advance(min(batch_size, examples - start))
    # The last batch is as large as the others, for one program serves them all.
    of_layers = jax.tree.map(lambda *x: np.concatenate(x)[:examples], *batches)
    names = models.heads_of_layers(run.config.model)
    columns = [names[i].names for i in layers]
    means, standard_errors = summary(of_layers, columns)
    if np.isnan(means["entropy"]).all():
        raise ConfigError(f"In {examples} held-out examples no head sees anything.")
    title = f"{run.task.name}, step {run.step}"
    return HeadStatistics(title, tuple(layers), examples, means, standard_errors)


def tokens_of(task: tasks.Task, example: tasks.Example) -> jax.Array | None:
    """Returns the tokens `[N, T]` of a batch, or None where inputs are features."""
    return None if task.num_tokens is None else example.inputs


def per_head(found: attention.Statistics) -> dict[str, jax.Array]:
    """Returns the numbers that are one per head, `[N, H]`, by their names.

    They are NaN for an example in which no query sees anything.
    """
    numbers = {
        name: values
        for name, values in found._asdict().items()
        if values is not None and name not in _NO_MEANS
    }
    is_empty = found.num_queries == 0
    return jax.tree.map(lambda x: jnp.where(is_empty, np.nan, x), numbers)


def summary(
    of_layers: Sequence[dict[str, np.ndarray]],
    columns: Sequence[Sequence[int]] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns means and standard errors over examples, `[L, H]` by name.

    Args:
      of_layers: For each layer what `per_head` gives, `[N, H]`, where H may differ.
      columns: For each layer where its heads stand in the result, as where they were
        before others were pruned; None: from 0 on.
    """
    if columns is None:
        columns = [range(layer["entropy"].shape[1]) for layer in of_layers]
    num_heads = 1 + max(max(places, default=0) for places in columns)

    def of_all(function, name):
        rows = np.full((len(of_layers), num_heads), np.nan)
        for row, layer, places in zip(rows, of_layers, columns, strict=True):
            values = np.asarray(layer[name], np.float64).T
            row[list(places)] = [function(x[~np.isnan(x)]) for x in values]
        return rows

    names = [name for name in attention.Statistics._fields if name in of_layers[0]]
    means = {name: of_all(_mean, name) for name in names}
    return means, {name: of_all(_standard_error, name) for name in names}


def chosen(name: str, wanted: Sequence[int] | None, count: int) -> list[int]:
    """Returns the wanted ones of `count` layers or heads; None means all.

    Raises:
      ConfigError: If one of them does not exist, or none is wanted.
    """
    if wanted is None:
        return list(range(count))
    if not wanted:
        raise ConfigError(f"{name} must not be empty.")
    with checks.user_mistakes():
        return [checks.integer_in(name, index, 0, count - 1) for index in wanted]


def write(found: HeadStatistics, folder: str | os.PathLike) -> Path:
    """Writes head_statistics.csv: a line per head, each statistic with its error.

    Args:
      found: What to write.
      folder: Where to; made where it is missing.

    Returns:
      The path of the file. Its columns are `layer`, `head`, then of each statistic its
      mean and `<name>_standard_error`, empty where that is not known.

    Raises:
      ConfigError: If it cannot be written.
    """
    names = [f"{name}{end}" for name in found.means for end in ("", "_standard_error")]
    lines = [["layer", "head", *names]]
    for i, head in np.argwhere(~np.isnan(found.means["entropy"])).tolist():
        numbers = [
            x[name][i, head]
            for name in found.means
            for x in (found.means, found.standard_errors)
        ]
        shown = ["" if np.isnan(x) else f"{x:.9g}" for x in numbers]
        lines.append([found.layers[i], head, *shown])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return files.write(Path(folder) / "head_statistics.csv", text.getvalue())


def _mean(values) -> float:
    return values.mean() if values.size else np.nan


def _standard_error(values) -> float:
    """Returns that of the mean of independent values, from their own spread."""
    if values.size < 2:
        return np.nan
    return values.std(ddof=1) / np.sqrt(values.size)
