"""The compiler of programs into models with known heads and edges.

`layout` defines the program's heads and hidden units; here they are put into a model of
`models.build`. The other heads are random, every second one with weights as sharp as
the program's, and write a little noise everywhere.

D width, K key and value size, F hidden units, L layers, H heads of a layer, T = n + 1
positions.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.lab.rasp import language, layout
from mha_haiku.lab.rasp.language import Head, Program
from mha_haiku.training import tasks

_LOGIT = 12.0  # of the right answer; None gets half of it

Place = tuple[int, int]  # layer and head
_Params = dict[str, dict[str, np.ndarray]]


class Sizes(NamedTuple):
    """The sizes of a model, without its number of heads and its length.

    Example:
      >>> one, other = mh.rasp.PROGRAMS["induction"](), mh.rasp.PROGRAMS["histogram"]()
      >>> mh.rasp.sizes(one).hidden_size, mh.rasp.sizes(other).hidden_size
      (0, 17)
      >>> (mh.rasp.sizes(one) | mh.rasp.sizes(other)).hidden_size
      17
    """

    num_layers: int  # L
    model_size: int  # D
    key_size: int  # K
    hidden_size: int  # F
    num_tokens: int  # the program's tokens, and the start token
    num_classes: int  # the program's answers, and None

    def __or__(self, other: "Sizes") -> "Sizes":
        """Returns the larger of both, size by size."""
        return Sizes(*map(max, self, other))


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A model that computes a program.

    Example:
      >>> compiled = mh.rasp.compile(mh.rasp.PROGRAMS["induction"](), num_heads=2)
      >>> compiled.heads
      {(0, 0): 'previous_token', (1, 0): 'induction'}
      >>> compiled.edges  # the keys of head (1, 0) read head (0, 0)
      frozenset({((0, 0), (1, 0), 'k')})
    """

    program: Program
    config: models.ModelConfig  # of the family encoder or causal
    # Its tokens are indices into the program's vocabulary; the next index is the start
    # token of every input. Its classes are indices into `answers`.
    model: models.Model
    params: dict[str, dict[str, np.ndarray]]
    answers: tuple[Any, ...]  # the values of the output, the last one None
    heads: dict[Place, str]  # the names of the program's heads
    # (sender, receiver, "q" | "k" | "v"): the receiver's queries, keys or values read
    # the sender's output, through no other head.
    edges: frozenset[tuple[Place, Place, str]]
    senders: frozenset[Place]  # heads that the logits read, through no other head

    def __repr__(self) -> str:
        return (
            f"Compiled({self.program.name}: {self.model.description}, heads "
            f"{self.heads}, {len(self.edges)} edges)"
        )

    @property
    def is_real(self) -> np.ndarray:
        """`[L, H]` booleans: the heads of the program."""
        shape = self.config.num_layers, self.config.attention.num_heads
        return np.reshape([x in self.heads for x in np.ndindex(shape)], shape)

    def examples(self, count: int, *, seed: int = 0) -> tasks.Example:
        """Makes a batch of `count` random inputs and the program's answers.

        Targets `[B, T]` are indices into `answers`; the first position does not count.
        """
        checks.positive_integer("count", count)
        program, words = self.program, self.program.vocabulary
        inputs = program.sample(np.random.default_rng(seed), count)
        answers = [program([words[i] for i in row]) for row in inputs.tolist()]
        targets = [[self.answers.index(x) for x in row] for row in answers]
        inputs = np.insert(np.int32(inputs), 0, len(words), axis=1)
        targets = np.insert(np.array(targets, np.int32), 0, len(self.answers) - 1, 1)
        weights = np.ones(targets.shape, np.float32)
        weights[:, 0] = 0
        return tasks.Example(inputs, targets, weights)


def sizes(program: Program) -> Sizes:
    """Computes the sizes of the model that `compile` makes of a program.

    Example:
      >>> sizes = mh.rasp.sizes(mh.rasp.PROGRAMS["induction"](length=8))
      >>> sizes.num_layers, sizes.model_size, sizes.num_tokens
      (2, 45, 13)
    """
    return _sizes(layout.Layout(program))


def compile(
    program: Program,
    *,
    num_heads: int = 6,
    noise: float = 1e-4,
    sizes: Sizes | None = None,
    seed: int = 0,
) -> Compiled:
    """Makes a model that computes a program.

    Heads are in the first layer that can read their inputs.

    Args:
      program: The program.
      num_heads: H of each layer; heads that the program does not need are random.
      noise: About how much all random heads together add to an entry of the stream,
        where codes are 0 or 1. Programs that count tolerate the least, 2e-4 in
        `PROGRAMS`; programs that copy tolerate a hundred times more.
      sizes: Minimum sizes, so that programs of the same length and kind share compiled
        functions: `functools.reduce(operator.or_, map(sizes, programs))`. Defaults to
        the sizes that the program needs.
      seed: The seed of the random heads, and of the program's places among them.

    Raises:
      ValueError: If the output needs no head, a layer has too few heads, or the noise
        is below 0.

    Example:
      >>> compiled = mh.rasp.compile(mh.rasp.PROGRAMS["induction"](), num_heads=2)
      >>> compiled.model
      Model(causal: 2 layers of 2 heads, model size 45, learned positions)
      >>> compiled.heads
      {(0, 0): 'previous_token', (1, 0): 'induction'}
    """
    checks.positive_integer("num_heads", num_heads)
    checks.non_negative_number("noise", noise)
    generator = np.random.default_rng(seed)
    layout_ = layout.Layout(program)
    sizes = _sizes(layout_) if sizes is None else _sizes(layout_) | sizes
    places = _places(layout_, num_heads, generator)
    config = _config(program, num_heads, sizes)
    model, shapes = built(config, sizes.num_tokens, sizes.num_classes)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    _set_ends(params, layout_)
    unused = (0, sizes.model_size - layout_.stream_size)
    bearable = np.pad(layout_.bearable(), unused, constant_values=1)
    _set_random_heads(params, config, noise * bearable, generator)
    for head, place in places.items():
        _set_head(params, config, place, layout_.head(head))
    for layer in range(layout_.num_layers):
        _set_units(params, layer, layout_.units(layer))
    edges = {
        (places[sender], places[head], kind)
        for head in layout_.heads
        for kind, sequences in language.inputs_of(head).items()
        for sequence in sequences
        for sender in layout_.senders(sequence)
    }
    answers = (*layout_.domain(program.output), None)
    names = {place: head.name for head, place in places.items()}
    senders = frozenset(places[head] for head in layout_.senders(program.output))
    edges = frozenset(edges)
    return Compiled(program, config, model, params, answers, names, edges, senders)


def _sizes(layout_: layout.Layout) -> Sizes:
    heads = [layout_.head(head) for head in layout_.heads]
    return Sizes(
        layout_.num_layers,
        layout_.stream_size,
        max(max(head.query.shape[1], head.value.shape[1]) for head in heads),
        max(len(layout_.units(layer).biases) for layer in range(layout_.num_layers)),
        len(layout_.program.vocabulary) + 1,
        len(layout_.domain(layout_.program.output)) + 1,
    )


def _places(
    layout_: layout.Layout, num_heads: int, generator: np.random.Generator
) -> dict[Head, Place]:
    """Draws random places for the program's heads in their layers."""
    places = {}
    for layer in range(layout_.num_layers):
        heads = [head for head in layout_.heads if layout_.layer(head) == layer]
        if len(heads) > num_heads:
            raise ValueError(
                f"num_heads must be at least {len(heads)}, the number that "
                f"{layout_.program.name} has in layer {layer}, got {num_heads}."
            )
        for head, index in zip(heads, generator.permutation(num_heads), strict=False):
            places[head] = (layer, int(index))
    return places


def _config(program: Program, num_heads: int, sizes: Sizes) -> models.ModelConfig:
    return models.ModelConfig().replace(
        family="causal" if program.is_causal else "encoder",
        num_layers=sizes.num_layers,
        model_size=sizes.model_size,
        embedding=dict(max_length=program.length + 1),
        attention=dict(num_heads=num_heads, key_size=sizes.key_size, scale=1.0),
        feed_forward=dict(hidden_size=sizes.hidden_size, activation="relu"),
        norm=dict(kind="none"),
    )


@functools.lru_cache(maxsize=64)
def built(
    config: models.ModelConfig, num_tokens: int, num_classes: int
) -> tuple[models.Model, Any]:
    """Builds the model and the shapes of its parameters."""
    # Cached, so that jitted functions of the model are compiled once for all seeds.
    sizes = {"num_tokens": num_tokens, "feature_size": None, "num_classes": num_classes}
    model = models.build(config, **sizes)
    tokens = jax.ShapeDtypeStruct((1, config.embedding.max_length), np.int32)
    return model, jax.eval_shape(model.init, jax.random.key(0), tokens)


def _set_ends(params: _Params, layout_: layout.Layout) -> None:
    """Sets the embeddings of tokens and positions, and the weights of the logits."""
    count = len(layout_.program.vocabulary)
    embeddings = params["embedding"]["embeddings"]
    embeddings[:count, layout_.slots[language.tokens]] = np.eye(count)
    embeddings[count, 0] = 1
    codes = np.eye(layout_.program.length)
    params["positions"]["positions"][1:, layout_.slots[language.indices]] = codes
    output, logits = layout_.read(layout_.program.output), params["logits"]
    size, none = output.shape
    logits["w"][:size, :none] = _LOGIT * output
    logits["b"][none] = _LOGIT / 2


def _set_units(params: _Params, layer: int, units: layout.Units) -> None:
    scope, (size, count) = f"encoder/layer_{layer}/feed_forward", units.weights.shape
    if count:
        params[f"{scope}/hidden"]["w"][:size, :count] = units.weights
        params[f"{scope}/hidden"]["b"][:count] = units.biases
        params[f"{scope}/output"]["w"][:count, :size] = units.outputs


def _set_head(
    params: _Params, config: Any, place: Place, head: layout.HeadMatrices
) -> None:
    """Replaces a random head by a head of the program."""
    layer, number = place
    size, width = config.attention.key_size, len(head.query)
    start = number * size
    scope = f"encoder/layer_{layer}/attention"
    for kind in ("query", "key", "value"):
        weights, matrix = params[f"{scope}/{kind}"]["w"], getattr(head, kind)
        weights[:, start : start + size] = 0
        weights[:width, start : start + matrix.shape[1]] = matrix
    bias = head.query_bias
    params[f"{scope}/query"]["b"][start : start + len(bias)] = bias
    weights, count = params[f"{scope}/linear"]["w"], head.value.shape[1]
    weights[start : start + size] = 0
    weights[start : start + count, head.slot] = np.eye(count)


def _set_random_heads(
    params: _Params, config: Any, noise: np.ndarray, generator: np.random.Generator
) -> None:
    """Sets all heads to random ones, every second one as sharp as a program's."""
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
                matrix *= np.sqrt(size) * np.where(is_sure, layout.SHARPNESS / 4, 0.2)
            params[f"{scope}/{kind}"]["w"][:] = matrix.reshape(width, -1)
        matrix = generator.standard_normal((num_heads * size, width))
        params[f"{scope}/linear"]["w"][:] = noise * matrix
