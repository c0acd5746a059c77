"""Files of arrays: safetensors, of which each array is read on demand.

Only formats that hold nothing but numbers are read. A pickled file (`.bin`, `.pt`) runs
its author's code when it is opened, and is rejected.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import checks

PICKLED = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


class Stored(NamedTuple):
    """An array in a file."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Reads the arrays of a safetensors file, by name; rejects a damaged one."""
    import safetensors

    try:
        opened = safetensors.safe_open(path, framework="numpy")
    except OSError as error:
        reason = error.strerror or error
        raise checks.ConfigError(f"{path} cannot be read: {reason}.") from None
    except safetensors.SafetensorError as error:
        raise checks.ConfigError(
            f"{path} is damaged, cut off or not a safetensors file: {error}."
        ) from None
    return {
        name: Stored(
            tuple(opened.get_slice(name).get_shape()),
            functools.partial(opened.get_tensor, name),
        )
        for name in opened.keys()  # noqa: SIM118
    }


def read_shards(index: Path) -> dict[str, Stored]:
    """Reads the arrays of all files that a `*.safetensors.index.json` names."""
    file_of = read_json(index).get("weight_map", {})
    arrays: dict[str, Stored] = {}
    for file in sorted(set(file_of.values())):
        path = index.parent / file
        if not os.path.exists(path):
            raise checks.ConfigError(f"{index} names {file!r}, which does not exist.")
        arrays |= read_safetensors(path)
    missing = [name for name in file_of if name not in arrays]
    if missing:
        raise checks.ConfigError(
            f"{index} names arrays that its files lack: {checks.listed(missing)}."
        )
    return arrays


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file by name, without unpickling anything."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise checks.ConfigError(f"{path} does not exist.") from None
    # zipfile, zlib and NumPy raise errors of many kinds for a file that is damaged.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise checks.ConfigError(
            f"{path} is not a readable .npz archive of plain arrays: {why}"
        ) from None


def write_safetensors(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """Writes arrays by name to a safetensors file, which torch's tools can read too."""
    import safetensors.numpy

    arrays = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    # The library makes files that only their owner can read; these have the umask's
    # mode.
    path = Path(path)
    path.touch()
    mode = path.stat().st_mode
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    path.chmod(mode)


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file."""
    try:
        content = json.loads(checks.text_of(path, path))
    except json.JSONDecodeError as error:
        raise checks.ConfigError(f"{path} is damaged, not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise checks.ConfigError(f"{path} must hold a JSON object.")
    return content
