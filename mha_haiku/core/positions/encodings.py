"""Encodings of positions: sinusoidal and rotary."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from mha_haiku.core import tiles


def sinusoidal(
    positions: Int[Array, "*B T"], size: int, *, max_period: float = 10_000.0
) -> Float[Array, "*B T D"]:
    """Computes sines and cosines of positions at geometrically spaced periods.

    They are float32, in [-1, 1]: feature 2i is a sine and 2i + 1 the cosine of the same
    angle. The longest wavelength is 2 pi `max_period` positions; D is even.

    Raises:
      ValueError: If `size` is odd or below 2.

    Source: Vaswani et al. 2017, section 3.5, https://arxiv.org/abs/1706.03762.

    Example:
      >>> mh.positions.sinusoidal(jnp.arange(5), 8).shape
      (5, 8)
    """
    if size < 2 or size % 2:
        raise ValueError(f"size must be even and at least 2, got {size}.")
    angles = _angles(positions, frequencies_of(size, max_period), jnp.float32)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:-1], size)


def rotary(
    x: Float[Array, "*B T H K"],
    positions: Int[Array, "..."],
    *,
    max_period: float = 10_000.0,
    frequencies: Sequence[float] | np.ndarray | None = None,
) -> Float[Array, "*B T H K"]:
    """Rotates the feature pairs of queries or keys by their position.

    Dot products of rotated queries and keys depend on the distance of their positions.
    Feature i is paired with feature i + K / 2 (the layout of GPT-NeoX and LLaMA), K
    even.

    Args:
      positions: `[T]` or `[..., T]`.
      max_period: The slowest pair rotates by about 1 / `max_period` radians per
        position.
      frequencies: `[K / 2]`, radians per position of each pair, instead of
        `max_period`; a pair of frequency 0 does not rotate.

    Raises:
      ValueError: If K is odd, or `positions` or `frequencies` do not fit.

    Source: Su et al. 2021 (RoFormer), eq. 34, https://arxiv.org/abs/2104.09864.

    Example:
      >>> x = jnp.ones((1, 3, 2, 4))
      >>> mh.positions.rotary(x, jnp.arange(3))[0, 0, 0]  # position 0 does not turn
      Array([1., 1., 1., 1.], dtype=float32)
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"rotary positions need an even key size K, got {size}.")
    wanted = x.shape[:-2] if jnp.ndim(positions) > 1 else x.shape[-3:-2]
    tiles.check_axes("positions", positions, wanted, "[T] or [..., T]")
    if frequencies is None:
        frequencies = frequencies_of(size, max_period)
    elif np.shape(frequencies) != (size // 2,):
        raise ValueError(
            f"frequencies must be for the K / 2 = {size // 2} pairs of features, got "
            f"shape {np.shape(frequencies)}."
        )
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angles = _angles(positions, frequencies, dtype)[..., None, :]
    angles = angles.reshape((1,) * (x.ndim - angles.ndim) + angles.shape)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def frequencies_of(size: int, max_period: float) -> np.ndarray:
    """Computes the radians per position of each of `size` / 2 pairs of features."""
    return max_period ** (-np.arange(0, size, 2) / size)


def _angles(
    positions: ArrayLike, frequencies: Sequence[float] | np.ndarray, dtype: DTypeLike
) -> Array:
    frequencies = np.asarray(frequencies, dtype)
    positions = jnp.asarray(positions, dtype)[..., None]
    return positions * frequencies.reshape((1,) * (positions.ndim - 1) + (-1,))
