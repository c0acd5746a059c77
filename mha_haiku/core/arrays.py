"""Files of arrays: safetensors, memory-mapped and read on demand.

Only formats that hold nothing but numbers are read. A pickled file (`.bin`, `.pt`) runs
its author's code when it is opened, and is rejected.
"""

import errno
import itertools
import json
import math
import os
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from mha_haiku.core import checks

PICKLED = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
METADATA = "__metadata__"  # reserved by safetensors in the header
_MOST_BYTES = 2**27  # of a header; a larger number means damage
# Bytes of a file per byte outside its holes; small files are not checked.
_MOST_SPARSE, _LEAST_SPARSE = 16, 2**20
_MOST_JSON = 2**28  # bytes of a JSON file; a larger file is damaged
# Unpacked bytes per byte of an .npz file; small archives are not checked.
_MOST_UNPACKED, _LEAST_UNPACKED = 100, 2**26


class Stored(NamedTuple):
    """An array in a file."""

    shape: tuple[int, ...]
    # Returns the array, as a view of the file where the format allows.
    read: Callable[[], np.ndarray]


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Reads the arrays of a safetensors file, by name; rejects a damaged one."""
    content = mapped(path)
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    if not 8 < start <= min(len(content), _MOST_BYTES):
        raise checks.ConfigError(
            f"{path} is cut off or not a safetensors file: its {len(content)} bytes do "
            "not hold its header."
        )
    try:
        pairs = json.loads(content[8:start].tobytes(), object_pairs_hook=list)
        arrays = [_entry(name, **dict(x)) for name, x in pairs if name != METADATA]
    except (ValueError, TypeError, RecursionError):
        raise checks.ConfigError(
            f"{path} is damaged: it has no header of a safetensors file."
        ) from None
    check_names_once(path, [name for name, *_ in arrays])
    check_apart(path, [(first, last, name) for name, *_, first, last in arrays])
    end = start + max((last for *_, last in arrays), default=0)
    if end != len(content):
        what = "is cut off" if end > len(content) else "is too long"
        raise checks.ConfigError(
            f"{path} {what}: its header describes {end} bytes, but it has "
            f"{len(content)}."
        )
    return {
        name: _view(path, content[start:], name, kind, shape, first, last)
        for name, kind, shape, first, last in arrays
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

    Sizes are checked before anything is unpacked: every array must have the bytes of
    its shape, and all together at most `_MOST_UNPACKED` times the file's size.

    Args:
      file: A path or an open file.
      name: The file's name in messages. Defaults to its path.
    """
    name = name or str(file)
    try:
        if isinstance(file, str | os.PathLike):
            with checks.regular_file(file).open("rb") as opened:
                return read_npz(opened, name)
        _check_unpacked(file)
        with np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise checks.ConfigError(f"{name} does not exist.") from None
    except OSError as error:
        raise checks.ConfigError(
            f"{name} cannot be read: {error.strerror or error}."
        ) from None
    except checks.ConfigError:
        raise
    # Raised for files that are not archives, are damaged, or hold pickled objects.
    except (
        ArithmeticError,
        EOFError,
        MemoryError,  # of a header, too
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
        tokenize.TokenError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise checks.ConfigError(
            f"{name} is not a readable .npz archive of plain arrays: {why}"
        ) from None


def _check_unpacked(file: BinaryIO) -> None:
    """Raises ValueError if members of an archive do not have the sizes they declare."""
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        if unpacked > max(_MOST_UNPACKED * size, _LEAST_UNPACKED):
            raise ValueError(
                f"its {size:,} bytes would be {unpacked:,} when unpacked, and at most "
                f"{_MOST_UNPACKED} times as many can be read."
            )
        for member in members:
            with archive.open(member) as entry:
                version = np.lib.format.read_magic(entry)
                checks.choice("the version of .npy", version, _NPY_HEADERS)
                shape, _, dtype = _NPY_HEADERS[version](entry)
                left = member.file_size - entry.tell()
            if dtype.hasobject:
                raise ValueError(
                    f"{member.filename} holds objects (allow_pickle=False)."
                )
            if math.prod(shape) * (dtype.itemsize or 1) != left:
                raise ValueError(
                    f"{member.filename} is {dtype} of shape {shape} in {left:,} bytes."
                )
    file.seek(0)


def write_safetensors(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """Writes arrays by name to a safetensors file, which torch's tools can read too."""
    import safetensors.numpy

    arrays = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})


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


def mapped(path: Path) -> np.ndarray:
    """Maps a file into memory, so that only the bytes in use are read."""
    try:
        with checks.regular_file(path).open("rb") as file:
            content = np.memmap(file, np.uint8, "r").view(np.ndarray)
            held = _bytes_held(file, len(content))
    except ValueError:  # a file of size 0 cannot be mapped
        raise checks.ConfigError(f"{path} is empty or cut off.") from None
    except OSError as error:
        raise checks.ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    # A truncated download, or a header that asks for more memory than there is.
    if len(content) > max(_MOST_SPARSE * held, _LEAST_SPARSE):
        raise checks.ConfigError(
            f"{path} is cut off: of its {len(content)} bytes {held} are on the disk."
        )
    return content


def _bytes_held(file: BinaryIO, size: int) -> int:
    """Counts the bytes of a file outside its holes.

    The number of its blocks would not do: a file system may compress them, and some
    update the count only a while after writing.
    """
    held = place = 0
    try:
        while place < size:
            first = os.lseek(file.fileno(), place, os.SEEK_DATA)
            place = os.lseek(file.fileno(), first, os.SEEK_HOLE)
            held += place - first
    except (AttributeError, OSError) as error:
        # ENXIO: a hole is at the end. Otherwise holes are not supported here.
        return held if getattr(error, "errno", 0) == errno.ENXIO else size
    return held


def _entry(name: str, dtype: Any, shape: Any, data_offsets: Any) -> tuple:
    first, last = data_offsets
    for number in (*shape, first, last):
        checks.non_negative_integer(name, number)
    if not isinstance(dtype, str):
        raise TypeError
    return name, dtype, tuple(shape), first, last


def check_apart(path: Path, spans: Iterable[tuple[int, int, str]]) -> None:
    """Raises ConfigError if two arrays (first byte, last, name) share bytes."""
    spans = sorted(span for span in spans if span[0] < span[1])
    for (_, last, name), (first, _, other) in itertools.pairwise(spans):
        if first < last:
            raise checks.ConfigError(
                f"{path} is damaged: {name} and {other} share bytes."
            )


def _view(
    path: Path,
    content: np.ndarray,
    name: str,
    kind: str,
    shape: tuple[int, ...],
    first: int,
    last: int,
) -> Stored:
    dtype = np.dtype(_DTYPES.get(kind, np.uint8))
    count, size = math.prod(shape), last - first
    fits = count * dtype.itemsize == size if kind in _DTYPES else count <= 8 * size
    if not fits:
        raise checks.ConfigError(
            f"{path} is damaged: {name} of {kind} {list(shape)} does not fit bytes "
            f"{first} to {last}."
        )

    def read():
        if kind not in _DTYPES:
            raise checks.ConfigError(
                f"{path} has {name} as {kind}, which is not supported; it must be one "
                f"of {', '.join(_DTYPES)}."
            )
        return content[first:last].view(dtype).reshape(shape)

    return Stored(shape, read)
