"""Tasks: examples from PRNG keys, a metric, its chance level, and labels.

Dimensions: `B` batch, `T` positions, `D` width of the features, `C` classes. Where a
sequence is mapped to another one, the source has `S` positions and the target `T`.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import sampling


class Example(NamedTuple):
    """One example of a task; a batch of them has leading axes on every array."""

    # `[T]` int32 tokens, or `[T, D]` float32 features; `[S]` for a source.
    inputs: jax.Array | np.ndarray
    # `[T]` int32 class of each position; or `[]` int32, the class of the whole example
    # or, in a set task, the index in the set.
    targets: jax.Array | np.ndarray
    # Shaped like `targets`, float32; 0 if a target does not count.
    weights: jax.Array | np.ndarray
    # `[]` int32, number of valid inputs; None for all.
    lengths: jax.Array | np.ndarray | None = None
    # `[T]` int32 tokens that a decoder reads: the start token, then the target
    # without its last token. None if the model has no decoder.
    decoder_inputs: jax.Array | np.ndarray | None = None
    # `[]` int32, valid positions of these.
    decoder_lengths: jax.Array | np.ndarray | None = None
    # Further arguments of a wrapped function, by keyword.
    others: Mapping[str, jax.Array | np.ndarray] | None = None

    def model_inputs(self) -> dict[str, Any]:
        """Collects the inputs of a model, as keyword arguments of `Model.apply`."""
        inputs: dict[str, Any] = {"inputs": self.inputs, "lengths": self.lengths}
        if self.decoder_inputs is not None:
            inputs["decoder_inputs"] = self.decoder_inputs
            inputs["decoder_lengths"] = self.decoder_lengths
        return inputs | dict(self.others or {})

    def axes(self) -> "Example":
        """Returns the axes of each array as letters: "B" batch, "T" positions."""
        axes = "BTD", "BT", "BT", "B", "BT", "B", "B"
        pairs = zip(axes, self, strict=True)
        cut = [jax.tree.map(lambda x, y=y: y[: jnp.ndim(x)], x) for y, x in pairs]
        return Example(*cut)


class Kept(NamedTuple):
    """The data that a run stores to remake a task that learns from the user's data."""

    tokenizer: str = ""  # as JSON; "" if there is none
    # "name" and "sha256" of the text, and any "labels"; None lets any text be read.
    text: dict[str, Any] | None = None
    # The data by name, if it was passed from Python.
    arrays: Mapping[str, np.ndarray] | None = None


class Task(abc.ABC):
    """Something to learn. A subclass is a frozen dataclass: a task is a static value.

    Its fields become the fields of `config.task`, except the name, and of
    `config.data`. The tasks here declare each with `fields.field`: a default, a meaning
    and a check; in your own task a plain default is enough. The metric of every task is
    its accuracy: the mean of `correct` over the positions that count. A complete task,
    which asks for the larger of two tokens, for
    `mha_haiku.train(Larger(), "runs/larger")`:

        from mha_haiku.training.tasks import Example, Task

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Larger(Task):
            sequence_length: int = 2
            num_tokens: int = 10
            num_classes: int = 10

            @property
            def baseline(self):
                return {"accuracy": 0.19, "loss": 2.11}  # of always saying 9

            def example(self, key, data):
                inputs = jax.random.randint(key, (2,), 0, self.num_tokens)
                targets = jnp.full(2, inputs.max())  # at both positions
                return Example(inputs, targets, jnp.ones(2))

    The three numbers, `baseline` and `example` are required. For data in arrays or
    pairs of texts use `from_arrays` or `from_examples`, which need no class.
    """

    # Of the subclasses, which are frozen dataclasses.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __dataclass_params__: ClassVar[Any]

    name: ClassVar[str]  # in configs and titles; defaults to the class's name
    sequence_length: int  # T, positions of an example's inputs; of a source S
    target_length: int | None = None  # T, positions of the decoder, if there is one
    start_token: int | None = None  # the class that a decoder reads first
    end_tokens: tuple[int, ...] = ()  # the classes that end an answer or a text
    num_tokens: int | None  # vocabulary of the inputs, or None if they are features
    feature_size: int | None = None  # D, width of the features, or None for tokens
    # C, classes of the logits of a position or of the whole example; 1 for a set task,
    # which has a logit per element.
    num_classes: int
    # Chance level: "accuracy" and "loss" (nats per target) of the best predictor that
    # sees the position but no input, so that its answer is the same for every example;
    # or of the simple predictor that `baseline_name` names.
    baseline: dict[str, float]
    baseline_name: str = "chance"  # or "unigram", "bag of words"
    # Metrics that studies can use, the task's main one first. Without targets there is
    # no loss and no accuracy, and nothing to train on.
    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "drift")
    # Whether a target of shape `[]` is the class of the whole example, which the model
    # reads from one position or their mean, and not an index in a set.
    labels_whole: ClassVar[bool] = False
    # Whether evaluations also report `exact_match`, the share of examples in which
    # every target that counts is predicted.
    counts_exact: ClassVar[bool] = False
    # Whether a target is the next input: only a causal model does not see it, and can
    # continue a prompt.
    continues: ClassVar[bool] = False
    # Defaults of `config.model` for this task, by dotted name.
    model_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def __post_init__(self):
        declared = fields.declared(type(self))
        for field in dataclasses.fields(self):
            if "declared" in field.metadata:
                declared[field.name].checked(field.name, getattr(self, field.name))

    @abc.abstractmethod
    def example(self, key: jax.Array, data: Any) -> Example:
        """Makes the example of a PRNG key, a pure function under jit and vmap.

        `data` is `train_data` or `held_out_data`, on the device or not.
        """

    # To train on, and to evaluate on.
    _split: tuple[Any, Any] = ((), ())
    _kept: Any = None  # the `Kept` of a run or of the user's data, in a `DataTask`

    @property
    def train_data(self) -> Any:
        """Host arrays from which training examples are drawn; () if it needs none."""
        return self._split[0]

    @property
    def held_out_data(self) -> Any:
        """The same as `train_data` for evaluation, with no example in common."""
        return self._split[1]

    def keep(self) -> Kept | None:
        """Returns the data that a run stores to remake the task, or None."""
        return None

    def correct(self, logits: jax.Array, example: Example) -> jax.Array:
        """Returns where the likeliest class is the target, shaped like the targets.

        `logits` are `[..., T, C]`, or `[..., T]` of a set task, with the leading axes
        of the example or batch.
        """
        return jnp.argmax(logits, axis=-1).astype(jnp.int32) == example.targets

    def token_label(self, token: int) -> str:
        """Returns the text of an input token."""
        return str(token)

    def class_label(self, c: int) -> str:
        """Returns the text of class `c`."""
        return str(c)

    def piece(self, token: int) -> bytes:
        """Returns the text that class `token` adds to a written text, as UTF-8."""
        return f" {self.class_label(token)}".encode()

    def labels(self, example: Example) -> list[str]:
        """Lists the text of each position of one example's inputs."""
        return [
            self.token_label(token) for token in np.asarray(example.inputs).tolist()
        ]

    def decoder_labels(self, example: Example) -> list[str]:
        """Lists the text of each position of one example's decoder inputs.

        Position t reads target t - 1, the first one the start token, and predicts
        target t.
        """
        tokens = np.asarray(example.decoder_inputs).tolist()
        return [self.class_label(token) for token in tokens]

    def question(self, example: Example) -> str:
        """Writes one example's valid inputs as readable text."""
        return " ".join(self.labels(example)[: example.lengths])

    def answer(self, tokens: Sequence[int] | np.ndarray | jax.Array) -> str:
        """Returns the text of a model's answer, `[T]` classes up to an end token."""
        classes = np.asarray(tokens).tolist()
        written = itertools.takewhile(lambda x: x not in self.end_tokens, classes)
        pieces = b"".join(map(self.piece, written))
        return pieces.decode("utf-8", errors="replace").removeprefix(" ")

    def alignments(self, example: Example) -> dict[str, np.ndarray]:
        """Returns what cross-attention is measured against, by name; {} if nothing.

        "aligned" are `[T, S]` booleans on the host: in row t, which predicts target t,
        the source positions that decide it, or none where that is unknown. The others
        are parts of it. The names are the same for all examples of the task.
        """
        return {}

    def images(self, example: Example) -> np.ndarray | None:
        """Returns the positions' images, `[T, h, w]` uint8, 255 for ink; or None."""
        return None

    def encode(self, text: str) -> np.ndarray:
        """Encodes a user's text as tokens, int32, as many as the text has.

        The text has token ids or labels, separated by spaces: "3 1 4".

        Raises:
          ConfigError: If there are none, or one is not a token; or if the task takes
            features.
        """
        words, size = text.split(), self.num_tokens
        if size is None:
            raise checks.ConfigError(
                f"The task {self.name!r} takes features, not text or tokens."
            )
        tokens = {str(token): token for token in range(size)}
        tokens |= {self.token_label(token): token for token in range(size)}
        for word in words or [text]:
            if word not in tokens:
                raise checks.ConfigError(
                    f"text must be token ids from 0 to {size - 1} or labels of "
                    f"{self.name}, separated by spaces, got {word!r}."
                )
        return np.array([tokens[word] for word in words], np.int32)

    def prompt(self, text: str) -> np.ndarray:
        """Encodes a text for a causal model to continue."""
        return self.encode(text)


class UniformTask(Task):
    """A task whose targets are uniform over the classes, at every position.

    Unless a subclass overrides it, the classes are the tokens.
    """

    num_tokens: int

    @property
    def num_classes(self) -> int:
        return self.num_tokens

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        return {"accuracy": 1 / self.num_classes, "loss": math.log(self.num_classes)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataTask(Task):
    """A task over data from outside of the package; `_parts` reads both parts.

    Unless a subclass overrides it, the parts are examples with a leading axis, of which
    one is drawn, and the baseline predicts the frequencies of the training targets.
    """

    baseline_name = "unigram"

    # The data that a run stored of this task, with the `text` that it must be: then it
    # is only read when examples are needed. Or data from Python.
    kept: dataclasses.InitVar[Kept | None] = None

    def __post_init__(self, kept: Kept | None):
        super().__post_init__()
        object.__setattr__(self, "_kept", kept or Kept())
        if self._kept.text is None:
            _ = self._split  # reads the data, so that its errors show now

    def keep(self) -> Kept:
        if self._kept.text is not None:
            return self._kept
        return Kept(self._symbols(), self._text, self._kept.arrays)

    def example(self, key: jax.Array, data: Any) -> Example:
        return Example(*sampling.row(key, data))

    @property
    def _arrays(self) -> Mapping[str, np.ndarray]:
        """The data that was passed from Python."""
        if self._kept.arrays is None:
            raise checks.ConfigError(
                f"{self.name} needs data that is given in Python, by "
                "tasks.from_arrays or tasks.from_examples; a config cannot hold it."
            )
        return self._kept.arrays

    @property
    @abc.abstractmethod
    def _text(self) -> dict[str, Any]:
        """Names the data, as in `Kept`."""

    @abc.abstractmethod
    def _symbols(self) -> str:
        """Describes the tokens, as in `Kept`."""

    @abc.abstractmethod
    def _parts(self) -> tuple[Any, Any]:
        """Reads the data to train on, and the held-out data."""

    @abc.abstractmethod
    def _counts(self, part: Any) -> np.ndarray:
        """Counts each class as a target in a part of the data, `[C]`."""

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """Chance level: the frequencies of targets in the training part.

        One is added to every count, so that none is zero.
        """
        learned, met = map(self._counts, self._split)
        log_probabilities = np.log((learned + 1) / (learned.sum() + len(learned)))
        return {
            "accuracy": float(met[learned.argmax()] / met.sum()),
            "loss": float(-np.sum(met * log_probabilities) / met.sum()),
        }

    @functools.cached_property
    def _split(self) -> tuple[Any, Any]:
        before, text = self._kept.text, self._text
        if before is not None and before["sha256"] != text["sha256"]:
            raise checks.ConfigError(
                f"The run has learned from other data: {before['name']} had the sha256 "
                f"{before['sha256'][:12]}..., and {text['name']} has "
                f"{text['sha256'][:12]}....\n"
                "Training and held-out examples need that data; inputs of your own do "
                "not."
            )
        return self._parts()


def digest(kept: Kept) -> str:
    """Computes the sha256 of what is kept: the tokenizer, and arrays by name."""
    sha256 = hashlib.sha256(kept.tokenizer.encode())
    for name, x in sorted((kept.arrays or {}).items()):
        sha256.update(f"{name} {x.dtype} {x.shape}".encode())
        sha256.update(np.ascontiguousarray(x).data)
    return sha256.hexdigest()


def check_parts(
    option: str, fraction: float, train: int, held_out: int, what: str, least: int = 1
) -> None:
    """Raises ConfigError unless both parts of the data have enough examples."""
    if min(train, held_out) < least:
        raise checks.ConfigError(
            f"{option} must leave {what} to both parts, got {fraction!r}, which leaves "
            f"{train:,} to train on and {held_out:,} held out."
        )


def split(
    data: Any, held_out: np.ndarray, fraction: float, what: str
) -> tuple[Any, Any]:
    """Splits a tree of arrays `[N, ...]` by booleans `[N]`; see `check_parts`."""
    counts = np.sum(~held_out), np.sum(held_out)
    check_parts("held_out_fraction", fraction, *counts, what)
    return tuple(
        jax.tree.map(lambda x, y=rows: x[y], data) for rows in (~held_out, held_out)
    )


def described(value: Any) -> str:
    """Describes an array by dtype and shape, anything else as messages show it."""
    if hasattr(value, "dtype"):
        return f"{value.dtype} of shape {value.shape}"
    return checks.shown(value)


def all_count(targets: jax.Array) -> jax.Array:
    """Makes weights of 1 for every one of `targets`."""
    return jnp.ones(targets.shape, jnp.float32)


def batch(
    task: Task, key: jax.Array, data: Any, indices: jax.Array | np.ndarray
) -> Example:
    """Makes the examples of a batch with the indices `[B]`.

    An example depends only on `key`, which the batch shares, and its index, so a batch
    does not depend on how its indices are spread over devices; `data` is as in
    `Task.example`.
    """
    return jax.vmap(lambda i: task.example(jax.random.fold_in(key, i), data))(indices)
