"""Checkpoints of a run: saved with orbax, the newest two and the best kept."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mha_haiku.checks import ConfigError


class Checkpoints:
    """The checkpoints in one folder.

    Saving runs in the background; `close` (or leaving the `with`) waits for it, and a
    process that ends without it loses the last step. Trees are host arrays.
    """

    def __init__(self, folder: str | Path, *, read_only: bool = False):
        """Opens the folder, which is made where it is missing.

        Args:
          folder: Where the steps are, one sub-folder each.
          read_only: Whether only to restore; then the folder has to be there.

        Raises:
          ConfigError: If there is no such folder to read.
        """
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as policies

        logging.getLogger("absl").addFilter(_quiet)
        self._folder = Path(folder).absolute()
        if read_only and not self._folder.is_dir():
            raise ConfigError(f"There are no checkpoints in {folder}.")
        best = policies.BestN(
            get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False
        )
        self._orbax = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                best_fn=_rank,
                best_mode="max",
                preservation_policy=policies.AnyPreservationPolicy(
                    [policies.LatestN(2), best]
                ),
                read_only=read_only,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that can be restored, ascending."""
        return sorted(self._orbax.all_steps())

    def latest(self) -> int | None:
        """Returns the newest step, or None where nothing has been saved."""
        return max(self.steps(), default=None)

    def save(self, step: int, tree: Any, *, held_out_loss: float | None = None) -> None:
        """Starts to save a tree of host arrays; waits for the save before it.

        Args:
          step: Its step; what is already saved at this step stays.
          tree: Arrays, which must not be changed afterwards.
          held_out_loss: The smallest marks the best step; None is never the best.
        """
        import orbax.checkpoint as ocp

        if step in self.steps():
            return
        metrics = None if held_out_loss is None else {"held_out_loss": held_out_loss}
        self._orbax.save(
            step, args=ocp.args.StandardSave(tree), metrics=metrics, force=True
        )

    def restore(self, abstract: Any, step: int | None = None) -> Any:
        """Returns the tree saved at a step, as host arrays.

        Args:
          abstract: A tree with the structure and shapes of what was saved, as from
            `jax.eval_shape`.
          step: Which step; None means the newest.

        Raises:
          ConfigError: If there is no such step, or it holds a tree of other shapes.
        """
        import orbax.checkpoint as ocp

        step = self._existing(step)
        target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
        where = f"The checkpoint of step {step} in {self._folder}"
        try:
            tree = self._orbax.restore(step, args=ocp.args.StandardRestore(target))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{where} does not hold the parameters of this config's model."
            ) from error
        tree = jax.tree.map(np.asarray, tree)
        for (path, wanted), found in zip(
            jax.tree.leaves_with_path(abstract), jax.tree.leaves(tree), strict=True
        ):
            if wanted.shape != found.shape:
                raise ConfigError(
                    f"{where} has the shape {found.shape} at "
                    f"{jax.tree_util.keystr(path)}; this config's model has "
                    f"{wanted.shape}."
                )
        return tree

    def close(self) -> None:
        """Waits until everything is on disk, and lets go of the folder."""
        self._orbax.wait_until_finished()
        self._orbax.close()

    def _existing(self, step) -> int:
        steps = self.steps()
        if not steps:
            raise ConfigError(f"There are no checkpoints in {self._folder}.")
        if step is None:
            return steps[-1]
        if step not in steps:
            listed = ", ".join(map(str, steps))
            raise ConfigError(
                f"There is no checkpoint of step {step} in {self._folder}; "
                f"there are: {listed}."
            )
        return step


def _rank(metrics) -> float:
    return -metrics["held_out_loss"]


class _Quiet(logging.Filter):
    """Drops orbax's notes on its own progress; its errors stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or "orbax" not in record.pathname


_quiet = _Quiet()
