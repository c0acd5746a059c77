"""Tokenizers of others: files, of every common kind."""

import json
import re

import jax
import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core import checks
from mha_haiku.training.tasks import text_tasks, tokenization
from tests import pretrained

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the cat sat on the mat; it's the cats' mat.\n" * 30
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "mat"]
WORDS += ["sat", "on", ".", "##ting", "a"]


def word_pieces() -> str:
    """The tokenizer.json of one like BERT's that cuts and pads."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    made.add_special_tokens(WORDS[:5])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=4)
    return made.to_str()


def sentence_pieces() -> str:
    """One like Llama's: spaces are marks, and bytes that no token has are tokens."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=60,
        special_tokens=["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer.vocab_size = 300
    made.train_from_iterator([TEXT.replace("\n", " ")], trainer)
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    content = json.loads(made.to_str())
    # Bytes are tokens of the vocabulary, and no names to look for in a text.
    content["added_tokens"] = content["added_tokens"][:2]
    return json.dumps(content)


def byte_pairs() -> str:
    """One like GPT-2's, with an end of text that goes nowhere by itself."""
    made = tokenization.train_byte_pairs(TEXT, 280)._tokenizer
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    return made.to_str()


MADE = {"word": word_pieces, "sentence": sentence_pieces, "byte": byte_pairs}


@pytest.mark.parametrize(
    ("kind", "before", "after", "mask"),
    [("word", (2,), (3,), 4), ("sentence", (1,), (), None), ("byte", (), (), None)],
)
def test_special_tokens_stand_around_a_text_and_not_in_it(kind, before, after, mask):
    tokenizer = tokenization.Pretrained(MADE[kind]())
    assert (tokenizer.before, tokenizer.after, tokenizer.mask) == (before, after, mask)
    tokens = tokenizer.encode(TEXT[:80])
    assert len(tokens) > 10 and tokens.dtype == np.int32  # neither cut nor padded
    assert not set(before + after) & set(tokens.tolist())


def letters_of_dna(template=None) -> str:
    """A tokenizer that knows five letters, and nothing of any other."""
    ids = {x: i for i, x in enumerate(["[CLS]", "[SEP]", *"ACGTN", "AC"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("A", "C")]))
    made.add_special_tokens(["[CLS]", "[SEP]"])
    if template is not None:
        made.post_processor = template
    return made.to_str()


_ENDS = ("[SEP]", 1), ("[CLS]", 0)


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (None, (), ()),
        (tokenizers.processors.BertProcessing(*_ENDS), (0,), (1,)),
        (tokenizers.processors.RobertaProcessing(*_ENDS), (0,), (1,)),
        (tokenizers.processors.ByteLevel(), (), ()),
        *(
            (
                tokenizers.processors.TemplateProcessing(
                    single=single, special_tokens=_ENDS
                ),
                *around,
            )
            for single, *around in (
                ("[CLS] $A [SEP]", (0,), (1,)),
                ("[CLS] [SEP] $A", (0, 1), ()),
                ("$A [SEP]", (), (1,)),
            )
        ),
    ],
)
def test_the_template_says_what_goes_around_a_text(template, before, after):
    """Not the text "a", which has no token here."""
    tokenizer = tokenization.Pretrained(letters_of_dna(template))
    assert (tokenizer.before, tokenizer.after) == (before, after)
    tokens = tokenizer.encode("ACGTN").tolist()
    assert tokens == [7, 4, 5, 6]
    assert [tokenizer.label(x) for x in (*tokens, 0)] == ["AC", *"GTN", "[CLS]"]
    assert tokenizer.decode([0, *tokens]).replace(" ", "") == "[CLS]ACGTN"


@pytest.mark.parametrize(
    ("model", "known", "unknown"),
    [
        (
            tokenizers.models.WordPiece({"dog": 0, "##s": 1}, unk_token="[UNK]"),
            *("dogs", "cat"),
        ),
        (tokenizers.models.WordLevel({"dog": 0}, unk_token="[UNK]"), "dog", "cat"),
        (tokenizers.models.Unigram([("x", -1.0), ("y", -2.0)]), "xy", "z"),
    ],
    ids=["WordPiece", "WordLevel", "Unigram"],
)
def test_without_an_unknown_token_unknown_texts_are_refused(model, known, unknown):
    tokenizer = tokenization.Pretrained(tokenizers.Tokenizer(model).to_str())
    assert re.sub("[ #]", "", tokenizer.decode(tokenizer.encode(known))) == known
    for read in (tokenizer.encode, tokenizer.check_known):
        with pytest.raises(checks.ConfigError, match="text cannot be encoded by its"):
            read(unknown)


def test_special_tokens_without_a_row_refuse_every_text():
    template = tokenizers.processors.BertProcessing(("[SEP]", 9), ("[CLS]", 0))
    tokenizer = tokenization.Pretrained(letters_of_dna(template), 8, 8)
    assert tokenizer.before == (0,)
    with pytest.raises(checks.ConfigError, match="0 to 7.*it needs '<9>', which is 9"):
        _ = tokenizer.after
    words = tokenization.Pretrained(word_pieces(), 4, 4)
    assert (words.num_tokens, words.mask, words.out_of_range) == (
        *(4, None),
        tuple(range(4, 14)),
    )
    again = tokenization.from_json(words.to_json())
    assert again.num_tokens == 4


def test_pieces_join_to_the_text_and_to_names_of_special_tokens():
    text = "sat on é 🙂"
    for kind in ("sentence", "byte"):
        tokenizer = tokenization.Pretrained(MADE[kind]())
        tokens = tokenizer.encode(text).tolist()
        joined = b"".join(map(tokenizer.piece, tokens))
        assert joined.decode().removeprefix(" ") == text
        assert tokenizer.piece(tokens[-1]) == "🙂".encode()[-1:]
        assert tokenizer.piece(tokenizer.num_tokens) == b"<%d>" % tokenizer.num_tokens
    (end,) = tokenizer.end_tokens
    assert tokenizer.piece(end) == b"<|endoftext|>"
    words = tokenization.Pretrained(word_pieces())
    assert b"".join(map(words.piece, words.encode("cats.").tolist())) == b" cats."
    assert words.end_tokens == () and words.piece(3) == b"[SEP]"


def test_a_part_that_no_token_stands_for_is_named():
    words = tokenization.Pretrained(word_pieces())
    words.check_known("The cat sat.")
    with pytest.raises(checks.ConfigError, match="got 'dog' at character 4"):
        words.check_known("the dog sat")
    for kind in ("sentence", "byte"):
        tokenization.Pretrained(MADE[kind]()).check_known("dogs, é 🙂")


def test_labels_of_what_is_no_text():
    words = tokenization.Pretrained(word_pieces(), least_tokens=20)
    assert [words.label(i) for i in (2, 4, 7, 6)] == ["[CLS]", "[MASK]", "s", " cat"]
    assert words.num_tokens == 20 and words.label(14) == "<14>"
    pieces = tokenization.Pretrained(sentence_pieces())
    assert "".join(map(pieces.label, pieces.encode("é").tolist())) == r" \xc3\xa9"
    letters = tokenization.Pretrained(byte_pairs())
    assert letters.label(letters.encode("é")[0]) == r"\xc3"
    assert letters.label(letters.num_tokens - 1) == "<|endoftext|>"


def test_ids_may_have_gaps_and_added_words_are_words():
    content = json.loads(word_pieces())
    rules = ("single_word", "lstrip", "rstrip", "normalized", "special")
    added = {"id": 16, "content": "dog", **dict.fromkeys(rules, False)}
    content["added_tokens"].append(added)
    content["model"]["vocab"]["dog"] = 16
    tokenizer = tokenization.Pretrained(json.dumps(content))
    assert tokenizer.num_tokens == 17
    assert [tokenizer.label(i) for i in (15, 16)] == ["<15>", " dog"]


@pytest.mark.parametrize("space", [False, True])
def test_byte_pairs_without_a_decoder_encode_as_their_library(tmp_path, space):
    text = "a \n\n cat \n\nsat\n"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel
    made.pre_tokenizer = level(add_prefix_space=space)
    made.train_from_iterator(
        [text] * 9,
        tokenizers.trainers.BpeTrainer(
            vocab_size=280, initial_alphabet=level.alphabet(), show_progress=False
        ),
    )
    made.save(path := str(tmp_path / "tokenizer.json"))
    read = tokenization.read_file(path)
    assert read.encode(text).tolist() == made.encode(text).ids
    assert read.decode(read.encode(text)) == " " * space + text
    # This token goes over an end of a line, where those trained here are cut.
    assert read.label(read.encode(text)[1]) == " \n\n"


def test_byte_pairs_of_a_run_encode_by_lines_from_its_file(tmp_path):
    text = "a \ncat \n\nsat\r\n"
    made = tokenization.train_byte_pairs(text * 9, 280)
    (path := tmp_path / "tokenizer.json").write_text(made.to_json())
    lines = [made.encode(line) for line in text.splitlines(keepends=True)]
    tokens = np.concatenate(lines)
    for read in (made, tokenization.read_file(path)):
        np.testing.assert_array_equal(read.encode(text), tokens)
        assert read.decode(tokens) == text


@pytest.fixture
def make(tmp_path):
    """Makes a task over a text with a tokenizer of a file."""
    (tmp_path / "text.txt").write_text(TEXT)

    def make(kind, name, **options):
        file = tmp_path / "tokenizer.json"
        file.write_text(MADE[name]())
        given = {"path": str(tmp_path / "text.txt"), "tokenizer": str(file)}
        return kind(**{"sequence_length": 9, **given, **options})

    return make


def _batch(task):
    return tasks.batch(task, jax.random.key(0), task.train_data, np.arange(400))


@pytest.mark.slow
def test_masked_windows_have_special_tokens_around_that_never_count(make):
    task = make(text_tasks.MaskedLanguageModel, "word")
    batch = jax.jit(lambda: _batch(task))()
    for x in (batch.inputs, batch.targets):
        assert (np.unique(x[:, 0]), np.unique(x[:, -1])) == ([2], [3])
    assert not batch.weights[:, [0, -1]].any()
    counts = batch.weights[:, 1:-1] == 1
    assert 0.12 < counts.mean() < 0.18
    hidden = np.asarray(batch.inputs)[:, 1:-1][counts] == task.mask_token
    assert task.mask_token == 4 and 0.75 < hidden.mean() < 0.85
    windows = {tuple(x) for x in np.asarray(batch.targets)[:, 1:-1].tolist()}
    text = task.train_data.tolist()
    assert windows <= {tuple(text[i : i + 7]) for i in range(len(text) - 6)}


def test_the_mask_of_a_file_is_a_token_and_a_class(make):
    task = make(text_tasks.MaskedLanguageModel, "word", vocabulary_size=21)
    assert task.num_tokens == task.num_classes == 21
    labels = [task.token_label(i) for i in task.encode("the [MASK] sat").tolist()]
    assert labels == ["[CLS]", " the", "[MASK]", " sat", "[SEP]"]
    without = make(text_tasks.MaskedLanguageModel, "byte")
    assert without.mask_token == without.num_classes == without.num_tokens - 1


def test_windows_of_language_models_begin_as_a_text_does(make):
    task = make(text_tasks.LanguageModel, "sentence")
    batch = jax.jit(lambda: _batch(task))()
    assert np.unique(batch.inputs[:, 0]) == [1]
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.weights.all()
    text = task.train_data.tolist()
    windows = {tuple(x) for x in np.asarray(batch.targets).tolist()}
    assert windows <= {tuple(text[i : i + 9]) for i in range(len(text) - 8)}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}},
        {"post_processor": {"type": "BertProcessing", "sep": ["x", -1], "cls": []}},
        {"added_tokens": 5},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_what_panics_in_rust_is_damaged(parts):
    content = json.loads(pretrained.words().to_str()) | parts
    with pytest.raises(checks.ConfigError, match="is damaged"):
        tokenization.Pretrained(json.dumps(content))


def test_files_that_are_no_tokenizers_are_refused(make, tmp_path):
    (tmp_path / "other.json").write_text('{"model": 3}')
    for name, message in (("missing", "cannot be read"), ("other", "no tokenizer")):
        with pytest.raises(checks.ConfigError, match=message):
            tokenization.read_file(tmp_path / f"{name}.json")
    task = make(text_tasks.MaskedLanguageModel, "word", sequence_length=2)
    with pytest.raises(checks.ConfigError, match="sequence_length must be above 2"):
        _batch(task)
