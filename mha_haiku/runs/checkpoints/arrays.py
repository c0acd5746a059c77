"""The arrays of a checkpoint: one safetensors file, compared by their names.

A name is the path of an array in the tree, ".params['encoder/norm']['scale']". The
file is a JSON header and the bytes of the arrays; other tools read it as it is.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from mha_haiku.checks import ConfigError

_ROOM = 2**16  # bytes that a checkpoint takes besides its arrays
_METADATA = "__metadata__"  # a name that safetensors reserves in the header
_MOST_BYTES = 2**26  # of a header; a larger number is damage
_FIELD = re.compile(r"\.\w+|\[[^]]*\]")  # the first part of a name


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Returns "dtype" and "shape" of each leaf of a tree, by its name."""
    return {
        keystr(path): {"dtype": str(x.dtype), "shape": list(x.shape)}
        for path, x in jax.tree.leaves_with_path(tree)
    }


def fields(names: Iterable[str]) -> set[str]:
    """Returns the fields of a tree: the first parts of its arrays' names, ".params"."""
    return {_FIELD.match(name)[0] for name in names if _FIELD.match(name)}


def of_fields(described: dict[str, Any], wanted: set[str]) -> dict[str, Any]:
    """Returns the arrays that are in some fields of a tree; see `describe`."""
    return {name: x for name, x in described.items() if fields([name]) <= wanted}


def compare(
    saved: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]], where: str
) -> None:
    """Raises an error unless the saved arrays are those that are wanted.

    Raises:
      ConfigError: If they differ in names, shapes or dtypes; it names the parameter.
    """
    missing = [name for name in wanted if name not in saved]
    unknown = [name for name in saved if name not in wanted]
    if missing or unknown:
        parts = [("lacks", missing), ("also has", unknown)]
        parts = [f"it {verb} {_listed(names)}" for verb, names in parts if names]
        raise ConfigError(
            f"{where} does not hold the parameters of this config's model:\n"
            f"{'; '.join(parts)}."
        )
    for name, has in wanted.items():
        for what in ("shape", "dtype"):
            before, after = saved[name][what], has[what]
            if before != after:
                raise ConfigError(
                    f"{where} has the {what} {_shown(before)} at {name}; this "
                    f"config's model has {_shown(after)}."
                )


def write(path: Path, tree: Any) -> None:
    """Writes a tree of host arrays as one safetensors file.

    Raises:
      ValueError: If two arrays have one name, or a name is reserved.
      OSError: If the disk has no room for them.
    """
    import safetensors.numpy

    leaves = jax.tree.leaves_with_path(tree)
    arrays = {keystr(place): np.asarray(x, order="C") for place, x in leaves}
    if len(arrays) < len(leaves) or _METADATA in arrays:
        raise ValueError(f"arrays must have names of their own, none {_METADATA!r}.")
    size = sum(array.nbytes for array in arrays.values())
    if shutil.disk_usage(path.parent).free < size + _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    safetensors.numpy.save_file(arrays, path)


def read(path: Path, abstract: Any, names: Iterable[str] | None = None) -> Any:
    """Returns a tree of arrays of a safetensors file, on the host.

    Args:
      path: What `write` wrote.
      abstract: A tree of the shapes and dtypes to read; see `compare`.
      names: The names of all arrays of the file; None: those of the tree.

    Raises:
      ValueError: If the file holds anything else, or a name twice.
    """
    import safetensors

    wanted = describe(abstract)
    if sorted(_names(path)) != sorted(names or wanted):
        raise ValueError(f"{path} must hold the arrays of its manifest, each once.")
    with safetensors.safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in wanted}
    for name, array in arrays.items():
        if describe(array)[""] != wanted[name]:
            raise ValueError(f"{path} must hold {wanted[name]} at {name}.")
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays.values())


def _names(path) -> list[str]:
    """Returns the names in a safetensors file, with repetitions.

    safetensors itself would silently take the last of several arrays of one name.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MOST_BYTES:
            raise ValueError(f"{path} has a header of {size} bytes.")
        pairs = json.loads(file.read(size), object_pairs_hook=list)
    return [name for name, _ in pairs if name != _METADATA]


def _listed(names) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _shown(value) -> str:
    return value if isinstance(value, str) else str(tuple(value))
