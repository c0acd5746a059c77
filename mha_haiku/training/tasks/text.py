"""Text files as tokens, split into a training part and a held-out part."""

import dataclasses
import functools
import hashlib
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling, tokenization


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

    baseline_name = "unigram"
    model_defaults = {"embedding.max_length": 64}
    sequence_length: int = fields.field(64, "tokens in an example", sampling.count(1))
    path: str = fields.field(
        "",
        "a UTF-8 file or a folder of them; empty: Python's own documentation",
        section="data",
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
        if self.held_out_fraction == 0:
            raise checks.ConfigError("held_out_fraction must be above 0, got 0.")
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
        if self._kept is not None:
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

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        count = functools.partial(np.bincount, minlength=self.num_classes)
        return base.unigram(*map(count, self._split))

    def token_label(self, token: int) -> str:
        return self.class_label(token)

    def class_label(self, c: int) -> str:
        return self.encoder.label(c)

    def piece(self, token: int) -> bytes:
        return self.encoder.piece(token)

    @property
    def end_token(self) -> int | None:
        return self.encoder.end

    def encode(self, text: str) -> np.ndarray:
        """Encodes a user's text, with special tokens around it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise checks.ConfigError(
                f"text must be Unicode, got {text[error.start]!r} at character "
                f"{error.start}."
            ) from error
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


def read(path: str) -> str:
    r"""Reads the text of a file, of all files of a folder, or of Python's topics.

    Files of a folder and its subfolders are joined by an empty line, in the order of
    their paths, without hidden files. A byte order mark is dropped; `\r\n` is `\n`.
    """
    if not isinstance(path, str):
        raise checks.ConfigError(f"path must be a text, got {path!r}.")
    if not path:
        from pydoc_data import topics

        return "\n\n".join(topics.topics.values())
    try:
        text = "\n\n".join(filter(None, map(_read_file, _files(path))))
    except OSError as error:
        raise checks.ConfigError(
            f"path must be readable, got {error.filename or path!r}: {error.strerror}."
        ) from error
    if not text.strip():
        raise checks.ConfigError(
            f"path must have some text, got {path!r}: it is empty."
        )
    return text


def read_file(path: str) -> str:
    """Reads the text of a file, which may be no folder; see `read`."""
    if os.path.isdir(os.path.expanduser(path)):
        raise checks.ConfigError(
            f"path must be a file, got {path!r}, which is a folder."
        )
    return read(path)


def _files(path: str) -> list[pathlib.Path]:
    root = pathlib.Path(os.path.expanduser(path))
    if root.is_file():
        return [root]
    if root.is_dir():
        files = (file for file in sorted(root.rglob("*")) if file.is_file())
        return [
            file
            for file in files
            if not any(name.startswith(".") for name in file.relative_to(root).parts)
        ]
    what = "is neither a file nor a folder" if root.exists() else "does not exist"
    folder = root.parent
    siblings = os.listdir(folder) if folder.is_dir() else []
    raise checks.ConfigError(
        f"path must be a text file or a folder of them, got {path!r}, which {what}."
        f"{checks.nearest(root.name, siblings)}"
    )


def _read_file(file: pathlib.Path) -> str:
    raw = file.read_bytes()
    if (offset := raw.find(b"\0")) >= 0:
        raise checks.ConfigError(
            f"path must be UTF-8 text, got {str(file)!r}: it is binary, with a NUL at "
            f"byte {offset}."
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise checks.ConfigError(
            f"path must be UTF-8 text, got {str(file)!r}: byte {error.start} is "
            f"0x{raw[error.start]:02x}."
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")
