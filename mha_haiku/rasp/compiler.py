"""Programs turned into models whose heads, and the edges between them, are known.

The residual stream is made of slots: one for each sequence that is stored, the one-hot
code of its value, or the number itself. A head of the program reads slots and writes
one; a map of one code is a linear map, so that whoever reads it has it in its weights;
any other map is hidden units that look its result up. There are no norms. The first
position holds a token that is not the program's: codes are 0 there, and heads that
select nothing attend to it. The other heads are random, every second one as sure of
itself as those of the program are, and write a little everywhere.

D width, K key and value size, F hidden units, L layers, H heads of a layer, T = n + 1
positions.

Source: Weiss et al. 2021, https://arxiv.org/abs/2106.06981; Lindner et al. 2023,
https://arxiv.org/abs/2301.05062.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from mha_haiku import checks, models, tasks
from mha_haiku.rasp import language
from mha_haiku.rasp.language import Head, Leaf, Map, Program, Sequence

_SHARPNESS = 24.0  # what one condition, or a step of an order, adds to a score
_LOGIT = 12.0  # of the right answer; that of None is half of it

Place = tuple[int, int]  # layer and head


class Sizes(NamedTuple):
    """The sizes of a model, beside its heads and its length.

    Attributes:
      num_layers: L.
      model_size: D.
      key_size: K.
      hidden_size: F.
      num_tokens: Those of the program, and the one that stands first.
      num_classes: The program's answers, and None.
    """

    num_layers: int
    model_size: int
    key_size: int
    hidden_size: int
    num_tokens: int
    num_classes: int

    def __or__(self, other: "Sizes") -> "Sizes":
        """Returns the larger ones of both."""
        return Sizes(*map(max, self, other))


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A model that computes a program.

    Attributes:
      program: The program.
      config: `config.model` of the model, of the family encoder or causal.
      model: The model. Its tokens are the places in the program's vocabulary, and
        behind them the one that stands first in each input. Its classes are the places
        in `answers`.
      params: Its parameters, as host arrays.
      answers: The values of the output, the last one None.
      heads: What the heads of the program do, by (layer, head).
      edges: (sender, receiver, "q" | "k" | "v"): the sender's output is read by the
        receiver's queries, keys or values, through no other head.
      senders: The heads whose output the logits read, through no other head.
    """

    program: Program
    config: ml_collections.ConfigDict
    model: models.Model
    params: dict[str, dict[str, np.ndarray]]
    answers: tuple[Any, ...]
    heads: dict[Place, str]
    edges: frozenset[tuple[Place, Place, str]]
    senders: frozenset[Place]

    def __repr__(self) -> str:
        return (
            f"Compiled({self.program.name}: {self.model.description}, heads "
            f"{self.heads}, {len(self.edges)} edges)"
        )

    @property
    def is_real(self) -> np.ndarray:
        """`[L, H]` booleans: the heads of the program."""
        own = self.config
        result = np.zeros((own.num_layers, own.attention.num_heads), bool)
        result[tuple(np.array(list(self.heads)).T)] = True
        return result

    def examples(self, count: int, *, seed: int = 0) -> tasks.Example:
        """Returns a batch of `[B, T]` inputs and the program's answers to them.

        Args:
          count: B.
          seed: Of the inputs.

        Returns:
          Targets `[B, T]`, places in `answers`; the first position does not count.
        """
        checks.positive_integer("count", count)
        program = self.program
        inputs = program.sample(np.random.default_rng(seed), count)
        classes = {answer: i for i, answer in enumerate(self.answers)}
        targets = [
            [classes[x] for x in program([program.vocabulary[i] for i in row])]
            for row in inputs.tolist()
        ]
        first = np.full((count, 1), len(program.vocabulary))
        nothing = np.full((count, 1), len(self.answers) - 1)
        return tasks.Example(
            np.concatenate([first, inputs], axis=1).astype(np.int32),
            np.concatenate([nothing, targets], axis=1).astype(np.int32),
            np.broadcast_to(
                np.float32(np.arange(program.length + 1) > 0),
                (count, program.length + 1),
            ),
        )


def sizes(program: Program) -> Sizes:
    """Returns the sizes of the model that `compile` makes of a program."""
    return _Compiler(program).sizes()


def compile(
    program: Program,
    *,
    num_heads: int = 6,
    noise: float = 1e-4,
    sizes: Sizes | None = None,
    seed: int = 0,
) -> Compiled:
    """Returns a model that computes a program.

    Heads stand in the first layer where what they read is there.

    Args:
      program: What it computes.
      num_heads: H, of all layers; those that the program does not need are random.
      noise: About how much all random heads together add to an entry of the stream,
        where codes are 0 or 1. Programs that count bear least, 2e-4 of those here;
        copying ones bear a hundred times more.
      sizes: The least ones, so that what is jitted of one program serves others of the
        same length and kind: `functools.reduce(operator.or_, map(sizes, programs))`.
        None: no larger than the program needs.
      seed: Of the random heads, and of where the program's heads are among them.

    Raises:
      ValueError: If a layer needs more heads, the program needs none, or its output is
        a mean.
    """
    checks.positive_integer("num_heads", num_heads)
    checks.non_negative_number("noise", noise)
    generator = np.random.default_rng(seed)
    own = _Compiler(program)
    least = own.sizes() if sizes is None else own.sizes() | sizes
    return own.compiled(num_heads, noise, least, generator)


class _Compiler:
    """The parts of a program, and where they are in a model."""

    def __init__(self, program: Program):
        self.program = program
        self.domain = functools.cache(program.domain)
        self.senders = functools.cache(self._senders)
        self.when = functools.cache(self._when)
        parts = list(dict.fromkeys(_parts(program.output)))
        self.heads = [part for part in parts if isinstance(part, Head)]
        if program.output.is_number or not self.heads:
            raise ValueError(
                "program must have an output that is made by a head, and is no mean; "
                f"map() makes codes of means. Got {program.name!r}."
            )
        self.maps = [part for part in parts if self._is_looked_up(part)]
        stored = [language.tokens, language.indices, *self.heads, *self.maps]
        sizes = [1 if each.is_number else len(self.domain(each)) for each in stored]
        ends = np.cumsum([1, *sizes])  # the first is 1 at the first position
        self.stream_size = int(ends[-1])
        self.slots = {
            each: slice(int(start), int(stop))
            for each, start, stop in zip(stored, ends[:-1], ends[1:], strict=True)
        }
        self.num_layers = 1 + max(
            (self.when(each) // 2 for each in self.heads + self.maps), default=0
        )

    def sizes(self) -> Sizes:
        """Returns the sizes that the program needs."""
        heads = [self._head(each) for each in self.heads]
        return Sizes(
            self.num_layers,
            self.stream_size,
            max(max(query.shape[1], value.shape[1]) for query, _, _, value, _ in heads),
            max(len(self._units(layer)[1]) for layer in range(self.num_layers)),
            len(self.program.vocabulary) + 1,
            len(self.domain(self.program.output)) + 1,
        )

    def compiled(
        self,
        num_heads: int,
        noise: float,
        sizes: Sizes,
        generator: np.random.Generator,
    ) -> Compiled:
        """Returns the model; see `compile`."""
        places = self._places(num_heads, generator)
        answers = *self.domain(self.program.output), None
        config = self._config(num_heads, sizes)
        model, shapes = _built(config.to_json(), sizes.num_tokens, sizes.num_classes)
        params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        size = self.stream_size
        count = len(self.program.vocabulary)
        embeddings = params["embedding"]["embeddings"]
        embeddings[:count, self.slots[language.tokens]] = np.eye(count)
        embeddings[count, 0] = 1
        codes = np.eye(self.program.length)
        params["positions"]["positions"][1:, self.slots[language.indices]] = codes
        logits, none = params["logits"], len(answers) - 1
        logits["w"][:size, :none] = _LOGIT * self._read(self.program.output)
        logits["b"][none] = _LOGIT / 2
        _set_random_heads(
            params, config, noise * self._bearable(sizes.model_size), generator
        )
        for head in self.heads:
            _set_head(params, config, places[head], self._head(head))
        for layer in range(self.num_layers):
            hidden, bias, output = self._units(layer)
            scope, count = f"encoder/layer_{layer}/feed_forward", len(bias)
            if count:
                params[f"{scope}/hidden"]["w"][:size, :count] = hidden
                params[f"{scope}/hidden"]["b"][:count] = bias
                params[f"{scope}/output"]["w"][:count, :size] = output
        edges = {
            (places[sender], places[head], kind)
            for head in self.heads
            for kind, sequences in language.inputs_of(head).items()
            for each in sequences
            for sender in self.senders(each)
        }
        return Compiled(
            self.program,
            config,
            model,
            params,
            answers,
            {place: head.name for head, place in places.items()},
            frozenset(edges),
            frozenset(places[each] for each in self.senders(self.program.output)),
        )

    def _is_looked_up(self, part: Sequence) -> bool:
        """Returns whether hidden units compute it: of two codes, or of a number."""
        return isinstance(part, Map) and (
            len(part.inputs) > 1 or part.inputs[0].is_number
        )

    def _when(self, part: Sequence) -> int:
        """Returns 2 l for what attention of layer l makes, 2 l + 1 for hidden units."""
        if isinstance(part, Leaf):
            return -1
        inputs = [x for each in language.inputs_of(part).values() for x in each]
        before = max(map(self.when, inputs))
        if isinstance(part, Head):
            return 2 * (before // 2 + 1)
        return 2 * ((before + 1) // 2) + 1 if self._is_looked_up(part) else before

    def _senders(self, part: Sequence) -> frozenset[Head]:
        """Returns the heads whose output it is made of, through no other head."""
        if isinstance(part, Head):
            return frozenset([part])
        inputs = language.inputs_of(part).get("", [])
        return frozenset().union(*map(self.senders, inputs))

    def _places(self, num_heads, generator) -> dict[Head, Place]:
        places = {}
        for layer in range(self.num_layers):
            own = [each for each in self.heads if self.when(each) // 2 == layer]
            if len(own) > num_heads:
                raise ValueError(
                    f"num_heads must be at least {len(own)}, which {self.program.name} "
                    f"has in layer {layer}, got {num_heads}."
                )
            for each, head in zip(own, generator.permutation(num_heads), strict=False):
                places[each] = (layer, int(head))
        return places

    def _read(self, part: Sequence) -> np.ndarray:
        """Returns what reads a code, `[D, values]`, or a number, `[D, 1]`."""
        if part in self.slots:
            slot = self.slots[part]
            return np.eye(self.stream_size)[:, slot]
        (source,) = part.inputs  # a map of one code, which is linear
        return self._read(source) @ _table(
            part.function, self.domain(source), self.domain(part)
        )

    def _numbers(self, part: Sequence) -> np.ndarray:
        """Returns `[D]`, what reads a code as its number."""
        return self._read(part) @ np.array(self.domain(part), float)

    def _head(self, head: Head):
        """Returns query `[D, K]`, its bias `[K]`, key `[D, K]`, value, slot of a head.

        The score of a key is the weight of a condition for each that holds, and the
        orders; that of the first position lies half a step below those of selected
        keys, or, where a share is wanted, is the same.
        """
        selector = head.selector
        order, most = np.zeros(self.stream_size), 0
        for each in reversed(selector.orders):
            values = np.array(self.domain(each), float)
            # Less the smallest value, and times what outweighs all later orders.
            order += self._read(each) @ ((values - values.min()) * (most + 1))
            most += int(values.max() - values.min()) * (most + 1)
        is_counted = head.gathers == "share"
        sharpness = _SHARPNESS / 2 if is_counted else _SHARPNESS
        weight = sharpness * (most + 1)
        queries, keys = [], []
        for keys_of, queries_of, predicate in selector.conditions:
            pairs = _holds(predicate, self.domain(keys_of), self.domain(queries_of))
            query, key = self._read(queries_of), self._read(keys_of)
            if query.shape[1] > key.shape[1]:
                query = query @ pairs.T
            else:
                key = key @ pairs
            queries.append(weight * query)
            keys.append(key)
        first = weight * len(selector.conditions)
        first -= 0 if is_counted else sharpness / 2
        constant = sharpness * order
        constant[0] = first
        queries.append(np.zeros((self.stream_size, 1)))
        keys.append(constant[:, None])
        query, key = np.concatenate(queries, axis=1), np.concatenate(keys, axis=1)
        bias = np.zeros(query.shape[1])
        bias[-1] = 1
        if is_counted:
            value = np.eye(self.stream_size)[:, :1]
        elif head.gathers == "mean":
            value = self._numbers(head.values)[:, None]
        else:
            value = self._read(head.values)
        return query, bias, key, value, self.slots[head]

    def _units(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns weights `[D, F]`, biases `[F]` and outputs `[F, D]` of a layer."""
        own = [each for each in self.maps if self.when(each) // 2 == layer]
        units = [unit for each in own for unit in self._units_of(each)]
        if not units:
            nothing = np.zeros((self.stream_size, 0))
            return nothing, np.zeros(0), nothing.T
        hidden, bias, output = (np.array(x) for x in zip(*units, strict=True))
        return hidden.T, bias, output

    def _units_of(self, part: Map) -> Iterator[tuple[np.ndarray, float, np.ndarray]]:
        """Yields what each hidden unit of a map reads, its bias, and what it writes."""
        writes = np.zeros((len(self.domain(part)), self.stream_size))
        writes[:, self.slots[part]] = np.eye(len(writes))
        place = {value: i for i, value in enumerate(self.domain(part))}
        if len(part.inputs) == 2:
            # One unit for each pair of values, 1 where both codes are at least 3/4.
            one, other = part.inputs
            for i, a in enumerate(self.domain(one)):
                for j, b in enumerate(self.domain(other)):
                    result = part.function(a, b)
                    if result is not None:
                        reads = self._read(one)[:, i] + self._read(other)[:, j]
                        yield 2 * reads, -3.0, writes[place[result]]
            return
        # Two units for each change of the function make a step from 0 to 1, halfway
        # between the two numbers; none is taken at the first position.
        (source,) = part.inputs
        domain = [float(x) for x in self.domain(source)]
        results = [part.function(x) for x in self.domain(source)]
        result_writes = [
            writes[place[x]] if x is not None else np.zeros(self.stream_size)
            for x in results
        ]
        number = self._read(source)[:, 0]
        always = np.zeros(self.stream_size)
        always[0] = -2.0
        yield always, 1.0, result_writes[0]
        for i in range(1, len(domain)):
            if results[i] == results[i - 1]:
                continue
            slope = 2 / (domain[i] - domain[i - 1])
            start = -slope * (domain[i] + domain[i - 1]) / 2 + 0.5
            reads = slope * number
            reads[0] = -2 * slope * abs(max(domain, key=abs)) - abs(start) - 1
            change = result_writes[i] - result_writes[i - 1]
            yield reads, start, change
            yield reads, start - 1, -change

    def _bearable(self, model_size: int) -> np.ndarray:
        """Returns `[D]`, how much each entry of the stream can be off, but a factor."""
        result = np.ones(model_size)
        result[0] = 0
        for head in self.heads:
            if head.is_number:
                result[self.slots[head]] = np.diff(
                    np.array(self.domain(head), float)
                ).min()
        return result

    def _config(self, num_heads: int, sizes: Sizes) -> ml_collections.ConfigDict:
        config = models.default_config()
        config.update(
            {
                "family": "causal" if self.program.is_causal else "encoder",
                "num_layers": sizes.num_layers,
                "model_size": sizes.model_size,
                "embedding": {"max_length": self.program.length + 1},
                "attention": {
                    "num_heads": num_heads,
                    "key_size": sizes.key_size,
                    "scale": 1.0,
                },
                "feed_forward": {
                    "hidden_size": sizes.hidden_size,
                    "activation": "relu",
                },
                "norm": {"kind": "none"},
            }
        )
        return config


@functools.lru_cache(maxsize=64)
def _built(config: str, num_tokens: int, num_classes: int) -> tuple[models.Model, Any]:
    """Returns the model and the shapes of its parameters.

    Cached by the config as JSON, so that whatever is jitted of the model is compiled
    once for all seeds.
    """
    own = ml_collections.ConfigDict(json.loads(config))
    model = models.build(
        own, num_tokens=num_tokens, feature_size=None, num_classes=num_classes
    )
    tokens = jax.ShapeDtypeStruct((1, own.embedding.max_length), np.int32)
    return model, jax.eval_shape(model.init, jax.random.key(0), tokens)


def _parts(sequence: Sequence) -> Iterator[Sequence]:
    """Yields all that a sequence is made of, and it, what is needed first at first."""
    for each in language.inputs_of(sequence).values():
        for part in each:
            yield from _parts(part)
    yield sequence


def _table(function, inputs: Iterable[Any], results: list[Any]) -> np.ndarray:
    """Returns a function of one value as a matrix of codes."""
    return np.array(
        [[x == function(value) for x in results] for value in inputs], float
    )


def _holds(predicate, keys: Iterable[Any], queries: list[Any]) -> np.ndarray:
    """Returns 1 where a predicate holds, of all keys and all queries."""
    return np.array([[predicate(k, q) for q in queries] for k in keys], float)


def _set_head(params, config, place, weights) -> None:
    layer, head = place
    query, bias, key, value, slot = weights
    size = config.attention.key_size
    start = head * size
    scope = f"encoder/layer_{layer}/attention"
    own = {
        kind: params[f"{scope}/{kind}"] for kind in ("query", "key", "value", "linear")
    }
    for kind in ("query", "key", "value"):
        own[kind]["w"][:, start : start + size] = 0
    width = len(query)
    own["query"]["w"][:width, start : start + query.shape[1]] = query
    own["query"]["b"][start : start + query.shape[1]] = bias
    own["key"]["w"][:width, start : start + key.shape[1]] = key
    own["value"]["w"][:width, start : start + value.shape[1]] = value
    own["linear"]["w"][start : start + size] = 0
    own["linear"]["w"][start : start + value.shape[1], slot] = np.eye(value.shape[1])


def _set_random_heads(params, config, noise, generator) -> None:
    """Sets all heads to random ones, every second one as sure as those of a program."""
    width, size = config.model_size, config.attention.key_size
    num_layers, num_heads = config.num_layers, config.attention.num_heads
    noise = noise / np.sqrt(num_layers * num_heads)  # independent of each other
    for layer in range(num_layers):
        scope = f"encoder/layer_{layer}/attention"
        for kind in ("query", "key", "value"):
            shape = width, num_heads, size
            matrix = generator.standard_normal(shape) / np.sqrt(size)
            if kind == "query":
                is_sure = (np.arange(num_heads) % 2)[:, None]
                matrix *= np.sqrt(size) * np.where(is_sure, _SHARPNESS / 4, 0.2)
            params[f"{scope}/{kind}"]["w"][:] = matrix.reshape(width, -1)
        matrix = generator.standard_normal((num_heads * size, width))
        params[f"{scope}/linear"]["w"][:] = noise * matrix
