"""Replications of published claims, with seeds, intervals and a control.

There is one file per claim, found by the name of the file; the files that are not
claims are in `_ROOM`.
"""

import importlib
import inspect
import pkgutil

from experiments.claims.base import ARMS, Claim, Criterion, Curve, Source
from experiments.claims.claim_pages import Outcome
from experiments.claims.desk import Desk, Trained
from experiments.claims.measurements import reproduce
from mha_haiku.core import checks

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

_ROOM = "base claim_pages desk measurements records training verdicts".split()


def names() -> tuple[str, ...]:
    """Returns the names of all claims, in alphabetical order."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(set(found) - set(_ROOM)))


def load(name: str) -> Claim:
    """Returns the claim of a name.

    Raises:
      ValueError: If there is none.
      TypeError: If its file has none, or several.
    """
    checks.choice("claim", name, names())
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [x for _, x in inspect.getmembers(module, inspect.isclass)]
    of_file = [x for x in classes if x.__module__ == module.__name__]
    found = [x for x in of_file if issubclass(x, Claim)]
    if len(found) != 1:
        raise TypeError(
            f"{module.__name__} must have one class of a Claim, got {len(found)}."
        )
    return found[0]()
