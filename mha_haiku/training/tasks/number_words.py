"""Translate numbers in words: from English to German, or between other languages."""

import dataclasses
import functools
import hashlib
import itertools
import json
import random
from typing import ClassVar

import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import (
    base,
    sampling,
    sequence_to_sequence,
    spelling,
    tokenization,
)

_LEARNT_FROM = 10_000  # numbers, by byte pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberWords(sequence_to_sequence.TextPairsTask):
    """The source is a number in words, the target the same one in another language.

    Words come from the package `num2words`. German says units before tens, so the
    source words that a target's letters come from are known, and not in order; see
    `alignment`. Example, 34 from English to German, S = 11, T = 15:

        inputs   t h i r t y - f o u r
        targets  v i e r u n d d r e i ß i g <end>
        weights  1 1 1 1 1 1 1 1 1 1 1 1 1 1 1

    The hash of a number says whether it is held out: no number is in both parts. S and
    T are the lengths of the longest words. Tokenizers are trained on all numbers.

    Metric: accuracy and exact match; of answers that a model has decoded see `score`.
    Baseline: see `PairsTask.baseline`.
    """

    name: ClassVar[str] = "number_words"
    source_language: str = fields.field(
        "en", "language of the source, as num2words names it"
    )
    target_language: str = fields.field(
        "de", "language of the target, as num2words names it"
    )
    largest: int = fields.field(
        9_999, "numbers are 0 to largest", fields.integer(1, spelling.LARGEST)
    )
    tokenizer: str = fields.field(
        "characters",
        "what a token is (bpe: byte-pair encoding)",
        fields.OneOf(tokenization.TRAINERS),
    )
    vocabulary_size: int = fields.field(
        320,
        "largest number of tokens of either language",
        fields.integer(2, sequence_to_sequence.LARGEST_VOCABULARY),
    )
    held_out_fraction: float = fields.field(
        0.1, "share of the numbers to evaluate on", checks.fraction
    )

    @property
    def sequence_length(self) -> int:
        """S, tokens of the longest source."""
        return self._lengths[0]

    @property
    def target_length(self) -> int:
        """T, tokens of the longest target and the end token."""
        return self._lengths[1]

    def _to_keep(self) -> base.Kept:
        stored = {
            "tokenizers": [json.loads(each.to_json()) for each in self._tokenizers],
            "lengths": self._lengths,
        }
        return base.Kept(json.dumps(stored) + "\n", self._text(self._words))

    def _text(self, words) -> dict[str, str]:
        languages = " to ".join(self._languages)
        text = "\n".join(itertools.chain(*words))
        return {
            "name": f"num2words {spelling.version()}, {languages}",
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }

    def encode(self, text: str) -> np.ndarray:
        """Encodes a user's number, in digits or words of the source, as tokens."""
        words = text.strip()
        if words.isdecimal():
            with checks.user_mistakes():
                number = checks.integer_in("text", int(words), 0, spelling.LARGEST)
            words = spelling.word(self.source_language, number)
        if not words:
            raise checks.ConfigError(
                f"text must be a number in words for {self.name}, got {text!r}."
            )
        self._tokenizers[0].check_known(words)
        return self.fitting(self._tokenizers[0].encode(words))

    def alignment(self, example: base.Example) -> np.ndarray | None:
        """Returns which letters of the source say what a target's letters say.

        Letters of units, tens, hundreds and thousands, and of the words "hundred" and
        "thousand" belong together in both languages; "and" and the end token belong to
        none. See `spelling.parts`.

        Returns:
          `[T, S]` booleans; None: the source is not a number of this task, or the
          target is not its word.
        """
        return self._aligned(example, lambda meaning: True)

    def inverted_alignment(self, example: base.Example) -> np.ndarray | None:
        """Returns `alignment` of units and tens alone, where they change their order.

        As in twenty-one, "einundzwanzig"; units and tens of the thousands count, too.
        The matrix is empty where there are none, as in twenty and in thirteen.
        """
        number = self._number(example)
        if number is None:
            return None
        wanted = set()
        for of in ("", " of thousands"):
            pair = (f"units{of}", f"tens{of}")
            distances = [_distance(each, number, *pair) for each in self._languages]
            if np.prod(distances) < 0:
                wanted.update(pair)
        return self._aligned(example, wanted.__contains__)

    def alignments(self, example: base.Example) -> dict[str, np.ndarray]:
        """Returns `alignment` as "aligned", `inverted_alignment` as "inverted"."""
        found = super().alignments(example)
        return found and found | {"inverted": self.inverted_alignment(example)}

    def _aligned(self, example, is_wanted) -> np.ndarray | None:
        number = self._number(example)
        if number is None or self.answer(example.targets) != self._words[1][number]:
            return None
        aligned = np.zeros((self.target_length, self.sequence_length), bool)
        source, target = (
            _tokens_of_parts(tokenizer, language, number)
            for tokenizer, language in zip(
                self._tokenizers, self._languages, strict=True
            )
        )
        for meaning, rows in target:
            for other, columns in source:
                if meaning == other and is_wanted(meaning):
                    aligned[np.ix_(rows, columns)] = True
        return aligned

    def _number(self, example) -> int | None:
        """Returns the number that an example's source says; None: it says none."""
        return self._numbers.get(self.question(example))

    @property
    def _languages(self) -> tuple[str, str]:
        return self.source_language, self.target_language

    @functools.cached_property
    def _words(self) -> tuple[list[str], list[str]]:
        """The words of all numbers in both languages."""
        known = spelling.languages()
        checks.choice("source_language", self.source_language, known)
        checks.choice("target_language", self.target_language, known)
        words = tuple(spelling.words(each, self.largest) for each in self._languages)
        self._check_same(self._text(words))
        return words

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._words[0])}

    @functools.cached_property
    def _tokenizers(self) -> tuple[tokenization.Tokenizer, tokenization.Tokenizer]:
        if self._kept is not None:
            stored = json.loads(self._kept.tokenizer)["tokenizers"]
            return tuple(map(tokenization.from_json, stored))
        train = tokenization.TRAINERS[self.tokenizer]
        if self.tokenizer == "characters":
            texts = map("".join, self._words)
        else:  # byte pairs are as common in fewer words, which take less time
            numbers = range(self.largest + 1)
            if len(numbers) > _LEARNT_FROM:
                numbers = random.Random(0).sample(numbers, _LEARNT_FROM)
            texts = ("\n".join(words[n] for n in numbers) for words in self._words)
        return tuple(train(text, self.vocabulary_size) for text in texts)

    @functools.cached_property
    def _lengths(self) -> tuple[int, int]:
        """S and T."""
        if self._kept is not None:
            return tuple(json.loads(self._kept.tokenizer)["lengths"])
        return self._pairs.sources.shape[1], self._pairs.targets.shape[1]

    @functools.cached_property
    def _pairs(self) -> sequence_to_sequence.Pairs:
        """The words of all numbers as tokens."""
        sources, targets = (
            tokenizer.encode_each(words)
            for tokenizer, words in zip(self._tokenizers, self._words, strict=True)
        )
        return sequence_to_sequence.Pairs.of(sources, targets)

    @functools.cached_property
    def _split(self) -> tuple[sequence_to_sequence.Pairs, sequence_to_sequence.Pairs]:
        fraction, count = self.held_out_fraction, self.largest + 1
        held_out = np.array(
            [sampling.is_held_out(str(number), fraction) for number in range(count)]
        )
        num_held_out = held_out.sum()
        base.check_parts(
            "held_out_fraction", fraction, count - num_held_out, num_held_out, "numbers"
        )
        return self._pairs.at(~held_out), self._pairs.at(held_out)


def _distance(language: str, number: int, one: str, other: str) -> int:
    """Returns how far one part begins behind the other; 0 unless both are there."""
    start = {part.meaning: part.start for part in spelling.parts(language, number)}
    return start[one] - start[other] if one in start and other in start else 0


def _tokens_of_parts(tokenizer, language, number) -> list[tuple[str, np.ndarray]]:
    """Returns the meanings of a number's parts, each with the indices of its tokens."""
    spans = np.array(tokenizer.spans(spelling.word(language, number)))
    start, stop = spans.T
    return [
        (part.meaning, np.flatnonzero((start < part.stop) & (part.start < stop)))
        for part in spelling.parts(language, number)
    ]
