"""Embeddings of tokens, and schemes of positions by name.

To add a scheme, write its function and add a line to `POSITION_SCHEMES`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from mha_haiku.core import positions, tiles
from mha_haiku.core.fields import Section


@dataclasses.dataclass(eq=False, repr=False)
class TokenEmbedding(hk.Module):
    """A learned vector per token, which can also be used for logits."""

    num_tokens: int
    size: int
    name: str | None = None
    _: dataclasses.KW_ONLY
    w_init: hk.initializers.Initializer | None = None  # standard normal by default

    def __call__(self, tokens: Array) -> Array:
        """Embeds tokens `[...]`, clipped to 0..C - 1, as `[..., D]`."""
        return jnp.take(self._table(), tokens, axis=0, mode="clip")

    @hk.name_like("__call__")
    def logits(self, x: Array, num_classes: int | None = None) -> Array:
        """Multiplies `[..., D]` with the embeddings of the first `num_classes` tokens.

        Source: Press and Wolf 2017, section 3, https://arxiv.org/abs/1608.05859.
        """
        return jnp.einsum("...d,cd->...c", x, self._table()[:num_classes])

    @hk.transparent
    def _table(self) -> Array:
        shape, normal = (self.num_tokens, self.size), hk.initializers.RandomNormal(1.0)
        return hk.get_parameter("embeddings", shape, init=self.w_init or normal)


class PositionScheme(NamedTuple):
    """The places where positions enter a model; None where they do not.

    The functions take the config's `fields` by keyword, and create their parameters.
    """

    # A function from embeddings `[..., T, D]`, the position of the first one and the
    # prefix of module names ("decoder_" in a decoder) to embeddings with positions.
    embed: Callable[..., Array] | None = None
    # A function from queries or keys `[B..., T, H, K]` and their positions `[T]` to
    # heads with positions.
    rotate: Callable[..., Array] | None = None
    # A function from H, the prefix, and whether later keys are seen, `bidirectional`,
    # to a score bias.
    bias: Callable[..., positions.ScoreBias] | None = None
    # The fields of `config.model.embedding` that the functions read.
    fields: tuple[str, ...] = ()
    # Whether features come in pairs, so that their number must be even: K in a scheme
    # that rotates, else D.
    has_pairs: bool = False

    @classmethod
    def of(cls, name: str, config: Section) -> "PositionScheme":
        """Builds a scheme with its fields of the section `config.model.embedding`."""
        scheme = POSITION_SCHEMES[name]
        options = {field: getattr(config, field) for field in scheme.fields}
        embed, rotate, bias = (
            make and functools.partial(make, **options) for make in scheme[:3]
        )
        return scheme._replace(embed=embed, rotate=rotate, bias=bias)


@dataclasses.dataclass(eq=False, repr=False)
class LearnedPositions(hk.Module):
    """A learned vector per position.

    Source: Gehring et al. 2017, section 3.1, https://arxiv.org/abs/1705.03122.
    """

    max_length: int
    name: str | None = None

    def __call__(self, x: Array, first: int | Array = 0) -> Array:
        """Adds to `x` `[..., T, D]` the vectors of the positions that start at `first`.

        A traced `first` is not checked: beyond the last positions it means these.

        Raises:
          ValueError: If there are more tokens than positions, or `first` is no integer
            of at least 0.
        """
        length, size = x.shape[-2:]
        first = tiles.checked_first(first, "first")
        start = first if isinstance(first, int) else 0
        if start + length > self.max_length:
            raise ValueError(
                f"there are only learned positions for {self.max_length} tokens, got "
                f"{length} from first = {start} on."
            )
        init = hk.initializers.RandomNormal(0.02)
        table = hk.get_parameter("positions", (self.max_length, size), x.dtype, init)
        if isinstance(first, int):
            vectors = table[first : first + length]
        else:
            vectors = jax.lax.dynamic_slice_in_dim(table, first, length)
        return x + vectors.reshape((1,) * (x.ndim - 2) + (length, size))


@dataclasses.dataclass(eq=False, repr=False)
class RelativePositions(hk.Module):
    """Learned score biases per bucket of distance; see `positions.relative_bias`."""

    num_heads: int
    _: dataclasses.KW_ONLY
    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128
    name: str | None = None

    def __call__(self) -> positions.ScoreBias:
        init = hk.initializers.RandomNormal(0.02)
        table = hk.get_parameter("table", (self.num_buckets, self.num_heads), init=init)
        return positions.relative_bias(
            table, bidirectional=self.bidirectional, max_distance=self.max_distance
        )


def _learned(x: Array, first: int | Array, prefix: str, *, max_length: int) -> Array:
    return LearnedPositions(max_length, name=f"{prefix}positions")(x, first)


def _sinusoidal(x: Array, first: int | Array, _: str) -> Array:
    at = first + jnp.arange(x.shape[-2])
    encoding = positions.sinusoidal(at, x.shape[-1]).astype(x.dtype)
    return x + encoding.reshape(*(1,) * (x.ndim - 2), *encoding.shape)


def _rotary(
    x: Array, at: Array, *, frequencies: Sequence[float] | None, rotary_period: float
) -> Array:
    return positions.rotary(x, at, max_period=rotary_period, frequencies=frequencies)


def _relative(
    num_heads: int, prefix: str, *, bidirectional: bool
) -> positions.ScoreBias:
    name = f"{prefix}relative_positions"
    return RelativePositions(num_heads, bidirectional=bidirectional, name=name)()


POSITION_SCHEMES: dict[str, PositionScheme] = {
    "none": PositionScheme(),
    "learned": PositionScheme(embed=_learned, fields=("max_length",)),
    "sinusoidal": PositionScheme(embed=_sinusoidal, has_pairs=True),
    "rotary": PositionScheme(
        rotate=_rotary, fields=("rotary_period", "frequencies"), has_pairs=True
    ),
    "alibi": PositionScheme(bias=lambda heads, *_, **__: positions.alibi(heads)),
    "t5": PositionScheme(bias=_relative),
}
