"""The arrays of a checkpoint: written and read by orbax, compared by their names.

orbax writes array data and JSON, and unpickles nothing; no path on the disk is made of
a parameter's name. It casts another dtype in silence, and what it says of another tree
names no parameter, so both are checked before it reads.
"""

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mha_haiku.checks import ConfigError

_ROOM = 2**16  # bytes that a checkpoint takes besides its arrays


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Returns "dtype" and "shape" of each array, or shape, of a tree, by its name."""
    return {
        jax.tree_util.keystr(path): {"dtype": str(x.dtype), "shape": list(x.shape)}
        for path, x in jax.tree.leaves_with_path(tree)
    }


def compare(
    saved: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]], where: str
) -> None:
    """Refuses arrays that are not those wanted.

    Args:
      saved: `describe` of what was saved.
      wanted: `describe` of what this config's model has.
      where: What holds the saved ones, as a sentence begins.

    Raises:
      ConfigError: If they differ in names, shapes or dtypes; it names the parameter.
    """
    missing = [name for name in wanted if name not in saved]
    unknown = [name for name in saved if name not in wanted]
    if missing or unknown:
        parts = [("lacks", missing), ("also has", unknown)]
        told = [f"it {verb} {_listed(names)}" for verb, names in parts if names]
        raise ConfigError(
            f"{where} does not hold the parameters of this config's model:\n"
            f"{'; '.join(told)}."
        )
    for name, has in wanted.items():
        for what in ("shape", "dtype"):
            before, after = saved[name][what], has[what]
            if before != after:
                raise ConfigError(
                    f"{where} has the {what} {_shown(before)} at {name}; this "
                    f"config's model has {_shown(after)}."
                )


def write(folder: Path, tree: Any) -> None:
    """Writes a tree of host arrays into a folder that is not there yet.

    Raises:
      OSError: If the disk has no room for them.
    """
    size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))
    if shutil.disk_usage(folder.parent).free < size + _ROOM:
        # Before orbax finds out: it tells of it in hundreds of lines.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    ocp = _orbax()
    with _checkpointer(ocp) as checkpointer:
        checkpointer.save(folder, args=ocp.args.StandardSave(tree))


def read(folder: Path, abstract: Any) -> Any:
    """Returns the tree in a folder, as host arrays.

    Args:
      folder: What `write` wrote.
      abstract: A tree of the shapes and dtypes that are there; see `compare`.
    """
    ocp = _orbax()
    target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    with _checkpointer(ocp) as checkpointer:
        tree = checkpointer.restore(folder, args=ocp.args.StandardRestore(target))
    return jax.tree.map(np.asarray, tree)


def _checkpointer(ocp):
    """Returns what writes in this process, whatever other processes do."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=str(own)
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _orbax():
    """Returns orbax, which takes half a second to import, and keeps it quiet."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(_quiet)
    return ocp


def _quiet(record: logging.LogRecord) -> bool:
    """Drops orbax's notes on its progress; what fails it raises as well."""
    return "orbax" not in record.pathname


def _listed(names) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _shown(value) -> str:
    return value if isinstance(value, str) else str(tuple(value))
