"""The config of a run: what its fields may be, and how two of them differ.

Every mistake found here is a `ConfigError` that names the field by its whole path,
before anything compiles.
"""

import difflib
import json
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from mha_haiku import checks, models, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.runs import sharing


def _choice(*choices: str) -> Callable[[str, Any], Any]:
    return lambda name, value: checks.choice(name, value, choices)


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {value!r}.")
    return value


def _portion(name: str, value: Any) -> float:
    if checks.non_negative_number(name, value) > 1:
        raise ConfigError(f"{name} must be a number in [0, 1], got {value!r}.")
    return value


_SECTIONS = {
    "data": {
        "path": _text,
        "tokenizer": _choice("characters", "bpe"),
        "vocabulary_size": checks.positive_integer,
        "held_out_fraction": checks.fraction,
    },
    # `models.check` has the rest of these; None: it alone checks the field.
    "model": {
        "family": None,
        "num_layers": None,
        "num_heads": None,
        "num_key_value_heads": None,
        "model_size": None,
        "key_size": None,
        "hidden_size": None,
        "activation": None,
        "norm": None,
        "norm_epsilon": None,
        "norm_position": None,
        "positions": None,
        "max_length": None,
        "dropout_rate": None,
        "with_bias": _boolean,
        "qk_norm": _boolean,
        "precision": None,
        "rematerialize": _boolean,
        "scan_layers": _boolean,
        "smear_keys": _boolean,
        "kept_heads": None,
        "hidden_sizes": None,
        "attention": {"implementation": None},
    },
    "optimizer": {
        "learning_rate": checks.positive_number,
        "warmup_steps": checks.non_negative_integer,
        "final_learning_rate_fraction": _portion,
        "weight_decay": checks.non_negative_number,
        "b1": checks.fraction,
        "b2": checks.fraction,
        "clip_norm": _optional(checks.positive_number),
    },
    "training": {
        "steps": checks.positive_integer,
        "batch_size": checks.positive_integer,
        "steps_per_dispatch": checks.positive_integer,
        "report_every": checks.positive_integer,
        "evaluate_every": checks.positive_integer,
        "evaluation_examples": checks.positive_integer,
        "checkpoint_every": checks.positive_integer,
        "timeline_every": checks.non_negative_integer,
        "non_finite": _choice("abort", "skip"),
        "max_skips": checks.positive_integer,
        "tensorboard": _boolean,
    },
    "attention": {
        "examples": checks.positive_integer,
        "dtype": _choice("float16", "float32"),
        "full_length": checks.positive_integer,
        "pooled_size": checks.positive_integer,
    },
    "devices": {
        "data": _optional(checks.positive_integer),
        "heads": checks.positive_integer,
        "sequence": checks.positive_integer,
        "shard_parameters": _boolean,
    },
}
_OPTIONAL_SECTIONS = ("data",)


@checks.user_mistakes()
def validate(
    config: ml_collections.ConfigDict, *, num_devices: int | None = None
) -> None:
    """Checks every field of a config, alone and against the others.

    The task's own options are checked by `tasks.make`.

    Args:
      config: A whole config.
      num_devices: How many devices share a batch; None means this process's.

    Raises:
      ConfigError: At the first field that is missing, unknown or out of its range.
    """
    values = config.to_dict()
    required = [name for name in _SECTIONS if name not in _OPTIONAL_SECTIONS]
    _check_names(
        "config", values, ("seed", "task", *required), optional=_OPTIONAL_SECTIONS
    )
    checks.integer_in("config.seed", values["seed"], 0, 2**32 - 1)
    for section, fields in _SECTIONS.items():
        if section in values:
            _check_section(f"config.{section}", values[section], fields)
    _check_names("config.task", values["task"], ("name",), optional=None)
    checks.choice("config.task.name", values["task"]["name"], tasks.names())
    models.check(config.model)
    if config.optimizer.warmup_steps > config.training.steps:
        raise ConfigError(
            f"config.optimizer.warmup_steps must be at most config.training.steps "
            f"{config.training.steps}, got {config.optimizer.warmup_steps}."
        )
    sharing.shape(config, num_devices or jax.local_device_count())


def validate_for_task(config: ml_collections.ConfigDict, task: tasks.Task) -> None:
    """Checks that the model of a valid config suits the task.

    Raises:
      ConfigError: If the positions are too few, the devices cannot share them, or the
        model answers something else.
    """
    sharing.check_sequence(config, task.sequence_length)
    model = config.model
    if model.positions == "learned" and model.max_length < task.sequence_length:
        raise ConfigError(
            f"config.model.max_length must be at least the task's sequence length "
            f"{task.sequence_length} with learned positions, got {model.max_length}."
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    example = jax.eval_shape(task.example, key, task.train_data)
    is_set, wants_set = model.family == "set_classifier", example.targets.ndim == 0
    if is_set != wants_set:
        wanted = "'set_classifier'" if wants_set else "'encoder' or 'causal'"
        raise ConfigError(
            f"config.model.family must be {wanted} for the task {task.name!r}, "
            f"got {model.family!r}."
        )


def make_task(config: ml_collections.ConfigDict) -> tasks.Task:
    """Returns the task that `config.task` and `config.data` describe.

    Raises:
      ConfigError: If there is no such task, or it does not take these options.
    """
    options = config.task.to_dict()
    data = config.data.to_dict() if "data" in config else {}
    try:
        return tasks.make(**options, **data)
    except ConfigError as error:
        field = str(error).partition(" ")[0]
        sections = {"config.task": options, "config.data": data}
        paths = [path for path, fields in sections.items() if field in fields]
        raise ConfigError("".join(f"{path}." for path in paths) + str(error)) from None


def to_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the resolved values of a config as plain JSON values."""
    return json.loads(config.to_json_best_effort())


def difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns what changed between two configs (of `to_json`), a line per field.

    Lines read `config.training.steps: 100 -> 200`; a field that is only on one side
    reads `absent` on the other.
    """
    old, new = _flat("config", old), _flat("config", new)
    absent = object()
    lines = []
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name, absent), new.get(name, absent)
        if before != after:
            shown = ["absent" if x is absent else repr(x) for x in (before, after)]
            lines.append(f"{name}: {shown[0]} -> {shown[1]}")
    return lines


def _check_section(path, values, fields) -> None:
    """Checks the names and values of a section's fields, and of sections in it."""
    _check_names(path, values, fields)
    for field, check in fields.items():
        if isinstance(check, dict):
            _check_section(f"{path}.{field}", values[field], check)
        elif check is not None:
            check(f"{path}.{field}", values[field])


def _check_names(path, values, required, *, optional=()) -> None:
    """Checks the names of a section's fields; `optional` None allows any others."""
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a section of fields, got {values!r}.")
    known = (*required, *(optional or ()))
    missing = [name for name in required if name not in values]
    unknown = [name for name in values if name not in known]
    if unknown and optional is not None:
        candidates = missing or known
        suggestion = checks.nearest(unknown[0], candidates)
        raise ConfigError(f"{path} has no field {unknown[0]!r}.{suggestion}")
    if missing:
        near = difflib.get_close_matches(missing[0], unknown, n=1)
        suggestion = f" Is it {near[0]!r}?" if near else ""
        raise ConfigError(f"{path}.{missing[0]} is missing.{suggestion}")


def _flat(path, values) -> dict[str, Any]:
    if not isinstance(values, dict):
        return {path: values}
    flat = {}
    for name, value in values.items():
        flat.update(_flat(f"{path}.{name}", value))
    return flat
