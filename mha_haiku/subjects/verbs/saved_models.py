"""Saves a model: as a run to train further, or as a folder of weights."""

import functools
import logging
import os
from pathlib import Path
from typing import Any

import jax

from mha_haiku import interop
from mha_haiku.core import arrays, checks, models
from mha_haiku.interop import torch_modules
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects.subject import (
    RunSubject,
    Subject,
    check_parameters,
    parts_of,
    some_inputs,
    verb,
)
from mha_haiku.subjects.verbs import pruned_models
from mha_haiku.training.runs import folders, loop

_logger = logging.getLogger("mha_haiku")


@verb
def save(
    subject: Subject, folder: str | os.PathLike, *, own_layout: bool = False
) -> Path:
    """Writes the model as a folder that `mh.load` opens.

    `transformers` opens it too if the model was loaded or wrapped from there, with the
    tokenizer. Pruned heads are then written with weights of 0, unless a config.json can
    say that all layers have fewer heads; `own_layout=True` leaves them out, for
    `mh.load` alone.

    Of any other PyTorch module the file model.safetensors is its `state_dict`, for
    `load_state_dict`; of a function it has the parameters by their paths, "layer/w", as
    it has of any wrapped model with `own_layout=True`.

    Raises:
      ValueError: If the model has edits.
      ConfigError: If the folder holds files that `save` did not write.
    """
    check_parameters(subject, "save")
    if subject.model.config is None:
        return _save_wrapped(subject, checks.as_path(folder), own_layout)
    return interop.save(
        folder,
        subject.model.config,
        subject.params,
        tokenizer=getattr(subject.task, "encoder", subject.codec.tokenizer),
        own_layout=own_layout,
        num_classes=subject.model.num_classes,
    )


def _save_wrapped(subject: Subject, folder: Path, own_layout: bool) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise checks.ConfigError(f"{folder} must be a new or an empty folder.")
    module, params = subject.module, subject.params
    filled = None if own_layout else subject.filled
    whole = params if filled is None else filled(params)
    folder.mkdir(parents=True, exist_ok=True)
    if own_layout or module is None:
        name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        named = {name(x): y for x, y in jax.tree_util.tree_leaves_with_path(whole)}
        arrays.write_safetensors(folder / "model.safetensors", named)
        return folder
    if filled is not None and (smaller := _smaller(subject, module)) is not None:
        module, whole = smaller, params
    elif filled is not None:
        _logger.warning(
            "pruned heads are written with weights of 0, as this module has no fewer; "
            "own_layout=True leaves them out."
        )
    torch_modules.save(folder, module, whole, subject.codec.tokenizer)
    return folder


def _smaller(subject: Subject, module: Any) -> Any:
    """Makes the pruned model in PyTorch, if it computes the same; else None."""
    batch, params = some_inputs(subject), subject.params
    most = max(len(part.names) for part in parts_of(subject, batch))
    module = torch_modules.smaller(module, params, most)
    if module is None:
        return None
    # Groups of other sizes may have the same shapes.
    again = models.of_function(torch_modules.convert(module).function)
    one, other = (
        model_runs.run(x, params, batch).logits for x in (subject.model, again)
    )
    return module if pruned_models.are_close(one, other) else None


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
