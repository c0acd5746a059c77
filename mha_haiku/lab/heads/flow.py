"""Attention flow: how much of each input can reach a position, as a maximum flow.

`B...` batch axes, T positions, R chosen rows, L layers. The graph has T nodes below
each layer and T above the last. Entry (t, s) of a layer's matrix is the capacity of the
edge from position s below the layer to position t above it.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from mha_haiku.core import attention
from mha_haiku.lab.heads import layer_chain
from mha_haiku.lab.heads.rollout import rollout

# scipy's maximum flow takes integer capacities; this is a capacity of 1.
_UNIT = 2**30


def flow(
    maps: Sequence[attention.AttentionMap],
    rows: layer_chain.Rows,
    *,
    residual: float = 0.5,
) -> np.ndarray:
    """Returns attention flow: the largest flows from positions to single inputs.

    The capacities are the matrices that `rollout` multiplies. SciPy computes each flow
    on the host, one per row and input, in a graph of L T^2 edges: for short inputs.

    Args:
      maps: One per layer, as in `rollout`, like the rest.
      rows: Which of the T positions of the last layer.
      residual: Share of the residual connection.

    Returns:
      `[B..., R, T]` float64, in [0, 1]; a row may sum to more than 1. Capacities are
      rounded to 2^-30.

    Raises:
      ValueError: If maps are not of self-attention, or a row is outside of them.

    Source: Abnar and Zuidema 2020, section 3, https://arxiv.org/abs/2005.00928.
    """
    from scipy.sparse import csgraph

    positions = np.asarray(layer_chain.positions_of(maps, rows))
    matrices = [_matrix(layer, residual) for layer in maps]
    matrices = np.stack(jax.device_get(matrices)).astype(np.float64)
    num_layers, size = matrices.shape[0], matrices.shape[-1]
    flows = np.zeros((*positions.shape, size))
    for example in np.ndindex(positions.shape[:-1]):
        edges = _capacities(matrices[:, *example])
        for r, s in np.ndindex(flows.shape[-2:]):
            source = num_layers * size + positions[*example, r]
            flow_value = csgraph.maximum_flow(edges, source, s).flow_value
            flows[*example, r, s] = flow_value / _UNIT
    return flows


@functools.partial(jax.jit, static_argnums=1)
def _matrix(layer, residual):
    """Returns the matrix of a layer, `[B..., T, T]`."""
    return rollout([layer], slice(None), residual=residual)


def _capacities(matrices):
    """Returns the capacities as a sparse matrix; node `l T + t` is t below layer l."""
    from scipy import sparse

    num_layers, size, _ = matrices.shape
    capacities = np.rint(matrices * _UNIT).astype(np.int32)
    layers, above, below = np.nonzero(capacities)
    ends = (layers + 1) * size + above, layers * size + below
    count = (num_layers + 1) * size
    return sparse.csr_array(
        (capacities[layers, above, below], ends), shape=(count, count)
    )
