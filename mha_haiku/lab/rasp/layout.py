"""Where the parts of a program stand in a model, and the matrices that compute them.

The residual stream is made of slots: one for each sequence that is stored, the one-hot
code of its value, or the number itself. A head of the program reads slots and writes
one; a map of one code is linear, and in the weights of what reads it; any other map is
hidden units that look its result up. There are no norms. Entry 0 of the stream is 1 at
the first position, whose token is not the program's: codes are 0 there, and heads that
select nothing attend to it.

D entries of the stream, K key and V value size, F hidden units; all float64 NumPy.

Source: Weiss et al. 2021, https://arxiv.org/abs/2106.06981; Lindner et al. 2023,
https://arxiv.org/abs/2301.05062.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mha_haiku.lab.rasp import language
from mha_haiku.lab.rasp.language import Either, Head, Leaf, Map, Program, Sequence

SHARPNESS = 24.0  # what one condition, or a step of an order, adds to a score


class HeadMatrices(NamedTuple):
    """What a head computes."""

    query: np.ndarray  # `[D, K]`
    query_bias: np.ndarray  # `[K]`
    key: np.ndarray  # `[D, K]`
    value: np.ndarray  # `[D, V]`
    slot: slice  # where in the stream the V values are written


class Units(NamedTuple):
    """What the hidden units of a layer compute."""

    weights: np.ndarray  # `[D, F]`, what they read
    biases: np.ndarray  # `[F]`
    outputs: np.ndarray  # `[F, D]`, what each writes


class Layout:
    """The parts of a program, and where they are in a model.

    `heads` are each after the heads that it reads; `slots` have the slice of the stream
    of each stored sequence; `domain(sequence)` are its values; and `senders(sequence)`
    the heads whose output it is made of, through no other head.
    """

    def __init__(self, program: Program):
        """Lays out a program, whose output needs a head and is no mean."""
        self.program = program
        self.domain = functools.cache(program.domain)
        self.senders = functools.cache(self._senders)
        self._when = functools.cache(self._computed_when)
        every = list(dict.fromkeys(parts(program.output)))
        self.heads = [part for part in every if isinstance(part, Head)]
        if program.output.is_number or not self.heads:
            raise ValueError(
                "program must have an output that is made by a head, and is no mean; "
                f"map() makes codes of means. Got {program.name!r}."
            )
        self._maps = [part for part in every if _is_looked_up(part)]
        stored = [language.tokens, language.indices, *self.heads, *self._maps]
        sizes = [1 if each.is_number else len(self.domain(each)) for each in stored]
        ends = np.cumsum([1, *sizes])  # after the entry of the first position
        self.stream_size = int(ends[-1])
        self.slots = {
            each: slice(int(start), int(stop))
            for each, start, stop in zip(stored, ends[:-1], ends[1:], strict=True)
        }
        self.num_layers = 1 + max(map(self.layer, self.heads + self._maps))

    def layer(self, part: Sequence) -> int:
        """Finds the layer whose heads or hidden units compute a part."""
        return self._when(part) // 2

    def read(self, part: Sequence) -> np.ndarray:
        """Builds the reader of a code, `[D, values]`, or of a number, `[D, 1]`."""
        if part in self.slots:
            return np.eye(self.stream_size)[:, self.slots[part]]
        (source,) = part.inputs  # a map of one code, which is linear
        results = [part.function(value) for value in self.domain(source)]
        table = [[x == result for x in self.domain(part)] for result in results]
        return self.read(source) @ np.array(table, float)

    def head(self, head: Head) -> HeadMatrices:
        """Builds the matrices of a head.

        The score of a key is the weight of a condition for each that holds, plus its
        place in the order. The first position scores half a step less than selected
        keys, or the same where a share is wanted.
        """
        order, most = self._order(head.selector)
        is_share = head.gathers == "share"
        sharpness = SHARPNESS / 2 if is_share else SHARPNESS
        weight = sharpness * (most + 1)
        queries, keys = [], []
        for keys_of, queries_of, predicate in head.selector.conditions:
            query, key = self.read(queries_of), self.read(keys_of)
            holds = [
                [predicate(k, q) for q in self.domain(queries_of)]
                for k in self.domain(keys_of)
            ]
            holds = np.array(holds, float)
            if query.shape[1] > key.shape[1]:  # whichever makes K smaller
                query = query @ holds.T
            else:
                key = key @ holds
            queries.append(weight * query)
            keys.append(key)
        # One more channel, in which all queries are 1: what does not depend on them.
        constant = sharpness * order
        constant[0] = weight * len(queries) - (0 if is_share else sharpness / 2)
        queries.append(np.zeros((self.stream_size, 1)))
        keys.append(constant[:, None])
        query, key = np.concatenate(queries, axis=1), np.concatenate(keys, axis=1)
        bias = np.zeros(query.shape[1])
        bias[-1] = 1
        if is_share:
            value = np.eye(self.stream_size)[:, :1]
        elif head.gathers == "mean":
            value = self._number(head.values)[:, None]
        else:
            value = self.read(head.values)
        return HeadMatrices(query, bias, key, value, self.slots[head])

    def units(self, layer: int) -> Units:
        """Builds the hidden units of a layer."""
        own = [each for each in self._maps if self.layer(each) == layer]
        units = [unit for each in own for unit in self._units_of(each)]
        if not units:
            nothing = np.zeros((self.stream_size, 0))
            return Units(nothing, np.zeros(0), nothing.T)
        weights, biases, outputs = (np.array(x) for x in zip(*units, strict=True))
        return Units(weights.T, biases, outputs)

    def bearable(self) -> np.ndarray:
        """Finds the noise each entry of the stream bears, `[D]`, up to a factor."""
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
        inputs = [x for each in language.inputs_of(part).values() for x in each]
        before = max(map(self._when, inputs))
        if isinstance(part, Head):
            return 2 * (before // 2 + 1)
        return 2 * ((before + 1) // 2) + 1 if _is_looked_up(part) else before

    def _senders(self, part: Sequence) -> frozenset[Head]:
        if isinstance(part, Head):
            return frozenset([part])
        inputs = language.inputs_of(part).get("", [])
        return frozenset().union(*map(self.senders, inputs))

    def _number(self, part: Sequence) -> np.ndarray:
        """Builds the vector that reads a code as its number, `[D]`."""
        return self.read(part) @ np.array(self.domain(part), float)

    def _order(self, selector) -> tuple[np.ndarray, int]:
        """Returns what reads the place in a selector's order, `[D]`, and the last."""
        order, most = np.zeros(self.stream_size), 0
        for each in reversed(selector.orders):
            values = np.array(self.domain(each), float)
            # Less the smallest value, and times what outweighs all later orders.
            order += self.read(each) @ ((values - values.min()) * (most + 1))
            most += int(values.max() - values.min()) * (most + 1)
        return order, most

    def _units_of(self, part: Map) -> Iterator[tuple[np.ndarray, float, np.ndarray]]:
        """Yields what each hidden unit of a map reads, its bias, and what it writes."""
        codes = np.eye(self.stream_size)[self.slots[part]]
        writes = dict(zip(self.domain(part), codes, strict=True))
        writes[None] = np.zeros(self.stream_size)
        if isinstance(part, Either):
            return self._either(part, writes)
        if len(part.inputs) == 2:
            return self._pairs(part, writes)
        return self._steps(part, writes)

    def _pairs(self, part, writes):
        """Yields a unit for each pair of values, on where both codes are over 3/4."""
        one, other = part.inputs
        for i, a in enumerate(self.domain(one)):
            for j, b in enumerate(self.domain(other)):
                result = part.function(a, b)
                if result is not None:
                    reads = self.read(one)[:, i] + self.read(other)[:, j]
                    yield 2 * reads, -3.0, writes[result]

    def _either(self, part, writes):
        """Yields two units for each step from 0 to 1, between codes of 1/2 and 3/4."""
        first, second = map(self.read, part.inputs)
        reads = [first + second]
        if part.is_backup:  # less the first, twice, which outweighs the second
            reads = [first, second - 2 * first.sum(1, keepdims=True)]
        for each in reads:
            for code, value in zip(each.T, self.domain(part), strict=True):
                yield 4 * code, -2.0, writes[value]
                yield 4 * code, -3.0, -writes[value]

    def _steps(self, part, writes):
        """Yields two units for each change of a function of a number."""
        # They make a step from 0 to 1, halfway between the two numbers; none is taken
        # at the first position.
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


def _is_looked_up(part: Sequence) -> bool:
    """Checks whether hidden units compute a part: of two codes, or of a number."""
    return isinstance(part, Map) and (len(part.inputs) > 1 or part.inputs[0].is_number)


def parts(sequence: Sequence) -> Iterator[Sequence]:
    """Yields all that a sequence is made of, inputs first, and the sequence last."""
    for each in language.inputs_of(sequence).values():
        for part in each:
            yield from parts(part)
    yield sequence
