"""Checkpoints: a folder per step, which appears whole and is verified when read.

`<step>/arrays.safetensors` has the arrays, named by their paths in the tree, such as
".params['encoder/norm']['scale']"; `<step>/manifest.json` the step, its held-out loss
and the sha256 of the arrays. Both are written to another folder, which then gets its
name in one step.
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

from mha_haiku.core import arrays, checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import files

_logger = logging.getLogger("mha_haiku")

_ARRAYS, _MANIFEST = "arrays.safetensors", "manifest.json"
_STEP = re.compile("0|[1-9][0-9]{0,17}")
_PARTIAL = re.compile(r"\.\d+\.partial")  # what a kill leaves

Arrays = Mapping[str, np.ndarray]


class Checkpoint(NamedTuple):
    """A checkpoint."""

    folder: Path
    step: int

    def is_whole(self) -> bool:
        """Checks whether the arrays are those that were written."""
        try:
            manifest = json.loads((self.folder / _MANIFEST).read_bytes())
            with (self.folder / _ARRAYS).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            return manifest["files"][_ARRAYS] == digest
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False
        except OSError as error:  # it may be whole
            reason = f"{error.filename} cannot be read: {error.strerror}."
            raise ConfigError(reason) from None

    def arrays(self, fields: Sequence[str] = (".",)) -> dict[str, np.ndarray]:
        """Reads the arrays by name; by default of all fields of the tree.

        ConfigError if the file is missing, damaged or cannot be read.
        """
        stored = arrays.read_safetensors(self.folder / _ARRAYS)
        names = [name for name in stored if name.startswith(tuple(fields))]
        return {name: stored[name].read() for name in names}


def steps(root: Path) -> list[int]:
    """Lists the steps that exist, ascending."""
    names = os.listdir(root) if root.is_dir() else []
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def newest(root: Path) -> Checkpoint | None:
    """Finds the newest whole step, or None if nothing has been saved.

    It warns of damaged ones; ConfigError if all are.
    """
    saved = [Checkpoint(root / str(step), step) for step in reversed(steps(root))]
    for checkpoint in saved:
        if checkpoint.is_whole():
            return checkpoint
        _logger.warning(f"{checkpoint.folder} is damaged; the one before it is used.")
    if saved:
        raise ConfigError(
            f"All checkpoints in {root} are damaged.\nPut back a copy of one, take "
            "another workdir, or remove this one to start from the beginning."
        )
    return None


def read(root: Path, step: int | None = None) -> Checkpoint:
    """Finds a checkpoint, by default the newest; ConfigError if it is not there."""
    if step is None:
        if (checkpoint := newest(root)) is None:
            raise ConfigError(f"There are no checkpoints in {root}.")
        return checkpoint
    checkpoint = Checkpoint(root / str(step), step)
    is_there = step in steps(root)
    if not is_there or not checkpoint.is_whole():
        what = (
            f"{checkpoint.folder} is damaged"
            if is_there
            else (f"There is no checkpoint of step {step} in {root}")
        )
        saved = ", ".join(map(str, steps(root))) or "none"
        raise ConfigError(f"{what}; there are: {saved}.")
    return checkpoint


def save(
    root: Path, step: int, tree: Any, *, held_out_loss: float | None = None
) -> None:
    """Writes a tree of host arrays; keeps the newest two steps, and the best.

    The smallest `held_out_loss` marks the best. SaveError if it cannot be written; then
    the others are unchanged.
    """
    import safetensors.numpy

    named = {
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
        content = safetensors.numpy.save(named)
        _write(partial / _ARRAYS, content)
        manifest: dict[str, Any] = {"step": step, "held_out_loss": held_out_loss}
        manifest["files"] = {_ARRAYS: hashlib.sha256(content).hexdigest()}
        _write(partial / _MANIFEST, json.dumps(manifest).encode())
        _to_disk(partial)
        if folder.exists():  # it is damaged
            shutil.rmtree(folder)
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


def _prune(root: Path, last: int) -> None:
    """Removes steps up to `last` but the newest two and that of the least loss."""
    losses: dict[int, float] = {}
    saved = [step for step in steps(root) if step <= last]
    for step in saved:
        manifest = files.read_json(root / str(step) / _MANIFEST) or {}
        if (loss := manifest.get("held_out_loss")) is not None:
            losses[step] = loss
    best = min(losses, key=losses.__getitem__, default=None)
    for step in saved[:-2]:
        if step != best:
            partial = root / f".{step}.partial"
            os.replace(root / str(step), partial)
            shutil.rmtree(partial)


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
