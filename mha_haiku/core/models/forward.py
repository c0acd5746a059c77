"""The forward pass of a model: of whole inputs, of prompts, of one token at a time."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from mha_haiku.core import attention, display, modules, sites
from mha_haiku.core.models import architecture, layers
from mha_haiku.core.models.architecture import ModelConfig
from mha_haiku.core.modules import layer_stacks

Array = jax.Array

OUTPUT_MODULES = ("output_hidden", "output_norm", "logits")
"""Names of the modules behind the last layer: what a model predicts is theirs."""


@jax.tree_util.register_pytree_node_class
class Maps(tuple):
    """The attention maps of an encoder-decoder: a tuple that knows their kinds."""

    kinds: tuple[int, int, int]

    def __new__(cls, maps: Iterable[Any], kinds: tuple[int, int, int]) -> "Maps":
        result = super().__new__(cls, maps)
        result.kinds = kinds
        return result

    @property
    def encoder(self) -> tuple:
        """The maps of the encoder's layers, `(B, H, S, S)` each."""
        return tuple(self[: self.kinds[0]])

    @property
    def decoder(self) -> tuple:
        """The maps of the decoder's self-attention, `(B, H, T, T)` each."""
        return tuple(self[self.kinds[0] : sum(self.kinds[:2])])

    @property
    def cross(self) -> tuple:
        """The maps of the decoder's positions on the encoder's, `(B, H, T, S)` each."""
        return tuple(self[sum(self.kinds[:2]) :])

    def tree_flatten(self) -> tuple[tuple, tuple[int, int, int]]:
        return tuple(self), self.kinds

    @classmethod
    def tree_unflatten(cls, kinds: tuple[int, int, int], maps: Iterable[Any]) -> "Maps":
        return cls(maps, kinds)


class Output(NamedTuple):
    """What a model returns."""

    # `[B, T, C]` float32; `[B, C]` where the config pools positions; of a set
    # classifier `[B, T]`, one per element; None where the config wants none.
    logits: Array | None
    # One attention map of shape `(B, H, T, T)` per layer; of an encoder-decoder `Maps`,
    # the maps of all its attention parts.
    maps: tuple[attention.AttentionMap, ...]
    # What the last norm returns, `[B, T, D]` float32, before any pooling; of an
    # encoder-decoder the output of the decoder.
    output: Array | None = None

    __repr__ = display.record


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
    """Runs the model under Haiku: the output, and the changed caches or None.

    Inputs and sizes are as in `build.Model.apply` and `build.build`; inputs are None
    where the caches of an encoder-decoder have the keys and values of its source.
    `caches` are what each layer keeps of earlier tokens; the first token is at `first`,
    and `last`, `[B]`, is the one token of each text whose logits are wanted.
    """
    has_decoder = config.family == "encoder_decoder"
    encoded, encoder_maps = None, ()

    def run(*args, decoder=False, **given):
        own = layers.make_stack(config, implementation, stack, decoder=decoder)
        if caches is None or decoder != has_decoder:
            return *own(*args, is_training=is_training, **given), None
        return own.step(*args, cache=caches, first_query=first, **given)

    if inputs is not None:
        valid = _valid(inputs, lengths)
        embedding = _make_embedding(config, num_tokens)
        x, maps, kept = run(
            _embedded(
                config,
                embedding,
                _zeroed(inputs, valid),
                segments,
                first=0 if has_decoder else first,
            ),
            mask=layers.own_masks(config, lengths),
            bias=layers.bias(config, "encoder" if has_decoder else ""),
        )
        encoded, encoder_maps = x, maps
    if has_decoder:
        valid = _valid(decoder_inputs, decoder_lengths)
        embedding = _make_embedding(config, num_classes, decoder=True)
        x, decoder_maps, kept = run(
            _embedded(
                config,
                embedding,
                _zeroed(decoder_inputs, valid),
                decoder=True,
                first=first,
            ),
            encoded,
            mask=layers.own_masks(config, decoder_lengths, decoder=True),
            cross_mask=layers.cross_mask(inputs, lengths, decoder_lengths),
            bias=layers.bias(config, "decoder"),
            decoder=True,
        )
        own, cross = zip(*decoder_maps, strict=True)
        kinds = len(encoder_maps), len(own), len(cross)
        maps = Maps((*encoder_maps, *own, *cross), kinds)
    logits = None
    if config.output.logits:
        read = x
        if last is not None:
            read = jnp.take_along_axis(x, last[:, None, None], axis=1)
        logits = _logits(config, embedding, read, valid, num_classes, policy)
    return Output(logits, maps, policy.cast_to_output(x)), kept


def _make_embedding(config, num_tokens, *, decoder=False) -> hk.Module:
    name = _prefix(decoder) + "embedding"
    if num_tokens is None:
        return hk.Linear(config.model_size, name=name)
    return modules.TokenEmbedding(num_tokens, config.model_size, name=name)


def _embedded(config, embedding, inputs, segments=None, *, decoder=False, first=0):
    """Embeds inputs, adds positions and segments, and normalizes: `[B, T, D]`."""
    own, prefix = config.embedding, _prefix(decoder)
    x = embedding(inputs)
    if own.scale != 1:
        x = x * own.scale
    x = sites.site(prefix + "token_embedding", x)
    with_positions = modules.PositionScheme.of(own).embed
    if with_positions is not None:
        x = with_positions(x, first, prefix)
    if own.segments and not decoder:
        table = modules.TokenEmbedding(
            own.segments,
            config.model_size,
            name="segments",
            w_init=hk.initializers.RandomNormal(0.02),
        )
        x = x + table(jnp.zeros(x.shape[:-1], int) if segments is None else segments)
    x = _normed(config, own.norm, prefix + "embedding_norm", x)
    return sites.site(prefix + "embedding", x)


def _prefix(decoder: bool) -> str:
    return "decoder_" if decoder else ""


def _valid(inputs: Array, lengths: Array | None) -> Array | None:
    """Returns the valid positions `[B, T]` of inputs `[B, T, ...]`; None: all are."""
    if lengths is None:
        return None
    return jnp.arange(inputs.shape[1])[None, :] < jnp.asarray(lengths)[:, None]


def _zeroed(inputs: Array, valid: Array | None) -> Array:
    """Replaces padding by zeros, so that NaN there reaches no gradient."""
    if valid is None:
        return inputs
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (inputs.ndim - 2)), inputs, 0)


def _logits(config, embedding, x, valid, num_classes, policy) -> Array:
    """Computes logits `[B, T, C]`, pooled `[B, C]`, of a set classifier `[B, T]`."""
    own, is_set = config.output, config.family == "set_classifier"
    x = _pooled(own.pool, x, valid)
    if own.hidden is not None:
        hidden = hk.Linear(config.model_size, name="output_hidden")(x)
        x = architecture.OUTPUT_ACTIVATIONS[own.hidden](hidden)
    x = _normed(config, own.norm, "output_norm", x)
    if own.tied:
        x = embedding.logits(x, num_classes)
        x = modules.Bias(name="logits")(x) if own.with_bias else x
    else:
        x = hk.Linear(1 if is_set else num_classes, own.with_bias, name="logits")(x)
    x = policy.cast_to_output(x[..., 0] if is_set else x)
    if own.soft_cap is not None:
        x = sites.site("uncapped_logits", x)
        x = own.soft_cap * jnp.tanh(x / own.soft_cap)
    x = jnp.where(valid, x, -jnp.inf) if is_set and valid is not None else x
    return sites.site("logits", x)


def _normed(config, is_normed: bool, name: str, x: Array) -> Array:
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
