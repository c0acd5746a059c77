"""Matching of the heads of two models.

L layers, H heads of a layer, P pairs of heads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, display, models
from mha_haiku.lab.heads import running
from mha_haiku.lab.heads.running import Batches
from mha_haiku.training import tasks

# Replaces the divergence of heads of different kinds. It is larger than any divergence,
# so that such heads are paired only if nothing else is left, and then dropped.
_APART = 10.0


class Matching(NamedTuple):
    """Pairs of heads of two models, one to one.

    Example:
      >>> other = mh.rasp.compile(mh.rasp.PROGRAMS["induction"](), num_heads=2, seed=3)
      >>> two = (model, params), (other.model, other.params)
      >>> mh.heads.match(*two, batches).divergence < 0.01  # the noise heads differ
      array([ True, False,  True, False])
    """

    first: np.ndarray  # `[P, 2]`, (layer, head) in the first model
    second: np.ndarray  # `[P, 2]`, (layer, head) of its counterpart in the second
    # `[P]` nats in [0, log 2], the mean Jensen-Shannon divergence of their weights over
    # the examples.
    divergence: np.ndarray

    def __repr__(self) -> str:
        return display.record(self)


def match(
    first: tuple[models.Model, Any], second: tuple[models.Model, Any], batches: Batches
) -> Matching:
    """Pairs the heads of two models, such as two seeds, by similar attention.

    `first` and `second` are models with their parameters, and read the same inputs.
    Heads of any layers of the same kind may be paired; the pairs minimize the total
    divergence.

    Source: Kuhn 1955, "The Hungarian method for the assignment problem"; divergence of
    heads Clark et al. 2019, section 6, https://arxiv.org/abs/1906.04341.

    Example:
      >>> other = mh.rasp.compile(mh.rasp.PROGRAMS["induction"](), num_heads=2, seed=3)
      >>> two = (model, params), (other.model, other.params)
      >>> first, second, _ = mh.heads.match(*two, batches)
      >>> first.tolist()
      [[0, 0], [0, 1], [1, 0], [1, 1]]
      >>> second.tolist()
      [[0, 1], [0, 0], [1, 0], [1, 1]]
    """
    import scipy.optimize

    @jax.jit
    def diverge(params: Any, other_params: Any, example: tasks.Example) -> tuple:
        rows = _maps(first[0], params, example)
        columns = _maps(second[0], other_params, example)

        def compared(row: str, column: str) -> jax.Array:
            if running.kind_of(row) == running.kind_of(column):
                found = rows[row].divergence(columns[column])
                return found.mean(range(found.ndim - 2))
            return jnp.full((rows[row].shape[-3], columns[column].shape[-3]), _APART)

        blocks = [[compared(row, other) for other in columns] for row in rows]
        return jnp.block(blocks), len(example.inputs)

    results = running.over(batches, lambda x: diverge(first[1], second[1], x))
    divergences, counts = zip(*results, strict=True)
    divergence = np.average(np.array(divergences, np.float64), axis=0, weights=counts)
    pairs = scipy.optimize.linear_sum_assignment(divergence)
    rows, columns = np.array(pairs)[:, divergence[pairs] < _APART]
    example = next(iter(batches))
    one, other = (
        np.argwhere(running.exists(running.num_heads(*pair, example)))
        for pair in (first, second)
    )
    return Matching(one[rows], other[columns], divergence[rows, columns])


def _maps(
    model: models.Model, params: Any, example: tasks.Example
) -> dict[str, attention.AttentionMap]:
    """Returns the maps of a model on a batch, by name; padding counts nowhere."""

    def unpadded(
        attention_map: attention.AttentionMap, kind: str
    ) -> attention.AttentionMap:
        return running.without_padding(attention_map, model, example, kind)

    at = running.by_kind(unpadded, model, params, example)
    return running.look(model, params, example, at)[1]
