"""Transformer layers and their stacks: encoders, and decoders that read an encoder.

The parts of a layer are made from sizes, or by functions, so that any module with the
same signature can be used, and layers may differ.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
from jaxtyping import Array, Float

from mha_haiku.core import attention, checks, masks, positions, site_primitive
from mha_haiku.core.modules import (
    feed_forward,
    layer_stacks,
    multi_head_attention,
    no_attention,
    norms,
)

MakeAttention = Callable[[], multi_head_attention.MultiHeadAttention]
MakeFeedForward = Callable[[], feed_forward.FeedForward]
MakeNorm = Callable[..., Callable[[Array], Array]]

_NORMS = {"attention": "norm_1", "cross_attention": "norm_2"}  # of attention, by name


class Layer(multi_head_attention.CachedModule):
    """The base of encoder and decoder layers: parts, residuals, norms, dropout.

    The residual stream `[B..., T, D]` is the site "stream" at the start of a layer, and
    "stream_after_attention", "stream_after_cross_attention" and
    "stream_after_feed_forward" after its parts.
    """

    has_training = True

    def __init__(
        self,
        make_attention: MakeAttention | None = None,
        make_feed_forward: MakeFeedForward | None = None,
        *,
        num_heads: int | None = None,
        key_size: int | None = None,
        hidden_size: int | None = None,
        make_norm: MakeNorm = norms.LayerNorm,
        norm_position: str = "pre",
        attention_residual: bool = True,
        feed_forward_residual: bool = True,
        dropout_rate: float = 0.0,
        name: str | None = None,
    ):
        """Initializes the module.

        Args:
          make_attention: Makes the attention, instead of `num_heads` and `key_size`;
            its `model_size` must be D.
          make_feed_forward: Makes the feed-forward part, instead of `hidden_size`.
          num_heads: H; 0 for no attention.
          key_size: K. Defaults to D / H.
          hidden_size: F; 0 for no feed-forward part.
          make_norm: Makes a norm from its `name`, as `norms.LayerNorm` does.
          norm_position: Where norms are, one of `norms.PLACES`.
          attention_residual: Whether the attention's input is added to its output.
          feed_forward_residual: Whether the feed-forward part's input is added to its
            output.
          dropout_rate: Dropout rate of attention weights, hidden units and all outputs,
            in [0, 1).
          name: The module's name.

        Raises:
          ValueError: If a part has neither a size nor a function, or both.
        """
        super().__init__(name=name)
        checks.choice("norm_position", norm_position, norms.PLACES)
        _check_given_once("make_attention", make_attention, "num_heads", num_heads)
        _check_given_once(
            "make_feed_forward", make_feed_forward, "hidden_size", hidden_size
        )
        self.makers = {"attention": make_attention}
        self.make_feed_forward = make_feed_forward
        self.num_heads = num_heads
        self.key_size = key_size
        self.hidden_size = hidden_size
        self.make_norm = make_norm
        self.dropout_rate = checks.fraction("dropout_rate", dropout_rate)
        self._is_pre = norm_position == "pre"
        self._attention_residual = attention_residual
        self._feed_forward_residual = feed_forward_residual

    @hk.transparent
    def _attended(
        self,
        name: str,
        x: Array,
        encoded: Array | None,
        mask: masks.Mask | Array | None,
        *,
        rate: float,
        step: multi_head_attention.Step | None,
        **options,
    ) -> tuple:
        """Returns `x` after an attention part, its map, and its cache in a step."""
        make = self.makers[name]
        if make is None and not self.num_heads:
            keys = x if encoded is None else encoded
            with jax.named_scope(name):
                no_map = no_attention.map_of_no_heads(x, keys, mask)
            return (x, no_map) if step is None else (x, no_map, step.cache)
        make = make or functools.partial(self._sized_attention, x.shape[-1], name)

        def attend(x: Array) -> tuple:
            module, keys = make(), x if encoded is None else encoded
            if step is not None:
                return module.step(
                    x, keys, keys, mask=mask, **step._asdict(), **options
                )
            output, own_map = module(x, keys, keys, mask, dropout_rate=rate, **options)
            return dropout(output, rate), own_map

        return self._added(x, attend, _NORMS[name], self._attention_residual)

    @hk.transparent
    def _fed_forward(self, x: Array, *, norm: str, rate: float) -> Array:
        make = self.make_feed_forward
        if make is None:
            if not self.hidden_size:
                return x
            make = functools.partial(
                feed_forward.FeedForward, self.hidden_size, name="feed_forward"
            )

        def feed(x: Array):
            return (dropout(make()(x, dropout_rate=rate), rate),)

        return self._added(x, feed, norm, self._feed_forward_residual)[0]

    @hk.transparent
    def _added(self, x: Array, part: Callable, name: str, residual: bool) -> tuple:
        """Applies a part to x, with a norm; also returns the part's other results."""
        output, *rest = part(self.make_norm(name=name)(x) if self._is_pre else x)
        output = x + output if residual else output
        return output if self._is_pre else self.make_norm(name=name)(output), *rest

    @hk.transparent
    def _sized_attention(
        self, size: Any, name: str
    ) -> multi_head_attention.MultiHeadAttention:
        if self.key_size is None and size % self.num_heads:
            raise ValueError(
                f"num_heads must divide the width {size} where key_size is not given, "
                f"got {self.num_heads}."
            )
        return multi_head_attention.MultiHeadAttention(
            self.num_heads,
            self.key_size or size // self.num_heads,
            model_size=size,
            name=name,
        )


class EncoderLayer(Layer):
    """Self-attention, then a feed-forward part, each with a residual and a norm."""

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        bias: positions.ScoreBias | Array | None = None,
        step: multi_head_attention.Step | None = None,
    ) -> tuple[Array, attention.AttentionMap, *tuple[Any, ...]]:
        """Applies the layer: output and attention map; see `MultiHeadAttention`."""
        rate = self.dropout_rate if is_training else 0.0
        x = site_primitive.site("stream", x)
        x, *seen = self._attended(
            "attention", x, None, mask, bias=bias, rate=rate, step=step
        )
        x = site_primitive.site("stream_after_attention", x)
        x = self._fed_forward(x, norm="norm_2", rate=rate)
        return site_primitive.site("stream_after_feed_forward", x), *seen


class DecoderMaps(NamedTuple):
    """The attention maps of a decoder layer."""

    own: attention.AttentionMap  # `(B..., H, T, T)`, among the decoder's positions
    cross: attention.AttentionMap  # `(B..., H, T, S)`, to the encoder's positions


class DecoderLayer(Layer):
    """Causal self-attention, cross-attention, then a feed-forward part.

    For example `DecoderLayer(num_heads=4, key_size=16, hidden_size=128)`, where both
    attentions have these sizes.

    Source: Vaswani et al. 2017, section 3.1, https://arxiv.org/abs/1706.03762.

    Example:
      >>> def f(x, encoded):
      ...     layer = mh.DecoderLayer(num_heads=2, key_size=4, hidden_size=16)
      ...     return layer(x, encoded, mh.masks.causal(), is_training=False)
      ...
      >>> f = hk.without_apply_rng(hk.transform(f))
      >>> x, encoded = jnp.ones((1, 5, 8)), jnp.ones((1, 7, 8))
      >>> output, maps = f.apply(f.init(jax.random.key(0), x, encoded), x, encoded)
      >>> maps._fields
      ('own', 'cross')
    """

    def __init__(
        self,
        make_attention: MakeAttention | None = None,
        make_cross_attention: MakeAttention | None = None,
        make_feed_forward: MakeFeedForward | None = None,
        **options,
    ):
        super().__init__(make_attention, make_feed_forward, **options)
        self.makers["cross_attention"] = make_cross_attention
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
        bias: positions.ScoreBias | Array | None = None,
        step: multi_head_attention.Step | None = None,
    ) -> tuple[Array, DecoderMaps, *tuple[Any, ...]]:
        """Applies the layer: output `[B..., T, D]` and attention maps.

        Takes the arguments of `EncoderLayer`, and the output of the encoder. The mask
        (causality is added) and the bias apply to the decoder's self-attention.
        """
        rate = self.dropout_rate if is_training else 0.0
        self_mask = masks.causal() & masks.as_mask(mask)
        self_step = cross_step = None
        if step is not None:
            self_step, cross_step = (step._replace(cache=part) for part in step.cache)
        x = site_primitive.site("stream", x)
        x, self_map, *self_cache = self._attended(
            "attention", x, None, self_mask, rate=rate, bias=bias, step=self_step
        )
        x = site_primitive.site("stream_after_attention", x)
        x, cross, *cross_cache = self._attended(
            "cross_attention", x, encoded, cross_mask, rate=rate, step=cross_step
        )
        x = site_primitive.site("stream_after_cross_attention", x)
        x = self._fed_forward(x, norm="norm_3", rate=rate)
        x = site_primitive.site("stream_after_feed_forward", x)
        caches = () if step is None else ((*self_cache, *cross_cache),)
        return x, DecoderMaps(self_map, cross), *caches


class Stack(multi_head_attention.CachedModule):
    """Layers, then a norm that reads the site "stream": encoders and decoders."""

    make_sized_layer: type[Layer]  # makes a layer from sizes
    has_training = True

    def __init__(
        self,
        num_layers: int,
        make_layer: Callable[[int], Layer] | None = None,
        *,
        make_norm: MakeNorm | None = None,
        stack: layer_stacks.LayerStack = layer_stacks.looped,
        name: str | None = None,
        **layer,
    ):
        """Initializes the module.

        Args:
          num_layers: L.
          make_layer: Makes layer i, named, say, `f"layer_{i}"`; if scanned, the same
            layer for every i. By default all layers are made from `layer`.
          make_norm: Makes a norm of the last layer's output, from its `name`. Stacks of
            pre-norm layers need one. With `make_layer` it defaults to no norm;
            otherwise it also makes the norms of the layers, and defaults to
            `norms.LayerNorm`.
          stack: How the layers run: `modules.looped` or `modules.scanned`, which has
            stacked parameters.
          name: The module's name.
          **layer: Arguments of the layers, such as `num_heads`, instead of
            `make_layer`.

        Raises:
          ValueError: If both `make_layer` and arguments of layers are given.
        """
        super().__init__(name=name)
        self.num_layers = checks.positive_integer("num_layers", num_layers)
        if make_layer is None:
            make_norm = make_norm or norms.LayerNorm
            layer["make_norm"] = make_norm

            def make_sized(i: int):
                return self.make_sized_layer(**layer, name=f"layer_{i}")

            make_layer = make_sized
            if layer.get("norm_position") == "post":
                make_norm = None  # the last layer ends in a norm
        elif layer:
            raise ValueError(
                "make_layer must be omitted where arguments of layers are given, got "
                f"both it and {', '.join(layer)}."
            )
        self.make_layer = make_layer
        self.make_norm = make_norm
        self.stack = stack

    @hk.transparent
    def _run(
        self,
        x: Array,
        *args,
        step: multi_head_attention.Step | None,
        mask: masks.Mask | Array | Sequence | None,
        bias: positions.ScoreBias | Array | Sequence | None,
        **shared,
    ) -> tuple[Any, ...]:
        """Runs the layers; returns the output, the maps, and in a step the caches."""
        # Arguments with an entry per layer; all others are shared.
        per_layer = {}
        if step is not None:
            per_layer["step"] = [step._replace(cache=cache) for cache in step.cache]
        for name, value in (("mask", mask), ("bias", bias)):
            if not isinstance(value, list | tuple):
                shared[name] = value
                continue
            if len(value) != self.num_layers:
                raise ValueError(
                    f"{name} must be one for all layers, or a sequence of L = "
                    f"{self.num_layers}, got {len(value)}."
                )
            per_layer[name] = value

        def call_layer(i: int, x: Array, options: dict[str, Any]):
            output, *seen = self.make_layer(i)(x, *args, **shared, **options)
            return output, tuple(seen)

        layers = range(self.num_layers)
        options = [{name: x[i] for name, x in per_layer.items()} for i in layers]
        x, results = self.stack(call_layer, x, options)
        x = site_primitive.site("stream", x)
        if self.make_norm is not None:
            x = self.make_norm(name="norm")(x)
        return x, *zip(*results, strict=True)


class Encoder(Stack):
    """A stack of encoder layers, as `Encoder(2, num_heads=4, hidden_size=128)`.

    Example:
      >>> def f(x):
      ...     encoder = mh.Encoder(3, num_heads=2, key_size=4, hidden_size=16)
      ...     return encoder(x, is_training=False)
      ...
      >>> f = hk.without_apply_rng(hk.transform(f))
      >>> x = jnp.ones((1, 5, 8))
      >>> output, maps = f.apply(f.init(jax.random.key(0), x), x)
      >>> output.shape, len(maps)
      ((1, 5, 8), 3)
    """

    make_sized_layer = EncoderLayer

    def __call__(
        self,
        x: Array,
        mask: masks.Mask | Array | Sequence | None = None,
        *,
        is_training: bool,
        bias: positions.ScoreBias | Array | Sequence | None = None,
        step: multi_head_attention.Step | None = None,
    ) -> tuple[Array, tuple[attention.AttentionMap, ...], *tuple[Any, ...]]:
        """Applies all layers: output `[B..., T, D]`, and one attention map per layer.

        Takes the arguments of `EncoderLayer`. Mask and bias apply to all layers, or are
        sequences of L, whose shapes and kinds must be the same if layers are scanned.

        Raises:
          ValueError: If a sequence does not have L entries, or scanned layers differ.
        """
        options = {"mask": mask, "bias": bias, "is_training": is_training}
        return self._run(x, step=step, **options)


class Decoder(Stack):
    """A stack of decoder layers, as `Decoder(2, num_heads=4, hidden_size=128)`.

    Example:
      >>> def f(x, encoded):
      ...     decoder = mh.Decoder(2, num_heads=2, key_size=4, hidden_size=16)
      ...     return decoder(x, encoded, mh.masks.causal(), is_training=False)
      ...
      >>> f = hk.without_apply_rng(hk.transform(f))
      >>> x, encoded = jnp.ones((1, 5, 8)), jnp.ones((1, 7, 8))
      >>> output, maps = f.apply(f.init(jax.random.key(0), x, encoded), x, encoded)
      >>> output.shape, len(maps)
      ((1, 5, 8), 2)
    """

    make_sized_layer = DecoderLayer

    def __call__(
        self,
        x: Array,
        encoded: Array,
        mask: masks.Mask | Array | Sequence | None = None,
        cross_mask: masks.Mask | Array | None = None,
        *,
        is_training: bool,
        bias: positions.ScoreBias | Array | Sequence | None = None,
        step: multi_head_attention.Step | None = None,
    ) -> tuple[Array, tuple[DecoderMaps, ...], *tuple[Any, ...]]:
        """Applies all layers; takes arguments as `DecoderLayer`, masks as `Encoder`."""
        options = {"mask": mask, "cross_mask": cross_mask, "bias": bias}
        return self._run(x, encoded, step=step, is_training=is_training, **options)


def dropout(x: Array, rate: float) -> Array:
    """Sets a share `rate` of `x` to zero, and scales the rest by 1 / (1 - rate)."""
    return hk.dropout(hk.next_rng_key(), rate, x) if rate else x


def _check_given_once(maker: str, make: Callable | None, size: str, value: Any) -> None:
    if make is None and value is None:
        raise ValueError(f"{size} or {maker} must be given.")
    if make is not None and value is not None:
        raise ValueError(f"{size} must be omitted where {maker} is given, got {value}.")
    if make is None:
        checks.non_negative_integer(size, value)
