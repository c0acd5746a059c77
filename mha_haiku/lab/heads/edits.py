"""Edits of heads, for `mh.edit`.

`B...` batch axes, T positions, H heads of an attention, V value size per head, P
attention parts. Edits map patterns or names of sites to changes:

>>> import mha_haiku as mh
>>> list(mh.heads.edits.ablate(2, 0) | {"layer_3/stream": lambda stream: 2 * stream})
['layer_2/attention/heads', 'layer_3/stream']

Heads and layers count from 0, and negative numbers raise ValueError. Traced numbers
cannot be validated.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku.core import arguments, checks, sites, tiles

Array = jax.Array
Edits = dict[sites.Address, Callable]


@arguments.checked
def ablate(
    at: int | str, heads: int | Sequence[int], value: Array | float = 0
) -> Edits:
    """Makes an edit that ablates one or more heads.

    Args:
      at: The layer; or the path of the attention, such as "decoder/layer_0/attention",
        or "attention_0" in a function whose attention was recognized.
      heads: Numbers of the heads.
      value: The ablation value: a number, `[V]`, or `[B..., T, X, V]` for X heads.

    Raises:
      ValueError: From the edited function, if it has no such head.

    Source: Michel et al. 2019, section 2.3, https://arxiv.org/abs/1905.10650.
    """
    indices = jnp.atleast_1d(jnp.asarray(heads))

    def change(values: Array) -> Array:
        concrete = tiles.known(indices)
        for number in [] if concrete is None else concrete.tolist():
            checks.integer_in("heads", number, 0, values.shape[-2] - 1)
        return values.at[..., indices, :].set(jnp.asarray(value, values.dtype))

    return {f"{_path(at)}/heads": change}


def without(names: Iterable[str], closed: Iterable[Any]) -> Edits:
    """Makes an edit that ablates the heads of some parts, by the names of their sites.

    `closed` are booleans `[H]` of each part, true of heads whose output becomes 0.
    Programs of other heads of the same parts are the same.
    """
    return on_parts(names, closed, _zeroed)


def _zeroed(values: Array, closed: Array) -> Array:
    return jnp.where(jnp.asarray(closed)[:, None], 0, values)


def gate(gates: Array | Sequence[Array]) -> Edits:
    """Makes an edit that multiplies the heads of L layers by gates.

    Gates are `[L, H]`, `[L, B..., H]` or `[L, B..., T, H]`, or a list of L arrays. A
    layer without gates raises ValueError; if layers are scanned, it becomes NaN.
    """
    of_layer = _of_parts(list(gates), gated)

    def change(values: Array, layer: int | Array | None) -> Array:
        if not isinstance(layer, jax.Array):
            checks.integer_in("the layer of gates", layer, 0, len(gates) - 1)
        return of_layer(values, layer)

    return {"*/heads": change}


def on_parts(
    names: Iterable[str], trees: Iterable[Any], change: Callable[[Array, Any], Array]
) -> Edits:
    """Makes edits of the sites of P parts, such as their heads, by their whole names.

    `change` takes the value of the site and the part's tree of arrays.
    """
    # Parts that are alike share one edit, as the turns of a scan have to.
    alike: dict[Any, tuple[list[str], list[Any]]] = {}
    for name, tree in zip(names, trees, strict=True):
        leaves, structure = jax.tree.flatten(tree)
        key = structure, tuple(map(jnp.shape, leaves))
        for group, x in zip(alike.setdefault(key, ([], [])), (name, tree), strict=True):
            group.append(x)
    return {tuple(names): _of_parts(trees, change) for names, trees in alike.values()}


def gated(values: Array, gates: Array, replacement: Array | None = None) -> Array:
    """Computes `gate * output + (1 - gate) * replacement` of heads.

    Outputs `values` are `[B..., T, H, V]`, gates `[H]`, `[B..., H]` or `[B..., T, H]`,
    the replacement a number, `[H, V]` or `[B..., T, H, V]`, by default zeros.

    Raises:
      ValueError: If gates have another shape.
    """
    gates, shape = jnp.asarray(gates), values.shape[:-1]
    per_head, per_example = shape[-1:], (*shape[:-2], shape[-1])
    if gates.shape not in (shape, per_example, per_head):
        raise ValueError(
            f"gates must be [H], [B..., H] or [B..., T, H], of shape {per_head}, "
            f"{per_example} or {shape}, got {gates.shape}."
        )
    gates = gates if gates.shape == shape else gates[..., None, :]
    gates = tiles.lifted(gates.astype(values.dtype)[..., None], values.ndim)
    if replacement is None:
        return values * gates
    replacement = tiles.lifted(jnp.asarray(replacement, values.dtype), values.ndim)
    return values * gates + replacement * (1 - gates)


def _of_parts(
    trees: Sequence[Any], change: Callable[[Array, Any], Array]
) -> Callable[[Array, Any], Array]:
    """Makes an edit from a tree of arrays for each number that the edit gets.

    It is a pytree: edits that differ only in their arrays share programs.
    """
    partial = jax.tree_util.Partial
    return partial(_at_part, partial(change), list(trees))


def _at_part(change: Callable, trees: list, value: Array, number: int | Array) -> Array:
    if not isinstance(number, jax.Array):
        return change(value, trees[number])

    def of_part(*arrays: Any) -> Array:
        return jnp.stack(arrays).at[number].get(mode="fill")  # NaN past the last layer

    return change(value, jax.tree.map(of_part, *trees))


def _path(at: int | str) -> str:
    return at if isinstance(at, str) else f"layer_{at}/attention"
