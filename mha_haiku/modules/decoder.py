"""Transformer decoder layers, attending to an encoder too, and their stack.

`B...` batch axes, T positions of the decoder, S of the encoder, D width, L layers.
"""

from typing import NamedTuple

import jax

from mha_haiku import attention, masks
from mha_haiku.modules import encoder, intervention

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

    def __call__(
        self,
        x: Array,
        encoded: Array,
        mask: masks.Mask | Array | None = None,
        cross_mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        interventions: intervention.DecoderInterventions | None = None,
    ) -> tuple[Array, DecoderMaps]:
        """Returns the layer's output `[B..., T, D]` and its attention maps.

        Args:
          x: `[B..., T, D]`.
          encoded: `[B..., S, D]`, the encoder's output.
          mask: Which position of the decoder may attend to which, besides causality.
          cross_mask: Which of them may attend to which position of the encoder.
          is_training: Whether there is dropout.
          interventions: What is done to heads and hidden units.
        """
        rate = self.dropout_rate if is_training else 0.0
        given = intervention.checked(interventions, intervention.DecoderInterventions)
        x, own = self._attended(
            x,
            None,
            masks.causal() & masks.as_mask(mask),
            make=self.make_attention,
            names=("attention", "norm_1"),
            rate=rate,
            interventions=given.own,
        )
        x, cross = self._attended(
            x,
            encoded,
            cross_mask,
            make=self.make_cross_attention,
            names=("cross_attention", "norm_2"),
            rate=rate,
            interventions=given.cross,
        )
        x = self._fed_forward(x, given.for_feed_forward(), norm="norm_3", rate=rate)
        return x, DecoderMaps(own, cross)


class Decoder(encoder.Stack):
    """A stack of decoder layers.

    `Decoder(num_layers=2, num_heads=4, key_size=16, hidden_size=128)` is one.
    """

    make_sized_layer = DecoderLayer

    def __call__(
        self,
        x: Array,
        encoded: Array,
        mask: masks.Mask | Array | None = None,
        cross_mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        interventions: intervention.DecoderInterventions | None = None,
    ) -> tuple[Array, tuple[DecoderMaps, ...]]:
        """Returns the output `[B..., T, D]` and the maps of each layer.

        Args:
          x: `[B..., T, D]`.
          encoded: `[B..., S, D]`, the encoder's output.
          mask: As in `DecoderLayer`, in all layers.
          cross_mask: As in `DecoderLayer`, in all layers.
          is_training: Whether there is dropout.
          interventions: What is done to heads and hidden units of each layer.
        """
        given = intervention.checked(interventions, intervention.DecoderInterventions)
        per_layer = {"interventions": intervention.per_layer(given, self.num_layers)}

        def call(layer, x, **own):
            return layer(x, encoded, mask, cross_mask, is_training=is_training, **own)

        decoded = self._run(x, per_layer, 0, call)
        return decoded.output, decoded.maps
