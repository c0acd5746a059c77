"""How much a trained model needs each of its heads: measures of one signature.

A measure is a function below `_offered`, which names its unit; scripts, tables and
pictures find it in `MEASURES`.

B batch, L layers, H heads of a layer, F hidden units of a layer, N examples, P patterns
of gates. Each measure takes a `Measured` and gives an `Importance`: a number per
example and head, the larger the more the head matters to the metric (`statistic`: the
more the statistic shows). `unit_gradient` does the same for hidden units.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import display
from mha_haiku.lab.heads import means, metrics, programs, running
from mha_haiku.lab.heads.ablation_values import AblationValue, zero

Array = jax.Array

_logger = logging.getLogger("mha_haiku")


class Importance(NamedTuple):
    """How much each head matters; from `unit_gradient`, each hidden unit (F for H).

    Attributes:
      per_example: `[N, L, H]` float64, in units of the metric; NaN where a layer has
        fewer heads.
      kinds: The kind of each of the L layers; () where there is one kind.
    """

    per_example: np.ndarray
    kinds: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = f"{display.array(self.per_example)} [N, L, H]"
        if isinstance(self.per_example, np.ndarray) and self.per_example.size:
            mean = self.mean
            if not np.isnan(mean).all():
                layer, head = np.unravel_index(np.nanargmax(mean), mean.shape)
                shown += (
                    f", means from {np.nanmin(mean):.3g} to {np.nanmax(mean):.3g}, the "
                    f"largest of {running.label(self.kinds, layer)}, head {head}"
                )
        return f"Importance({shown})"

    _repr_html_, show, plot = display.html, display.show, display.plot

    @property
    def mean(self) -> np.ndarray:
        """`[L, H]`, over the examples."""
        return means.mean(self.per_example)

    @property
    def standard_error(self) -> np.ndarray:
        """`[L, H]`, of the mean, from the spread of the examples; NaN for one."""
        return means.standard_error(self.per_example)

    def layer_normalized(self) -> "Importance":
        """Returns the importance divided by its norm within each layer.

        The norm is the Euclidean one, over the means of the layer's heads.

        Source: Molchanov et al. 2017, https://arxiv.org/abs/1611.06440; Michel et
        al. 2019, section 4.1.
        """
        norm = np.sqrt(np.nansum(self.mean**2, axis=-1, keepdims=True))
        per_example = self.per_example / np.where(norm > 0, norm, 1)
        return self._replace(per_example=per_example)


class Measure(NamedTuple):
    """A measure of the importance of heads, as scripts and pictures offer it.

    Attributes:
      measure: `measure(measured, ablation_value=...) -> Importance`.
      unit: The unit of the importance; None: the unit of the metric. A measure with a
        unit of its own is taken of the loss.
      label: What is measured, in a few words; `{metric}` stands for the metric's name.
    """

    measure: Callable[..., Importance]
    unit: str | None
    label: str


MEASURES: dict[str, Measure] = {}


def _offered(unit: str | None, label: str) -> Callable[[Callable], Callable]:
    """Enters the function below in `MEASURES`, from which all lists of measures come.

    It takes a `Measured` and, by keyword, `ablation_value`, even if it closes no head.
    """

    def offer(function):
        MEASURES[function.__name__] = Measure(function, unit, label)
        return function

    return offer


@_offered(None, "change of the {metric} when the head is closed")
def ablation(
    of: running.Measured, *, ablation_value: AblationValue = zero
) -> Importance:
    """Returns the change of the metric when one head is ablated, for each head.

    The layers below the ablated head run once for all heads.

    Source: Michel et al. 2019, section 3.2, https://arxiv.org/abs/1905.10650.
    """
    return _measured(
        of, programs.changes, metric=of.metric, ablation_value=ablation_value
    )


@_offered("nats", "slope of the loss by the head's gate")
def gradient(
    of: running.Measured, *, ablation_value: AblationValue = zero
) -> Importance:
    """Returns the absolute derivative of the metric with respect to each head's gate.

    The metric must be differentiable, a loss. Where it is at its best with all heads
    open, as a distance to the whole model's own output is, slopes are 0 but for
    rounding: that is warned about.

    Raises:
      ValueError: If the metric is the drift, which has no slope at the whole model.

    Source: Michel et al. 2019, eq. 2, https://arxiv.org/abs/1905.10650.
    """
    _check_slope(of)
    found = _measured(
        of, programs.slopes, metric=of.metric, ablation_value=ablation_value
    )
    _warn_if_flat(found, of, ablation_value)
    return found


def unit_gradient(of: running.Measured) -> Importance:
    """Returns the absolute derivative of the metric by each hidden unit's gate.

    The metric is one for `gradient`; a gate multiplies a unit at all positions of an
    example, and the importance is `[N, L, F]`.

    Source: Michel et al. 2019, eq. 2, https://arxiv.org/abs/1905.10650, for heads;
    Molchanov et al. 2017, section 2.2, https://arxiv.org/abs/1611.06440, for units.
    """
    _check_slope(of)
    found = _measured(of, programs.unit_slopes, metric=of.metric)
    return found._replace(kinds=())


@_offered("nats", "share of what ablating all heads costs")
def attribution(
    of: running.Measured, *, ablation_value: AblationValue = zero, points: int = 16
) -> Importance:
    """Returns integrated gradients: each head's share of the cost of ablating all.

    The gradients of the gates are integrated along the straight line from all gates
    open to all closed. So for each example the heads' shares add up to the change of
    the metric when every head is ablated, as far as the quadrature is exact.

    Args:
      of: What is measured; the metric must be differentiable, a loss.
      ablation_value: What an ablated head passes on.
      points: The number of points of the Gauss-Legendre quadrature.

    Source: Sundararajan et al. 2017, eq. 1, https://arxiv.org/abs/1703.01365;
    Dhamdhere et al. 2018, https://arxiv.org/abs/1805.12233, for units inside a model.
    """
    if points < 1:
        raise ValueError(f"points must be at least 1, got {points}.")
    known = {"metric": of.metric, "ablation_value": ablation_value, "points": points}
    return _measured(of, programs.shares, **known)


@_offered("weight", "largest weight of a query")
def confidence(
    of: running.Measured, *, ablation_value: AblationValue = zero
) -> Importance:
    """Returns the confidence of each head: the mean largest weight of a query.

    No head is ablated, and the metric is not used.

    Source: Voita et al. 2019, section 4, https://arxiv.org/abs/1905.09418.
    """
    del ablation_value
    return statistic(of, name="largest_weight")


def statistic(of: running.Measured, *, name: str = "largest_weight") -> Importance:
    """Returns a statistic of each head's map, such as its confidence.

    Args:
      of: What is measured; the metric is not used.
      name: A field of `attention.Statistics` that is one number per head; the default
        is the confidence.

    Source: Voita et al. 2019, section 4, https://arxiv.org/abs/1905.09418.
    """
    return _measured(of, programs.numbers, name=name)


def closed(
    of: running.Measured, gates: np.ndarray, *, ablation_value: AblationValue = zero
) -> np.ndarray:
    """Returns the metric of each example under each pattern of gates, `[N, P]`.

    Args:
      of: What is measured.
      gates: `[P, L, H]`; entries beyond the heads of a layer are ignored.
      ablation_value: What a closed head passes on.
    """
    program = programs.metrics(
        of.model, metric=of.metric, ablation_value=ablation_value
    )
    gates = jnp.asarray(gates, jnp.float32)
    metric = running.over(of.batches, lambda each: program(of.params, each, gates))
    return np.concatenate(metric).astype(np.float64)


# Slopes below are looked at more closely, and taken for rounding if ablating all heads
# changes the metric by so much more.
_SMALL_SLOPE = 1e-6
_FLAT = 1e-5


def _warn_if_flat(
    found: Importance, of: running.Measured, ablation_value: AblationValue
) -> None:
    """Warns where a metric is flat at the whole model, so that ranks are noise."""
    largest = np.nanmax(found.per_example, initial=0.0)
    if largest > _SMALL_SLOPE:
        return
    _, num_layers, num_heads = found.per_example.shape
    gates = np.stack([np.ones((num_layers, num_heads)), np.zeros_like(found.mean)])
    metric = closed(of, gates, ablation_value=ablation_value)
    change = np.abs(metric[:, 1] - metric[:, 0]).max()
    if largest < _FLAT * change:
        _logger.warning(
            f"slopes of the metric by gates are at most {largest:.1g}, while ablating "
            f"all heads changes it by {change:.2g}: the metric is at its best with all "
            "heads open, and an order by these slopes is noise; ablation or "
            "attribution measure it."
        )


def _check_slope(of: running.Measured) -> None:
    """Refuses a metric whose slope at the whole model is 0 by construction."""
    if of.metric is metrics.drift:
        raise ValueError(
            "metric must have a slope at the whole model, and drift is least there: "
            "every gradient would be rounding; ablation and attribution measure it."
        )


def _measured(of: running.Measured, program: Callable, **known: Any) -> Importance:
    """Returns the importance from one of `programs` and what it is compiled for."""
    program = program(of.model, **known)
    found = running.over(of.batches, lambda example: program(of.params, example))
    per_example = np.concatenate(found).astype(np.float64)
    return Importance(per_example, tuple(running.kinds_of(of.model)))
