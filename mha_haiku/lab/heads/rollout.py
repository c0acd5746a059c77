"""Roll-out and flow: how much of each input reaches a position through all layers.

`B...` batch axes, T query positions, S = T key positions, H heads, V value size per
head, D model width, R chosen rows, L layers.

A layer's matrix `[B..., T, T]` says how much of what enters at each position reaches
each position above. Row t of the product over layers is `((e_t^T A_L) ... A_2) A_1`: R
vectors go down through the layers, tile by tile, and no `[T, T]` array is made. So
memory is `O(H R T)` at any length.

The gradient of an answer with respect to the attention weight `a[t, s]` is the dot
product of the gradient of the head's output at query t with the value at key s, times
the gates of t where attention is gated. So `[T, V]` and `[S, V]` are kept, and the
`[T, S]` gradient is made tile by tile, as the weights are.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, checks, models, tiles
from mha_haiku.core.attention import observation, scores
from mha_haiku.lab.heads import edits, running
from mha_haiku.training import tasks

Array = jax.Array
Maps = Sequence[attention.AttentionMap]
Rows = int | tiles.Index

# Multiplies columns `[B..., T, R]` by the transposed matrix of a layer.
Layer = Callable[[Array], Array]

# From the logits of a batch and the batch itself to a number per example, `[B]`: the
# score of the answer to be explained, such as its logit.
Answer = Callable[[Array, tasks.Example], Array]


def rollout(
    maps: Maps,
    rows: Rows,
    *,
    residual: float = 0.5,
    per_layer: bool = False,
) -> Array:
    """Rolls attention out: rows of the product of the layers' mean attention.

    A layer's matrix is `residual I + (1 - residual) A`, with A the mean of its heads;
    it is I in rows where the query is fully masked in all heads (padding), and in a
    layer without heads (all pruned). A head where the query is fully masked is left out
    of the mean. So rows sum to 1; where the rows of maps do not, as with sinks, A is
    the sum over heads divided by its row sums. `rollout(maps[i : i + 1], rows,
    residual=0)` is the mean attention of layer i, except for such rows.

    Args:
      maps: One per layer, of shape (B..., H, T, T); H may differ.
      rows: Which of the T positions of the last layer: one, or R as a slice, a range or
        integers `[R]`, or `[B..., R]`, different for each example.
      residual: Share of the residual connection, in [0, 1).
      per_layer: Whether to return the roll-outs up to each layer too; one pass in all.

    Returns:
      `[B..., R, T]`, the share of each input in each row; with `per_layer` `[L, B...,
      R, T]`, entry l being the roll-out through layers 0 to l.

    Raises:
      ValueError: If maps are not of one stack of self-attention over one input, there
        is no such row, or the residual is no share below 1.

    Source: Abnar and Zuidema 2020, eq. 1, https://arxiv.org/abs/2005.00928.
    """
    checks.fraction("residual", residual)
    layers = [functools.partial(_mixed, each, None, residual) for each in maps]
    return _chained(layers, maps, rows, per_layer)


def value_rollout(
    maps: Maps,
    rows: Rows,
    *,
    output_weights: Sequence[Array] | None = None,
    residual: float = 0.5,
    per_layer: bool = False,
) -> Array:
    """Rolls out attention weighted by the norms of the values.

    Head h's weight `a[t, s]` is replaced by `a[t, s] |v_s W_h|`, the norm of what the
    head adds to t from s; the sum over heads is divided by its sum over s. Norms are
    added per head, so that heads which cancel each other count in full.

    Arguments and result are as in `rollout`; attention may have no gates.
    `output_weights` are the output projections W of the heads, `[H, V, D]` per layer;
    None: the norms are of the values themselves.

    Raises:
      ValueError: As `rollout`; if maps have gates or no values, or weights do not fit.

    Source: Kobayashi et al. 2020, eq. 4 and 8, https://arxiv.org/abs/2004.10102.
    """
    checks.fraction("residual", residual)
    if output_weights is None:
        output_weights = [None] * len(maps)
    _check_layers("output_weights", output_weights, maps)

    def moved(attention_map, weights, columns):
        sizes = _sizes(attention_map, weights)
        return _mixed(attention_map, sizes, residual, columns)

    layers = map(functools.partial, [moved] * len(maps), maps, output_weights)
    return _chained([*layers], maps, rows, per_layer)


def gradient_rollout(
    maps: Maps,
    gradients: Sequence[Array],
    rows: Rows,
    *,
    per_layer: bool = False,
) -> Array:
    """Rolls out attention weighted by the gradient of an answer.

    A layer's matrix is `I + A`, with A the mean over heads of `max(a g, 0)`, where g is
    the gradient of the answer with respect to the weight a. Rows do not sum to 1.

    Arguments and result are as in `rollout`. `gradients` are `[B..., T, H, V]` per
    layer, from `output_gradients`.

    Raises:
      ValueError: As `rollout`; if maps have no values, or gradients do not fit.

    Source: Chefer et al. 2021, eq. 5 and 6, https://arxiv.org/abs/2103.15679.
    """
    _check_layers("gradients", gradients, maps)
    layers = map(functools.partial, [_by_gradients] * len(maps), maps, gradients)
    return _chained([*layers], maps, rows, per_layer)


def output_gradients(
    model: models.Model, params: Any, example: tasks.Example, answer: Answer
) -> tuple[models.Output, tuple[Array, ...]]:
    """Computes the model's output and the answer's gradients of the heads' outputs.

    The gradients are `[B, T, H, V]` for each layer, as `gradient_rollout` takes them.
    The answer of an example may depend on the logits of that example only.
    """
    output, heads = running.look(model, params, example, ["*/heads"])

    def score(added):
        # Adds 0 to each head, so as to differentiate by it.
        moved = edits.on_parts(list(heads), added, jnp.add)
        edited = running.run_edited(model, params, example, moved)
        return answer(edited.logits, example).sum()

    zeros = [jnp.zeros_like(each) for each in heads.values()]
    return output, tuple(jax.grad(score)(zeros))


# scipy's maximum flow takes integer capacities; this is a capacity of 1.
_UNIT = 2**30


def flow(maps: Maps, rows: Rows, *, residual: float = 0.5) -> np.ndarray:
    """Computes attention flow: the largest flows from positions to single inputs.

    The graph has T nodes below each layer and T above the last. Entry (t, s) of a
    layer's matrix, as `rollout` multiplies them, is the capacity of the edge from
    position s below the layer to position t above it. SciPy computes each flow on the
    host, one per row and input, in a graph of L T^2 edges: for short inputs.

    Arguments and errors are as in `rollout`. The result is `[B..., R, T]` float64, in
    [0, 1]; rows may sum to more than 1.

    Source: Abnar and Zuidema 2020, section 3, https://arxiv.org/abs/2005.00928.
    """
    from scipy.sparse import csgraph

    positions = np.asarray(_positions(maps, rows))
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


def _positions(maps: Maps, rows: Rows) -> Array:
    """Returns the positions `[B..., R]` that `rows` choose."""
    _check_maps(maps)
    *batch_shape, _, size, _ = maps[0].shape
    shape = (-1,)
    if not isinstance(rows, slice | range):
        rows = rows if isinstance(rows, jax.Array) else np.asarray(rows)
        if rows.ndim > 1 and rows.shape[:-1] != tuple(batch_shape):
            raise ValueError(
                "rows must be [R] or [B..., R] with B... = "
                f"{tuple(batch_shape)}, got shape {rows.shape}."
            )
        shape, rows = rows.shape or (1,), rows.reshape(-1)
    positions = tiles.positions(rows, size).reshape(shape)
    if positions.ndim == 1:
        positions = positions.reshape(*(1,) * len(batch_shape), -1)
    xnp = jnp if isinstance(positions, jax.Array) else np
    return xnp.broadcast_to(positions, (*batch_shape, positions.shape[-1]))


def _check_maps(maps) -> None:
    """Raises ValueError unless maps are of layers of self-attention over one input."""
    if not maps:
        raise ValueError("maps must have at least one layer, got none.")
    if isinstance(maps, models.Maps):
        raise ValueError(
            "maps must be of one stack of layers, got the maps of an encoder-decoder; "
            "take output.maps.encoder."
        )
    shapes = [(*layer.shape[:-3], *layer.shape[-2:]) for layer in maps]
    if len(set(shapes)) > 1 or shapes[0][-1] != shapes[0][-2]:
        raise ValueError(
            "maps must be (B..., H, T, T) with the same B... and T in each layer, got "
            f"{', '.join(str(layer.shape) for layer in maps)}."
        )


def _check_layers(name, given, maps) -> None:
    _check_maps(maps)
    if len(given) != len(maps):
        raise ValueError(
            f"{name} must be of L = {len(maps)} layers, as maps are, got {len(given)}."
        )


def _chained(layers: Sequence[Layer], maps: Maps, rows: Rows, per_layer: bool) -> Array:
    """Computes rows of the product of the layers' matrices; see `rollout`."""
    rows = jnp.asarray(_positions(maps, rows))
    size, dtype = maps[0].shape[-1], maps[0].dtype
    start = jax.nn.one_hot(rows, size, axis=-2, dtype=dtype)  # a column for each row

    # Going down, each layer adds its own start columns: those that began at layer l end
    # as the product of layers 0 to l.
    columns = start[..., :0]
    for i in reversed(range(len(maps))):
        if per_layer or i == len(maps) - 1:
            columns = jnp.concatenate([columns, start], axis=-1)
        if maps[i].shape[-3]:
            columns = layers[i](columns)
    rows = jnp.swapaxes(columns, -1, -2)
    if not per_layer:
        return rows
    by_layer = (len(maps), start.shape[-1], start.shape[-2])
    rows = rows.reshape(*rows.shape[:-2], *by_layer)
    return jnp.moveaxis(rows, -3, 0)[::-1]


def _values_of(attention_map) -> Array:
    """Takes the values that each head reads, `[B..., S, H, V]`."""
    if attention_map.value is None:
        raise ValueError(
            "maps must have values, as attend makes them; got one with value=None."
        )
    value = scores.repeat_heads(attention_map.value, attention_map.shape[-3])
    return value.astype(attention_map.dtype)


def _mixed(attention_map, sizes, residual, columns) -> Array:
    """Multiplies columns by the transposed `residual I + (1 - residual) A`.

    A is the sum over heads of the weights, times sizes `[B..., S, H]` unless None, its
    rows divided by their sums; where such a sum is 0 the row is taken from I.
    """
    if sizes is not None:
        totals = attention_map.apply(sizes[..., None]).sum((-1, -2))
    elif attention_map.rows_sum_to != "1":
        totals = attention_map.row_sums().sum(-2)
    else:  # known without a pass: a head's row sums to 1, or 0 if masked
        sees = attention_map.logsumexp != -jnp.inf
        totals = sees.sum(-2, dtype=attention_map.dtype)

    is_empty = totals == 0
    share = jnp.where(is_empty, 0, 1 - residual)
    scaled = columns * (share / jnp.where(is_empty, 1, totals))[..., None]
    received = attention_map.apply_transposed(scaled[..., None, :])
    if sizes is not None:
        received = received * sizes[..., None]
    return columns * (1 - share)[..., None] + received.sum(-2)


def _sizes(attention_map, weights) -> Array:
    """Computes the norms `[B..., S, H]` of what weights `[H, V, D]` make of values."""
    if attention_map.weighting.gates is not None:
        raise ValueError(
            "maps must be of attention without gates: with them the norm of what is "
            "moved is another for each query."
        )
    values = _values_of(attention_map)
    if weights is None:
        return jnp.linalg.norm(values, axis=-1)
    shape, wanted = jnp.shape(weights), values.shape[-2:]
    if len(shape) != 3 or shape[:2] != wanted:
        raise ValueError(
            "output_weights must be [H, V, D] of each layer, with H and V = "
            f"{wanted}, got shape {shape}."
        )
    # V numbers instead of D: W^T = Q U with orthonormal columns in Q, so |v W| = |U v|.
    weights = jnp.asarray(weights, values.dtype)
    upper = jnp.linalg.qr(jnp.swapaxes(weights, -1, -2), mode="r")
    return jnp.linalg.norm(jnp.einsum("...shv,huv->...shu", values, upper), axis=-1)


def _by_gradients(attention_map, gradient, columns) -> Array:
    """Multiplies columns by `(I + A)^T`; see `gradient_rollout`."""
    values = _values_of(attention_map)
    if jnp.shape(gradient) != values.shape:  # S = T
        raise ValueError(
            "gradients must be [B..., T, H, V] of each layer, "
            f"{values.shape} here, got shape {jnp.shape(gradient)}."
        )
    gradient = jnp.asarray(gradient, attention_map.dtype)
    if attention_map.weighting.gates is not None:
        gradient = gradient * attention_map.weighting.gates.astype(gradient.dtype)
    given = observation.Given((gradient, columns[..., None, :]), values)
    received = attention_map.observe(_Gains(), given).keys
    return columns + received.sum(-3) / attention_map.shape[-3]


@dataclasses.dataclass(frozen=True)
class _Gains(observation.Observation):
    """The transposed weights times what they gain, multiplied by columns."""

    def nothing(self, num_queries, num_keys, given, dtype):
        _, columns = given.queries
        return observation.Sums(keys=jnp.zeros((num_keys, columns.shape[-1]), dtype))

    def add(self, tile, sums):
        gradients, columns = tile.given.queries  # of outputs, `[T, V]`, and `[T, R]`
        gains = tile.weights * jnp.maximum(gradients @ tile.given.keys.T, 0)
        return sums._replace(keys=sums.keys + gains.T @ columns)


@functools.partial(jax.jit, static_argnums=1)
def _matrix(layer, residual):
    return rollout([layer], slice(None), residual=residual)


def _capacities(matrices):
    """Builds the sparse matrix of capacities; node `l T + t` is t below layer l."""
    from scipy import sparse

    num_layers, size, _ = matrices.shape
    capacities = np.rint(matrices * _UNIT).astype(np.int32)
    layers, above, below = np.nonzero(capacities)
    ends = (layers + 1) * size + above, layers * size + below
    count = (num_layers + 1) * size
    return sparse.csr_array(
        (capacities[layers, above, below], ends), shape=(count, count)
    )
