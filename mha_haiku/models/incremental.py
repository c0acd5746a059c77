"""A model token by token: what it keeps of earlier tokens, and one step.

B batch, P positions of prompts, S_max positions that a text may grow to, D width, C
tokens of the vocabulary, L layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from mha_haiku import attention, checks, modules, tiles
from mha_haiku.models import architecture, ends, layers
from mha_haiku.modules import multi_head_attention

Array = jax.Array


@tiles.pytree(data=("layers", "positions", "rows"), meta=("size",))
class DecodingCache:
    """What a model keeps of the tokens so far, as a pytree.

    Attributes:
      layers: A cache per layer; of layers without heads the `attention.Prompt`.
      positions: `[B]`, where the next token of each example stands.
      rows: Where queries are kept, a map of each layer without its arrays: mask, bias
        and score; else None.
      size: S_max.
    """

    layers: tuple[attention.Cache | attention.Prompt, ...]
    positions: Array
    rows: tuple[attention.AttentionMap, ...] | None
    size: int

    def at(self, layers: tuple, positions: Array) -> "DecodingCache":
        """Returns the cache with other layers, at other positions."""
        return dataclasses.replace(self, layers=layers, positions=positions)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Parameters as steps read them; see `Decoding.prepare`."""

    params: Any


jax.tree_util.register_dataclass(Prepared, data_fields=["params"], meta_fields=[])


class Decoding(NamedTuple):
    """A model token by token, as pure functions.

    With a cache the logits and maps are those of whole texts without it.

    Attributes:
      prefill: `prefill(params, prompts, lengths, *, max_length, keep_queries=False,
        interventions=None) -> (logits, cache)`. Prompts are tokens `[B, P]`, lengths
        `[B]` of at least 1 say where each ends; the logits `[B, C]` are those of its
        last token. A text may grow to `max_length` positions, S_max. With
        `keep_queries` the cache has the maps of the whole text, see `maps`.
      step: `step(params, tokens, cache, *, observe=None, interventions=None) ->
        (logits, maps, cache)`. The tokens `[B]` are put at the cache's positions. The
        maps, one per layer, are of shape `(B, H, 1, S_max)`, or as many keys as a
        window lets anybody see. Examples stand at positions of their own, so that a
        map is one of many: `jax.vmap(lambda row: row.weights())(maps[0])`. `observe`
        is a function of the map `(H, 1, S_max)` of one example, whose results stand in
        the place of maps. Interventions have no batch axes.
      prepare: From the model's parameters to what both of the above take in their
        place, and read faster where they are called often.
      num_tokens: The vocabulary.
      max_length: The longest text that the model has positions for; None: any.
    """

    prefill: Callable[..., tuple[Array, DecodingCache]]
    step: Callable[..., tuple[Array, tuple, DecodingCache]]
    prepare: Callable[[Any], Prepared]
    num_tokens: int
    max_length: int | None


def decoding(
    config: Any,
    *,
    num_tokens: int | None,
    num_classes: int,
    implementation: str | Callable,
    policy: jmp.Policy,
    is_scanned: bool,
) -> Decoding | None:
    """Returns a model token by token; None where no token follows from others.

    Args:
      config: `config.model`.
      num_tokens: Vocabulary of the inputs; None where they are features.
      num_classes: C.
      implementation: That of attention among the tokens of prompts, as in `attend`.
      policy: Of the model's precision.
      is_scanned: Whether the model's layers are scanned; steps are looped.
    """
    has_logits = config.output.logits and config.output.pool is None
    if config.family != "causal" or num_tokens is None or not has_logits:
        return None

    def forward_with_cache(tokens, caches, first, last=None, **options):
        embedding = ends.make_embedding(config, num_tokens)
        x = ends.embedded(config, embedding, tokens, first=first)
        x, maps, _, caches = layers.make_encoder(
            config, implementation, modules.looped
        ).encode(
            x,
            layers.encoder_masks(config, None),
            bias=layers.bias(config),
            caches=caches,
            first_query=first,
            is_training=False,
            **options,
        )
        if last is not None:
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        logits = ends.logits(config, embedding, x, None, num_classes, policy)
        return logits[..., 0, :], maps, caches

    forward = hk.transform(forward_with_cache).apply
    has_table = config.embedding.positions == "learned"
    longest = config.embedding.max_length if has_table else None

    def prepare(params):
        if isinstance(params, Prepared):
            return params
        return Prepared(
            policy.cast_to_compute(modules.unstacked(params) if is_scanned else params)
        )

    def prefill(
        params, prompts, lengths, *, max_length, keep_queries=False, interventions=None
    ):
        checks.integer_in("max_length", max_length, 1, longest)
        prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
        if prompts.ndim != 2 or not 1 <= prompts.shape[1] <= max_length:
            raise ValueError(
                "prompts must be [B, P] with P from 1 to max_length = "
                f"{max_length}, got shape {prompts.shape}."
            )
        caches = [
            attention.Prompt(lengths, max_length, window, keep_queries)
            for window in architecture.windows(config)
        ]
        logits, maps, caches = forward(
            prepare(params).params,
            None,
            prompts,
            caches,
            0,
            lengths - 1,
            interventions=interventions,
        )
        rows = tuple(map(_without_arrays, maps)) if keep_queries else None
        return logits, DecodingCache(caches, lengths, rows, max_length)

    def step(params, tokens, cache, *, observe=None, interventions=None):
        known = tiles.known(cache.positions)
        if known is not None and (known >= cache.size).any():
            raise ValueError(
                f"the cache has room for max_length = {cache.size} tokens, and is full."
            )
        params = prepare(params).params

        @functools.partial(jax.vmap, in_axes=(0, 0, 0))
        def step_of_one(token, caches, position):
            given = {"observe": observe, "interventions": interventions}
            return forward(params, None, token[None], caches, position, **given)

        tokens = jnp.asarray(tokens)
        logits, maps, caches = step_of_one(tokens, cache.layers, cache.positions)
        return logits, maps, cache.at(caches, cache.positions + 1)

    return Decoding(prefill, step, prepare, num_tokens, longest)


def maps(cache: DecodingCache) -> tuple[attention.AttentionMap, ...]:
    """Returns the attention maps of whole texts, `(B, H, S_max, S_max)` per layer.

    Rows of positions that no token has been put at have no weights.

    Args:
      cache: Of a prefill with `keep_queries`, and any number of steps.

    Raises:
      ValueError: If queries were not kept.
    """
    if cache.rows is None:
        raise ValueError(
            "the maps of a whole text need the queries of all its tokens: keep_queries "
            "must be True where the cache is made."
        )
    return tuple(
        _whole_map(cache, layer, row)
        for layer, row in zip(cache.layers, cache.rows, strict=True)
    )


def _whole_map(cache, layer, row):
    if isinstance(layer, attention.Prompt):  # of a layer without heads
        x = jnp.zeros((*cache.positions.shape, cache.size, 1))
        return multi_head_attention.map_of_no_heads(x, x, row.mask)
    return layer.whole_map(row, cache.positions)


def _without_arrays(attention_map):
    return dataclasses.replace(
        attention_map, query=None, key=None, value=None, logsumexp=None
    )
