"""Metrics of a batch: a number per example; lower is better.

B batch, T positions, C classes. `logits` are `[B, T, C]` for an answer per position, or
`[B, C]` for one per example. Targets of weight 0 do not count.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.lab.heads import model_runs
from mha_haiku.lab.heads.model_runs import Metric
from mha_haiku.training import losses, tasks

Array = jax.Array
Correct = Callable[[Array, tasks.Example], Array]

_UNITS = {
    "loss": "nats",
    "accuracy": "share of right answers",
    "exact_match": "share of exact answers",
    "drift": "1 - cosine",
    "logit_difference": "logits",
}


def named(metric: Metric) -> tuple[str, str]:
    """Returns the name of a metric and its unit, for tables and axes.

    Example:
      >>> mh.heads.metrics.named(mh.heads.metrics.loss)
      ('loss', 'nats')
    """
    if isinstance(metric, Loss):
        return f"loss of {metric.of}", _UNITS["loss"]
    name = getattr(metric, "__name__", "")
    if not name.isidentifier():  # a lambda or an object
        return "metric", "units of the metric"
    is_ours = getattr(metric, "__module__", "") == __name__
    return name, (_UNITS if is_ours else {}).get(name, f"units of {name}")


def loss(logits: Array, example: tasks.Example) -> Array:
    """Computes the mean cross-entropy of each example's targets, `[B]` nats."""
    entropies = losses.cross_entropy(jnp.asarray(logits), example.targets)
    return _mean(jnp.where(example.weights > 0, entropies, 0), example.weights)


class Loss(NamedTuple):
    """The metric `loss`, with a name for its targets."""

    of: str  # such as "the next token"

    def __call__(self, logits: Array, example: tasks.Example) -> Array:
        return loss(logits, example)


def mistakes(correct: Correct | None = None) -> Metric:
    """Makes the metric that is the share of wrong answers of each example.

    `correct` returns booleans in the shape of the targets, from logits and batch, as a
    task's does. By default the likeliest class must be the target.
    """
    correct = correct or _likeliest

    def accuracy(logits: Array, example: tasks.Example) -> Array:
        return _mean(1.0 - correct(logits, example), example.weights)

    return accuracy


def failures(correct: Correct | None = None) -> Metric:
    """Makes the metric that is 1 for an example with a wrong answer, else 0.

    Its mean is one minus the share of exact matches. `correct` is as in `mistakes`.
    """
    correct = correct or _likeliest

    def exact_match(logits: Array, example: tasks.Example) -> Array:
        wrong = ~correct(logits, example) & (example.weights > 0)
        return wrong.any(tuple(range(1, wrong.ndim))).astype(jnp.float32)

    return exact_match


def drift(logits: Array | np.ndarray, example: tasks.Example) -> Array:
    """Computes 1 minus the cosine of two vectors of each example, `[B]` in [0, 2].

    `logits` are `[B, D]`, the vectors of an edited model, and the batch's targets are
    the vectors of the unedited model; see `heads.measured_by_drift`. For the unedited
    model the drift is 0, its minimum, and so is its slope by any gate: gradients there
    are useless as a measure.
    """
    # Half the squared distance of unit vectors is 1 - cosine, without cancellation.
    difference = _unit(logits) - _unit(example.targets)
    return (difference**2).sum(-1) / 2


def logit_difference(logits: Array, example: tasks.Example) -> Array:
    """Subtracts the right answer's logit from the logit of a wrong answer, `[B]`.

    The batch's `targets` are `[B, 2]`, the right and the wrong class. With logits
    `[B, T, C]` the answer is at the last valid position.

    Source: Wang et al. 2022, section 3, https://arxiv.org/abs/2211.00593.
    """
    pair = jnp.take_along_axis(at_last(logits, example), example.targets, axis=-1)
    return pair[:, 1] - pair[:, 0]


def at_last(logits: Array, example: tasks.Example) -> Array:
    """Takes the logits `[B, C]` of each example's last valid position."""
    if logits.ndim == 2:
        return logits
    # Of a decoder, if there is one.
    valid = model_runs.valid(logits.shape[1], example, "decoder")
    last = logits.shape[1] - 1 - jnp.argmax(valid[:, ::-1], 1)
    return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]


def _unit(vectors: Any) -> Array:
    vectors = vectors.astype(jnp.promote_types(vectors.dtype, jnp.float32))
    square = (vectors**2).sum(-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(square, 1e-30))


def _likeliest(logits: Array, example: tasks.Example) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32) == example.targets


def _mean(values: Array, weights: Array | np.ndarray) -> Array:
    axes = tuple(range(1, weights.ndim))
    total = weights.sum(axes)
    return (values * weights).sum(axes) / jnp.where(total > 0, total, 1)
