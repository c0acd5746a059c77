"""Gates learned on top of a run: heads close by themselves, at a price per open head.

L layers, H heads of a layer.
"""

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_haiku import checks, heads, models, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.runs import folders, loop, progress
from mha_haiku.studies import head_importance, pruned_runs
from mha_haiku.training import stepping


class Line(NamedTuple):
    """A model at the end of its training.

    Attributes:
      name: Which.
      kept: Its number of heads.
      accuracy: On held-out examples, in [0, 1].
      loss: On held-out examples, nats per target.
    """

    name: str
    kept: int
    accuracy: float
    loss: float


def learn(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    penalty: float,
    steps: int,
    tuning_steps: int,
    from_scratch: bool = True,
) -> list[Line]:
    """Closes heads of a run by learned gates, prunes them and trains the rest on.

    The model that is left, and another of the same architecture that is trained from
    scratch for as many steps as the run, the gates and the tuning took in all, become
    runs of their own in `out`: `pruned` and `scratch`.

    Args:
      workdir: The run's folder; a converged run.
      out: The folder of the new runs, which must not hold any.
      penalty: Nats per open head.
      steps: Training steps with gates.
      tuning_steps: Training steps of the pruned model.
      from_scratch: Whether the other model is trained too.

    Returns:
      The run, the pruned model before and after tuning, and the one from scratch.

    Raises:
      ConfigError: If there is no run, or every head closes.

    Source: Voita et al. 2019, section 6, https://arxiv.org/abs/1905.09418.
    """
    with checks.user_mistakes():
        checks.non_negative_number("penalty", penalty)
        checks.positive_integer("steps", steps)
        checks.positive_integer("tuning_steps", tuning_steps)
    run = head_importance.looped(folders.load_run(workdir))
    for name in ("pruned", "scratch"):
        if (Path(out) / name).exists():
            raise ConfigError(f"{Path(out) / name} is there; give a folder without it.")

    learned = heads.learn_gates(
        run.model,
        head_importance.loss_of_examples,
        run.params,
        _sampler(run),
        penalty=penalty,
        steps=steps,
        optimizer=_optimizer(run.config.optimizer),
        progress=functools.partial(progress.over, name="gates", unit="chunk"),
    )
    keep = learned.keep
    kept = int(sum(row.sum() for row in keep))
    if not kept:
        raise ConfigError(f"penalty {penalty:g} closes every head; give a smaller one.")
    scaled = heads.scaled(learned.params, run.config.model, learned.gates)
    pruned = pruned_runs.prune(run._replace(params=scaled), _names(run, keep))
    total = sum(row.size for row in keep)
    lines = [
        _line("the run", total, run),
        _line("pruned by gates, before tuning", kept, pruned),
    ]
    folder = pruned_runs.save(pruned, Path(out) / "pruned", steps=tuning_steps)
    loop.train(folders.load_run(folder).config, folder)
    lines.append(_line("pruned and tuned", kept, folders.load_run(folder)))
    if from_scratch:
        config = folders.load_run(folder).config
        config.training.steps = run.step + steps + tuning_steps
        config.optimizer.warmup_steps = run.config.optimizer.warmup_steps
        other = Path(out) / "scratch"
        loop.train(config, other)
        lines.append(_line("the same from scratch", kept, folders.load_run(other)))
    return lines


def table(lines: list[Line]) -> str:
    """Returns a line of text per model."""
    rows = [f"{'':34}{'heads':>6}{'accuracy':>10}{'loss':>10}"]
    for line in lines:
        numbers = f"{line.kept:>6}{line.accuracy:>10.4f}{line.loss:>10.4f}"
        rows.append(f"{line.name:34}{numbers}")
    return "\n".join(rows)


def _sampler(run):
    """Returns the batch of a step; it follows on those that the run has seen."""
    data = jax.device_put(run.task.train_data)
    indices = jnp.arange(run.config.training.batch_size)

    def sample(step):
        key = stepping.stream(run.config.seed, "data")
        key = jax.random.fold_in(key, run.step + step)
        return tasks.batch(run.task, key, data, indices)

    return sample


def _optimizer(config) -> optax.GradientTransformation:
    """Returns Adam at a tenth of the run's learning rate, as it has converged."""
    adam = optax.adam(config.learning_rate / 10, b1=config.b1, b2=config.b2)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm or 1.0), adam)


def _names(run, keep) -> list[list[int]]:
    layers = models.heads_of_layers(run.config.model)
    return [
        [layer.names[i] for i in np.flatnonzero(row)]
        for layer, row in zip(layers, keep, strict=True)
    ]


def _line(name: str, kept: int, run: Any) -> Line:
    metrics = pruned_runs.held_out(run)
    return Line(name, kept, metrics["accuracy"], metrics["loss"])
