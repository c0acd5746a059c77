"""The checkpoints of a run: saved in the background, verified before restoring."""

import logging
import math
import threading
from pathlib import Path
from typing import Any

from mha_haiku.checks import ConfigError
from mha_haiku.runs.checkpoints import folders

_logger = logging.getLogger("mha_haiku")


class SaveError(RuntimeError):
    """The newest checkpoint could not be written; the others are unchanged."""


class Checkpoints:
    """The checkpoints in one folder: the newest two and the best.

    Saving runs in the background; `close` (or leaving the `with`) waits for it, and so
    does the end of the process. A checkpoint that cannot be written causes a warning
    and leaves the others unchanged. Trees are host arrays.
    """

    def __init__(self, folder: str | Path, *, read_only: bool = False):
        """Opens the folder, which the first save creates.

        Args:
          folder: The folder of the steps, one sub-folder each.
          read_only: Whether only to restore; then the folder must exist. Otherwise no
            other process may write to it; the lock of the run's folder sees to that.

        Raises:
          ConfigError: If there is no such folder to read, or its checkpoints are of
            version 0.1.0.
        """
        self._folders = folders.Folders(Path(folder).absolute())
        self._read_only = read_only
        self._thread: threading.Thread | None = None
        self._failure: SaveError | None = None
        self._reported: set[int] = set()  # damaged steps
        if not read_only:
            self._folders.clean()
        elif not self._folders.root.is_dir():
            raise ConfigError(f"There are no checkpoints in {folder}.")
        self._folders.check_version()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._join()

    def steps(self) -> list[int]:
        """Returns the steps that exist, good or not, ascending."""
        self._join()
        return self._folders.steps()

    def latest(self) -> int | None:
        """Returns the newest good step, or None where nothing has been saved.

        It logs a warning about each damaged step after it, once, and renames that to
        `<step>.damaged` unless this is read-only.

        Raises:
          ConfigError: If there are checkpoints, and none of them is good.
        """
        damaged = {}
        for step in reversed(self.steps()):
            damage = self._folders.damage(step)
            if damage is None:
                self._leave_out(damaged, f"the newest good one is of step {step}")
                return step
            damaged[step] = damage
        if damaged:
            reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
            raise ConfigError(
                f"No checkpoint in {self._folders.root} is good: {reasons}.\n"
                "Put back a copy of one, take another workdir, or remove this one to "
                "start from the beginning."
            )
        return None

    def save(self, step: int, tree: Any, *, held_out_loss: float | None = None) -> None:
        """Starts to save a tree of host arrays; waits for the save before it.

        Args:
          step: Its step; a good checkpoint of this step is kept as it is.
          tree: Arrays, which must not be changed afterwards.
          held_out_loss: The smallest marks the best step; None is never the best.

        Raises:
          ValueError: If `held_out_loss` is not finite.
        """
        if held_out_loss is not None and not math.isfinite(held_out_loss):
            raise ValueError(f"held_out_loss must be finite, got {held_out_loss}.")
        if step in self.steps():
            damage = self._folders.damage(step)
            if damage is None:
                return
            self._leave_out({step: damage}, "it is saved again")
        # Not a daemon: Python waits for it when the process ends, however that ends.
        self._thread = threading.Thread(
            target=self._write, args=(step, tree, held_out_loss), name="checkpoint"
        )
        self._thread.start()

    def fields(self, step: int | None = None) -> set[str]:
        """Returns the fields of what was saved, {".step", ".params"}; see `restore`."""
        return self._folders.fields(self._existing(step))

    def restore(
        self, abstract: Any, step: int | None = None, *, partly: bool = False
    ) -> Any:
        """Returns the tree saved at a step, as host arrays.

        Args:
          abstract: A tree with the structure, shapes and dtypes of what was saved, as
            from `jax.eval_shape`.
          step: Which step; None means the newest good one.
          partly: Whether the checkpoint may have more fields at the top of the tree,
            which are not read.

        Raises:
          ConfigError: If there is no such step, it is damaged, or it holds a tree of
            other names, shapes or dtypes.
        """
        step = self._existing(step)
        where = f"The checkpoint of step {step} in {self._folders.root}"
        return self._folders.read(step, abstract, where, partly=partly)

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
          SaveError: If the newest checkpoint could not be written.
        """
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _existing(self, step) -> int:
        steps, root = self.steps(), self._folders.root
        listed = ", ".join(map(str, steps))
        if step is None:
            step = self.latest()
        if step is None:
            raise ConfigError(f"There are no checkpoints in {root}.")
        if step not in steps:
            raise ConfigError(
                f"There is no checkpoint of step {step} in {root}; there are: {listed}."
            )
        damage = self._folders.damage(step)
        if damage is not None:
            raise ConfigError(
                f"The checkpoint of step {step} in {root} is damaged: {damage}.\n"
                f"There are: {listed}."
            )
        return step

    def _leave_out(self, damaged, instead) -> None:
        """Warns about damaged steps once, and renames them unless this is read-only."""
        for step, damage in damaged.items():
            if step in self._reported:
                continue
            kept = ""
            if self._read_only:
                self._reported.add(step)
            else:
                kept = f"; it is kept as {self._folders.set_aside(step)}"
            _logger.warning(
                f"The checkpoint of step {step} in {self._folders.root} is damaged: "
                f"{damage}{kept}; {instead}."
            )

    def _write(self, step, tree, held_out_loss) -> None:
        """Writes one checkpoint; runs in its own thread."""
        self._failure = None
        try:
            self._folders.write(step, tree, held_out_loss)
        except Exception as error:
            good = self._folders.newest_known_good()
            kept = "there is no good one before it"
            if good is not None:
                kept = f"the newest good one is of step {good}"
            self._failure = SaveError(
                f"The checkpoint of step {step} could not be written in "
                f"{self._folders.root} ({_reason(error)}); {kept}"
            )
            _logger.warning(f"{self._failure}. The next save tries again.")
            return
        try:
            self._folders.prune()
        except OSError as error:
            _logger.warning(f"Old checkpoints could not be removed: {error}.")


class Elsewhere:
    """The null object of `Checkpoints`, on processes that do not write them."""

    def __init__(self, latest: int | None):
        """Takes the newest good step."""
        self._latest = latest

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def latest(self) -> int | None:
        """Returns the newest step, as far as this process knows."""
        return self._latest

    def save(self, step: int, tree: Any, *, held_out_loss: float | None = None) -> None:
        """Remembers the step."""
        del tree, held_out_loss
        self._latest = step

    def restore(
        self, abstract: Any, step: int | None = None, *, partly: bool = False
    ) -> Any:
        """Raises RuntimeError: only the first process reads checkpoints."""
        raise RuntimeError("checkpoints are read by the first process alone.")

    def close(self) -> None:
        """Does nothing."""


def _reason(error) -> str:
    """Returns the message of safetensors or of the system, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    full = "No space left on device"
    return full if full in text else f"{type(error).__name__}: {text[:200]}"
