import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core import checks
from mha_haiku.training.tasks import tokenization

ENGLISH = "the cat sat on the mat, the hat sat on the cat\n" * 20
ANYTHING = "naïve 日本語 🙂\u200d\n\t\x07\r \x85 the"


def test_characters_are_numbered_from_one_in_their_order():
    tokenizer = tokenization.Characters.train("banana", vocabulary_size=10)
    assert tokenizer.num_tokens == 4
    assert tokenizer.encode("nab").tolist() == [3, 1, 2]
    assert tokenizer.encode("nab").dtype == np.int32
    assert [tokenizer.label(token) for token in (1, 2, 3)] == ["a", "b", "n"]


def test_unknown_characters_are_token_zero():
    tokenizer = tokenization.Characters.train("banana", vocabulary_size=10)
    assert tokenizer.encode("a~z🙂").tolist() == [1, 0, 0, 0]
    assert tokenizer.label(0) == "\N{REPLACEMENT CHARACTER}"


def test_the_first_unknown_character_is_named():
    tokenizer = tokenization.Characters.train("banana", vocabulary_size=10)
    tokenizer.check_known("nab")
    with pytest.raises(checks.ConfigError, match="'é' at character 2.\nIt .* 'abn'"):
        tokenizer.check_known("baé~")


def test_the_commonest_characters_are_kept():
    tokenizer = tokenization.Characters.train("banana", vocabulary_size=3)
    assert tokenizer.alphabet == "an"
    assert tokenizer.encode("banana").tolist() == [0, 1, 2, 1, 2, 1]


@pytest.mark.parametrize("text", [ENGLISH, ANYTHING])
def test_byte_pairs_keep_every_text_whole(text):
    tokenizer = tokenization.train_byte_pairs(ENGLISH, vocabulary_size=270)
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert max(tokens) < tokenizer.num_tokens == 270
    assert b"".join(map(tokenizer.piece, tokens.tolist())).decode() == text
    tokenizer.check_known(text)


def test_byte_pairs_merge_what_is_common_and_read_as_text():
    tokenizer = tokenization.train_byte_pairs(ENGLISH, vocabulary_size=270)
    labels = [
        tokenizer.label(token) for token in tokenizer.encode("on the mat").tolist()
    ]
    assert labels[1] == " the"
    assert "".join(labels) == "on the mat"


@pytest.mark.parametrize(
    "stored",
    [
        *("", "[]", "5", "null", "{}", '{"model": 3}', '{"pretrained": {}}'),
        '{"pretrained": 5, "least_tokens": 3}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 2}, "merges": []}}',
    ],
)
def test_what_a_run_stored_is_read_or_refused(stored):
    with pytest.raises(checks.ConfigError, match="tokenizer.json is damaged"):
        tokenization.from_json(stored)


@pytest.mark.parametrize(
    ("train", "least"),
    [(tokenization.Characters.train, 2), (tokenization.train_byte_pairs, 256)],
)
def test_too_small_a_vocabulary_is_refused(train, least):
    with pytest.raises(ValueError, match=f"of at least {least}, got {least - 1}"):
        train(ENGLISH, least - 1)


@pytest.mark.parametrize("stored", ["", "[]", '{"tokenizers": [{"characters": "ab"}]}'])
def test_two_tokenizers_of_pairs_are_read_or_refused(stored):
    pairs = [(f"{a} plus {b}", str(a + b)) for a in range(9) for b in range(9)]
    task = tasks.from_examples(pairs, labels=False)
    kept = task.keep()._replace(tokenizer=stored)
    again = tasks.make("text_pairs", sha256=task.sha256, kept=kept)
    with pytest.raises(checks.ConfigError, match="tokenizer.json is damaged"):
        _ = again.num_tokens
