"""Numbers in words, in the languages of `num2words`, and which letters say which digit.

What is known of a language is read off its words: the word of 34,000 begins with the
word of 34, in which the words of 4 and of 30 are found at either end.
"""

import functools
import os.path
import unicodedata
from typing import NamedTuple

from mha_haiku.core import checks
from mha_haiku.training.tasks import base

LARGEST = 99_999


class Part(NamedTuple):
    """Letters of a number's word that say one part of the number."""

    # A digit's place, "units", "tens" or "hundreds", or the word "hundred"; of the
    # thousands "units of thousands" and so on; or the word "thousand".
    meaning: str
    start: int  # the first letter
    stop: int  # behind the last letter


def languages() -> tuple[str, ...]:
    """Lists the codes of all languages, such as "en" and "de"."""
    return tuple(_num2words().CONVERTER_CLASSES)


@functools.lru_cache(2**16)
def word(language: str, number: int) -> str:
    """Spells out a number: `word("de", 34)` is "vierunddreißig"."""
    try:
        return _num2words().num2words(number, lang=language)
    except Exception as error:  # of any kind, as languages are unequally complete
        raise checks.ConfigError(
            f"num2words cannot say {number} in the language {language!r}: {error!r}."
        ) from error


@functools.lru_cache(4)
def words(language: str, largest: int) -> list[str]:
    """Spells out the numbers from 0 to `largest`, in about 0.1 ms each."""
    return [word(language, number) for number in range(largest + 1)]


@functools.lru_cache(2**16)
def parts(language: str, number: int) -> tuple[Part, ...]:
    """Splits a number's word into parts by meaning, in the order of the meanings.

    Letters of "and" or "und" say nothing. A word may say two things at once, 13 its
    tens and units, Spanish "quinientos" a digit and that it is of hundreds: it is
    there twice. Example, 134 in German, "einhundertvierunddreißig":

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
        for each in parts(language, count)
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
            for each in parts(language, rest)
            if each.stop + shift > first
        ]
    return tuple(each for each in found if each.start < each.stop)


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
    for letter in word(language, number):
        plain, *marks = unicodedata.normalize("NFD", letter)
        letters.append(plain if all(map(unicodedata.combining, marks)) else letter)
    return "".join(letters)


def _beginning(said: str, own: str) -> int:
    """Counts the letters of `own` with which a word begins.

    `own` may have lost its last letter, as "eins" in "einhundert"; 0: it is not there.
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
    with base.needed("num2words", "task.name 'number_words'"):
        import num2words
    return num2words
