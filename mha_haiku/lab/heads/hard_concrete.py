"""Gates that can be learned by gradients although most are exactly 0 or 1.

A concrete (relaxed Bernoulli) variable is stretched to [LOW, HIGH] and clipped to
[0, 1]: so a gate is exactly 0 or 1 with a probability above zero, and its logit
`log_alpha` still has a gradient.

Source: Louizos et al. 2018, section 2.2, https://arxiv.org/abs/1712.01312; for heads:
Voita et al. 2019, section 5.2, https://arxiv.org/abs/1905.09418.
"""

import math

import jax
import jax.numpy as jnp

Array = jax.Array

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1


def sample(log_alpha: Array, rng: Array) -> Array:
    """Samples gates in [0, 1] from their logits; eq. 10 to 12."""
    # Above 0, so that the logarithm is finite.
    tiny = jnp.finfo(log_alpha.dtype).tiny
    uniform = jax.random.uniform(rng, log_alpha.shape, log_alpha.dtype, tiny, 1.0)
    logits = jnp.log(uniform) - jnp.log1p(-uniform) + log_alpha
    return _stretched(jax.nn.sigmoid(logits / TEMPERATURE))


def open_probability(log_alpha: Array) -> Array:
    """Computes P(gate is not 0), whose sum over gates is the L0 penalty; eq. 12."""
    return jax.nn.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


def settled(log_alpha: jax.typing.ArrayLike) -> Array:
    """Computes the gates without noise, for use after training; eq. 13."""
    return _stretched(jax.nn.sigmoid(log_alpha))


def _stretched(share: Array) -> Array:
    return jnp.clip(LOW + (HIGH - LOW) * share, 0, 1)
