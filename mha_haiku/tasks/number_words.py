"""Translate numbers in words: from English to German, or between other languages."""

import dataclasses
import functools
import hashlib
import itertools
import json
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mha_haiku import checks, fields
from mha_haiku.tasks import base, sequence_to_sequence, spelling, tokenization

_TOKENIZERS = {
    "characters": lambda words, most: tokenization.Characters.train(
        "".join(words), most
    ),
    "bpe": lambda words, most: tokenization.BytePairs.train("\n".join(words), most),
}
_LARGEST_VOCABULARY = 2**14


def _language(name: str, value: Any) -> str:
    """Checks that a value is a language of `num2words`."""
    return checks.choice(name, value, spelling.languages())


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberWords(sequence_to_sequence.PairsTask):
    """The source is a number in words, the target the same one in another language.

    Words are those of the package `num2words`. German says units before tens, so the
    source words that a target's letters come from are known, and not in order; see
    `alignment`. Example, 34 from English to German, S = 11, T = 15:

        inputs   t h i r t y - f o u r
        targets  v i e r u n d d r e i ß i g <end>
        weights  1 1 1 1 1 1 1 1 1 1 1 1 1 1 1

    The hash of a number says whether it is held out: no number is in both parts. S and
    T are those of the longest words. Tokenizers are trained on all numbers.

    Metric: accuracy and exact match; of answers that a model has decoded see `score`.
    Baseline: see `sequence_to_sequence.unigram_baseline`.

    Attributes:
      source_language: The source's, a code that `num2words` knows, such as "en".
      target_language: The target's.
      largest: Numbers are 0 to `largest`, each as likely as another.
      tokenizer: What a token is, "characters" or "bpe", which merges common pairs of
        bytes.
      vocabulary_size: The largest number of tokens of either language.
      held_out_fraction: The share of the numbers to evaluate on.
      kept: What a run stored of this task; the words must be those of the run.
    """

    name: ClassVar[str] = "number_words"
    baseline_name = "unigram"
    source_language: str = fields.option(
        "en", "language of the source, as num2words names it", _language
    )
    target_language: str = fields.option(
        "de", "language of the target, as num2words names it", _language
    )
    largest: int = fields.option(
        9_999, "numbers are 0 to largest", fields.integer(1, spelling.LARGEST)
    )
    tokenizer: str = fields.option(
        "characters",
        "what a token is (bpe: byte-pair encoding)",
        fields.OneOf(_TOKENIZERS),
    )
    vocabulary_size: int = fields.option(
        320,
        "largest number of tokens of either language",
        fields.integer(2, _LARGEST_VOCABULARY),
    )
    held_out_fraction: float = fields.option(
        0.1, "share of the numbers to evaluate on", checks.fraction
    )

    kept: dataclasses.InitVar[base.Kept | None] = None

    def __post_init__(self, kept: base.Kept | None):
        object.__setattr__(self, "_kept", kept)
        if kept is not None:
            return  # checked when the run began; opening it needs no num2words
        super().__post_init__()
        _ = self._split  # spells all numbers, so that errors show now

    @property
    def sequence_length(self) -> int:
        """S, tokens of the longest source."""
        return self._source.longest

    @property
    def target_length(self) -> int:
        """T, tokens of the longest target and the end token."""
        return self._target.longest + 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the source language."""
        return self._source.tokenizer.num_tokens

    @property
    def num_target_tokens(self) -> int:
        """Number of tokens of the target language."""
        return self._target.tokenizer.num_tokens

    @property
    def train_data(self) -> sequence_to_sequence.Pairs:
        """Numbers to train on."""
        return self._split[0]

    @property
    def held_out_data(self) -> sequence_to_sequence.Pairs:
        """Numbers to evaluate on."""
        return self._split[1]

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """The unigram predictor; see `sequence_to_sequence.unigram_baseline`."""
        return sequence_to_sequence.unigram_baseline(*self._split, self.num_classes)

    def keep(self) -> base.Kept:
        """Returns both tokenizers and lengths, and the words' name and sha256."""
        if self._kept is not None:
            return self._kept
        stored = [
            (json.loads(side.tokenizer.to_json()), side.longest) for side in self._sides
        ]
        name = (
            f"num2words {spelling.version()}, {self.source_language} to "
            f"{self.target_language}"
        )
        text = {"name": name, "sha256": self._sha256}
        return base.Kept(json.dumps(stored) + "\n", text)

    def token_label(self, token: int) -> str:
        """Returns the text of a token of the source language."""
        return self._source.tokenizer.label(token)

    def target_label(self, token: int) -> str:
        """Returns the text of a token of the target language."""
        return self._target.tokenizer.label(token)

    def piece(self, token: int) -> bytes:
        """Returns what a class adds to a text in the target language, as UTF-8."""
        if token >= self.num_target_tokens:
            return self.class_label(token).encode()
        return self._target.tokenizer.piece(token)

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a user's number.

        Args:
          text: A number in words of the source language, or in digits.

        Returns:
          `[s]` int32.

        Raises:
          ConfigError: If it is empty, has characters that no number's words have, or
            is a larger number than 999,999.
        """
        words = text.strip()
        if words.isdecimal():
            with checks.user_mistakes():
                number = checks.integer_in("text", int(words), 0, spelling.LARGEST)
            words = spelling.word(self.source_language, number)
        if not words:
            raise checks.ConfigError(
                f"text must be a number in words for {self.name}, got {text!r}."
            )
        self._source.tokenizer.check_known(words)
        return self._source.tokenizer.encode(words)

    def alignment(self, example: base.Example) -> np.ndarray | None:
        """Returns which letters of the source say what a target's letters say.

        Letters of units, tens, hundreds and thousands, and of the words "hundred" and
        "thousand" belong together in both languages; "and" and the end token belong to
        none. See `spelling.parts`.

        Args:
          example: One example.

        Returns:
          `[T, S]` booleans; None: the source is not a number of this task.
        """
        return self._aligned(example, lambda meaning: True)

    def inverted_alignment(self, example: base.Example) -> np.ndarray | None:
        """Returns `alignment` of units and tens alone, where they change their order.

        As in twenty-one, "einundzwanzig"; those of the thousands count, too. The matrix
        is empty where there are none, as in twenty and in thirteen.

        Args:
          example: One example.
        """
        number = self._number(example)
        if number is None:
            return None
        wanted = set()
        for of in ("", " of thousands"):
            pair = (f"units{of}", f"tens{of}")
            distances = [_distance(side, number, *pair) for side in self._sides]
            if np.prod(distances) < 0:
                wanted.update(pair)
        return self._aligned(example, wanted.__contains__)

    def _aligned(self, example, is_wanted) -> np.ndarray | None:
        number = self._number(example)
        if number is None:
            return None
        aligned = np.zeros((self.target_length, self.sequence_length), bool)
        source, target = (
            _tokens_of_parts(side, number) for side in (self._source, self._target)
        )
        for meaning, rows in target:
            for other, columns in source:
                if meaning == other and is_wanted(meaning):
                    aligned[np.ix_(rows, columns)] = True
        return aligned

    def _number(self, example) -> int | None:
        tokens = np.asarray(example.inputs)[: example.lengths].tolist()
        word = b"".join(map(self._source.tokenizer.piece, tokens)).decode(
            errors="replace"
        )
        return self._numbers.get(word)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        words = spelling.words(self.source_language, self.largest)
        return {word: number for number, word in enumerate(words)}

    @property
    def _words(self) -> tuple[list[str], list[str]]:
        """The words of all numbers in both languages."""
        languages = (self.source_language, self.target_language)
        return tuple(spelling.words(each, self.largest) for each in languages)

    @property
    def _source(self) -> "_Side":
        return self._sides[0]

    @property
    def _target(self) -> "_Side":
        return self._sides[1]

    @functools.cached_property
    def _sides(self) -> tuple["_Side", "_Side"]:
        languages = (self.source_language, self.target_language)
        if self._kept is not None:
            stored = json.loads(self._kept.tokenizer)
            return tuple(
                _Side(language, tokenization.from_json(json.dumps(tokenizer)), length)
                for language, (tokenizer, length) in zip(languages, stored, strict=True)
            )
        sides = []
        for language, words in zip(languages, self._words, strict=True):
            tokenizer = _TOKENIZERS[self.tokenizer](words, self.vocabulary_size)
            length = int(tokenizer.encode_each(words)[1].max())
            sides.append(_Side(language, tokenizer, length))
        return tuple(sides)

    @functools.cached_property
    def _split(self) -> tuple[sequence_to_sequence.Pairs, sequence_to_sequence.Pairs]:
        if self._kept is not None and self._kept.text["sha256"] != self._sha256:
            raise checks.ConfigError(
                "The words of num2words are not those that the run has learnt from, "
                f"{self._kept.text['name']}.\nInstall that; words of your own do not "
                "need it."
            )
        arrays = []
        lengths = (self.sequence_length, self.target_length)
        for side, words, length in zip(self._sides, self._words, lengths, strict=True):
            tokens, row_lengths = side.tokenizer.encode_each(words)
            padded = sequence_to_sequence.padded(tokens, row_lengths, length)
            arrays += [padded, row_lengths]
        pairs = sequence_to_sequence.Pairs(*arrays)
        held_out = np.array(
            [
                sequence_to_sequence.is_held_out(str(number), self.held_out_fraction)
                for number in range(self.largest + 1)
            ]
        )
        for part, size in (("training", ~held_out), ("held-out", held_out)):
            if not size.any():
                raise checks.ConfigError(
                    f"held_out_fraction must leave a number to the {part} part, got "
                    f"{self.held_out_fraction!r} with largest {self.largest}."
                )
        return pairs.at(~held_out), pairs.at(held_out)

    @functools.cached_property
    def _sha256(self) -> str:
        words = "\n".join(itertools.chain(*self._words))
        return hashlib.sha256(words.encode()).hexdigest()


class _Side(NamedTuple):
    """What is known of one of the two languages."""

    language: str
    tokenizer: tokenization.Characters | tokenization.BytePairs
    longest: int  # tokens of the longest word


def _distance(side: _Side, number: int, one: str, other: str) -> int:
    """Returns how far one part begins behind the other; 0 unless both are there."""
    start = {part.meaning: part.start for part in spelling.parts(side.language, number)}
    return start[one] - start[other] if one in start and other in start else 0


def _tokens_of_parts(side: _Side, number: int) -> list[tuple[str, np.ndarray]]:
    """Returns the meanings of a number's parts, each with the indices of its tokens."""
    spans = np.array(side.tokenizer.spans(spelling.word(side.language, number)))
    start, stop = spans.T
    return [
        (part.meaning, np.flatnonzero((start < part.stop) & (part.start < stop)))
        for part in spelling.parts(side.language, number)
    ]
