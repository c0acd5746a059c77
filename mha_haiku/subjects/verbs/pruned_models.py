"""Removes the heads that a model needs least, for good.

The number of heads is a share, or as few as a tolerance allows. In our models the
names of parameters tell what goes with a head, in a wrapped model their gradients.

L layers, H heads of a layer.
"""

import functools
import numbers
import timeit
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks
from mha_haiku.lab import heads
from mha_haiku.lab.heads import model_runs, parameter_slices, pruning
from mha_haiku.subjects import computation
from mha_haiku.subjects.subject import (
    Subject,
    check_parameters,
    check_task,
    has_task,
    parts_of,
    refuse,
    some_inputs,
    verb,
)
from mha_haiku.subjects.verbs import quality
from mha_haiku.training import tasks
from mha_haiku.training.runs import folders

ORDERS = (*heads.MEASURES, "greedy", "random")
ORDER, ABLATION_VALUE = "ablation", "zero"  # unless a user says otherwise
EXAMPLES = 256  # held-out, which determine the order of heads
_ROUNDING = 1e-6  # of a mean metric
# Heads that a step of the greedy order tries at a time: what one program measures.
_TRIES = 16

Keep = list[list[int]]


@verb
def prune(
    subject: Subject,
    keep: float | Sequence[Sequence[int]] | Sequence[Sequence[bool]] | None = None,
    *,
    metric_drop: float | None = None,
    order: str = ORDER,
    ablation_value: str = ABLATION_VALUE,
    examples: Any = EXAMPLES,
) -> Subject:
    """Removes the heads that a model needs least, for good.

    Args:
      subject: The model.
      keep: Share of the heads to keep, in [0, 1]; or the heads to keep, by layer.
        Default: 0.5, unless `metric_drop` is set.
      metric_drop: Tolerated fall of held-out accuracy (exact match, where answers are
        sequences), or rise of the drift or of a wrapped model's metric, in [0, 1]: as
        few heads as it allows are kept.
      order: Order of removal: greedy, random, or a measure of mh.heads.MEASURES.
      ablation_value: Output of ablated heads while the order is found: zero, mean,
        resample.
      examples: Number of held-out examples that determine the order; or the examples
        of a wrapped model, such as texts.

    A wrapped model loses the parameters that act through the removed heads alone. It is
    compared with the model with these heads ablated on its first examples; its `repr`
    has its size and time.

    Raises:
      ValueError: If an option is out of its range, or has no effect as `keep` lists the
        heads; or the model has edits, or heads that share their parameters.
    """
    if keep is None and metric_drop is None:
        keep = 0.5
    how: Any = keep, metric_drop, order, ablation_value, examples
    if isinstance(keep, numbers.Real | None):
        return shrunk(subject, "prune", 1, *how)[-1]
    with checks.user_mistakes():
        _check(*how)
        defaults = {"order": ORDER, "ablation_value": ABLATION_VALUE}
        for name, x in {"order": order, "ablation_value": ablation_value}.items():
            if x != defaults[name]:
                why = "must be left out where keep lists the heads"
                raise ValueError(f"{name} {why}, got {x!r}.")
    return without_heads(subject, how[0])


def _check(
    keep: float | Sequence[Sequence[int]] | None,
    metric_drop: float | None,
    order: str,
    ablation_value: str,
    examples: Any,
) -> None:
    """Raises ValueError for wrong options, whatever heads to keep are given by."""
    if keep is not None and metric_drop is not None:
        raise ValueError("keep and metric_drop must not be given together.")
    if np.isscalar(examples):
        checks.positive_integer("examples", examples)
    checks.choice("order", order, ORDERS)
    checks.choice("ablation_value", ablation_value, computation.ABLATION_VALUES)


@checks.user_mistakes()
def shrunk(
    subject: Subject,
    verb_name: str,
    sizes: int,
    keep: float | None,
    metric_drop: float | None,
    order: str,
    ablation_value: str,
    examples: Any,
) -> list[Any]:
    """Makes models of `sizes` falling sizes, after the whole one; see `prune`."""
    if subject.model.config is not None:
        subject = check_task(subject, verb_name)
    check_parameters(subject, verb_name)
    _check(keep, metric_drop, order, ablation_value, examples)
    for name, value in {"keep": keep, "metric_drop": metric_drop}.items():
        if value is not None:
            checks.share(name, value)
    worst = None
    if metric_drop is not None and decisive(subject.task) in (None, "drift"):
        # Order and end are measured on different examples: leave some room.
        worst = 1.5 * metric_drop
    ranked = order_of(
        subject, order, ablation_value=ablation_value, examples=examples, worst=worst
    )
    fewest = 0 if keep is None else round(keep * len(ranked))
    if metric_drop is not None:
        fewest = _fewest(subject, ranked, metric_drop, examples)
    shares = np.linspace(fewest, len(ranked), sizes + 1)
    counts = sorted({round(share) for share in shares}, reverse=True)
    return [without_heads(subject, kept_after(subject, ranked, x)) for x in counts]


def order_of(
    subject: Subject,
    by: str,
    *,
    ablation_value: str,
    examples: Any,
    worst: float | None = None,
) -> list[tuple[int, int]]:
    """Orders the heads, (layer, index in the layer), by removal.

    The order is one of `ORDERS`, on some held-out examples. The greedy order may stop
    at the `worst` mean metric: the remaining heads are last, in no particular order.
    """
    if by == "random":
        places = all_heads(subject)
        seed = subject.config.seed if subject.config else 0
        generator = np.random.default_rng(seed)
        return [places[i] for i in generator.permutation(len(places))]
    value = computation.ablation_value(subject, ablation_value, examples)
    if by == "greedy":
        steps = heads.greedy_order(
            computation.measured(subject, examples),
            ablation_value=value,
            worst=worst,
            tries=_TRIES,
            progress=functools.partial(
                subject.progress, name="greedy order", unit="head"
            ),
        )
        first = [step.head for step in steps]
        return first + [head for head in all_heads(subject) if head not in first]
    of = computation.measured(subject, examples, name=by)
    with checks.user_mistakes():  # the drift has no gradient
        return heads.order(heads.MEASURES[by].measure(of, ablation_value=value).mean)


def all_heads(subject: Subject) -> list[tuple[int, int]]:
    """Lists the heads, (layer, index in the layer)."""
    parts = enumerate(parts_of(subject))
    return [(i, place) for i, x in parts for place in range(len(x.names))]


def ablated_in_order(
    subject: Subject,
    order: Sequence[tuple[int, int]],
    counts: Sequence[int],
    examples: Any = None,
) -> list[float]:
    """Measures the `decisive` metric with the last heads of an order, by their number.

    The order is from `order_of`. A wrapped model has its own metric, and `examples`.
    """
    metric = decisive(subject.task)
    if has_task(subject):
        examples = subject.config.training.evaluation_examples
    of = computation.measured(subject, examples, metric=metric, name="heads ablated")
    (values,) = ablated(of, [order], [len(order) - count for count in counts])
    return (values if metric in (None, "drift") else 1 - values).tolist()


def ablated(
    of: heads.Measured,
    orders: Sequence[Sequence[tuple[int, int]]],
    counts: Sequence[int],
) -> np.ndarray:
    """Measures the mean metric `[orders, counts]` with the first heads ablated.

    Orders are of (layer, index in the layer).
    """
    heads_of = model_runs.num_heads(of.model, of.params, next(iter(of.batches)))
    shape = len(heads_of), max(heads_of)
    gates = np.ones((len(orders), len(counts), *shape), np.float32)
    for patterns, order in zip(gates, orders, strict=True):
        for pattern, count in zip(patterns, counts, strict=True):
            for head in order[:count]:
                pattern[tuple(head)] = 0
    values = heads.gated_metric(of, gates.reshape(-1, *shape)).mean(0)
    return values.reshape(gates.shape[:2])


def decisive(task: tasks.Task | None) -> str | None:
    """Names the metric of pruned models that is drawn and that may fall or rise.

    None without a task: a wrapped model has its own.
    """
    if task is None:
        return None
    if "loss" not in task.metrics:
        return "drift"
    return "exact_match" if task.counts_exact else "accuracy"


def kept_after(subject: Subject, order: Sequence[tuple[int, int]], count: int) -> Keep:
    """Lists the names of the last `count` heads of an order, for each layer."""
    layers = parts_of(subject)
    gone = set(order[: len(order) - count])
    return [
        [name for place, name in enumerate(layer.names) if (i, place) not in gone]
        for i, layer in enumerate(layers)
    ]


def without_heads(subject: Any, keep: Sequence[Sequence[int]]) -> Any:
    """Removes the heads that are not kept; see `heads.prune`."""
    check_parameters(subject, "prune")
    if subject.model.config is None:
        return _smaller_program(subject, keep)
    subject = check_task(subject, "prune")
    params, config = heads.prune(subject.params, subject.config.model, keep)
    config = subject.config.replace(model=config)
    model = folders.make_model(config.model, subject.task)
    return subject.replace(config=config, model=model, params=params)


def _smaller_program(subject: Subject, keep: Sequence[Sequence[int]]) -> Subject:
    """Removes heads of a wrapped model; says what that saves."""
    example, parts = some_inputs(subject), parts_of(subject)
    keep, names = pruning.kept_names(keep, parts), [x.names for x in parts]
    gates = np.ones((len(parts), max(map(len, names), default=0)))
    for row, before, after in zip(gates, names, keep, strict=True):
        row[: len(before)] = np.isin(before, after)
    if gates.all():
        return subject
    whole, old = subject.model, subject.params
    model, params, filled = parameter_slices.without_heads(whole, old, example, gates)
    program, smaller = parameter_slices.ablated_output(whole), model_runs.logits(model)
    ablated = functools.partial(program, old, example, gates)
    pruned = functools.partial(smaller, params, example)
    if not are_close(ablated(), pruned()):
        why = "computes something else without their parameters than with heads ablated"
        why += ".\nAblate them, or remove them from all layers that share parameters"
        refuse(subject, "prune", why)
    first, second = (
        min(timeit.repeat(lambda x=x: jax.block_until_ready(x()), number=1))
        for x in (ablated, pruned)
    )
    fill = subject.filled or (lambda params: params)
    size = sum(x.size for x in jax.tree.leaves(fill(old)))
    return subject.replace(
        model=model,
        params=params,
        certifier=None,
        left=[x._replace(names=tuple(y)) for x, y in zip(parts, keep, strict=True)],
        filled=lambda params: fill(filled(params)),
        saving=f" of {size:,}, {second / first:.2f} of the time",
    )


def are_close(one: jax.Array, other: jax.Array) -> bool:
    """Checks whether outputs are equal, to 1e-5 of the largest number or rounding."""
    close = max(1e-5, 4 * float(jnp.finfo(one.dtype).eps))
    a, b = (np.asarray(x, np.float64) for x in (one, other))
    return bool(abs(a - b).max() <= close * max(1.0, abs(a).max()))


def _fewest(
    subject: Any, order: Sequence[tuple[int, int]], drop: float, examples: Any
) -> int:
    """Finds the fewest heads whose loss of accuracy, or drift, is at most `drop`."""
    metric, counts = decisive(subject.task), range(len(order), -1, -1)
    if metric is None:
        values = np.array(ablated_in_order(subject, order, counts, examples))
        above = np.flatnonzero(values > values[0] + drop + _ROUNDING)
        return counts[above[0] - 1] if len(above) else 0
    sign, vectors = 1 if metric == "drift" else -1, quality.vectors_of(subject)

    def badness(count: int) -> float:
        pruned = without_heads(subject, kept_after(subject, order, count))
        return sign * quality.held_out(pruned, vectors)[metric]

    most = sign * quality.held_out(subject, vectors)[metric] + drop + _ROUNDING
    first = badness(len(order))
    values = ablated_in_order(subject, order, counts)
    above = np.flatnonzero(first + sign * np.subtract(values, values[0]) > most)
    count = counts[above[0] - 1] if len(above) else 0
    # Ablation weights examples equally, reports weight them by their targets.
    while count < len(order) and badness(count) > most:
        count += 1
    return count
