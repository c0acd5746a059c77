"""Whole models as pure functions, built from a config.

B batch, T positions, D width, H heads, L layers, C classes. One family serves one kind
of target: `encoder` classifies each position, `causal` does so from what came before,
and `set_classifier` picks one element of a set, whatever its order.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from mha_haiku import attention, checks, masks, modules, positions

Array = jax.Array

FAMILIES = ("encoder", "causal", "set_classifier")
ACTIVATIONS = {
    "gelu": modules.gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
}
NORMS = {"layer_norm": modules.LayerNorm, "rms_norm": modules.RMSNorm}
POSITIONS = ("none", "learned", "sinusoidal", "rotary", "alibi", "t5")
PRECISIONS = {
    "float32": "params=float32,compute=float32,output=float32",
    "bfloat16": "params=float32,compute=bfloat16,output=float32",
}


# Convert parameters of a model without `scan_layers` to those of one with it, and back.
stacked, unstacked = modules.stacked, modules.unstacked


class Output(NamedTuple):
    """What a model returns.

    Attributes:
      logits: `[B, T, C]` float32; of a set classifier `[B, T]`, one per element.
      maps: One attention map of shape `(B, H, T, T)` per layer.
    """

    logits: Array
    maps: tuple[attention.AttentionMap, ...]


class Model(NamedTuple):
    """A model as pure functions.

    Attributes:
      init: `init(rng, inputs, lengths=None) -> params`.
      apply: `apply(params, rng, inputs, *, lengths=None, gates=None, is_training) ->
        Output`. Inputs are tokens `[B, T]` or features `[B, T, D]`; lengths `[B]` say
        how many positions of each example count; gates `[L, H]` multiply the heads'
        outputs. `rng` is for dropout, and may be None without.
    """

    init: Callable[..., Any]
    apply: Callable[..., Output]


def build(
    config: Any, *, num_tokens: int | None, feature_size: int | None, num_classes: int
) -> Model:
    """Returns the model that a config describes.

    Args:
      config: `config.model`, whose fields each file in configs/ explains.
      num_tokens: Vocabulary of the inputs; None where they are features.
      feature_size: Width of the input features; None where they are tokens.
      num_classes: C.

    Raises:
      checks.ConfigError: If a field is out of range.
    """
    check(config)
    policy = jmp.get_policy(PRECISIONS[config.precision])

    def forward(inputs, lengths=None, gates=None, *, is_training):
        valid = None if lengths is None else _valid(inputs, lengths)
        x = _embedded(config, _blanked(inputs, valid), num_tokens)
        mask = masks.full() if lengths is None else masks.padding(lengths, lengths)
        if config.family == "causal":
            mask = masks.causal() if lengths is None else masks.causal() & mask
        encoder = modules.Encoder(
            config.num_layers,
            functools.partial(_layer, config),
            make_norm=_make_norm(config) if config.norm_position == "pre" else None,
            stack=_stack(config),
            name="encoder",
        )
        x, maps = encoder(
            x, mask, is_training=is_training, bias=_bias(config), gates=gates
        )
        is_set = config.family == "set_classifier"
        logits = hk.Linear(1 if is_set else num_classes, name="logits")(x)
        logits = policy.cast_to_output(logits[..., 0] if is_set else logits)
        if is_set and valid is not None:
            logits = jnp.where(valid, logits, -jnp.inf)
        return Output(logits, maps)

    transformed = hk.transform(forward)

    def init(rng, inputs, lengths=None):
        inputs = policy.cast_to_param(inputs)
        return transformed.init(rng, inputs, lengths, is_training=False)

    def apply(params, rng, inputs, *, lengths=None, gates=None, is_training):
        params, inputs = policy.cast_to_compute((params, inputs))
        return transformed.apply(
            params, rng, inputs, lengths, gates, is_training=is_training
        )

    return Model(init, apply)


def check(config: Any) -> None:
    """Raises `checks.ConfigError` where a field of `config.model` is out of range."""
    checks.choice("config.model.family", config.family, FAMILIES)
    checks.choice("config.model.activation", config.activation, ACTIVATIONS)
    checks.choice("config.model.norm", config.norm, NORMS)
    checks.choice("config.model.norm_position", config.norm_position, ("pre", "post"))
    checks.choice("config.model.positions", config.positions, POSITIONS)
    checks.choice("config.model.precision", config.precision, PRECISIONS)
    checks.choice(
        "config.model.attention.implementation",
        config.attention.implementation,
        attention.IMPLEMENTATIONS,
    )
    for field in ("num_layers", "num_heads", "model_size", "hidden_size", "max_length"):
        checks.positive_integer(f"config.model.{field}", config[field])
    checks.positive_number("config.model.norm_epsilon", config.norm_epsilon)
    checks.fraction("config.model.dropout_rate", config.dropout_rate)
    if config.key_size is not None:
        checks.positive_integer("config.model.key_size", config.key_size)
    elif config.model_size % config.num_heads:
        raise checks.ConfigError(
            f"config.model.num_heads must divide model_size = {config.model_size} "
            f"where key_size is not given, got {config.num_heads}; the nearest that "
            f"does is {_nearest_divisor(config.model_size, config.num_heads)}."
        )
    if config.num_key_value_heads is not None:
        name = "config.model.num_key_value_heads"
        checks.positive_integer(name, config.num_key_value_heads)
        if config.num_heads % config.num_key_value_heads:
            raise checks.ConfigError(
                f"{name} must divide num_heads = {config.num_heads}, got "
                f"{config.num_key_value_heads}; the nearest that does is "
                f"{_nearest_divisor(config.num_heads, config.num_key_value_heads)}."
            )
    if config.positions == "rotary" and _key_size(config) % 2:
        raise checks.ConfigError(
            "config.model.positions = 'rotary' needs an even key size, got "
            f"{_key_size(config)}."
        )
    if config.positions == "sinusoidal" and config.model_size % 2:
        raise checks.ConfigError(
            "config.model.positions = 'sinusoidal' needs an even model_size, got "
            f"{config.model_size}."
        )


def _valid(inputs, lengths):
    """Returns which positions of inputs `[B, T, ...]` count: `[B, T]`."""
    return jnp.arange(inputs.shape[1])[None, :] < jnp.asarray(lengths)[:, None]


def _blanked(inputs, valid):
    """Puts zeros where inputs do not count, so that NaN there reaches no gradient."""
    if valid is None:
        return inputs
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (inputs.ndim - 2)), inputs, 0)


def _embedded(config, inputs, num_tokens):
    """Returns `[B, T, D]` from tokens or features, plus positions where added."""
    if num_tokens is None:
        x = hk.Linear(config.model_size, name="embedding")(inputs)
    else:
        x = modules.TokenEmbedding(num_tokens, config.model_size, name="embedding")(
            inputs
        )
    if config.positions == "learned":
        x = modules.LearnedPositions(config.max_length, name="positions")(x)
    if config.positions == "sinusoidal":
        encoding = positions.sinusoidal(jnp.arange(x.shape[-2]), config.model_size)
        x = x + encoding.astype(x.dtype)[None]
    return x


def _bias(config):
    if config.positions == "alibi":
        return positions.alibi(config.num_heads)
    if config.positions == "t5":
        return modules.RelativePositions(
            config.num_heads,
            bidirectional=config.family != "causal",
            name="relative_positions",
        )()
    return None


def _layer(config, i):
    def make_attention():
        return modules.MultiHeadAttention(
            config.num_heads,
            _key_size(config),
            model_size=config.model_size,
            with_bias=config.with_bias,
            num_key_value_heads=config.num_key_value_heads,
            rotary=positions.rotary if config.positions == "rotary" else None,
            qk_norm=config.qk_norm,
            implementation=config.attention.implementation,
            name="attention",
        )

    def make_feed_forward():
        return modules.FeedForward(
            config.hidden_size,
            activation=ACTIVATIONS[config.activation],
            gated=config.activation == "swiglu",
            with_bias=config.with_bias,
            name="feed_forward",
        )

    return modules.EncoderLayer(
        make_attention,
        make_feed_forward,
        make_norm=_make_norm(config),
        norm_position=config.norm_position,
        dropout_rate=config.dropout_rate,
        name=f"layer_{i}",
    )


def _stack(config):
    stack = modules.scanned if config.scan_layers else modules.looped
    return modules.rematerialized(stack) if config.rematerialize else stack


def _make_norm(config):
    return functools.partial(NORMS[config.norm], config.norm_epsilon)


def _key_size(config):
    return config.key_size or config.model_size // config.num_heads


def _nearest_divisor(number, wanted):
    divisors = [i for i in range(1, number + 1) if number % i == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
