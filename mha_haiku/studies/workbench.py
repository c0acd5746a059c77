"""A trained run on the devices that are here: one, or those of a mesh that share it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku import devices, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.runs import folders, sharing
from mha_haiku.training import evaluation


def placed(
    run: folders.Run,
    available: Sequence[jax.Device] | None = None,
    *,
    length: int | None = None,
) -> folders.Run:
    """Returns the run with its model and parameters on the devices that share them.

    They share heads and positions as the config says, if that fits them; else each has
    all of the model, and a part of the examples.

    Args:
      run: The run.
      available: The devices; None: all of all processes.
      length: T, positions of an example; None: as the task has them.
    """
    length = run.task.sequence_length if length is None else length
    available = list(available or jax.devices())
    if len(available) == 1:
        return run
    wanted = run.config.copy_and_resolve_references()
    with wanted.ignore_type():
        wanted.devices.data = None
    try:
        sizes = sharing.shape(wanted, len(available))
        sharing.check_sequence(wanted, length)
    except ConfigError:
        sizes = sharing.Shape(len(available), 1, 1)
    mesh = devices.make_mesh(available, **sizes._asdict())
    shared = devices.Sharded(mesh)
    model = folders.make_model(run.config, run.task, shared)
    return run._replace(
        model=model, params=shared.put_state(run.params), placement=shared
    )


def program(run: folders.Run, function: Callable) -> Callable:
    """Returns the function, compiled; its results are on all devices."""
    if run.placement is None:
        return jax.jit(function)
    return run.placement.program(function, num_scalars=0, returns_state=False)


def whole_batch(run: folders.Run, count: int) -> int:
    """Returns the fewest examples, of at least `count`, that the devices can share."""
    parts = 1 if run.placement is None else run.placement.batch_parts
    return -(-count // parts) * parts


def spread(run: folders.Run, example: tasks.Example) -> tasks.Example:
    """Returns a batch, `whole_batch` large, as the devices share it; in a program."""
    return example if run.placement is None else run.placement.spread(example)


def held_out(run: folders.Run) -> Callable[[Sequence[int]], tasks.Example]:
    """Returns a function from indices `[B]` to these held-out examples, shared."""
    data = run.task.held_out_data

    def make(data: Any, indices: jax.Array) -> tasks.Example:
        example = evaluation.held_out_batch(run.task, run.config.seed, data, indices)
        return spread(run, example)

    compiled = jax.jit(make)
    if run.placement is not None:
        data = run.placement.put(data)
    return lambda indices: compiled(data, _placed_indices(run, indices))


def _placed_indices(run, indices):
    indices = np.asarray(indices, np.int32)
    return indices if run.placement is None else run.placement.put(indices)
