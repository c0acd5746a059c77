"""The contents of a checkpoint: arrays in one safetensors file, and the manifest.

The name of an array is its path in the tree, ".params['encoder/norm']['scale']". The
safetensors file is a JSON header and the bytes of the arrays, which other tools read.

manifest.json has the sha256 of each file. A checkpoint must match its manifest: no file
changed, cut short, missing or added, and no folder or link instead of a file.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from mha_haiku.core import arrays, checks, fields

NAME = "manifest.json"
_MOST_BYTES = 2**26  # of a manifest; a larger file is damage
_ROOM = 2**16  # bytes that a checkpoint takes in addition to its arrays
_FIELD = re.compile(r"\.\w+|\[[^]]*\]")  # the first part of a name


Described = Mapping[str, Mapping[str, Any]]  # "dtype" and "shape" by name of an array


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Describes each leaf of a tree by "dtype" and "shape"."""
    return {
        keystr(path): {"dtype": str(x.dtype), "shape": list(x.shape)}
        for path, x in jax.tree.leaves_with_path(tree)
    }


def fields_of(names: Iterable[str]) -> set[str]:
    """Collects the fields of a tree: the first parts of array names, ".params"."""
    return {match[0] for match in map(_FIELD.match, names) if match}


def compare(saved: Described, wanted: Described, where: str) -> None:
    """Raises ConfigError, with the parameter, unless saved arrays are as wanted."""
    missing = [name for name in wanted if name not in saved]
    unknown = [name for name in saved if name not in wanted]
    if differ := checks.lacks_and_has(missing, unknown, 3):
        raise checks.ConfigError(
            f"{where} does not hold the parameters of this config's model:\n{differ}."
        )
    for name, has in wanted.items():
        for what in ("shape", "dtype"):
            before, after = saved[name][what], has[what]
            if before != after:
                raise checks.ConfigError(
                    f"{where} has the {what} {_shown(before)} at {name}; this "
                    f"config's model has {_shown(after)}."
                )


def write_arrays(path: Path, tree: Any) -> None:
    """Writes a tree of host arrays as one safetensors file; OSError without room."""
    import safetensors.numpy

    leaves = jax.tree.leaves_with_path(tree)
    named = {keystr(place): np.asarray(x, order="C") for place, x in leaves}
    if len(named) < len(leaves) or arrays.METADATA in named:
        raise ValueError(
            f"arrays must have names of their own, none {arrays.METADATA!r}."
        )
    size = sum(array.nbytes for array in named.values())
    if shutil.disk_usage(path.parent).free < size + _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    safetensors.numpy.save_file(named, path)


def read_arrays(path: Path, abstract: Any, names: Iterable[str] | None = None) -> Any:
    """Reads a tree of arrays from a safetensors file, on the host.

    The file must hold the arrays of these names, by default all of `abstract`, a tree
    of the shapes and dtypes to read; else it is damaged, a ValueError.
    """
    wanted = describe(abstract)
    stored = arrays.read_safetensors(path)
    if set(stored) != set(names or wanted):
        raise ValueError(f"{path} must hold the arrays of its manifest.")
    found = {name: np.array(stored[name].read()) for name in wanted}
    for name, array in found.items():
        if describe(array)[""] != wanted[name]:
            raise ValueError(f"{path} must hold {wanted[name]} at {name}.")
    return jax.tree.unflatten(jax.tree.structure(abstract), found.values())


class DamageError(Exception):
    """A checkpoint differs from what was written; the message names the difference."""


class Manifest(NamedTuple):
    """The content of manifest.json."""

    step: int
    held_out_loss: float | None
    arrays: Described
    files: Mapping[str, str]  # sha256 of each file, by its name


class _Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def write(
    folder: Path,
    *,
    step: int,
    held_out_loss: float | None,
    arrays: Described,
) -> None:
    """Writes the manifest of the files in `folder`, and flushes all of them to disk."""
    files = {name: _digest(folder / name) for name in _names(folder)}
    manifest = Manifest(step, held_out_loss, arrays, files)
    text = json.dumps(manifest._asdict(), indent=1, allow_nan=False)
    (folder / NAME).write_text(text, encoding="utf-8")
    for name in (*files, NAME):
        _to_disk(folder / name)
    _to_disk(folder)


def read(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint, without checking the files."""
    path = folder / NAME
    if folder.is_symlink():
        raise DamageError("it is a link")
    if not folder.is_dir():
        raise DamageError("it is not a folder")
    if path.is_symlink() or not path.is_file():
        raise DamageError(f"it has no {NAME}")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError
        contents = json.loads(path.read_bytes())
        contents.pop("sha256", None)  # of manifests that were written before
        manifest = _read_contents(contents)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamageError(f"{NAME} is damaged") from None
    return manifest


def check(folder: Path) -> Manifest:
    """Checks all files of a checkpoint, and returns its manifest."""
    manifest = read(folder)
    if folder.name != str(manifest.step):
        raise DamageError(f"{NAME} is of step {manifest.step}")
    try:
        present = set(_names(folder)) - {NAME}
        for name in sorted(present - set(manifest.files)):
            raise DamageError(f"{name} was added")
        for name, digest in sorted(manifest.files.items()):
            if name not in present:
                raise DamageError(f"{name} is missing")
            size, most = (folder / name).stat().st_size, checks.memory()
            if size > most:
                raise checks.ConfigError(
                    f"{folder / name} has {size:,} bytes, and this machine has "
                    f"{most:,} of memory."
                )
            if _digest(folder / name) != digest:
                raise DamageError(f"{name} is not as it was written")
    except OSError as error:
        why = f"{error.filename} cannot be read: {error.strerror}"
        raise DamageError(why) from None
    return manifest


def _shown(value: str | Iterable[int]) -> str:
    return value if isinstance(value, str) else str(tuple(value))


def _names(folder: Path) -> list[str]:
    """Lists the names of the files in a folder, which must hold nothing else."""
    paths = sorted(folder.iterdir())
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise DamageError(f"{path.name} is not a file")
    return [path.name for path in paths]


def _read_contents(contents: dict[str, Any]) -> Manifest:
    manifest = fields.decoded(Manifest, contents, "")
    checks.non_negative_integer("step", manifest.step)
    if manifest.held_out_loss is not None:
        checks.number("held_out_loss", manifest.held_out_loss)
    for name, digest in manifest.files.items():
        is_name = name == os.path.basename(name) and name not in ("", ".", "..", NAME)
        if not is_name or len(digest) != 64:
            raise ValueError("files must be names with a sha256")
    for name, described in manifest.arrays.items():
        fields.decoded(_Array, described, name)
        for size in described["shape"]:
            checks.integer_in(name, size, 0, 2**63)
    return manifest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
