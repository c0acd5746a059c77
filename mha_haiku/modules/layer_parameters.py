"""Parameters of looped layers as those of scanned layers, and back.

L layers. Looped layers have parameters `encoder/layer_0/attention/query`, `encoder/
layer_1/attention/query` and so on; scanned layers have one `encoder/layers/layer_0/
attention/query`, whose arrays have a leading axis L.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mha_haiku.modules import anatomy

Params = Mapping[str, Mapping[str, Any]]


def stacked(params: Params) -> dict[str, dict[str, Any]]:
    """Returns the parameters of looped layers as scanned layers have them.

    Trees like the parameters, such as their gradients, convert too.

    Returns:
      The arrays of `layer_0`, ..., `layer_{L - 1}` as `layers/layer_0` with a leading
      axis L; what belongs to no layer as it is. NumPy arrays stay such.

    Raises:
      ValueError: If there are no looped layers, or they are not alike.
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
            f"there is no layer_0 among the parameters, which are of {_listed(params)}."
        )
    for scope, layers in scopes.items():
        _check_alike(scope, layers)
        for part, leaves in layers[0].items():
            result[str(anatomy.LayerName(scope, None, part))] = {
                name: _stack([layers[i][part][name] for i in range(len(layers))])
                for name in leaves
            }
    return result


def unstacked(params: Params) -> dict[str, dict[str, Any]]:
    """Returns the parameters of scanned layers as looped layers have them.

    The inverse of `stacked`.

    Returns:
      The arrays of `layers/layer_0` as `layer_0`, ..., `layer_{L - 1}`, without their
      leading axis L; what belongs to no layer as it is.

    Raises:
      ValueError: If there are no scanned layers, or their arrays disagree on L.
    """
    result, sizes = {}, {}
    for module, leaves in params.items():
        layer = anatomy.layer_of(module)
        if layer is None or layer.index is not None:
            result[module] = dict(leaves)
            continue
        for name, leaf in leaves.items():
            size = np.shape(leaf)[0] if np.ndim(leaf) else None
            wanted = sizes.setdefault(layer.scope, size)
            if size is None or size != wanted:
                raise ValueError(
                    "scanned layers must have a leading axis L in common, got shape "
                    f"{np.shape(leaf)} of {module}/{name} where L is {wanted}."
                )
        for i in range(sizes.get(layer.scope, 0)):
            result[str(layer._replace(index=i))] = {
                # `...` keeps NumPy's arrays without axes arrays.
                name: leaf[i, ...]
                for name, leaf in leaves.items()
            }
    if not sizes:
        raise ValueError(
            f"there is no {anatomy.STACKED_SCOPE}/layer_0 among the parameters, which "
            f"are of {_listed(params)}."
        )
    return result


def _stack(leaves: list) -> Any:
    # jnp.stack may make float32 of float64.
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return np.stack(leaves) if on_host else jnp.stack(leaves)


def _check_alike(scope: str, layers: Mapping[int, Params]) -> None:
    if set(layers) != set(range(len(layers))):
        raise ValueError(
            f"layers must be numbered 0..L - 1 to be stacked, got {scope}layer_i for i "
            f"in {sorted(layers)}."
        )
    described = [
        {
            f"{part}/{name}": (np.shape(leaf), jnp.result_type(leaf).name)
            for part, leaves in layers[i].items()
            for name, leaf in leaves.items()
        }
        for i in range(len(layers))
    ]
    for i, other in enumerate(described):
        for path in described[0] | other:
            first, own = described[0].get(path), other.get(path)
            if first != own:
                raise ValueError(
                    "layers must have parameters of the same names, shapes and dtypes "
                    f"to be stacked, got {first or 'nothing'} at {scope}layer_0{path} "
                    f"and {own or 'nothing'} at {scope}layer_{i}{path}."
                )


def _listed(params: Params) -> str:
    return ", ".join(sorted(params)) or "no module"
