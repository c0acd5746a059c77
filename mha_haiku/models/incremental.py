"""A model token by token: what it keeps of earlier tokens, and one step.

B batch, P positions of prompts, S_max positions that a text may grow to, S positions of
a source, D width, C tokens of the vocabulary, L layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from mha_haiku import attention, checks, masks, modules, tiles
from mha_haiku.models import ends, layers, parts
from mha_haiku.models.kinds import Maps
from mha_haiku.modules import multi_head_attention

Array = jax.Array


@tiles.pytree(
    data=("layers", "positions", "source_lengths", "rows", "encoder_maps"),
    meta=("size",),
)
class DecodingCache:
    """What a model keeps of the tokens so far, as a pytree.

    Attributes:
      layers: A cache per layer, of an encoder-decoder a pair: of self-attention and of
        cross-attention, which has the keys and values of the source. Of attention
        without heads the `attention.Prompt`.
      positions: `[B]`, where the next token of each example stands.
      source_lengths: `[B]`, valid positions of the source; None: all, or no source.
      rows: Where queries are kept, a map of each attention without its arrays: mask,
        bias, score and normalizer; else None.
      encoder_maps: Those of the source, likewise; () without one.
      size: S_max.
    """

    layers: tuple
    positions: Array
    source_lengths: Array | None
    rows: tuple[attention.AttentionMap, ...] | None
    encoder_maps: tuple[attention.AttentionMap, ...]
    size: int

    def at(self, positions: Array, layers: tuple | None = None) -> "DecodingCache":
        """Returns the cache at other positions, with other layers if they are given."""
        layers = self.layers if layers is None else layers
        return dataclasses.replace(self, layers=layers, positions=positions)

    def by_example(self, function: Callable[[Array], Array]) -> "DecodingCache":
        """Returns the cache of other examples.

        Args:
          function: From arrays `[B, ...]` to those of the others; for all but maps.
        """
        own = self.layers, self.positions, self.source_lengths
        layers, positions, lengths = jax.tree.map(function, own)
        return dataclasses.replace(
            self, layers=layers, positions=positions, source_lengths=lengths
        )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Parameters as steps read them; see `Decoding.prepare`."""

    params: Any


jax.tree_util.register_dataclass(Prepared, data_fields=["params"], meta_fields=[])


class Decoding(NamedTuple):
    """A model token by token, as pure functions.

    With a cache the logits and maps are those of whole texts without it.

    Attributes:
      prefill: `prefill(params, prompts, lengths, *, max_length, source=None,
        source_lengths=None, keep_queries=False) -> (logits, cache)`. Prompts are tokens
        `[B, P]`, lengths `[B]` of at least 1 say where each ends; the logits `[B, C]`
        are those of its last token. A text may grow to `max_length` positions, S_max.
        With `keep_queries` the cache has the maps of the whole text, see `maps`. An
        encoder-decoder needs a source: tokens `[B, S]` or features `[B, S, ...]`, and
        lengths of at most S (None: all S are valid). Its prompts are what the decoder
        reads, so that they begin with the start token.
      step: `step(params, tokens, cache) -> (logits, maps, cache)`. The tokens `[B]` are
        put at the cache's positions. The maps, one per layer (of an encoder-decoder
        `Maps`, without the encoder's), are of shape `(B, H, 1, S_max)`, or as many keys
        as a window lets anybody see. Examples stand at positions of their own, so that
        a map is one of many: `jax.vmap(lambda row: row.weights())(maps[0])`, and to
        `look` and `edit` a value is that of one example.
      prepare: From the model's parameters to what both of the above take in their
        place, and read faster where they are called often.
      num_tokens: The vocabulary.
      max_length: The longest text that the model has positions for; None: any.
      has_source: Whether a source must be given.
    """

    prefill: Callable[..., tuple[Array, DecodingCache]]
    step: Callable[..., tuple[Array, tuple, DecodingCache]]
    prepare: Callable[[Any], Prepared]
    num_tokens: int
    max_length: int | None
    has_source: bool


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
    has_source = config.family == "encoder_decoder"
    has_logits = config.output.logits and config.output.pool is None
    reads_tokens = has_source or num_tokens is not None
    if config.family not in ("causal", "encoder_decoder") or not has_logits:
        return None
    if not reads_tokens:
        return None
    has_table = config.embedding.positions == "learned"
    longest = config.embedding.max_length if has_table else None
    forward = hk.transform(
        functools.partial(
            _forward_both if has_source else _forward,
            config,
            num_tokens=num_tokens,
            num_classes=num_classes,
            implementation=implementation,
            policy=policy,
        )
    ).apply

    def prepare(params):
        if isinstance(params, Prepared):
            return params
        looped = modules.unstacked(params) if is_scanned else params
        return Prepared(policy.cast_to_compute(looped))

    def prefill(
        params,
        prompts,
        lengths,
        *,
        max_length,
        source=None,
        source_lengths=None,
        keep_queries=False,
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
        caches = [
            attention.Prompt(lengths, max_length, window, keep_queries)
            for window in windows
        ]
        given = {}
        if has_source:
            of_source = attention.Prompt(
                lengths, max_length, None, keep_queries, is_source=True
            )
            caches = [(own, of_source) for own in caches]
            given["source"] = policy.cast_to_compute(jnp.asarray(source))
        logits, maps, caches, encoder_maps = forward(
            prepare(params).params,
            None,
            prompts,
            caches,
            0,
            last=lengths - 1,
            source_lengths=source_lengths,
            **given,
        )
        rows = None
        if keep_queries:
            rows = tuple(map(_without_arrays, maps))
        return logits, DecodingCache(
            caches,
            lengths,
            source_lengths,
            rows,
            encoder_maps if keep_queries else (),
            max_length,
        )

    def step(params, tokens, cache):
        known = tiles.known(cache.positions)
        if known is not None and (known >= cache.size).any():
            raise ValueError(
                f"the cache has room for max_length = {cache.size} tokens, and is full."
            )
        params = prepare(params).params

        @jax.vmap
        def step_of_one(token, caches, position, source_lengths):
            logits, maps, caches, _ = forward(
                params,
                None,
                token[None],
                caches,
                position,
                source_lengths=source_lengths,
            )
            return logits, maps, caches

        logits, maps, caches = step_of_one(
            jnp.asarray(tokens), cache.layers, cache.positions, cache.source_lengths
        )
        return logits, maps, cache.at(cache.positions + 1, caches)

    vocabulary = num_classes if has_source else num_tokens
    return Decoding(prefill, step, prepare, vocabulary, longest, has_source)


def check_source(has_source: bool, source: Any, source_lengths: Any) -> None:
    """Raises ValueError unless there is a source where one is read, and only there."""
    if has_source and source is None:
        raise ValueError("source must be given: the model is an encoder-decoder.")
    if not has_source and (source is not None or source_lengths is not None):
        raise ValueError(
            "source and source_lengths must be None: the model has no encoder."
        )


def _forward(
    config,
    tokens,
    caches,
    first,
    *,
    num_tokens,
    num_classes,
    implementation,
    policy,
    last=None,
    source_lengths=None,
):
    """Returns logits `[B..., C]`, maps and caches after tokens `[B..., T]`, and ().

    Args:
      config: `config.model`.
      tokens: Those of prompts, `[B, P]`, or a single one, `[1]`.
      caches: A `Prompt` or a `Cache` for each layer.
      first: The position of the first token.
      num_tokens: See `decoding`.
      num_classes: See `decoding`.
      implementation: See `decoding`.
      policy: See `decoding`.
      last: `[B]`, the index of the token whose logits are wanted; None: the only one.
      source_lengths: None.
    """
    del source_lengths
    embedding = ends.make_embedding(config, num_tokens)
    x = ends.embedded(config, embedding, tokens, first=first)
    encoder = layers.make_encoder(config, implementation, modules.looped)
    x, maps, caches = encoder(
        x,
        layers.encoder_masks(config, None),
        bias=layers.bias(config),
        caches=caches,
        first_query=first,
        is_training=False,
    )
    logits = ends.logits(config, embedding, _at(x, last), None, num_classes, policy)
    return logits[..., 0, :], maps, caches, ()


def _forward_both(
    config,
    tokens,
    caches,
    first,
    *,
    num_tokens,
    num_classes,
    implementation,
    policy,
    last=None,
    source=None,
    source_lengths=None,
):
    """Returns what `_forward` does of an encoder-decoder, and the encoder's maps.

    Args:
      config: See `_forward`.
      tokens: See `_forward`; those of the decoder.
      caches: See `_forward`; a pair for each layer of the decoder.
      first: See `_forward`.
      num_tokens: See `decoding`.
      num_classes: See `decoding`.
      implementation: See `decoding`.
      policy: See `decoding`.
      last: See `_forward`.
      source: `[B, S]` or `[B, S, ...]`; None: caches have its keys and values.
      source_lengths: `[B...]`; None: all S positions are valid.
    """
    encoded, encoder_maps = None, ()
    if source is not None:
        x = ends.embedded(
            config,
            ends.make_embedding(config, num_tokens),
            ends.zeroed(source, ends.valid(source, source_lengths)),
        )
        encoder = layers.make_encoder(config, implementation, modules.looped)
        encoded, encoder_maps = encoder(
            x,
            layers.encoder_masks(config, source_lengths),
            bias=layers.bias(config, "encoder"),
            is_training=False,
        )
    embedding = ends.make_embedding(config, num_classes, decoder=True)
    y = ends.embedded(config, embedding, tokens, decoder=True, first=first)
    decoder = layers.make_decoder(config, implementation, modules.looped)
    y, decoded, caches = decoder(
        y,
        encoded,
        layers.decoder_masks(config, None),
        None if source_lengths is None else masks.padding(source_lengths),
        bias=layers.bias(config, "decoder"),
        caches=caches,
        first_query=first,
        is_training=False,
    )
    logits = ends.logits(config, embedding, _at(y, last), None, num_classes, policy)
    own, cross = zip(*decoded, strict=True)
    maps = Maps((*own, *cross), (0, len(own), len(cross)))
    return logits[..., 0, :], maps, caches, encoder_maps


def _at(x, last):
    """Returns the vectors `[B, 1, D]` of `[B, P, D]` at one place of each example."""
    return x if last is None else jnp.take_along_axis(x, last[:, None, None], axis=1)


def maps(cache: DecodingCache) -> tuple[attention.AttentionMap, ...]:
    """Returns the attention maps of whole texts, `(B, H, S_max, S_max)` per layer.

    Those of an encoder-decoder are `Maps`: cross-attention's are `(B, H, S_max, S)`.
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
    parts = cache.layers
    if cache.encoder_maps:
        own, cross = zip(*cache.layers, strict=True)
        parts = (*own, *cross)
    whole = tuple(
        _whole_map(cache, layer, row)
        for layer, row in zip(parts, cache.rows, strict=True)
    )
    if not cache.encoder_maps:
        return whole
    kinds = len(cache.encoder_maps), len(own), len(cross)
    return Maps((*cache.encoder_maps, *whole), kinds)


def _whole_map(cache, layer, row):
    if isinstance(layer, attention.Cache):
        return layer.whole_map(row, cache.positions)
    # Of attention without heads, whose row is the map of the prompt.
    query = jnp.zeros((*cache.positions.shape, cache.size, 1))
    num_keys = row.shape[-1] if layer.is_source else cache.size
    key = jnp.zeros((*cache.positions.shape, num_keys, 1))
    return multi_head_attention.map_of_no_heads(query, key, row.mask)


def _without_arrays(attention_map):
    if not attention_map.shape[-3]:
        return attention_map
    return dataclasses.replace(
        attention_map, query=None, key=None, value=None, logsumexp=None, gates=None
    )
