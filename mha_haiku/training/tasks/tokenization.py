"""Text to integers and back: characters, byte pairs, or a tokenizer from a file."""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mha_haiku.core import checks
from mha_haiku.training.tasks import base

_NUM_BYTES = 256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_MASKS = ("[MASK]", "<mask>")  # what tokenizers call the token that hides another
# What they call the token that ends a text, the commonest first.
_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>")
_TRIED = 100  # tokens whose texts are encoded to find one that can be
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token for a byte that no other has
# Where `str.splitlines` cuts.
_ENDS_OF_LINES = r"\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]"


class Tokenizer(Protocol):
    """Encodes text as tokens, 0 to num_tokens - 1, and labels them."""

    num_tokens: int
    before: tuple[int, ...] = ()  # special tokens before every text
    after: tuple[int, ...] = ()  # special tokens after it
    mask: tuple[int, str] | None = None  # the token that hides another, and its text
    end_tokens: tuple[int, ...] = ()  # those that end a text
    out_of_range: tuple[int, ...] = ()  # tokens that the model has no row for

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as tokens `[T]`, int32."""
        ...

    def check_known(self, text: str) -> None:
        """Raises ConfigError if a part of a text has no token."""

    def label(self, token: int) -> str:
        """Returns the text of a token."""
        ...

    def piece(self, token: int) -> bytes:
        """Returns the UTF-8 bytes that a token adds to a text that it continues.

        A token may be a part of a character: texts are joined from bytes.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes tokens to the text that their pieces make up."""
        pieces = b"".join(self.piece(int(token)) for token in tokens)
        return pieces.decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Describes the tokenizer as a text, which `from_json` reads."""
        ...


@dataclasses.dataclass(frozen=True)
class Characters(Tokenizer):
    """A tokenizer of characters; token 0 is any unknown character."""

    alphabet: str  # the known characters, in the order of their tokens 1, 2, ...

    @classmethod
    def train(cls, text: str, vocabulary_size: int) -> "Characters":
        """Makes a tokenizer of a text's characters, the commonest if too many.

        Raises:
          ValueError: If `vocabulary_size` is no integer of at least 2.
        """
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
        known = self._alphabet_code_points[place] == code_points
        return np.where(known, place + 1, 0).astype(np.int32)

    def check_known(self, text: str) -> None:
        unknown = np.flatnonzero(self.encode(text) == 0)
        if len(unknown):
            raise checks.ConfigError(
                f"text must have characters that the tokenizer knows, got "
                f"{text[unknown[0]]!r} at character {unknown[0]}.\n"
                f"It knows {checks.shown(self.alphabet)}."
            )

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Finds where in a text each of its tokens begins and ends."""
        return [(place, place + 1) for place in range(len(text))]

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

    Raises:
      ValueError: If `vocabulary_size` is no integer of at least 256.
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
    return Pretrained(json.dumps(_by_lines(json.loads(tokenizer.to_str()))))


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
        """Reads the contents and tests them, so that errors show now."""
        with errors_named("tokenizer.json"):
            _ = self._tokenizer, self._around, self._anchor
            largest, count = max(self._ids.values()), len(self._ids)
            if largest >= len(self.content):  # a token takes more than a character
                raise ValueError(f"it has {count} tokens, and a token {largest}")
            usual = self._first_of(_ENDS)
        ends = tuple(x for x in self.end_tokens if 0 <= x < self.num_tokens)
        if not ends and usual is not None:
            ends = (usual,)
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

    @functools.cached_property
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
    def mask(self) -> tuple[int, str] | None:
        token = self._first_of(_MASKS)
        return None if token is None else (token, self._tokenizer.id_to_token(token))

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
        encoding = self._encoding(text)
        if self._unknown in encoding.ids:
            start, stop = encoding.offsets[encoding.ids.index(self._unknown)]
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

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Finds where in a text each of its tokens begins and ends.

        Tokens that are parts of one character all have its place.
        """
        return list(self._encoding(text).offsets)

    def label(self, token: int) -> str:
        r"""Decodes the text that a token adds to a text that it continues.

        Parts of a character are `\xe2`, special tokens are their names, and tokens that
        only the model knows are `<49153>`.
        """
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return f"<{token}>"
        if token in self._special:
            return piece
        if self._is_byte_level:
            return _bytes_of_letters(piece).decode("utf-8", errors="backslashreplace")
        if byte := _BYTE.fullmatch(piece):
            return rf"\x{byte[1].lower()}"
        if self._tokenizer.decoder is None:
            return piece
        # A decoder drops or adds spaces at the beginning: put another token before.
        start = self._decode([self._anchor])
        whole = self._decode([self._anchor, token])
        return whole.removeprefix(start) if whole.startswith(start) else piece

    def decode(self, tokens: Sequence[int]) -> str:
        with _errors_named("tokens cannot be decoded by their tokenizer"):
            return self._decode([int(token) for token in tokens])

    def piece(self, token: int) -> bytes:
        letters = self._tokenizer.id_to_token(token)
        if letters is not None and token not in self._special:
            if self._is_byte_level:
                return _bytes_of_letters(letters)
            if byte := _BYTE.fullmatch(letters):
                return bytes.fromhex(byte[1])
        return self.label(token).encode()

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return _of_library(self.content)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @functools.cached_property
    def _unknown(self) -> int | None:
        model = json.loads(self.content)["model"]
        return self._ids.get(model.get("unk_token"), model.get("unk_id"))

    @functools.cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # The template is asked about a text of one token, which any text is to a
        # tokenizer without a vocabulary.
        asked = library().Tokenizer(library().models.WordLevel({"": 0}, unk_token=""))
        if self._tokenizer.post_processor is not None:
            asked.post_processor = self._tokenizer.post_processor
        encoding = asked.encode("a")
        places = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
        first, last = (
            (places[0], places[-1] + 1) if len(places) else [len(encoding.ids)] * 2
        )
        return tuple(encoding.ids[:first]), tuple(encoding.ids[last:])

    @functools.cached_property
    def _anchor(self) -> int:
        """A token that decodes to a text, after which other tokens are decoded."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        texts = sorted(vocabulary, key=vocabulary.get)
        texts.sort(key=lambda text: vocabulary[text] in self._special)
        reason = "its vocabulary is empty, or encodes no text"
        for text in ("a", *texts[:_TRIED]):
            try:
                tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
            except Exception as error:  # it has no such token, and none for the unknown
                reason = error
                continue
            if tokens and self._decode(tokens[-1:]).strip():
                return tokens[-1]
        raise ValueError(reason)

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.content).get("decoder"))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


KINDS = Characters, Pretrained


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
        if "characters" in contents:
            return from_json(contents)
        if "pretrained" in contents:  # of a run
            return from_json(contents)
        content = json.dumps(_with_decoder(contents))
    return Pretrained(content, least_tokens, most_tokens, end_tokens)


def _with_decoder(contents: dict[str, Any]) -> dict[str, Any]:
    """Adds the decoder that a byte-level description lacks, so that tokens are text."""
    before = contents.get("pre_tokenizer") or {}
    if contents.get("decoder") is not None or before.get("type") != "ByteLevel":
        return contents
    return contents | {"decoder": before}


def _by_lines(contents: dict[str, Any]) -> dict[str, Any]:
    """Completes a description of byte pairs: lines are encoded one by one."""
    before = contents["pre_tokenizer"]
    lines = {
        "type": "Split",
        "pattern": {"Regex": _ENDS_OF_LINES},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    steps = {"type": "Sequence", "pretokenizers": [lines, before]}
    return contents | {"pre_tokenizer": steps, "decoder": before}


def from_json(text: str | dict[str, Any]) -> Tokenizer:
    """Makes the tokenizer that `to_json` described, as text or as its object."""
    with errors_named("tokenizer.json"):
        contents = json.loads(text) if isinstance(text, str) else text
        if "characters" in contents:
            alphabet = contents["characters"]
            if not alphabet or "".join(sorted(set(alphabet))) != alphabet:
                raise ValueError("characters must be different ones, in order")
            return Characters(alphabet)
        if "pretrained" in contents:
            least = checks.integer_in("least_tokens", contents["least_tokens"], 0, None)
            most = contents.get("most_tokens")
            if most is not None:
                checks.integer_in("most_tokens", most, 0, None)
            ends = tuple(
                checks.non_negative_integer("end_tokens", x)
                for x in contents.get("end_tokens", ())
            )
            return Pretrained(json.dumps(contents["pretrained"]), least, most, ends)
        # Of mha_haiku 0.2, whose byte pairs were cut into lines apart.
        return Pretrained(json.dumps(_by_lines(contents)))


def several(text: str, count: int) -> tuple[Tokenizer, ...]:
    """Makes the tokenizers of a task that has `count` of them, from what it stored."""
    with errors_named("tokenizer.json"):
        stored = json.loads(text)["tokenizers"]
        if len(stored) != count:
            raise ValueError(f"{count} tokenizers are needed, and it has {len(stored)}")
        return tuple(map(from_json, stored))


TRAINERS = {"characters": Characters.train, "bpe": train_byte_pairs}


def errors_named(file: str) -> contextlib.AbstractContextManager[None]:
    """Raises errors in a tokenizer as ConfigError."""
    return _errors_named(f"{file} is damaged, or describes no tokenizer")


@contextlib.contextmanager
def _errors_named(fault: str) -> Iterator[None]:
    try:
        yield
    except (checks.ConfigError, KeyboardInterrupt, SystemExit):
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
    """Imports `tokenizers`; raises ConfigError if it is not installed."""
    with base.needed("tokenizers", "This tokenizer"):
        import tokenizers
    return tokenizers


def padded(
    rows: Sequence[Sequence[int]], length: int | None = None, dtype: Any = np.int16
) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows of tokens with 0 to `[N, length]`; also returns their lengths `[N]`.

    The length is by default the longest row's.
    """
    lengths = np.array(list(map(len, rows)), np.int32)
    length = int(lengths.max()) if length is None else length
    filled = np.zeros((len(rows), length), dtype)
    filled[np.arange(length) < lengths[:, None]] = np.concatenate(rows)
    return filled, lengths


_MOST_GROWTH = 1024  # characters that a tokenizer's steps may make of one
_UNBOUNDED = r"(?:[*+]|\{\d+,\})"


def _check_steps(step: Any) -> int:
    """Returns how many characters steps make of one at most.

    Raises ValueError if these are too many, or a regular expression repeats what it
    repeats, as in `(a+)+`, which takes exponential time.
    """
    if not isinstance(step, dict | list):
        return 1
    parts = step.values() if isinstance(step, dict) else step
    growth = math.prod(map(_check_steps, parts))
    if isinstance(step, dict):
        if isinstance(pattern := step.get("Regex"), str) and _repeats(pattern):
            raise ValueError(f"its regular expression {pattern!r} repeats repetitions")
        if step.get("type") == "Replace":
            growth *= max(1, len(step["content"]))
    if growth > _MOST_GROWTH:
        raise ValueError(f"its steps make more than {_MOST_GROWTH} characters of one")
    return growth


def _repeats(pattern: str) -> bool:
    """Checks whether a group with an unbounded repetition is repeated, unboundedly."""
    pattern = re.sub(r"\\.", "x", pattern)
    pattern = re.sub(r"\[\^?\]?[^\]]*\]", "x", pattern)
    pattern = re.sub(r"([*+?])\+", "x", pattern)  # possessive: does not go back
    while group := re.search(r"\(([^()]*)\)", pattern):
        is_long = re.search(_UNBOUNDED, group[1]) and not group[1].startswith("?>")
        after = pattern[group.end() :]
        if is_long and re.match(_UNBOUNDED, after):
            return True
        pattern = pattern[: group.start()] + ("x+x" if is_long else "x") + after
    return False


def _of_library(content: str) -> Any:
    contents = json.loads(content)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        _check_steps(contents.get(name))
    tokenizer = library().Tokenizer.from_str(content)
    tokenizer.no_truncation()  # windows are cut here, not there
    tokenizer.no_padding()
    return tokenizer


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
