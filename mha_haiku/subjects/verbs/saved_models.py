"""Saves a model: as a run to train further, or as a folder of weights."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from mha_haiku import interop
from mha_haiku.core import checks
from mha_haiku.subjects.subject import (
    RunSubject,
    Subject,
    check_parameters,
    has_task,
    refuse,
    verb,
)
from mha_haiku.training.runs import folders, loop


@verb
def train(
    subject: Subject,
    workdir: str | os.PathLike,
    *,
    steps: int | None = None,
    examples: Any = None,
    optimizer: str | Mapping | optax.GradientTransformation | None = None,
    loss: Callable | None = None,
    freeze: str = "",
    batch_size: int = 8,
) -> Subject:
    """Trains further, as a run in a new folder; the same call resumes it.

    A wrapped function or module trains in training mode, and gets a key for dropout.
    Its loss is `loss`, else the metric of `mh.wrap`, else what the module computes from
    labels, else the cross-entropy of labels or of next tokens. A tenth of the examples,
    at least one, is held out, and becomes the examples of the result.

    Args:
      subject: The model.
      workdir: The run's folder.
      steps: Number of steps. Of a wrapped model None opens or resumes its run.
      examples: Of a wrapped model: texts, tokens, pairs, mappings with `labels`, or an
        iterable of these; default: those of `mh.wrap`.
      optimizer: Name or fields of `config.optimizer`, or an optimizer of optax, which
        is passed again to resume. Defaults to the run's, or to adamw at 1e-4.
      loss: From logits and a batch to a number per example, for a wrapped model.
      freeze: Patterns of names of modules or parameters that are not trained, with
        commas between, such as "model.embed_tokens,*bias".
      batch_size: Examples of a step of a wrapped model.

    Raises:
      ValueError: If the model has edits, or there are no examples or targets.
      ConfigError: If the folder holds another run, or none and `steps` is missing.
    """
    check_parameters(subject, "train")
    if not has_task(subject):
        from mha_haiku.subjects.verbs import wrapped_runs

        how = {"optimizer": optimizer, "loss": loss, "freeze": freeze}
        how |= {"steps": steps, "examples": examples, "batch_size": batch_size}
        return wrapped_runs.train(subject, workdir, **how)
    if steps is None or examples is not None or loss is not None or batch_size != 8:
        why = (
            "has a task: its run needs steps, and takes no examples, loss or batch_size"
        )
        refuse(subject, "train", why)
    changes: dict[str, Any] = {"frozen": freeze} if freeze else {}
    if isinstance(optimizer, Mapping):
        changes |= optimizer
    elif optimizer is not None:
        changes["name"] = optimizer if isinstance(optimizer, str) else "optax"
    subject = subject.replace(config=subject.config.replace(optimizer=changes))
    own = None if isinstance(optimizer, str | Mapping) else optimizer
    return Subject.of_folder(save_run(subject, workdir, steps=steps, optimizer=own))


@verb
def save(
    subject: Subject, folder: str | os.PathLike, *, own_layout: bool = False
) -> Path:
    """Writes the model as a folder that `mh.load` opens.

    `transformers` opens it too if the model was loaded from there. Its pruned heads are
    then written with weights of 0, as a config.json cannot say that a head is missing;
    `own_layout=True` leaves them out, for `mh.load` alone.

    Raises:
      ValueError: If the model is a function, or has edits.
      ConfigError: If the folder holds files that `save` did not write.
    """
    check_parameters(subject, "save")
    if subject.model.config is None:
        refuse(subject, "save", "is a function, without weights to save")
    return interop.save(
        folder,
        subject.model.config,
        subject.params,
        tokenizer=getattr(subject.task, "encoder", subject.codec.tokenizer),
        own_layout=own_layout,
        num_classes=subject.model.num_classes,
    )


def check_free(workdir: str | os.PathLike, *, steps: int) -> None:
    """Raises ConfigError if a folder holds a run that `save_run` cannot resume."""
    saved = folders.read_config(folders.Folder(checks.as_path(workdir)))
    if saved is None or saved.training.steps != steps:
        folders.check_free(workdir)


def save_run(
    subject: RunSubject, workdir: str | os.PathLike, *, steps: int, **options: Any
) -> Path:
    """Writes a pruned run at step 0, trains it on for some steps; returns its folder.

    Options are those of `loop.train`. If a killed or interrupted process has left this
    run in the folder, it is trained to its end.

    Raises:
      KeyboardInterrupt: If training is interrupted; the same call resumes it.
    """
    with checks.user_mistakes():
        checks.non_negative_integer("steps", steps)
    config = subject.config.replace(training=dict(steps=max(steps, 1)))
    folder = folders.Folder(checks.as_path(workdir))
    before, params = None, jax.device_get(subject.params)
    if steps:
        before = folders.read_config(folder)
    if before is None or before.to_json() != config.to_json():
        folders.write_run(workdir, config, params, subject.task)
    elif folders.start_of(folder) not in (None, folders.digest_of(params)):
        raise checks.ConfigError(
            f"{folder.root} holds a run that started from other parameters; choose "
            "another folder."
        )
    if steps:
        written = folders.read_config(folder)
        assert written is not None  # by this function or before
        if loop.train(written, folder.root, **options).interrupted:
            raise KeyboardInterrupt
    return folder.root
