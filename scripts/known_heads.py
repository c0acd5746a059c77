"""Models whose important heads are known, to score measures of importance by.

B batch, T positions, L layers, H heads of a layer, C tokens, D width. Parameters are
set by hand: the residual stream is made of slots, each the one-hot code of something,
and each real head copies one slot to another. The other heads are random, every second
one as sure of itself as real heads are, and write a little everywhere. Norms are the
identity to 1e-8, as their epsilon dwarfs what it is added to.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from mha_haiku import heads, models, tasks

if TYPE_CHECKING:
    import ml_collections

_SHARPNESS = 30.0  # the score of the key that a real head looks for
_LOGIT = 6.0  # of the right answer
_EPSILON = 1e8


class KnownHeads(NamedTuple):
    """A model with known heads.

    Attributes:
      subject: The model, its parameters, a loss and data.
      config: `config.model` of the model.
      real: `[L, H]` booleans: the heads that do the work.
      roles: What the real heads are, by (layer, head).
    """

    subject: heads.Subject
    config: "ml_collections.ConfigDict"
    real: np.ndarray
    roles: dict[tuple[int, int], str]


class _Head(NamedTuple):
    """A head that attends where two slots agree and copies a slot to another."""

    query: np.ndarray  # [D, K]
    key: np.ndarray  # [D, K]
    source: slice
    target: slice


def previous_token(**sizes: int) -> KnownHeads:
    """One real head, which attends to the position before; the answer is that token.

    Args:
      **sizes: `num_heads`, `num_tokens`, `length`, `examples` and `seed`.
    """
    return _one_layer("previous_token", lambda length: np.eye(length, k=1), **sizes)


def reverse(**sizes: int) -> KnownHeads:
    """One real head, which attends to the mirrored position; the answer is that token.

    Args:
      **sizes: See `previous_token`.
    """
    return _one_layer("reverse", lambda length: np.eye(length)[::-1], **sizes)


def induction(
    *,
    num_heads: int = 8,
    num_tokens: int = 12,
    length: int = 16,
    examples: int = 32,
    seed: int = 0,
) -> KnownHeads:
    """Two real heads: previous-token in layer 0, and on it induction in layer 1.

    The first half of an example are different tokens, and the second repeats it; the
    answers are the next tokens of the second half. That after the first token is not
    asked for, as position 0 can attend to nothing but itself.

    Args:
      num_heads: H, of both layers.
      num_tokens: C, at least half of the length.
      length: T, even.
      examples: How many.
      seed: Of the other heads, the data, and where the real heads are.

    Source: Elhage et al. 2021, "Induction heads",
    https://transformer-circuits.pub/2021/framework/index.html.
    """
    slots = _Slots(num_tokens, length)
    before = _Head(
        slots.reads(slots.position, np.eye(length, k=1).T),
        slots.reads(slots.position),
        slots.token,
        slots.memory,
    )
    follows = _Head(
        slots.reads(slots.token), slots.reads(slots.memory), slots.token, slots.answer
    )
    generator = np.random.default_rng(seed)
    half = length // 2
    first = np.argsort(generator.uniform(size=(examples, num_tokens)))[:, :half]
    inputs = np.concatenate([first, first], axis=1).astype(np.int32)
    weights = (np.arange(length) > half) & (np.arange(length) < length - 1)
    example = tasks.Example(
        inputs,
        np.roll(inputs, -1, axis=1),
        np.broadcast_to(np.float32(weights), inputs.shape),
    )
    real = [(before, "previous_token"), (follows, "induction")]
    return _built(slots, real, example, "causal", num_heads, generator)


ALL: dict[str, Callable[..., KnownHeads]] = {
    "previous_token": previous_token,
    "reverse": reverse,
    "induction": induction,
}


def auroc(values: np.ndarray, real: np.ndarray) -> float:
    """Returns the probability that a real head is ranked above another.

    Args:
      values: `[L, H]`, the larger the more important; NaN where there is no head.
      real: `[L, H]` booleans.

    Returns:
      1 where all real heads are above all others, 0.5 for chance; ties count half.

    Source: Hanley and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747.
    """
    import scipy.stats

    exists = ~np.isnan(values)
    positive, negative = values[exists & real], values[exists & ~real]
    if not positive.size or not negative.size:
        raise ValueError("there must be real heads and others.")
    wins = scipy.stats.mannwhitneyu(positive, negative).statistic
    return float(wins / (positive.size * negative.size))


def scores(
    known: KnownHeads,
    measures: Mapping[str, Callable[[heads.Subject], heads.Importance]],
) -> dict[str, float]:
    """Returns the AUROC of each measure at finding the real heads.

    Args:
      known: The model.
      measures: By their names.
    """
    return {
        name: auroc(measure(known.subject).mean, known.real)
        for name, measure in measures.items()
    }


class _Slots:
    """Where in the residual stream things are: token, position, memory, answer."""

    def __init__(self, num_tokens: int, length: int):
        self.num_tokens, self.length = num_tokens, length
        sizes = [num_tokens, length, num_tokens, num_tokens]
        ends = np.cumsum([0, *sizes])
        places = [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        self.token, self.position, self.memory, self.answer = places
        self.model_size = int(ends[-1])
        self.key_size = max(num_tokens, length)

    def reads(self, slot: slice, turn: np.ndarray | None = None) -> np.ndarray:
        """Returns `[D, K]`: a slot, its code turned by a matrix."""
        result = np.zeros((self.model_size, self.key_size))
        size = slot.stop - slot.start
        result[slot, :size] = np.eye(size) if turn is None else turn
        return result


def _one_layer(
    role: str,
    attends: Callable[[int], np.ndarray],
    *,
    num_heads: int = 8,
    num_tokens: int = 12,
    length: int = 10,
    examples: int = 32,
    seed: int = 0,
) -> KnownHeads:
    """One real head, whose attention over positions is `attends(T) [S, T]`."""
    slots = _Slots(num_tokens, length)
    head = _Head(
        slots.reads(slots.position, attends(length).T),
        slots.reads(slots.position),
        slots.token,
        slots.answer,
    )
    generator = np.random.default_rng(seed)
    inputs = generator.integers(0, num_tokens, (examples, length)).astype(np.int32)
    seen = attends(length)
    example = tasks.Example(
        inputs,
        inputs[:, seen.argmax(0)],
        np.broadcast_to(np.float32(seen.any(0)), inputs.shape),
    )
    return _built(slots, [(head, role)], example, "encoder", num_heads, generator)


def _built(
    slots: _Slots,
    real: Sequence[tuple[_Head, str]],
    example: tasks.Example,
    family: str,
    num_heads: int,
    generator: np.random.Generator,
) -> KnownHeads:
    """Returns a model of one layer per real head, at a random place among others."""
    config = _config(slots, family, len(real), num_heads)
    model = models.build(
        config,
        num_tokens=slots.num_tokens,
        feature_size=None,
        num_classes=slots.num_tokens,
    )
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, np.float32),
        jax.eval_shape(model.init, jax.random.key(0), example.inputs),
    )
    for module, leaves in params.items():
        if module.rpartition("/")[2].startswith("norm"):
            leaves["scale"][:] = np.sqrt(_EPSILON)
    params["embedding"]["embeddings"][:, slots.token] = np.eye(slots.num_tokens)
    params["positions"]["positions"][:, slots.position] = np.eye(slots.length)
    params["logits"]["w"][slots.answer] = _LOGIT * np.eye(slots.num_tokens)
    places = {}
    for i, (head, role) in enumerate(real):
        place = int(generator.integers(num_heads))
        places[i, place] = role
        own = params, f"encoder/layer_{i}/attention"
        for h in range(num_heads):
            _set_head(*own, h, slots, head if h == place else None, generator)
    is_real = np.zeros((len(real), num_heads), bool)
    is_real[tuple(np.array(list(places)).T)] = True
    return KnownHeads(
        heads.Subject(model, heads.metrics.loss, params, [example]),
        config,
        is_real,
        places,
    )


def _set_head(params, scope, h, slots, head, generator) -> None:
    """Sets the parameters of head h, to a random one where `head` is None."""
    size, width = slots.key_size, slots.model_size
    own = slice(h * size, (h + 1) * size)
    query, key, value, linear = (
        params[f"{scope}/{name}"]["w"] for name in ("query", "key", "value", "linear")
    )
    if head is None:
        sharpness = _SHARPNESS if h % 2 else 1
        query[:, own] = generator.standard_normal((width, size)) * sharpness
        key[:, own] = generator.standard_normal((width, size)) / np.sqrt(size)
        value[:, own] = generator.standard_normal((width, size)) / np.sqrt(size)
        linear[own] = 0.02 * generator.standard_normal((size, width))
        return
    query[:, own] = head.query * _SHARPNESS * np.sqrt(size)
    key[:, own] = head.key
    count = head.source.stop - head.source.start
    value[head.source, own][:, :count] = np.eye(count)
    linear[own][:count, head.target] = np.eye(count)


def _config(slots, family, num_layers, num_heads) -> "ml_collections.ConfigDict":
    config = models.default_config()
    config.update(
        {
            "family": family,
            "num_layers": num_layers,
            "model_size": slots.model_size,
            "embedding": {"max_length": slots.length},
            "attention": {"num_heads": num_heads, "key_size": slots.key_size},
            "feed_forward": {"hidden_size": 1, "activation": "relu"},
            "norm": {"kind": "rms_norm", "epsilon": _EPSILON},
        }
    )
    return config
