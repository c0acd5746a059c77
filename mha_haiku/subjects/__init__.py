"""One object for every model: a run, pretrained weights or any function.

`load`, `train` and `wrap` make a `Subject`; the questions about a model are its verbs.
"""

from mha_haiku.lab.text_maps import TextMaps
from mha_haiku.subjects import pictures as _pictures  # noqa: F401  (shows itself)
from mha_haiku.subjects import verbs
from mha_haiku.subjects.answers import Compositions, Lens, Strongest
from mha_haiku.subjects.entry_points import load, train, wrap
from mha_haiku.subjects.subject import Subject, verb

__all__ = [
    "Compositions",
    "Lens",
    "Strongest",
    "Subject",
    "TextMaps",
    "load",
    "train",
    "verb",
    "verbs",
    "wrap",
]
