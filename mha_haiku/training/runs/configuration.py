"""The config of a run: its fields, their checks, and the difference of two configs.

Every mistake found here is a `ConfigError` that names the field by its whole path,
before anything compiles.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax

from mha_haiku.core import attention, checks, fields, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.fields import Field, OneOf, Section, field
from mha_haiku.core.models import ModelConfig
from mha_haiku.training import devices, tasks
from mha_haiku.training.optimizers import OptimizerConfig

_STEPS = fields.integer(1, 2**31 - 1)
_COUNT = fields.integer(1, 2**24)
_PARTS = fields.integer(1, 2**20)
# Fields of earlier versions that do not matter to a run that has begun, and values of
# others that mean the same as no such field.
_IDLE = ("init_from", "devices.data", "training.tensorboard", "training.samples")
_IDLE += ("training.non_finite", "training.max_skips", "model.rematerialize")
_IDLE += ("training.timeline_every",)
_NEUTRAL = {"training.seeds": 1} | {f"model.{x}": y for x, y in models.GONE.items()}


class TrainingConfig(Section, path="config.training"):
    """The length of a run, and what the run reports and stores."""

    steps: int = field(400, "training steps of the whole run", _STEPS)
    batch_size: int = field(128, "examples of a step, over all devices", _COUNT)
    steps_per_dispatch: int = field(
        50, "maximum number of steps in one call of the compiled program", _COUNT
    )
    report_every: int = field(50, "steps between reports", _STEPS)
    evaluate_every: int = field(200, "steps between evaluations", _STEPS)
    evaluation_examples: int = field(1024, "held-out examples per evaluation", _COUNT)
    checkpoint_every: int = field(200, "steps between checkpoints", _STEPS)


class SavedMapsConfig(Section, path="config.attention"):
    """The attention maps that are saved; see `verbs.dumps`."""

    examples: int = field(8, "held-out examples whose maps are saved", _COUNT)
    dtype: str = field(
        "float16", "number format of saved maps", OneOf(("float16", "float32"))
    )
    full_length: int = field(
        256, "longest input whose maps are saved whole; longer ones are pooled", _COUNT
    )
    pooled_size: int = field(
        128, "rows and columns of a pooled map", fields.integer(1, 2**14)
    )
    record_every: int = field(
        0,
        "steps between records of what heads do; 0 for none",
        fields.integer(0, 2**31 - 1),
    )


class DevicesConfig(Section, path="config.devices"):
    """The division of a run's work over devices.

    The batch is divided into as many parts as heads and sequence leave devices.
    """

    heads: int = field(1, "parts that heads and hidden units are divided into", _PARTS)
    sequence: int = field(1, "parts that positions are divided into", _PARTS)
    shard_parameters: bool = field(
        False, "whether parameters and optimizer state are divided over data as well"
    )


class RunConfig(Section, path="config"):
    """The config of a run; `task` and `data` have the options of its task."""

    seed: int = field(
        0, "seed of all random numbers of the run", fields.integer(0, 2**32 - 1)
    )
    if TYPE_CHECKING:  # whose fields are known only at run time
        task: Any
        data: Any
    else:
        task: Section
        data: Section
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    attention: SavedMapsConfig = SavedMapsConfig()
    devices: DevicesConfig = DevicesConfig()

    def __post_init__(self):
        super().__post_init__()
        models.check(self.model)

    def replace(self, **changes: Any) -> Self:
        """Makes a config with other values; see `Section.replace`.

        If `task` names another task, options that both tasks have keep their values,
        and the others get their defaults.

        Raises:
          ConfigError: If there is no such field or task, or it does not take the value.
        """
        task = changes.get("task")
        name = task.get("name") if isinstance(task, Mapping) else None
        if name in (None, self.task.name):
            return super().replace(**changes)
        for key, section in _sections(name).items():
            before = vars(getattr(self, key)).items()
            kept = {option: value for option, value in before if option in section}
            changes[key] = section.replace(**{**kept, **changes.get(key, {})})
        return super().replace(**changes)

    def to_json(self) -> dict[str, Any]:
        """Returns all values; without a model that they do not describe."""
        values = super().to_json()
        is_wrapped = self.task.name == tasks.Wrapped.name
        return {x: y for x, y in values.items() if x != "model" or not is_wrapped}


def default_config(task: str | tasks.Task = "reverse") -> RunConfig:
    """Makes the config of a run with the default of every field.

    The task is one of `tasks.names()`, or the file and class of your own task, as
    "mine.py:MyTask"; or a task, for which the model gets enough positions.

    Raises:
      ConfigError: If there is no task of that name.
      TypeError: If `task` is neither a name nor an instance of a task's dataclass.

    Example:
      >>> config = mh.runs.default_config("induction")
      >>> config = config.replace(seed=1, training=dict(steps=100))
      >>> config.seed, config.training.steps, config.model.family
      (1, 100, 'causal')
    """
    name = task if isinstance(task, str) else _registered(task)
    model = ModelConfig().replace(**fields.nested(tasks.model_defaults(name)))
    config = RunConfig(**_sections(name), model=model)
    if isinstance(task, str):
        return config
    lengths = task.sequence_length, task.target_length or 0
    most = max(config.model.embedding.max_length, *lengths)
    config = with_task(config, task)
    return config.replace(model=dict(embedding=dict(max_length=most)))


def with_task(config: RunConfig, task: tasks.Task) -> RunConfig:
    """Returns a config that describes a task, whose class it registers."""
    sections = _sections(_registered(task))
    changes = {}
    for key, section in sections.items():
        options = {x: getattr(task, x) for x in vars(section) if x != "name"}
        changes[key] = section.replace(**options)
    return config.replace(**changes)


def _sections(task_name: str) -> dict[str, Any]:
    options = tasks.options(task_name)
    name = Field("", "task to learn", lambda _, value: tasks.options(value), str)
    task = {"name": name, **options["task"]}
    return {
        "task": fields.section_of("TaskConfig", "config.task", task)(name=task_name),
        "data": fields.section_of("DataConfig", "config.data", options["data"])(),
    }


def _registered(task: Any) -> str:
    if not isinstance(task, tasks.Task) or not dataclasses.is_dataclass(task):
        what = f"the class {task.__name__}" if isinstance(task, type) else type(task)
        raise TypeError(
            f"task must be a mha_haiku.tasks.Task and a dataclass, got {what}."
        )
    return tasks.register(type(task))


def validate_for_task(config: RunConfig, task: tasks.Task) -> None:
    """Raises ConfigError unless the model and devices of a valid config suit a task."""
    model = config.model
    check_sequence(config.devices, task.sequence_length)
    check_length(model, task)
    if "loss" not in task.metrics:
        raise ConfigError(
            "config.task.name must be of a task with targets to train, and "
            f"{task.name!r} has none.\nIts runs serve the studies of heads."
        )
    if not model.output.logits:
        raise ConfigError(
            "config.model.output.logits must be True to train: the loss is of logits."
        )
    is_own = config.task.name not in tasks.names()
    example = tasks.check(config.task.name, task, is_own=is_own)
    _check_kind(model, task, example)


def check_length(model: ModelConfig, task: tasks.Task) -> None:
    """Raises ConfigError if the model has fewer positions than a task's examples."""
    most = models.max_length(model)
    length = max(task.sequence_length, task.target_length or 0)
    if most is not None and most < length:
        raise ConfigError(
            "config.model.embedding.max_length must be at least the task's sequence "
            f"length {length} with {model.embedding.positions} positions, got "
            f"{most}."
        )


def _check_kind(model: ModelConfig, task: tasks.Task, example: tasks.Example) -> None:
    """Checks that the model fits the inputs and the targets of the task."""
    families, pools, why = ("encoder", "causal"), (None,), ""
    if task.labels_whole:
        pools = ("first", "mean") if model.family == "encoder" else ("mean",)
    elif example.targets.ndim == 0:  # one of the inputs is the answer
        families = ("set_classifier",)
    elif task.continues:
        families = ("causal",)
        why = "\nIts targets are the next inputs, which another family sees."
    elif example.decoder_inputs is not None:
        families = ("encoder_decoder",)
    for name, value, valid in (
        ("family", model.family, families),
        ("output.pool", model.output.pool, pools),
    ):
        if value not in valid:
            raise ConfigError(
                f"config.model.{name} must be {' or '.join(map(repr, valid))} for the "
                f"task {task.name!r}, got {value!r}.{why}"
            )


def make_placement(
    config: RunConfig,
    available: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
) -> devices.Placement:
    """Makes the placement of a run; raises what `check_devices` raises."""
    shared = config.devices
    check_devices(shared, config.model, config.training, len(available))
    if shared.heads * shared.sequence == 1 and not shared.shard_parameters:
        return devices.Replicas(available)
    mesh = devices.make_mesh(available, heads=shared.heads, sequence=shared.sequence)
    return devices.Sharded(mesh, shard_parameters=shared.shard_parameters)


def check_devices(
    shared: DevicesConfig,
    model: ModelConfig,
    training: TrainingConfig,
    num_devices: int,
) -> None:
    """Raises ConfigError unless `num_devices` devices can share the work of a run."""
    heads, sequence = shared.heads, shared.sequence
    data, rest = divmod(num_devices, heads * sequence)
    if rest:
        raise ConfigError(
            f"config.devices.heads {heads} x sequence {sequence} must divide the "
            f"{num_devices} available devices."
        )
    if sequence > 1 and model.family == "encoder_decoder":
        raise ConfigError(
            "config.devices.sequence must be 1 for an encoder_decoder, whose queries "
            "and keys are in sequences of two lengths."
        )
    if sequence > 1:
        with checks.user_mistakes():
            checks.choice(
                "config.model.attention.implementation with config.devices.sequence",
                model.attention.implementation,
                attention.IN_A_RING,
            )
    counts = [(x, "hidden units") for x in models.hidden_sizes(model)]
    for layer in models.heads_of_layers(model):
        counts.append((len(layer.names), f"heads of {layer.label}"))
        if layer.names and layer.groups is None:
            count = layer.num_key_value_heads
            counts.append((count, f"key/value heads of {layer.label}"))
    for count, what in counts:
        if count % heads:
            raise ConfigError(
                f"config.devices.heads must divide the {count} {what}, got {heads}."
            )
    if training.batch_size % data:
        raise ConfigError(
            f"config.training.batch_size must be a multiple of the {data} devices that "
            f"share it, got {training.batch_size}."
        )


def check_sequence(shared: DevicesConfig, length: int) -> None:
    """Raises ConfigError if the devices cannot share T = `length` positions."""
    if length % shared.sequence:
        raise ConfigError(
            f"config.devices.sequence must divide the {length} positions of an "
            f"example, got {shared.sequence}."
        )


def make_task(config: RunConfig, kept: tasks.Kept | None = None) -> tasks.Task:
    """Makes the task of `config.task` and `config.data`; errors name the field."""
    options = vars(config.task) | vars(config.data)
    try:
        for section in (config.task, config.data):
            fields.check_needed(section)
        return tasks.make(**options, kept=kept)
    except ConfigError as error:
        name = str(error).partition(" ")[0]
        path = "config.task." if name in config.task else ""
        path = "config.data." if name in config.data else path
        raise ConfigError(path + str(error)) from None


def task_name(values: Any) -> str:
    """Reads `config.task.name` in values from `RunConfig.to_json`."""
    section = values.get("task") if isinstance(values, dict) else None
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str):
        raise ConfigError("config.task.name is missing.")
    return name


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Makes paths of data and of a task's file absolute, for a run's folder.

    So the run opens from any working directory.
    """
    changes = {
        name.removeprefix("config."): os.path.abspath(os.path.expanduser(path))
        for name, field_, path in fields.flat(config)
        if field_.is_path and path
    }
    file, colon, class_name = config.task.name.rpartition(":")
    if file:
        changes["task.name"] = f"{os.path.abspath(file)}{colon}{class_name}"
    return config.replace(**fields.nested(changes)) if changes else config


def of_json(values: dict[str, Any]) -> RunConfig:
    """Returns the config of values from `to_json`; missing ones get their defaults."""
    flat = fields.flattened(values)
    for name in list(flat):
        is_neutral = name in _NEUTRAL and flat[name] == _NEUTRAL[name]
        if name in _IDLE or is_neutral:
            del flat[name]
    config = default_config(task_name(values)).replace(**fields.nested(flat))
    return with_absolute_paths(config)


def difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compares two configs as JSON, a line per field that differs.

    Lines read `config.training.steps: 100 -> 200`; a field that is only on one side
    reads `absent` on the other.
    """
    old, new = (fields.flattened(values, "config.") for values in (old, new))
    lines = []
    for name in old | new:
        if name not in old or name not in new or old[name] != new[name]:
            sides = [repr(x[name]) if name in x else "absent" for x in (old, new)]
            lines.append(f"{name}: {' -> '.join(sides)}")
    return lines
