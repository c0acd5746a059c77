"""The reproduction desk: what papers say, tried with seeds, intervals and a control.

One file per claim, found by the name of the file; the files that are no claims are in
`_ROOM`.
"""

import importlib
import pkgutil

from mha_haiku import checks
from mha_haiku.claims.base import ARMS, Claim, Criterion, Curve, Source, of_module
from mha_haiku.claims.desk import Desk, Trained
from mha_haiku.claims.reproducing import reproduce
from mha_haiku.claims.telling import Outcome

__all__ = [
    "ARMS",
    "Claim",
    "Criterion",
    "Curve",
    "Desk",
    "Outcome",
    "Source",
    "Trained",
    "load",
    "names",
    "reproduce",
]

_ROOM = ("base", "desk", "pictures", "records", "reproducing", "telling", "verdicts")


def names() -> tuple[str, ...]:
    """Returns the names of all claims, in alphabetical order."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(set(found) - set(_ROOM)))


def load(name: str) -> Claim:
    """Returns the claim of a name.

    Raises:
      ValueError: If there is none.
    """
    checks.choice("claim", name, names())
    return of_module(importlib.import_module(f"{__name__}.{name}"))
