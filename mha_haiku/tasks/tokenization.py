"""Text to integers and back: characters, or byte pairs trained on the text."""

import dataclasses
import functools
import json
from collections import Counter
from typing import Any, Protocol

import numpy as np

from mha_haiku import checks

_NUM_BYTES = 256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """Encodes any text, and labels each of its tokens."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, 0 to num_tokens - 1."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of `text`, `[T]` int32."""

    def label(self, token: int) -> str:
        """Returns the text of a token."""

    def to_json(self) -> str:
        """Returns a text from which `from_json` makes the same tokenizer."""


@dataclasses.dataclass(frozen=True)
class Characters:
    """A token is a character; token 0 stands for all unknown characters.

    Attributes:
      alphabet: The known characters, in the order of their tokens 1, 2, ...
    """

    alphabet: str

    @classmethod
    def train(cls, text: str, vocabulary_size: int) -> "Characters":
        """Returns the tokens of `text`'s characters, the commonest if there are more.

        Args:
          text: The text to train on.
          vocabulary_size: Upper limit of `num_tokens`, at least 2.
        """
        checks.integer_in("vocabulary_size", vocabulary_size, 2, None)
        counts = Counter(text)
        commonest = sorted(counts, key=lambda c: (-counts[c], c))
        return cls("".join(sorted(commonest[: vocabulary_size - 1])))

    def to_json(self) -> str:
        """Returns the alphabet, in an object."""
        return json.dumps({"characters": self.alphabet}) + "\n"

    @property
    def num_tokens(self) -> int:
        """Number of known characters, and one for the unknown."""
        return len(self.alphabet) + 1

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of `text`, `[T]` int32, one per character."""
        code_points = _code_points(text)
        place = np.searchsorted(self._alphabet_code_points, code_points)
        place = np.minimum(place, len(self.alphabet) - 1)
        known = self._alphabet_code_points[place] == code_points
        return np.where(known, place + 1, 0).astype(np.int32)

    def label(self, token: int) -> str:
        """Returns the character, or the replacement character for the unknown ones."""
        return (_UNKNOWN + self.alphabet)[token]

    @functools.cached_property
    def _alphabet_code_points(self) -> np.ndarray:
        return _code_points(self.alphabet)


@dataclasses.dataclass(frozen=True)
class BytePairs:
    """A token is a run of bytes: a single byte, or a run merged from shorter ones.

    As every byte is a token, no text is unknown.

    Attributes:
      tokenizer: A `tokenizers.Tokenizer` of byte-level BPE.
    """

    tokenizer: Any

    @classmethod
    def train(cls, text: str, vocabulary_size: int) -> "BytePairs":
        """Returns the tokenizer that merges byte pairs, the commonest in `text` first.

        Args:
          text: The text to train on.
          vocabulary_size: Number of tokens, at least 256; fewer if `text` has no more
            pairs to merge.
        """
        checks.integer_in("vocabulary_size", vocabulary_size, _NUM_BYTES, None)
        tokenizers = _tokenizers()
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_lines(text), trainer)
        return cls(tokenizer)

    def to_json(self) -> str:
        """Returns the JSON of `tokenizers`, which other tools read too."""
        return self.tokenizer.to_str(pretty=True) + "\n"

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of bytes and of merges."""
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of `text`, `[T]` int32."""
        encodings = self.tokenizer.encode_batch(_lines(text))
        return np.concatenate([np.zeros(0), *(e.ids for e in encodings)]).astype(
            np.int32
        )

    def label(self, token: int) -> str:
        r"""Returns the token's text; bytes that are not a whole character as `\xe2`."""
        letters = self.tokenizer.id_to_token(token)
        run = bytes(_byte_of_letter()[letter] for letter in letters)
        return run.decode("utf-8", errors="backslashreplace")


def from_json(text: str) -> Tokenizer:
    """Returns the tokenizer that `to_json` described.

    Raises:
      ValueError: If it describes none.
    """
    contents = json.loads(text)
    if "characters" in contents:
        return Characters(contents["characters"])
    return BytePairs(_tokenizers().Tokenizer.from_str(text))


def _tokenizers():
    try:
        import tokenizers
    except ImportError as error:
        raise checks.ConfigError(
            "tokenizer 'bpe' needs tokenizers: pip install 'mha_haiku[data]'."
        ) from error
    return tokenizers


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Returns the byte that each letter of byte-level BPE stands for.

    Printable bytes stand for themselves, the others are moved to U+0100 and after.

    Source: Radford et al. 2019, https://github.com/openai/gpt-2 (bytes_to_unicode).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    moved = {chr(_NUM_BYTES + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved
