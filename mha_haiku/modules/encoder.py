"""Transformer encoder layers and their stack.

`B...` batch axes, T positions, D width, H heads, L layers. The attention and the
feed-forward part of a layer come in as functions that make them, so that any module of
the same call fits, and layers may differ.
"""

from collections.abc import Callable, Sequence

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
    ) -> tuple[Array, attention.AttentionMap]:
        """Returns the layer's output `[B..., T, D]` and its attention map.

        Args:
          x: `[B..., T, D]`.
          mask: Which position may attend to which; see `MultiHeadAttention`.
          is_training: Whether there is dropout.
          bias: What is added to the scores.
          gates: `[H]` or `[B..., H]`, the heads' gates.
        """
        rate = self.dropout_rate if is_training else 0.0

        def attend(x):
            output, attention_map = self.make_attention()(
                x, x, x, mask, bias=bias, gates=gates, dropout_rate=rate
            )
            return dropout(output, rate), attention_map

        def feed_forward(x):
            return (dropout(self.make_feed_forward()(x, dropout_rate=rate), rate),)

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
        self,
        x: Array,
        mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        bias: positions.ScoreBias | Array | None = None,
        gates: Array | Sequence[Array] | None = None,
    ) -> tuple[Array, tuple[attention.AttentionMap, ...]]:
        """Returns the output `[B..., T, D]` and one attention map per layer.

        Args:
          x: `[B..., T, D]`.
          mask: Which position may attend to which, in all layers.
          is_training: Whether there is dropout.
          bias: What is added to the scores of all layers.
          gates: `[L, H]` or `[L, B..., H]`, or a sequence of L arrays where layers have
            different numbers of heads.
        """
        if gates is not None and len(gates) != self.num_layers:
            raise ValueError(
                f"gates must be [L, H] with L = {self.num_layers} layers, got "
                f"{len(gates)}."
            )

        def call_layer(i, x, gates):
            return self.make_layer(i)(
                x, mask, is_training=is_training, bias=bias, gates=gates
            )

        x, maps = self.stack(call_layer, self.num_layers, x, gates)
        if self.make_norm is not None:
            x = self.make_norm(name="norm")(x)
        return x, maps


def dropout(x: Array, rate: float) -> Array:
    """Returns `x` with a share `rate` of zeros, the rest grown by 1 / (1 - rate)."""
    return hk.dropout(hk.next_rng_key(), rate, x) if rate else x
