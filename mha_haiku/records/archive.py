"""Records of arrays as an `.npz` file: its arrays, and JSON for the rest.

A record is a named tuple or a dataclass of text, numbers, arrays, records, and tuples
and mappings of these. In the file, arrays are named by their place in the record
(`examples.0.weights.1`), and everything else is in the text `fields`. Nothing is
pickled, and a field with a default may be missing from a file.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mha_haiku.core import arrays, checks, fields

FORMAT = 3
_FIELDS = "fields"


class FormatError(checks.ConfigError):
    """A file is in the format of another version."""


def save(path: str | os.PathLike[str], record: Any) -> Path:
    """Writes a record to a file atomically."""
    named: dict[str, np.ndarray] = {}
    stored = {"format": FORMAT, "record": _encoded(record, "", named, {})}
    named[_FIELDS] = np.array(json.dumps(stored))
    return checks.write_file(
        path,
        lambda file: np.savez(file, **named),  # pyright: ignore[reportArgumentType]
    )


def load(path: str | os.PathLike[str], kind: type, *, written_by: str) -> Any:
    """Loads a record of the class `kind`.

    `written_by` is the command that writes such files, for error messages.
    """
    named = arrays.read_npz(checks.as_path(path))
    stored = json.loads(str(named.pop(_FIELDS, "{}")))
    if stored.get("format") != FORMAT:
        raise FormatError(
            f"{path} is not in format {FORMAT}, which this version reads. Write it "
            f"again with\n{written_by}"
        )
    return fields.decoded(kind, stored["record"], named)


def _encoded(
    value: Any, name: str, named: dict[str, np.ndarray], names: dict[int, str]
) -> Any:
    """Encodes a value as JSON; an array becomes its name."""
    # `names` has the names of arrays by id, so that a repeated array is stored once.

    def inner(part: Any, key: str | int) -> Any:
        return _encoded(part, f"{name}.{key}" if name else str(key), named, names)

    if isinstance(value, np.ndarray):
        if id(value) not in names:
            names[id(value)] = name
            named[name] = value.astype(np.str_) if value.dtype == object else value
        return names[id(value)]
    if isinstance(value, Mapping):
        return {key: inner(part, key) for key, part in value.items()}
    if kinds := fields.kinds_of(type(value)):
        return {key: inner(getattr(value, key), key) for key in kinds}
    if isinstance(value, tuple | list):
        return [inner(part, i) for i, part in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value
