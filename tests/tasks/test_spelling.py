import pytest

from mha_haiku.core import checks
from mha_haiku.training.tasks import spelling


def said(language, number):
    word = spelling.word(language, number)
    parts = spelling.parts(language, number)
    return [(part.meaning, word[part.start : part.stop]) for part in parts]


@pytest.mark.parametrize(
    ("language", "number", "expected"),
    [
        ("en", 0, "units:zero"),
        ("en", 34, "tens:thirty units:four"),
        ("de", 34, "units:vier tens:dreißig"),
        ("de", 13, "tens:dreizehn units:dreizehn"),
        ("de", 20, "tens:zwanzig"),
        ("de", 101, "hundreds:ein hundred:hundert units:eins"),
        ("de", 121, "hundreds:ein hundred:hundert units:ein tens:zwanzig"),
        ("nl", 34, "units:vier tens:dertig"),
        ("nl", 101, "hundreds:honderd hundred:honderd units:één"),
        ("nl", 21, "units:een tens:twintig"),
        ("it", 123, "hundreds:cento hundred:cento tens:venti units:tre"),
        ("it", 203, "hundreds:due hundred:cento units:tré"),
        ("da", 55, "units:fem tens:halvtreds"),
        ("fr", 78, "tens:soixante-dix units:huit"),
        ("es", 34, "tens:treinta units:cuatro"),
        ("es", 21, "tens:veint units:uno"),
        ("es", 507, "hundreds:quinientos hundred:quinientos units:siete"),
        ("fr", 1001, "thousand:mille units:un"),
    ],
)
def test_letters_of_each_part_by_hand(language, number, expected):
    assert said(language, number) == [
        tuple(each.split(":")) for each in expected.split()
    ]


def test_parts_of_thousands_have_meanings_of_their_own():
    assert (
        spelling.word("de", 34_256) == "vierunddreißigtausendzweihundertsechsundfünfzig"
    )
    assert said("de", 34_256) == [
        ("units of thousands", "vier"),
        ("tens of thousands", "dreißig"),
        ("thousand", "tausend"),
        ("hundreds", "zwei"),
        ("hundred", "hundert"),
        ("units", "sechs"),
        ("tens", "fünfzig"),
    ]
    assert [each[0] for each in said("en", 700_000)] == [
        "hundreds of thousands",
        "hundred of thousands",
        "thousand",
    ]


@pytest.mark.parametrize("language", ["en", "de", "nl", "fr", "es", "it", "sv"])
def test_parts_lie_in_the_word_and_name_every_digit(language):
    names = ["units", "tens", "hundreds"]
    names += [f"{name} of thousands" for name in names]
    for number in range(7, 100_000, 601):
        word, found = spelling.word(language, number), spelling.parts(language, number)
        assert all(0 <= part.start < part.stop <= len(word) for part in found)
        digits = str(number)[::-1]
        wanted = {names[i] for i, digit in enumerate(digits) if digit != "0"}
        # Some languages leave out the 1 of 1,000: "mille".
        missing = wanted - {part.meaning for part in found}
        assert missing <= {"units of thousands"} and (not missing or digits[3] == "1")


@pytest.mark.parametrize("language", ["en", "de", "da", "hu"])
def test_words_are_those_of_num2words(language):
    from num2words import num2words

    words = spelling.words(language, 9_000)
    assert len(words) == 9_001
    for number in range(0, 9_001, 17):
        assert words[number] == num2words(number, lang=language)


def test_number_that_a_language_has_no_word_for_is_refused():
    with pytest.raises(
        checks.ConfigError, match="cannot say 1100 in the language 'am'"
    ):
        spelling.words("am", 2000)
