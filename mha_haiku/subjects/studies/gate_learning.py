"""Gates learned on a trained run, with a penalty per open gate.

The gates are parameters next to the model's; the training step is the usual one.
L layers, H heads of a layer.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_haiku.core import checks, models, sites
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.lab.heads import edits, hard_concrete
from mha_haiku.subjects.studies import imported_runs, pruning
from mha_haiku.subjects.studies.workbench import Bench
from mha_haiku.training import devices, stepping
from mha_haiku.training.runs import folders, loop

_STEPS_PER_DISPATCH = 100
_FIRST_LOGIT = 2.0  # of the gates, which are open with probability 0.97


class Learned(NamedTuple):
    """The result of learning gates."""

    params: Any  # the model's parameters, trained with the gates
    log_alpha: list[np.ndarray]  # L arrays `[H]`, the logits of the gates
    loss: np.ndarray  # `[steps]`, the mean of each step's batch, without the penalty

    @property
    def gates(self) -> list[np.ndarray]:
        """L arrays `[H]` in [0, 1]: the gates without noise, 0 for ablated heads."""
        return [np.asarray(hard_concrete.settled(x)) for x in self.log_alpha]


def learn_gates(
    bench: Bench, *, penalty: float, steps: int, gate_learning_rate: float = 0.1
) -> Learned:
    """Continues training with hard-concrete gates on heads and a penalty on open ones.

    The loss of a step is the model's plus `penalty`, in nats, times the expected number
    of open heads. The batches are those that would follow in the run, without dropout;
    the parameters learn by Adam at a tenth of the run's learning rate, as the run has
    converged, and the logits of gates, which change by several units, at
    `gate_learning_rate`. Layers of the run must be unstacked.

    Source: Voita et al. 2019, section 5.2, https://arxiv.org/abs/1905.09418.
    """
    run = bench.run
    parts = models.heads_of_layers(run.config.model)
    names = [f"{part.path}/heads" for part in parts]

    def apply(params, rng, inputs, *, is_training, **given):
        keys = jax.random.split(rng, len(params["log_alpha"]))
        gates = [
            hard_concrete.sample(logits, key)
            for logits, key in zip(params["log_alpha"], keys, strict=True)
        ]
        del is_training  # no dropout: the gates are the only randomness
        gated = sites.edit(run.model.apply, edits.on_parts(names, gates, edits.gated))
        return gated(params["model"], None, inputs, **given, is_training=False)

    def total_penalty(log_alpha):
        return penalty * sum(hard_concrete.open_probability(x).sum() for x in log_alpha)

    def add_penalty(gradients, params):
        slopes = jax.grad(total_penalty)(params["log_alpha"])
        log_alpha = jax.tree.map(jnp.add, gradients["log_alpha"], slopes)
        return {**gradients, "log_alpha": log_alpha}

    config = run.config.optimizer
    adam = optax.adam(config.learning_rate / 10, b1=config.b1, b2=config.b2)
    optimizer = optax.chain(
        # The penalty depends only on the gates: its gradient is added to the gradient
        # of the loss, without the model.
        optax.stateless(add_penalty),
        optax.partition(
            {
                "model": optax.chain(
                    optax.clip_by_global_norm(config.clip_norm or 1.0), adam
                ),
                "log_alpha": optax.adam(gate_learning_rate),
            },
            lambda params: {name: name for name in params},
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
    log_alpha = [jnp.full(len(part.names), _FIRST_LOGIT) for part in parts]
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
) -> pruning.Pruned:
    """Learns gates, prunes the heads that they ablate, and trains the rest further.

    The pruned model takes `tuning_steps` as the run `out/pruned`. A model of the same
    architecture, trained from scratch for as many steps as the run, the gates and the
    tuning took together, becomes the run `out/scratch`, unless the run had learnt
    elsewhere or started from another one. The points are in this order, after the run
    itself.

    Source: Voita et al. 2019, section 6, https://arxiv.org/abs/1905.09418.
    """
    with checks.user_mistakes():
        checks.non_negative_number("penalty", penalty)
        checks.positive_integer("steps", steps)
        checks.positive_integer("tuning_steps", tuning_steps)
    bench = bench.looped()
    run = bench.run
    if "loss" not in run.task.metrics:
        raise ConfigError(
            "Gates are learned by a loss, and the task "
            f"{run.task.name} has no targets.\nprune_heads prunes by the drift."
        )
    for name in ("pruned", "scratch"):
        if (Path(out) / name).exists():
            raise ConfigError(f"{Path(out) / name} is there; give a folder without it.")

    learned = learn_gates(bench, penalty=penalty, steps=steps)
    if not any(gates.any() for gates in learned.gates):
        raise ConfigError(f"penalty {penalty:g} ablates all heads; give a smaller one.")
    layers, gates = models.heads_of_layers(run.config.model), learned.gates
    # Gates that are not 0 scale the outputs of their heads.
    params = heads.scaled(learned.params, run.config.model, gates)
    keep = [
        [layer.names[i] for i in np.flatnonzero(row)]
        for layer, row in zip(layers, gates, strict=True)
    ]
    pruned = pruning.prune_heads(run._replace(params=params), keep)
    folder = pruning.save(pruned, Path(out) / "pruned", steps=tuning_steps)
    runs_by_name = {
        "the run": run,
        "pruned by gates, before tuning": pruned,
        "pruned and tuned": folders.load_run(folder),
    }
    # What a model had learnt elsewhere cannot be made up for here.
    learnt_elsewhere = imported_runs.is_imported(run.config) or run.config.init_from
    if from_scratch and not learnt_elsewhere:
        config = runs_by_name["pruned and tuned"].config
        config = config.replace(training=dict(steps=run.step + steps + tuning_steps))
        other = Path(out) / "scratch"
        loop.train(config, other)
        runs_by_name["the same from scratch"] = folders.load_run(other)
    points = pruning.points(bench, list(runs_by_name.values()), list(runs_by_name))
    title = f"{bench.title}: gates with a penalty of {penalty:g} nats each"
    return pruning.Pruned(title, pruned, points)
