"""Shared by verbs: programs, batches of held-out examples, devices and metrics.

Each function takes the `Subject` that it works for. B batch, N examples, T positions.
"""

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, checks, masks, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects import conversion, example_rows
from mha_haiku.subjects.subject import (
    Part,
    RunSubject,
    Subject,
    check_task,
    has_task,
    refuse,
)
from mha_haiku.training import devices, evaluation, tasks
from mha_haiku.training.runs import configuration, folders

METRICS = ("loss", "accuracy", "exact_match", "drift")
ABLATION_VALUES = ("zero", "mean", "resample")

_BATCH_POSITIONS = 2**12  # of all examples in a batch
_MOST_EXAMPLES = 2**31 - 1  # an index is an int32
_SEEN = 1e-3  # of a query's weights, on later keys: more than rounding

AnySubject = TypeVar("AnySubject", bound=Subject)


def silent(iterable: Any, **_: Any) -> Any:
    """Returns an iterable unchanged: the progress that shows none."""
    return iterable


def compact(subject: AnySubject) -> AnySubject:
    """Scans the layers of the subject's model, where they are many and alike."""
    model, params = model_runs.compact(subject.model, subject.params)
    if subject.config is None or model is subject.model:
        return subject
    config = subject.config.replace(model=dict(scan_layers=True))
    return subject.replace(config=config, model=model, params=params)


def placed(
    subject: AnySubject,
    available: Sequence[jax.Device]  # pyright: ignore[reportInvalidTypeForm]
    | None = None,
    *,
    length: int | None = None,
) -> AnySubject:
    """Spreads model and parameters over devices, by default over all.

    Heads and positions are split as the config says, if the number of devices allows;
    else each device has the whole model and a part of the examples. Examples have
    `length` positions, by default the task's. A subject without a config is unchanged.
    """
    available = list(available or jax.devices())
    if len(available) == 1 or subject.config is None or subject.task is None:
        return subject
    length = subject.task.sequence_length if length is None else length
    config = subject.config
    split = {x: getattr(config.devices, x) for x in ("heads", "sequence")}
    try:
        sections = config.devices, config.model, config.training
        configuration.check_devices(*sections, len(available))
        configuration.check_sequence(config.devices, length)
    except ConfigError:
        split = {"heads": 1, "sequence": 1}
    mesh = devices.make_mesh(available, **split)
    shared = devices.Sharded(mesh)
    model = folders.make_model(subject.config.model, subject.task, shared)
    model = model.edited(*subject.model.edits)
    params = shared.put_state(subject.params)
    return subject.replace(model=model, params=params, placement=shared)


def once(subject: Subject, key: Hashable, make: Callable[[], Any]) -> Any:
    """Calls `make` once for the run's model and a key."""
    key = subject.model, subject.placement, key
    if key not in subject.cache:
        subject.cache[key] = make()
    return subject.cache[key]


def program(subject: Subject, function: Callable) -> Callable:
    """Compiles the function; its results are on all devices."""
    placement = subject.placement
    if placement is None:
        return model_runs.jit(function)
    return placement.program(function, num_scalars=0, returns_state=False)


def whole_batch(subject: Subject, count: int) -> int:
    """Rounds `count` up to a number of examples that devices can split."""
    placement = subject.placement
    parts = 1 if placement is None else placement.mesh.shape["data"]
    return -(-count // parts) * parts


def spread(subject: Subject, example: tasks.Example) -> tasks.Example:
    """Splits a batch (of `whole_batch` size) over devices; in a program."""
    placement = subject.placement
    return example if placement is None else placement.spread(example)


def marks(subject: Subject) -> model_runs.Marks:
    """Lists the special tokens of which there are roles, if they are known."""
    encoder = getattr(subject.task, "encoder", None)
    ends = () if encoder is None else tuple(encoder.after)
    return ends, subject.codec.image_tokens


def observed(
    subject: Subject,
    params: Any,
    example: tasks.Example,
    function: Callable[..., Any],
    parts: Sequence[Part],
) -> tuple[models.Output, list[Any]]:
    """Computes the output on a batch, and a function of the maps of some parts.

    Call it inside a program. The function of a map and the kind of its layer runs where
    the map is made, so that no map outlives its layer.
    """
    at = {f"{x.path}/map": functools.partial(function, kind=x.kind) for x in parts}
    model = subject.model
    if model.config and len(parts) == len(models.heads_of_layers(model.config)):
        # Of scanned layers all at once.
        at = model_runs.by_kind(function, model)
    output, values = model_runs.look(model, params, example, at)
    return output, [values[f"{x.path}/map".removeprefix("/")] for x in parts]


def held_out(subject: RunSubject, indices: Sequence[int]) -> tasks.Example:
    """Makes the held-out examples of these indices, split over devices."""
    task, seed, placement = subject.task, subject.config.seed, subject.placement

    def make():
        def of_indices(data: Any, indices: jax.Array) -> tasks.Example:
            batch = evaluation.held_out_batch(task, seed, data, indices)
            return spread(subject, batch)

        data = task.held_out_data
        data = data if placement is None else placement.put(data)
        return data, jax.jit(of_indices)

    # Runs of several seeds may share a model, and so its programs.
    data, program = once(subject, ("held_out", seed, id(task)), make)
    places = np.asarray(indices, np.int32)
    return program(data, places if placement is None else placement.put(places))


def batch_size(
    subject: RunSubject, examples: int, positions: int = _BATCH_POSITIONS
) -> int:
    """Finds how many of `examples` fit a batch of at most `positions`."""
    task = subject.task
    most = max(1, positions // max(task.sequence_length, task.target_length or 0))
    return whole_batch(subject, min(examples, most))


def batches_of(
    subject: Subject,
    examples: Any,
    *,
    targets: bool = True,
    metric: str | None = None,
    name: str = "",
) -> "Sequence[tasks.Example] | Batches":
    """Makes the batches of `batches_given`, or whole batches of held-out examples.

    With a name held-out batches show a bar.
    """
    batches = batches_given(subject, examples, targets=targets, metric=metric)
    if batches is not None:
        return batches
    subject = check_task(subject, "measuring")
    return Batches(subject, examples, batch_size(subject, examples), name)


def batches_given(
    subject: Subject, examples: Any, *, targets: bool = True, metric: str | None = None
) -> Sequence[tasks.Example] | None:
    """Makes batches of the examples, or None for held-out examples of a task.

    `examples` are inputs, such as texts, or a number: of the task's held-out examples,
    or of a wrapped function's examples, which are taken in order, or all if there are
    fewer. With `targets`, inputs get the next tokens as targets, which every metric of
    a task but the drift needs, and the loss of a function; another metric may read them
    where there are any.
    """
    if not isinstance(examples, numbers.Number):
        # A wrapped function may compute a loss without them.
        needs = targets and subject.task is not None
        needs = needs and metric_name(subject, metric) != "drift"
        options = {"targets": targets, "required": needs}
        return conversion.batches(subject, examples, **options)
    with checks.user_mistakes():
        count = checks.integer_in("examples", examples, 1, _MOST_EXAMPLES)
    if subject.batches:
        return example_rows.first(subject.batches, count)
    if subject.task is None:
        why = "has no examples; give texts, examples=[...], or pass them to mh.wrap"
        refuse(subject, "measuring", why)
    return None


def is_of_loss(subject: Subject) -> bool:
    """Checks whether the metric is the loss, which needs targets."""
    return subject.metric in (None, heads.metrics.loss)


def measured(
    subject: Subject, examples: Any, *, metric: str | None = None, name: str = ""
) -> heads.Measured:
    """Makes the argument of the measures of `mh.heads`, with a metric by its name.

    Examples are as in `batches_of`. A wrapped function has its own metric.
    """
    model, params = subject.model, subject.params
    metric = metric_name(subject, metric)
    batches = batches_of(subject, examples, metric=metric, name=name)
    if metric is None or not has_task(subject):
        own = subject.metric or heads.metrics.loss
        if own is heads.metrics.loss:
            own = heads.metrics.Loss(targets_of(subject, next(iter(batches))))
        return heads.Measured(model, own, params, batches)
    if metric == "drift":
        return heads.measured_by_drift(model, params, batches)
    function = {
        "loss": heads.metrics.Loss(targets_of(subject, None)),
        "accuracy": heads.metrics.mistakes(subject.task.correct),
        "exact_match": heads.metrics.failures(subject.task.correct),
    }[metric]
    return heads.Measured(model, function, params, batches)


def targets_of(subject: Subject, batch: Any) -> str:
    """Says what the targets are; ValueError if there are none that can be learned.

    Next tokens are refused where the model sees them. A task knows without a batch.
    """
    if has_task(subject):
        return "the next token" if subject.task.continues else "the targets"
    counted = np.asarray(batch.weights) > 0
    if not counted.any():
        why = "has examples without targets; give labels, or pass metric= to mh.wrap"
        refuse(subject, "the loss", why)
    tokens, targets = np.asarray(batch.inputs), np.asarray(batch.targets)
    if batch.decoder_inputs is not None or tokens.shape != targets.shape:
        return "the target" if batch.decoder_inputs is not None else "the labels"
    are_next = np.where(counted[:, :-1], tokens[:, 1:] == targets[:, :-1], True).all()
    if are_next and _sees_next(subject, batch):
        refuse(
            subject,
            "the loss of the next token",
            "sees it: its attention is not causal.\nGive labels, as "
            'examples={"input_ids": ..., "labels": ...}, or pass mask_probability=0.15 '
            "or metric= to mh.wrap",
        )
    if are_next:
        return "the next token"
    return "hidden tokens" if subject.codec.mask_probability else "the labels"


def with_loss(subject: Subject, batch: tasks.Example) -> tuple[models.Model, str]:
    """Returns a wrapped model with the loss to train on, and the name of this.

    This is the subject's metric, the loss that a module itself computes from the batch,
    or the cross-entropy of the targets.
    """
    metric = subject.metric or heads.metrics.loss
    if metric is heads.metrics.loss:
        run = functools.partial(model_runs.run, subject.model)
        if jax.eval_shape(run, subject.params, batch).loss is not None:
            model = subject.model._replace(loss=lambda x, _: x.loss)
            return model, "loss that the module computes, nats"
        metric = heads.metrics.Loss(targets_of(subject, batch))
    model = subject.model._replace(loss=lambda x, batch: metric(x.logits, batch))
    return model, ", ".join(heads.metrics.named(metric))


def _sees_next(subject: Subject, batch: tasks.Example) -> bool:
    """Checks whether a map gives weight to keys after the query."""
    shares = _later(subject.model)(subject.params, batch)
    return max(map(float, shares.values()), default=0.0) > _SEEN


@model_runs.compiled
def _later(
    model: models.Model, params: Any, batch: tasks.Example
) -> dict[str, jax.Array]:
    """Computes the largest share of a query's weights on later keys, per map."""
    size, counted = np.shape(batch.inputs)[1], jnp.asarray(batch.weights)[:, None] > 0

    def later(map_: attention.AttentionMap, kind: str) -> jax.Array:
        is_own = model_runs.reads_tokens(kind) and map_.shape[-2:] == (size, size)
        if not is_own or not map_.shape[-3]:
            return jnp.zeros(())
        map_ = model_runs.without_padding(map_, model, batch, "")
        mask = map_.weighting.mask & masks.causal()
        causal = dataclasses.replace(map_, weighting=map_.weighting._replace(mask=mask))
        # Parts of a picture may see each other: they predict no token.
        return jnp.where(counted, map_.row_sums() - causal.row_sums(), 0).max()

    at = model_runs.by_kind(later, model, params, batch)
    return model_runs.look(model, params, batch, at, strict=False)[1]


def metric_name(subject: Subject, name: str | None = None) -> str | None:
    """Finds the name of a metric that the task has, by default the task's first.

    It is "loss", "accuracy" for the share of wrong answers, "exact_match" for the share
    of examples with a wrong answer, or "drift". A model without a task has none.
    """
    if subject.task is None:
        if name is not None:
            refuse(subject, f"metric {name!r}", "has its own metric")
        return None
    task = subject.task
    names = (*task.metrics, *(["exact_match"] if task.counts_exact else []))
    with checks.user_mistakes():
        checks.choice("metric", name or names[0], METRICS)
    if name and name not in names:
        raise ConfigError(
            f"metric must be {' or '.join(names)} for the task {task.name}, which "
            f"has no {'whole answers' if 'loss' in names else 'targets'}, got "
            f"{name!r}."
        )
    return name or names[0]


def ablation_value(subject: Subject, name: str, examples: Any) -> heads.AblationValue:
    """Returns an ablation value by its name; a mean is over the examples."""
    with checks.user_mistakes():
        checks.choice("ablation_value", name, ABLATION_VALUES)
    if name == "mean":
        batches = batches_of(subject, examples, targets=False, name="means of heads")
        return heads.ablation_values.mean(subject.model, subject.params, batches)
    return getattr(heads.ablation_values, name)


def observations(
    subject: RunSubject,
    observe: Callable[[Any, Any], Any],
    indices: Sequence[int],
    *,
    batch_size: int,
    name: str,
    examples_at: Callable[[Sequence[int]], Any] | None = None,
) -> Iterator[Any]:
    """Yields the results of a program on examples, per batch, on the host.

    The program `observe` takes parameters and a batch, which `examples_at` makes from
    indices, by default as `held_out` does; its arrays are `[B, ...]`. All batches have
    one size: the last is filled up by repeating its last example, and the repetitions
    are dropped from the result.
    """
    examples_at = examples_at or functools.partial(held_out, subject)
    starts = range(0, len(indices), batch_size)
    for start in subject.progress(starts, name=name, unit="batch"):
        batch = list(indices[start : start + batch_size])
        filled = batch + batch[-1:] * (batch_size - len(batch))
        results = jax.device_get(observe(subject.params, examples_at(filled)))
        yield jax.tree.map(operator.itemgetter(slice(len(batch))), results)


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Batches of held-out examples that can be iterated over more than once."""

    subject: RunSubject
    examples: int  # at least
    size: int
    name: str = ""  # of the progress bar; "": there is none

    def __len__(self) -> int:
        return -(-self.examples // self.size)

    def __iter__(self) -> Iterator[tasks.Example]:
        numbers = range(len(self))
        if self.name:
            numbers = self.subject.progress(numbers, name=self.name, unit="batch")
        for i in numbers:
            yield held_out(self.subject, range(i * self.size, (i + 1) * self.size))
