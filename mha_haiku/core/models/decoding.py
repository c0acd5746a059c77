"""Generating text: prompts in, what the model writes after them out.

P positions of the prompts, N = max_length, W width of a beam. `generate` returns whole
texts, `stream` gives tokens as they come. How the next token is chosen is a static
value: a program is compiled for each `Strategy`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, display
from mha_haiku.core.models import build

__all__ = ["Beam", "Generated", "Greedy", "Sampled", "generate", "stream"]

Array = jax.Array
_NO_TOKEN = -1
_SHORTEST = 16  # positions of padded prompts; then times 4


class Strategy:
    """How texts are continued.

    `choose(logits, keys)` gives a token `[B]` for logits `[B, C]` and PRNG keys `[B]`,
    unless it is a `Beam`, whose choice is not final.
    """


@dataclasses.dataclass(frozen=True)
class Greedy(Strategy):
    """The likeliest token, the first of those that are alike."""

    def choose(self, logits: Array, keys: Array) -> Array:
        del keys
        return jnp.argmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True)
class Sampled(Strategy):
    """A random token, by the model's probabilities.

    Raises:
      ValueError: If a field is out of its range.

    Source: Holtzman et al. 2020, section 3.1, https://arxiv.org/abs/1904.09751.
    """

    # Logits are divided by it; 0 leaves the likeliest token alone.
    temperature: float = 1.0
    # Only so many of the likeliest tokens are drawn from; None: all.
    top_k: int | None = None
    # Only the likeliest tokens are drawn from that have this share of the probability
    # together, in (0, 1]; None: all. After temperature and `top_k`.
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
        # Tokens by falling probability, so that those left out are the last.
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
    """The best text of those that a beam of partial texts leads to.

    Texts are compared by their log probability over `((5 + n) / 6) ** length_penalty`,
    n tokens long. A text that has ended keeps its place in the beam until better ones
    push it out. With a width of 1 this is `Greedy`.

    Source: Wu et al. 2016, section 7, https://arxiv.org/abs/1609.08144.
    """

    width: int  # how many texts are kept
    length_penalty: float = 0.0  # above 0 longer texts are preferred

    def __post_init__(self):
        checks.positive_integer("width", self.width)
        checks.non_negative_number("length_penalty", self.length_penalty)

    def penalty(self, count: Array) -> Array:
        """Computes the divisor of log probabilities of so many tokens."""
        return ((5 + count) / 6) ** self.length_penalty


class Generated(NamedTuple):
    """Texts, each a prompt and what was written after it.

    Attributes:
      tokens: `[B, N]` int32; after the end of a text `end_token`.
      lengths: `[B]`, tokens of each text, its end token included.
      log_probability: `[B]` float32 in nats, of what was written, by the model's own
        probabilities (of temperature 1).
    """

    tokens: Array
    lengths: Array
    log_probability: Array


class _Writer(NamedTuple):
    """What a program is compiled for."""

    decoding: build.Decoding
    strategy: Strategy
    max_length: int


class _Given(NamedTuple):
    prompts: Array  # [B, P]
    lengths: Array  # [B]
    source: Array | None  # [B, S, ...]
    source_lengths: Array | None  # [B]


class _Texts(NamedTuple):
    """Texts while they are written; leading axes `[B]`, or `[B, W]` in a beam."""

    tokens: Array  # [B, N]
    lengths: Array  # [B]
    is_done: Array  # [B]
    log_probability: Array  # [B]


def generate(
    model: build.Model,
    params: Any,
    prompts: Array,
    lengths: Array | None = None,
    *,
    strategy: Strategy,
    max_length: int,
    end_token: int | None = None,
    key: Array | None = None,
    source: Array | None = None,
    source_lengths: Array | None = None,
) -> Generated:
    """Generates tokens after prompts.

    A program is compiled for each batch size, `max_length` and strategy, and a smaller
    one that reads prompts for some sizes of these (16, 64, 256, ... positions).

    Args:
      model: A causal model of tokens or an encoder-decoder, as `models.build` makes it.
      params: Parameters of the model.
      prompts: `[B, P]` tokens; of an encoder-decoder what the decoder reads first, the
        start token.
      lengths: `[B]`, tokens of each prompt, at least 1; what comes after is not read.
        None: all P.
      strategy: Rule that chooses the next token.
      max_length: Tokens that a text has at most, prompt included; one more than the
        model has positions for, as the last one is not read.
      end_token: A text ends with this token; None: at `max_length`.
      key: PRNG key, needed by random strategies. What is drawn for a text depends on
        the key, its place in the batch and what stands before.
      source: `[B, S]` tokens or `[B, S, ...]` features, of an encoder-decoder.
      source_lengths: `[B]`, valid positions of each source; None: all S.

    Raises:
      ValueError: If an argument is out of range, or the model cannot continue texts.
      TypeError: If `strategy` is no `Strategy`.
    """
    given = prompts, lengths, source, source_lengths
    writer, given, end = _checked(model, given, strategy, max_length, end_token, key)
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
    prompts: Array,
    lengths: Array | None = None,
    *,
    strategy: Strategy,
    max_length: int,
    end_token: int | None = None,
    key: Array | None = None,
    source: Array | None = None,
    source_lengths: Array | None = None,
    chunk: int = 8,
) -> Iterator[np.ndarray]:
    """Yields the next token of each text, `[B]` integers, until all have ended.

    Tokens and arguments are as in `generate`, except that the strategy must not be a
    beam: its tokens are not final before its end. A text that has ended continues with
    `end_token`, or -1 where there is none. `chunk` tokens are computed at a time; the
    first comes alone.

    Raises:
      ValueError: If `strategy` is a beam, `chunk` is below 1, or as in `generate`.
      TypeError: If `strategy` is no `Strategy`.
    """
    given = prompts, lengths, source, source_lengths
    writer, given, end = _checked(model, given, strategy, max_length, end_token, key)
    checks.positive_integer("chunk", chunk)
    if isinstance(strategy, Beam):
        raise ValueError(
            "strategy must choose token by token to stream, got a beam, whose tokens "
            "are not final before its end."
        )

    def tokens():
        own = writer.decoding.prepare(params)
        first = jax.random.key(0) if key is None else key
        texts, cache, keys = _begun(writer, own, given, end, first)
        told = given.lengths
        while True:
            # Copies, as the next call writes into the memory of what it is given.
            written, now, is_done = map(np.array, texts[:3])
            for i in range((now - told).max()):
                at = np.minimum(told + i, max_length - 1)[:, None]
                new = np.take_along_axis(written, at, axis=1)[:, 0]
                yield np.where(told + i < now, new, np.asarray(end))
            if is_done.all():
                return
            told = now
            texts, cache = _advanced(writer, own, texts, cache, keys, end, chunk)

    return tokens()


@functools.partial(jax.jit, static_argnames=("writer",))
def _begun(writer, params, given, end, key):
    """Writes each text's first token; also returns the cache and a key per text."""
    logits, cache = _prefilled(writer, params, given)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(given.lengths)))
    texts = _prompted(given, writer.max_length, end)
    return _appended(writer.strategy, texts, logits, keys, end), cache, keys


@functools.partial(
    jax.jit, static_argnames=("writer",), donate_argnames=("texts", "cache")
)
def _advanced(writer, params, texts, cache, keys, end, steps):
    """Writes up to `steps` more tokens; also returns the cache."""

    def goes_on(state):
        i, texts, _ = state
        return (i < steps) & ~texts.is_done.all()

    def step(state):
        i, texts, cache = state
        logits, cache = _stepped(writer, params, texts, cache)
        return i + 1, _appended(writer.strategy, texts, logits, keys, end), cache

    _, texts, cache = jax.lax.while_loop(goes_on, step, (0, texts, cache))
    return texts, cache


@functools.partial(jax.jit, static_argnames=("writer",))
def _beam(writer, params, given, end):
    _, strategy, max_length = writer
    width, size = strategy.width, len(given.lengths)
    logits, cache = _prefilled(writer, params, given)
    in_beam = lambda x: jnp.repeat(x, width, axis=0)  # noqa: E731
    logits, cache = in_beam(logits), jax.tree.map(in_beam, cache)
    texts = _prompted(given, max_length, end)
    texts = jax.tree.map(lambda x: in_beam(x).reshape(size, width, *x.shape[1:]), texts)
    # All texts of a beam are alike at first: one counts.
    only_first = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf)
    texts = texts._replace(
        log_probability=jnp.broadcast_to(only_first, (size, width)).astype(logits.dtype)
    )
    starts = given.lengths[:, None]

    def standing(texts, lengths):
        return texts.log_probability / strategy.penalty(lengths - starts)

    def extended(texts, logits):
        """Extends beams by a token; also returns which text each comes from."""
        logits = jax.nn.log_softmax(logits).reshape(size, width, -1)
        longer = texts.log_probability[..., None] + logits
        longer = jnp.where(texts.is_done[..., None], -jnp.inf, longer)
        # One more column: a text that has ended stays as it is.
        as_it_is = jnp.where(texts.is_done, texts.log_probability, -jnp.inf)
        all_of_them = jnp.concatenate([longer, as_it_is[..., None]], axis=-1)
        count = texts.lengths - starts + ~texts.is_done
        ranked = (all_of_them / strategy.penalty(count)[..., None]).reshape(size, -1)
        _, best = jax.lax.top_k(ranked, width)
        parents, tokens = best // (logits.shape[-1] + 1), best % (logits.shape[-1] + 1)
        own = jax.tree.map(
            lambda x: jax.vmap(lambda x, parents: x[parents])(x, parents), texts
        )
        score = jnp.take_along_axis(all_of_them.reshape(size, -1), best, axis=1)
        return _with_tokens(own, tokens, end)._replace(log_probability=score), parents

    def goes_on(state):
        texts, *_ = state
        longest = jnp.full_like(texts.lengths, max_length)
        # A text never gains probability: this is the best that it can come to.
        hoped = jnp.where(texts.is_done, -jnp.inf, standing(texts, longest)).max(1)
        done = jnp.where(texts.is_done, standing(texts, texts.lengths), -jnp.inf).max(1)
        return ((hoped > done) & ~texts.is_done.all(1)).any()

    def step(state):
        texts, parents, cache = state
        rows = (jnp.arange(size)[:, None] * width + parents).reshape(-1)
        flat = jax.tree.map(lambda x: x.reshape(size * width, *x.shape[2:]), texts)
        cache = jax.tree.map(lambda x: x[rows], cache)
        logits, cache = _stepped(writer, params, flat, cache)
        return *extended(texts, logits), cache

    texts, parents = extended(texts, logits)
    texts, *_ = jax.lax.while_loop(goes_on, step, (texts, parents, cache))
    best = standing(texts, texts.lengths).argmax(1)
    best = jax.tree.map(lambda x: jax.vmap(lambda x, i: x[i])(x, best), texts)
    return _generated(best, end)


def _generated(texts, end) -> Generated:
    tokens = _ended(texts.tokens, texts.lengths, end)
    return Generated(tokens, texts.lengths, texts.log_probability)


def _prefilled(writer, params, given):
    """Reads the prompts: logits `[B, C]` after them, and a cache for whole texts."""
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


def _stepped(writer, params, texts, cache):
    """Computes the logits `[B, C]` after each text's last token, and the cache."""
    # A text that has ended has its last token put in its place once more.
    positions = jnp.minimum(texts.lengths, cache.size) - 1
    last = jnp.take_along_axis(texts.tokens, positions[:, None], axis=1)[:, 0]
    cache = dataclasses.replace(cache, positions=positions)
    logits, _, cache = writer.decoding.step(params, last, cache)
    return logits, cache


def _appended(strategy, texts, logits, keys, end):
    """Appends a token to each text, chosen by logits `[B, C]`."""
    # The length stands for how many choices there were before.
    tokens = strategy.choose(logits, jax.vmap(jax.random.fold_in)(keys, texts.lengths))
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    gain = jnp.where(texts.is_done, 0, own - jax.nn.logsumexp(logits, axis=-1))
    texts = texts._replace(log_probability=texts.log_probability + gain)
    return _with_tokens(texts, tokens, end)


def _with_tokens(texts, tokens, end):
    """Appends one token each, `[...]`, to the texts that have not ended."""
    at, max_length = texts.lengths, texts.tokens.shape[-1]
    places = jnp.arange(max_length).reshape(*(1,) * at.ndim, -1)
    is_new = (places == at[..., None]) & ~texts.is_done[..., None]
    lengths = at + ~texts.is_done
    return texts._replace(
        tokens=jnp.where(is_new, tokens[..., None], texts.tokens),
        lengths=lengths,
        is_done=texts.is_done | (tokens == end) | (lengths >= max_length),
    )


def _prompted(given, max_length, end):
    lengths, room = given.lengths, max_length - given.prompts.shape[1]
    tokens = jnp.pad(given.prompts, [(0, 0), (0, room)])
    tokens = _ended(tokens, lengths, end)
    zeros = jnp.zeros(lengths.shape, jnp.float32)
    return _Texts(tokens, lengths, lengths >= max_length, zeros)


def _ended(tokens, lengths, end):
    """Fills all places after a text's end with the end token."""
    is_after = jnp.arange(tokens.shape[1])[None] >= lengths[:, None]
    return jnp.where(is_after, end, tokens)


def _checked(model, given, strategy, max_length, end_token, key):
    """Returns the writer, what is given with prompts of a common size, and the end."""
    decoding = model.decoding
    prompts, lengths, source, source_lengths = given
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
        raise ValueError("key must be given where tokens are drawn at random.")
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
    given = _Given(padded, lengths.astype(np.int32), source, source_lengths)
    return _Writer(decoding, strategy, max_length), given, end


def _checked_lengths(name, lengths, size, shortest, letter, longest) -> np.ndarray:
    """Checks lengths `[B]`; None stands for the longest."""
    lengths = np.full(size, longest) if lengths is None else np.asarray(lengths)
    is_integer = np.issubdtype(lengths.dtype, np.integer)
    wrong = lengths[(lengths < shortest) | (lengths > longest)][:1]
    if lengths.shape != (size,) or not is_integer or wrong.size:
        raise ValueError(
            f"{name} must be integers [B] = {(size,)} from {shortest} to {letter} = "
            f"{longest}, got {display.numbers(wrong if wrong.size else lengths)}."
        )
    return lengths
