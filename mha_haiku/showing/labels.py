"""Token text that a reader can see, and that a font can draw.

A token may be a space, a line break, half an emoji or an invisible character that
reverses the text around it; on an axis or a page each must be visible.
"""

import unicodedata
from collections.abc import Callable

_SYMBOLS = {" ": "␣", "\n": "↵", "\r": "⇠", "\t": "⇥"}


def visible(text: str) -> str:
    """Replaces invisible characters in `text` by visible symbols.

    A space is ␣, a line break ↵, a carriage return ⇠, a tab ⇥, the empty text ∅; any
    other invisible character is its code point, such as U+200B.
    """
    shown = "".join(map(_visible_character, text)) or "∅"
    # A combining mark without a base character gets the usual dotted circle.
    return "◌" + shown if unicodedata.combining(shown[0]) else shown


def one_line(text: str) -> str:
    """Shows `text`, a title or a name, like `visible` but with spaces kept."""
    return "".join(c if c == " " else _visible_character(c) for c in text)


def drawable(text: str, has_glyph: Callable[[str], bool], longest: int) -> str:
    """Replaces characters that the fonts lack by code points, and shortens with …."""
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(c if has_glyph(c) else _code_point(c) for c in text)


def _visible_character(character: str) -> str:
    # Not to be printed: controls, invisible formatting, lone surrogates, unassigned
    # characters, odd spaces and line ends.
    shown = character if character.isprintable() else _code_point(character)
    return _SYMBOLS.get(character, shown)


def _code_point(character: str) -> str:
    return f"U+{ord(character):04X}"
