"""The folders of checkpoints, one `<step>/` each: which exist, are good, and stay.

A folder is renamed to `<step>/` once all of it is on the disk; after a kill,
half-written ones have other names. So a `<step>/` that does not match its manifest, or
has none, was damaged later. Threads are the business of `store.py`.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from mha_haiku.checks import ConfigError
from mha_haiku.runs.checkpoints import arrays, manifest

_ARRAYS = "arrays.safetensors"
_OLD_ARRAYS = "arrays"  # the folder of orbax, in version 0.1.0
_PARTIAL = ".partial-"  # being written
_REMOVED = ".removed-"  # being deleted
_STEP = re.compile("0|[1-9][0-9]{0,17}")


class Folders:
    """The folders of the checkpoints of one run."""

    def __init__(self, root: Path):
        """Takes the folder that contains them, which the first `write` creates."""
        self.root = root
        self._damage: dict[int, str | None] = {}  # of the steps that were checked

    def steps(self) -> list[int]:
        """Returns the steps that exist, good or not, ascending.

        Anything with the name of a step counts: a link, for instance, is a damaged one.
        """
        if not self.root.is_dir():
            return []
        names = os.listdir(self.root)
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def check_version(self) -> None:
        """Raises ConfigError if there are checkpoints of version 0.1.0."""
        for step in self.steps():
            if (self._path(step) / _OLD_ARRAYS).is_dir():
                raise ConfigError(
                    f"The checkpoints in {self.root} are of mha_haiku 0.1.0.\n"
                    "Only that version can read them; take another workdir."
                )

    def damage(self, step: int) -> str | None:
        """Returns what is wrong with a step, None if nothing; reads it only once."""
        if step not in self._damage:
            try:
                manifest.check(self._path(step))
            except manifest.DamageError as error:
                self._damage[step] = str(error)
            else:
                self._damage[step] = None
        return self._damage[step]

    def newest_known_good(self) -> int | None:
        """Returns the newest step that was checked or written here, and is good."""
        good = [step for step, damage in self._damage.items() if damage is None]
        return max(good, default=None)

    def fields(self, step: int) -> set[str]:
        """Returns the fields of the tree of a good step, as ".params"."""
        return arrays.fields(manifest.read(self._path(step)).arrays)

    def read(self, step: int, abstract: Any, where: str, *, partly: bool) -> Any:
        """Returns the tree of a good step; see `arrays.compare` for what it refuses.

        Args:
          step: The step.
          abstract: The shapes and dtypes of the tree.
          where: The place of the saved tree, as the beginning of a sentence.
          partly: Whether fields that `abstract` lacks are left out, not refused.
        """
        saved = manifest.read(self._path(step)).arrays
        wanted, names = arrays.describe(abstract), list(saved)
        if partly:
            saved = arrays.of_fields(saved, arrays.fields(wanted))
        arrays.compare(saved, wanted, where)
        try:
            return arrays.read(self._path(step) / _ARRAYS, abstract, names)
        except Exception as error:  # the file contradicts its manifest
            raise ConfigError(f"{where} is damaged: {error}") from error

    def write(self, step: int, tree: Any, held_out_loss: float | None) -> None:
        """Writes a step that is not there.

        Raises:
          Exception: Any error of writing; nothing is left then.
        """
        partial = self.root / f"{_PARTIAL}{step}"
        try:
            partial.mkdir(parents=True)
            arrays.write(partial / _ARRAYS, tree)
            manifest.write(
                partial,
                step=step,
                held_out_loss=held_out_loss,
                arrays=arrays.describe(tree),
            )
            os.rename(partial, self._path(step))
        except BaseException:
            _remove(partial)
            raise
        self._damage[step] = None

    def set_aside(self, step: int) -> str:
        """Renames a damaged step, and returns its new name."""
        path = self.root / f"{step}.damaged"
        _remove(path)
        os.rename(self._path(step), path)
        del self._damage[step]
        return path.name

    def prune(self) -> None:
        """Removes all but the newest two and the one with the least held-out loss."""
        steps = self.steps()
        losses = [(self._held_out_loss(step), step) for step in steps]
        _, best = min((x for x in losses if x[0] is not None), default=(None, None))
        for step in steps[:-2]:
            if step != best:
                removed = self.root / f"{_REMOVED}{step}"
                os.rename(self._path(step), removed)
                _remove(removed)
                self._damage.pop(step, None)

    def clean(self) -> None:
        """Removes folders that a kill left half written or half deleted."""
        for prefix in (_PARTIAL, _REMOVED):
            for path in self.root.glob(f"{prefix}*"):
                _remove(path)

    def _held_out_loss(self, step) -> float | None:
        try:
            return manifest.read(self._path(step)).held_out_loss
        except manifest.DamageError:
            return None

    def _path(self, step) -> Path:
        return self.root / str(step)


def _remove(path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
