"""Gates learned on a trained run, with a penalty per open gate.

The gates are parameters next to the model's; the training step is the usual one.
L layers, H heads of a layer.
"""

import os
from collections.abc import Collection
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
from mha_haiku.subjects import imported_runs
from mha_haiku.subjects.subject import (
    RunSubject,
    Subject,
    check_parameters,
    check_task,
    merged,
    parts_of,
    refuse,
    verb,
)
from mha_haiku.subjects.verbs import (
    prune_sweep,
    pruned_models,
    saved_models,
    wrapped_runs,
)
from mha_haiku.training import devices, optimizers, train_step
from mha_haiku.training.runs import files, folders, loop

_STEPS_PER_DISPATCH = 100
_FIRST_LOGIT = 2.0  # of the gates, which are open with probability 0.97
_NAMES = "the run", "pruned by gates, before tuning", "pruned and tuned"


class Learned(NamedTuple):
    """The result of learning gates."""

    params: Any  # the model's parameters, trained with the gates
    log_alpha: list[np.ndarray]  # L arrays `[H]`, the logits of the gates
    loss: np.ndarray  # `[steps]`, the mean of each step's batch, without the penalty

    @property
    def gates(self) -> list[np.ndarray]:
        """L arrays `[H]` in [0, 1]: the gates without noise, 0 for ablated heads."""
        return [np.asarray(hard_concrete.settled(x)) for x in self.log_alpha]


def fit_gates(
    subject: RunSubject, *, penalty: float, steps: int, gate_learning_rate: float = 0.1
) -> Learned:
    """Continues training with hard-concrete gates on heads and a penalty on open ones.

    The loss of a step is the model's loss plus `penalty`, in nats, times the expected
    number of open heads. The batches are the ones that would follow in the run, without
    dropout. The parameters are trained by Adam at a tenth of the run's learning rate,
    as the run has converged, and the logits of gates, which change by several units, at
    `gate_learning_rate`. Gradients are clipped, and parameters frozen, as in the run.

    Source: Voita et al. 2019, section 5.2, https://arxiv.org/abs/1905.09418.
    """
    config = subject.config.optimizer
    model = optimizers.without_frozen(subject.model, config)
    parts = parts_of(subject)
    names = [f"{part.path}/heads".removeprefix("/") for part in parts]

    def apply(
        params: Any, rng: jax.Array, inputs: Any, **options: Any
    ) -> models.Output:
        keys = jax.random.split(rng, len(params["log_alpha"]))
        gates = [*map(hard_concrete.sample, params["log_alpha"], keys)]
        gated = sites.edit(model.apply, edits.on_parts(names, gates, edits.gated))
        options["is_training"] = False  # no dropout: the gates are the only randomness
        return gated(params["model"], None, inputs, **options)

    slope = jax.grad(lambda x: penalty * hard_concrete.open_probability(x).sum())

    def add_penalty(gradients: Any, params: Any) -> Any:
        return jax.tree.map(lambda x, y: x + slope(y), gradients, params)

    tuned = optax.adam(config.learning_rate / 10, b1=config.b1, b2=config.b2)
    if config.clip_norm is not None:
        tuned = optax.chain(optax.clip_by_global_norm(config.clip_norm), tuned)

    # The penalty depends only on the gates: its gradient joins the loss's gradient,
    # without the model. The gradient of frozen parameters is 0, and so Adam's step.
    of_gates = optax.chain(optax.stateless(add_penalty), optax.adam(gate_learning_rate))
    both: dict[Any, Any] = {"model": tuned, "log_alpha": of_gates}
    optimizer = optax.partition(both, {name: name for name in both})
    placement = devices.Replicas(jax.local_devices()[:1])
    dispatch = train_step.make_dispatch(
        model._replace(apply=apply),
        subject.task,
        optimizer,
        batch_size=subject.config.training.batch_size,
        placement=placement,
        max_steps=_STEPS_PER_DISPATCH,
    )
    log_alpha = [jnp.full(len(part.names), _FIRST_LOGIT) for part in parts]
    params = {"model": jax.tree.map(jnp.array, subject.params), "log_alpha": log_alpha}
    state = train_step.state_of(params, optimizer)
    state = state._replace(step=jnp.asarray(subject.step, jnp.int32))
    state, data = placement.put((state, subject.task.train_data))
    losses = []
    firsts = range(0, steps, _STEPS_PER_DISPATCH)
    for first in subject.progress(firsts, name="gates", unit="dispatch"):
        stop = min(first + _STEPS_PER_DISPATCH, steps)
        state, seen = dispatch(
            state, data, np.uint32(subject.config.seed), np.int32(subject.step + stop)
        )
        sums = placement.fetch(seen).sums
        weight = np.where(sums.weight > 0, sums.weight, 1)
        losses.append((sums.loss / weight)[: stop - first])
    params = placement.fetch(state.params)
    return Learned(params["model"], params["log_alpha"], np.concatenate(losses))


@verb
def learn_gates(
    subject: Subject,
    out: str | os.PathLike | None = None,
    *,
    penalty: float = 0.01,
    steps: int = 500,
    tuning_steps: int = 500,
    scratch: bool = True,
    examples: Any = None,
) -> prune_sweep.Pruned:
    """Learns gates, prunes the heads that they ablate, and trains the rest further.

    The model with gates becomes the run `out/gated`, and `out/gates.json` names its
    source. The pruned model is trained for `tuning_steps` as the run `out/pruned`. A
    model of the same architecture, trained from scratch for as many steps as the run,
    the gates and the tuning took together, becomes the run `out/scratch`, unless the
    run was pretrained or started from another one. Points are in this order, after the
    run itself. The same call resumes an interrupted one.

    A wrapped model learns gates on examples as `train` does. Open gates become 1 where
    it is pruned, and it is measured on the held-out examples; `out` has only `pruned`.

    Args:
      subject: The model.
      out: Folder of the new runs; default: <workdir>_gates.
      penalty: Penalty per open gate, in nats.
      steps: Training steps with gates.
      tuning_steps: Training steps of the pruned model.
      scratch: Whether to train the same model from scratch too.
      examples: What a wrapped model trains on, or an iterable. Defaults to its own.

    Source: Voita et al. 2019, section 6, https://arxiv.org/abs/1905.09418.
    """
    check_parameters(subject, "learn_gates")
    with checks.user_mistakes():
        checks.non_negative_number("penalty", penalty)
        checks.positive_integer("steps", steps)
        checks.positive_integer("tuning_steps", tuning_steps)
    if out is None:
        if subject.folder is None:
            refuse(subject, "learn_gates", "has no folder; give out")
        out = files.beside(subject.folder.root, "_gates")
    files.check_writable("out", out)  # before the work
    title = f"{subject.title}: gates with a penalty of {penalty:g} nats each"
    if subject.model.config is None:
        begun = wrapped_runs.begin(subject, examples, 8, {"name": "adamw"})
        learned = fit_gates(begun, penalty=penalty, steps=steps)
        params = merged(subject.params, learned.params)
        pruned = _without_ablated(subject.replace(params=params), learned, penalty)
        folder = checks.as_path(out) / "pruned"
        tuned = pruned.train(folder, steps=tuning_steps, examples=examples)
        points = prune_sweep.points((subject, pruned, tuned), _NAMES, tuned.batches)
        return prune_sweep.Pruned(title, pruned, points)
    subject = check_task(subject, "learn_gates")
    if "loss" not in subject.task.metrics:
        raise ConfigError(
            "Gates are learned by a loss, and the task "
            f"{subject.task.name} has no targets.\nprune_heads prunes by the drift."
        )
    pruned = _gated(subject, checks.as_path(out), penalty=penalty, steps=steps)
    folder = saved_models.save_run(pruned, Path(out) / "pruned", steps=tuning_steps)
    tuned = Subject.of_folder(folder)
    by_name: dict[str, Any] = dict(zip(_NAMES, (subject, pruned, tuned), strict=True))
    # Training from scratch cannot make up for pretraining.
    if scratch and not imported_runs.is_imported(subject.config):
        total = subject.step + steps + tuning_steps
        config = tuned.config.replace(training=dict(steps=total))
        other = Path(out) / "scratch"
        if loop.train(config, other).interrupted:
            raise KeyboardInterrupt
        by_name["the same from scratch"] = Subject.of_folder(other)
    points = prune_sweep.points(list(by_name.values()), list(by_name))
    return prune_sweep.Pruned(title, pruned, points)


def _gated(subject: RunSubject, out: Path, *, penalty: float, steps: int) -> RunSubject:
    """Learns gates and prunes by them, as the run `out/gated`, or finds it there."""
    folder, record = folders.Folder(out / "gated"), out / "gates.json"
    settings = {
        "run": folders.digest_of(subject.params),
        "penalty": penalty,
        "steps": steps,
    }
    if folders.read_config(folder) is not None:
        before = files.read_json(record) or {}
        if others := [name for name in settings if before.get(name) != settings[name]]:
            raise ConfigError(
                f"{folder.root} exists, with another {' and '.join(others)}; "
                "choose another folder."
            )
        return Subject.of_folder(folder.root)
    for name in ("pruned", "scratch"):
        if (out / name).exists():
            raise ConfigError(f"{out / name} exists; choose another folder.")
    if not _is_ours(record, settings):
        raise ConfigError(
            f"{record} exists, and is not of learn_gates, which would replace it; "
            "choose another folder."
        )
    folders.check_free(folder.root)
    learned = fit_gates(subject, penalty=penalty, steps=steps)
    # Gates that are not 0 scale the outputs of their heads.
    params = heads.scaled(learned.params, subject.config.model, learned.gates)
    pruned = _without_ablated(subject.replace(params=params), learned, penalty)
    files.write_json(record, settings)
    return Subject.of_folder(saved_models.save_run(pruned, folder.root, steps=0))


def _without_ablated(subject: Subject, learned: Learned, penalty: float) -> Any:
    if not any(gates.any() for gates in learned.gates):
        raise ConfigError(f"penalty {penalty:g} ablates all heads; give a smaller one.")
    rows = zip(parts_of(subject), learned.gates, strict=True)
    keep = [[part.names[i] for i in np.flatnonzero(gates)] for part, gates in rows]
    return pruned_models.without_heads(subject, keep)


def _is_ours(record: Path, fields: Collection[str]) -> bool:
    """Checks that a record is missing, or may be what a killed process has left."""
    if not os.path.lexists(record):
        return True
    try:
        return set(files.read_json(record) or ()) == set(fields)
    except ConfigError:
        return False
