"""Gates learned on a trained run, with a penalty per open head, so that heads close.

The gates are parameters beside those of the model; the training step is the usual one.
L layers, H heads of a layer.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_haiku import checks, devices, heads, models, modules
from mha_haiku.checks import ConfigError
from mha_haiku.heads import hard_concrete
from mha_haiku.report.tables import Column, Table
from mha_haiku.runs import folders, loop
from mha_haiku.studies import pruned_runs
from mha_haiku.studies.workbench import Bench
from mha_haiku.training import stepping

_STEPS_PER_DISPATCH = 100


class Learned(NamedTuple):
    """The result of learning gates.

    Attributes:
      params: The model's parameters, trained with the gates.
      log_alpha: L arrays `[H]`, the logits of the gates.
      loss: `[steps]`, the mean loss of each step's batch, without the penalty.
    """

    params: Any
    log_alpha: list[np.ndarray]
    loss: np.ndarray

    @property
    def gates(self) -> list[np.ndarray]:
        """L arrays `[H]` in [0, 1]: the gates without noise, 0 where closed."""
        return [np.asarray(hard_concrete.settled(x)) for x in self.log_alpha]

    @property
    def keep(self) -> list[np.ndarray]:
        """L arrays `[H]` of booleans: the heads whose gates are open."""
        return [gate > 0 for gate in self.gates]


class Line(NamedTuple):
    """A model at the end of its training.

    Attributes:
      name: What it is called in the table.
      kept: Its number of heads.
      accuracy: On held-out examples, in [0, 1].
      loss: On held-out examples, nats per target.
    """

    name: str
    kept: int
    accuracy: float
    loss: float


def learn_gates(
    bench: Bench,
    *,
    penalty: float,
    steps: int,
    gate_learning_rate: float = 0.1,
    initial: float = 2.0,
) -> Learned:
    """Continues training with hard-concrete gates on heads and a penalty on open ones.

    The loss of a step is the model's plus `penalty` times the expected number of open
    heads: a larger penalty leaves fewer of them. The batches are those that would
    follow in the run, without dropout; the parameters learn by Adam at a tenth of the
    run's learning rate, as the run has converged.

    Args:
      bench: The run, with unstacked layers; a converged one, as in the source.
      penalty: Nats per open head.
      steps: The number of training steps.
      gate_learning_rate: Adam's, for the logits of the gates; larger than that of the
        parameters, as the logits change by several units.
      initial: The logits at the start; 2 is open with probability 0.97.

    Source: Voita et al. 2019, section 5.2, https://arxiv.org/abs/1905.09418.
    """
    run = bench.run

    def apply(params, rng, inputs, *, lengths=None, is_training):
        keys = jax.random.split(rng, len(params["log_alpha"]))
        gates = [
            hard_concrete.sample(logits, key)
            for logits, key in zip(params["log_alpha"], keys, strict=True)
        ]
        del is_training  # no dropout: the gates are the only randomness
        return run.model.apply(
            params["model"],
            None,
            inputs,
            lengths=lengths,
            interventions=modules.Interventions(heads=gates),
            is_training=False,
        )

    def total_penalty(log_alpha):
        return penalty * sum(hard_concrete.open_probability(x).sum() for x in log_alpha)

    def add_penalty(gradients, params):
        slopes = jax.grad(total_penalty)(params["log_alpha"])
        log_alpha = jax.tree.map(jnp.add, gradients["log_alpha"], slopes)
        return {**gradients, "log_alpha": log_alpha}

    config = run.config.optimizer
    adam = optax.adam(config.learning_rate / 10, b1=config.b1, b2=config.b2)
    optimizer = optax.chain(
        # The penalty depends only on the gates: its gradient is added to that of the
        # loss, without the model.
        optax.stateless(add_penalty),
        optax.partition(
            {
                "model": optax.chain(
                    optax.clip_by_global_norm(config.clip_norm or 1.0), adam
                ),
                "log_alpha": optax.adam(gate_learning_rate),
            },
            {"model": "model", "log_alpha": "log_alpha"},
        ),
    )
    placement = devices.Replicas(jax.local_devices()[:1])
    dispatch = stepping.make_dispatch(
        models.Model(None, apply),
        run.task,
        optimizer,
        batch_size=run.config.training.batch_size,
        placement=placement,
        max_steps=_STEPS_PER_DISPATCH,
    )
    counts = [len(layer.names) for layer in models.heads_of_layers(run.config.model)]
    log_alpha = [jnp.full(count, initial) for count in counts]
    params = {"model": jax.tree.map(jnp.array, run.params), "log_alpha": log_alpha}
    state = stepping.state_of(params, optimizer)
    state = state._replace(step=jnp.asarray(run.step, jnp.int32))
    state, data = placement.put((state, run.task.train_data))
    losses = []
    firsts = range(0, steps, _STEPS_PER_DISPATCH)
    for first in bench.progress(firsts, name="gates", unit="dispatch"):
        stop = min(first + _STEPS_PER_DISPATCH, steps)
        state, seen = dispatch(
            state, data, np.uint32(run.config.seed), np.int32(run.step + stop)
        )
        sums = placement.fetch(seen).sums
        losses.append((sums.loss / np.maximum(sums.weight, 1))[: stop - first])
    params = placement.fetch(state.params)
    return Learned(params["model"], params["log_alpha"], np.concatenate(losses))


def learn(
    bench: Bench,
    out: str | os.PathLike,
    *,
    penalty: float,
    steps: int,
    tuning_steps: int,
    from_scratch: bool = True,
) -> list[Line]:
    """Learns gates, prunes the heads that they close, and trains the rest further.

    The pruned model becomes the run `out/pruned`. A model of the same architecture,
    trained from scratch for as many steps as the run, the gates and the tuning took
    together, becomes the run `out/scratch`.

    Args:
      bench: The run, a converged one.
      out: The folder of the new runs, which must not hold any.
      penalty: Nats per open head.
      steps: Training steps with gates.
      tuning_steps: Training steps of the pruned model.
      from_scratch: Whether to train the model from scratch too.

    Returns:
      The run, the pruned model before and after tuning, and the one from scratch.

    Raises:
      ConfigError: If every head closes, or `out` holds a run.

    Source: Voita et al. 2019, section 6, https://arxiv.org/abs/1905.09418.
    """
    with checks.user_mistakes():
        checks.non_negative_number("penalty", penalty)
        checks.positive_integer("steps", steps)
        checks.positive_integer("tuning_steps", tuning_steps)
    bench = bench.looped()
    run = bench.run
    for name in ("pruned", "scratch"):
        if (Path(out) / name).exists():
            raise ConfigError(f"{Path(out) / name} is there; give a folder without it.")

    learned = learn_gates(bench, penalty=penalty, steps=steps)
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


def table(lines: list[Line]) -> Table:
    """Returns a row per model."""
    columns = [
        Column("model"),
        Column("heads"),
        Column("accuracy", shown="{:.4f}"),
        Column("loss", "nats", "{:.4f}"),
    ]
    return Table(
        columns,
        [
            {
                "model": line.name,
                "heads": line.kept,
                "accuracy": line.accuracy,
                "loss": line.loss,
            }
            for line in lines
        ],
    )


def _names(run, keep) -> list[list[int]]:
    layers = models.heads_of_layers(run.config.model)
    return [
        [layer.names[i] for i in np.flatnonzero(row)]
        for layer, row in zip(layers, keep, strict=True)
    ]


def _line(name: str, kept: int, run: Any) -> Line:
    metrics = pruned_runs.held_out(run)
    return Line(name, kept, metrics["accuracy"], metrics["loss"])
