"""Text generation: continues prompts with the tokens that a model predicts.

P positions of the prompts. `stream` yields tokens as they are computed. The `Sampled`
that chooses the next token is static: a program is compiled for each.
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


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Samples a token from the model's probabilities.

    `choose(logits, keys)` returns tokens `[B]` for logits `[B, C]` and PRNG keys `[B]`.

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
        places = jax.vmap(jax.random.categorical)(keys, logits)
        return jnp.take_along_axis(tokens, places[:, None], axis=-1)[:, 0]


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


class _State(NamedTuple):
    """Texts while they are written. One that has ended is still computed."""

    last: Array  # [B], the last token of each text
    lengths: Array  # [B], with that token
    cache: build.DecodingCache
    keys: Array  # [B]


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
    """
    arrays = prompts, lengths, source, source_lengths
    writer, start = _checked(model, arrays, strategy, max_length, end_tokens, key)
    checks.positive_integer("chunk", chunk)

    def tokens():
        prepared = writer.decoding.prepare(params)
        first = jax.random.key(0) if key is None else key
        state = _begun(writer, prepared, start, first)
        new, sizes = state.last[None], start.lengths
        is_done = sizes >= max_length
        while not is_done.all():
            for drawn in np.asarray(new):
                written = np.where(is_done, (*end_tokens, _NO_TOKEN)[0], drawn)
                yield written
                sizes = sizes + ~is_done
                is_done |= np.isin(written, end_tokens) | (sizes >= max_length)
                if is_done.all():
                    return
            state, new = _advanced(writer, prepared, state, chunk)

    return tokens()


@partial(jax.jit, static_argnames=("writer",))
def _begun(writer: _Writer, params: Any, start: _Prompts, key: Array) -> _State:
    """Reads the prompts, and writes the first token of each text."""
    # The last token of a text is written, but never read.
    decoding, strategy, max_length = writer
    size = min(max_length, decoding.max_length or max_length)
    logits, cache = decoding.prefill(
        params,
        start.prompts[:, :size],
        jnp.minimum(start.lengths, size),
        max_length=size,
        source=start.source,
        source_lengths=start.source_lengths,
    )
    lengths = jnp.asarray(start.lengths)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(lengths)))
    last = _chosen(strategy, logits, keys, lengths)
    return _State(last, lengths + 1, cache, keys)


@partial(jax.jit, static_argnames=("writer", "steps"), donate_argnames=("state",))
def _advanced(
    writer: _Writer, params: Any, state: _State, steps: int
) -> tuple[_State, Array]:
    """Writes `steps` more tokens, `[steps, B]`."""

    def step(state: _State, _: None):
        last, lengths, cache, keys = state
        # A text that has ended, perhaps at the end of the cache, overwrites that.
        positions = jnp.minimum(lengths, cache.size) - 1
        cache = dataclasses.replace(cache, positions=positions)
        logits, _, cache = writer.decoding.step(params, last, cache)
        last = _chosen(writer.strategy, logits, keys, lengths)
        return _State(last, lengths + 1, cache, keys), last

    return jax.lax.scan(step, state, length=steps)


def _chosen(strategy: Sampled, logits: Array, keys: Array, lengths: Array) -> Array:
    # The length tells apart the random choices of a text.
    keys = jax.vmap(jax.random.fold_in)(keys, lengths)
    return strategy.choose(logits, keys).astype(jnp.int32)


def _checked(
    model: build.Model,
    arrays: tuple,
    strategy: Sampled,
    max_length: int,
    end_tokens: Sequence[int],
    key: Array | None,
) -> tuple[_Writer, _Prompts]:
    """Returns the static arguments and the padded arrays."""
    decoding = model.decoding
    prompts, lengths, source, source_lengths = arrays
    if decoding is None:
        raise ValueError(
            "model must predict the next token of a text, as causal models of tokens "
            "with logits at every position and encoder-decoders do, got "
            f"{model!r}."
        )
    if strategy.temperature and key is None:
        raise ValueError("key must not be None where tokens are sampled.")
    longest = None if decoding.max_length is None else decoding.max_length + 1
    checks.integer_in("max_length", max_length, 1, longest)
    build.check_source(decoding.has_source, source, source_lengths)
    for token in end_tokens:
        checks.integer_in("end_tokens", token, 0, decoding.num_tokens - 1)
    prompts = np.asarray(prompts)
    if prompts.ndim != 2 or not np.issubdtype(prompts.dtype, np.integer):
        raise ValueError(
            "prompts must be tokens [B, P], integers, got "
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
    shared = _SHORTEST
    while shared < lengths.max():
        shared *= 4
    padded = np.zeros((size, min(shared, max_length)), np.int32)
    columns = min(columns, padded.shape[1])
    is_token = np.arange(columns) < lengths[:, None]
    padded[:, :columns] = np.where(is_token, prompts[:, :columns], 0)
    start = _Prompts(padded, lengths.astype(np.int32), source, source_lengths)
    return _Writer(decoding, strategy, max_length), start
