"""The forward pass of a model: of whole inputs, of prompts, of one token at a time.

B batch, T positions, S positions of a source, D width, C classes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp

from mha_haiku.core import attention, display
from mha_haiku.core.models import ends, layers
from mha_haiku.core.models.architecture import ModelConfig
from mha_haiku.core.modules import layer_stacks

Array = jax.Array


@jax.tree_util.register_pytree_node_class
class Maps(tuple):
    """The attention maps of an encoder-decoder: a tuple that knows kinds of attention.

    Attributes:
      kinds: How many of the maps are of each of `architecture.KINDS`, in turn.
    """

    kinds: tuple[int, int, int]

    def __new__(cls, maps: Iterable[Any], kinds: tuple[int, int, int]) -> "Maps":
        """Returns the maps of the encoder, the decoder, and cross-attention."""
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
        """Returns the maps, and their kinds."""
        return tuple(self), self.kinds

    @classmethod
    def tree_unflatten(cls, kinds: tuple[int, int, int], maps: Iterable[Any]) -> "Maps":
        """Returns the maps of these kinds."""
        return cls(maps, kinds)


class Output(NamedTuple):
    """What a model returns.

    Attributes:
      logits: `[B, T, C]` float32; `[B, C]` where the config pools positions; of a set
        classifier `[B, T]`, one per element; None where the config wants none.
      maps: One attention map of shape `(B, H, T, T)` per layer; of an encoder-decoder
        `Maps`, the maps of all its attention parts.
      output: What the last norm returns, `[B, T, D]` float32, before any pooling; of an
        encoder-decoder the output of the decoder.
    """

    logits: Array | None
    maps: tuple[attention.AttentionMap, ...]
    output: Array | None = None

    def __repr__(self) -> str:
        return display.record(self)


def forward(
    config: ModelConfig,
    inputs: Array | None,
    lengths: Array | None = None,
    segments: Array | None = None,
    *,
    decoder_inputs: Array | None = None,
    decoder_lengths: Array | None = None,
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
    `caches` are what each layer keeps of earlier tokens, see `modules.Encoder.step` and
    `modules.Decoder.step`, for which the first token is at position `first`. `last`,
    `[B]`, says of which one token of each text logits are wanted; None: of all.
    """
    has_decoder = config.family == "encoder_decoder"
    encoded, encoder_maps = None, ()

    def run(*args, decoder=False, **given):
        own = layers.make_stack(config, implementation, stack, decoder=decoder)
        if caches is None or decoder != has_decoder:
            return *own(*args, is_training=is_training, **given), None
        return own.step(*args, cache=caches, first_query=first, **given)

    if inputs is not None:
        valid = ends.valid(inputs, lengths)
        embedding = ends.make_embedding(config, num_tokens)
        x, maps, kept = run(
            ends.embedded(
                config,
                embedding,
                ends.zeroed(inputs, valid),
                segments,
                first=0 if has_decoder else first,
            ),
            mask=layers.own_masks(config, lengths),
            bias=layers.bias(config, "encoder" if has_decoder else ""),
        )
        encoded, encoder_maps = x, maps
    if has_decoder:
        valid = ends.valid(decoder_inputs, decoder_lengths)
        embedding = ends.make_embedding(config, num_classes, decoder=True)
        x, decoder_maps, kept = run(
            ends.embedded(
                config,
                embedding,
                ends.zeroed(decoder_inputs, valid),
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
        logits = ends.logits(config, embedding, read, valid, num_classes, policy)
    return Output(logits, maps, policy.cast_to_output(x)), kept
