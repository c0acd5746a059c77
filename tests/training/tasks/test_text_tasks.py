import os
import pydoc_data.topics
from collections import Counter

import numpy as np
import pytest

from mha_haiku.core import checks
from mha_haiku.training.tasks import text_tasks

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


def test_home_is_understood(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert text_tasks.read("~/english.txt") == ENGLISH


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
    assert decode(task, task.encode("Zoé")) == "\N{REPLACEMENT CHARACTER}o" + (
        "\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "must have at least 1 token, got none"),
        ("ab\udcff", r"must be Unicode, got '\\udcff' at character 2"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["characters", "bpe"])
def test_users_text_that_does_not_fit_is_refused(file, tokenizer, given, message):
    task = make(file, tokenizer=tokenizer, vocabulary_size=256)
    with pytest.raises(checks.ConfigError, match=f"^text {message}"):
        task.encode(given)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "it is empty"),
        (b" \n\t", "it is empty"),
        (b"too short", r"at least 9 tokens in its training part .* got 7"),
        (b"long enough to train", r"at least 9 tokens in its held-out part .* got 5"),
        (b"text\0text", "binary, with a NUL at byte 4"),
        (b"text \xff\xfe", "byte 5 is 0xff"),
        ("h\u00e9".encode("latin-1"), "byte 1 is 0xe9"),
        (b"cut short \xe2\x82", "byte 10 is 0xe2"),
        ("utf-16".encode("utf-16-le"), "binary, with a NUL at byte 1"),
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
    if "byte" in message:
        assert "novel.txt" in str(caught.value)


def test_missing_file_is_refused_with_the_nearest_name(file):
    with pytest.raises(checks.ConfigError, match="does not exist.*'english.txt'"):
        make(file.parent / "englsh.txt")


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(checks.ConfigError, match="neither a file nor a folder"):
        make(tmp_path / "pipe")
    with pytest.raises(checks.ConfigError, match="it is empty"):
        make(tmp_path)
    with pytest.raises(checks.ConfigError, match="does not exist"):
        make("novel\0.txt")
    with pytest.raises(checks.ConfigError, match="File name too long"):
        make(tmp_path / ("long" * 100))


def test_unreadable_file_is_refused(file, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(checks.ConfigError, match="english.txt.*: Permission denied"):
        make(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 0}, "^sequence_length must be an integer from 1"),
        ({"path": 3}, "^path must be text, got 3"),
        ({"tokenizer": "charaters"}, "^tokenizer must be one of.*'characters'"),
        ({"vocabulary_size": 1}, "^vocabulary_size must be an integer of at least 2"),
        ({"held_out_fraction": 0.0}, "^held_out_fraction must be above 0"),
        ({"held_out_fraction": -0.1}, "^held_out_fraction must be a number"),
        ({"held_out_fraction": 1.0}, "^held_out_fraction must be a number"),
    ],
)
def test_impossible_options_are_refused(file, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**({"path": str(file)} | changes))
