"""Text generation: continues prompts with the tokens that a model predicts.

P positions of the prompts, N = max_length, E end tokens. `stream` yields tokens as they
are computed. The `Sampled` that chooses the next token is static: a program is compiled
for each.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mha_haiku.core import checks, display
from mha_haiku.core.models import build

__all__ = ["Sampled", "stream"]

_NO_TOKEN = -1
_SHORTEST = 16  # the shortest padded length of prompts; then 64, 256, ...
_Ends = Array | np.ndarray  # `[E]`, the tokens that end a text, or only `_NO_TOKEN`


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Samples a token from the model's probabilities.

    `choose(logits, keys)` returns tokens `[B]` for logits `[B, C]` and PRNG keys `[B]`.

    Raises:
      ValueError: If a field is out of its range.

    Source: Holtzman et al. 2020, section 3.1, https://arxiv.org/abs/1904.09751.
    """

    # Divides the logits; 0 chooses the likeliest token, the first one in a tie.
    temperature: float = 1.0
    # Samples only from this number of the likeliest tokens. Defaults to all.
    top_k: int | None = None
    # Samples only from the likeliest tokens that together have this share of the
    # probability, in (0, 1], after temperature and `top_k`. Defaults to all.
    top_p: float | None = None

    def __post_init__(self):
        checks.non_negative_number("temperature", self.temperature)
        if self.top_k is not None:
            checks.positive_integer("top_k", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be a number in (0, 1], got {self.top_p!r}.")

    def choose(self, logits: Array, keys: Array) -> Array:
        if not self.temperature:
            return jnp.argmax(logits, axis=-1)
        logits = logits / self.temperature
        if self.top_k is None and self.top_p is None:
            return jax.vmap(jax.random.categorical)(keys, logits)
        # Tokens in order of decreasing probability, so that excluded ones are last.
        size = logits.shape[-1]
        kept = size if self.top_k is None else min(self.top_k, size)
        logits, tokens = jax.lax.top_k(logits, kept)
        if self.top_p is not None:
            probabilities = jax.nn.softmax(logits)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            logits = jnp.where(before < self.top_p, logits, -jnp.inf)
        chosen = jax.vmap(jax.random.categorical)(keys, logits)
        return jnp.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]


class _Writer(NamedTuple):
    """The static arguments of compiled programs."""

    decoding: build.Decoding
    strategy: Sampled
    max_length: int


class _Prompts(NamedTuple):
    prompts: Array | np.ndarray  # [B, P]
    lengths: Array | np.ndarray  # [B]
    source: Array | np.ndarray | None  # [B, S, ...]
    source_lengths: Array | np.ndarray | None  # [B]


class _Texts(NamedTuple):
    """Texts while they are written."""

    tokens: Array  # [B, N]
    lengths: Array  # [B]
    is_done: Array  # [B]


def stream(
    model: build.Model,
    params: Any,
    prompts: Array | np.ndarray,
    lengths: Array | np.ndarray | None = None,
    *,
    strategy: Sampled,
    max_length: int,
    end_tokens: Sequence[int] = (),
    key: Array | None = None,
    source: Array | np.ndarray | None = None,
    source_lengths: Array | np.ndarray | None = None,
    chunk: int = 8,
) -> Iterator[np.ndarray]:
    """Yields the next token of each text, `[B]` integers, until all have ended.

    A text that has ended continues with the first end token, or -1 if there is none.
    After the first token, `chunk` tokens are computed at a time. A program is compiled
    for each batch size, `max_length` and strategy, and a smaller one that reads prompts
    for each of some padded lengths (16, 64, 256, ... positions).

    Args:
      model: A causal model of tokens or an encoder-decoder, from `models.build`.
      params: Parameters of the model.
      prompts: `[B, P]` tokens; for an encoder-decoder what the decoder reads first,
        such as the start token.
      lengths: `[B]`, the number of tokens of each prompt, at least 1; later tokens are
        not read. Defaults to P.
      strategy: The rule that chooses the next token.
      max_length: The largest number of tokens of a text, including its prompt; at most
        one more than the model has positions for, as the last token is not read.
      end_tokens: Tokens that end a text. By default texts end at `max_length`.
      key: PRNG key, needed if tokens are sampled. A token depends on the key, the
        text's place in the batch and the tokens before it.
      source: `[B, S]` tokens or `[B, S, ...]` features, for an encoder-decoder.
      source_lengths: `[B]`, valid positions of each source. Defaults to S.
      chunk: Number of tokens computed in one call of the program.

    Raises:
      ValueError: If an argument is out of range, or the model cannot continue texts.
      TypeError: If `strategy` is not a `Sampled`.
    """
    arrays = prompts, lengths, source, source_lengths
    writer, start, ends = _checked(model, arrays, strategy, max_length, end_tokens, key)
    checks.positive_integer("chunk", chunk)

    def tokens():
        prepared = writer.decoding.prepare(params)
        first = jax.random.key(0) if key is None else key
        texts, cache, keys = _begun(writer, prepared, start, ends, first)
        yielded = start.lengths
        while True:
            # Copies, as the next call overwrites the memory of its arguments.
            written, now, is_done = map(np.array, texts)
            for i in range((now - yielded).max()):
                at = np.minimum(yielded + i, max_length - 1)[:, None]
                new = np.take_along_axis(written, at, axis=1)[:, 0]
                yield np.where(yielded + i < now, new, ends[0])
            if is_done.all():
                return
            yielded = now
            texts, cache = _advanced(writer, prepared, texts, cache, keys, ends, chunk)

    return tokens()


@partial(jax.jit, static_argnames=("writer",))
def _begun(
    writer: _Writer, params: Any, start: _Prompts, ends: _Ends, key: Array
) -> tuple[_Texts, build.DecodingCache, Array]:
    """Writes the first token of each text; also returns the cache and keys `[B]`."""
    logits, cache = _prefilled(writer, params, start)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(start.lengths)))
    texts = _prompted(start, writer.max_length, ends)
    return _appended(writer.strategy, texts, logits, keys, ends), cache, keys


@partial(jax.jit, static_argnames=("writer",), donate_argnames=("texts", "cache"))
def _advanced(
    writer: _Writer,
    params: Any,
    texts: _Texts,
    cache: build.DecodingCache,
    keys: Array,
    ends: _Ends,
    steps: int | Array,
) -> tuple[_Texts, build.DecodingCache]:
    """Writes up to `steps` more tokens; also returns the cache."""

    def continues(state: tuple):
        i, texts, _ = state
        return (i < steps) & ~texts.is_done.all()

    def step(state: tuple):
        i, texts, cache = state
        logits, cache = _stepped(writer, params, texts, cache)
        return i + 1, _appended(writer.strategy, texts, logits, keys, ends), cache

    _, texts, cache = jax.lax.while_loop(continues, step, (0, texts, cache))
    return texts, cache


def _prefilled(writer: _Writer, params: Any, start: _Prompts):
    """Reads the prompts: returns logits `[B, C]` after them, and a cache."""
    # The last token of a text is written, but never read.
    decoding, _, max_length = writer
    size = min(max_length, decoding.max_length or max_length)
    return decoding.prefill(
        params,
        start.prompts[:, :size],
        jnp.minimum(start.lengths, size),
        max_length=size,
        source=start.source,
        source_lengths=start.source_lengths,
    )


def _stepped(writer: _Writer, params: Any, texts: _Texts, cache: build.DecodingCache):
    """Computes the logits `[B, C]` after each text's last token, and the cache."""
    # For a text that has ended, the last token is written again at its position.
    positions = jnp.minimum(texts.lengths, cache.size) - 1
    last = jnp.take_along_axis(texts.tokens, positions[:, None], axis=1)[:, 0]
    cache = dataclasses.replace(cache, positions=positions)
    logits, _, cache = writer.decoding.step(params, last, cache)
    return logits, cache


def _appended(
    strategy: Sampled, texts: _Texts, logits: Array, keys: Array, ends: _Ends
) -> _Texts:
    """Appends a token to each text, chosen by logits `[B, C]`."""
    # The length tells apart the random choices of a text.
    at = texts.lengths
    tokens = strategy.choose(logits, jax.vmap(jax.random.fold_in)(keys, at))
    max_length = texts.tokens.shape[1]
    is_new = (jnp.arange(max_length)[None] == at[:, None]) & ~texts.is_done[:, None]
    lengths = at + ~texts.is_done
    is_end = (tokens[:, None] == ends[None]).any(1)
    return _Texts(
        jnp.where(is_new, tokens[:, None], texts.tokens),
        lengths,
        texts.is_done | is_end | (lengths >= max_length),
    )


def _prompted(start: _Prompts, max_length: int, ends: _Ends) -> _Texts:
    lengths, room = start.lengths, max_length - start.prompts.shape[1]
    tokens = jnp.pad(start.prompts, [(0, 0), (0, room)])
    is_after = jnp.arange(max_length)[None] >= lengths[:, None]
    return _Texts(
        jnp.where(is_after, ends[0], tokens),
        jnp.asarray(lengths),
        jnp.asarray(lengths >= max_length),
    )


def _checked(
    model: build.Model,
    arrays: tuple,
    strategy: Sampled,
    max_length: int,
    end_tokens: Sequence[int],
    key: Array | None,
) -> tuple[_Writer, _Prompts, np.ndarray]:
    """Returns the static arguments, the padded arrays, and the end tokens."""
    decoding = model.decoding
    prompts, lengths, source, source_lengths = arrays
    if decoding is None:
        raise ValueError(
            "model must predict the next token of a text, as causal models of tokens "
            "with logits at every position and encoder-decoders do, got "
            f"{model!r}."
        )
    if not isinstance(strategy, Sampled):
        raise TypeError(f"strategy must be a Sampled, got {strategy!r}.")
    if strategy.temperature and key is None:
        raise ValueError("key must not be None where tokens are sampled.")
    longest = None if decoding.max_length is None else decoding.max_length + 1
    checks.integer_in("max_length", max_length, 1, longest)
    build.check_source(decoding.has_source, source, source_lengths)
    for token in end_tokens:
        checks.integer_in("end_tokens", token, 0, decoding.num_tokens - 1)
    prompts = np.asarray(prompts)
    is_integer = np.issubdtype(prompts.dtype, np.integer)
    if prompts.ndim != 2 or not prompts.shape[1] or not is_integer:
        raise ValueError(
            "prompts must have at least one token each: tokens [B, P], integers, got "
            f"{prompts.dtype} of shape {prompts.shape}."
        )
    size, columns = prompts.shape
    lengths = np.full(size, columns) if lengths is None else np.asarray(lengths)
    most = min(columns, max_length)
    if lengths.shape != (size,) or lengths.min() < 1 or lengths.max() > most:
        raise ValueError(
            f"lengths must be integers [B] = {(size,)} from 1 to P = {columns} and to "
            f"max_length = {max_length}, got {display.numbers(lengths)}."
        )
    build.check_rows("prompts", prompts, decoding.num_tokens, lengths)
    if source is not None:
        source = source if isinstance(source, jax.Array) else np.asarray(source)
        if source.ndim < 2 or len(source) != size:
            raise ValueError(
                f"source must be [B, S] or [B, S, ...] with B = {size}, got shape "
                f"{source.shape}."
            )
    shared = _SHORTEST
    while shared < lengths.max():
        shared *= 4
    padded = np.zeros((size, min(shared, max_length)), np.int32)
    columns = min(columns, padded.shape[1])
    is_token = np.arange(columns) < lengths[:, None]
    padded[:, :columns] = np.where(is_token, prompts[:, :columns], 0)
    ends = np.array(end_tokens or [_NO_TOKEN], np.int32)
    start = _Prompts(padded, lengths.astype(np.int32), source, source_lengths)
    return _Writer(decoding, strategy, max_length), start, ends
