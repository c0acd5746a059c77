"""The health of a run: nonfinite steps, and losses that jump.

It is part of the training state, so that a resumed run continues with the same window.

Dimensions: W losses in the window.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

WINDOW = 128
# A loss has jumped where it exceeds the window's mean by both. The first only would
# warn of healthy runs: near a loss of 0 a single hard example is tens of deviations up,
# and nothing of what the model has learned is lost.
SPIKE = 6.0  # standard deviations of the window
LEAST_RISE = 0.1  # of the loss of the task's baseline


class Health(NamedTuple):
    """The last losses, and how many steps were skipped."""

    losses: Array  # [W] float32, of the last finite steps; inf where there was none yet
    skipped: Array  # [] int32, nonfinite steps, which were not applied
    skipped_in_a_row: Array  # [] int32, those since the last finite step


def initial() -> Health:
    """Makes the health of a run before its first step."""
    none = jnp.zeros((), jnp.int32)
    return Health(jnp.full(WINDOW, jnp.inf, jnp.float32), none, none)


def observe(health: Health, loss: Array, finite: Array) -> tuple[Health, Array, Array]:
    """Updates the health after a step; also returns the rise of its loss.

    The rise is in nats and in standard deviations of the window, both `[]` float32; 0
    while the window is not full, and for a step that is not `finite`.
    """
    is_full = jnp.isfinite(health.losses[0])  # the oldest
    window = jnp.where(is_full, health.losses, 0)
    mean = window.mean()
    deviation = jnp.sqrt(jnp.square(window - mean).mean())
    # At least a thousandth of the mean, so that rounding of a constant loss is no jump.
    deviation = jnp.maximum(deviation, jnp.maximum(1e-3 * jnp.abs(mean), 1e-12))
    # Selected before the division, so that no nonfinite number is computed.
    rise = jnp.where(is_full & finite, loss - mean, 0)
    moved = jnp.concatenate([health.losses[1:], loss.astype(jnp.float32).reshape(1)])
    skipped = 1 - finite.astype(jnp.int32)
    after = Health(
        losses=jnp.where(finite, moved, health.losses),
        skipped=health.skipped + skipped,
        skipped_in_a_row=(health.skipped_in_a_row + 1) * skipped,
    )
    return after, rise, rise / deviation
