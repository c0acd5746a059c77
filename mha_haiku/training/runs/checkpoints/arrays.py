"""The arrays of a checkpoint: one safetensors file, compared by their names.

A name is the path of an array in the tree, ".params['encoder/norm']['scale']". The
file is a JSON header and the bytes of the arrays, which other tools can read.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from mha_haiku.core import arrays, checks

_ROOM = 2**16  # bytes that a checkpoint takes in addition to its arrays
_FIELD = re.compile(r"\.\w+|\[[^]]*\]")  # the first part of a name


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Describes each leaf of a tree by "dtype" and "shape"."""
    return {
        keystr(path): {"dtype": str(x.dtype), "shape": list(x.shape)}
        for path, x in jax.tree.leaves_with_path(tree)
    }


def fields(names: Iterable[str]) -> set[str]:
    """Collects the fields of a tree: the first parts of array names, ".params"."""
    return {match[0] for match in map(_FIELD.match, names) if match}


def of_fields(described: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """Selects the arrays that are in some fields of a tree; see `describe`."""
    return {name: x for name, x in described.items() if fields([name]) <= wanted}


def compare(
    saved: Mapping[str, Mapping[str, Any]],
    wanted: Mapping[str, Mapping[str, Any]],
    where: str,
) -> None:
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


def write(path: Path, tree: Any) -> None:
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


def read(path: Path, abstract: Any, names: Iterable[str] | None = None) -> Any:
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


def _shown(value) -> str:
    return value if isinstance(value, str) else str(tuple(value))
