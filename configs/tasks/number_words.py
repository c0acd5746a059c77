"""Translate numbers in words: from English to German, or between other languages."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os.path
import unicodedata
from typing import ClassVar, NamedTuple

import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import (
    base,
    sampling,
    sequence_to_sequence,
    tokenization,
)

LARGEST = 99_999


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberWords(sequence_to_sequence.TextPairsTask):
    """The source is a number in words, the target the same number in another language.

    Words come from the package `num2words`. German says units before tens, so it is
    known which source words a target's letters come from, and they are not in order;
    see `alignments`. Example, 34 from English to German, S = 11, T = 15:

        inputs   t h i r t y - f o u r
        targets  v i e r u n d d r e i ß i g <end>
        weights  1 1 1 1 1 1 1 1 1 1 1 1 1 1 1

    The hash of a number says whether it is held out: no number is in both parts. S and
    T are the lengths of the longest words. Tokenizers are trained on all numbers.

    Metric: accuracy and exact match.
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
        fields.integer(1, LARGEST),
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
            "tokenizers": [
                json.loads(tokenizer.to_json()) for tokenizer in self._tokenizers
            ],
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
                number = checks.integer_in("text", int(words), 0, LARGEST)
            words = spell(self.source_language, number)
        if not words:
            raise checks.ConfigError(
                f"text must be a number in words for {self.name}, got {text!r}."
            )
        return super().encode(words)

    def alignments(self, example: base.Example) -> dict[str, np.ndarray]:
        """Returns which letters of the source a target's letters come from.

        "aligned" has units, tens, hundreds and thousands, and the words "hundred" and
        "thousand"; "and" and the end token belong to none; see `parts_of`.
        "inverted" has only units and tens, also of the thousands, that change their
        order, as in twenty-one, "einundzwanzig". {} if the source is not a number of
        this task, or the target is not its word.
        """
        number = self._numbers.get(self.question(example))
        if number is None or self.answer(example.targets) != self._words[1][number]:
            return {}
        parts = [parts_of(language, number) for language in self._languages]
        starts = [{part.meaning: part.start for part in side} for side in parts]
        turned = set()
        for of in ("", " of thousands"):
            units, tens = f"units{of}", f"tens{of}"
            if all(units in start_of and tens in start_of for start_of in starts):
                order = [start_of[units] - start_of[tens] for start_of in starts]
                if np.prod(order) < 0:
                    turned |= {units, tens}
        columns, rows = (
            _tokens_of_parts(tokenizer, spell(language, number), each)
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
        known = languages()
        checks.choice("source_language", self.source_language, known)
        checks.choice("target_language", self.target_language, known)
        return tuple(
            spell_up_to(language, self.largest) for language in self._languages
        )

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._words[0])}

    @functools.cached_property
    def _tokenizers(self) -> tuple[tokenization.Tokenizer, tokenization.Tokenizer]:
        if self._kept.tokenizer:
            return super()._tokenizers
        train = tokenization.TRAINERS[self.tokenizer]
        # With a word on each line no byte pair is of two.
        between = "" if self.tokenizer == "characters" else "\n"
        texts = map(between.join, self._words)
        return tuple(train(text, self.vocabulary_size) for text in texts)

    @functools.cached_property
    def _lengths(self) -> tuple[int, int]:
        if self._kept.tokenizer:
            with tokenization.errors_named("tokenizer.json"):
                lengths = json.loads(self._kept.tokenizer)["lengths"]
                return tuple(checks.positive_integer("lengths", x) for x in lengths)
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


def _tokens_of_parts(
    tokenizer: tokenization.Tokenizer, word: str, parts: tuple["Part", ...]
) -> list[tuple[str, np.ndarray]]:
    # The letter of each byte: a token may be a part of a letter.
    letters = np.repeat(np.arange(len(word)), [len(x.encode()) for x in word])
    stops = np.cumsum([len(tokenizer.piece(int(x))) for x in tokenizer.encode(word)])
    start, stop = letters[np.append(0, stops[:-1])], letters[stops - 1] + 1
    return [
        (part.meaning, np.flatnonzero((start < part.stop) & (part.start < stop)))
        for part in parts
    ]


class Part(NamedTuple):
    """Letters of a number's word that say one part of the number."""

    # A digit's place, "units", "tens" or "hundreds", or the word "hundred"; of the
    # thousands "units of thousands" and so on; or the word "thousand".
    meaning: str
    start: int  # the first letter
    stop: int  # after the last letter


def languages() -> tuple[str, ...]:
    """Lists the codes of all languages, such as "en" and "de"."""
    return tuple(_num2words().CONVERTER_CLASSES)


@functools.lru_cache(2**16)
def spell(language: str, number: int) -> str:
    """Spells out a number: `spell("de", 34)` is "vierunddreißig"."""
    try:
        return _num2words().num2words(number, lang=language)
    except Exception as error:  # of any kind, as languages are unequally complete
        raise checks.ConfigError(
            f"num2words cannot say {number} in the language {language!r}: {error!r}."
        ) from error


@functools.lru_cache(4)
def spell_up_to(language: str, largest: int) -> list[str]:
    """Spells out the numbers from 0 to `largest`, in about 0.1 ms each."""
    return [spell(language, number) for number in range(largest + 1)]


@functools.lru_cache(2**16)
def parts_of(language: str, number: int) -> tuple[Part, ...]:
    """Splits a number's word into parts by meaning, in the order of the meanings.

    The parts are derived from a language's words: the word of 34,000 begins with the
    word of 34, in which the words of 4 and of 30 are at either end. Letters of "and" or
    "und" belong to no part. A word may have two meanings at once, 13 its tens and
    units, Spanish "quinientos" a digit and the hundreds: then it appears twice.
    Example, 134 in German, "einhundertvierunddreißig":

        hundreds  ein
        hundred   hundert
        units     vier
        tens      dreißig
    """
    said = _plain(language, number)
    if number < 100:
        return _below_100(language, number)
    name, power = ("thousand", 1000) if number >= 1000 else ("hundred", 100)
    count, rest = divmod(number, power)
    head = _common_prefix(said, _plain(language, count * power))
    in_head = _beginning(said[:head], _plain(language, count))
    digits = [
        Part(
            "hundreds" if power == 100 else f"{each.meaning} of thousands",
            each.start,
            min(each.stop, in_head),
        )
        for each in parts_of(language, count)
        if each.start < in_head
    ]
    name_part = Part(name, *_letters(said, in_head, head))
    if power == 100 and not digits:
        digits = [Part("hundreds", *name_part[1:])]
    found = [*digits, name_part]
    if rest:
        tail = _plain(language, rest)
        shift = len(said) - len(tail)
        first = max(head, len(said) - _common_suffix(said, tail))
        found += [
            Part(each.meaning, max(each.start + shift, first), each.stop + shift)
            for each in parts_of(language, rest)
            if each.stop + shift > first
        ]
    return tuple(part for part in found if part.start < part.stop)


def _below_100(language: str, number: int) -> tuple[Part, ...]:
    said = _plain(language, number)
    tens, units = divmod(number, 10)
    if not tens:
        return (Part("units", 0, len(said)),)
    if not units:
        return (Part("tens", 0, len(said)),)
    if tens == 1:
        return Part("tens", 0, len(said)), Part("units", 0, len(said))
    word_of_tens, word_of_units = _plain(language, 10 * tens), _plain(language, units)
    first, last = _common_prefix(said, word_of_tens), _common_suffix(said, word_of_tens)
    if first >= last:
        at = said.rfind(word_of_units, first)
        if at < 0:
            units_part = Part("units", *_letters(said, first, len(said)))
        else:
            units_part = Part("units", at, at + len(word_of_units))
        return Part("tens", 0, first), units_part
    cut = len(said) - last
    of_units = _beginning(said[:cut], word_of_units) or cut
    return Part("units", *_letters(said, 0, of_units)), Part("tens", cut, len(said))


def _plain(language: str, number: int) -> str:
    """Spells out a number without accents, letter by letter: "een" for "één"."""
    letters = []
    for letter in spell(language, number):
        plain, *marks = unicodedata.normalize("NFD", letter)
        letters.append(plain if all(map(unicodedata.combining, marks)) else letter)
    return "".join(letters)


def _beginning(said: str, own: str) -> int:
    """Counts the letters of `own` with which a word begins.

    `own` may have lost its last letter, as "eins" in "einhundert"; 0 if it is absent.
    """
    common = _common_prefix(said, own)
    return common if common >= max(len(own) - 1, min(len(own), 3)) else 0


def _common_prefix(left: str, right: str) -> int:
    return len(os.path.commonprefix([left, right]))


def _common_suffix(left: str, right: str) -> int:
    return _common_prefix(left[::-1], right[::-1])


def _letters(said: str, start: int, stop: int) -> tuple[int, int]:
    """Trims signs and spaces off the ends of a range."""
    while start < stop and not said[start].isalpha():
        start += 1
    while start < stop and not said[stop - 1].isalpha():
        stop -= 1
    return start, stop


def _num2words():
    import num2words

    return num2words
