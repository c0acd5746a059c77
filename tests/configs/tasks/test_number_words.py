import functools
import sys

import jax
import numpy as np
import pytest

from configs.tasks import number_words
from mha_haiku import tasks
from mha_haiku.core import checks
from mha_haiku.training.runs import folders

NumberWords = tasks.of_name("number_words")


@functools.cache
def make(**options):
    return NumberWords(**{"largest": 150, **options})


def example(task, number):
    """Returns the example of a number, from whichever part has it."""
    for data in (task.train_data, task.held_out_data):
        for row in range(len(data.sources)):
            tokens = data.sources[row, : data.source_lengths[row]]
            if "".join(map(task.token_label, tokens)) == WORDS[number]:
                return jax.tree.map(np.asarray, task.pair(*(x[row] for x in data)))
    raise AssertionError(number)


WORDS = {34: "thirty-four", 121: "one hundred and twenty-one"}


def looks_at(task, example, matrix):
    """Returns pairs of text: runs of rows that look at the same source positions."""
    labels = task.labels(example)
    runs = []
    for row, target in zip(matrix, example.targets, strict=True):
        source = "".join(np.array(labels)[row])
        if runs and runs[-1][1] == source:
            runs[-1][0] += task.class_label(target)
        else:
            runs.append([task.class_label(target), source])
    return [tuple(run) for run in runs if run[1]]


def test_worked_example_is_thirty_four():
    task = make(largest=34, held_out_fraction=0.3)
    found = example(task, 34)
    rows = [line.split() for line in type(task).__doc__.splitlines()]
    rows = {row[0]: row[1:] for row in rows if row and row[0] in ("inputs", "targets")}
    assert "".join(rows["inputs"]) == WORDS[34]
    assert task.labels(found)[:11] == rows["inputs"]
    assert [task.class_label(c) for c in found.targets[:15]] == rows["targets"]
    assert found.weights.sum() == 15 == task.target_length - 2


@pytest.mark.parametrize(
    ("number", "inverted", "others"),
    [
        (34, [("vier", "four"), ("dreißig", "thirty")], []),
        (
            121,
            [("ein", "one"), ("zwanzig", "twenty")],
            [("ein", "one"), ("hundert", "hundred")],
        ),
    ],
)
def test_alignment_has_hundreds_which_are_not_inverted(number, inverted, others):
    task = make()
    found = example(task, number)
    sites = task.alignments(found)
    assert looks_at(task, found, sites["aligned"]) == others + inverted
    assert looks_at(task, found, sites["inverted"]) == inverted
    assert list(sites) == ["aligned", "inverted"]
    assert sites["aligned"].shape == (task.target_length, task.sequence_length)


def test_alignment_of_byte_pairs_has_the_tokens_of_the_letters():
    task = make(tokenizer="bpe", vocabulary_size=300)
    found = example(task, 34)
    aligned, inverted = task.alignments(found).values()
    np.testing.assert_array_equal(aligned, inverted)
    for word, source in (("vier", "four"), ("dreißig", "thirty")):
        rows = aligned[:, [source in label for label in task.labels(found)]].all(1)
        assert rows.any()
        assert task.answer(found.targets[rows]).endswith(word)  # or "unddreißig"


def test_source_that_is_no_number_has_no_alignment():
    task = make()
    found = example(task, 34)
    other = found._replace(inputs=found.inputs[::-1])
    assert task.alignments(other) == {}


@pytest.mark.parametrize("tokenizer", ["characters", "bpe"])
def test_no_number_is_in_both_parts_and_none_is_lost(tokenizer):
    task = make(tokenizer=tokenizer)
    parts = []
    for data in (task.train_data, task.held_out_data):
        rows = zip(data.targets, data.target_lengths, strict=True)
        parts.append({task.answer(row[:length]) for row, length in rows})
        assert len(parts[-1]) == len(data.sources)
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 151
    assert "vierunddreißig" in parts[0] | parts[1]


def test_words_and_digits_are_both_understood():
    task = make()
    expected = example(task, 34).inputs[:11]
    for text in ("thirty-four", " thirty-four ", "34"):
        np.testing.assert_array_equal(task.encode(text), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" ", "text must be a number in words for number_words, got ' '"),
        ("thirty+four", r"got '\+' at character 6"),
        ("1000000", "text must be an integer from 0 to 99999"),
    ],
)
def test_text_that_is_no_number_is_refused(text, message):
    with pytest.raises(checks.ConfigError, match=message):
        make().encode(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source_language": "xx"}, "source_language must be one of am, ar"),
        ({"target_language": "dee"}, "Did you mean 'de'"),
        ({"largest": 100_000}, "largest must be an integer from 1 to 99999"),
        (
            {"tokenizer": "bpe", "vocabulary_size": 100},
            "vocabulary_size must be .* 256",
        ),
        ({"held_out_fraction": 0}, "leave numbers to both parts, got 0"),
    ],
)
def test_mistakes_are_refused_by_name(options, message):
    with pytest.raises(checks.ConfigError, match=message):
        tasks.make("number_words", **{"largest": 40, **options})


@pytest.mark.parametrize("tokenizer", ["characters", "bpe"])
def test_run_opens_without_the_package(monkeypatch, make_config, tokenizer):
    task = make(tokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "num2words", None)
    again = NumberWords(largest=150, tokenizer=tokenizer, kept=task.keep())
    assert again.sequence_length == task.sequence_length
    assert again.target_length == task.target_length
    assert again.num_classes == task.num_classes
    config = make_config(
        model__family="encoder_decoder", model__embedding__max_length=64
    )
    assert folders.abstract_state(
        config, again, folders.make_model(config.model, again)
    )
    np.testing.assert_array_equal(again.encode("forty"), task.encode("forty"))
    assert again.keep() == task.keep()


def test_other_words_than_those_of_the_run_are_refused():
    kept = make().keep()
    with pytest.raises(checks.ConfigError, match="learned from other data"):
        _ = NumberWords(largest=151, kept=kept).train_data


def said(language, number):
    word = number_words.spell(language, number)
    parts = number_words.parts_of(language, number)
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
        number_words.spell("de", 34_256)
        == "vierunddreißigtausendzweihundertsechsundfünfzig"
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
        word, found = (
            number_words.spell(language, number),
            number_words.parts_of(language, number),
        )
        assert all(0 <= part.start < part.stop <= len(word) for part in found)
        digits = str(number)[::-1]
        wanted = {names[i] for i, digit in enumerate(digits) if digit != "0"}
        # Some languages leave out the 1 of 1,000: "mille".
        missing = wanted - {part.meaning for part in found}
        assert missing <= {"units of thousands"} and (not missing or digits[3] == "1")


def test_number_that_a_language_has_no_word_for_is_refused():
    with pytest.raises(
        checks.ConfigError, match="cannot say 1100 in the language 'am'"
    ):
        number_words.spell_up_to("am", 2000)
