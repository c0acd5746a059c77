"""Measures of the importance of heads in a trained model.

A measure is a function with the decorator `_offered`, which registers it in `MEASURES`.
It takes a `Measured` and returns `Heads` with one column, which has a number per
example and head; a larger number means that the head matters more to the metric.
`ablation_value` replaces the output of ablated heads. All raise TypeError if batches
can be iterated over only once, and ValueError if there are no batches or no heads.

B batch, L layers (attention parts), H heads of a layer, N examples, P patterns of
gates.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import arguments, attention, models
from mha_haiku.lab.heads import clean_runs, metrics, model_runs
from mha_haiku.lab.heads.ablation_values import AblationValue, zero
from mha_haiku.lab.heads.model_runs import Measured
from mha_haiku.records import Heads
from mha_haiku.training import tasks

Array = jax.Array
Example = tasks.Example
Metric = model_runs.Metric

_logger = logging.getLogger("mha_haiku")


class Measure(NamedTuple):
    """A measure of the importance of heads, in `MEASURES`.

    Example:
      >>> measure, unit, label = mh.heads.MEASURES["attribution"]
      >>> label, unit
      ('share of what ablating all heads costs', 'nats')
      >>> measure(measured).mean.shape
      (2, 2)
    """

    measure: Callable[..., Heads]  # `measure(subject, ablation_value=...)`
    # The unit of the importance, or None for the unit of the metric. A measure with a
    # unit uses the loss.
    unit: str | None
    label: str  # in a few words; `{metric}` is replaced by the metric's name


MEASURES: dict[str, Measure] = {}


def _offered(unit: str | None, label: str) -> Callable[[Callable], Callable]:
    """Registers a function in `MEASURES`, the source of all lists of measures."""

    def offer(function: Callable) -> Callable:
        function = arguments.checked(function)
        MEASURES[function.__name__] = Measure(function, unit, label)
        return function

    return offer


def _program(function: Callable) -> Callable:
    """Compiles a function of a clean run, and of arrays and options of its own."""

    @model_runs.compiled
    def program(
        model: models.Model,
        params: Any,
        example: Example,
        *arrays: Array,
        metric: Metric,
        ablation_value: AblationValue,
        **options: int,
    ) -> Array:
        clean = clean_runs.Clean.of(model, params, example, metric, ablation_value)
        return function(clean, *arrays, **options)

    return program


@_offered(None, "change of the {metric} when the head is ablated")
def ablation(subject: Measured, *, ablation_value: AblationValue = zero) -> Heads:
    """Computes the change of the metric when one head is ablated, for each head.

    Source: Michel et al. 2019, section 3.2, https://arxiv.org/abs/1905.10650.

    Example:
      >>> abs(mh.heads.ablation(measured).mean.round(1))  # nats, [L, H]
      array([[3., 0.],
             [3., 0.]])
    """
    options = {"metric": subject.metric, "ablation_value": ablation_value}
    return _measured(subject, "ablation", _changes, **options)


@_program
def _changes(clean: clean_runs.Clean) -> Array:
    return clean.ablated()


@_offered("nats", "slope of the loss by the head's gate")
def gradient(subject: Measured, *, ablation_value: AblationValue = zero) -> Heads:
    """Computes the absolute derivative of the metric by each head's gate.

    A metric that is best with all heads open has slopes of 0 up to rounding; a warning
    is logged.

    Raises:
      ValueError: If the metric is the drift, for which this is always so.

    Source: Michel et al. 2019, eq. 2, https://arxiv.org/abs/1905.10650.

    Example:
      >>> found = mh.heads.gradient(measured)
      >>> mh.heads.order(found.mean)[-1]  # the layer and head of the steepest slope
      (1, 0)
    """
    if subject.metric is metrics.drift:
        raise ValueError(
            "metric must have a slope at the unedited model, where drift is smallest: "
            "every gradient would be rounding; use ablation or attribution instead."
        )
    options = {"metric": subject.metric, "ablation_value": ablation_value}
    slopes = _measured(subject, "gradient", _slopes, **options)
    _warn_if_flat(slopes, subject, ablation_value)
    return slopes


@_program
def _slopes(clean: clean_runs.Clean) -> Array:
    return jnp.abs(clean.slopes(1.0))


@_offered("nats", "share of what ablating all heads costs")
def attribution(
    subject: Measured, *, ablation_value: AblationValue = zero, points: int = 16
) -> Heads:
    """Computes integrated gradients: each head's share of the cost of ablating all.

    The gradients of the gates are integrated along the straight line from all gates at
    1 to all gates at 0, by Gauss-Legendre quadrature of `points` points. For each
    example the heads' shares add up to the change of the metric when all heads are
    ablated, up to the error of the quadrature.

    Raises:
      ValueError: If there are no points.

    Source: Sundararajan et al. 2017, eq. 1, https://arxiv.org/abs/1703.01365;
    Dhamdhere et al. 2018, https://arxiv.org/abs/1805.12233, for units inside a model.

    Example:
      >>> abs(mh.heads.attribution(measured).mean.round(1))  # nats, [L, H]
      array([[4.9, 0. ],
             [0.3, 0. ]])
    """
    if points < 1:
        raise ValueError(f"points must be at least 1, got {points}.")
    options = {"ablation_value": ablation_value, "points": points}
    return _measured(subject, "attribution", _shares, metric=subject.metric, **options)


@_program
def _shares(clean: clean_runs.Clean, *, points: int) -> Array:
    nodes, weights = np.polynomial.legendre.leggauss(points)
    nodes, weights = jnp.float32((nodes + 1) / 2), jnp.float32(weights / 2)

    def add(total: Array, point: tuple[Array, Array]) -> tuple[Array, None]:
        node, weight = point
        return total - weight * clean.slopes(node), None

    init = jnp.zeros((len(clean.before), *clean.exists.shape))
    return jax.lax.scan(add, init, (nodes, weights))[0]


@_offered("weight", "largest weight of a query")
def confidence(subject: Measured, *, ablation_value: AblationValue = zero) -> Heads:
    """Computes the confidence of each head: the mean largest weight of a query.

    No head is ablated, and the metric is not used.

    Source: Voita et al. 2019, section 4, https://arxiv.org/abs/1905.09418.

    Example:
      >>> mh.heads.confidence(measured).mean.round(1)
      array([[1. , 0.9],
             [1. , 0.9]])
    """
    del ablation_value
    return _measured(subject, "confidence", _largest_weights)


@model_runs.compiled
def _largest_weights(model: models.Model, params: Any, example: Example) -> Array:
    count = len(example.inputs)

    def largest(attention_map: attention.AttentionMap, kind: str) -> Array:
        attention_map = model_runs.without_padding(attention_map, model, example, kind)
        # A function may have several rows per example, such as windows of an image.
        weights = attention_map.statistics().values["largest_weight"]
        rows = math.prod(weights.shape[:-1]) // count
        return weights.reshape(count, rows, weights.shape[-1]).mean(1)

    at = model_runs.by_kind(largest, model, params, example)
    _, maps = model_runs.look(model, params, example, at)
    exists = model_runs.exists([x.shape[-1] for x in maps.values()])
    result = jnp.full((count, *exists.shape), jnp.nan)
    return result.at[:, exists].set(jnp.concatenate([*maps.values()], axis=-1))


def gated_metric(
    subject: Measured, gates: np.ndarray, *, ablation_value: AblationValue = zero
) -> np.ndarray:
    """Computes the metric `[N, P]` of each example with each pattern of gates.

    Gates are `[P, L, H]`; entries beyond the heads of a layer are ignored.

    Raises:
      ValueError: If gates are not `[P, L, H]`, with all layers and heads.

    Example:
      >>> gates = np.ones((2, 2, 2))  # [P, L, H]
      >>> gates[1, 0, 0] = 0  # the second pattern ablates head 0 of layer 0
      >>> mh.heads.gated_metric(measured, gates).mean(0).round(2)
      array([0.02, 3.03])
    """
    patterns = jnp.asarray(gates, jnp.float32)
    if patterns.ndim != 3:
        raise ValueError(
            "gates must be [P, L, H], a gate for each pattern, layer and head, got "
            f"shape {patterns.shape}."
        )
    options = {"metric": subject.metric, "ablation_value": ablation_value}
    return _results(subject, _gated, patterns, **options)


@_program
def _gated(clean: clean_runs.Clean, gates: Array) -> Array:
    return clean_runs.over(clean.gated, gates, clean.example).T


# Slopes below `_SMALL_SLOPE` are checked, and taken for rounding errors if they are
# less than `_FLAT` times the change of the metric when all heads are ablated.
_SMALL_SLOPE = 1e-6
_FLAT = 1e-5


def _warn_if_flat(
    changes: Any, subject: Measured, ablation_value: AblationValue
) -> None:
    """Warns if the metric is flat at the unedited model, so that ranks are noise."""
    largest = np.nanmax(changes.per_example, initial=0.0)
    if largest > _SMALL_SLOPE:
        return
    gates = np.stack([np.ones_like(changes.mean), np.zeros_like(changes.mean)])
    metric = gated_metric(subject, gates, ablation_value=ablation_value)
    change = np.abs(metric[:, 1] - metric[:, 0]).max()
    if largest < _FLAT * change:
        _logger.warning(
            f"slopes of the metric by gates are at most {largest:.1g}, while ablating "
            f"all heads changes it by {change:.2g}: the metric is at its best with all "
            "heads open, and an order by these slopes is noise; use ablation or "
            "attribution instead."
        )


def _measured(
    subject: Measured, name: str, compiled: Callable, **options: Any
) -> Heads:
    per_example = _results(subject, compiled, **options)
    kinds, measure = model_runs.kinds_measured(subject), MEASURES[name]
    metric, unit = metrics.named(subject.metric)
    if measure.unit not in (None, "nats"):
        unit = measure.unit
    label = measure.label.format(metric=metric)
    result = Heads.of_examples(per_example, kinds, name=name, unit=unit, label=label)
    config = subject.model.config
    if config is None:
        return result
    return result.named([x.names for x in models.heads_of_layers(config)])


def _results(
    subject: Measured, compiled: Callable, *arrays: Array, **options: Any
) -> np.ndarray:
    """Runs a program compiled with `options` on all N examples."""
    program = compiled(subject.model, **options)
    run = lambda example: program(subject.params, example, *arrays)  # noqa: E731
    return np.concatenate(model_runs.over(subject.batches, run)).astype(np.float64)
