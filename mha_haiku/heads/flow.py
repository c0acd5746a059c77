"""Attention flow: how much of each input can reach a position at once.

`B...` batch axes, T positions, R chosen rows, L layers. Layers are pipes: position t
above layer l takes from position s below it at most what the layer's matrix has there.
"""

from collections.abc import Sequence

import jax
import numpy as np

from mha_haiku import attention, checks
from mha_haiku.heads import layer_chain

# Capacities are whole numbers; one is this much.
_UNIT = 2**30


def flow(
    maps: Sequence[attention.AttentionMap],
    rows: layer_chain.Rows,
    *,
    residual: float = 0.5,
) -> np.ndarray:
    """Returns attention flow: the largest flows from positions to single inputs.

    The capacities are those that `rollout` multiplies. It runs on the host, once per
    row and input, on graphs of L T^2 pipes that are made as arrays: for short inputs.

    Args:
      maps: One per layer, of shape (B..., H, T, T); H may differ.
      rows: Which of the T positions of the last layer; see `layer_chain.positions_of`.
      residual: Share of the residual connection, in [0, 1).

    Returns:
      `[B..., R, T]` float64, in [0, 1]; a row may sum to more than 1. Capacities are
      rounded to 2^-30.

    Raises:
      ValueError: If maps are not of self-attention, or a row is outside of them.

    Source: Abnar and Zuidema 2020, section 3, https://arxiv.org/abs/2005.00928.
    """
    from scipy.sparse import csgraph

    positions = np.asarray(layer_chain.positions_of(maps, rows))
    checks.fraction("residual", residual)
    matrix = jax.jit(layer_chain.matrix, static_argnames="residual")
    matrices = [matrix(layer, residual=residual) for layer in maps]
    matrices = np.stack(jax.device_get(matrices)).astype(np.float64)
    num_layers, size = matrices.shape[0], matrices.shape[-1]
    found = np.zeros((*positions.shape, size))
    for example in np.ndindex(positions.shape[:-1]):
        pipes = _pipes(matrices[:, *example])
        for r, s in np.ndindex(found.shape[-2:]):
            source = num_layers * size + positions[*example, r]
            flow_value = csgraph.maximum_flow(pipes, source, s).flow_value
            found[*example, r, s] = flow_value / _UNIT
    return found


def _pipes(matrices):
    """Returns the capacities between nodes `l T + t`, T positions below layer l."""
    from scipy import sparse

    num_layers, size, _ = matrices.shape
    capacities = np.rint(matrices * _UNIT).astype(np.int32)
    layers, above, below = np.nonzero(capacities)
    ends = (layers + 1) * size + above, layers * size + below
    count = (num_layers + 1) * size
    return sparse.csr_array(
        (capacities[layers, above, below], ends), shape=(count, count)
    )
