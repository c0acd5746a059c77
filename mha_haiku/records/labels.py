"""Token text that a reader can see, and that a font can draw.

A token may be a space, a line break, half an emoji or an invisible character that
reverses the text around it; on an axis or a page each must be visible. The pieces that
a tokenizer makes of words are spelled as words.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence

_SYMBOLS = {" ": "␣", "\n": "↵", "\r": "⇠", "\t": "⇥"}
_CONTINUES = "##"
_SPACES = " ▁"  # before a word; the second as SentencePiece writes it
# Tokens around a text, and the positions of an image before its patches; not the tokens
# that replace a part of the text, [MASK] and [UNK].
_SPECIAL = re.compile(
    r"\[(CLS|SEP|PAD|BOS|EOS|\d)\]|</?s>|<[|｜][^<>]+[|｜]>"
    r"|<(pad|bos|eos|sos|cls|sep|start|end|start_of_turn|end_of_turn)>"
)

_PLACE = re.compile(r"[\d.]+s|query \d+")  # of a sound, or learned
PATCH = re.compile(r"(\d+),(\d+)")  # its row and column in a picture
_OF_IMAGE = re.compile(rf"{PATCH.pattern}|\[image \d+\]")


def beginning(tokens: Sequence[str], longest: int) -> str:
    """Joins the words of tokens but special ones, up to about `longest` characters.

    It is "" if there are no words.
    """
    words = [x for x in tokens if x and not _is_no_word(x.strip())]
    is_spelled = all(len(x) == 1 for x in words) and any(map(str.isalpha, words))
    is_text = is_spelled or any(x.startswith((" ", "\n")) for x in words)
    text = ("" if is_text else " ").join(words).strip()
    if len(text) <= longest:
        return text
    return (text[:longest].rpartition(" ")[0] or text[:longest]) + " …"


def _is_no_word(token: str) -> bool:
    """Whether a token is special, or a place in a picture or a sound."""
    is_place = is_of_image(token) or _PLACE.fullmatch(token) is not None
    return is_special(token) or is_place


def is_of_image(token: str) -> bool:
    """Whether a token stands for a part of a picture: "2,3", "[image 5]"."""
    return _OF_IMAGE.fullmatch(token) is not None


def pieces(tokens: Sequence[str]) -> list[str]:
    """Spells the tokens of a text, by `piece` if words begin with spaces.

    Otherwise tokens are characters or whole words, and are not changed.
    """
    if not begin_with_spaces(tokens):
        return list(map(visible, tokens))
    return list(map(piece, tokens, ["", *tokens]))


def begin_with_spaces(tokens: Sequence[str]) -> bool:
    """Whether words in `tokens` begin with the space before them."""
    return any(x[:1] in _SPACES and x.strip(_SPACES) for x in tokens if x)


def piece(token: str, before: str) -> str:
    """Spells a token whose text would begin with a space if it began a word.

    The space is left out, and a token that continues the word of the token `before`
    begins with ##, as WordPiece writes it. Scripts without spaces have no such mark.
    """
    if token[:1] in _SPACES and token.strip():
        return visible(token[1:] or token)
    joins = _is_of_word(token[:1]) and _is_of_word(before[-1:])
    return _CONTINUES * joins + visible(token)


def is_special(token: str) -> bool:
    """Whether a token is special, not text: "[CLS]", "</s>", "<|endoftext|>"."""
    return _SPECIAL.fullmatch(token.strip()) is not None


def visible(text: str) -> str:
    """Replaces invisible characters in `text` by visible symbols.

    A space is ␣, a line break ↵, a carriage return ⇠, a tab ⇥, the empty text ∅; any
    other invisible character is its code point, such as U+200B.
    """
    symbols = "".join(map(_visible_character, text)) or "∅"
    # A combining mark without a base character gets the usual dotted circle.
    return "◌" + symbols if unicodedata.combining(symbols[0]) else symbols


def one_line(text: str) -> str:
    """Shows `text`, a title or a name, like `visible` but with spaces kept."""
    return "".join(c if c == " " else _visible_character(c) for c in text)


def drawable(text: str, has_glyph: Callable[[str], bool], longest: int) -> str:
    """Replaces characters that the fonts lack by code points, and shortens with …."""
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(c if has_glyph(c) else _code_point(c) for c in text)


def _is_of_word(character: str) -> bool:
    return character.isalnum() and unicodedata.category(character) != "Lo"


def _visible_character(character: str) -> str:
    # Not to be printed: controls, invisible formatting, lone surrogates, unassigned
    # characters, odd spaces and line ends.
    symbol = character if character.isprintable() else _code_point(character)
    return _SYMBOLS.get(character, symbol)


def _code_point(character: str) -> str:
    return f"U+{ord(character):04X}"
