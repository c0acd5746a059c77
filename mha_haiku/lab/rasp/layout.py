"""The layout of a program in a model, and the matrices that compute its parts.

The residual stream consists of slots, one for each stored sequence: the one-hot code of
its value, or the number itself. A head of the program reads slots and writes one; a map
of one code is linear, and part of the weights of its readers; any other map is a lookup
table in hidden units. There are no norms. Entry 0 of the stream is 1 at the first
position, which has the start token: codes are 0 there, and heads that select nothing
attend to it.

D entries of the stream, K key and V value size, F hidden units; all float64 NumPy.

Source: Weiss et al. 2021, https://arxiv.org/abs/2106.06981; Lindner et al. 2023,
https://arxiv.org/abs/2301.05062.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from mha_haiku.lab.rasp import language
from mha_haiku.lab.rasp.language import Head, Leaf, Map, Program, Sequence

SHARPNESS = 24.0  # added to a score by a condition, or by a step of an order

_Unit = tuple[np.ndarray, float, np.ndarray]  # what it reads, bias, what it writes
_Writes = dict[Any, np.ndarray]  # `[D]` by value


class HeadMatrices(NamedTuple):
    """The matrices of a head."""

    query: np.ndarray  # `[D, K]`
    query_bias: np.ndarray  # `[K]`
    key: np.ndarray  # `[D, K]`
    value: np.ndarray  # `[D, V]`
    slot: slice  # the entries of the stream that the V values are written to


class Units(NamedTuple):
    """The hidden units of a layer."""

    weights: np.ndarray  # `[D, F]`, what they read
    biases: np.ndarray  # `[F]`
    outputs: np.ndarray  # `[F, D]`, what they write


class Layout:
    """The parts of a program, and their places in a model.

    `heads` come after the heads that they read; `slots` maps stored sequences to slices
    of the stream; `domain(sequence)` lists its values; and `senders(sequence)` are the
    heads that it is computed from, through no other head.
    """

    def __init__(self, program: Program):
        """Lays out a program, whose output needs a head."""
        self.program = program
        self.domain = functools.cache(program.domain)
        self.senders = functools.cache(self._senders)
        self._when = functools.cache(self._computed_when)
        every = list(dict.fromkeys(parts(program.output)))
        self.heads = [part for part in every if isinstance(part, Head)]
        if not self.heads:
            raise ValueError(
                "program must have an output that is computed by a head, got "
                f"{program.name!r}."
            )
        self._maps = [part for part in every if _is_looked_up(part)]
        stored = [language.tokens, language.indices, *self.heads, *self._maps]
        sizes = [1 if part.is_number else len(self.domain(part)) for part in stored]
        ends = np.cumsum([1, *sizes])  # after the entry of the first position
        self.stream_size = int(ends[-1])
        self.slots = {
            part: slice(int(start), int(stop))
            for part, start, stop in zip(stored, ends[:-1], ends[1:], strict=True)
        }
        self.num_layers = 1 + max(map(self.layer, self.heads + self._maps))

    def layer(self, part: Sequence) -> int:
        """Finds the layer whose heads or hidden units compute a part."""
        return self._when(part) // 2

    def read(self, part: Sequence) -> np.ndarray:
        """Builds the matrix that reads a code, `[D, values]`, or a number, `[D, 1]`."""
        if part in self.slots:
            return np.eye(self.stream_size)[:, self.slots[part]]
        assert isinstance(part, Map)
        (source,) = part.inputs  # a map of one code, which is linear
        results = [part.function(value) for value in self.domain(source)]
        table = [[x == result for x in self.domain(part)] for result in results]
        return self.read(source) @ np.array(table, float)

    def head(self, head: Head) -> HeadMatrices:
        """Builds the matrices of a head.

        The score of a key is the sum of the weights of the conditions that hold, plus
        its place in the order. The first position scores half a step less than selected
        keys, or the same as they do if the head computes a share.
        """
        order, most = self._order(head.selector)
        is_share = head.values is None
        sharpness = SHARPNESS / 2 if is_share else SHARPNESS
        weight = sharpness * (most + 1)
        queries, keys = [], []
        for keys_of, queries_of, predicate in head.selector.conditions:
            query, key = self.read(queries_of), self.read(keys_of)
            domain = self.domain(queries_of)
            holds = [[predicate(k, q) for q in domain] for k in self.domain(keys_of)]
            holds = np.array(holds, float)
            if query.shape[1] > key.shape[1]:  # whichever makes K smaller
                query = query @ holds.T
            else:
                key = key @ holds
            queries.append(weight * query)
            keys.append(key)
        # One more channel, in which all queries are 1, for what does not depend on
        # them.
        constant = sharpness * order
        constant[0] = weight * len(queries) - (0 if is_share else sharpness / 2)
        queries.append(np.zeros((self.stream_size, 1)))
        keys.append(constant[:, None])
        query, key = np.concatenate(queries, axis=1), np.concatenate(keys, axis=1)
        bias = np.zeros(query.shape[1])
        bias[-1] = 1
        is_first = np.eye(self.stream_size)[:, :1]
        value = is_first if head.values is None else self.read(head.values)
        return HeadMatrices(query, bias, key, value, self.slots[head])

    def units(self, layer: int) -> Units:
        """Builds the hidden units of a layer."""
        maps = [part for part in self._maps if self.layer(part) == layer]
        units = [unit for part in maps for unit in self._units_of(part)]
        if not units:
            nothing = np.zeros((self.stream_size, 0))
            return Units(nothing, np.zeros(0), nothing.T)
        weights, biases, outputs = (np.array(x) for x in zip(*units, strict=True))
        return Units(weights.T, biases, outputs)

    def bearable(self) -> np.ndarray:
        """Returns the noise that entries of the stream tolerate, `[D]`, up to scale."""
        result = np.ones(self.stream_size)
        result[0] = 0
        for head in self.heads:
            if head.is_number:
                steps = np.diff(np.array(self.domain(head), float))
                result[self.slots[head]] = steps.min()
        return result

    def _computed_when(self, part: Sequence) -> int:
        """Numbers a part: 2 l for attention of layer l, 2 l + 1 for hidden units."""
        if isinstance(part, Leaf):
            return -1
        inputs = [x for xs in language.inputs_of(part).values() for x in xs]
        before = max(map(self._when, inputs))
        if isinstance(part, Head):
            return 2 * (before // 2 + 1)
        return 2 * ((before + 1) // 2) + 1 if _is_looked_up(part) else before

    def _senders(self, part: Sequence) -> frozenset[Head]:
        if isinstance(part, Head):
            return frozenset([part])
        inputs = language.inputs_of(part).get("", [])
        return frozenset().union(*map(self.senders, inputs))

    def _order(self, selector: language.Selector) -> tuple[np.ndarray, int]:
        """Returns the vector that reads the place in an order, `[D]`, and the last."""
        order, most = np.zeros(self.stream_size), 0
        for sequence in reversed(selector.orders):
            values = np.array(self.domain(sequence), float)
            # Less the smallest value, times a factor that outweighs all later orders.
            order += self.read(sequence) @ ((values - values.min()) * (most + 1))
            most += int(values.max() - values.min()) * (most + 1)
        return order, most

    def _units_of(self, part: Map) -> Iterator[_Unit]:
        """Yields input weights, bias and output weights of a map's hidden units."""
        codes = np.eye(self.stream_size)[self.slots[part]]
        writes = dict(zip(self.domain(part), codes, strict=True))
        writes[None] = np.zeros(self.stream_size)
        if part.units is not None:
            return part.units(self, part, writes)
        if len(part.inputs) == 2:
            return self._pairs(part, writes)
        return self._steps(part, writes)

    def _pairs(self, part: Map, writes: _Writes) -> Iterator[_Unit]:
        """Yields a unit for each pair of values, active if both codes are over 3/4."""
        one, other = part.inputs
        for i, a in enumerate(self.domain(one)):
            for j, b in enumerate(self.domain(other)):
                result = part.function(a, b)
                if result is not None:
                    reads = self.read(one)[:, i] + self.read(other)[:, j]
                    yield 2 * reads, -3.0, writes[result]

    def _steps(self, part: Map, writes: _Writes) -> Iterator[_Unit]:
        """Yields two units for each change of a function of a number."""
        # They make a step from 0 to 1, halfway between the two numbers, except at the
        # first position.
        (source,) = part.inputs
        domain = [float(x) for x in self.domain(source)]
        results = [part.function(x) for x in self.domain(source)]
        number = self.read(source)[:, 0]
        always = np.zeros(self.stream_size)
        always[0] = -2.0
        yield always, 1.0, writes[results[0]]
        for i in range(1, len(domain)):
            if results[i] == results[i - 1]:
                continue
            slope = 2 / (domain[i] - domain[i - 1])
            start = -slope * (domain[i] + domain[i - 1]) / 2 + 0.5
            reads = slope * number
            reads[0] = -2 * slope * abs(max(domain, key=abs)) - abs(start) - 1
            change = writes[results[i]] - writes[results[i - 1]]
            yield reads, start, change
            yield reads, start - 1, -change


def _is_looked_up(part: Sequence) -> TypeGuard[Map]:
    """Checks whether hidden units compute a part: of two codes, or of a number."""
    if not isinstance(part, Map):
        return False
    return len(part.inputs) > 1 or any(x.is_number for x in part.inputs)


def parts(sequence: Sequence) -> Iterator[Sequence]:
    """Yields the parts of a sequence, inputs first, and the sequence last."""
    for sources in language.inputs_of(sequence).values():
        for source in sources:
            yield from parts(source)
    yield sequence
