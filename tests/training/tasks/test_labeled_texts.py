"""Labels of whole texts: the file, the split, the baseline and the tokens."""

import hashlib
import math

import jax
import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.tasks import labeled_texts
from tests.training.tasks.examples import sampled

ROWS = [(f"number {n} is {'even' if n % 2 == 0 else 'odd'}", n % 2) for n in range(40)]
NAMES = ("zero", "one")


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return str(path)


@pytest.fixture
def make(tmp_path):
    """A function that makes the task over `ROWS`, with options replaced."""
    lines = ["text,label", *(f"{text},{NAMES[n]}" for text, n in ROWS)]
    path = write(tmp_path / "rows.csv", "\n".join(lines) + "\n")

    def make(**options):
        options = {"sequence_length": 20, "held_out_fraction": 0.25} | options
        return tasks.make("labeled_texts", path=path, **options)

    return make


def test_example_is_cls_and_a_text_with_its_label(make):
    task = make()
    assert task.num_tokens == task.encoder.num_tokens + 1 and task.num_classes == 2
    batch = sampled(task, indices=np.arange(64))
    assert batch.inputs.shape == (64, 20) and batch.targets.shape == (64,)
    assert batch.targets.dtype == np.int32 and (batch.weights == 1).all()
    assert (batch.inputs[:, 0] == task.encoder.num_tokens).all()
    label_of = {text: NAMES[n] for text, n in ROWS}
    for i, length in enumerate(batch.lengths):
        row = jax.tree.map(lambda x, i=i: x[i], batch)
        text = "".join(task.labels(row)[1:length])
        assert task.labels(row)[0] == "[CLS]" and not row.inputs[length:].any()
        (whole,) = (each for each in label_of if each[:19] == text)
        assert task.class_label(int(row.targets)) == label_of[whole]


def test_sha256_of_a_text_decides_its_part(make):
    task = make()
    held_out = {text for text, _ in task.texts[1]}
    for text, _ in ROWS:
        first = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
        assert (text in held_out) == (first / 2**64 < 0.25)
    assert len(task.texts[0]) + len(held_out) == len(ROWS)
    assert len(task.held_out_data.inputs) == len(held_out)


def test_tokenizer_knows_the_training_part_alone(make):
    known = set(make().encoder.alphabet)
    train = {text for text, _ in make().texts[0]}
    assert known == set("".join(train)) | {"\n"}


def test_texts_are_between_the_special_tokens_of_the_tokenizer(make, monkeypatch):
    task = make(sequence_length=9)
    monkeypatch.setattr(type(task.encoder), "before", (1,))
    monkeypatch.setattr(type(task.encoder), "after", (2, 3))
    rows, lengths = task.train_data.inputs, task.train_data.lengths
    assert task.num_tokens == task.encoder.num_tokens  # [CLS] is one of them
    assert (rows[:, 0] == 1).all() and (rows[:, -2:] == [2, 3]).all()
    assert (lengths == 9).all() and (task.encode("odd")[[0, -1]] == [1, 3]).all()


def test_run_keeps_labels_and_needs_no_file(make, tmp_path):
    task = make()
    kept = task.keep()
    (tmp_path / "rows.csv").unlink()
    again = make(kept=kept)
    assert (again.num_tokens, again.num_classes) == (task.num_tokens, 2)
    assert [again.class_label(c) for c in range(2)] == ["one", "zero"]
    np.testing.assert_array_equal(again.encode("7 is"), task.encode("7 is"))
    write(tmp_path / "rows.csv", "text,label\na,zero\nb,one\nc,one\nd,one\n")
    with pytest.raises(ConfigError, match="has learned from other data"):
        _ = again.train_data


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "label,text\nx,a b\n", [("a b", "x")]),
        ("a.csv", "id,Text,Label\n7, a ,x\n", [("a", "x")]),
        ("a.csv", 'text,label\n"a, ""b""\nc",x\n\n', [('a, "b"\nc', "x")]),
        ("a.csv", 'text\tlabel\n"a, b\tx y\n', [('"a, b', "x y")]),
        ("a.csv", "\ufefftext,label\r\na,x\r\nb,y\r\n", [("a", "x"), ("b", "y")]),
        ("a.csv", f"text,label\n{'w' * 200_000},x\n", [("w" * 200_000, "x")]),
        ("a.jsonl", '{"label": 1, "text": " a\\n"}\n', [("a", "1")]),
    ],
)
def test_columns_are_found_by_their_names(name, content, expected, tmp_path):
    assert labeled_texts.read_table(write(tmp_path / name, content)) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text\na\n", "must have text and label .*{'text': 'a'} in row 1"),
        ("a.csv", "good,pos\nbad,neg\n", "must have text and label in .*'good': 'bad'"),
        ("a.csv", "text,label\na,x\n ,y\n", "{'text': ' ', 'label': 'y'} in row 2"),
        ("a.csv", "text,label\na,x\nb\n", "is no table: .* is shorter"),
        ("a.csv", "text,label\na,x,y\n", "is no table: .* is longer"),
        ("a.csv", 'text,label\n"a,x\n', "is no table: unexpected end"),
        ("a.csv", "text,label\n", "at least 2 labels"),
        ("a.csv", "\n", "is no table"),
        ("a.csv", "text,label\na,x\nb,x\n", r"at least 2 labels, got \['x'\] in /"),
        ("a.jsonl", '{"label": 1, "text": "a"}\n{"text": "b"}\n', "'b'} in row 2"),
        ("a.jsonl", '{"label": 1, "text": "a"}\n[1]\n', "is no table"),
        ("a.jsonl", "nonsense", "is no table"),
    ],
)
def test_file_that_is_no_table_of_labels_is_refused(name, content, message, tmp_path):
    path = write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message) as refusal:
        tasks.make("labeled_texts", path=path)
    assert len(str(refusal.value).splitlines()) == 1


def test_missing_file_and_empty_parts_are_refused(make, tmp_path):
    for path in (str(tmp_path / "row.csv"), "", str(tmp_path)):
        with pytest.raises(ConfigError, match="cannot be read"):
            tasks.make("labeled_texts", path=path)
    for share in (0.0, 1e-9):
        with pytest.raises(ConfigError, match="must leave texts to both parts, got"):
            make(held_out_fraction=share)


def test_bag_of_words_by_hand():
    train = [("A a b", 0), ("b, c!", 1), ("c", 1)]
    # Counts with one added: a 3, 1; b 2, 2; c 1, 3; labels 2 and 3 of 5.
    scores = np.array([[2 / 5, 3 / 5], [2 / 5, 3 / 5], [2 / 5, 3 / 5]])
    scores[0] *= [3 / 6 * 2 / 6, 1 / 6 * 2 / 6]  # "B a d": d is unknown
    scores[1] *= [1 / 6, 3 / 6]
    shares = scores / scores.sum(-1, keepdims=True)
    found = labeled_texts.bag_of_words(train, [("B a d", 0), ("C", 1), ("?", 0)], 2)
    assert found["accuracy"] == 2 / 3
    expected = -np.log([shares[0, 0], shares[1, 1], shares[2, 0]]).mean()
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-12)


def test_baseline_is_that_bag_of_words(make):
    task = make()
    assert task.baseline_name == "bag of words"
    assert task.baseline == labeled_texts.bag_of_words(*task.texts, 2)
    assert task.baseline["accuracy"] == 1  # "even" and "odd" say it
    assert 0 < task.baseline["loss"] < math.log(2)
