"""The example programs: `PROGRAMS` has all of them, by name.

A program is defined as a function of the length n that returns the output; the
decorator `_offered` makes it `(length=8) -> Program`. In a causal program queries see
only themselves and earlier positions.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.random import Generator

from mha_haiku.lab.rasp.language import (
    Program,
    Selector,
    Sequence,
    aggregate,
    indices,
    map,
    mean,
    select,
    selector_width,
    tokens,
)

PROGRAMS: dict[str, Callable[..., Program]] = {}


def _uniform(generator: Generator, count: int, length: int, size: int) -> np.ndarray:
    return generator.integers(0, size, (count, length))


def _different(generator: Generator, count: int, length: int, size: int) -> np.ndarray:
    return np.argsort(generator.uniform(size=(count, size)), axis=1)[:, :length]


def _repeated(generator: Generator, count: int, length: int, size: int) -> np.ndarray:
    """Draws different tokens for the first half, and repeats them in the second."""
    half = -(-length // 2)
    first = _different(generator, count, half, size)
    return np.concatenate([first, first], axis=1)[:, :length]


def _mirrored(generator: Generator, count: int, length: int, size: int) -> np.ndarray:
    """Draws palindromes, and changes one token in half of them."""
    half = _uniform(generator, count, -(-length // 2), size)
    inputs = np.concatenate([half, half[:, : length // 2][:, ::-1]], axis=1)
    return _half_changed(generator, inputs, size)


def _ascending(generator: Generator, count: int, length: int, size: int) -> np.ndarray:
    """Draws tokens in order, and changes one token in half of the examples."""
    inputs = np.sort(_uniform(generator, count, length, size), axis=1)
    return _half_changed(generator, inputs, size)


def _half_changed(generator: Generator, inputs: np.ndarray, size: int) -> np.ndarray:
    """Changes one token in the first half of the examples."""
    count, length = len(inputs) // 2, inputs.shape[1]
    places = np.arange(count), generator.integers(0, length, count)
    inputs[places] = generator.integers(0, size, count)
    return inputs


def _offered(
    vocabulary: Iterable[Any] | None = "abcdef",
    *,
    is_causal: bool = False,
    sample: Callable[..., np.ndarray] = _uniform,
) -> Callable[[Callable[[int], Sequence]], Callable[..., Program]]:
    """Registers a function in `PROGRAMS`, as one that returns its program."""
    # Without a vocabulary the tokens are 0 to n - 1, which name positions.
    # `sample(generator, count, n, size of the vocabulary)` returns inputs.

    def offer(make: Callable[[int], Sequence]):
        def program(length: int = 8) -> Program:
            symbols = tuple(range(length) if vocabulary is None else vocabulary)
            draw = lambda *given: sample(*given, length, len(symbols))  # noqa: E731
            name, output = make.__name__, make(length)
            return Program(name, output, symbols, length, is_causal, draw)

        program.__doc__, program.__name__ = make.__doc__, make.__name__
        PROGRAMS[make.__name__] = program
        return program

    return offer


def _at(offset: int) -> Selector:
    """Selects the position at an offset from the query's position."""
    return select(indices, indices, lambda key, query: key == query + offset)


def _all() -> Selector:
    return select(indices, indices, lambda key, query: True)


def _before() -> Selector:
    return select(indices, indices, operator.lt)


def _same(sequence: Sequence) -> Selector:
    return select(sequence, sequence, operator.eq)


def _previous(sequence: Sequence = tokens, name: str = "previous_token") -> Sequence:
    return aggregate(_at(-1), sequence, name=name)


def _token_at(place: Callable[[int], int], name: str) -> Sequence:
    """Gathers the token at a position that depends only on the query's position."""
    there = select(indices, indices, lambda key, query: key == place(query))
    return aggregate(there, tokens, name=name)


def _count(token: str) -> Sequence:
    same = select(tokens, indices, lambda key, query: key == token)
    return selector_width(same, name=f"count of {token}")


def _in_order(rank: Sequence) -> Sequence:
    return aggregate(select(rank, indices, operator.eq), tokens, name="of own rank")


# One layer.


@_offered(is_causal=True)
def previous_token(length: int) -> Sequence:
    """The token before."""
    return _previous()


@_offered()
def next_token(length: int) -> Sequence:
    """The token after."""
    return aggregate(_at(1), tokens, name="next_token")


@_offered(is_causal=True)
def shift(length: int) -> Sequence:
    """The token three places before."""
    return aggregate(_at(-3), tokens, name="positional")


@_offered()
def reverse(length: int) -> Sequence:
    """The token at the mirrored position."""
    return _token_at(lambda i: length - 1 - i, "mirrored position")


@_offered()
def first_token(length: int) -> Sequence:
    """The first token."""
    return _token_at(lambda i: 0, "first token")


@_offered("abcdefghijkl")
def largest(length: int) -> Sequence:
    """The token that is last in the alphabet."""
    rank = map(lambda token: ord(token) - ord("a"), tokens)
    return aggregate(_all().best(rank), tokens, name="largest token")


@_offered(is_causal=True)
def last_vowel(length: int) -> Sequence:
    """The last token so far that is a vowel."""
    vowels = select(tokens, indices, lambda key, query: key in "ae")
    return aggregate(vowels.last(), tokens, name="last vowel")


@_offered(is_causal=True)
def skip_trigram(length: int) -> Sequence:
    """Predicts x at a b after an earlier a, and y at a c or e after an earlier d."""
    pairs = {"b": "a", "c": "d", "e": "d"}
    wanted = select(tokens, tokens, lambda key, query: pairs.get(query) == key)
    answer = map({"a": "x", "d": "y"}.get, tokens)
    return aggregate(wanted, answer, name="skip-trigram")


@_offered(None)
def named_position(length: int) -> Sequence:
    """The token at the position that this token names."""
    named = select(indices, tokens, operator.eq)
    return aggregate(named, tokens, name="named position")


@_offered()
def histogram(length: int) -> Sequence:
    """The number of occurrences of this token."""
    return selector_width(_same(tokens), name="same token")


@_offered(is_causal=True)
def count(length: int) -> Sequence:
    """The number of occurrences of a so far."""
    return _count("a")


@_offered("ab", is_causal=True)
def parity(length: int) -> Sequence:
    """Whether a has occurred an odd number of times so far."""
    return map(lambda number: number % 2, _count("a"))


@_offered(is_causal=True)
def seen_before(length: int) -> Sequence:
    """Whether this token has occurred before."""
    earlier = selector_width(_same(tokens) & _before(), name="same token before")
    return map(bool, earlier)


@_offered("abc")
def majority(length: int) -> Sequence:
    """Whether at least half of the tokens are a."""
    is_a = map(lambda token: int(token == "a"), tokens)
    return map(lambda share: share >= 0.5, mean(_all(), is_a, name="share of a"))


# Two layers.


@_offered("abcdefghijkl", is_causal=True, sample=_repeated)
def induction(length: int) -> Sequence:
    """The token that followed the last earlier occurrence of this token."""
    again = select(_previous(), tokens, operator.eq)
    return aggregate(again.last(), tokens, name="induction")


@_offered(is_causal=True)
def preceding_again(length: int) -> Sequence:
    """The token that preceded the last earlier occurrence of this token."""
    earlier = (_same(tokens) & _before()).last()
    return aggregate(earlier, _previous(), name="same token before")


@_offered(is_causal=True)
def second_previous(length: int) -> Sequence:
    """The token two places before, by two heads that both go one back."""
    return _previous(_previous(), "previous token of previous")


@_offered(None)
def two_hops(length: int) -> Sequence:
    """The token at the position that the token at the named position names."""
    return _hops(2)


@_offered()
def shift_by_name(length: int) -> Sequence:
    """The token as many places before as the first token names, where a is 0."""
    named = _token_at(lambda i: 0, "first token")
    place = map(lambda index, token: index - (ord(token) - ord("a")), indices, named)
    return aggregate(select(indices, place, operator.eq), tokens, name="named shift")


@_offered("abcdefghi", sample=_different)
def sort_different(length: int) -> Sequence:
    """The tokens in order; all are different."""
    smaller = select(tokens, tokens, operator.lt)
    return _in_order(selector_width(smaller, name="smaller tokens"))


@_offered("abc", sample=_mirrored)
def is_palindrome(length: int) -> Sequence:
    """Whether the tokens are a palindrome."""
    other = _token_at(lambda i: length - 1 - i, "mirrored position")
    differs = map(operator.ne, tokens, other)
    wrong = select(differs, indices, lambda key, query: key)
    return map(operator.not_, selector_width(wrong, name="differences"))


@_offered(is_causal=True, sample=_ascending)
def is_ascending(length: int) -> Sequence:
    """Whether no token so far is smaller than the one before it."""
    falls = map(operator.gt, _previous(), tokens)
    wrong = select(falls, indices, lambda key, query: key)
    return map(operator.not_, selector_width(wrong, name="falls"))


@_offered("()", is_causal=True)
def balanced_brackets(length: int) -> Sequence:
    """Whether brackets so far are balanced (T), can still be (P), or cannot (F)."""
    step = map({"(": 1, ")": -1}.get, tokens)
    height = mean(_all(), step, name="height")
    sign = map(lambda x: (x > 0) - (x < 0), height)
    below = select(sign, indices, lambda key, query: key < 0)
    falls = map(bool, selector_width(below, name="below zero"))
    return map(lambda bad, top: "F" if bad else "TP"[top > 0], falls, sign)


@_offered("abcd")
def most_frequent(length: int) -> Sequence:
    """The token that occurs most often; in a tie the one that occurs last."""
    often = selector_width(_same(tokens), name="same token")
    return aggregate(_all().best(often, indices), tokens, name="most frequent")


@_offered()
def as_frequent(length: int) -> Sequence:
    """The number of positions whose token occurs as often as this one."""
    often = selector_width(_same(tokens), name="same token")
    return selector_width(_same(often), name="same frequency")


@_offered("abcd", is_causal=True)
def two_token_induction(length: int) -> Sequence:
    """The token that followed the last occurrence of this token and the one before."""
    before = _previous()
    second = aggregate(_at(-2), tokens, name="positional")
    again = select(before, tokens, operator.eq) & select(second, before, operator.eq)
    return aggregate(again.last(), tokens, name="two-token induction")


# Three and four layers.


@_offered(None)
def three_hops(length: int) -> Sequence:
    """Like `two_hops`, with a third hop."""
    return _hops(3)


@_offered(None)
def four_hops(length: int) -> Sequence:
    """Like `two_hops`, with four hops."""
    return _hops(4)


@_offered("abc")
def sort(length: int) -> Sequence:
    """The tokens in order."""
    unique = map(lambda token, index: ord(token) * length + index, tokens, indices)
    smaller = select(unique, unique, operator.lt)
    return _in_order(selector_width(smaller, name="smaller tokens"))


@_offered()
def without_duplicates(length: int) -> Sequence:
    """The first occurrences of all tokens, moved to the front."""
    earlier = selector_width(_same(tokens) & _before(), name="same token before")
    is_first = select(earlier, indices, lambda key, query: key == 0)
    place = selector_width(is_first & _before(), name="first ones before")
    here = is_first & select(place, indices, operator.eq)
    return aggregate(here, tokens, name="of own place")


@_offered("abcd")
def by_frequency(length: int) -> Sequence:
    """The tokens in order of frequency; in a tie the earlier first."""
    often = selector_width(_same(tokens), name="same token")
    key = map(lambda number, index: number * length - index, often, indices)
    more = select(key, key, operator.gt)
    return _in_order(selector_width(more, name="more frequent"))


@_offered("()", is_causal=True)
def bracket_depth(length: int) -> Sequence:
    """The number of open brackets, by the counts of both kinds."""
    return map(lambda a, b: max(a - b, 0), _count("("), _count(")"))


def _hops(number: int) -> Sequence:  # each to the position that a token names
    here = tokens
    for i in range(number):
        named = select(indices, here, operator.eq)
        here = aggregate(named, tokens, name=f"hop {i + 1}")
    return here
