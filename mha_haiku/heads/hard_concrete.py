"""Learned gates: zero or one with a probability that gradients can change.

A gate is drawn by stretching a concrete (relaxed Bernoulli) variable over [LOW, HIGH]
and cutting it to [0, 1], so that it is exactly 0 or 1 with a probability above zero,
while its logits `log_alpha` have gradients.

Source: Louizos et al. 2018, section 2.2, https://arxiv.org/abs/1712.01312; for heads:
Voita et al. 2019, section 5.2, https://arxiv.org/abs/1905.09418.
"""

import math

import jax
import jax.numpy as jnp

Array = jax.Array

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1


def sample(log_alpha: Array, rng: Array) -> Array:
    """Returns gates in [0, 1], drawn at random; eq. 10 to 12.

    Args:
      log_alpha: Any shape, the logits of the gates.
      rng: A PRNG key.
    """
    tiny = jnp.finfo(log_alpha.dtype).tiny
    uniform = jax.random.uniform(rng, log_alpha.shape, log_alpha.dtype, tiny, 1.0)
    logits = jnp.log(uniform) - jnp.log1p(-uniform) + log_alpha
    return _stretched(jax.nn.sigmoid(logits / TEMPERATURE))


def open_probability(log_alpha: Array) -> Array:
    """Returns the probability that a gate is not 0; its sum is the L0 penalty (eq. 12).

    Args:
      log_alpha: Any shape.
    """
    return jax.nn.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


def settled(log_alpha: Array) -> Array:
    """Returns the gates without chance, for use after training; eq. 13.

    Args:
      log_alpha: Any shape.
    """
    return _stretched(jax.nn.sigmoid(log_alpha))


def _stretched(share: Array) -> Array:
    return jnp.clip(LOW + (HIGH - LOW) * share, 0, 1)
