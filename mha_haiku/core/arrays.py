"""Files of arrays: safetensors, of which each array is read on demand.

Only formats that hold nothing but numbers are read. A pickled file (`.bin`, `.pt`) runs
its author's code when it is opened, and is rejected.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mha_haiku.core import checks

PICKLED = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")

METADATA = "__metadata__"  # reserved by safetensors in the header
_MOST_JSON = 2**28  # bytes of a JSON file; a larger file is damaged


class Stored(NamedTuple):
    """An array in a file."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Reads the arrays of a safetensors file, by name; rejects a damaged one."""
    import safetensors

    try:
        # The library takes the last of two arrays of one name.
        with checks.regular_file(path).open("rb") as file:
            opened = safetensors.safe_open(path, framework="numpy")
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size), object_pairs_hook=list)
        check_names_once(path, [name for name, _ in header])
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except OSError as error:
        reason = error.strerror or error
        raise checks.ConfigError(f"{path} cannot be read: {reason}.") from None
    except safetensors.SafetensorError as error:
        raise checks.ConfigError(
            f"{path} is damaged, cut off or not a safetensors file: {error}."
        ) from None

    def read(name: str) -> np.ndarray:
        try:
            return opened.get_tensor(name)
        except (safetensors.SafetensorError, TypeError, ValueError) as error:
            raise checks.ConfigError(
                f"{path} has {name}, which NumPy cannot hold: {error}."
            ) from None

    return {
        name: Stored(tuple(shape), functools.partial(read, name))
        for name, shape in shapes.items()
    }


def read_shards(index: Path) -> dict[str, Stored]:
    """Reads the arrays of all files that a `*.safetensors.index.json` names.

    These are in its folder or below.
    """
    file_of = read_json(index).get("weight_map")
    if not (
        isinstance(file_of, dict)
        and file_of
        and all(isinstance(file, str) for file in file_of.values())
    ):
        raise checks.ConfigError(
            f'{index} is damaged: it must have a "weight_map" of names to files.'
        )
    arrays: dict[str, Stored] = {}
    for file in sorted(set(file_of.values())):
        # By the name alone: in the hub's cache, files are links out of the folder.
        name = Path(os.path.normpath(file))
        if name.is_absolute() or name.parts[:1] == ("..",):
            raise checks.ConfigError(
                f"{index} must name files in its folder or below, got {file!r}."
            )
        path = index.parent / name
        if not os.path.exists(path):
            raise checks.ConfigError(f"{index} names {file!r}, which does not exist.")
        shard = read_safetensors(path)
        check_names_once(index, [*arrays, *shard])
        arrays |= shard
    missing = [name for name in file_of if name not in arrays]
    if missing:
        raise checks.ConfigError(
            f"{index} names arrays that its files lack: {checks.listed(missing)}."
        )
    return arrays


def read_npz(
    file: str | os.PathLike | BinaryIO, name: str = ""
) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file by name, without unpickling anything.

    Args:
      file: A path or an open file.
      name: The file's name in messages. Defaults to its path.
    """
    name = name or str(file)
    try:
        if isinstance(file, str | os.PathLike):
            with checks.regular_file(file).open("rb") as opened:
                return read_npz(opened, name)
        with np.load(file, allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
        for key, array in found.items():
            if not isinstance(array, np.ndarray):  # the bytes of another file
                raise ValueError(f"{key} is not an array.")
        return found
    except FileNotFoundError:
        raise checks.ConfigError(f"{name} does not exist.") from None
    except OSError as error:
        raise checks.ConfigError(
            f"{name} cannot be read: {error.strerror or error}."
        ) from None
    except checks.ConfigError:
        raise
    # zipfile, zlib and NumPy raise errors of many kinds for a file that is damaged.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise checks.ConfigError(
            f"{name} is not a readable .npz archive of plain arrays: {why}"
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
    """Reads the object in a JSON file, which may have no duplicate keys."""

    def once(pairs: list[tuple[str, Any]]):
        check_names_once(path, [name for name, _ in pairs])
        return dict(pairs)

    try:
        if os.path.isfile(path) and os.path.getsize(path) > _MOST_JSON:
            raise ValueError(f"it has more than {_MOST_JSON:,} bytes")
        content = json.loads(checks.text_of(path, path), object_pairs_hook=once)
    except checks.ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise checks.ConfigError(f"{path} is damaged, not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise checks.ConfigError(f"{path} must hold a JSON object.")
    return content


def check_names_once(path: Path, names: list[str]) -> None:
    """Raises ConfigError if a name occurs twice: readers would use the last."""
    doubled = [name for name, count in Counter(names).items() if count > 1]
    if doubled:
        raise checks.ConfigError(f"{path} repeats names: {checks.listed(doubled)}.")
