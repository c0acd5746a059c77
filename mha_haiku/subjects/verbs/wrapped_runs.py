"""Training of runs, and of a wrapped function or module by the same loop.

The folder of the latter has the examples, but not the function: the same call on the
same subject resumes the run.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_haiku.core import checks, models, outputs
from mha_haiku.lab import heads, maps
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects import computation, example_rows
from mha_haiku.subjects.subject import (
    Subject,
    check_parameters,
    has_task,
    merged,
    refuse,
    verb,
)
from mha_haiku.subjects.verbs import saved_models, values
from mha_haiku.training import tasks, train_step
from mha_haiku.training.runs import checkpoints, configuration, folders

_BATCHES, _MAPS = 8, 4  # held-out batches to evaluate, and examples with maps, at most


@verb
def train(
    subject: Subject,
    workdir: str | os.PathLike,
    *,
    steps: int,
    examples: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    loss: heads.Metric | None = None,
    freeze: str = "",
    batch_size: int | None = None,
) -> Subject:
    """Trains further, as a run in a new folder; the same call resumes it.

    A wrapped function or module trains in training mode, with a key for dropout. A
    tenth of the examples, at least one, is held out: the examples of the result.

    Args:
      subject: The model.
      workdir: The run's folder.
      steps: Number of steps.
      examples: What a wrapped model trains on, or an iterable. Defaults to its own.
      optimizer: Of optax, for a wrapped model, as all that follows. Defaults to adamw
        at 1e-4.
      loss: A metric. Defaults to the one of `mh.wrap`, a module's own loss, or `loss`.
      freeze: Patterns of names of modules or parameters that are not trained, with
        commas between, such as "model.embed_tokens,*bias".
      batch_size: Examples of a step of a wrapped model. Defaults to 8.

    Raises:
      ValueError: If the model has edits, or there are no examples or targets.
      ConfigError: If the folder holds another run.
    """
    check_parameters(subject, "train")
    if has_task(subject):
        if examples is not None or optimizer or loss or freeze or batch_size:
            refuse(subject, "train", "has a config, which says all but steps")
        return Subject.of_folder(saved_models.save_run(subject, workdir, steps=steps))
    fields = {"name": "optax" if optimizer else "adamw", "frozen": freeze}
    begun = subject.replace(metric=loss or subject.metric)
    begun = begin(begun, examples, batch_size or 8, fields)
    size, options = begun.config.training.batch_size, {"optimizer": optimizer}
    saved_models.save_run(begun, workdir, steps=steps, model=begun.model, **options)
    folder = folders.Folder(checks.as_path(workdir))
    stored, name = checkpoints.read(folder.checkpoints), f"{subject.name}, step {steps}"
    abstract = train_step.Parameters(np.int32(0), begun.params)
    arrays = stored.arrays([f".{x}" for x in abstract._fields])
    params = jax.tree.map(jnp.asarray, checkpoints.restored(arrays, abstract).params)
    held_out = begun.task.held_out_data
    starts = range(0, len(held_out.inputs), size)
    result = subject.replace(
        params=merged(subject.params, params),
        step=stored.step,
        folder=folder,
        batches=[example_rows.taken(held_out, slice(i, i + size)) for i in starts],
    )
    batch = example_rows.taken(held_out, slice(_MAPS))
    if model_runs.parts(subject.model, result.params, batch):
        record = maps.map_set(values.maps(result, batch), name=name)
        outputs.claim(folder.attention, ["maps.npz"])
        record.save(folder.attention / "maps.npz")
    return result


def begin(
    subject: Subject, examples: Any, batch_size: int, fields: Mapping[str, Any]
) -> Any:
    """Makes the subject of a run, with a task, and with parameters that are trained.

    `fields` are of `config.optimizer`.
    """
    if examples is None and (subject.batches is None or subject.folder is not None):
        refuse(subject, "train", "has no examples to train on; give examples=")
    examples = subject.batches if examples is None else examples
    batches = list(computation.batches_of(subject, examples))
    (whole, _), fills = computation.with_loss(subject, batches[0]), False
    of = {(x.inputs.shape[1:], x.targets.shape[1:], x.lengths is None) for x in batches}
    if len(of) > 1:
        # Of a causal function, what comes after a text changes nothing.
        knows, is_loss = subject.codec.knows_lengths, computation.is_of_loss(subject)
        next_tokens = is_loss and computation.targets_of(subject, batches[0])
        fills = knows or next_tokens == "the next token"
        batches = [_with_lengths(x) if knows else x for x in batches]
    batch = example_rows.joined(batches, fills=fills)

    def trained(path: tuple, x: jax.Array) -> jax.Array | None:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        is_trained = jnp.issubdtype(x.dtype, jnp.floating)
        return x if is_trained and name not in subject.codec.fixed else None

    def apply(params: Any, rng: Any, inputs: Any, **options: Any) -> models.Output:
        return whole.apply(merged(subject.params, params), rng, inputs, **options)

    params = jax.tree_util.tree_map_with_path(trained, subject.params)
    model = whole._replace(init=lambda *_, **__: params, apply=apply)
    task = tasks.Wrapped.of_batch(batch, subject.name)
    count = min(_BATCHES, -(-len(task.held_out_data.inputs) // batch_size))
    training = {"batch_size": batch_size, "evaluation_examples": batch_size * count}
    optimizer = {"learning_rate": 1e-4, "warmup_steps": 10, **fields}
    config = configuration.default_config(task)
    config = config.replace(optimizer=optimizer, training=training)
    return subject.replace(params=params, model=model, task=task, config=config)


def _with_lengths(batch: tasks.Example) -> tasks.Example:
    """Sets lengths, so that padding can be added."""
    for side in ("", "decoder_"):
        inputs = getattr(batch, f"{side}inputs")
        if inputs is not None and f"{side}attention_mask" not in (batch.others or {}):
            counted = np.asarray(model_runs.counted(inputs.shape[1], batch, side))
            lengths = counted.sum(1, dtype=np.int32)
            batch = batch._replace(**{f"{side}lengths": lengths})
    return batch
