"""Checkpoints: a folder per step, which appears whole and is verified when read.

`<step>/arrays.safetensors` has the arrays, named by their paths in the tree, such as
".params['encoder/norm']['scale']"; `<step>/manifest.json` the step, and the sha256 of
the arrays and of itself. Both are written to another folder, which then gets its name
in one step: a `<step>/` that does not match its manifest was damaged later.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import files

_logger = logging.getLogger("mha_haiku")

_ARRAYS, _MANIFEST = "arrays.safetensors", "manifest.json"
_STEP = re.compile("0|[1-9][0-9]{0,17}")
_PARTIAL = re.compile(r"\.\d+\.partial")  # what a kill leaves
_OF_0_2 = ".health"  # a field that checkpoints of mha_haiku 0.2 have in addition

Arrays = Mapping[str, np.ndarray]


class Checkpoint(NamedTuple):
    """A checkpoint that is as it was written."""

    folder: Path
    step: int
    held_out_loss: float | None
    window: Mapping[str, float]  # sums of a report that was not due yet; {} if none

    def arrays(self, fields: Sequence[str] = (".",)) -> dict[str, np.ndarray]:
        """Reads the arrays by name; by default of all fields of the tree."""
        import safetensors

        with safetensors.safe_open(self.folder / _ARRAYS, framework="numpy") as file:
            names = [name for name in file.keys() if name.startswith(tuple(fields))]
            names = [name for name in names if not name.startswith(_OF_0_2)]
            return {name: file.get_tensor(name) for name in names}


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
    saved = steps(root)
    for step in reversed(saved):
        try:
            return _verified(root / str(step))
        except _DamageError as error:
            _logger.warning(f"{error}; the one before it is used.")
    if saved:
        raise ConfigError(
            f"All checkpoints in {root} are damaged.\nPut back a copy of one, take "
            "another workdir, or remove this one to start from the beginning."
        )
    return None


def read(root: Path, step: int | None = None) -> Checkpoint:
    """Verifies a checkpoint, by default the newest good one.

    Raises:
      ConfigError: If there is no such step, or it is damaged.
    """
    saved = ", ".join(map(str, steps(root))) or "none"
    if step is None:
        if (checkpoint := newest(root)) is not None:
            return checkpoint
        raise ConfigError(f"There are no checkpoints in {root}.")
    if step not in steps(root):
        raise ConfigError(
            f"There is no checkpoint of step {step} in {root}; there are: {saved}."
        )
    try:
        return _verified(root / str(step))
    except _DamageError as error:
        raise ConfigError(f"{error}.\nThere are: {saved}.") from None


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
    damaged or the same, is replaced. SaveError if it cannot be written; then the others
    are unchanged.
    """
    import safetensors.numpy

    arrays = {
        keystr(path): np.asarray(leaf, order="C")
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    partial, folder = root / f".{step}.partial", root / str(step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name in filter(_PARTIAL.fullmatch, os.listdir(root)):
            shutil.rmtree(root / name)
        partial.mkdir()
        # Not by its `save_file`, which maps the file: there a full disk is fatal.
        content = safetensors.numpy.save(arrays)
        contents: dict[str, Any] = {"step": step, "held_out_loss": held_out_loss}
        contents["files"] = {_ARRAYS: hashlib.sha256(content).hexdigest()}
        contents["window"] = dict(window or {})
        contents["sha256"] = files.sha256_of(contents)
        _write(partial / _ARRAYS, content)
        _write(partial / _MANIFEST, json.dumps(contents, indent=1).encode())
        _to_disk(partial)
        if folder.exists():
            _remove(folder)
        os.replace(partial, folder)
        _to_disk(root)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise files.SaveError(
            f"The checkpoint of step {step} could not be written in {root}: "
            f"{error.strerror}. Earlier ones are unchanged."
        ) from error
    _prune(root, step)


def restored(arrays: Arrays, abstract: Any) -> Any:
    """Makes a tree from arrays by name.

    `abstract` has the shapes and dtypes of the tree, as from `jax.eval_shape`.
    ConfigError if the arrays have other names, shapes or dtypes.
    """
    leaves = jax.tree.leaves_with_path(abstract)
    requested = {keystr(path): leaf for path, leaf in leaves}
    missing = [name for name in requested if name not in arrays]
    unknown = [name for name in arrays if name not in requested]
    if differ := checks.lacks_and_has(missing, unknown, 3):
        raise ConfigError(
            f"The checkpoint does not hold this config's model:\n{differ}."
        )
    for name, leaf in requested.items():
        for what in ("shape", "dtype"):
            before, after = getattr(arrays[name], what), getattr(leaf, what)
            if before != after:
                raise ConfigError(
                    f"The checkpoint has the {what} {before} at {name}; this config's "
                    f"model has {after}."
                )
    ordered = [arrays[name] for name in requested]
    return jax.tree.unflatten(jax.tree.structure(abstract), ordered)


def _verified(folder: Path) -> Checkpoint:
    """Reads a checkpoint's manifest, and the sha256 of its arrays.

    What is missing or different is damage. What cannot be read, as without permission,
    is a ConfigError: the checkpoint may be good.
    """
    try:
        step, loss, digest, window = _read_manifest(folder)
        with (folder / _ARRAYS).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise _DamageError(f"{folder / _ARRAYS} is damaged")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _DamageError(f"{error.filename} is missing") from None
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}."
        ) from None
    return Checkpoint(folder, step, loss, window)


def _read_manifest(folder: Path) -> tuple[int, float | None, str, dict[str, float]]:
    """Reads step, held-out loss, sha256 of the arrays, and window of a checkpoint."""
    path = folder / _MANIFEST
    content = path.read_bytes()
    try:
        contents = json.loads(content)
        digests, window = contents["files"], contents.get("window", {})
        if (digest := contents.pop("sha256", None)) is None:  # of mha_haiku 0.2
            if "window.json" in digests:
                window = json.loads((folder / "window.json").read_bytes())
        elif digest != files.sha256_of(contents):
            raise ValueError
        if contents["step"] != int(folder.name):
            raise ValueError
        return contents["step"], contents["held_out_loss"], digests[_ARRAYS], window
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _DamageError(f"{path} is damaged") from None


def _prune(root: Path, last: int) -> None:
    """Removes steps up to `last` but the newest two and that of the least loss."""
    losses: dict[int, float] = {}
    saved = [step for step in steps(root) if step <= last]
    for step in saved:
        try:
            _, loss, *_ = _read_manifest(root / str(step))
        except (_DamageError, FileNotFoundError, NotADirectoryError):
            continue
        if loss is not None:
            losses[step] = loss
    best = min(losses, key=losses.__getitem__, default=None)
    for step in saved[:-2]:
        if step != best:
            _remove(root / str(step))


def _remove(folder: Path) -> None:
    """Removes a step; first its manifest, so that a kill leaves no good one in part."""
    (folder / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _to_disk(folder: Path) -> None:
    """Waits until the entries of a folder are on the disk itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
