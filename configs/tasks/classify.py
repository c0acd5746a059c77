"""Name the outermost operation of an expression of Python's library."""

import ast
import dataclasses
import functools
import pathlib
import platform
import sysconfig
from typing import Any, ClassVar

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import labeled_texts

# The class of an expression: its outermost operation, which is done last.
_KINDS = {
    ast.Attribute: "attribute",  # settings.names
    ast.BinOp: "arithmetic",  # f(a) + b
    ast.BoolOp: "logic",  # a < b or c
    ast.Call: "call",  # f(a + b)
    ast.Compare: "comparison",  # f(a) < b
    ast.Dict: "collection",  # {a: b}
    ast.List: "collection",  # [a, b]
    ast.Subscript: "subscript",  # a[f(b)]
    ast.Tuple: "collection",  # a, b
}
KINDS = tuple(sorted(set(_KINDS.values())))

_MODULES = (
    "argparse ast bdb calendar codecs configparser contextlib dataclasses datetime "
    "difflib doctest enum fractions functools gettext heapq inspect ipaddress locale "
    "optparse os pdb pickle platform plistlib pprint pydoc random shutil smtplib "
    "socket socketserver statistics string subprocess tarfile tempfile textwrap "
    "threading tokenize traceback turtle types typing uuid warnings weakref zipfile"
).split()
_BYTES = range(16, 48)  # of an expression


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classify(labeled_texts.LabeledTexts):
    """The texts are expressions, unless `path` is a file with other texts.

    The target is the outermost operation: `f(a + b)` is a call, `f(a) + b` is
    arithmetic. Words say little about it, brackets much. All CPython versions have the
    modules, but with different texts.
    """

    name: ClassVar[str] = "classify"
    path: str = fields.field(
        "",
        "a CSV or TSV file with the columns text and label; empty: expressions of "
        "Python's library, by their outermost operation",
        section="data",
        is_path=True,
    )

    @functools.cached_property
    def _rows(self) -> list[tuple[str, str]]:
        return super()._rows if self.path else list(load())

    @functools.cached_property
    def _text(self) -> dict[str, Any]:
        name = self.path or f"library of Python {platform.python_version()}"
        return super()._text | {"name": name}


@functools.cache
def load() -> tuple[tuple[str, str], ...]:
    """Loads expressions of 16 to 47 bytes, each once and with its kind, by module."""
    kinds: dict[str, str] = {}
    for name in _MODULES:
        source = _source(name)
        kinds |= dict(() if source is None else expressions(source))
    if not kinds:
        raise checks.ConfigError(
            "path must be given here: Python's library, the text without a path, is "
            f"not in {sysconfig.get_path('stdlib')}."
        )
    return tuple(kinds.items())


def expressions(source: str) -> list[tuple[str, str]]:
    """Lists expressions of a module and their kinds, nested expressions too."""
    lines = [line.encode() for line in source.splitlines()]
    found = []
    for node in ast.walk(ast.parse(source)):
        kind = _KINDS.get(type(node))
        if kind is None or node.lineno != node.end_lineno:
            continue
        start, stop = node.col_offset, node.end_col_offset  # of bytes
        if stop - start in _BYTES:
            found.append((lines[node.lineno - 1][start:stop].decode(), kind))
    return found


def _source(name: str) -> str | None:
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in (folder / f"{name}.py", folder / name / "__init__.py"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
