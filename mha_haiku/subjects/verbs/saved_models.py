"""Saves a model: as a run to train further, or as a folder of weights."""

import os
from pathlib import Path
from typing import Any

import jax

from mha_haiku import interop
from mha_haiku.core import checks
from mha_haiku.subjects.subject import (
    RunSubject,
    Subject,
    check_parameters,
    refuse,
    verb,
)
from mha_haiku.training.runs import folders, loop


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

    By `loop.train`, with its options. If a killed or interrupted process has left this
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
