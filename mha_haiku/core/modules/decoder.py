"""Transformer decoder layers, attending to an encoder too, and their stack."""

from collections.abc import Sequence
from typing import NamedTuple

import haiku as hk
import jax

from mha_haiku.core import attention, masks, positions, sites
from mha_haiku.core.modules import encoder

Array = jax.Array


class DecoderMaps(NamedTuple):
    """The attention maps of a decoder layer."""

    own: attention.AttentionMap  # `(B..., H, T, T)`, of the decoder's positions
    cross: attention.AttentionMap  # `(B..., H, T, S)`, to the encoder's positions


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
        super().__init__(make_attention, make_feed_forward, **options)
        self.makers["cross_attention"] = make_cross_attention
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

        Takes the arguments of `EncoderLayer`, and what the encoder returned. The mask,
        besides causality, and the bias are of the decoder's own positions.
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
        own_mask = masks.causal() & masks.as_mask(mask)
        given = {"rate": rate, "first_query": first_query}
        x = sites.site("stream", x)
        x, own, own_cache = self._attended(
            "attention", x, None, own_mask, bias=bias, cache=cache[0], **given
        )
        x = sites.site("stream_after_attention", x)
        x, cross, cross_cache = self._attended(
            "cross_attention", x, encoded, cross_mask, cache=cache[1], **given
        )
        x = sites.site("stream_after_cross_attention", x)
        x = self._fed_forward(x, norm="norm_3", rate=rate)
        x = sites.site("stream_after_feed_forward", x)
        return x, DecoderMaps(own, cross), (own_cache, cross_cache)


class Decoder(encoder.Stack):
    """A stack of decoder layers: `Decoder(2, num_heads=4, hidden_size=128)` is one."""

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
        """Applies all layers; takes what `DecoderLayer` does, masks as `Encoder`."""
        given = {"mask": mask, "cross_mask": cross_mask, "bias": bias}
        return super().__call__(x, encoded, is_training=is_training, **given)[:2]
