"""Transformer decoder layers, attending to an encoder too, and their stack.

`B...` batch axes, T positions of the decoder, S of the encoder, D width, L layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import haiku as hk
import jax

from mha_haiku.core import attention, masks, positions, sites
from mha_haiku.core.modules import encoder

Array = jax.Array


class DecoderMaps(NamedTuple):
    """The attention maps of a decoder layer.

    Attributes:
      own: Shape `(B..., H, T, T)`, the decoder's positions to each other.
      cross: Shape `(B..., H, T, S)`, the decoder's positions to the encoder's.
    """

    own: attention.AttentionMap
    cross: attention.AttentionMap


class DecoderLayer(encoder.Layer):
    """Causal self-attention, cross-attention, then a feed-forward part.

    `DecoderLayer(num_heads=4, key_size=16, hidden_size=128)` is one; both attentions
    have these sizes.

    Source: Vaswani et al. 2017, section 3.1, https://arxiv.org/abs/1706.03762.
    """

    def __init__(
        self,
        make_attention: encoder.MakeAttention | None = None,
        make_cross_attention: encoder.MakeAttention | None = None,
        make_feed_forward: encoder.MakeFeedForward | None = None,
        **options,
    ):
        """Initialises the module; arguments as in `EncoderLayer`."""
        super().__init__(make_attention, make_feed_forward, **options)
        self.make_cross_attention = make_cross_attention
        if make_cross_attention is None and make_attention is not None:
            raise ValueError(
                "make_cross_attention must be given where make_attention is."
            )

    @hk.transparent
    def __call__(
        self,
        x: Array,
        encoded: Array,
        mask: masks.Mask | Array | None = None,
        cross_mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        bias: positions.ScoreBias | Array | None = None,
    ) -> tuple[Array, DecoderMaps]:
        """Applies the layer: output `[B..., T, D]` and attention maps.

        Takes the arguments of `EncoderLayer`. What the encoder has returned, `encoded`,
        is `[B..., S, D]`. The mask, besides causality, and the bias are of the
        decoder's own positions, the cross-mask of these to the encoder's.
        """
        given = {"mask": mask, "cross_mask": cross_mask, "bias": bias}
        return super().__call__(x, encoded, is_training=is_training, **given)[:2]

    @hk.transparent
    def _run(
        self,
        x,
        encoded,
        mask=None,
        cross_mask=None,
        *,
        bias=None,
        is_training=False,
        cache=(None, None),
        first_query=0,
    ) -> tuple:
        rate = self.dropout_rate if is_training else 0.0
        x, own, own_cache = self._attended(
            sites.site("stream", x),
            None,
            masks.causal() & masks.as_mask(mask),
            make=self.make_attention,
            names=("attention", "norm_1"),
            rate=rate,
            bias=bias,
            cache=cache[0],
            first_query=first_query,
        )
        x, cross, cross_cache = self._attended(
            sites.site("stream_after_attention", x),
            encoded,
            cross_mask,
            make=self.make_cross_attention,
            names=("cross_attention", "norm_2"),
            rate=rate,
            cache=cache[1],
            first_query=first_query,
        )
        x = sites.site("stream_after_cross_attention", x)
        x = self._fed_forward(x, norm="norm_3", rate=rate)
        x = sites.site("stream_after_feed_forward", x)
        return x, DecoderMaps(own, cross), (own_cache, cross_cache)


class Decoder(encoder.Stack):
    """A stack of decoder layers.

    `Decoder(num_layers=2, num_heads=4, key_size=16, hidden_size=128)` is one.
    """

    make_sized_layer = DecoderLayer

    @hk.transparent
    def __call__(
        self,
        x: Array,
        encoded: Array,
        mask: masks.Mask | Array | Sequence | None = None,
        cross_mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        bias: positions.ScoreBias | Array | Sequence | None = None,
    ) -> tuple[Array, tuple[DecoderMaps, ...]]:
        """Applies all layers: output `[B..., T, D]`, and the maps of each.

        Takes the arguments of `DecoderLayer`. Mask and bias are of all layers, or
        sequences of L of them, which must be alike where layers are scanned.

        Raises:
          ValueError: If shapes do not fit, or what is given is not of L layers.
        """
        given = {"mask": mask, "cross_mask": cross_mask, "bias": bias}
        return super().__call__(x, encoded, is_training=is_training, **given)[:2]
