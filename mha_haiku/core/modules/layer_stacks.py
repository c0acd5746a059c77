"""Ways to run layers: one by one, or as a compiled loop.

A stack strategy is a function passed to `Encoder`: it takes the call of a layer, and
returns the output of the last layer and the attention maps of all.

Looped layers have parameters `encoder/layer_0/attention/query`, `encoder/layer_1/
attention/query` and so on; scanned layers have one `encoder/layers/layer_0/attention/
query`, whose arrays have a leading axis L. `stacked` and `unstacked` convert.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mha_haiku.core.modules import anatomy

Params = Mapping[str, Mapping[str, Any]]

# Calls layer i: from (i, x [..., T, D], its arguments) to (x [..., T, D], its map or
# maps).
CallLayer = Callable[[int, Array, Any], tuple[Array, Any]]
# From (the call, x [..., T, D], the arguments of L layers, such as their masks) to (x,
# the maps of the L layers).
LayerStack = Callable[[CallLayer, Array, Sequence], tuple[Array, tuple]]


def looped(call_layer: CallLayer, x: Array, by_layer: Sequence) -> tuple[Array, tuple]:
    """Calls the layers one by one: they are compiled separately, and may differ.

    Example:
      >>> def f(x):
      ...     stack = mh.modules.looped  # or scanned: compiled once for all layers
      ...     model = mh.Encoder(2, stack=stack, num_heads=2, key_size=4, hidden_size=8)
      ...     return model(x, is_training=False)[0]
      ...
      >>> params = hk.transform(f).init(jax.random.key(0), jnp.ones((1, 5, 8)))
      >>> sorted(x for x in params if x.endswith("attention/query"))
      ['encoder/layer_0/attention/query', 'encoder/layer_1/attention/query']
    """
    maps = []
    for i, options in enumerate(by_layer):
        x, attention_map = call_layer(i, x, options)
        maps.append(attention_map)
    return x, tuple(maps)


def scanned(call_layer: CallLayer, x: Array, by_layer: Sequence) -> tuple[Array, tuple]:
    """Calls the layers in a `lax.scan`: the size of the program is independent of L.

    Only layer 0 is compiled, so that layers may differ only in the values of their
    parameters, which are `stacked`. What layers share, such as a mask given as an
    array, is stored L times in maps that leave the compiled function.

    The call must do the same for every layer, and return x's dtype. At initialization,
    parameters of different names, shapes or dtypes raise ValueError; other differences,
    such as another activation, are not detected.
    """
    num_layers = len(by_layer)
    by_layer = jax.tree.map(lambda *x: jnp.stack([*map(jnp.asarray, x)]), *by_layer)
    if hk.running_init():
        first = jax.tree.map(lambda leaf: leaf[0], by_layer)
        _check_alike(call_layer, num_layers, x, first)
    stack = hk.layer_stack(
        num_layers, with_per_layer_inputs=True, name=anatomy.STACKED_SCOPE
    )
    x, maps = stack(functools.partial(call_layer, 0))(x, by_layer)

    def at(i: int):
        return jax.tree.map(lambda x: jax.lax.index_in_dim(x, i, keepdims=False), maps)

    return x, tuple(map(at, range(num_layers)))


def stacked(params: Params) -> dict[str, dict[str, Any]]:
    """Stacks the parameters of looped layers for scanned ones.

    Trees like the parameters, such as their gradients, can be stacked too. The arrays
    of `layer_0`, ..., `layer_{L - 1}` become `layers/layer_0` with a leading axis L;
    parameters of no layer are unchanged. NumPy arrays remain NumPy arrays.

    Raises:
      ValueError: If there are no looped layers, or their parameters differ.

    Example:
      >>> layers = {f"encoder/layer_{i}/norm": {"w": np.ones(4)} for i in range(2)}
      >>> {x: y["w"].shape for x, y in mh.modules.stacked(layers).items()}
      {'encoder/layers/layer_0/norm': (2, 4)}
    """
    result, scopes = {}, {}
    for module, leaves in params.items():
        layer = anatomy.layer_of(module)
        if layer is None or layer.index is None:
            result[module] = dict(leaves)
        else:
            layers = scopes.setdefault(layer.scope, {})
            layers.setdefault(layer.index, {})[layer.part] = leaves
    if not scopes:
        raise ValueError(
            f"there is no layer_0 among the parameters of {_listed(params)}."
        )
    for scope, layers in scopes.items():
        _check_numbered(scope, layers)
        for part, leaves in layers[0].items():
            result[str(anatomy.LayerName(scope, None, part))] = {
                name: _stack([layers[i][part][name] for i in range(len(layers))])
                for name in leaves
            }
    return result


def unstacked(params: Params) -> dict[str, dict[str, Any]]:
    """Unstacks the parameters of scanned layers for looped ones; inverts `stacked`.

    Raises:
      ValueError: If there are no scanned layers, or their arrays disagree on L.

    Example:
      >>> layers = {f"encoder/layer_{i}/norm": {"w": np.ones(4)} for i in range(2)}
      >>> mh.modules.unstacked(mh.modules.stacked(layers)).keys() == layers.keys()
      True
    """
    result, sizes = {}, {}
    for module, leaves in params.items():
        layer = anatomy.layer_of(module)
        if layer is None or layer.index is not None:
            result[module] = dict(leaves)
            continue
        for name, leaf in leaves.items():
            size = np.shape(leaf)[0] if np.ndim(leaf) else None
            first_size = sizes.setdefault(layer.scope, size)
            if size is None or size != first_size:
                raise ValueError(
                    "scanned layers must have a leading axis L in common, got shape "
                    f"{np.shape(leaf)} of {module}/{name} where L is {first_size}."
                )
        for i in range(sizes.get(layer.scope, 0)):
            result[str(layer._replace(index=i))] = {
                # `...` keeps NumPy scalars as arrays.
                name: leaf[i, ...]
                for name, leaf in leaves.items()
            }
    if not sizes:
        raise ValueError(
            f"there is no {anatomy.STACKED_SCOPE}/layer_0 among the parameters of "
            f"{_listed(params)}."
        )
    return result


def _check_alike(
    call_layer: CallLayer, num_layers: int, x: Array, options: Any
) -> None:
    """Raises ValueError if parameters of layers differ in name, shape or dtype."""

    def described(i: int):
        layer = hk.transform_with_state(functools.partial(call_layer, i))
        params, _ = jax.eval_shape(layer.init, jax.random.key(0), x, options)
        return {
            # Without the name of the layer, which contains i.
            f"{module.partition('/')[2]}/{name}".strip("/"): (
                f"{leaf.dtype}{list(leaf.shape)}"
            )
            for module, leaves in params.items()
            for name, leaf in leaves.items()
        }

    first, *others = map(described, range(num_layers))
    for i, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"scanned layers must be alike, got a parameter {name!r} of "
                    f"{first.get(name, 'no array')} in layer 0 and of "
                    f"{other.get(name, 'no array')} in layer {i}; layers that differ "
                    "can be looped over."
                )


def _stack(leaves: list) -> Any:
    # jnp.stack may convert float64 to float32.
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return np.stack(leaves) if on_host else jnp.stack(leaves)


def _check_numbered(scope: str, layers: Mapping[int, Params]) -> None:
    if set(layers) != set(range(len(layers))):
        raise ValueError(
            f"layers must be numbered 0..L - 1 to be stacked, got {scope}layer_i for i "
            f"in {sorted(layers)}."
        )
    for i, layer in layers.items():
        if jax.tree.structure(layer) != jax.tree.structure(layers[0]):
            raise ValueError(
                "layers must have parameters of the same names to be stacked, and "
                f"{scope}layer_{i} has others than {scope}layer_0."
            )


def _listed(params: Params) -> str:
    return ", ".join(sorted(params)) or "no module"
