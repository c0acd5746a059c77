"""Sentences: inputs without targets."""

import pathlib

import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.tasks import text_tasks

TEXT = """A first sentence of
seven words. Too short. Is this one a question? Yes, it is

one paragraph ends; this has no stop

A first sentence of seven words. And here is
the last one!
"""


def test_sentences_end_with_a_stop_and_are_there_once():
    assert text_tasks.sentences(TEXT) == [
        "A first sentence of seven words.",
        "Is this one a question?",
        "And here is the last one!",
    ]


@pytest.fixture
def make(tmp_path):
    """A function that makes the task over words `w0 ... w<n>` in 20 sentences."""

    def make(length=13, around=((), ())):
        words = [f"Number {chr(97 + n)} is here today." for n in range(20)]
        pathlib.Path(tmp_path, "text").write_text(" ".join(words))
        task = tasks.make(
            "sentences",
            sequence_length=length,
            path=str(tmp_path / "text"),
            held_out_fraction=0.5,
        )
        type(task.encoder).before, type(task.encoder).after = around
        return task

    yield make
    tokenizer = type(make().encoder)
    tokenizer.before = tokenizer.after = ()


def test_example_is_a_padded_sentence_between_special_tokens(make, sampled):
    task = make(30, ((90,), (91, 92)))
    batch = sampled(task, indices=np.arange(64))
    assert batch.inputs.shape == (64, 30)
    assert not batch.weights.any() and task.metrics == ("drift",)
    seen = set()
    for row, length in zip(batch.inputs, batch.lengths, strict=True):
        assert row[0] == 90 and list(row[length - 2 : length]) == [91, 92]
        assert not row[length:].any()
        seen.add("".join(map(task.encoder.label, row[1 : length - 2])))
    assert len(seen) > 5
    assert seen <= {f"Number {chr(97 + n)} is here today." for n in range(10)}
    held_out = {tuple(row) for row in task.held_out_data.inputs}
    assert not held_out & {tuple(row) for row in task.train_data.inputs}


def test_long_sentences_are_cut_and_ends_stay(make):
    task = make(7, ((90,), (91,)))
    tokens, lengths = task.train_data.inputs, task.train_data.lengths
    assert tokens.shape == (10, 7)
    assert (lengths == 7).all() and (tokens[:, 0] == 90).all()
    assert (tokens[:, -1] == 91).all()


def test_text_without_sentences_is_refused(tmp_path):
    (tmp_path / "text").write_text("no stop " * 40)
    task = tasks.make("sentences", path=str(tmp_path / "text"), sequence_length=6)
    with pytest.raises(ConfigError, match="path must have sentences in its held-out"):
        _ = task.held_out_data
