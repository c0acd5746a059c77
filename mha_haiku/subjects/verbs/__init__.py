"""Verbs: one file per question about a subject.

A file in this folder needs no entry anywhere: its functions decorated by `verb` are
methods of `Subject`, and commands.
"""

import importlib
import pkgutil

from mha_haiku.subjects.subject import VERBS, verb

__all__ = ["VERBS", "verb"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
