"""Whether attention tells which inputs matter: roll-outs against blanking inputs out.

Dimensions: N examples, T positions, L layers. An example asks for the answer at one
position. How much an input matters to it is how much the probability of the right
answer changes with another token in the input's place. A measure is good as far as it
ranks the inputs of an example as these changes do.

Source: Abnar and Zuidema 2020, section 2, https://arxiv.org/abs/2005.00928.
"""

import csv
import functools
import io
import os
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from mha_haiku import checks
from mha_haiku.checks import ConfigError
from mha_haiku.heads.flow import flow
from mha_haiku.runs import files, folders, progress
from mha_haiku.studies import blank_out
from mha_haiku.training import evaluation

# Of a transformer of 6 layers that predicts the number of verbs (table 1).
PUBLISHED = {
    "raw": (0.69, 0.10, -0.11, -0.09, 0.20, 0.29),
    "roll-out": (0.32, 0.38, 0.51, 0.62, 0.70, 0.71),
    "flow": (0.32, 0.44, 0.70, 0.70, 0.71, 0.70),
}
_BATCH_POSITIONS = 2**16  # of all blanked inputs of the examples in a batch


class Study(NamedTuple):
    """How well measures rank the inputs, Spearman's rank correlations.

    Attributes:
      title: Which task and step.
      changes: `[N, L]` float64 by the measure's name: with the sizes of the changes,
        for the measure up to each layer. NaN where all inputs are alike. Flow is of
        fewer examples.
      drops: The same, with how much the probability of the right answer falls: an input
        that misleads counts for less than one that does nothing.
    """

    title: str
    changes: dict[str, np.ndarray]
    drops: dict[str, np.ndarray]

    @property
    def num_examples(self) -> int:
        """N."""
        return len(self.changes["raw"])


def measure(
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    examples: int = 256,
    flow_examples: int = 32,
    draws: int = 8,
) -> Study:
    """Runs a trained model on held-out examples, whole and with inputs blanked out.

    Where the task has a mask token it stands in for blanked inputs, and questions are
    those of masked positions; elsewhere, random other tokens do, in turn. Inputs that
    are masked already, in padding or, in causal models, after the question are left out
    of the ranks. On a terminal a bar on stderr shows the progress.

    Args:
      workdir: The run's folder.
      step: Which checkpoint; None means the newest.
      examples: How many are looked at; N of them ask for something.
      flow_examples: For how many of these flow is computed, which is slow.
      draws: How many random tokens the mean change is over.

    Raises:
      ConfigError: If there is no such run or step, or it does not answer at positions
        of tokens, or its layers are scanned.
    """
    with checks.user_mistakes():
        checks.positive_integer("examples", examples)
        checks.integer_in("flow_examples", flow_examples, 1, examples)
        checks.positive_integer("draws", draws)
    run = folders.load_run(workdir, step)
    _check(run)
    look = jax.jit(functools.partial(blank_out.look, run, draws))
    batch_size = _BATCH_POSITIONS // run.task.sequence_length**2
    batch_size = max(1, min(examples, batch_size))
    data = jax.device_put(run.task.held_out_data)
    batches = []
    with progress.Bar(
        examples + flow_examples, unit="example", name="roll-out", doing="compiling"
    ) as bar:
        for start in range(0, examples, batch_size):
            indices = np.arange(start, start + batch_size, dtype=np.int32)
            batches.append(jax.device_get(look(run.params, data, indices)))
            bar.advance(min(batch_size, examples - start))
        found = jax.tree.map(lambda *x: np.concatenate(x)[:examples], *batches)
        found["measures"]["flow"] = _flows(run, data, found["row"][:flow_examples], bar)
    asks = np.flatnonzero(found["asks"])
    if not len(asks):
        raise ConfigError(f"In {examples} held-out examples nothing is asked for.")
    changes, drops = {}, {}
    for name in (*PUBLISHED, "value-weighted", "gradient-weighted"):
        scores = found["measures"][name]
        of = asks[asks < len(scores)]
        counted, drop = found["counted"], found["drop"]
        changes[name], drops[name] = (
            np.array([_correlations(scores[n], to[n], counted[n]) for n in of])
            for to in (np.abs(drop), drop)
        )
    return Study(f"{run.task.name}, step {run.step}", changes, drops)


def summary(correlations: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns means over examples and their standard errors, `[L, 2]` by name."""
    return {name: np.stack(_mean(x), axis=-1) for name, x in correlations.items()}


def verdict(study: Study) -> str:
    """Returns a sentence: does roll-out rank inputs better than raw attention?

    Of the last layer, with the sizes of changes and with drops. The standard error is
    that of differences within examples; two of them make a difference.
    """
    told = []
    for what, of in (
        ("the size of the change", study.changes),
        ("the drop", study.drops),
    ):
        last = {name: of[name][:, -1:] for name in ("roll-out", "raw")}
        (mean,), (error,) = _mean(last["roll-out"] - last["raw"])
        means = [_mean(values)[0][0] for values in last.values()]
        found = "the same order" if mean > 2 * error else "NOT the same order"
        told.append(
            f"With {what}: roll-out {means[0]:.2f}, raw attention {means[1]:.2f} in "
            f"the last layer, difference {mean:.3f} ± {error:.3f}: {found}."
        )
    first, last = (PUBLISHED[name][-1] for name in ("roll-out", "raw"))
    return "\n".join([f"Published: roll-out {first}, raw attention {last}.", *told])


def write(study: Study, folder: str | os.PathLike) -> Path:
    """Writes rollout.csv: a line per measure and layer.

    Args:
      study: What to write.
      folder: Where to; made where it is missing.

    Returns:
      The path of the file. Its columns are `measure`, `layer` (from 1), `correlation`
      with the sizes of changes, its `standard_error`, `drop_correlation`,
      `drop_standard_error`, `examples`, and `published`, empty where it is not.

    Raises:
      ConfigError: If it cannot be written.
    """
    lines = [
        [
            "measure",
            "layer",
            "correlation",
            "standard_error",
            "drop_correlation",
            "drop_standard_error",
            "examples",
            "published",
        ]
    ]
    changes, drops = summary(study.changes), summary(study.drops)
    for name, of_layers in changes.items():
        published = dict(enumerate(PUBLISHED.get(name, ())))
        for i, numbers in enumerate(of_layers):
            numbers = [f"{x:.6g}" for x in (*numbers, *drops[name][i])]
            examples = len(study.changes[name])
            lines.append([name, i + 1, *numbers, examples, published.get(i, "")])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return files.write(Path(folder) / "rollout.csv", text.getvalue())


def _check(run) -> None:
    if run.task.num_tokens is None or run.config.model.family == "set_classifier":
        raise ConfigError(
            "A study of roll-out needs a task with tokens and an answer at positions, "
            f"got {run.task.name}."
        )
    if run.config.model.scan_layers:
        raise ConfigError("A study of roll-out needs config.model.scan_layers = False.")


def _flows(run, data, rows, bar):
    """Returns the flows of the first examples, `[N, L, T]`."""

    @jax.jit
    def maps_of(params, data, indices):
        example = evaluation.held_out_batch(run.task, run.config.seed, data, indices)
        output = run.model.apply(
            params, None, example.inputs, lengths=example.lengths, is_training=False
        )
        return output.maps

    flows = []
    for n, row in enumerate(rows):
        maps = maps_of(run.params, data, np.array([n], np.int32))
        up_to = [flow(maps[: i + 1], int(row))[0, 0] for i in range(len(maps))]
        flows.append(up_to)
        bar.advance()
    return np.array(flows)


def _correlations(scores, importance, counted) -> np.ndarray:
    """Returns Spearman's correlations of `[L, T]` scores with `[T]`, where counted."""
    from scipy import stats

    ranks = stats.rankdata(np.vstack([scores, importance])[:, counted], axis=-1)
    ranks -= ranks.mean(-1, keepdims=True)
    sizes = np.sqrt((ranks**2).sum(-1))
    products = sizes[:-1] * sizes[-1]
    alike = products == 0
    found = ranks[:-1] @ ranks[-1] / np.where(alike, 1, products)
    return np.where(alike, np.nan, found)


def _mean(values):
    """Returns means over N of `[N, L]`, and their standard errors; NaN is left out."""
    known = ~np.isnan(values)
    count = known.sum(0)
    mean = np.where(known, values, 0).sum(0) / np.where(count, count, np.nan)
    squares = np.where(known, values - mean, 0) ** 2
    spread = squares.sum(0) / np.where(count > 1, count - 1, np.nan)
    return mean, np.sqrt(spread / np.where(count, count, np.nan))
