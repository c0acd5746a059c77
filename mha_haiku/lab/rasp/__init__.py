"""Models compiled from known programs, to test methods against known answers.

>>> from mha_haiku import rasp
>>> compiled = rasp.compile(rasp.PROGRAMS["induction"]())
>>> sorted(compiled.heads.values())
['induction', 'previous_token']
>>> [kind for sender, receiver, kind in compiled.edges]
['k']
"""

from mha_haiku.lab.rasp import programs
from mha_haiku.lab.rasp.compiler import Compiled, Sizes, compile, sizes
from mha_haiku.lab.rasp.language import (
    Program,
    Selector,
    Sequence,
    aggregate,
    indices,
    map,
    select,
    selector_width,
    tokens,
)
from mha_haiku.lab.rasp.programs import PROGRAMS

__all__ = [
    "Compiled",
    "PROGRAMS",
    "Program",
    "Selector",
    "Sequence",
    "Sizes",
    "aggregate",
    "compile",
    "indices",
    "map",
    "programs",
    "select",
    "selector_width",
    "sizes",
    "tokens",
]
