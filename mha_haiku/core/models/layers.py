"""The layers of a model from its config: what they are made of, masks and biases."""

import functools
import operator
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from mha_haiku.core import masks, modules, positions
from mha_haiku.core.models import architecture, parts
from mha_haiku.core.models.architecture import ModelConfig
from mha_haiku.core.modules import layer_stacks

Array = jax.Array
Mask = masks.Mask


def make_stack(
    config: ModelConfig,
    implementation: str | Callable,
    stack: layer_stacks.LayerStack,
    *,
    decoder: bool = False,
) -> modules.Encoder | modules.Decoder:
    """Makes the decoder; or the encoder, the only stack if there is no decoder."""
    kind = modules.Decoder if decoder else modules.Encoder
    decoder_layers = parts.num_decoder_layers(config)
    ends_in_norm = architecture.NORM_PLACES[config.norm.position].end
    return kind(
        decoder_layers if decoder else config.num_layers,
        functools.partial(_make_layer, config, implementation, decoder),
        make_norm=None if ends_in_norm else architecture.make_norm(config),
        stack=stack,
        name="decoder" if decoder else "encoder",
    )


def own_masks(
    config: ModelConfig, lengths: Array | None, *, decoder: bool = False
) -> Mask | list[Mask]:
    """Makes the mask of all layers, or a list of one per layer where they differ."""
    windows = parts.windows(config)
    windows = windows[config.num_layers :] if decoder else windows[: config.num_layers]
    is_causal = decoder or config.family == "causal"
    own = [_mask(window, lengths, is_causal) for window in windows]
    return own if len(set(windows)) > 1 else own[0]


def cross_mask(
    source: Array | None, lengths: Array | None, decoder_lengths: Array | None
) -> Mask | None:
    """Makes the mask of cross-attention; lengths of None: all positions are valid."""
    if lengths is None and decoder_lengths is None:
        return None
    if lengths is None:
        lengths = jnp.full_like(decoder_lengths, source.shape[1])
    return masks.padding(lengths, decoder_lengths)


def bias(config: ModelConfig, kind: str = "") -> positions.ScoreBias | list | None:
    """Makes the score bias of all layers, or a list of one per pruned layer."""
    make_bias = modules.PositionScheme.of(config.embedding).bias
    if make_bias is None:
        return None
    is_causal = config.family == "causal" or kind == "decoder"
    prefix = "decoder_" if kind == "decoder" else ""
    result = make_bias(config.attention.num_heads, prefix, bidirectional=not is_causal)
    if config.attention.kept_heads is None:
        return result
    return [
        result.at_heads(heads.names)
        for heads in parts.heads_of_layers(config)
        if heads.kind == kind
    ]


def _mask(window, lengths, is_causal) -> Mask:
    kinds = []
    if window is not None:
        kinds.append(masks.window(window, 0 if is_causal else window))
    elif is_causal:
        kinds.append(masks.causal())
    if lengths is not None:
        kinds.append(masks.padding(lengths, lengths))
    return functools.reduce(operator.and_, kinds) if kinds else masks.full()


def _make_layer(config, implementation, decoder, i):
    """Makes layer i of the decoder, or of the encoder."""
    own = config.feed_forward
    place = config.num_layers + i if decoder else i  # among all layers
    hidden_size = parts.hidden_sizes(config)[place]
    rotate = modules.PositionScheme.of(config.embedding).rotate
    if rotate is not None:
        frequencies = parts.frequencies(config)[place]
        rotate = functools.partial(rotate, frequencies=frequencies)

    def make_feed_forward():
        return modules.FeedForward(
            hidden_size,
            **architecture.ACTIVATIONS[own.activation]._asdict(),
            with_bias=own.with_bias,
            name="feed_forward",
        )

    options = {
        "make_feed_forward": make_feed_forward if hidden_size else None,
        "hidden_size": None if hidden_size else 0,
        "make_norm": architecture.make_norm(config),
        "norm_position": config.norm.position,
        "attention_residual": config.attention.residual,
        "feed_forward_residual": own.residual,
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
        parallel=own.parallel,
        **options,
    )


def _make_attention(config, implementation, heads, name, *, rotary=None):
    # Only self-attention uses positions, smeared keys included: the distance of a
    # target's position to a source's means nothing.
    own = config.attention
    # Norms of heads take the root mean square, whatever norms the stream has.
    head_norm = functools.partial(modules.RMSNorm, config.norm.epsilon)
    qk_norms = architecture.QK_NORMS[own.qk_norm_over]
    if hk.running_init():  # makes parameters from one example, on one device
        implementation = own.implementation
    smears = own.smear_keys and name == "attention"

    def make():
        if not heads.names:  # all are pruned
            return modules.NoAttention(
                config.model_size, with_bias=own.output_bias, name=name
            )
        kind = modules.MultiHeadAttention
        if own.differential:
            kind = modules.DifferentialAttention
        return kind(
            len(heads.names),
            parts.key_size(config),
            model_size=config.model_size,
            with_bias=own.with_bias,
            output_bias=own.output_bias,
            num_key_value_heads=heads.num_key_value_heads,
            groups=heads.groups,
            transforms=modules.HeadTransforms(
                own.qk_norm and qk_norms(head_norm),
                modules.smeared_keys if smears else None,
                rotary,
            ),
            pattern=modules.Pattern.of(own),
            implementation=implementation,
            name=name,
        )

    return make
