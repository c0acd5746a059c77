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


def _ascending(generator: Generator, count: int, length: int, size: int) -> np.ndarray:
    """Draws tokens in order, and changes one token in half of the examples."""
    inputs = np.sort(_uniform(generator, count, length, size), axis=1)
    places = np.arange(count // 2), generator.integers(0, length, count // 2)
    inputs[places] = generator.integers(0, size, count // 2)
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
            draw = lambda *arguments: sample(*arguments, length, len(symbols))  # noqa: E731
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


def _in_order(rank: Sequence) -> Sequence:
    return aggregate(select(rank, indices, operator.eq), tokens, name="of own rank")


# One layer.


@_offered(is_causal=True)
def previous_token(length: int) -> Sequence:
    """The token before."""
    return _previous()


@_offered()
def reverse(length: int) -> Sequence:
    """The token at the mirrored position."""
    return _token_at(lambda i: length - 1 - i, "mirrored position")


@_offered("abcdefghijkl")
def largest(length: int) -> Sequence:
    """The token that is last in the alphabet."""
    rank = map(lambda token: ord(token) - ord("a"), tokens)
    return aggregate(_all().best(rank), tokens, name="largest token")


@_offered()
def histogram(length: int) -> Sequence:
    """The number of occurrences of this token."""
    return selector_width(_same(tokens), name="same token")


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


@_offered(is_causal=True, sample=_ascending)
def is_ascending(length: int) -> Sequence:
    """Whether no token so far is smaller than the one before it."""
    falls = map(operator.gt, _previous(), tokens)
    wrong = select(falls, indices, lambda key, query: key)
    return map(operator.not_, selector_width(wrong, name="falls"))


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


def _hops(number: int) -> Sequence:  # each to the position that a token names
    here = tokens
    for i in range(number):
        named = select(indices, here, operator.eq)
        here = aggregate(named, tokens, name=f"hop {i + 1}")
    return here
