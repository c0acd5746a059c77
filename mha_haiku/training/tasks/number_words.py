"""Translate numbers in words: from English to German, or between other languages."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberWords(sequence_to_sequence.TextPairsTask):
    """The source is a number in words, the target the same one in another language.

    Words come from the package `num2words`. German says units before tens, so the
    source words that a target's letters come from are known, and not in order; see
    `alignments`. Example, 34 from English to German, S = 11, T = 15:

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
        9_999,
        "numbers are 0 to largest; preparing 10,000 takes 10 to 30 s",
        fields.integer(1, spelling.LARGEST),
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
        return self._lengths[0]

    @property
    def target_length(self) -> int:
        return self._lengths[1]

    def _symbols(self) -> str:
        stored = {
            "tokenizers": [json.loads(each.to_json()) for each in self._tokenizers],
            "lengths": self._lengths,
        }
        return json.dumps(stored) + "\n"

    @functools.cached_property
    def _text(self) -> dict[str, str]:
        languages = " to ".join(self._languages)
        text = "\n".join(itertools.chain(*self._words))
        return {
            "name": f"num2words {importlib.metadata.version('num2words')}, {languages}",
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }

    def encode(self, text: str) -> np.ndarray:
        words = text.strip()
        if words.isdecimal():
            with checks.user_mistakes():
                number = checks.integer_in("text", int(words), 0, spelling.LARGEST)
            words = spelling.word(self.source_language, number)
        if not words:
            raise checks.ConfigError(
                f"text must be a number in words for {self.name}, got {text!r}."
            )
        return super().encode(words)

    def alignments(self, example: base.Example) -> dict[str, np.ndarray]:
        """Returns which letters of the source say what a target's letters say.

        "aligned" has units, tens, hundreds and thousands, and the words "hundred" and
        "thousand"; "and" and the end token belong to none; see `spelling.parts`.
        "inverted" has only units and tens, also of the thousands, that change their
        order, as in twenty-one, "einundzwanzig". {}: the source is not a number of this
        task, or the target is not its word.
        """
        number = self._numbers.get(self.question(example))
        if number is None or self.answer(example.targets) != self._words[1][number]:
            return {}
        parts = [spelling.parts(language, number) for language in self._languages]
        starts = [{part.meaning: part.start for part in each} for each in parts]
        turned = set()
        for of in ("", " of thousands"):
            units, tens = f"units{of}", f"tens{of}"
            if all(units in each and tens in each for each in starts):
                if np.prod([each[units] - each[tens] for each in starts]) < 0:
                    turned |= {units, tens}
        columns, rows = (
            _tokens_of_parts(tokenizer.spans(spelling.word(language, number)), each)
            for tokenizer, language, each in zip(
                self._tokenizers, self._languages, parts, strict=True
            )
        )
        aligned = np.zeros((self.target_length, self.sequence_length), bool)
        inverted = np.zeros_like(aligned)
        for meaning, row in rows:
            for other, column in columns:
                if meaning == other:
                    aligned[np.ix_(row, column)] = True
                    inverted[np.ix_(row, column)] |= meaning in turned
        return {"aligned": aligned, "inverted": inverted}

    @property
    def _languages(self) -> tuple[str, str]:
        return self.source_language, self.target_language

    @functools.cached_property
    def _words(self) -> tuple[list[str], list[str]]:
        known = spelling.languages()
        checks.choice("source_language", self.source_language, known)
        checks.choice("target_language", self.target_language, known)
        return tuple(spelling.words(each, self.largest) for each in self._languages)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._words[0])}

    @functools.cached_property
    def _tokenizers(self) -> tuple[tokenization.Tokenizer, tokenization.Tokenizer]:
        if self._kept is not None:
            return super()._tokenizers
        train = tokenization.TRAINERS[self.tokenizer]
        # With a word on each line no byte pair is of two.
        between = "" if self.tokenizer == "characters" else "\n"
        texts = map(between.join, self._words)
        return tuple(train(text, self.vocabulary_size) for text in texts)

    @functools.cached_property
    def _lengths(self) -> tuple[int, int]:
        if self._kept is not None:
            return tuple(json.loads(self._kept.tokenizer)["lengths"])
        return self._pairs.sources.shape[1], self._pairs.targets.shape[1]

    @functools.cached_property
    def _pairs(self) -> sequence_to_sequence.Pairs:
        sources, targets = (
            list(map(tokenizer.encode, words))
            for tokenizer, words in zip(self._tokenizers, self._words, strict=True)
        )
        return sequence_to_sequence.Pairs.of(sources, targets)

    def _parts(self) -> tuple[sequence_to_sequence.Pairs, sequence_to_sequence.Pairs]:
        fraction, numbers = self.held_out_fraction, range(self.largest + 1)
        held_out = [sampling.is_held_out(str(number), fraction) for number in numbers]
        return base.split(self._pairs, np.array(held_out), fraction, "numbers")


def _tokens_of_parts(spans, parts) -> list[tuple[str, np.ndarray]]:
    start, stop = np.array(spans).T
    return [
        (part.meaning, np.flatnonzero((start < part.stop) & (part.start < stop)))
        for part in parts
    ]
