"""What is added to the scores: biases that give tiles of themselves, or whole arrays.

`B...` batch axes, T query positions, S key positions, H heads. A score bias is lazy
like a mask: it gives tiles of itself, `[B..., H, R, C]`, to be added to the scores of R
queries and C keys, and is asked at absolute positions.
"""

import abc

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mha_haiku import tiles

Array = jax.Array


def as_bias(value: "ScoreBias | Array | None") -> "ScoreBias | None":
    """Returns a score bias from one, from None or from an array.

    Args:
      value: An array is float `[B..., T, S]` or `[B..., H, T, S]`; an axis may have
        size 1. Its rank alone decides which of the two it is.

    Raises:
      ValueError: If an array is not of floats.
    """
    if value is None or isinstance(value, ScoreBias):
        return value
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"bias must be of floats, got {value.dtype}; what may be attended to goes "
            "in mask=."
        )
    return DenseBias(value)


class ScoreBias(abc.ABC):
    """What is added to the scores; a pytree."""

    @abc.abstractmethod
    def aligned_tile(
        self, rows: Array | tiles.Span, columns: Array | tiles.Span, batch_ndim: int
    ) -> Array:
        """Returns the bias at positions `rows` x `columns` as `[B..., H, R, C]`."""

    @abc.abstractmethod
    def check(
        self,
        batch_shape: tuple,
        num_heads: int,
        num_queries: int | None,
        num_keys: int,
    ):
        """Raises ValueError where it does not fit these sizes; see `Mask.check`."""

    def aligned(self, batch_ndim: int) -> "ScoreBias":
        """Returns the bias with arrays that broadcast against `[B..., H, T, S]`.

        They are `[B..., H, ...]` then, where an axis of size 1 stands for any, so that
        a bias inside a stack of attention maps keeps its meaning.
        """
        del batch_ndim
        return self

    def axes(self, batch_ndim: int) -> "ScoreBias":
        """Returns the bias with the letters of its arrays' axes; see `Mask.axes`."""
        raise TypeError(f"{type(self).__name__} must say its axes() to be shared.")

    def add_gradient(
        self, total: "ScoreBias", cotangent: Array, rows: Array, columns: Array
    ) -> "ScoreBias":
        """Returns `total` plus the gradient that a tile's cotangent gives.

        `total` is a bias like this one, aligned, of gradients; the tile `[B..., H, R,
        C]` is that of R rows and C columns.
        """

        def tile(bias):
            values = bias.aligned_tile(rows, columns, cotangent.ndim - 3)
            return jnp.broadcast_to(values.astype(cotangent.dtype), cotangent.shape)

        _, pullback = jax.vjp(tile, self)
        return jax.tree.map(jnp.add, total, *pullback(cotangent))


@tiles.pytree(data=("values",))
class DenseBias(ScoreBias):
    """A bias spelt out as an array, `[B..., T, S]` or `[B..., H, T, S]`."""

    values: Array

    def check(self, *sizes):
        tiles.check_matrix("bias", self.values, *sizes)

    def aligned(self, batch_ndim):
        return DenseBias(tiles.with_heads(self.values, batch_ndim))

    def axes(self, batch_ndim):
        heads = "H" * (jnp.ndim(self.values) == batch_ndim + 3)
        return DenseBias(tiles.batch_axes(batch_ndim) + heads + "TS")

    def aligned_tile(self, rows, columns, batch_ndim):
        return tiles.rectangle(self.aligned(batch_ndim).values, rows, columns)

    def add_gradient(self, total, cotangent, rows, columns):
        if not (isinstance(rows, tiles.Span) and isinstance(columns, tiles.Span)):
            return super().add_gradient(total, cotangent, rows, columns)
        # An axis of size 1 stands for any, so that its gradient is a sum over it.
        at = [0] * total.values.ndim
        for axis, span in ((-2, rows), (-1, columns)):
            at[axis] = span.start if total.values.shape[axis] > 1 else 0
        matrix = map(min, total.values.shape[-2:], cotangent.shape[-2:])
        shape = (*total.values.shape[:-2], *matrix)
        axes = [i for i, n in enumerate(shape) if n == 1]
        tile = cotangent.sum(axes, keepdims=True).astype(total.values.dtype)
        tile += lax.dynamic_slice(total.values, at, shape)
        return DenseBias(lax.dynamic_update_slice(total.values, tile, at))
