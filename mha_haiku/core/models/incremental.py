"""A model token by token: what it keeps of earlier tokens, and one step.

P positions of prompts, S_max positions that a text may grow to.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from mha_haiku.core import attention, checks, modules, tiles
from mha_haiku.core.models import parts
from mha_haiku.core.models.architecture import ModelConfig

Array = jax.Array


@tiles.pytree
class DecodingCache:
    """What a model keeps of the tokens so far, as a pytree of arrays `[B, ...]`."""

    # A cache per layer, of an encoder-decoder a pair: of self-attention and of
    # cross-attention, which has the keys and values of the source. Of attention without
    # heads the `attention.Prompt`.
    layers: tuple
    positions: Array  # `[B]`, where the next token of each example stands
    # `[B]`, valid positions of the source; None: all, or no source.
    source_lengths: Array | None
    size: int = tiles.static()  # S_max


class Decoding(NamedTuple):
    """A model token by token, as pure functions.

    Logits and maps with a cache equal the logits and maps of whole texts without it.

    Attributes:
      prefill: `prefill(params, prompts, lengths, *, max_length, source=None,
        source_lengths=None) -> (logits, cache)`. Prompts are tokens `[B, P]`, of
        lengths `[B]`; the logits `[B, C]` follow their last tokens. A text may grow to
        `max_length` positions, S_max. For a source see `decoding.generate`.
      step: `step(params, tokens, cache) -> (logits, maps, cache)`. The tokens `[B]` are
        put at the cache's positions. The maps, one per layer, are `(B, H, 1, S_max)`,
        or as many keys as a window lets anybody see; an encoder's are left out.
        Examples stand at positions of their own, so that a map is one of many:
        `jax.vmap(lambda row: row.weights())(maps[0])`; sites have one example's value.
      prepare: Converts the parameters to what both of the above read faster; what it
        has converted stays.
      num_tokens: The vocabulary.
      max_length: The longest text that the model has positions for; None: any.
      has_source: Whether a source must be given.

    Raises:
      ValueError: From `prefill`, if prompts or `max_length` do not fit, or a source is
        missing or not read; from `step`, if a cache is full.
    """

    prefill: Callable[..., tuple[Array, DecodingCache]]
    step: Callable[..., tuple[Array, tuple, DecodingCache]]
    prepare: Callable[[Any], Any]
    num_tokens: int
    max_length: int | None
    has_source: bool


def decoding(
    config: ModelConfig,
    forward: Callable,
    num_tokens: int | None,
    policy: jmp.Policy,
) -> Decoding | None:
    """Makes a model run token by token; None where no token follows from others."""
    # Steps of scanned layers, too, are looped.
    has_source = config.family == "encoder_decoder"
    has_logits = config.output.logits and config.output.pool is None
    is_causal = config.family in ("causal", "encoder_decoder")
    if num_tokens is None or not is_causal or not has_logits:
        return None
    longest = parts.max_length(config)
    transformed = hk.transform(
        functools.partial(forward, is_training=False, stack=modules.looped)
    )

    def advance(params, tokens, source, source_lengths, **more):
        """Reads one token: its logits, the maps and the changed caches."""
        given = {"inputs": tokens}
        if has_source:
            given = {"inputs": source, "lengths": source_lengths}
            given["decoder_inputs"] = tokens
        output, caches = transformed.apply(params, None, **given, **more)
        return output.logits[..., 0, :], output.maps, caches

    def prepare(params):
        is_stacked = any(map(modules.is_stacked, params))
        looped = modules.unstacked(params) if is_stacked else params
        return policy.cast_to_compute(looped)

    def prefill(
        params,
        prompts,
        lengths,
        *,
        max_length,
        source=None,
        source_lengths=None,
    ):
        checks.integer_in("max_length", max_length, 1, longest)
        prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
        if prompts.ndim != 2 or not 1 <= prompts.shape[1] <= max_length:
            raise ValueError(
                "prompts must be [B, P] with P from 1 to max_length = "
                f"{max_length}, got shape {prompts.shape}."
            )
        check_source(has_source, source, source_lengths)
        windows = parts.windows(config)
        if has_source:
            windows = windows[config.num_layers :]
        caches = [attention.Prompt(lengths, max_length, window) for window in windows]
        if has_source:
            of_source = attention.Prompt(lengths, max_length, is_source=True)
            caches = [(own, of_source) for own in caches]
            source = policy.cast_to_compute(jnp.asarray(source))
        logits, _, caches = advance(
            prepare(params),
            prompts,
            source,
            source_lengths,
            caches=caches,
            last=lengths - 1,
        )
        return logits, DecodingCache(caches, lengths, source_lengths, max_length)

    def step(params, tokens, cache):
        known = tiles.known(cache.positions)
        if known is not None and (known >= cache.size).any():
            raise ValueError(
                f"the cache has room for max_length = {cache.size} tokens, and is full."
            )
        params = prepare(params)

        @jax.vmap
        def step_of_one(token, caches, position, source_lengths):
            return advance(
                params,
                token[None],
                None,
                source_lengths,
                caches=caches,
                first=position,
            )

        logits, maps, caches = step_of_one(
            jnp.asarray(tokens), cache.layers, cache.positions, cache.source_lengths
        )
        return (
            logits,
            maps,
            dataclasses.replace(cache, layers=caches, positions=cache.positions + 1),
        )

    return Decoding(prefill, step, prepare, num_tokens, longest, has_source)


def check_source(has_source: bool, source: Any, source_lengths: Any) -> None:
    """Raises ValueError unless there is a source where one is read, and only there."""
    if has_source and source is None:
        raise ValueError("source must be given: the model is an encoder-decoder.")
    if not has_source and (source is not None or source_lengths is not None):
        raise ValueError(
            "source and source_lengths must be None: the model has no encoder."
        )
