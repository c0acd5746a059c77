"""Checkpoints: a folder per step, which appears whole and is verified when read.

`<step>/arrays.safetensors` has the arrays, named by their paths in the tree, such as
".params['encoder/norm']['scale']"; `<step>/manifest.json` the step, and the sha256 of
the arrays and of itself. Both are written to another folder, which then gets its name
in one step: a `<step>/` that does not match its manifest was damaged later.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from mha_haiku.core import checks, fields
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs.files import SaveError

_logger = logging.getLogger("mha_haiku")

_ARRAYS, _MANIFEST = "arrays.safetensors", "manifest.json"
_STEP = re.compile("0|[1-9][0-9]{0,17}")
_PARTIAL = re.compile(r"\.\d+\.partial")  # what a kill leaves
_ROOM = 2**16  # bytes that a checkpoint takes in addition to its arrays
_FIELD = re.compile(r"\.\w+|\[[^]]*\]")  # the first part of an array's name

Arrays = Mapping[str, np.ndarray]


class Checkpoint(NamedTuple):
    """A checkpoint that is as it was written."""

    folder: Path
    step: int
    held_out_loss: float | None
    window: Mapping[str, float]  # sums of a report that was not due yet; {} if none

    def __str__(self) -> str:
        return f"The checkpoint of step {self.step} in {self.folder.parent}"

    def arrays(self, parts: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """Reads the arrays by name; only of these fields of the tree, if any."""
        with _opened(self.folder) as file:
            names = [x for x in file.keys() if not parts or fields_of([x]) <= {*parts}]
            return {name: file.get_tensor(name) for name in names}


class _Manifest(NamedTuple):
    step: int
    held_out_loss: float | None
    files: Mapping[str, str]  # sha256 by name
    window: Mapping[str, float] = {}


class _DamageError(Exception):
    """A checkpoint differs from what was written; the message names the difference."""


def steps(root: Path) -> list[int]:
    """Lists the steps that exist, good or not, ascending."""
    names = os.listdir(root) if root.is_dir() else []
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def newest(root: Path) -> Checkpoint | None:
    """Finds the newest good step, or None if nothing has been saved.

    It logs a warning about each damaged step after it. ConfigError if no step is good,
    or one cannot be read.
    """
    damaged = []
    for step in reversed(steps(root)):
        try:
            good = _verified(root / str(step))
        except _DamageError as error:
            damaged.append(f"step {step}: {error}")
            continue
        if damaged:
            _logger.warning(
                f"In {root} these checkpoints are damaged: {'; '.join(damaged)}. The "
                f"newest good one is of step {step}."
            )
        return good
    if damaged:
        raise ConfigError(
            f"No checkpoint in {root} is good: {'; '.join(damaged)}.\n"
            "Put back a copy of one, take another workdir, or remove this one to "
            "start from the beginning."
        )
    return None


def read(root: Path, step: int | None = None) -> Checkpoint:
    """Verifies a checkpoint, by default the newest good one.

    Raises:
      ConfigError: If there is no such step, or it is damaged.
    """
    listed = ", ".join(map(str, steps(root)))
    if step is None and (found := newest(root)) is not None:
        return found
    if step is None:
        raise ConfigError(f"There are no checkpoints in {root}.")
    if step not in steps(root):
        raise ConfigError(
            f"There is no checkpoint of step {step} in {root}; there are: {listed}."
        )
    try:
        return _verified(root / str(step))
    except _DamageError as error:
        raise ConfigError(
            f"The checkpoint of step {step} in {root} is damaged: {error}.\n"
            f"There are: {listed}."
        ) from None


def save(
    root: Path,
    step: int,
    tree: Any,
    *,
    held_out_loss: float | None = None,
    window: Mapping[str, float] | None = None,
) -> None:
    """Writes a tree of host arrays; keeps the newest two steps, and the best.

    The smallest `held_out_loss` marks the best. What is at this step, which can only be
    damaged or the same, is replaced.

    Raises:
      SaveError: If it cannot be written; then the others are unchanged.
      ValueError: If `held_out_loss` is not finite.
    """
    if held_out_loss is not None and not math.isfinite(held_out_loss):
        raise ValueError(f"held_out_loss must be finite, got {held_out_loss}.")
    partial = root / f".{step}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name in filter(_PARTIAL.fullmatch, os.listdir(root)):
            shutil.rmtree(root / name)
        partial.mkdir()
        digest = _write_arrays(partial / _ARRAYS, tree)
        manifest = _Manifest(step, held_out_loss, {_ARRAYS: digest}, dict(window or {}))
        contents = manifest._asdict()
        text = json.dumps(contents | {"sha256": _sha256_of(contents)}, indent=1)
        (partial / _MANIFEST).write_text(text)
        for path in (partial / _ARRAYS, partial / _MANIFEST, partial):
            _to_disk(path)
        if (root / str(step)).exists():
            _remove(root / str(step))
        os.replace(partial, root / str(step))
        _to_disk(root)
    except Exception as error:  # safetensors has errors of its own
        shutil.rmtree(partial, ignore_errors=True)
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        good = [x for x in steps(root) if x < step]
        kept = (
            f"the newest before it is of step {good[-1]}" if good else "there is none"
        )
        raise SaveError(
            f"The checkpoint of step {step} could not be written in {root} ({why}); "
            f"{kept}."
        ) from error
    _prune(root, step)


def restored(arrays: Arrays, abstract: Any, where: str) -> Any:
    """Makes a tree from arrays by name.

    `abstract` has the shapes and dtypes of the tree, as from `jax.eval_shape`.

    Raises:
      ConfigError: If the arrays have other names, shapes or dtypes.
    """
    leaves = jax.tree.leaves_with_path(abstract)
    requested = {keystr(path): leaf for path, leaf in leaves}
    missing = [name for name in requested if name not in arrays]
    unknown = [name for name in arrays if name not in requested]
    if differ := checks.lacks_and_has(missing, unknown, 3):
        raise ConfigError(
            f"{where} does not hold the parameters of this config's model:\n{differ}."
        )
    for name, leaf in requested.items():
        for what in ("shape", "dtype"):
            before, after = getattr(arrays[name], what), getattr(leaf, what)
            if before != after:
                raise ConfigError(
                    f"{where} has the {what} {before} at {name}; this config's model "
                    f"has {after}."
                )
    ordered = [arrays[name] for name in requested]
    return jax.tree.unflatten(jax.tree.structure(abstract), ordered)


def fields_of(names: Iterable[str]) -> set[str]:
    """Collects the fields of a tree: the first parts of array names, ".params"."""
    return {match[0] for match in map(_FIELD.match, names) if match}


def _opened(folder: Path) -> Any:
    import safetensors

    return safetensors.safe_open(folder / _ARRAYS, framework="numpy")


def _verified(folder: Path) -> Checkpoint:
    """Reads a checkpoint's manifest, and the sha256 of its arrays.

    What is missing or different is damage. What cannot be read, as without permission,
    is a ConfigError: the checkpoint may be good.
    """
    try:
        manifest = _read_manifest(folder)
        if folder.name != str(manifest.step):
            raise _DamageError(f"{_MANIFEST} is of step {manifest.step}")
        if _sha256(folder / _ARRAYS) != manifest.files[_ARRAYS]:
            raise _DamageError(f"{_ARRAYS} is not as it was written")
    except (FileNotFoundError, NotADirectoryError) as error:
        name = os.path.basename(error.filename)
        raise _DamageError(f"it has no {name}") from None
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}."
        ) from None
    return Checkpoint(folder, manifest.step, manifest.held_out_loss, manifest.window)


def _read_manifest(folder: Path) -> _Manifest:
    content = (folder / _MANIFEST).read_bytes()
    try:
        contents = json.loads(content)
        digest = contents.pop("sha256", None)
        if digest is None:  # mha_haiku 0.2 wrote no sha256, and the window apart
            window, files = folder / "window.json", contents["files"]
            if files.pop(window.name, None):
                contents["window"] = json.loads(window.read_bytes())
            del contents["arrays"]
        elif digest != _sha256_of(contents):
            raise ValueError
        manifest = fields.decoded(_Manifest, contents, "")
        if list(manifest.files) != [_ARRAYS]:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _DamageError(f"{_MANIFEST} is damaged") from None
    return manifest


def _write_arrays(path: Path, tree: Any) -> str:
    """Writes a tree of host arrays; returns the file's sha256."""
    import safetensors.numpy

    leaves = jax.tree.leaves_with_path(tree)
    arrays = {keystr(place): np.asarray(x, order="C") for place, x in leaves}
    if len(arrays) < len(leaves):
        raise ValueError("arrays must have names of their own")
    # safetensors maps the file into memory, where a full disk is fatal.
    size = sum(array.nbytes for array in arrays.values())
    if shutil.disk_usage(path.parent).free < size + _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    # It makes files that only their owner can read; these have the umask's mode.
    path.touch()
    mode = path.stat().st_mode
    safetensors.numpy.save_file(arrays, path)
    path.chmod(mode)
    return _sha256(path)


def _prune(root: Path, last: int) -> None:
    """Removes steps up to `last` but the newest two and that of the least loss."""
    saved, losses = [step for step in steps(root) if step <= last], {}
    for step in saved:
        try:
            losses[step] = _read_manifest(root / str(step)).held_out_loss
        except (_DamageError, FileNotFoundError, NotADirectoryError):
            losses[step] = None
    with_loss = [step for step in saved if losses[step] is not None]
    best = min(with_loss, key=losses.__getitem__, default=None)
    for step in saved[:-2]:
        if step != best:
            _remove(root / str(step))


def _remove(folder: Path) -> None:
    """Removes a step; first its manifest, so that a kill leaves no good one in part."""
    (folder / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of(contents: Mapping[str, Any]) -> str:
    text = json.dumps(contents, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _to_disk(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
