"""One object for every model: a run, pretrained weights or anybody's function.

`load` and `wrap` make a `Subject`; what can be asked of a model is a verb of it.
"""

from mha_haiku.subjects.answers import Lens, Strongest, TextMaps
from mha_haiku.subjects.opening import load, wrap
from mha_haiku.subjects.subject import Subject

__all__ = ["Lens", "Strongest", "Subject", "TextMaps", "load", "wrap"]
