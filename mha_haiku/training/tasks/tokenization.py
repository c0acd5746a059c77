"""Text to integers and back: characters, byte pairs, or a tokenizer from a file."""

import abc
import contextlib
import dataclasses
import functools
import json
import pathlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mha_haiku.core import checks

_NUM_BYTES = 256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_MASKS = ("[MASK]", "<mask>")  # what tokenizers call the token that hides another
# What they call the token that ends a text, the commonest first.
_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>")
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token for a byte that no other has
# Where `str.splitlines` cuts.
_ENDS_OF_LINES = r"\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]"


class Tokenizer(abc.ABC):
    """Encodes text as tokens, 0 to num_tokens - 1, and labels them."""

    num_tokens: int
    before: tuple[int, ...] = ()  # special tokens before every text
    after: tuple[int, ...] = ()  # special tokens after it
    mask: int | None = None  # the token that hides another
    end_tokens: tuple[int, ...] = ()  # those that end a text

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as tokens `[T]`, int32, without special tokens around it."""

    @abc.abstractmethod
    def check_known(self, text: str) -> None:
        """Raises ConfigError if a part of a text has no token."""

    @abc.abstractmethod
    def piece(self, token: int) -> bytes:
        """Returns the UTF-8 bytes that a token adds to a text that it continues.

        A token may be a part of a character: texts are joined from bytes.
        """

    def label(self, token: int) -> str:
        r"""Returns the text of a token; parts of a character are `\xe2`."""
        return self.piece(token).decode(errors="backslashreplace")

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes tokens to the text that their pieces make up."""
        pieces = b"".join(self.piece(int(token)) for token in tokens)
        return pieces.decode(errors="replace")

    @abc.abstractmethod
    def to_json(self) -> str:
        """Describes the tokenizer as a text, which `from_json` reads."""


@dataclasses.dataclass(frozen=True)
class Characters(Tokenizer):
    """A tokenizer of characters; token 0 is any unknown character."""

    alphabet: str  # the known characters, in the order of their tokens 1, 2, ...

    @classmethod
    def train(cls, text: str, vocabulary_size: int) -> "Characters":
        """Makes a tokenizer of a text's characters, the commonest if too many."""
        checks.integer_in("vocabulary_size", vocabulary_size, 2, None)
        counts = Counter(text)
        commonest = sorted(counts, key=lambda c: (-counts[c], c))
        return cls("".join(sorted(commonest[: vocabulary_size - 1])))

    def to_json(self) -> str:
        return json.dumps({"characters": self.alphabet}) + "\n"

    @property
    def num_tokens(self) -> int:
        return len(self.alphabet) + 1

    def encode(self, text: str) -> np.ndarray:
        code_points = _code_points(text)
        place = np.searchsorted(self._alphabet_code_points, code_points)
        place = np.minimum(place, len(self.alphabet) - 1)
        is_in_alphabet = self._alphabet_code_points[place] == code_points
        return np.where(is_in_alphabet, place + 1, 0).astype(np.int32)

    def check_known(self, text: str) -> None:
        unknown = np.flatnonzero(self.encode(text) == 0)
        if len(unknown):
            raise checks.ConfigError(
                f"text must have characters that the tokenizer knows, got "
                f"{text[unknown[0]]!r} at character {unknown[0]}.\n"
                f"It knows {checks.shown(self.alphabet)}."
            )

    def label(self, token: int) -> str:
        return (_UNKNOWN + self.alphabet)[token]

    def piece(self, token: int) -> bytes:
        return self.label(token).encode("utf-8", errors="surrogatepass")

    @functools.cached_property
    def _alphabet_code_points(self) -> np.ndarray:
        return _code_points(self.alphabet)


def train_byte_pairs(text: str, vocabulary_size: int) -> "Pretrained":
    """Trains a tokenizer that merges byte pairs, the commonest in `text` first.

    It has `vocabulary_size` tokens, at least 256, or fewer if pairs run out. No token
    is of two lines.
    """
    checks.integer_in("vocabulary_size", vocabulary_size, _NUM_BYTES, None)
    tokenizers = library()
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return Pretrained(_by_lines(json.loads(tokenizer.to_str())))


@dataclasses.dataclass(frozen=True)
class Pretrained(Tokenizer):
    """A tokenizer of `tokenizers`, trained here or from a file.

    Its special tokens, `before` and `after`, go around a whole text; `encode` leaves
    them out. ConfigError if the contents do not describe a tokenizer, or a text needs a
    token that its model has no row for.
    """

    content: str  # of a tokenizer.json
    least_tokens: int = 0  # vocabulary of its model, which may be larger than its own
    most_tokens: int | None = None  # rows of its model, if limited
    # By default the first token with a usual name of the end.
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        """Reads the contents, so that errors show now."""
        with errors_named("tokenizer.json"):
            _ = self._around
            usual = self._first_of(_ENDS)
        ends = tuple(x for x in self.end_tokens if 0 <= x < self.num_tokens)
        ends = ends or (() if usual is None else (usual,))
        object.__setattr__(self, "end_tokens", ends)

    def to_json(self) -> str:
        stored = {"pretrained": json.loads(self.content)}
        stored["least_tokens"] = self.least_tokens
        stored["end_tokens"] = self.end_tokens
        if self.most_tokens is not None:
            stored["most_tokens"] = self.most_tokens
        return json.dumps(stored)

    @functools.cached_property
    def num_tokens(self) -> int:
        count = max(self.least_tokens, 1 + max(self._ids.values()))
        return count if self.most_tokens is None else min(count, self.most_tokens)

    @property
    def out_of_range(self) -> tuple[int, ...]:
        """The tokens that the model has no row for, in their order."""
        return tuple(sorted(x for x in self._ids.values() if x >= self.num_tokens))

    @property
    def before(self) -> tuple[int, ...]:
        return self._in_range(self._around[0])

    @property
    def after(self) -> tuple[int, ...]:
        return self._in_range(self._around[1])

    @functools.cached_property
    def mask(self) -> int | None:
        return self._first_of(_MASKS)

    def _first_of(self, texts: Sequence[str]) -> int | None:
        tokens = (self._ids.get(text, self.num_tokens) for text in texts)
        return next((token for token in tokens if token < self.num_tokens), None)

    def _in_range(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if (largest := max(tokens, default=0)) >= self.num_tokens:
            raise checks.ConfigError(
                f"text must be of tokens 0 to {self.num_tokens - 1}, which the model "
                f"has rows for; it needs {self.label(largest)!r}, which is {largest}."
            )
        return tokens

    def check_known(self, text: str) -> None:
        model, encoding = json.loads(self.content)["model"], self._encoding(text)
        unknown = self._ids.get(model.get("unk_token"), model.get("unk_id"))
        if unknown in encoding.ids:
            start, stop = encoding.offsets[encoding.ids.index(unknown)]
            raise checks.ConfigError(
                "text must be of parts that the tokenizer knows, got "
                f"{text[start:stop]!r} at character {start}."
            )

    def encode(self, text: str) -> np.ndarray:
        # As one piece: a tokenizer may mark beginnings, and merge over ends of lines.
        return np.array(self._in_range(self._encoding(text).ids), np.int32)

    def _encoding(self, text: str) -> Any:
        with _errors_named("text cannot be encoded by its tokenizer"):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def label(self, token: int) -> str:
        byte = _BYTE.fullmatch(self._tokenizer.id_to_token(token) or "")
        return rf"\x{byte[1].lower()}" if byte else super().label(token)

    def decode(self, tokens: Sequence[int]) -> str:
        with _errors_named("tokens cannot be decoded by their tokenizer"):
            return self._decode([int(token) for token in tokens])

    def piece(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:  # a token that only the model knows
            return f"<{token}>".encode()
        if token in self._special:
            return name.encode()
        if self._is_byte_level:
            return _bytes_of_letters(name)
        if byte := _BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        if self._tokenizer.decoder is None:
            return name.encode()
        # A decoder drops or adds spaces at the beginning, so the second of two counts.
        once, twice = self._decode([token]), self._decode([token, token])
        return (twice.removeprefix(once) or name).encode()

    @functools.cached_property
    def _tokenizer(self) -> Any:
        tokenizer = library().Tokenizer.from_str(self.content)
        tokenizer.no_truncation()  # windows are cut here, not there
        tokenizer.no_padding()
        return tokenizer

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @functools.cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # The template is asked about a text of one token, which any text is to a
        # tokenizer without a vocabulary.
        plain = library().Tokenizer(library().models.WordLevel({"": 0}, unk_token=""))
        if self._tokenizer.post_processor is not None:
            plain.post_processor = self._tokenizer.post_processor
        encoding = plain.encode("a")
        place = encoding.special_tokens_mask.index(0)
        return tuple(encoding.ids[:place]), tuple(encoding.ids[place + 1 :])

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.content).get("decoder"))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def read_file(
    path: str | pathlib.Path,
    least_tokens: int = 0,
    most_tokens: int | None = None,
    end_tokens: tuple[int, ...] = (),
) -> Tokenizer:
    """Reads the tokenizer in a tokenizer.json, also one that was trained here."""
    content = checks.text_of(path, f"tokenizer {str(path)!r}")
    with errors_named("tokenizer.json"):
        contents = json.loads(content)
        if contents.keys() & {"characters", "pretrained"}:  # of a run
            return from_json(contents)
        before = contents.get("pre_tokenizer") or {}
        if contents.get("decoder") is None and before.get("type") == "ByteLevel":
            contents["decoder"] = before  # so that tokens are text
    return Pretrained(json.dumps(contents), least_tokens, most_tokens, end_tokens)


def _by_lines(contents: dict[str, Any]) -> str:
    """Completes a description of byte pairs: lines are encoded one by one."""
    before = contents["pre_tokenizer"]
    lines = {
        "type": "Split",
        "pattern": {"Regex": _ENDS_OF_LINES},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    steps = {"type": "Sequence", "pretokenizers": [lines, before]}
    return json.dumps(contents | {"pre_tokenizer": steps, "decoder": before})


def from_json(text: str | dict[str, Any]) -> Tokenizer:
    """Makes the tokenizer that `to_json` described, as text or as its object."""
    with errors_named("tokenizer.json"):
        contents = json.loads(text) if isinstance(text, str) else text
        if "characters" in contents:
            return Characters(contents["characters"])
        return Pretrained(
            json.dumps(contents["pretrained"]),
            contents["least_tokens"],
            contents.get("most_tokens"),
            tuple(contents.get("end_tokens", ())),
        )


TRAINERS = {"characters": Characters.train, "bpe": train_byte_pairs}


def errors_named(file: str) -> contextlib.AbstractContextManager[None]:
    """Raises errors in a tokenizer as ConfigError."""
    return _errors_named(f"{file} is damaged, or describes no tokenizer")


@contextlib.contextmanager
def _errors_named(fault: str) -> Iterator[None]:
    try:
        yield
    except (checks.ConfigError, ImportError, KeyboardInterrupt, SystemExit):
        raise
    # A bare Exception of tokenizers, or a panic of Rust, which is none.
    except BaseException as error:
        lacks = "it lacks " if isinstance(error, KeyError) else ""
        why = " ".join(str(error).split()).rstrip(".")
        raise checks.ConfigError(f"{fault}: {lacks}{why}.") from None


def encoded(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes a user's text; ConfigError if it has no token or an unknown part."""
    if not text:
        raise checks.ConfigError("text must have at least 1 token, got none.")
    tokenizer.check_known(text)
    return tokenizer.encode(text)


def library() -> Any:
    """Imports `tokenizers`, which is optional."""
    import tokenizers

    return tokenizers


def padded(
    rows: Sequence[Any], length: int | None = None, dtype: Any = np.int16
) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows of tokens with 0 to `[N, length]`; also returns their lengths `[N]`.

    The length is by default the longest row's.
    """
    lengths = np.array(list(map(len, rows)), np.int32)
    length = int(lengths.max()) if length is None else length
    filled = np.zeros((len(rows), length), dtype)
    filled[np.arange(length) < lengths[:, None]] = np.concatenate(rows)
    return filled, lengths


# The bytes that letters of byte-level BPE encode.
def _bytes_of_letters(letters: str) -> bytes:
    byte_of = _byte_of_letter()
    if not all(letter in byte_of for letter in letters):  # added as it is
        return letters.encode()
    return bytes(byte_of[letter] for letter in letters)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    # The byte of each letter: printable bytes encode themselves, the others are
    # moved to U+0100 and after. Source: Radford et al. 2019,
    # https://github.com/openai/gpt-2 (bytes_to_unicode).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    moved = {chr(_NUM_BYTES + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved
