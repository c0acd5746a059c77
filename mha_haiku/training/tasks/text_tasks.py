"""Text files as tokens, split into a training part and a held-out part."""

import dataclasses
import functools
import hashlib
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling, tokenization

_MASK = "[MASK]"
# 15 percent of the tokens are chosen: 80 percent of these become the mask, 10 percent a
# random token, 10 percent stay. Thresholds for uniform uint32 words.
_MASKED = np.uint32(round(0.15 * 0.8 * 2**32))
_REPLACED = np.uint32(round(0.15 * 0.9 * 2**32))
_CHOSEN = np.uint32(round(0.15 * 2**32))
_PARAGRAPHS = re.compile(r"\n\s*\n")
_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_FEWEST_WORDS = 4


def _tokenizer_name(name: str, value: Any) -> str:
    if isinstance(value, str) and value.endswith(".json"):
        return value
    return checks.choice(name, value, (*tokenization.TRAINERS, "tokenizer.json"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(base.DataTask):
    """A base class of tasks over text: tokenizer, labels, the unigram baseline.

    Examples are windows of T tokens from anywhere in a part of the text. Tokens of the
    tokenizer come first, 0 to num_classes - 1; they are the classes as well. The
    tokenizer is trained on the training part only, or read from a file; a file's
    special tokens go around every window and are no targets.
    """

    model_defaults = {"embedding.max_length": 64}
    sequence_length: int = fields.field(64, "tokens in an example", sampling.count(1))
    path: str = fields.field(
        "",
        "a UTF-8 file or a folder of them; empty: Python's own documentation",
        section="data",
        is_path=True,
    )
    tokenizer: str = fields.field(
        "characters",
        "what a token is: characters, bpe (byte-pair encoding), or as a file has it, "
        "tokenizer.json",
        _tokenizer_name,
        section="data",
    )
    vocabulary_size: int = fields.field(
        256,
        "largest number of tokens that the tokenizer may have; of a file's the "
        "smallest number of classes",
        sampling.count(1),
        section="data",
    )
    held_out_fraction: float = fields.field(
        0.1,
        "share of the text to evaluate on, from its end",
        checks.fraction,
        section="data",
    )

    @functools.cached_property
    def texts(self) -> tuple[Any, Any]:
        """The text to train on, and the held-out text."""
        text = read(self.path)
        # At least one character to train the tokenizer on; short texts are refused.
        cut = max(1, round(len(text) * (1 - self.held_out_fraction)))
        return text[:cut], text[cut:]

    @functools.cached_property
    def _text(self) -> dict[str, Any]:
        topics = f"pydoc_data.topics of Python {platform.python_version()}"
        content = "".join(self.texts).encode(errors="surrogatepass")
        sha256 = hashlib.sha256(content).hexdigest()
        return {"name": self.path or topics, "sha256": sha256}

    def _parts(self) -> tuple[Any, Any]:
        """Returns the tokens of both parts, `[N]` and `[M]` int32."""
        train, held_out = map(self.encoder.encode, self.texts)
        for part, tokens in (("training", train), ("held-out", held_out)):
            if len(tokens) <= self.sequence_length:
                raise checks.ConfigError(
                    f"path must have at least {self.sequence_length + 1} tokens in its "
                    f"{part} part (sequence_length + 1), got {len(tokens)} from "
                    f"{self.path!r} with held_out_fraction {self.held_out_fraction!r}."
                )
        return train, held_out

    @functools.cached_property
    def encoder(self) -> tokenization.Tokenizer:
        """The tokenizer, of the run, of a file or trained on the training part."""
        if self._kept.tokenizer:
            return tokenization.from_json(self._kept.tokenizer)
        if train := tokenization.TRAINERS.get(self.tokenizer):
            return train(self._training_text, self.vocabulary_size)
        return tokenization.read_file(self.tokenizer, self.vocabulary_size)

    @property
    def _training_text(self) -> str:
        return self.texts[0]

    def _symbols(self) -> str:
        return self.encoder.to_json()

    @property
    def num_tokens(self) -> int:
        return self.num_classes

    @property
    def num_classes(self) -> int:
        return self.encoder.num_tokens

    def _counts(self, part: np.ndarray) -> np.ndarray:
        return np.bincount(part, minlength=self.num_classes)

    def token_label(self, token: int) -> str:
        return self.class_label(token)

    def class_label(self, c: int) -> str:
        return self.encoder.label(c)

    def piece(self, token: int) -> bytes:
        return self.encoder.piece(token)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return self.encoder.end_tokens

    def encode(self, text: str) -> np.ndarray:
        """Encodes a user's text, with special tokens around it."""
        tokens = self._tokens(text)
        if not len(tokens):
            raise checks.ConfigError("text must have at least 1 token, got none.")
        return np.array([*self.before, *tokens, *self.encoder.after], np.int32)

    def prompt(self, text: str) -> np.ndarray:
        """Encodes a text to continue, without special tokens after it."""
        tokens = self.encode(text)
        self.encoder.check_known(text)
        return tokens[: len(tokens) - len(self.encoder.after)]

    def window(
        self, word: jax.Array, data: np.ndarray, length: int
    ) -> tuple[jax.Array, np.ndarray]:
        """Cuts `[length]` tokens from a random place of `data`, special ones around.

        The second array, booleans, says which are not special.
        """
        first, last = (np.array(x, np.int32) for x in (self.before, self.encoder.after))
        room = self._room(length)
        start = sampling.integers(word, len(data) - room + 1)
        tokens = jax.lax.dynamic_slice_in_dim(jnp.asarray(data), start, room)
        if room < length:
            tokens = jnp.concatenate([first, tokens, last])
        return tokens, np.pad(np.ones(room, bool), (len(first), len(last)))

    def padded(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Cuts or pads texts to tokens `[N, T]`; also returns their lengths `[N]`."""
        room = self._room(self.sequence_length)
        rows = [
            [*self.before, *self.encoder.encode(text)[:room], *self.encoder.after]
            for text in texts
        ]
        return tokenization.padded(rows, self.sequence_length, np.int32)

    def _room(self, length: int) -> int:
        """Counts the tokens of a text that have room between special ones."""
        num_special = len(self.before) + len(self.encoder.after)
        if length <= num_special:
            raise checks.ConfigError(
                f"config.task.sequence_length must be above {num_special}, the "
                f"number of special tokens around a text, got {self.sequence_length}."
            )
        return length - num_special

    @property
    def before(self) -> tuple[int, ...]:
        return self.encoder.before

    def _tokens(self, text: str) -> np.ndarray:
        return self.encoder.encode(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(TextTask):
    r"""The target at position t is the token at position t + 1 of the text.

    Example, T = 5 characters of "to be or":

        inputs   t o ␣ b e
        targets  o ␣ b e ␣
        weights  1 1 1 1 1

    Metric: accuracy over all positions except special tokens, which the file of a
    tokenizer may put around the window. Chance is the unigram predictor, see
    `DataTask.baseline`.
    """

    name: ClassVar[str] = "language_model"
    continues: ClassVar[bool] = True

    def example(self, key: jax.Array, data: np.ndarray) -> base.Example:
        window, is_text = self.window(
            sampling.words(key), data, self.sequence_length + 1
        )
        weights = jnp.asarray(is_text[1:], jnp.float32)
        return base.Example(window[:-1], window[1:], weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLanguageModel(TextTask):
    """The target is the original token; only chosen positions count.

    Each position is chosen with probability 0.15, independently. A chosen token
    becomes `[MASK]` (80 percent), a random token (10) or stays (10), as in BERT.
    Example, T = 8 characters of "to be or not"; positions 1, 4 and 6 are chosen and
    become the mask, a random token, and the same token:

        inputs   t [MASK] ␣ b x ␣ o r
        targets  . o . . e . o .
        weights  0 1 0 0 1 0 1 0

    Special tokens, which the file of a tokenizer may put around the window, are never
    chosen. Metric: accuracy over the chosen positions. Chance is the unigram predictor,
    see `DataTask.baseline`. The mask is the tokenizer's; where it has none, the last
    token, `num_tokens - 1`, which is no class. A user's text may contain `[MASK]`.

    Source: Devlin et al. 2018, https://arxiv.org/abs/1810.04805.
    """

    name: ClassVar[str] = "masked_language_model"

    @property
    def num_tokens(self) -> int:
        """Number of the tokenizer's tokens, plus one for the mask if it has none."""
        return self.num_classes + (self.encoder.mask is None)

    @property
    def mask_token(self) -> int:
        mask = self.encoder.mask
        return self.num_classes if mask is None else mask

    def token_label(self, token: int) -> str:
        return _MASK if token == self.mask_token else self.class_label(token)

    def example(self, key: jax.Array, data: np.ndarray) -> base.Example:
        random = sampling.words(key, 2 * self.sequence_length + 1)
        choice, replacement = random[1:].reshape(2, self.sequence_length)
        targets, is_text = self.window(random[0], data, self.sequence_length)
        other = sampling.integers(replacement, self.num_classes)
        inputs = jnp.where(choice < _REPLACED, other, targets)
        inputs = jnp.where(choice < _MASKED, jnp.int32(self.mask_token), inputs)
        inputs = jnp.where(is_text, inputs, targets)
        weights = (is_text & (choice < _CHOSEN)).astype(jnp.float32)
        return base.Example(inputs, targets, weights)

    def _tokens(self, text: str) -> np.ndarray:
        if (number := self.encoder.mask) is not None:
            return super()._tokens(text.replace(_MASK, self.encoder.label(number)))
        mask = np.array([self.mask_token], np.int32)
        pieces = []
        for piece in map(super()._tokens, text.split(_MASK)):
            pieces += [mask, piece]
        return np.concatenate(pieces[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentences(TextTask):
    """Inputs are single sentences, padded to T; there is nothing to predict.

    Example, T = 8, with a tokenizer that puts [CLS] and [SEP] around a text:

        inputs   [CLS] the cat sat . [SEP] 0 0
        weights    0    0   0   0  0   0   0 0
        lengths  6

    Metric: drift, the change in the direction of the mean of a model's outputs by an
    intervention; see `heads.measured_by_drift`. A sentence ends with a period, question
    mark or exclamation mark and has at least 4 words; longer ones are cut. No sentence
    is twice in a part.
    """

    name: ClassVar[str] = "sentences"
    metrics: ClassVar[tuple[str, ...]] = ("drift",)

    @property
    def baseline(self) -> dict[str, float]:
        return {"accuracy": float("nan"), "loss": float("nan")}

    def _parts(self) -> tuple[base.Example, base.Example]:
        return self._encoded(0, "training"), self._encoded(1, "held-out")

    def _encoded(self, part: int, name: str) -> base.Example:
        texts = sentences(self.texts[part])
        if not texts:
            raise checks.ConfigError(
                f"path must have sentences in its {name} part, got none from "
                f"{self.path!r}."
            )
        tokens, lengths = self.padded(texts)
        return base.Example(tokens, tokens, np.zeros(tokens.shape, "f4"), lengths)


def sentences(whole: str) -> list[str]:
    """Lists the sentences of a text, each once, with single spaces between words."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in _PARAGRAPHS.split(whole))
    pieces = (piece for paragraph in paragraphs for piece in _ENDS.split(paragraph))
    return [
        piece
        for piece in dict.fromkeys(pieces)
        if piece.endswith((".", "!", "?")) and piece.count(" ") >= _FEWEST_WORDS - 1
    ]


def read(path: str) -> str:
    r"""Reads the text of a file, of all files of a folder, or of Python's topics.

    Files of a folder and its subfolders are joined by an empty line, in the order of
    their paths, without hidden files. A byte order mark is dropped; `\r\n` is `\n`.
    """
    if not path:
        from pydoc_data import topics

        return "\n\n".join(topics.topics.values())
    root = checks.as_path(path)
    files = [root]
    if root.is_dir():
        files = [
            file
            for file in sorted(root.rglob("*"))
            if file.is_file()
            and not any(name.startswith(".") for name in file.relative_to(root).parts)
        ]
    text = "\n\n".join(filter(None, map(read_file, files)))
    if not text.strip():
        raise checks.ConfigError(
            f"path must have some text, got {path!r}: it is empty."
        )
    return text


def read_file(path: str | pathlib.Path) -> str:
    """Reads a text; a file with a NUL, as UTF-16 and binary files have, is none."""
    text = checks.text_of(path, f"path {str(path)!r}")
    if "\0" in text:
        raise checks.ConfigError(f"path {str(path)!r} is not a text: it has a NUL.")
    return text
