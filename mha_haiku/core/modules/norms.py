"""Normalization of features: layer norm and root-mean-square norm.

Moments are at least float32; the output has the dtype of the input. Parameters are
named as in Haiku.
"""

import functools
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mha_haiku.core import site_primitive

# Where norms are: `x + part(norm(x))` (Xiong et al. 2020, figure 1b,
# https://arxiv.org/abs/2002.04745); `norm(x + part(x))` (Vaswani et al. 2017, section
# 5.4, https://arxiv.org/abs/1706.03762).
PLACES = ("pre", "post")


class LayerNorm(hk.Module):
    """Layer norm: features less their mean, over their standard deviation, scaled.

    Source: Ba et al. 2016, https://arxiv.org/abs/1607.06450.

    Example:
      >>> x = jnp.arange(8.0)[None]
      >>> f = hk.without_apply_rng(hk.transform(lambda x: mh.modules.LayerNorm()(x)))
      >>> params = f.init(jax.random.key(0), x)
      >>> bool(abs(f.apply(params, x).mean()) < 1e-6)
      True
    """

    def __init__(self, epsilon: float = 1e-5, name: str | None = None):
        super().__init__(name=name)
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """Normalizes `[..., D]`."""
        size = x.shape[-1:]
        scale = hk.get_parameter("scale", size, x.dtype, jnp.ones)
        offset = hk.get_parameter("offset", size, x.dtype, jnp.zeros)
        return layer_norm(x, scale, offset, epsilon=self.epsilon)


class RMSNorm(hk.Module):
    """Features over their root mean square, scaled.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.

    Example:
      >>> x = jnp.full((1, 4), 3.0)
      >>> f = hk.without_apply_rng(hk.transform(lambda x: mh.modules.RMSNorm()(x)))
      >>> f.apply(f.init(jax.random.key(0), x), x).round(3)
      Array([[1., 1., 1., 1.]], dtype=float32)
    """

    def __init__(self, epsilon: float = 1e-5, name: str | None = None):
        super().__init__(name=name)
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """Normalizes `[..., D]`."""
        scale = hk.get_parameter("scale", x.shape[-1:], x.dtype, jnp.ones)
        return rms_norm(x, scale, epsilon=self.epsilon)


def no_norm(epsilon: float = 0.0, name: str | None = None) -> Callable:
    """Takes a norm's arguments, and returns the identity function."""
    del epsilon, name
    return lambda x: x


def layer_norm(x: Array, scale: Array, offset: Array, *, epsilon: float) -> Array:
    """Computes `(x - mean) / sqrt(variance + epsilon) * scale + offset`, `[..., D]`."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    normalized = _standardized(x.astype(dtype), epsilon)
    shifted = normalized * _last(scale, x, dtype) + _last(offset, x, dtype)
    return shifted.astype(x.dtype)


def rms_norm(x: Array, scale: Array, *, epsilon: float) -> Array:
    """Computes `x / sqrt(mean(x^2) + epsilon) * scale` for `[..., D]` and `[D]`."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    normalized = _of_unit_size(x.astype(dtype), epsilon)
    return (normalized * _last(scale, x, dtype)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _standardized(x: Array, epsilon: float) -> Array:
    """Standardizes `[..., D]` to mean 0 and variance 1 over D, up to `epsilon`."""
    return _standardized_by(x, epsilon)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _of_unit_size(x: Array, epsilon: float) -> Array:
    """Scales `[..., D]` to mean square 1 over D, up to `epsilon`."""
    return _of_unit_size_by(x, epsilon)[0]


# Derivatives in fewer passes over the data than JAX's. Both are symmetric, so that
# their transposes are as short.


@_standardized.defjvp
def _standardized_jvp(epsilon: float, primals: tuple[Array], tangents: tuple[Array]):
    (x,), (change,) = primals, tangents
    normalized, factor = _standardized_by(x, epsilon)
    along = (change * normalized).mean(-1, keepdims=True)
    change = change - change.mean(-1, keepdims=True) - normalized * along
    return normalized, factor * change


@_of_unit_size.defjvp
def _of_unit_size_jvp(epsilon: float, primals: tuple[Array], tangents: tuple[Array]):
    (x,), (change,) = primals, tangents
    normalized, factor = _of_unit_size_by(x, epsilon)
    along = (change * normalized).mean(-1, keepdims=True)
    return normalized, factor * (change - normalized * along)


def _standardized_by(x: Array, epsilon: float) -> tuple[Array, Array]:
    """Standardizes the features; also returns the factor that scaled them."""
    return _of_unit_size_by(x - x.mean(-1, keepdims=True), epsilon)


def _of_unit_size_by(x: Array, epsilon: float) -> tuple[Array, Array]:
    factor = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)
    factor = site_primitive.site(
        "factor", factor
    )  # with a constant factor, a norm is linear
    return x * factor, factor


def _last(parameter: Array, x: Array, dtype: DTypeLike) -> Array:
    return parameter.astype(dtype).reshape((1,) * (x.ndim - 1) + (-1,))
