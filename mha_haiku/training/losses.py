"""The loss: weighted softmax cross-entropy, as sums that devices can add up.

Dimensions: B batch, T positions, C classes.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array


class Sums(NamedTuple):
    """Weighted sums over examples; a mean is `loss / weight`, in nats per target."""

    loss: Array  # [] float32, nats
    correct: Array  # [] float32, weight of the targets that were predicted
    weight: Array  # [] float32, weight of all targets
    exact: Array | None = None  # [] float32, examples without a mistake, where counted
    examples: Array | None = None  # [] float32, examples with any target, where counted


def zeros(shape: tuple[int, ...] = (), *, counts_exact: bool = False) -> Sums:
    """Makes sums over no example, arrays of a `shape`."""
    return Sums(*[jnp.zeros(shape, jnp.float32)] * (5 if counts_exact else 3))


def cross_entropy(logits: Array, targets: Array | np.ndarray) -> Array:
    """Computes the cross-entropy in nats of each target, in float32 at least.

    `logits` are `[..., C]`, `targets` `[...]` integers; the result is `[...]`.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def sums(
    logits: Array,
    targets: Array | np.ndarray,
    weights: Array | np.ndarray,
    correct: Array,
    *,
    counts_exact: bool = False,
) -> Sums:
    """Sums loss, right answers and weights.

    A position of weight zero adds exactly 0, even if its logits are nonfinite. `logits`
    are `[B, T, C]`, or `[B, T]` for a task over sets, whose target is one of the T
    elements; `weights` and `correct` (booleans) are shaped like `targets`, `[B, T]` or
    `[B]`. With `counts_exact` examples are counted, and those without a mistake.
    """
    counts = weights > 0
    logits = jnp.where(counts[..., None], logits, 0)
    loss = jnp.where(counts, cross_entropy(logits, targets) * weights, 0)
    parts = [loss, jnp.where(correct, weights, 0), weights]
    if counts_exact:
        positions = tuple(range(1, counts.ndim))
        has_targets = counts.any(positions)
        parts += [has_targets & (correct | ~counts).all(positions), has_targets]
    return Sums(*(x.sum(dtype=jnp.float32) for x in parts))
