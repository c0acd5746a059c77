"""How much a trained model needs each of its heads: four measures, one signature.

B batch, L layers, H heads of a layer, N examples, P patterns of gates. Each measure
takes a `Subject` and gives an `Importance`: a number per example and head, the larger
the more the head matters to the metric (`statistic`: the more the statistic shows).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import tasks
from mha_haiku.heads import closing as closings
from mha_haiku.heads import subject

Array = jax.Array

# Of all examples that run at once, each under its own gates.
_POSITIONS_AT_ONCE = 2**16


class Importance(NamedTuple):
    """How much each head matters.

    Attributes:
      per_example: `[N, L, H]` float64, in units of the metric; NaN where a layer has
        fewer heads.
    """

    per_example: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """`[L, H]`, over the examples."""
        return self.per_example.mean(axis=0)

    @property
    def standard_error(self) -> np.ndarray:
        """`[L, H]`, of the mean, from the spread of the examples; NaN for one."""
        count = len(self.per_example)
        if count < 2:
            return np.full(self.per_example.shape[1:], np.nan)
        return self.per_example.std(axis=0, ddof=1) / np.sqrt(count)

    def layer_normalized(self) -> "Importance":
        """Returns it divided by the norm over a layer's heads of the mean.

        Source: Molchanov et al. 2017, https://arxiv.org/abs/1611.06440, as Michel et
        al. 2019, section 4.1, do.
        """
        norm = np.sqrt(np.nansum(self.mean**2, axis=-1, keepdims=True))
        return Importance(self.per_example / np.where(norm > 0, norm, 1))


def ablation(
    of: subject.Subject, *, closing: closings.Closing = closings.zero
) -> Importance:
    """Returns the change of the metric when one head is closed, for each head.

    One compiled program per shape of batch runs all gates. Layers below the closed
    head's run once, and its own layer's attention once for all its heads.

    Args:
      of: What is measured.
      closing: What a closed head passes on.

    Source: Michel et al. 2019, section 3.2, https://arxiv.org/abs/1905.10650.
    """

    @jax.jit
    def changes(params, example):
        clean = subject.run(of.model, params, example)
        replacement = closing(clean)
        before = of.metric(clean.logits, example)
        of_layers = []
        for i, each in enumerate(clean.maps):

            def closed(gates, i=i):
                options = _at_layer(i, len(clean.maps), gates, replacement)
                start = (i, clean.hidden[i])
                output = subject.run(of.model, params, example, start=start, **options)
                return of.metric(output.logits, example)

            count = each.shape[-3]
            one_closed = 1 - jnp.eye(count)
            after = _over(closed, one_closed, example)
            of_layers.append((after - before[None]).T)
        return of_layers

    return _over_batches(of, changes)


def gradient(
    of: subject.Subject, *, closing: closings.Closing = closings.zero
) -> Importance:
    """Returns the absolute derivative of the metric with respect to each head's gate.

    Args:
      of: What is measured; the metric must be differentiable, a loss.
      closing: What a gate of 0 would pass on.

    Source: Michel et al. 2019, eq. 2, https://arxiv.org/abs/1905.10650.
    """

    @jax.jit
    def slopes(params, example):
        clean = subject.run(of.model, params, example)
        replacement = closing(clean)
        found = jax.grad(_summed(of, params, example, replacement))(_open(clean))
        return [jnp.abs(layer) for layer in found]

    return _over_batches(of, slopes)


def attribution(
    of: subject.Subject, *, closing: closings.Closing = closings.zero, points: int = 16
) -> Importance:
    """Returns integrated gradients of the gates: shares of what closing all costs.

    The derivatives are integrated along the straight way from all gates open to all
    closed, so that the heads' shares of an example add up to the change of its metric
    when every head is closed, as far as the quadrature is exact.

    Args:
      of: What is measured; the metric must be differentiable, a loss.
      closing: What a closed head passes on.
      points: Of the Gauss-Legendre quadrature.

    Source: Sundararajan et al. 2017, eq. 1, https://arxiv.org/abs/1703.01365; of gates:
    Dhamdhere et al. 2018, https://arxiv.org/abs/1805.12233.
    """
    if points < 1:
        raise ValueError(f"points must be at least 1, got {points}.")
    nodes, weights = np.polynomial.legendre.leggauss(points)
    nodes, weights = jnp.asarray((nodes + 1) / 2), jnp.asarray(weights / 2)

    @jax.jit
    def shares(params, example):
        clean = subject.run(of.model, params, example)
        replacement = closing(clean)
        total = _summed(of, params, example, replacement)

        def add(sums, point):
            node, weight = point
            gates = [node * gate for gate in _open(clean)]
            slopes = jax.grad(total)(gates)
            return [s - weight * each for s, each in zip(sums, slopes, strict=True)], ()

        nothing = [jnp.zeros_like(gate) for gate in _open(clean)]
        points = (nodes.astype(jnp.float32), weights.astype(jnp.float32))
        return jax.lax.scan(add, nothing, points)[0]

    return _over_batches(of, shares)


def statistic(of: subject.Subject, *, name: str = "largest_weight") -> Importance:
    """Returns a statistic of each head's map, such as its confidence.

    Args:
      of: What is measured; the metric is not used.
      name: A field of `attention.Statistics` that is one number per head; the default
        is the confidence.

    Source: Voita et al. 2019, section 4, https://arxiv.org/abs/1905.09418.
    """

    @jax.jit
    def numbers(params, example):
        output = subject.run(of.model, params, example)
        is_tokens = jnp.issubdtype(example.inputs.dtype, jnp.integer)
        tokens = example.inputs if is_tokens else None
        found = [getattr(each.statistics(tokens=tokens), name) for each in output.maps]
        for values, each in zip(found, output.maps, strict=True):
            if values is None or values.shape != each.shape[:-2]:
                raise ValueError(f"{name!r} is not one number per head.")
        return found

    return _over_batches(of, numbers)


def closed(
    of: subject.Subject,
    gates: np.ndarray,
    *,
    closing: closings.Closing = closings.zero,
) -> np.ndarray:
    """Returns the metric under each of some patterns of gates, `[N, P]`.

    Args:
      of: What is measured.
      gates: `[P, L, H]`; what stands beyond a layer's own heads is not looked at.
      closing: What a closed head passes on.
    """
    return make_closed(of, closing=closing)(gates)


def make_closed(
    of: subject.Subject, *, closing: closings.Closing = closings.zero
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns `closed` as a function of the gates, compiled once for all its calls.

    Args:
      of: What is measured; its batches are gone through in every call.
      closing: What a closed head passes on.
    """

    @jax.jit
    def metrics(params, gates, example):
        clean = subject.run(of.model, params, example)
        replacement = closing(clean)
        counts = [each.shape[-3] for each in clean.maps]

        def under(pattern):
            own = [pattern[i, :count] for i, count in enumerate(counts)]
            output = subject.run(
                of.model, params, example, gates=own, replacement=replacement
            )
            return of.metric(output.logits, example)

        return _over(under, gates, example).T

    def measure(gates):
        gates = jnp.asarray(gates, jnp.float32)
        found = [jax.device_get(metrics(of.params, gates, each)) for each in of.batches]
        return np.concatenate(found).astype(np.float64)

    return measure


def _at_layer(i, num_layers, gates, replacement) -> dict[str, Any]:
    """Returns options with gates of layer i alone."""
    only = [gates if j == i else None for j in range(num_layers)]
    if replacement is None:
        return {"gates": only}
    own = [replacement[j] if j == i else None for j in range(num_layers)]
    return {"gates": only, "replacement": own}


def _summed(of, params, example, replacement) -> Callable:
    """Returns a function of gates, L arrays `[B, H]`, to the sum of the metric."""

    def total(gates):
        output = subject.run(
            of.model, params, example, gates=gates, replacement=replacement
        )
        return of.metric(output.logits, example).sum()

    return total


def _open(clean) -> list[Array]:
    """Returns open gates of each example, L arrays `[B, H]`."""
    return [jnp.ones(each.shape[:-2], jnp.float32) for each in clean.maps]


def _over(function: Callable, gates: Array, example: tasks.Example) -> Array:
    """Returns the function of each row of the gates, as many at once as is quick."""
    if not len(gates):
        return jnp.zeros((0, len(example.inputs)))
    positions = example.inputs.shape[0] * example.inputs.shape[1]
    at_once = max(1, min(len(gates), _POSITIONS_AT_ONCE // positions))
    batch_size = at_once if at_once > 1 else None
    return jax.lax.map(function, gates, batch_size=batch_size)


def _over_batches(of: subject.Subject, measure: Callable) -> Importance:
    """Returns what a measure of a batch, L arrays `[B, H]`, finds in all of them."""
    run = functools.partial(measure, of.params)
    found = [subject.padded(jax.device_get(run(example))) for example in of.batches]
    if not found:
        raise ValueError("batches must not be empty.")
    return Importance(np.concatenate(found))
