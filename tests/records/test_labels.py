import unicodedata

import pytest

from mha_haiku.records import labels


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("word", "word"),
        (" the", "␣the"),
        ("a\r\n\tb", "a⇠↵⇥b"),
        ("", "∅"),
        ("\u200b", "U+200B"),
        ("\u202eevil", "U+202Eevil"),
        ("\ud800", "U+D800"),
        ("\u0301", "◌\u0301"),
        ("$x^2$_<b>", "$x^2$_<b>"),
        ("\u4e2d\N{GRINNING FACE}", "\u4e2d\N{GRINNING FACE}"),
    ],
)
def test_everything_invisible_becomes_visible(text, shown):
    assert labels.visible(text) == shown


def test_no_invisible_character_is_left():
    text = "".join(map(chr, range(0x3000)))
    kinds = {unicodedata.category(c) for c in labels.visible(text)}
    assert kinds.isdisjoint({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})


def test_a_title_stays_on_one_line_and_keeps_its_spaces():
    assert labels.one_line("a b\u2028c\n") == "a bU+2028c↵"


def test_what_no_font_has_is_spelled_and_what_is_long_is_cut():
    assert labels.drawable("a\u4e2d", str.isascii, 5) == "aU+4E2D"
    assert labels.drawable("abcdef", lambda character: True, 5) == "abcd…"


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (["[CLS]", " a", "bc", "def", ",", "[SEP]"], "[CLS] a ##bc ##def , [SEP]"),
        (["The", " cat", "'s", " ", " \n", "x", "1"], "The cat 's ␣ ␣↵ x ##1"),
        (["▁the", "▁", "s", "</s>", "an", "▁an"], "the ▁ s </s> an an"),
        (["un", "##like", "ly"], "un ##like ly"),
        (["t", "o", " ", "be"], "t o ␣ be"),
        (["a  b", "", "  c"], "a␣␣b ∅ ␣c"),
        ([" \u4e2d", "\u6587"], "\u4e2d \u6587"),
    ],
)
def test_pieces_read_as_words(tokens, shown):
    assert " ".join(labels.pieces(tokens)) == shown


def test_special_tokens_are_those_around_a_text():
    special = "[CLS] [SEP] <s> </s> <pad> <bos> <|endoftext|> <start> [0]".split()
    assert all(map(labels.is_special, special))
    others = "[MASK] <b> <div> [note] < > s <49153> 0,1".split()
    assert not any(map(labels.is_special, others))
