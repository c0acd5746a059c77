"""Which slices of a function's parameters go with its heads.

A slice goes if it acts on the output through the removed heads alone: its gradient is
exactly 0 where these are ablated, and is not where they almost are. So neither names
nor layouts of projections matter, and what heads share stays: keys and values of a
group, until its last head goes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models
from mha_haiku.lab.heads import edits, model_runs
from mha_haiku.training import tasks

# Gates of almost ablated heads: units and experts that others switch stay as they are.
_ALMOST = 2.0**-16
_MOST = 1e3  # larger parameters are constants, such as the scores of masks


def without_heads(
    model: models.Model, params: Any, example: tasks.Example, gates: np.ndarray
) -> tuple[Any, Callable[[Any], Any]]:
    """Removes parameters of heads whose gates `[P, H]` are 0, of P attention parts.

    Heads that share parameters with others stay, so compare with `gated_output`.
    Returns what is left, and a function that fills it with zeros to all parameters.
    """
    leaves, tree = jax.tree.flatten(params)
    all_kept, shapes = _kept(model, params, example, gates), [x.shape for x in leaves]
    places = [
        np.ix_(*(kept.get(axis, np.arange(n)) for axis, n in enumerate(shape)))
        for shape, kept in zip(shapes, all_kept, strict=True)
    ]
    left = [jnp.asarray(x)[at] for x, at in zip(leaves, places, strict=True)]

    def filled(params: Any) -> Any:
        rows = zip(jax.tree.leaves(params), shapes, places, strict=True)
        return tree.unflatten(jnp.zeros(n, x.dtype).at[at].set(x) for x, n, at in rows)

    return tree.unflatten(left), filled


def gated_output(
    model: models.Model, params: Any, example: tasks.Example, gates: Any
) -> jax.Array:
    """Computes the output of a function whose heads have gates `[P, H]`."""
    counts = model_runs.parts(model, params, example)
    names = [f"{path}/heads".removeprefix("/") for path in counts]
    rows = [jnp.float32(x[:n]) for x, n in zip(gates, counts.values(), strict=True)]
    changes = edits.on_parts(names, rows, edits.gated)
    return model_runs.run_edited(model, params, example, changes).logits


def _kept(
    model: models.Model, params: Any, example: tasks.Example, gates: np.ndarray
) -> list[dict[int, np.ndarray]]:
    """Finds the indices that are left of axes of each parameter."""
    key = jax.random.key(0)

    def moved(x: jax.Array) -> jax.Array:  # a parameter of zeros would stop gradients
        noise = abs(jax.random.normal(key, x.shape)) / 50
        is_constant = not jnp.issubdtype(x.dtype, jnp.floating) or abs(x) > _MOST
        return jnp.where(is_constant, x, x + noise.astype(x.dtype))

    @jax.jit
    def acting(params: Any, gates: jax.Array) -> list[list[jax.Array]]:
        def score(params: Any) -> jax.Array:
            output = gated_output(model, params, example, gates)
            return (output * jax.random.normal(key, output.shape)).sum()

        slopes = jax.grad(score, allow_int=True)(jax.tree.map(moved, params))
        return [
            [(x != 0).any((*range(i), *range(i + 1, x.ndim))) for i in range(x.ndim)]
            if jnp.issubdtype(x.dtype, jnp.floating)
            else []
            for x in jax.tree.leaves(slopes)
        ]

    gone = gates == 0
    half = gone & (gone.cumsum(1) <= gone.sum(1, keepdims=True) / 2)
    almost, without_half, without = (
        jax.device_get(acting(params, np.where(x, 0, np.where(gone, _ALMOST, 1))))
        for x in (gone & False, half, gone)
    )
    result: list[dict[int, np.ndarray]] = [{} for _ in almost]
    for kept, *runs in zip(result, almost, without_half, without, strict=True):
        for axis, (acts, half_acts, stays) in enumerate(zip(*runs, strict=True)):
            clear = np.flatnonzero(acts | stays)
            # Where all goes, an axis of heads is one that half of them share out.
            if stays.any() or (half_acts.any() and not half_acts[clear].all()):
                # The gradient of a bias of keys, which moves all scores of a query
                # alike, is rounding, of which some is 0: it goes between others.
                order, last = np.arange(len(stays)), len(clear) - 1
                after = np.minimum(np.searchsorted(clear, order), last)
                before = np.searchsorted(clear, order, side="right") - 1
                stays = stays[clear[after]] | stays[clear[np.maximum(before, 0)]]
                if not stays.all():
                    kept[axis] = np.flatnonzero(stays)
    return result
