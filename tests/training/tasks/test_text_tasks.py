import pydoc_data.topics
from collections import Counter

import numpy as np
import pytest

from mha_haiku.core import checks
from mha_haiku.training.tasks import text_tasks, tokenization
from tests.training.tasks.examples import sampled

ENGLISH = "It was the best of times, it was the worst of times. " * 10


def make(path, kind=text_tasks.LanguageModel, **changes):
    options = {
        "sequence_length": 8,
        "path": path if isinstance(path, int) else str(path),
        "tokenizer": "characters",
        "vocabulary_size": 256,
        "held_out_fraction": 0.25,
    }
    return kind(**(options | changes))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "english.txt"
    path.write_text(ENGLISH)
    return path


def decode(task, tokens):
    return "".join(task.class_label(token) for token in tokens.tolist())


@pytest.mark.parametrize("tokenizer", ["characters", "bpe"])
def test_parts_are_the_text_cut_once(file, tokenizer):
    task = make(file, tokenizer=tokenizer, vocabulary_size=300)
    cut = round(0.75 * len(ENGLISH))
    assert decode(task, task.train_data) == ENGLISH[:cut]
    assert decode(task, task.held_out_data) == ENGLISH[cut:]
    assert task.train_data.dtype == task.held_out_data.dtype == np.int32


def test_tokenizer_knows_nothing_of_the_held_out_part(tmp_path):
    path = tmp_path / "english.txt"
    path.write_text("ab" * 50 + "xy" * 10)
    task = make(path, held_out_fraction=0.2)
    assert task.encoder.alphabet == "ab"
    assert set(task.held_out_data.tolist()[4:]) == {0}


def test_without_a_path_it_is_pythons_documentation():
    assert text_tasks.read("") == "\n\n".join(pydoc_data.topics.topics.values())


def test_folder_is_all_its_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_bytes(b"\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\0")
    assert text_tasks.read(str(tmp_path)) == "first\n\nsecond"


def test_byte_order_mark_and_carriage_returns_are_dropped(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes("\ufeffone\r\ntwo".encode())
    assert text_tasks.read(str(path)) == "one\ntwo"


@pytest.mark.parametrize(
    "kind", [text_tasks.LanguageModel, text_tasks.MaskedLanguageModel]
)
def test_baseline_is_that_of_the_training_parts_counts(file, kind):
    task = make(file, kind)
    cut = round(0.75 * len(ENGLISH))
    train, held_out = Counter(ENGLISH[:cut]), Counter(ENGLISH[cut:])
    (commonest, _), *_ = train.most_common(1)
    accuracy = held_out[commonest] / held_out.total()
    loss = -sum(
        count * np.log((train[c] + 1) / (train.total() + task.num_classes))
        for c, count in held_out.items()
    )
    assert task.baseline_name == "unigram"
    np.testing.assert_allclose(task.baseline["accuracy"], accuracy, rtol=1e-12)
    np.testing.assert_allclose(
        task.baseline["loss"], loss / held_out.total(), rtol=1e-12
    )


def test_users_text_becomes_its_tokens(file):
    task = make(file)
    tokens = task.encode("the bat")
    assert decode(task, tokens) == "the bat"
    assert tokens.dtype == np.int32
    assert task.encode("the bat" * 5).tolist() == tokens.tolist() * 5
    with pytest.raises(checks.ConfigError, match="must have at least 1 token"):
        task.encode("")
    assert decode(task, task.encode("Zoé")) == "\N{REPLACEMENT CHARACTER}o" + (
        "\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "it is empty"),
        (b" \n\t", "it is empty"),
        (b"too short", r"at least 9 tokens in its training part .* got 7"),
        (b"long enough to train", r"at least 9 tokens in its held-out part .* got 5"),
        (b"text\0text", "it has a NUL"),
        (b"text \xff\xfe", "is not UTF-8 text: .* position 5"),
        ("utf-16".encode("utf-16-le"), "it has a NUL"),
    ],
)
@pytest.mark.parametrize("in_folder", [False, True])
def test_files_that_are_no_text_are_refused(tmp_path, raw, message, in_folder):
    path = tmp_path / "novel.txt"
    path.write_bytes(raw)
    with pytest.raises(checks.ConfigError, match=message) as caught:
        make(tmp_path if in_folder else path)
    assert str(tmp_path)[:25] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "englsh.txt"}, "path 'englsh.txt' cannot be read: No such file"),
        ({"path": 3}, "^path must be text, got 3"),
        ({"tokenizer": "charaters"}, "^tokenizer must be one of.*'characters'"),
        ({"vocabulary_size": 1}, "^vocabulary_size must be an integer of at least 2"),
        ({"held_out_fraction": 0.0}, "held-out part .* got 0 from"),
        ({"held_out_fraction": 1.0}, "^held_out_fraction must be a number"),
    ],
)
def test_impossible_options_are_refused(file, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**({"path": str(file)} | changes))


HAMLET = "to be or not to be, that is the question"


@pytest.fixture
def hamlet(tmp_path):
    """A function that makes a task of a kind over the text."""
    path = tmp_path / "hamlet.txt"
    path.write_text(HAMLET)
    return lambda kind, length: make(
        path, kind, sequence_length=length, held_out_fraction=0.4
    )


def windows(tokens, size):
    return {tuple(tokens[i : i + size].tolist()) for i in range(len(tokens) - size + 1)}


def rows_of_example(task):
    """Returns the rows of the example in a docstring, and the text that it is of."""
    rows = [row.split() for row in type(task).__doc__.splitlines()]
    names = ("inputs", "targets", "weights")
    rows = [next(row[1:] for row in rows if row[:1] == [name]) for name in names]
    return *rows, [c.replace(" ", "␣") for c in HAMLET]


def test_the_next_token_is_the_target_in_all_windows(hamlet):
    task = hamlet(text_tasks.LanguageModel, 5)
    for data in (task.train_data, task.held_out_data):
        batch = sampled(task, data=data)
        np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        whole = np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
        assert {tuple(window) for window in whole.tolist()} == windows(data, 6)
        assert batch.weights.all()
    inputs, targets, _, text = rows_of_example(task)
    assert (inputs, targets) == (text[:5], text[1:6])


def test_fifteen_percent_count_and_are_hidden_as_in_bert(hamlet):
    task = hamlet(text_tasks.MaskedLanguageModel, 9)
    for data in (task.train_data, task.held_out_data):
        batch = sampled(task, data=data)
        assert set(map(tuple, batch.targets.tolist())) == windows(data, 9)
    batch = sampled(task)
    chosen = batch.weights == 1
    assert set(batch.weights.ravel().tolist()) == {0.0, 1.0}
    np.testing.assert_array_equal(batch.inputs[~chosen], batch.targets[~chosen])
    np.testing.assert_allclose(chosen.mean(axis=0), np.full(9, 0.15), atol=0.015)
    inputs, targets = batch.inputs[chosen], batch.targets[chosen]
    masked = inputs == task.mask_token
    np.testing.assert_allclose(masked.mean(), 0.8, atol=0.015)
    # A random token is the one that was there once in so many times.
    replaced = ~masked & (inputs != targets)
    expected = 0.1 * (1 - 1 / task.num_classes)
    np.testing.assert_allclose(replaced.mean(), expected, atol=0.01)
    frequencies = np.bincount(inputs[replaced], minlength=task.num_classes)
    assert len(frequencies) == task.num_classes and frequencies.min() > 0
    inputs, targets, weights, text = rows_of_example(task)
    for position, weight in enumerate(weights):
        assert targets[position] == (text[position] if weight == "1" else ".")
        assert weight == "1" or inputs[position] == text[position]
    assert [inputs[t] for t in (1, 4, 6)] == ["[MASK]", "x", text[6]]


def test_mask_is_the_last_token_and_no_class_and_a_users_text_may_have_it(hamlet):
    task = hamlet(text_tasks.MaskedLanguageModel, 9)
    assert task.num_tokens == task.num_classes + 1 == task.mask_token + 1
    labels = [task.class_label(c) for c in range(task.num_classes)]
    assert labels == [task.token_label(c) for c in range(task.num_classes)]
    labels = [task.token_label(x) for x in task.encode("to[MASK]be[MASK]").tolist()]
    assert labels == ["t", "o", "[MASK]", "b", "e", "[MASK]"]
    assert task.encode("[MASK]").tolist() == [task.mask_token]


SENTENCES = """A first sentence of
seven words. Too short. Is this one a question? Yes, it is

one paragraph ends; this has no stop

A first sentence of seven words. And here is
the last one!
"""


def test_sentences_end_with_a_stop_and_are_there_once():
    assert text_tasks.sentences(SENTENCES) == [
        "A first sentence of seven words.",
        "Is this one a question?",
        "And here is the last one!",
    ]


def test_example_is_a_padded_sentence_between_special_tokens(tmp_path, monkeypatch):
    whole = [f"Number {chr(97 + n)} is here today." for n in range(20)]
    (tmp_path / "text").write_text(" ".join(whole))
    monkeypatch.setattr(tokenization.Characters, "before", (90,))
    monkeypatch.setattr(tokenization.Characters, "after", (91, 92))
    options = {"kind": text_tasks.Sentences, "held_out_fraction": 0.5}
    task = make(tmp_path / "text", sequence_length=30, **options)
    batch = sampled(task, indices=np.arange(64))
    assert batch.inputs.shape == (64, 30)
    assert not batch.weights.any() and task.metrics == ("drift",)
    seen = set()
    for row, length in zip(batch.inputs, batch.lengths, strict=True):
        assert row[0] == 90 and list(row[length - 2 : length]) == [91, 92]
        assert not row[length:].any()
        seen.add("".join(map(task.encoder.label, row[1 : length - 2])))
    assert len(seen) > 5 and seen <= set(whole[:10])
    held_out = {tuple(row) for row in task.held_out_data.inputs}
    assert not held_out & {tuple(row) for row in task.train_data.inputs}
    cut = make(tmp_path / "text", sequence_length=7, **options).train_data
    assert cut.inputs.shape == (10, 7) and (cut.lengths == 7).all()
    assert (cut.inputs[:, [0, -1]] == [90, 92]).all()
    (tmp_path / "text").write_text("no stop " * 40)
    with pytest.raises(checks.ConfigError, match="sentences in its training part"):
        make(tmp_path / "text", **options)
