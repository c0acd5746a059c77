"""Transformer decoder layers, attending to an encoder too, and their stack.

`B...` batch axes, T positions of the decoder, S of the encoder, D width, L layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import haiku as hk
import jax

from mha_haiku import attention, checks, masks
from mha_haiku.modules import encoder, norms

Array = jax.Array


class DecoderMaps(NamedTuple):
    """The attention maps of a decoder layer.

    Attributes:
      own: Shape `(B..., H, T, T)`, the decoder's positions to each other.
      cross: Shape `(B..., H, T, S)`, the decoder's positions to the encoder's.
    """

    own: attention.AttentionMap
    cross: attention.AttentionMap


class DecoderLayer(hk.Module):
    """Causal self-attention, cross-attention, then a feed-forward part.

    Source: Vaswani et al. 2017, section 3.1, https://arxiv.org/abs/1706.03762.
    """

    def __init__(
        self,
        make_attention: encoder.MakeAttention,
        make_cross_attention: encoder.MakeAttention,
        make_feed_forward: encoder.MakeFeedForward,
        *,
        make_norm: encoder.MakeNorm = norms.LayerNorm,
        norm_position: str = "pre",
        dropout_rate: float = 0.0,
        name: str | None = None,
    ):
        """Initialises the module; arguments as in `EncoderLayer`."""
        super().__init__(name=name)
        checks.choice("norm_position", norm_position, encoder.RESIDUALS)
        self.residual = encoder.RESIDUALS[norm_position]
        self.make_attention = make_attention
        self.make_cross_attention = make_cross_attention
        self.make_feed_forward = make_feed_forward
        self.make_norm = make_norm
        self.dropout_rate = checks.fraction("dropout_rate", dropout_rate)

    def __call__(
        self,
        x: Array,
        encoded: Array,
        mask: masks.Mask | Array | None = None,
        cross_mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
    ) -> tuple[Array, DecoderMaps]:
        """Returns the layer's output `[B..., T, D]` and its attention maps.

        Args:
          x: `[B..., T, D]`.
          encoded: `[B..., S, D]`, the encoder's output.
          mask: Which position of the decoder may attend to which, besides causality.
          cross_mask: Which of them may attend to which position of the encoder.
          is_training: Whether there is dropout.
        """
        rate = self.dropout_rate if is_training else 0.0
        mask = masks.causal() & masks.as_mask(mask)

        def attend(x):
            output, own = self.make_attention()(x, x, x, mask, dropout_rate=rate)
            return encoder.dropout(output, rate), own

        def attend_across(x):
            output, cross = self.make_cross_attention()(
                x, encoded, encoded, cross_mask, dropout_rate=rate
            )
            return encoder.dropout(output, rate), cross

        def feed_forward(x):
            output = self.make_feed_forward()(x, dropout_rate=rate)
            return (encoder.dropout(output, rate),)

        x, own = self.residual(x, attend, self.make_norm(name="norm_1"))
        x, cross = self.residual(x, attend_across, self.make_norm(name="norm_2"))
        (x,) = self.residual(x, feed_forward, self.make_norm(name="norm_3"))
        return x, DecoderMaps(own, cross)


class Decoder(hk.Module):
    """A stack of decoder layers."""

    def __init__(
        self,
        num_layers: int,
        make_layer: Callable[[int], DecoderLayer],
        *,
        make_norm: encoder.MakeNorm | None = None,
        name: str | None = None,
    ):
        """Initialises the module; arguments as in `Encoder`."""
        super().__init__(name=name)
        self.num_layers = checks.positive_integer("num_layers", num_layers)
        self.make_layer = make_layer
        self.make_norm = make_norm

    def __call__(
        self,
        x: Array,
        encoded: Array,
        mask: masks.Mask | Array | None = None,
        cross_mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
    ) -> tuple[Array, tuple[DecoderMaps, ...]]:
        """Returns the output `[B..., T, D]` and the maps of each layer.

        Args:
          x: `[B..., T, D]`.
          encoded: `[B..., S, D]`, the encoder's output.
          mask: As in `DecoderLayer`, in all layers.
          cross_mask: As in `DecoderLayer`, in all layers.
          is_training: Whether there is dropout.
        """
        maps = []
        for i in range(self.num_layers):
            x, layer_maps = self.make_layer(i)(
                x, encoded, mask, cross_mask, is_training=is_training
            )
            maps.append(layer_maps)
        if self.make_norm is not None:
            x = self.make_norm(name="norm")(x)
        return x, tuple(maps)
