"""Transformer encoder layers and their stack.

`B...` batch axes, T positions, D width, H heads, L layers. The attention and the
feed-forward part of a layer come in as functions that make them, so that any module of
the same call fits, and layers may differ.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import haiku as hk
import jax

from mha_haiku import attention, checks, masks, positions
from mha_haiku.modules import feed_forward as feed_forward_module
from mha_haiku.modules import layer_stacks, multi_head_attention, norms

Array = jax.Array
MakeAttention = Callable[[], multi_head_attention.MultiHeadAttention]
MakeFeedForward = Callable[[], feed_forward_module.FeedForward]
MakeNorm = Callable[..., Callable[[Array], Array]]


def pre_norm(x: Array, sublayer: Callable, norm: Callable) -> tuple[Array, tuple]:
    """Returns `x + sublayer(norm(x))`, and what else the sublayer returns.

    Source: Xiong et al. 2020, figure 1b, https://arxiv.org/abs/2002.04745.
    """
    output, *rest = sublayer(norm(x))
    return x + output, *rest


def post_norm(x: Array, sublayer: Callable, norm: Callable) -> tuple[Array, tuple]:
    """Returns `norm(x + sublayer(x))`, and what else the sublayer returns.

    Source: Vaswani et al. 2017, section 5.4, https://arxiv.org/abs/1706.03762.
    """
    output, *rest = sublayer(x)
    return norm(x + output), *rest


class Encoded(NamedTuple):
    """What an encoder finds.

    Attributes:
      output: `[B..., T, D]`.
      maps: One attention map of each layer.
      hidden: What enters each layer, `[B..., T, D]`.
    """

    output: Array
    maps: tuple[attention.AttentionMap, ...]
    hidden: tuple[Array, ...]


RESIDUALS = {"pre": pre_norm, "post": post_norm}


class EncoderLayer(hk.Module):
    """Self-attention, then a feed-forward part, each with a residual and a norm."""

    def __init__(
        self,
        make_attention: MakeAttention,
        make_feed_forward: MakeFeedForward,
        *,
        make_norm: MakeNorm = norms.LayerNorm,
        norm_position: str = "pre",
        dropout_rate: float = 0.0,
        name: str | None = None,
    ):
        """Initialises the module.

        Args:
          make_attention: Makes the attention; its `model_size` must be D.
          make_feed_forward: Makes the feed-forward part.
          make_norm: Makes a norm from its `name`, as `norms.LayerNorm` and
            `norms.RMSNorm` do, or `functools.partial`s of them.
          norm_position: "pre" or "post"; see `pre_norm` and `post_norm`.
          dropout_rate: Of attention weights, hidden units and both outputs, in [0, 1).
          name: The module's name.
        """
        super().__init__(name=name)
        checks.choice("norm_position", norm_position, RESIDUALS)
        self.residual = RESIDUALS[norm_position]
        self.make_attention = make_attention
        self.make_feed_forward = make_feed_forward
        self.make_norm = make_norm
        self.dropout_rate = checks.fraction("dropout_rate", dropout_rate)

    def __call__(
        self,
        x: Array,
        mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        bias: positions.ScoreBias | Array | None = None,
        gates: Array | None = None,
        replacement: Array | None = None,
        unit_gates: Array | None = None,
    ) -> tuple[Array, attention.AttentionMap]:
        """Returns the layer's output `[B..., T, D]` and its attention map.

        Args:
          x: `[B..., T, D]`.
          mask: Which position may attend to which; see `MultiHeadAttention`.
          is_training: Whether there is dropout.
          bias: What is added to the scores.
          gates: `[H]` or `[B..., H]`, the heads' gates.
          replacement: `[H, V]` or `[B..., T, H, V]`, what closed heads pass on.
          unit_gates: `[F]` or `[B..., F]`, gates of the hidden units.
        """
        rate = self.dropout_rate if is_training else 0.0

        def attend(x):
            output, attention_map = self.make_attention()(
                x,
                x,
                x,
                mask,
                bias=bias,
                gates=gates,
                replacement=replacement,
                dropout_rate=rate,
            )
            return dropout(output, rate), attention_map

        def feed_forward(x):
            output = self.make_feed_forward()(x, gates=unit_gates, dropout_rate=rate)
            return (dropout(output, rate),)

        x, attention_map = self.residual(x, attend, self.make_norm(name="norm_1"))
        (x,) = self.residual(x, feed_forward, self.make_norm(name="norm_2"))
        return x, attention_map


class Encoder(hk.Module):
    """A stack of encoder layers."""

    def __init__(
        self,
        num_layers: int,
        make_layer: Callable[[int], EncoderLayer],
        *,
        make_norm: MakeNorm | None = None,
        stack: layer_stacks.LayerStack = layer_stacks.looped,
        name: str | None = None,
    ):
        """Initialises the module.

        Args:
          num_layers: L.
          make_layer: Makes layer i, named, say, `f"layer_{i}"`; the same layer for
            every i where they are scanned.
          make_norm: Makes a norm of the last layer's output, from its `name`; None: no
            norm. Stacks of pre-norm layers need one.
          stack: How the layers run: `modules.looped`, `modules.scanned`, or either as
            `modules.rematerialized` returns it. Scanned layers have stacked parameters.
          name: The module's name.
        """
        super().__init__(name=name)
        self.num_layers = checks.positive_integer("num_layers", num_layers)
        self.make_layer = make_layer
        self.make_norm = make_norm
        self.stack = stack

    def __call__(
        self, x: Array, mask: masks.Mask | Array | None = None, **options
    ) -> tuple[Array, tuple[attention.AttentionMap, ...]]:
        """Returns the output `[B..., T, D]` and one attention map per layer.

        Arguments are those of `encode`.
        """
        encoded = self.encode(x, mask, **options)
        return encoded.output, encoded.maps

    @hk.name_like("__call__")
    def encode(
        self,
        x: Array,
        mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        bias: positions.ScoreBias | Array | Sequence | None = None,
        gates: Array | Sequence[Array] | None = None,
        replacement: Array | Sequence[Array] | None = None,
        unit_gates: Array | Sequence[Array] | None = None,
        first_layer: int = 0,
    ) -> Encoded:
        """Returns the output, the attention maps, and what enters each layer.

        Of what is given per layer an array has a leading axis L, and a sequence has L
        arrays, where layers have different numbers of heads.

        Args:
          x: `[B..., T, D]`.
          mask: Which position may attend to which, in all layers.
          is_training: Whether there is dropout.
          bias: What is added to the scores of all layers; or a sequence of L of them.
          gates: Per layer `[H]` or `[B..., H]`, the heads' gates.
          replacement: Per layer `[H, V]` or `[B..., T, H, V]`, what closed heads pass
            on.
          unit_gates: Per layer `[F]` or `[B..., F]`, gates of the hidden units.
          first_layer: The layer that `x` enters; those below are left out, and their
            maps and what enters them are not returned. Only where layers are looped.

        Raises:
          ValueError: If shapes do not fit, or what is given is not of L layers.
        """
        biases = bias if isinstance(bias, list | tuple) else None
        per_layer = {
            "bias": biases,
            "gates": gates,
            "replacement": replacement,
            "unit_gates": unit_gates,
        }
        per_layer = {name: x for name, x in per_layer.items() if x is not None}
        for name, given in per_layer.items():
            if len(given) != self.num_layers:
                raise ValueError(
                    f"{name} must be [L, ...] with L = {self.num_layers} layers, got "
                    f"{len(given)}."
                )
        checks.integer_in("first_layer", first_layer, 0, self.num_layers - 1)
        layers = range(first_layer, self.num_layers)
        shared = {} if biases is not None else {"bias": bias}

        def call_layer(i, x, own):
            output, attention_map = self.make_layer(i)(
                x, mask, is_training=is_training, **shared, **own
            )
            return output, (attention_map, x)

        own = [{name: x[i] for name, x in per_layer.items()} for i in layers]
        x, found = self.stack(
            lambda i, x, own: call_layer(first_layer + i, x, own), len(layers), x, own
        )
        maps, hidden = zip(*found, strict=True)
        if self.make_norm is not None:
            x = self.make_norm(name="norm")(x)
        return Encoded(x, maps, hidden)


def dropout(x: Array, rate: float) -> Array:
    """Returns `x` with a share `rate` of zeros, the rest grown by 1 / (1 - rate)."""
    return hk.dropout(hk.next_rng_key(), rate, x) if rate else x
