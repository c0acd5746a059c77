"""Tasks of the user's own data, given in Python: arrays, and pairs of texts.

`N` examples, `T` positions, `D` width of the features, `S` positions of a source. A run
keeps the data in its folder, so that it is read and resumed like any other.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import (
    base,
    labeled_texts,
    sampling,
    sequence_to_sequence,
    tokenization,
)

_PLACES = "places"
_OTHERS = "others."


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Held(base.DataTask):
    """A task of arrays from Python; the config has their sha256.

    One of them, `_PLACES`, decides which examples are held out: `[N]` numbers in
    [0, 1), the hash of each original input. So equal inputs are in the same part, and
    examples stay in their part if data is added.
    """

    _kind: ClassVar[Any]  # the named tuple of the data
    held_out_fraction: float = fields.field(
        0.1, "share of the examples to evaluate on", checks.fraction, section="data"
    )
    sha256: str = fields.field("", "of the data", section="data")

    @property
    def _text(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256}

    def _symbols(self) -> str:
        return self._kept.tokenizer

    @property
    def _data(self) -> Any:
        return self._kind(*map(self._arrays.get, self._kind._fields))

    def _parts(self) -> tuple[Any, Any]:
        held_out = self._arrays[_PLACES] < self.held_out_fraction
        return base.split(self._data, held_out, self.held_out_fraction, "examples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays(_Held):
    """The target is a class at each position of an array; see `from_arrays`.

    Metric: accuracy over the positions that count. Baseline: the frequencies of the
    classes, see `DataTask.baseline`.
    """

    name: ClassVar[str] = "arrays"
    _kind = base.Example
    sequence_length: int = fields.field(1, "positions of an example", sampling.count(1))
    num_tokens: int | None = fields.field(
        None, "vocabulary size; None if the inputs are features", sampling.count(1)
    )
    num_classes: int = fields.field(1, "number of classes", sampling.count(1))

    def _parts(self) -> tuple[base.Example, base.Example]:
        parts = super()._parts()
        train, held_out = (int(np.count_nonzero(part.weights)) for part in parts)
        fraction = self.held_out_fraction
        option = "weights and lengths, at held_out_fraction,"
        base.check_parts(option, fraction, train, held_out, "targets that count")
        return parts

    @property
    def feature_size(self) -> int | None:
        return None if self.num_tokens is not None else self._data.inputs.shape[-1]

    def _counts(self, part: base.Example) -> np.ndarray:
        classes, weights = part.targets.ravel(), part.weights.ravel()
        return np.bincount(classes, weights, minlength=self.num_classes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextTokens(Arrays):
    """The target at position t is the token at position t + 1; see `from_arrays`."""

    name: ClassVar[str] = "next_tokens"
    continues: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels(Arrays):
    """The target is the label of a whole example; see `from_arrays`.

    Metric: accuracy, the share of examples with the right label. Baseline: the
    frequencies of the labels.
    """

    name: ClassVar[str] = "labels"
    labels_whole: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPairs(_Held, sequence_to_sequence.TextPairsTask):
    """The source is a text, the target another one; see `from_examples`.

    Metric: accuracy and exact match. Baseline: see `DataTask.baseline`.
    """

    name: ClassVar[str] = "text_pairs"
    _kind = sequence_to_sequence.Pairs

    @property
    def sequence_length(self) -> int:
        return self._data.sources.shape[1]

    @property
    def target_length(self) -> int:
        return self._data.targets.shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped(Arrays):
    """Examples of a wrapped function or module, whose loss is the only metric."""

    name: ClassVar[str] = "wrapped"
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    baseline: ClassVar[dict[str, float]] = {}
    of: str = fields.field("", "the function or module that is trained")

    @classmethod
    def of_batch(cls, batch: base.Example, of: str) -> "Wrapped":
        """Makes the task; equal inputs are in the same part, at least one held out."""
        batch = jax.tree.map(np.asarray, with_weights(batch))
        for name, x in (batch.others or {}).items():
            if x.shape[:1] != (len(batch.inputs),):
                raise ValueError(f"{name} must be [B, ...], got shape {x.shape}.")
        places = [sampling.place(row.tobytes()) for row in batch.inputs]
        _, ranks = np.unique(places, return_inverse=True)
        parts, length = ranks / (ranks.max() + 1), batch.inputs.shape[1]
        return _task(cls, batch, parts, 0.1, of=of, sequence_length=length)

    @property
    def _data(self) -> base.Example:
        arrays = self._arrays.items()
        others = {x.removeprefix(_OTHERS): y for x, y in arrays if _OTHERS in x}
        return super()._data._replace(others=others or None)


TASKS = {task.name: task for task in (Arrays, NextTokens, Labels, TextPairs, Wrapped)}


def with_weights(batch: base.Example) -> base.Example:
    """Makes each example count, if a batch has no targets, for another loss."""
    if np.any(batch.weights):
        return batch
    targets = np.zeros(len(batch.inputs), np.int32)
    return batch._replace(targets=targets, weights=1 + targets.astype(np.float32))


def from_arrays(
    inputs: Any,
    targets: Any = None,
    *,
    weights: Any = None,
    lengths: Any = None,
    num_tokens: int | None = None,
    num_classes: int | None = None,
    held_out_fraction: float = 0.1,
) -> Arrays:
    """Makes the task to predict `targets` from `inputs`, for `mha_haiku.train`.

    ValueError if an argument does not fit; the message has its shape.

    Args:
      inputs: `[N, T]` integer tokens, or `[N, T, D]` features.
      targets: `[N, T]` integers, a class per position; or `[N]`, a label per example;
        or None, to predict each token from the tokens before it.
      weights: Weights of the targets, of the same shape, 0 or more. Defaults to 1.
        Targets past the length of an example do not count.
      lengths: `[N]` integers from 1 to T, valid positions of an example. Defaults to T.
      num_tokens: Size of the vocabulary. Defaults to the largest input plus 1.
      num_classes: Number of classes. Defaults to the largest target plus 1.
      held_out_fraction: Share of the examples to evaluate on.

    Example:
      >>> inputs = np.random.default_rng(0).integers(0, 5, (100, 6))
      >>> task = mh.tasks.from_arrays(inputs, targets=inputs[:, ::-1])
      >>> task.num_tokens, task.train_data.inputs.shape, task.held_out_data.inputs.shape
      (5, (93, 6), (7, 6))
    """
    inputs = np.asarray(inputs)
    is_features = jnp.issubdtype(inputs.dtype, jnp.floating)
    if inputs.ndim != 2 + is_features or 0 in inputs.shape:
        raise ValueError(
            "inputs must be [N, T] integer tokens or [N, T, D] float features, got "
            f"{base.described(inputs)}."
        )
    count, length = inputs.shape[:2]
    if is_features:
        inputs, num_tokens = _numbers("inputs", inputs, inputs.shape), None
    else:
        inputs = _integers("inputs", inputs, inputs.shape)
        num_tokens = _counted("num_tokens", num_tokens, inputs)
    places = [sampling.place(row.tobytes()) for row in inputs]
    if lengths is not None:
        lengths = _integers("lengths", lengths, (count,), 1, length)
    counted = lengths  # the number of targets that count
    if targets is None:
        if is_features or length < 2 or weights is not None:
            raise ValueError(
                "without targets inputs must be [N, T] tokens with T of at least 2, "
                f"and weights None, got {base.described(inputs)}."
            )
        kind, targets, inputs = NextTokens, inputs[:, 1:], inputs[:, :-1]
        num_classes = num_tokens
        if lengths is not None:
            counted, lengths = lengths - 1, np.maximum(lengths - 1, 1)
    else:
        targets = np.asarray(targets)
        kind = Labels if targets.ndim == 1 else Arrays
        shape = (count,) if kind is Labels else (count, length)
        targets = _integers("targets", targets, shape)
        num_classes = _counted("num_classes", num_classes, targets)
    weights = np.ones(targets.shape) if weights is None else weights
    weights = _numbers("weights", weights, targets.shape)
    if counted is not None and kind is not Labels:
        weights = weights * (np.arange(targets.shape[1]) < counted[:, None])
    if weights.min() < 0:
        raise ValueError(f"weights must be 0 or more, got {weights.min()}.")
    return _task(
        kind,
        base.Example(inputs, targets, weights, lengths),
        places,
        held_out_fraction,
        sequence_length=inputs.shape[1],
        num_tokens=num_tokens,
        num_classes=num_classes,
    )


def from_examples(
    examples: Iterable[tuple[str, str | int]],
    *,
    labels: bool | None = None,
    tokenizer: str = "characters",
    vocabulary_size: int = 256,
    held_out_fraction: float = 0.1,
) -> labeled_texts.LabeledTexts | TextPairs:
    """Makes the task to predict a label or a text from a text.

    ValueError if an example is not such a pair; the message names it.

    Args:
      examples: Pairs of a text and its label, or of a text and the text to write.
      labels: Whether the second element is a label. By default it is if it is an
        integer, or if at most half of the pairs have different ones.
      tokenizer: Kind of tokens: "characters" or "bpe" (byte-pair encoding).
      vocabulary_size: Largest number of tokens.
      held_out_fraction: Share of the pairs to evaluate on.

    Example:
      >>> sums = [(f"{i}+{j}", str(i + j)) for i in range(10) for j in range(10)]
      >>> task = mh.tasks.from_examples(sums, labels=False)
      >>> example = task.example(jax.random.key(0), task.train_data)
      >>> task.question(example), task.answer(example.targets)
      ('7+3', '10')
    """
    pairs = list(examples)
    for i, pair in enumerate(pairs):
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        kinds = str, (str, int, np.integer)
        if not is_pair or not all(map(isinstance, pair, kinds)) or pair[0] == "":
            raise ValueError(
                "examples must be pairs of a text and a label or text, got "
                f"{checks.shown(pair)} as number {i}."
            )
    texts, seconds = zip(*pairs, strict=True)
    are_texts = all(isinstance(x, str) and x for x in seconds)
    if labels is None:
        labels = 2 * len(set(seconds)) <= len(pairs) or not are_texts
    if labels:
        return labeled_texts.of_pairs(
            [(text, str(label)) for text, label in pairs],
            tokenizer=tokenizer,
            vocabulary_size=vocabulary_size,
            held_out_fraction=held_out_fraction,
        )
    if not are_texts:
        raise ValueError("labels must be True, as not all of the examples end in text.")
    largest = sequence_to_sequence.LARGEST_VOCABULARY
    checks.integer_in("vocabulary_size", vocabulary_size, 2, largest)
    checks.choice("tokenizer", tokenizer, tokenization.TRAINERS)
    train, sides = tokenization.TRAINERS[tokenizer], (texts, seconds)
    encoders = [train("\n".join(side), vocabulary_size) for side in sides]
    stored = {"tokenizers": [json.loads(x.to_json()) for x in encoders]}
    sources, targets = (
        list(map(x.encode, side)) for x, side in zip(encoders, sides, strict=True)
    )
    places = [sampling.place(x.encode(errors="surrogatepass")) for x in texts]
    data = sequence_to_sequence.Pairs.of(sources, targets)
    return _task(TextPairs, data, places, held_out_fraction, stored)


def _task(
    kind: type[_Held],
    data: base.Example | sequence_to_sequence.Pairs,
    places: Sequence[float] | np.ndarray,
    held_out_fraction: float,
    stored: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    arrays = {name: x for name, x in data._asdict().items() if x is not None}
    others = arrays.pop("others", {}).items()
    arrays |= {f"{_OTHERS}{name}": x for name, x in others}
    arrays[_PLACES] = np.array(places)
    kept = base.Kept(json.dumps(stored) if stored else "", None, arrays)
    options |= {"held_out_fraction": held_out_fraction, "sha256": base.digest(kept)}
    return kind(kept=kept, **options)


def _numbers(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Checks finite numbers; float32, as NumPy's files lose floats such as bfloat16."""
    values = np.asarray(values)
    if values.shape != shape or values.dtype == object:
        raise ValueError(
            f"{name} must be numbers of shape {shape}, got {base.described(values)}."
        )
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if bad := np.sum(~np.isfinite(numbers)):
        got = f"got {base.described(values)} with {bad:,} that are not"
        raise ValueError(f"{name} must be finite in float32, {got}.")
    return numbers


def _integers(
    name: str,
    values: Any,
    shape: tuple[int, ...],
    low: int = 0,
    high: int = sampling.LARGEST,
) -> np.ndarray:
    values = np.asarray(values)
    got = f"got {base.described(values)}"
    if not jnp.issubdtype(values.dtype, jnp.integer) or values.shape != shape:
        raise ValueError(f"{name} must be integers of shape {shape}, {got}.")
    if values.min() < low or values.max() > high:
        raise ValueError(
            f"{name} must be from {low} to {high}, {got} from {values.min()} to "
            f"{values.max()}."
        )
    return values.astype(np.int32)


def _counted(name: str, count: int | None, values: np.ndarray) -> int:
    """Checks the number of tokens or classes; one more than the largest by default."""
    least = int(values.max()) + 1
    return checks.integer_in(name, least if count is None else count, least, None)
