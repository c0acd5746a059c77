"""Runs of a clean and a corrupted example, and what one changes in the other.

B batch, N pairs. The two examples of a pair differ in what the model should answer by.
`patching` and `paths` share what is here.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import display, models
from mha_haiku.lab.heads import means, running
from mha_haiku.training import tasks


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Changes:
    """What it changes to put something of one run into another; arrays of the host.

    Attributes:
      per_example: `[N, ...]`, the change of the metric by each thing that is put there;
        NaN where there is none.
      base: `[N]`, the metric of the run that is changed.
      other: `[N]`, that of the run where it comes from.
    """

    per_example: np.ndarray
    base: np.ndarray
    other: np.ndarray

    def __repr__(self) -> str:
        return display.record(self)

    _repr_html_, show, plot = display.html, display.show, display.plot

    @property
    def mean(self) -> np.ndarray:
        """`[...]`, the mean over the examples."""
        return means.mean(self.per_example)

    @property
    def standard_error(self) -> np.ndarray:
        """`[...]`, of the mean, from the spread of the examples; NaN for one."""
        return means.standard_error(self.per_example)

    @property
    def share(self) -> np.ndarray:
        """`[...]`, the mean over that of changing all: 0 none of it, 1 all of it.

        Not finite where changing all changes nothing.
        """
        return self.mean / (self.other - self.base).mean()

    def numbers(self, place: tuple[int, ...]) -> dict[str, float]:
        """Returns the numbers of one place of the arrays, by their names."""
        names = ("mean", "standard_error", "share")
        return {name: float(getattr(self, name)[place]) for name in names}


def over_pairs(
    of: running.Measured, corrupted: Iterable[tasks.Example], program: Callable
) -> tuple[np.ndarray, ...]:
    """Returns the results of a program on all pairs, float64 `[N, ...]`.

    Args:
      of: What is measured; its batches are the clean examples.
      corrupted: As many batches, of the shapes of these.
      program: Of the parameters and a pair of batches, to arrays `[B, ...]`.

    Raises:
      TypeError: If batches can be gone through only once.
      ValueError: If batches do not pair.
    """
    for batches in (of.batches, corrupted):
        running.check_batches(batches)
    cleans, others = list(of.batches), list(corrupted)
    if len(cleans) != len(others):
        raise ValueError(
            "corrupted must have as many batches as the clean examples, "
            f"{len(cleans)}, got {len(others)}."
        )
    # A metric reads the clean targets alone, which may be other than tokens: vectors.
    pairs = [
        (clean, other._replace(targets=clean.targets, weights=clean.weights))
        for clean, other in zip(cleans, others, strict=True)
    ]
    for clean, other in pairs:
        shapes = [jax.tree.map(np.shape, x.model_inputs()) for x in (clean, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "corrupted must have inputs of the shapes of the clean examples', "
                f"{shapes[0]}, got {shapes[1]}."
            )
    results = running.over(pairs, lambda pair: program(of.params, *pair))
    return jax.tree.map(lambda *x: np.concatenate(x).astype(np.float64), *results)


def both(
    model: models.Model,
    params: Any,
    one: tasks.Example,
    other: tasks.Example,
    at: Sequence[str],
) -> list[tuple[Any, dict[str, Any]]]:
    """Returns the outputs of two batches and what is at sites, see `running.look`.

    The model is compiled once for both.
    """
    pair = jax.tree.map(lambda x, y: jnp.stack([x, y]), one, other)
    found = jax.lax.map(
        lambda example: running.look(model, params, example, at, strict=False), pair
    )
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(2)]
