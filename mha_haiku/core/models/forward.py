"""The forward pass of a model, for whole inputs, prompts, or one token at a time."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
from jax import Array

from mha_haiku.core import attention, display, masks, modules, positions, site_primitive
from mha_haiku.core.models import architecture, parts
from mha_haiku.core.models.architecture import ModelConfig
from mha_haiku.core.modules import layer_stacks


class Maps(tuple):
    """The attention maps of an encoder-decoder: a tuple with a view of each kind."""

    kinds: tuple[int, int, int]

    def __new__(cls, maps: Iterable[Any], kinds: tuple[int, int, int]) -> "Maps":
        result = super().__new__(cls, maps)
        result.kinds = kinds
        return result

    @property
    def encoder(self) -> tuple:
        """The maps of the encoder's layers, all `(B, H, S, S)`."""
        return tuple(self[: self.kinds[0]])

    @property
    def decoder(self) -> tuple:
        """The maps of the decoder's self-attention, all `(B, H, T, T)`."""
        return tuple(self[self.kinds[0] : sum(self.kinds[:2])])

    @property
    def cross(self) -> tuple:
        """The maps of the decoder's cross-attention, all `(B, H, T, S)`."""
        return tuple(self[sum(self.kinds[:2]) :])


jax.tree_util.register_pytree_node(
    Maps, lambda maps: (tuple(maps), maps.kinds), lambda kinds, maps: Maps(maps, kinds)
)


class Output(NamedTuple):
    """The output of a model."""

    # `[B, T, C]` float32; `[B, C]` if the config pools positions; for a set classifier
    # `[B, T]`, one per element; None if the config has no logits.
    logits: Array | None
    # One attention map of shape `(B, H, T, T)` per layer; for an encoder-decoder
    # `Maps`, the maps of all its attention parts.
    maps: tuple[attention.AttentionMap, ...]
    # The output of the last norm, `[B, T, D]` float32, before any pooling; for an
    # encoder-decoder the output of the decoder.
    output: Array | None = None
    # `[]`, the loss that a wrapped module computed from labels among its inputs.
    loss: Array | None = None

    def __repr__(self) -> str:
        return display.record(self)


def forward(
    config: ModelConfig,
    inputs: Array | None,
    lengths: Array | None = None,
    segments: Array | None = None,
    decoder_inputs: Array | None = None,
    decoder_lengths: Array | None = None,
    *,
    caches: Sequence | None = None,
    first: int | Array = 0,
    last: Array | None = None,
    is_training: bool,
    num_tokens: int | None,
    num_classes: int,
    implementation: str | Callable,
    policy: jmp.Policy,
    stack: layer_stacks.LayerStack,
) -> tuple[Output, Any]:
    """Runs the model under Haiku; returns the output, and the updated caches or None.

    Inputs and sizes are as in `build.Model.apply` and `build.build`; inputs are None if
    the caches of an encoder-decoder have the keys and values of its source. `caches`
    has the cache of each layer; the first token is at position `first`, and `last`,
    `[B]`, selects the only token of each text whose logits are computed.
    """
    has_decoder = config.family == "encoder_decoder"

    def run(
        decoder: bool,
        num_tokens: int | None,
        inputs: Any,
        lengths: Array | None,
        segments: Array | None,
        *encoded,
        **options,
    ) -> tuple[Any, ...]:
        """Runs a stack; returns embedding, valid positions, output, maps, caches."""
        is_last = decoder == has_decoder
        size, name = config.model_size, _prefix(decoder) + "embedding"
        if num_tokens is None:
            embedding = hk.Linear(size, name=name)
        else:
            embedding = modules.TokenEmbedding(num_tokens, size, name=name)
        valid = None  # where all positions `[B, T]` are
        if lengths is not None:
            at = jnp.arange(inputs.shape[1])[None, :]
            valid = at < jnp.asarray(lengths)[:, None]
            # NaN in padding must reach no gradient.
            is_valid = valid.reshape(*valid.shape, *(1,) * (inputs.ndim - 2))
            inputs = jnp.where(is_valid, inputs, 0)
        start = first if is_last else 0
        x = _embedded(config, embedding, inputs, segments, decoder, start)
        options["mask"] = _mask(config, lengths, decoder)
        options["bias"] = _bias(config, decoder)
        is_pre = config.norm.position == "pre"
        layers = (modules.Decoder if decoder else modules.Encoder)(
            parts.num_decoder_layers(config) if decoder else config.num_layers,
            functools.partial(_make_layer, config, implementation, decoder),
            make_norm=architecture.make_norm(config) if is_pre else None,
            stack=stack,
            name="decoder" if decoder else "encoder",
        )
        if is_last and caches is not None:
            options |= {"cache": caches, "first_query": first}
            results = layers.step(x, *encoded, **options)
        else:
            results = *layers(x, *encoded, is_training=is_training, **options), None
        return embedding, valid, *results

    x, maps = None, ()
    if inputs is not None:
        arguments = num_tokens, inputs, lengths, segments
        embedding, valid, x, maps, kept = run(False, *arguments)
    if has_decoder:
        arguments = num_classes, decoder_inputs, decoder_lengths, None
        cross_mask = _cross_mask(inputs, lengths, decoder_lengths)
        embedding, valid, x, decoder_maps, kept = run(
            True, *arguments, x, cross_mask=cross_mask
        )
        of_decoder, cross = zip(*decoder_maps, strict=True)
        sizes = len(maps), len(of_decoder), len(cross)
        maps = Maps((*maps, *of_decoder, *cross), sizes)
    assert x is not None  # there are inputs, or a decoder
    logits = None
    if config.output.logits:
        read = x
        if last is not None:
            read = jnp.take_along_axis(x, last[:, None, None], axis=1)
        logits = _logits(config, embedding, read, valid, num_classes, policy)
    return Output(logits, maps, policy.cast_to_output(x)), kept


def _embedded(
    config: ModelConfig,
    embedding: Callable[[Array], Array],
    inputs: Array,
    segments: Array | None,
    decoder: bool,
    first: int | Array,
) -> Array:
    """Embeds inputs, adds positions and segments, and normalizes: `[B, T, D]`."""
    section, prefix = config.embedding, _prefix(decoder)
    x = embedding(inputs)
    if section.scale != 1:
        x = x * section.scale
    x = site_primitive.site(prefix + "token_embedding", x)
    with_positions = _position_scheme(config).embed
    if with_positions is not None:
        x = with_positions(x, first, prefix)
    if section.segments and not decoder:
        table = modules.TokenEmbedding(
            section.segments,
            config.model_size,
            name="segments",
            w_init=hk.initializers.RandomNormal(0.02),
        )
        x = x + table(jnp.zeros(x.shape[:-1], int) if segments is None else segments)
    x = _normed(config, section.norm, prefix + "embedding_norm", x)
    return site_primitive.site(prefix + "embedding", x)


def _position_scheme(config: ModelConfig) -> modules.PositionScheme:
    return modules.PositionScheme.of(config.embedding.positions, config.embedding)


def _prefix(decoder: bool) -> str:
    return "decoder_" if decoder else ""


def _logits(
    config: ModelConfig,
    embedding: Any,
    x: Array,
    valid: Array | None,
    num_classes: int,
    policy: jmp.Policy,
) -> Array:
    """Computes logits `[B, T, C]`, pooled `[B, C]`, of a set classifier `[B, T]`."""
    section, is_set = config.output, config.family == "set_classifier"
    x = _pooled(section.pool, x, valid)
    if section.hidden is not None:
        hidden = hk.Linear(config.model_size, name="output_hidden")(x)
        x = architecture.OUTPUT_ACTIVATIONS[section.hidden](hidden)
    x = _normed(config, section.norm, "output_norm", x)
    with_bias = section.with_bias
    if section.tied:
        x = embedding.logits(x, num_classes)
        x = modules.Bias(name="logits")(x) if with_bias else x
    else:
        x = hk.Linear(1 if is_set else num_classes, with_bias, name="logits")(x)
    x = policy.cast_to_output(x[..., 0] if is_set else x)
    x = jnp.where(valid, x, -jnp.inf) if is_set and valid is not None else x
    return site_primitive.site("logits", x)


def _normed(config: ModelConfig, is_normed: bool, name: str, x: Array) -> Array:
    return architecture.make_norm(config)(name=name)(x) if is_normed else x


def _pooled(pool: str | None, x: Array, valid: Array | None) -> Array:
    if pool == "first":
        return x[:, 0]
    if pool == "mean":
        counts = jnp.ones(x.shape[:2], bool) if valid is None else valid
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        total = jnp.where(counts[..., None], x, 0).sum(1, dtype=dtype)
        return (total / jnp.maximum(counts.sum(1), 1)[:, None]).astype(x.dtype)
    return x


# --- The layers: their parts, masks and biases


def _mask(config: ModelConfig, lengths: Array | None, decoder: bool) -> masks.Mask:
    window, kinds = config.attention.window, []
    is_causal = decoder or config.family == "causal"
    if window is not None:
        kinds.append(masks.window(window, 0 if is_causal else window))
    elif is_causal:
        kinds.append(masks.causal())
    if lengths is not None:
        kinds.append(masks.padding(lengths, lengths))
    return functools.reduce(operator.and_, kinds, masks.full())


def _cross_mask(
    source: Any, lengths: Array | None, decoder_lengths: Any
) -> masks.Mask | None:
    """Makes the mask of cross-attention; without lengths all positions are valid."""
    if lengths is None and decoder_lengths is None:
        return None
    if lengths is None:
        lengths = jnp.full_like(decoder_lengths, source.shape[1])
    return masks.padding(lengths, decoder_lengths)


def _bias(config: ModelConfig, decoder: bool) -> positions.ScoreBias | list | None:
    """Makes the score bias of all layers, or a list of one per pruned layer."""
    make_bias = _position_scheme(config).bias
    if make_bias is None:
        return None
    is_causal = decoder or config.family == "causal"
    sizes = config.attention.num_heads, _prefix(decoder)
    result = make_bias(*sizes, bidirectional=not is_causal)
    if config.attention.kept_heads is None:
        return result
    return [
        result.at_heads(heads.names)
        for heads in parts.heads_of_layers(config)
        if heads.kind in (("decoder",) if decoder else ("", "encoder"))
    ]


def _make_layer(
    config: ModelConfig, implementation: str | Callable, decoder: bool, i: int
) -> modules.DecoderLayer | modules.EncoderLayer:
    section = config.feed_forward
    place = config.num_layers + i if decoder else i  # among all layers
    hidden_size = parts.hidden_sizes(config)[place]
    rotate = _position_scheme(config).rotate

    def make_feed_forward():
        return modules.FeedForward(
            hidden_size,
            **architecture.ACTIVATIONS[section.activation],
            with_bias=section.with_bias,
            name="feed_forward",
        )

    options = {
        "make_feed_forward": make_feed_forward if hidden_size else None,
        "hidden_size": None if hidden_size else 0,
        "make_norm": architecture.make_norm(config),
        "norm_position": config.norm.position,
        "attention_residual": config.attention.residual,
        "feed_forward_residual": section.residual,
        "dropout_rate": config.dropout_rate,
        "name": f"layer_{i}",
    }
    make = functools.partial(_make_attention, config, implementation)
    heads = {x.kind: x for x in parts.heads_of_layers(config) if x.layer == i}
    if decoder:
        return modules.DecoderLayer(
            make(heads["decoder"], "attention", rotary=rotate),
            make(heads["cross"], "cross_attention"),
            **options,
        )
    attend = make(heads.get("encoder", heads.get("")), "attention", rotary=rotate)
    return modules.EncoderLayer(
        attend if config.attention.num_heads else None,
        num_heads=None if config.attention.num_heads else 0,
        **options,
    )


def _make_attention(
    config: ModelConfig,
    implementation: str | Callable,
    heads: Any,
    name: str,
    *,
    rotary: Callable | None = None,
):
    # Only self-attention uses positions, and so smeared keys: the distance of a
    # target's position to a source's has no meaning.
    section = config.attention
    # Heads are normalized by the root mean square, whatever norms the stream has.
    head_norm = functools.partial(modules.RMSNorm, config.norm.epsilon)
    if hk.running_init():  # makes parameters from one example, on one device
        implementation = section.implementation
    smears = section.smear_keys and name == "attention"

    def make():
        if not heads.names:  # all are pruned
            return modules.NoAttention(
                config.model_size, with_bias=section.output_bias, name=name
            )
        return modules.MultiHeadAttention(
            len(heads.names),
            parts.key_size(config),
            model_size=config.model_size,
            with_bias=section.with_bias,
            output_bias=section.output_bias,
            num_key_value_heads=heads.num_key_value_heads,
            groups=heads.groups,
            transforms=modules.HeadTransforms(
                section.qk_norm and head_norm,
                modules.smeared_keys if smears else None,
                rotary,
            ),
            pattern=modules.Pattern.of(section),
            implementation=implementation,
            name=name,
        )

    return make
