"""Tasks of the user's own data, given in Python: arrays, and pairs of texts.

`N` examples, `T` positions, `D` width of the features, `S` positions of a source. A run
keeps the data in its folder, so that it is read and resumed like any other.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

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
# Of `base.Example`.
_OPTIONAL = ("lengths", "decoder_inputs", "decoder_lengths", "others")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Held(base.DataTask):
    """A task whose data is in `Kept.arrays`; the config has the data's sha256.

    One of the arrays, `_PLACES`, decides which examples are held out: `[N]` numbers in
    [0, 1), the hash of each original input. So equal inputs are in the same part, and
    examples stay in their part if data is added.
    """

    _kind: ClassVar[Any]  # the named tuple of the data
    held_out_fraction: float = fields.field(
        0.1, "share of the examples to evaluate on", checks.fraction, section="data"
    )
    sha256: str = fields.field("", "of the data", section="data")

    def __post_init__(self, kept: base.Kept | None):
        if kept is None or kept.arrays is None:
            raise checks.ConfigError(
                f"{self.name} needs data that is given in Python, by "
                "tasks.from_arrays or tasks.from_examples; a config cannot hold it."
            )
        if base.digest(kept) != self.sha256:
            raise checks.ConfigError(
                f"sha256 must match the data of {self.name}: the data has changed."
            )
        super().__post_init__(kept)
        _ = self._split  # so that its errors show now

    def keep(self) -> base.Kept:
        return self._kept

    @property
    def _text(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256}

    def _symbols(self) -> str:
        return self._kept.tokenizer

    @property
    def _data(self) -> Any:
        return self._kind(*map(self._kept.arrays.get, self._kind._fields))

    def _parts(self) -> tuple[Any, Any]:
        held_out = self._kept.arrays[_PLACES] < self.held_out_fraction
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

    def __post_init__(self, kept: base.Kept | None):
        if kept is not None and kept.tokenizer:
            raise checks.ConfigError(
                "labels of texts are stored in another form than by mha_haiku 0.2.\n"
                "Make the run anew: mh.train(mh.tasks.from_examples(...), workdir)."
            )
        super().__post_init__(kept)


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


TASKS = {task.name: task for task in (Arrays, NextTokens, Labels, TextPairs)}


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

    Raises:
      ValueError: If an argument does not fit; the message has its shape.

    Example:
      >>> inputs = np.random.default_rng(0).integers(0, 5, (100, 6))
      >>> task = mh.tasks.from_arrays(inputs, targets=inputs[:, ::-1])
      >>> task.num_tokens, task.train_data.inputs.shape, task.held_out_data.inputs.shape
      (5, (93, 6), (7, 6))
    """
    inputs = _inputs(inputs)
    count, length, *size = inputs.shape
    places = [sampling.place(row.tobytes()) for row in inputs]
    if not size:
        num_tokens = _counted("num_tokens", num_tokens, inputs.max())
    elif num_tokens is not None:
        raise ValueError("num_tokens must be None, as inputs are features.")
    counted = None  # the number of targets that count
    if lengths is not None:
        counted = lengths = _integers("lengths", lengths, "[N]", (count,), 1, length)
    if targets is None:
        if size or length < 2 or weights is not None or num_classes is not None:
            raise ValueError(
                "without targets inputs must be [N, T] tokens with T of at least 2, "
                f"and weights and num_classes None, got {base.described(inputs)}."
            )
        kind, inputs, targets = NextTokens, inputs[:, :-1], inputs[:, 1:]
        num_classes = num_tokens
        if lengths is not None:
            counted, lengths = lengths - 1, np.maximum(lengths - 1, 1)
    else:
        targets = _array("targets", targets)
        kind = Labels if targets.ndim == 1 else Arrays
        wanted = (count,) if kind is Labels else (count, length)
        targets = _integers("targets", targets, "[N] or [N, T]", wanted, 0)
    rows = base.Example(inputs, targets, _weights(weights, targets, counted), lengths)
    return _task(
        kind,
        rows,
        places,
        held_out_fraction,
        sequence_length=inputs.shape[1],
        num_tokens=num_tokens,
        num_classes=_counted("num_classes", num_classes, targets.max()),
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

    Args:
      examples: Pairs of a text and its label, or of a text and the text to write.
      labels: Whether the second element is a label. By default it is if it is an
        integer, or if at most half of the pairs have different ones.
      tokenizer: Kind of tokens: "characters" or "bpe" (byte-pair encoding).
      vocabulary_size: Largest number of tokens.
      held_out_fraction: Share of the pairs to evaluate on.

    Raises:
      ValueError: If an example is not such a pair; the message names it.

    Example:
      >>> sums = [(f"{i}+{j}", str(i + j)) for i in range(10) for j in range(10)]
      >>> task = mh.tasks.from_examples(sums, labels=False)
      >>> example = task.example(jax.random.key(0), task.train_data)
      >>> task.question(example), task.answer(example.targets)
      ('7+3', '10')
    """
    pairs = _pairs(examples)
    largest = sequence_to_sequence.LARGEST_VOCABULARY
    checks.integer_in("vocabulary_size", vocabulary_size, 2, largest)
    texts, seconds = zip(*pairs, strict=True)
    different = sorted(set(seconds), key=lambda x: (str(type(x)), x))
    if labels is None:
        is_short = 2 * len(different) <= len(pairs)
        labels = is_short or not all(isinstance(x, str) for x in seconds)
    if labels and len(different) < 2:
        raise ValueError(
            f"examples must have at least 2 labels, got only {different[0]!r}."
        )
    if not labels and not all(isinstance(x, str) and x for x in seconds):
        raise ValueError("labels must be True, as not all of the examples end in text.")
    if labels:
        return labeled_texts.of_pairs(
            [(text, str(label)) for text, label in pairs],
            tokenizer=tokenizer,
            vocabulary_size=vocabulary_size,
            held_out_fraction=held_out_fraction,
        )
    checks.choice("tokenizer", tokenizer, tokenization.TRAINERS)
    train = tokenization.TRAINERS[tokenizer]
    sides = [train("\n".join(side), vocabulary_size) for side in (texts, seconds)]
    stored = {"tokenizers": [json.loads(each.to_json()) for each in sides]}
    sources, targets = (
        list(map(x.encode, side))
        for x, side in zip(sides, (texts, seconds), strict=True)
    )
    both = sequence_to_sequence.Pairs.of(sources, targets)
    places = [sampling.place(x.encode(errors="surrogatepass")) for x in texts]
    return _task(TextPairs, both, places, held_out_fraction, stored)


def _task(
    kind: type[_Held],
    data: base.Example | sequence_to_sequence.Pairs,
    places: list[float],
    held_out_fraction: float,
    stored: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    arrays = {name: x for name, x in data._asdict().items() if x is not None}
    arrays[_PLACES] = np.array(places)
    kept = base.Kept(json.dumps(stored) if stored else "", None, arrays)
    options |= {"held_out_fraction": held_out_fraction, "sha256": base.digest(kept)}
    return kind(kept=kept, **options)


def _pairs(examples: Any) -> list[tuple[str, str | int]]:
    if isinstance(examples, (str, bytes, Mapping)):
        raise ValueError(f"examples must be pairs, got {checks.shown(examples)}.")
    pairs = list(examples)
    if len(pairs) < 2:
        raise ValueError(f"examples must be at least 2 pairs, got {len(pairs)}.")
    for i, pair in enumerate(pairs):
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and pair[0]):
            got = f"got {checks.shown(pair)} as number {i}"
            raise ValueError(
                f"examples must be pairs of a text and a label or text, {got}."
            )
        if isinstance(pair[1], bool) or not isinstance(pair[1], (str, int, np.integer)):
            got = f"got {checks.shown(pair[1])} in number {i}"
            raise ValueError(f"examples must end in a text or an integer, {got}.")
    return [(a, b if isinstance(b, str) else int(b)) for a, b in pairs]


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # of rows that differ in length
        raise ValueError(
            f"{name} must have rows of equal length, got {checks.shown(values)}; pad "
            "the shorter rows, and give the number of positions that count in lengths=."
        ) from None


def _inputs(inputs: Any) -> np.ndarray:
    inputs = _array("inputs", inputs)
    is_tokens = inputs.ndim == 2 and jnp.issubdtype(inputs.dtype, jnp.integer)
    is_features = inputs.ndim == 3 and jnp.issubdtype(inputs.dtype, jnp.floating)
    if not (is_tokens or is_features) or 0 in inputs.shape or len(inputs) < 2:
        raise ValueError(
            "inputs must be [N, T] integer tokens or [N, T, D] float features, N of at "
            f"least 2, got {base.described(inputs)}."
        )
    if is_tokens:
        return _integers("inputs", inputs, "[N, T]", inputs.shape, 0)
    numbers = _floats(inputs)
    if bad := np.sum(~np.isfinite(numbers)):
        got = f"got {base.described(inputs)} with {bad:,} that are not"
        raise ValueError(f"inputs must be finite, {got}.")
    return numbers


def _floats(values: np.ndarray) -> np.ndarray:
    """Converts numbers of any width to float32; those that are too large are infinite.

    A file of NumPy's loses narrower floats of JAX, such as bfloat16.
    """
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _integers(
    name: str,
    values: Any,
    axes: str,
    shape: tuple[int, ...],
    low: int,
    high: int = sampling.LARGEST,
) -> np.ndarray:
    values = _array(name, values)
    got = f"got {base.described(values)}"
    if not jnp.issubdtype(values.dtype, jnp.integer) or values.shape != shape:
        raise ValueError(f"{name} must be integers {axes}, here {shape}, {got}.")
    if values.min() < low or values.max() > high:
        raise ValueError(
            f"{name} must be from {low} to {high}, {got} from {values.min()} to "
            f"{values.max()}."
        )
    return values.astype(np.int32)


def _weights(
    weights: Any, targets: np.ndarray, counted: np.ndarray | None
) -> np.ndarray:
    given = np.ones(targets.shape) if weights is None else weights
    weights = _array("weights", given)
    is_number = weights.dtype == bool or any(
        jnp.issubdtype(weights.dtype, kind) for kind in (jnp.integer, jnp.floating)
    )
    if weights.shape != targets.shape or not is_number:
        raise ValueError(
            f"weights must be numbers shaped like targets, {targets.shape}, got "
            f"{base.described(weights)}."
        )
    numbers = _floats(weights)
    if counted is not None and targets.ndim == 2:
        numbers = numbers * (np.arange(targets.shape[1]) < counted[:, None])
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.any()):
        raise ValueError(
            "weights must be finite, 0 or more and not all 0 where targets count, got "
            f"{base.described(weights)}."
        )
    return numbers


def _counted(name: str, given: int | None, largest: int | np.integer) -> int:
    if given is None:
        return int(largest) + 1
    if checks.positive_integer(name, given) <= largest:
        raise ValueError(
            f"{name} must be above {largest}, the largest in the data, got {given}."
        )
    return given
