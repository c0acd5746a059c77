"""The checkpoints of a run: saved in the background, verified before restoring.

A checkpoint is a folder, `<step>/`, which gets this name once all of it is on the disk;
until then it has another name, which a kill may leave. So a `<step>/` that does not
match its manifest, or has none, was damaged later.
"""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import files
from mha_haiku.training.runs.checkpoints import contents

_logger = logging.getLogger("mha_haiku")

_ARRAYS = "arrays.safetensors"
_WINDOW = "window.json"  # only if there is a window
_PARTIAL = ".partial-"  # being written
_REMOVED = ".removed-"  # being deleted
_STEP = re.compile("0|[1-9][0-9]{0,17}")


class SaveError(RuntimeError):
    """The newest checkpoint could not be written; the others are unchanged."""


class Checkpoints(contextlib.AbstractContextManager):
    """The checkpoints in one folder: the newest two and the best.

    Saving runs in the background; `close` (or leaving the `with`) waits for it, and so
    does the end of the process. A checkpoint that cannot be written causes a warning
    and leaves the others unchanged. Trees are host arrays. The first save creates the
    folder; a `read_only` one must exist.
    """

    def __init__(self, folder: str | Path, *, read_only: bool = False):
        self.root = Path(folder).absolute()
        self._damage: dict[int, str | None] = {}  # of the steps that were checked
        self._read_only = read_only
        self._thread: threading.Thread | None = None
        self._failure: SaveError | None = None
        self._reported: set[int] = set()  # damaged steps
        if not read_only:
            for path in self.root.glob(".*-*"):
                if path.name.startswith((_PARTIAL, _REMOVED)):  # left by a kill
                    _remove(path)
        elif not self.root.is_dir():
            raise ConfigError(f"There are no checkpoints in {folder}.")

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._join()

    def steps(self) -> list[int]:
        """Lists the steps that exist, good or not (such as a link), ascending."""
        self._join()
        return self._steps()

    def is_begun(self) -> bool:
        """Returns whether there is at most what saving step 0 writes, killed or not."""
        left = (_PARTIAL, _REMOVED)
        names = [x for x in os.listdir(self.root) if not x.startswith(left)]
        is_whole = names == ["0"] and self._damage_of(0) is None
        return not self.root.is_symlink() and (is_whole or not names)

    def latest(self) -> int | None:
        """Finds the newest good step, or None if nothing has been saved.

        It logs one warning about each damaged step after it, and renames the step to
        `<step>.damaged` unless this is read-only. ConfigError if no step is good.
        """
        damaged = {}
        for step in reversed(self.steps()):
            damage = self._damage_of(step)
            if damage is None:
                self._leave_out(damaged, f"the newest good one is of step {step}")
                return step
            damaged[step] = damage
        if damaged:
            reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
            raise ConfigError(
                f"No checkpoint in {self.root} is good: {reasons}.\n"
                "Put back a copy of one, take another workdir, or remove this one to "
                "start from the beginning."
            )
        return None

    def save(
        self,
        step: int,
        tree: Any,
        *,
        held_out_loss: float | None = None,
        window: Mapping[str, float] | None = None,
    ) -> None:
        """Starts to save a tree of host arrays; waits for the save before it.

        The arrays must not be changed afterwards. A good checkpoint of this step is not
        written again. The smallest `held_out_loss` marks the best. A `window` has the
        sums of a report that was not due yet.

        Raises:
          ValueError: If `held_out_loss` is not finite.
        """
        if held_out_loss is not None and not math.isfinite(held_out_loss):
            raise ValueError(f"held_out_loss must be finite, got {held_out_loss}.")
        if step in self.steps():
            damage = self._damage_of(step)
            if damage is None:
                return
            self._leave_out({step: damage}, "it is saved again")
        # Not a daemon: Python waits for it when the process ends, however that ends.
        self._thread = threading.Thread(
            target=self._write,
            args=(step, tree, held_out_loss, window),
            name="checkpoint",
        )
        self._thread.start()

    def window(self) -> dict[str, float]:
        """Reads the window that the newest good step was saved with, or {}.

        Raises:
          ConfigError: If it is not a JSON object of numbers.
        """
        if (step := self.latest()) is None:
            return {}
        path = self._path(step) / _WINDOW
        numbers = files.read_json(path) or {}
        if not all(type(x) in (int, float) for x in numbers.values()):
            raise ConfigError(f"{path} must have only numbers.")
        return numbers

    def manifest(self, step: int | None = None) -> contents.Manifest:
        """Reads the manifest of a step, by default of the newest good one."""
        return contents.read(self._path(self._existing(step)))

    def fields(self, step: int | None = None) -> set[str]:
        """Lists the fields that were saved, {".step", ".params"}; see `restore`."""
        return contents.fields_of(self.manifest(step).arrays)

    def restore(
        self, abstract: Any, step: int | None = None, *, partly: bool = False
    ) -> Any:
        """Restores the tree of a step, by default the newest good one, to the host.

        `abstract` has the shapes and dtypes of the saved tree, as from
        `jax.eval_shape`; with `partly` the checkpoint may have more fields at the top
        of the tree.

        Raises:
          ConfigError: If there is no such step, it is damaged, or its arrays have other
            names, shapes or dtypes.
        """
        manifest = self.manifest(step)
        step, saved = manifest.step, manifest.arrays
        where = f"The checkpoint of step {step} in {self.root}"
        wanted, names = contents.describe(abstract), list(saved)
        if partly:
            kept = contents.fields_of(wanted)
            saved = {x: y for x, y in saved.items() if contents.fields_of([x]) <= kept}
        contents.compare(saved, wanted, where)
        try:
            return contents.read_arrays(self._path(step) / _ARRAYS, abstract, names)
        except Exception as error:  # the file contradicts its manifest
            raise ConfigError(f"{where} is damaged: {error}") from error

    def close(self) -> None:
        """Waits until everything is on disk; SaveError if the newest is not."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _existing(self, step: int | None) -> int:
        steps, root = self.steps(), self.root
        listed = ", ".join(map(str, steps))
        if step is None and (step := self.latest()) is None:
            raise ConfigError(f"There are no checkpoints in {root}.")
        if step not in steps:
            raise ConfigError(
                f"There is no checkpoint of step {step} in {root}; there are: {listed}."
            )
        if damage := self._damage_of(step):
            raise ConfigError(
                f"The checkpoint of step {step} in {root} is damaged: {damage}.\n"
                f"There are: {listed}."
            )
        return step

    def _leave_out(self, damaged: Mapping[int, str], instead: str) -> None:
        """Warns about damaged steps once, and renames them unless this is read-only."""
        for step, damage in damaged.items():
            if step in self._reported:
                continue
            kept = ""
            if self._read_only:
                self._reported.add(step)
            else:
                aside = self.root / f"{step}.damaged"
                _remove(aside)
                os.rename(self._path(step), aside)
                del self._damage[step]
                kept = f"; it is kept as {aside.name}"
            _logger.warning(
                f"The checkpoint of step {step} in {self.root} is damaged: "
                f"{damage}{kept}; {instead}."
            )

    def _path(self, step: int | None) -> Path:
        return self.root / str(step)

    def _steps(self) -> list[int]:
        names = os.listdir(self.root) if self.root.is_dir() else []
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def _damage_of(self, step: int) -> str | None:
        """Finds the damage of a step, or None; reads it only once."""
        if step not in self._damage:
            self._damage[step] = None
            try:
                contents.check(self._path(step))
            except contents.DamageError as error:
                self._damage[step] = str(error)
        return self._damage[step]

    def _write(
        self,
        step: int,
        tree: Any,
        held_out_loss: float | None,
        window: Mapping[str, float] | None,
    ) -> None:
        self._failure = None
        try:
            self._write_folder(step, tree, held_out_loss, window)
        except Exception as error:
            good = [step for step, damage in self._damage.items() if damage is None]
            kept = f"the newest good one is of step {max(good)}" if good else ""
            kept = kept or "there is no good one before it"
            self._failure = SaveError(
                f"The checkpoint of step {step} could not be written in "
                f"{self.root} ({_reason(error)}); {kept}"
            )
            _logger.warning(f"{self._failure}. The next save tries again.")
            return
        try:
            self._prune()
        except OSError as error:
            _logger.warning(f"Old checkpoints could not be removed: {error}.")

    def _write_folder(
        self,
        step: int,
        tree: Any,
        held_out_loss: float | None,
        window: Mapping[str, float] | None,
    ) -> None:
        """Writes a new step; leaves nothing if that fails."""
        partial = self.root / f"{_PARTIAL}{step}"
        try:
            partial.mkdir(parents=True)
            contents.write_arrays(partial / _ARRAYS, tree)
            if window:
                (partial / _WINDOW).write_text(json.dumps(dict(window)))
            contents.write(
                partial,
                step=step,
                held_out_loss=held_out_loss,
                arrays=contents.describe(tree),
            )
            os.rename(partial, self._path(step))
        except BaseException:
            _remove(partial)
            raise
        self._damage[step] = None

    def _prune(self) -> None:
        """Removes all but the newest two and the one with the least held-out loss."""
        steps, known = self._steps(), []
        for step in steps:
            with contextlib.suppress(contents.DamageError):
                loss = contents.read(self._path(step)).held_out_loss
                if loss is not None:
                    known.append((loss, step))
        _, best = min(known, default=(None, None))
        for step in steps[:-2]:
            if step != best:
                removed = self.root / f"{_REMOVED}{step}"
                os.rename(self._path(step), removed)
                _remove(removed)
                self._damage.pop(step, None)


class Elsewhere(contextlib.nullcontext):
    """The null object of `Checkpoints`, on processes that do not write them."""

    def __init__(self, latest: int | None):
        super().__init__(self)
        self._latest = latest

    def latest(self) -> int | None:
        return self._latest

    def save(self, step: int, tree: Any, **options: Any) -> None:
        self._latest = step

    def close(self) -> None:
        pass


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _reason(error: Exception) -> str:
    """Puts the message of safetensors or of the system on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    full = "No space left on device"
    return full if full in text else f"{type(error).__name__}: {text[:200]}"
