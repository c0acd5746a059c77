"""Models compiled from known programs, to test methods against known answers.

>>> from mha_haiku import rasp
>>> compiled = rasp.compile(rasp.PROGRAMS["induction"]())
>>> sorted(compiled.heads.values())
['induction', 'previous_token']
>>> [kind for sender, receiver, kind in compiled.edges]
['k']
"""

from mha_haiku.lab.rasp import kinds, programs
from mha_haiku.lab.rasp.compiler import Compiled, Sizes, compile, sizes
from mha_haiku.lab.rasp.kinds import KINDS
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
from mha_haiku.lab.rasp.separation import auroc

__all__ = [
    "Compiled",
    "KINDS",
    "PROGRAMS",
    "Program",
    "Selector",
    "Sequence",
    "Sizes",
    "aggregate",
    "auroc",
    "compile",
    "indices",
    "kinds",
    "map",
    "programs",
    "select",
    "selector_width",
    "sizes",
    "tokens",
]
