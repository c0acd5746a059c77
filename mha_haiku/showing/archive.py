"""Records of arrays as one `.npz` file: an array per array, and JSON for the rest.

A record is a named tuple or a dataclass of text, numbers, arrays, records, and tuples
and mappings of these. The file has each array by its place in the record
(`examples.0.weights.1`), and everything else in the text `fields`. Nothing is pickled,
and a field that is added with a default can be missing from a file.
"""

import dataclasses
import functools
import json
import os
import types
import typing
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mha_haiku.core import checks

FORMAT = 2
_FIELDS = "fields"
_NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


def save(path: str | os.PathLike[str], record: Any) -> Path:
    """Writes a record, whole or not at all."""
    arrays: dict[str, np.ndarray] = {}
    fields = {"format": FORMAT, "record": _encoded(record, "", arrays, {})}
    arrays[_FIELDS] = np.array(json.dumps(fields))
    return checks.write_file(path, lambda file: np.savez(file, **arrays))


def load(path: str | os.PathLike[str], kind: type, *, written_by: str) -> Any:
    """Loads the record of a class, and checks the type of each field.

    `written_by` is the command that writes such a file, for the message of an error.
    """
    arrays = arrays_of(path)
    try:
        fields = json.loads(str(arrays.pop(_FIELDS)))
        found = fields["format"]
    except (KeyError, TypeError, ValueError, RecursionError):
        found = None
    if found != FORMAT:
        raise checks.ConfigError(
            f"{path} is not of format {FORMAT}, the one that this version reads. Write "
            f"it again with\n{written_by}"
        )
    try:
        return _decoded(kind, fields.get("record"), "", arrays)
    except ValueError as error:
        raise checks.ConfigError(f"{path}: {error}") from None


def arrays_of(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file by name, without unpickling anything."""
    try:
        path = checks.regular_file(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise checks.ConfigError(f"{path} does not exist.") from None
    except OSError as error:
        raise checks.ConfigError(
            f"{path} cannot be read: {error.strerror or error}."
        ) from None
    # Raised for files that are not archives, are damaged, or hold pickled objects.
    except (EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise checks.ConfigError(
            f"{path} is not a readable .npz archive of plain arrays: {error}"
        ) from None


def _encoded(value, name, arrays, names) -> Any:
    """Encodes a value as JSON; an array becomes its name."""
    # `names` has arrays by identity: one that stands in several places is stored once.

    def inner(part, key):
        return _encoded(part, f"{name}.{key}" if name else str(key), arrays, names)

    if isinstance(value, np.ndarray):
        if id(value) not in names:
            names[id(value)] = name
            arrays[name] = value.astype(np.str_) if value.dtype == object else value
        return names[id(value)]
    if isinstance(value, Mapping):
        return {key: inner(part, key) for key, part in value.items()}
    if fields := _fields(type(value)):
        return {key: inner(getattr(value, key), key) for key in fields}
    if isinstance(value, tuple | list):
        return [inner(part, i) for i, part in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """Finds the types of a record's fields, by their names; {}: no record."""
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return typing.get_type_hints(kind)
    return {}


def _decoded(kind, value, name, arrays) -> Any:
    """Decodes a value of a type from JSON."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)

    def inner(part_kind, part, key):
        return _decoded(part_kind, part, f"{name}.{key}" if name else key, arrays)

    if origin is types.UnionType:
        if value is None and types.NoneType in parts:
            return None
        (known,) = (each for each in parts if each is not types.NoneType)
        return _decoded(known, value, name, arrays)
    if kind is np.ndarray:
        if not isinstance(value, str) or value not in arrays:
            near = checks.nearest(str(value), arrays)
            raise ValueError(f"there is no array {value!r} for {name}.{near}")
        return arrays[value]
    if origin is tuple:
        _is_of(name, value, list, "a list")
        kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
        if len(kinds) != len(value):
            raise ValueError(f"{name} must have {len(kinds)} parts, got {len(value)}.")
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(inner(each, part, str(i)) for i, (each, part) in pairs)
    if origin is Mapping:
        _is_of(name, value, dict, "a mapping")
        return {key: inner(parts[1], part, key) for key, part in value.items()}
    if fields := _fields(kind):
        _is_of(name, value, dict, f"a {kind.__name__}")
        for key in value:
            checks.choice(f"a field of {name or 'the file'}", key, list(fields))
        given = {key: inner(fields[key], part, key) for key, part in value.items()}
        try:
            return kind(**given)
        except TypeError as error:  # of a field without a default
            raise ValueError(f"{name or 'the file'} is incomplete: {error}.") from None
    is_bool = isinstance(value, bool) and kind is not bool
    wanted = (int, float) if kind is float else kind
    _is_of(name, None if is_bool else value, wanted, _NAMES[kind])
    return value


def _is_of(name, value, kind, described) -> None:
    if not isinstance(value, kind):
        given = type(value).__name__
        raise ValueError(f"{name or 'the file'} must be {described}, got {given}.")
