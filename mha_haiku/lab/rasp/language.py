"""A language of sequences that attention can compute, and its interpreter.

A program is an expression of sequences, which have a value at every position: tokens
and indices, values that heads gather from other positions, and functions of values at
the same position. Here it is interpreted in plain Python; `compiler` turns it into a
model.

A value may be None, meaning no value: a function of None is None, and no predicate
selects None. n is the number of positions.
"""

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Values
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np


class Sequence:
    """A value at each position; compared by identity.

    Example:
      >>> upper = mh.rasp.map(str.upper, mh.rasp.tokens)
      >>> isinstance(upper, mh.rasp.Sequence), upper.is_number
      (True, False)
    """

    @property
    def is_number(self) -> bool:
        """Whether a model keeps the sequence as a number, not as a one-hot code."""
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf(Sequence):
    """An input: `tokens`, or `indices`, which are 0 to n - 1."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Map(Sequence):
    """A function of the values at each position."""

    function: Callable[..., Any]
    inputs: tuple[Sequence, ...]
    # Makes its hidden units, instead of `layout`, from a `Layout`, this map and what
    # units write for each value.
    units: Callable[..., Any] | None = None


class Condition(NamedTuple):
    """A predicate of the values of two sequences, `predicate(key, query)`."""

    keys: Sequence
    queries: Sequence
    predicate: Callable[[Any, Any], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Selector:
    """The keys (positions) that each query (position) selects by some conditions.

    All conditions must hold; `one & other` has the conditions of both.

    Example:
      >>> from mha_haiku import rasp
      >>> earlier = rasp.select(rasp.indices, rasp.indices, lambda key, own: key < own)
      >>> same = rasp.select(rasp.tokens, rasp.tokens, lambda key, own: key == own)
      >>> place = rasp.aggregate((earlier & same).last(), rasp.indices, name="place")
      >>> last = rasp.Program("last", place, tuple("ab"), 4, True, sample=None)
      >>> last("abaa")
      [None, None, 0, 2]
    """

    conditions: tuple[Condition, ...]  # at least one
    # Keeps only the selected keys with the largest values of these sequences, compared
    # in order. Keeps all by default.
    orders: tuple[Sequence, ...] = ()

    def __and__(self, other: "Selector") -> "Selector":
        return Selector(self.conditions + other.conditions, self.orders + other.orders)

    def best(self, *orders: Sequence) -> "Selector":
        """Selects the keys with the largest values of the orders.

        Their values are integers, and not None at any selected key.
        """
        return Selector(self.conditions, self.orders + orders)

    def last(self) -> "Selector":
        """Selects only the last of the selected keys."""
        return self.best(indices)


@dataclasses.dataclass(frozen=True, eq=False)
class Head(Sequence):
    """The values that a head gathers from the positions that it selects."""

    selector: Selector  # the positions
    # The value that all of them have is gathered, or None if none is selected. Without
    # values a head gathers the share 1 / (1 + the number of selected positions).
    values: Sequence | None
    name: str  # what the head does, in a few words

    @property
    def is_number(self) -> bool:
        return self.values is None


tokens = Leaf("tokens")
indices = Leaf("indices")


def map(function: Callable[..., Any], *inputs: Sequence) -> Sequence:
    """Applies a function to the values of one or two sequences at each position.

    None means no result.

    Raises:
      ValueError: If there are no inputs, or more than two.

    Example:
      >>> from mha_haiku import rasp
      >>> is_vowel = rasp.map(lambda letter: letter in "aeiou", rasp.tokens)
      >>> vowels = rasp.Program("vowels", is_vowel, tuple("acef"), 4, True, sample=None)
      >>> vowels("face")
      [False, True, False, True]
    """
    if len(inputs) not in (1, 2):
        raise ValueError(f"inputs must be one or two sequences, got {len(inputs)}.")
    return Map(function, inputs)


def select(
    keys: Sequence, queries: Sequence, predicate: Callable[[Any, Any], bool]
) -> Selector:
    """Selects the keys for which `predicate(key, query)` holds.

    Example:
      >>> from mha_haiku import rasp
      >>> opposite = rasp.select(rasp.indices, rasp.indices, lambda s, t: s + t == 3)
      >>> letter = rasp.aggregate(opposite, rasp.tokens, name="opposite")
      >>> mirror = rasp.Program("mirror", letter, tuple("acef"), 4, False, sample=None)
      >>> mirror("face")
      ['e', 'c', 'a', 'f']
    """
    return Selector((Condition(keys, queries, predicate),))


def aggregate(selector: Selector, values: Sequence, *, name: str) -> Head:
    """Gathers the value that the selected keys share, None where none is selected.

    Example:
      >>> from mha_haiku import rasp
      >>> before = rasp.select(rasp.indices, rasp.indices, lambda s, t: s == t - 1)
      >>> letter = rasp.aggregate(before, rasp.tokens, name="previous token")
      >>> shift = rasp.Program("shift", letter, tuple("abc"), 4, True, sample=None)
      >>> shift("cabb")
      [None, 'c', 'a', 'b']
    """
    return Head(selector, values, name)


def selector_width(selector: Selector, *, name: str) -> Sequence:
    """Counts the keys that a selector without an order selects.

    Raises:
      ValueError: If the selector has an order.

    Example:
      >>> from mha_haiku import rasp
      >>> same = rasp.select(rasp.tokens, rasp.tokens, lambda key, own: key == own)
      >>> number = rasp.selector_width(same, name="same tokens")
      >>> count = rasp.Program("count", number, tuple("abc"), 4, False, sample=None)
      >>> count("abac")
      [2, 1, 2, 1]
    """
    if selector.orders:
        raise ValueError("selector must have no order, as its width is counted.")
    return Map(lambda x: int(1 / x) - 1, (Head(selector, None, name),))


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A sequence to compute, and its inputs.

    Example:
      >>> reverse = mh.rasp.PROGRAMS["reverse"](length=4)
      >>> reverse("face")
      ['e', 'c', 'a', 'f']
    """

    name: str  # one word
    output: Sequence
    vocabulary: tuple[Any, ...]  # the tokens, any Python values
    length: int  # n
    is_causal: bool  # whether queries select only themselves and earlier positions
    # `sample(generator, count)` returns inputs, `[count, n]` indices into the
    # vocabulary.
    sample: Callable[[np.random.Generator, int], np.ndarray]

    def __call__(self, inputs: Values[Any]) -> list[Any]:
        """Computes the output's value at each position of n inputs.

        Raises:
          ValueError: If there are not n, or keys that a head selects have different
            values.
        """
        if len(inputs) != self.length:
            raise ValueError(f"inputs must be {self.length} tokens, got {len(inputs)}.")
        values = {tokens: list(inputs), indices: list(range(self.length))}
        return _values(self.output, self.is_causal, values)

    def domain(self, sequence: Sequence) -> list[Any]:
        """Lists all values that a sequence may have, except None, in order."""
        if sequence is tokens:
            return list(self.vocabulary)
        if sequence is indices:
            return list(range(self.length))
        if isinstance(sequence, Map):
            rows = itertools.product(*(self.domain(x) for x in sequence.inputs))
            results = dict.fromkeys(sequence.function(*row) for row in rows)
            return [x for x in results if x is not None]
        assert isinstance(sequence, Head)
        if sequence.values is None:  # it gathers a share
            return [Fraction(1, 1 + k) for k in range(self.length, -1, -1)]
        return self.domain(sequence.values)


def inputs_of(sequence: Sequence) -> dict[str, list[Sequence]]:
    """Returns the inputs of a sequence, by "q", "k" and "v" of a head, "" of a map."""
    if isinstance(sequence, Map):
        return {"": list(sequence.inputs)}
    if isinstance(sequence, Leaf):
        return {}
    assert isinstance(sequence, Head)
    selector = sequence.selector
    return {
        "q": [condition.queries for condition in selector.conditions],
        "k": [x.keys for x in selector.conditions] + list(selector.orders),
        "v": [] if sequence.values is None else [sequence.values],
    }


def _values(sequence: Sequence, is_causal: bool, values: dict) -> list[Any]:
    """Computes the values of a sequence; `values` is the cache."""
    if sequence in values:
        return values[sequence]
    for source in itertools.chain(*inputs_of(sequence).values()):
        _values(source, is_causal, values)
    if isinstance(sequence, Map):
        rows = zip(*(values[x] for x in sequence.inputs), strict=True)
        result = [None if None in row else sequence.function(*row) for row in rows]
    else:
        assert isinstance(sequence, Head)  # the values of leaves are given
        count = len(values[tokens])
        result = []
        for query in range(count):
            seen = range(query + 1 if is_causal else count)
            keys = _selected(sequence.selector, query, seen, values)
            result.append(_gathered(sequence, keys, values))
    values[sequence] = result
    return result


def _selected(selector: Selector, query: int, seen: range, values: dict) -> list[int]:
    def holds(condition: Condition, key: int):
        pair = values[condition.keys][key], values[condition.queries][query]
        return None not in pair and bool(condition.predicate(*pair))

    keys = [s for s in seen if all(holds(x, s) for x in selector.conditions)]
    if not selector.orders or not keys:
        return keys
    ranks = {s: [values[order][s] for order in selector.orders] for s in keys}
    return [s for s in keys if ranks[s] == max(ranks.values())]


def _gathered(head: Head, keys: list[int], values: dict) -> Any:
    if head.values is None:
        return Fraction(1, 1 + len(keys))
    held = [values[head.values][key] for key in keys]
    if len(set(held)) > 1:
        raise ValueError(
            f"keys that {head.name!r} selects must agree on their value, got {held}."
        )
    return held[0] if held else None
