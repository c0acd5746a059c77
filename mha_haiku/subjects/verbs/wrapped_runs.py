"""Training of a wrapped function or module, as a run of the usual loop.

Its parameters are a dictionary by name. The folder has the examples, but not the
function: the same call on the same subject resumes the run.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_haiku.core import checks, models, outputs, sites
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads, maps
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects import computation, example_rows
from mha_haiku.subjects.subject import Subject, refuse
from mha_haiku.subjects.verbs import saved_models, values
from mha_haiku.training import tasks, train_step
from mha_haiku.training.runs import checkpoints, configuration, folders

Optimizer = str | Mapping[str, Any] | optax.GradientTransformation

BATCH_SIZE = 8  # unless a user says otherwise
_BATCHES = 8  # held-out ones that are evaluated, at most


def train(
    subject: Subject,
    workdir: str | os.PathLike,
    *,
    steps: int | None = None,
    examples: Any = None,
    optimizer: Optimizer | None = None,
    loss: heads.Metric | None = None,
    freeze: str = "",
    batch_size: int = BATCH_SIZE,
) -> Subject:
    """Trains a wrapped subject as `saved_models.train` says."""
    folder = folders.Folder(checks.as_path(workdir))
    config, task = folders.read_config(folder), None
    if config is not None and config.task.name != tasks.WRAPPED:
        raise ConfigError(f"{folder.root} holds another run; choose another folder.")
    how = {"optimizer": optimizer, "freeze": freeze, "batch_size": batch_size}
    if steps is None and (config is None or examples is not None or freeze):
        why = (
            "as the folder holds no run" if config is None else "with examples, freeze"
        )
        raise ConfigError(f"steps must be set {why}: {folder.root}.")
    if steps is None:
        kept = tasks.Kept(**(folders.read_kept(folder) or {}))
        task = configuration.make_task(config, kept)
    begun = begin(subject, examples, loss, task, steps=steps, **how)
    config = begun.config if steps is not None else config
    begun, size = begun.replace(config=config), config.training.batch_size
    count = next(x for x in range(len(jax.devices()), 0, -1) if size % x == 0)
    saved_models.save_run(
        begun,
        workdir,
        steps=config.training.steps,
        model=begun.model,
        optimizer=None if isinstance(optimizer, str | Mapping) else optimizer,
        devices=jax.devices()[:count],
    )
    stored = checkpoints.read(folder.checkpoints)
    abstract = train_step.Parameters(np.int32(0), begun.params)
    fields = [f".{x}" for x in train_step.Parameters._fields]
    state = checkpoints.restored(stored.arrays(fields), abstract)
    held_out = begun.task.held_out_data
    if "accuracy" not in begun.task.metrics:
        held_out = held_out._replace(weights=0 * held_out.weights)
    starts = range(0, len(held_out.inputs), size)
    result = subject.replace(
        params=merged(subject.params, jax.tree.map(jnp.asarray, state.params)),
        step=stored.step,
        folder=folder,
        batches=[example_rows.taken(held_out, slice(i, i + size)) for i in starts],
    )
    _save_maps(result, folder, config.attention.examples)
    return result


def begin(
    subject: Subject,
    examples: Any,
    loss: heads.Metric | None = None,
    task: tasks.Task | None = None,
    *,
    steps: int | None,
    **how: Any,
) -> Any:
    """Makes the subject of a run: parameters by name, a task and a config.

    Integers and booleans stay in the model. A task is made of examples, if it is None.
    """
    task = task or _task_of(subject, examples, loss)
    first = example_rows.taken(task.train_data, slice(1))
    whole = computation.with_loss(subject, first, loss)
    pairs = zip(names_of(subject.params), jax.tree.leaves(subject.params), strict=True)
    params = {x: y for x, y in pairs if jnp.issubdtype(y.dtype, jnp.floating)}

    def apply(params: Any, rng: Any, inputs: Any, **options: Any) -> models.Output:
        return whole.apply(merged(subject.params, params), rng, inputs, **options)

    model = whole._replace(init=lambda *_, **__: params, apply=apply)
    fixed = [name for name in subject.fixed if name in params]
    config = steps and _config_of(task, fixed, steps, **how)
    new = {"params": params, "model": model, "batches": [first]}
    return subject.replace(config=config, task=task, **new)


def _task_of(
    subject: Subject, examples: Any, loss: heads.Metric | None
) -> tasks.Wrapped:
    if examples is None and (subject.batches is None or subject.folder is not None):
        why = "has no examples to train on; give examples="
        refuse(subject, "train", why)
    given = subject.batches if examples is None else examples
    batches = computation.batches_of(subject, given)
    has_lengths, first = subject.codec.knows_lengths, batches[0]
    are_targets = computation.with_loss(subject, first, loss).loss is None
    what = computation.targets_of(subject, first) if are_targets else ""
    if has_lengths or what == "the next token":
        # Of a causal function, what comes after a text changes nothing.
        batches = example_rows.padded(batches, with_lengths=has_lengths)
    return tasks.from_batch(example_rows.joined(batches), subject.name)


def _config_of(
    task: tasks.Task,
    fixed: Sequence[str],
    steps: int,
    *,
    batch_size: int = BATCH_SIZE,
    optimizer: Optimizer | None = None,
    freeze: str = "",
) -> configuration.RunConfig:
    fields: dict[str, Any] = dict(learning_rate=1e-4, warmup_steps=10)
    if isinstance(optimizer, Mapping):
        fields |= optimizer
    elif optimizer is not None:
        fields["name"] = optimizer if isinstance(optimizer, str) else "optax"
    fields["frozen"] = ",".join(filter(None, [freeze, *fixed]))
    with checks.user_mistakes():
        checks.positive_integer("batch_size", batch_size)
    batches = -(-len(task.held_out_data.inputs) // batch_size)
    return configuration.default_config(task).replace(
        optimizer=fields,
        training=dict(
            steps=steps,
            batch_size=batch_size,
            steps_per_dispatch=10,
            report_every=10,
            evaluate_every=50,
            evaluation_examples=batch_size * min(batches, _BATCHES),
            checkpoint_every=50,
        ),
        attention=dict(examples=4),
    )


def edited(subject: Subject, edits: Any) -> Subject:
    """Makes edits a part of the function, so that it can be trained further."""
    model = subject.model
    return subject.replace(model=model._replace(apply=sites.edit(model.apply, edits)))


def names_of(params: Any) -> list[str]:
    """Names the arrays of a tree by their paths, with points between the parts."""
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


def merged(params: Any, trained: Mapping[str, Any]) -> Any:
    """Replaces the arrays of a tree that have a name in `trained`."""
    names, leaves = names_of(params), jax.tree.leaves(params)
    leaves = [trained.get(x, y) for x, y in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _save_maps(subject: Subject, folder: folders.Folder, count: int) -> None:
    """Writes the maps of some held-out examples, for the page of the folder."""
    assert subject.batches is not None
    batch = example_rows.taken(subject.batches[0], slice(count))
    if model_runs.parts(subject.model, subject.params, batch):
        name = f"{subject.name}, step {subject.step}"
        shown = maps.map_set(values.maps(subject, batch), name=name)
        outputs.claim(folder.attention, ["maps.npz"])
        path = folder.attention / "maps.npz"
        dataclasses.replace(shown, step=subject.step).save(path)
