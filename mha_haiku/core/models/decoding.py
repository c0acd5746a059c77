"""Text generation: continues prompts with the tokens that a model predicts.

P positions of the prompts, N = max_length, W width of a beam. `generate` returns whole
texts, `stream` yields tokens as they are computed. The `Strategy` that chooses the next
token is static: a program is compiled for each.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mha_haiku.core import checks, display
from mha_haiku.core.models import build

__all__ = ["Beam", "Generated", "Greedy", "Sampled", "generate", "stream"]

_NO_TOKEN = -1
_SHORTEST = 16  # the shortest padded length of prompts; then 64, 256, ...
_End = Array | np.int32  # the token that ends a text, or `_NO_TOKEN`


class Strategy:
    """The rule that continues texts.

    `choose(logits, keys)` returns tokens `[B]` for logits `[B, C]` and PRNG keys `[B]`;
    a `Beam`, whose choices are not final, has no such method.
    """


@dataclasses.dataclass(frozen=True)
class Greedy(Strategy):
    """Chooses the likeliest token; the first one in a tie."""

    def choose(self, logits: Array, keys: Array) -> Array:
        del keys
        return jnp.argmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True)
class Sampled(Strategy):
    """Samples a token from the model's probabilities.

    Raises:
      ValueError: If a field is out of its range.

    Source: Holtzman et al. 2020, section 3.1, https://arxiv.org/abs/1904.09751.
    """

    # Divides the logits; 0 chooses the likeliest token.
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


@dataclasses.dataclass(frozen=True)
class Beam(Strategy):
    """Searches for the likeliest text with a beam of partial texts.

    Texts of n tokens are compared by their log probability over
    `((5 + n) / 6) ** length_penalty`. A text that has ended stays in the beam until
    better ones replace it. With a width of 1 this is `Greedy`.

    Source: Wu et al. 2016, section 7, https://arxiv.org/abs/1609.08144.
    """

    width: int  # the number of texts in the beam
    length_penalty: float = 0.0  # above 0 longer texts are preferred

    def __post_init__(self):
        checks.positive_integer("width", self.width)
        checks.non_negative_number("length_penalty", self.length_penalty)

    def penalty(self, count: Array) -> Array:
        """Computes the divisor of log probabilities of texts of `count` tokens."""
        return ((5 + count) / 6) ** self.length_penalty


class Generated(NamedTuple):
    """Texts: prompts and their continuations.

    Attributes:
      tokens: `[B, N]` int32, filled with `end_token` after the end of a text.
      lengths: `[B]`, the number of tokens of a text, including its end token.
      log_probability: `[B]` float32 in nats, of the continuation, by the model's
        probabilities at temperature 1.
    """

    tokens: Array
    lengths: Array
    log_probability: Array


class _Writer(NamedTuple):
    """The static arguments of compiled programs."""

    decoding: build.Decoding
    strategy: Strategy
    max_length: int


class _Prompts(NamedTuple):
    prompts: Array | np.ndarray  # [B, P]
    lengths: Array | np.ndarray  # [B]
    source: Array | np.ndarray | None  # [B, S, ...]
    source_lengths: Array | np.ndarray | None  # [B]


class _Texts(NamedTuple):
    """Texts while they are written; leading axes `[B]`, or `[B, W]` in a beam."""

    tokens: Array  # [B, N]
    lengths: Array  # [B]
    is_done: Array  # [B]
    log_probability: Array  # [B]


def generate(
    model: build.Model,
    params: Any,
    prompts: Array | np.ndarray,
    lengths: Array | np.ndarray | None = None,
    *,
    strategy: Strategy,
    max_length: int,
    end_token: int | None = None,
    key: Array | None = None,
    source: Array | np.ndarray | None = None,
    source_lengths: Array | np.ndarray | None = None,
) -> Generated:
    """Generates continuations of prompts.

    A program is compiled for each batch size, `max_length` and strategy, and a smaller
    one that reads prompts for each of some padded lengths (16, 64, 256, ... positions).

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
      end_token: The token that ends a text. By default texts end at `max_length`.
      key: PRNG key, needed by random strategies. A random token depends on the key, the
        text's place in the batch and the tokens before it.
      source: `[B, S]` tokens or `[B, S, ...]` features, for an encoder-decoder.
      source_lengths: `[B]`, valid positions of each source. Defaults to S.

    Raises:
      ValueError: If an argument is out of range, or the model cannot continue texts.
      TypeError: If `strategy` is not a `Strategy`.
    """
    arrays = prompts, lengths, source, source_lengths
    writer, given, end = _checked(model, arrays, strategy, max_length, end_token, key)
    params = writer.decoding.prepare(params)
    if isinstance(strategy, Beam):
        return _beam(writer, params, given, end)
    key = jax.random.key(0) if key is None else key
    texts, cache, keys = _begun(writer, params, given, end, key)
    texts, _ = _advanced(writer, params, texts, cache, keys, end, max_length)
    return _generated(texts, end)


def stream(
    model: build.Model,
    params: Any,
    prompts: Array | np.ndarray,
    lengths: Array | np.ndarray | None = None,
    *,
    strategy: Strategy,
    max_length: int,
    end_token: int | None = None,
    key: Array | None = None,
    source: Array | np.ndarray | None = None,
    source_lengths: Array | np.ndarray | None = None,
    chunk: int = 8,
) -> Iterator[np.ndarray]:
    """Yields the next token of each text, `[B]` integers, until all have ended.

    Tokens and arguments are as in `generate`, except that the strategy must not be a
    beam, whose tokens are not final before its end. A text that has ended continues
    with `end_token`, or -1 if there is none. After the first token, `chunk` tokens are
    computed at a time.

    Raises:
      ValueError: If `strategy` is a beam, `chunk` is below 1, or as in `generate`.
      TypeError: If `strategy` is not a `Strategy`.
    """
    arrays = prompts, lengths, source, source_lengths
    writer, given, end = _checked(model, arrays, strategy, max_length, end_token, key)
    checks.positive_integer("chunk", chunk)
    if isinstance(strategy, Beam):
        raise ValueError(
            "strategy must choose token by token to stream, got a beam, whose tokens "
            "are not final before its end."
        )

    def tokens():
        prepared = writer.decoding.prepare(params)
        first = jax.random.key(0) if key is None else key
        texts, cache, keys = _begun(writer, prepared, given, end, first)
        yielded = given.lengths
        while True:
            # Copies, as the next call overwrites the memory of its arguments.
            written, now, is_done = map(np.array, texts[:3])
            for i in range((now - yielded).max()):
                at = np.minimum(yielded + i, max_length - 1)[:, None]
                new = np.take_along_axis(written, at, axis=1)[:, 0]
                yield np.where(yielded + i < now, new, np.asarray(end))
            if is_done.all():
                return
            yielded = now
            texts, cache = _advanced(writer, prepared, texts, cache, keys, end, chunk)

    return tokens()


@functools.partial(jax.jit, static_argnames=("writer",))
def _begun(
    writer: _Writer, params: Any, given: _Prompts, end: _End, key: Array
) -> tuple[_Texts, build.DecodingCache, Array]:
    """Writes the first token of each text; also returns the cache and keys `[B]`."""
    logits, cache = _prefilled(writer, params, given)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(given.lengths)))
    texts = _prompted(given, writer.max_length, end)
    return _appended(writer.strategy, texts, logits, keys, end), cache, keys


@functools.partial(
    jax.jit, static_argnames=("writer",), donate_argnames=("texts", "cache")
)
def _advanced(
    writer: _Writer,
    params: Any,
    texts: _Texts,
    cache: build.DecodingCache,
    keys: Array,
    end: _End,
    steps: int | Array,
) -> tuple[_Texts, build.DecodingCache]:
    """Writes up to `steps` more tokens; also returns the cache."""

    def continues(state: tuple):
        i, texts, _ = state
        return (i < steps) & ~texts.is_done.all()

    def step(state: tuple):
        i, texts, cache = state
        logits, cache = _stepped(writer, params, texts, cache)
        return i + 1, _appended(writer.strategy, texts, logits, keys, end), cache

    _, texts, cache = jax.lax.while_loop(continues, step, (0, texts, cache))
    return texts, cache


@functools.partial(jax.jit, static_argnames=("writer",))
def _beam(writer: Any, params: Any, given: _Prompts, end: _End) -> Generated:
    _, strategy, max_length = writer
    width, size = strategy.width, len(given.lengths)
    logits, cache = _prefilled(writer, params, given)
    in_beam = lambda x: jnp.repeat(x, width, axis=0)  # noqa: E731
    logits, cache = in_beam(logits), jax.tree.map(in_beam, cache)
    texts = _prompted(given, max_length, end)
    texts = jax.tree.map(lambda x: in_beam(x).reshape(size, width, *x.shape[1:]), texts)
    # All texts of a beam are the same at first: only one counts.
    only_first = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf)
    texts = texts._replace(
        log_probability=jnp.broadcast_to(only_first, (size, width)).astype(logits.dtype)
    )
    starts = given.lengths[:, None]

    def ranking(texts: _Texts, lengths: Array):
        return texts.log_probability / strategy.penalty(lengths - starts)

    def extended(texts: _Texts, logits: Array) -> tuple[_Texts, Array]:
        """Extends beams by a token; also returns the index of each text's parent."""
        logits = jax.nn.log_softmax(logits).reshape(size, width, -1)
        longer = texts.log_probability[..., None] + logits
        longer = jnp.where(texts.is_done[..., None], -jnp.inf, longer)
        # An extra column: a text that has ended is not changed.
        unchanged = jnp.where(texts.is_done, texts.log_probability, -jnp.inf)
        candidates = jnp.concatenate([longer, unchanged[..., None]], axis=-1)
        count = texts.lengths - starts + ~texts.is_done
        ranked = (candidates / strategy.penalty(count)[..., None]).reshape(size, -1)
        _, best = jax.lax.top_k(ranked, width)
        parents, tokens = best // (logits.shape[-1] + 1), best % (logits.shape[-1] + 1)
        of_parents = jax.tree.map(
            lambda x: jax.vmap(lambda x, parents: x[parents])(x, parents), texts
        )
        score = jnp.take_along_axis(candidates.reshape(size, -1), best, axis=1)
        texts = _with_tokens(of_parents, tokens, end)
        return texts._replace(log_probability=score), parents

    def continues(state: tuple):
        texts, *_ = state
        longest = jnp.full_like(texts.lengths, max_length)
        # A text never gains probability, so this is an upper bound.
        possible = jnp.where(texts.is_done, -jnp.inf, ranking(texts, longest)).max(1)
        done = jnp.where(texts.is_done, ranking(texts, texts.lengths), -jnp.inf).max(1)
        return ((possible > done) & ~texts.is_done.all(1)).any()

    def step(state: tuple):
        texts, parents, cache = state
        rows = (jnp.arange(size)[:, None] * width + parents).reshape(-1)
        flat = jax.tree.map(lambda x: x.reshape(size * width, *x.shape[2:]), texts)
        cache = jax.tree.map(lambda x: x[rows], cache)
        logits, cache = _stepped(writer, params, flat, cache)
        return *extended(texts, logits), cache

    texts, parents = extended(texts, logits)
    texts, *_ = jax.lax.while_loop(continues, step, (texts, parents, cache))
    best = ranking(texts, texts.lengths).argmax(1)
    best = jax.tree.map(lambda x: jax.vmap(lambda x, i: x[i])(x, best), texts)
    return _generated(best, end)


def _generated(texts: _Texts, end: _End) -> Generated:
    tokens = _ended(texts.tokens, texts.lengths, end)
    return Generated(tokens, texts.lengths, texts.log_probability)


def _prefilled(writer: _Writer, params: Any, given: _Prompts):
    """Reads the prompts: returns logits `[B, C]` after them, and a cache."""
    # The last token of a text is written, but never read.
    decoding, _, max_length = writer
    size = min(max_length, decoding.max_length or max_length)
    return decoding.prefill(
        params,
        given.prompts[:, :size],
        jnp.minimum(given.lengths, size),
        max_length=size,
        source=given.source,
        source_lengths=given.source_lengths,
    )


def _stepped(writer: _Writer, params: Any, texts: _Texts, cache: build.DecodingCache):
    """Computes the logits `[B, C]` after each text's last token, and the cache."""
    # For a text that has ended, the last token is written again at its position.
    positions = jnp.minimum(texts.lengths, cache.size) - 1
    last = jnp.take_along_axis(texts.tokens, positions[:, None], axis=1)[:, 0]
    cache = dataclasses.replace(cache, positions=positions)
    logits, _, cache = writer.decoding.step(params, last, cache)
    return logits, cache


def _appended(strategy: Any, texts: _Texts, logits: Array, keys: Array, end: _End):
    """Appends a token to each text, chosen by logits `[B, C]`."""
    # The length tells apart the random choices of a text.
    tokens = strategy.choose(logits, jax.vmap(jax.random.fold_in)(keys, texts.lengths))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    gain = jnp.where(texts.is_done, 0, chosen - jax.nn.logsumexp(logits, axis=-1))
    texts = texts._replace(log_probability=texts.log_probability + gain)
    return _with_tokens(texts, tokens, end)


def _with_tokens(texts: _Texts, tokens: Array, end: _End):
    at, max_length = texts.lengths, texts.tokens.shape[-1]
    places = jnp.arange(max_length).reshape(*(1,) * at.ndim, -1)
    is_new = (places == at[..., None]) & ~texts.is_done[..., None]
    lengths = at + ~texts.is_done
    return texts._replace(
        tokens=jnp.where(is_new, tokens[..., None], texts.tokens),
        lengths=lengths,
        is_done=texts.is_done | (tokens == end) | (lengths >= max_length),
    )


def _prompted(given: Any, max_length: int, end: _End):
    lengths, room = given.lengths, max_length - given.prompts.shape[1]
    tokens = jnp.pad(given.prompts, [(0, 0), (0, room)])
    tokens = _ended(tokens, lengths, end)
    zeros = jnp.zeros(lengths.shape, jnp.float32)
    return _Texts(tokens, lengths, lengths >= max_length, zeros)


def _ended(tokens: Array, lengths: Array, end: _End):
    """Fills all positions after the end of a text with the end token."""
    is_after = jnp.arange(tokens.shape[1])[None] >= lengths[:, None]
    return jnp.where(is_after, end, tokens)


def _checked(
    model: build.Model,
    arrays: tuple,
    strategy: Strategy,
    max_length: int,
    end_token: int | None,
    key: Array | None,
) -> tuple[_Writer, _Prompts, np.int32]:
    """Returns the static arguments, the padded arrays, and the end token."""
    decoding = model.decoding
    prompts, lengths, source, source_lengths = arrays
    if decoding is None:
        raise ValueError(
            "model must predict the next token of a text, as causal models of tokens "
            "with logits at every position and encoder-decoders do, got "
            f"{model!r}."
        )
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be Greedy(), Sampled(...) or Beam(...), got {strategy!r}."
        )
    if isinstance(strategy, Sampled) and strategy.temperature and key is None:
        raise ValueError("key must be given where tokens are sampled.")
    longest = None if decoding.max_length is None else decoding.max_length + 1
    checks.integer_in("max_length", max_length, 1, longest)
    build.check_source(decoding.has_source, source, source_lengths)
    if end_token is not None:
        checks.integer_in("end_token", end_token, 0, decoding.num_tokens - 1)
    prompts = np.asarray(prompts)
    is_integer = np.issubdtype(prompts.dtype, np.integer)
    if prompts.ndim != 2 or not prompts.shape[1] or not is_integer:
        raise ValueError(
            "prompts must have at least one token each: tokens [B, P], integers, got "
            f"{prompts.dtype} of shape {prompts.shape}."
        )
    size, columns = prompts.shape
    lengths = _checked_lengths("lengths", lengths, size, 1, "P", columns)
    if (lengths > max_length).any():
        raise ValueError(
            f"prompts must have at most max_length = {max_length} tokens, got one of "
            f"{lengths.max()}."
        )
    build.check_rows("prompts", prompts, decoding.num_tokens, lengths)
    if source is not None:
        source = source if isinstance(source, jax.Array) else np.asarray(source)
        if source.ndim < 2 or len(source) != size:
            raise ValueError(
                f"source must be [B, S] or [B, S, ...] with B = {size}, got shape "
                f"{source.shape}."
            )
        sizes = size, 0, "S", source.shape[1]
        _checked_lengths("source_lengths", source_lengths, *sizes)
    shared = _SHORTEST
    while shared < lengths.max():
        shared *= 4
    padded = np.zeros((size, min(shared, max_length)), np.int32)
    columns = min(columns, padded.shape[1])
    is_token = np.arange(columns) < lengths[:, None]
    padded[:, :columns] = np.where(is_token, prompts[:, :columns], 0)
    end = np.int32(_NO_TOKEN if end_token is None else end_token)
    given = _Prompts(padded, lengths.astype(np.int32), source, source_lengths)
    return _Writer(decoding, strategy, max_length), given, end


def _checked_lengths(
    name: str,
    lengths: Array | np.ndarray | None,
    size: int,
    shortest: int,
    letter: str,
    longest: int,
) -> np.ndarray:
    """Checks lengths `[B]`; None means the longest."""
    lengths = np.full(size, longest) if lengths is None else np.asarray(lengths)
    is_integer = np.issubdtype(lengths.dtype, np.integer)
    wrong = lengths[(lengths < shortest) | (lengths > longest)][:1]
    if lengths.shape != (size,) or not is_integer or wrong.size:
        raise ValueError(
            f"{name} must be integers [B] = {(size,)} from {shortest} to {letter} = "
            f"{longest}, got {display.numbers(wrong if wrong.size else lengths)}."
        )
    return lengths
