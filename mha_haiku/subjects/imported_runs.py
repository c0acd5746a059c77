"""Runs of pretrained models: config, tokenizer and a checkpoint of parameters.

Every study accepts such a run like one that was trained here. Its task follows from
the model's outputs:

  logits of the next token     language_model: loss and accuracy, can be trained on
  logits of hidden tokens      masked_language_model: the same
  no logits                    sentences: the drift of its mean-pooled outputs
"""

import os
from typing import Any

import jax
import numpy as np

from mha_haiku import interop
from mha_haiku.core import checks, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.training import tasks
from mha_haiku.training.runs import configuration, folders

# Lengths of examples, if the model has room; studies take longer on longer ones.
_LENGTHS = {"language_model": 128, "masked_language_model": 128, "sentences": 64}
_TOKENIZER = "tokenizer.json"  # in the run's folder
_IN_PYTHON = "mh.interop.load reads it in Python."


def write(
    source: str | os.PathLike,
    workdir: str | os.PathLike,
    *,
    sequence_length: int | None = None,
    path: str = "",
) -> folders.Run:
    """Makes a run of a pretrained model, in a folder that must not hold one.

    `source` is as in `interop.load`. Examples have `sequence_length` positions, by
    default 128 (64 of sentences), or fewer if the model has fewer, and are from the
    text at `path`, see `config.data.path`.
    """
    folders.check_free(workdir)  # before the work
    run = in_memory(
        interop.load(source), source, sequence_length=sequence_length, path=path
    )
    # Now, so that errors in a text show before anything is made.
    _ = run.task.held_out_data
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), run.params)
    folders.write_run(workdir, run.config, params, run.task)
    return run._replace(params=params)


def in_memory(
    imported: interop.Imported,
    source: str | os.PathLike,
    *,
    sequence_length: int | None = None,
    path: str = "",
) -> folders.Run:
    """Loads a pretrained model as a run at step 0; other arguments as in `write`."""
    name, sizes = _task_name(imported, source), interop.sizes_of(imported.params)
    most, length = imported.config.embedding.max_length, sequence_length
    if length is None:
        length = min(_LENGTHS[name], most)
    with checks.user_mistakes():
        checks.integer_in("sequence_length", length, 4, most)
    data: dict[str, Any] = dict(path=path, tokenizer=_TOKENIZER)
    data["vocabulary_size"] = sizes.num_tokens
    if name == "sentences":
        data["held_out_fraction"] = 0.5  # nothing trains on the other half
    config = configuration.default_config(name).replace(
        task=dict(sequence_length=length),
        data=data,
        model=imported.config,
        # For further training, from a good model and with large batches of tokens.
        optimizer=dict(learning_rate=2e-5, warmup_steps=10),
        training=dict(
            steps=100,
            batch_size=8,
            steps_per_dispatch=10,
            report_every=10,
            evaluate_every=50,
            evaluation_examples=256 if name == "sentences" else 32,
            checkpoint_every=50,
        ),
        attention=dict(examples=4),
    )
    assert imported.tokenizer is not None  # or `_task_name` has refused the model
    task = configuration.make_task(config, tasks.Kept(imported.tokenizer.to_json()))
    return folders.Run(config, task, imported.model, imported.params, 0)


def is_imported(config: configuration.RunConfig) -> bool:
    """Checks whether a run's config is of a pretrained model."""
    return getattr(config.data, "tokenizer", None) == _TOKENIZER


def most_positions(config: configuration.RunConfig) -> int | None:
    """Finds the number of positions of a run's model, or None if unlimited."""
    if is_imported(config):
        return config.model.embedding.max_length
    return models.max_length(config.model)


def _task_name(imported: interop.Imported, source: str | os.PathLike) -> str:
    """Finds the task of a model."""
    config, sizes = imported.config, interop.sizes_of(imported.params)
    if sizes.num_tokens is None:
        raise ConfigError(
            f"{source} reads features, such as patches of images: there is no task for "
            f"it.\n{_IN_PYTHON}"
        )
    if imported.tokenizer is None:
        raise ConfigError(
            f"{source} has no tokenizer, which turns a text into tokens.\n"
            f"Put its tokenizer.json next to it; {_IN_PYTHON}"
        )
    if not config.output.logits:
        return "sentences"
    if config.output.pool or sizes.num_classes != sizes.num_tokens:
        raise ConfigError(
            f"{source} gives {sizes.num_classes} classes: there is no task for it, as "
            f"their meaning is unknown.\n{_IN_PYTHON}"
        )
    if config.family == "causal":
        return "language_model"
    if imported.tokenizer.mask is None:
        raise ConfigError(
            f"{source} restores hidden tokens, and its tokenizer has no [MASK] that "
            f"hides them.\n{_IN_PYTHON}"
        )
    return "masked_language_model"
