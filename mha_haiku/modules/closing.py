"""Gates, which close heads and hidden units, and what passes in their place.

`B...` batch axes, T positions, H heads, V value size per head, F hidden units.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def heads(values: Array, gates: Array | None, replacement: Array | None) -> Array:
    """Returns the heads' outputs, closed as far as the gates say.

    Args:
      values: `[B..., T, H, V]`, the outputs of the heads.
      gates: `[H]` or `[B..., H]`; multiply them; None: all are open.
      replacement: `[H, V]` or `[B..., T, H, V]`; with it an output becomes `gate *
        output + (1 - gate) * replacement`; None: nothing is put in its place.

    Returns:
      `[B..., T, H, V]`.

    Raises:
      ValueError: If shapes do not fit, or there is a replacement without gates.
    """
    if gates is None:
        if replacement is not None:
            raise ValueError("replacement needs gates, which say what it replaces.")
        return values
    gates = _aligned("gates", "H", gates, (*values.shape[:-3], values.shape[-2]))
    gates = gates.astype(values.dtype)[..., None, :, None]
    if replacement is None:
        return values * gates
    replacement = jnp.asarray(replacement, values.dtype)
    if replacement.shape not in (values.shape, values.shape[-2:]):
        raise ValueError(
            "replacement must be [H, V] or [B..., T, H, V], of shape "
            f"{values.shape[-2:]} or {values.shape}, got {replacement.shape}."
        )
    missing = values.ndim - replacement.ndim
    replacement = replacement.reshape(*(1,) * missing, *replacement.shape)
    return values * gates + replacement * (1 - gates)


def units(hidden: Array, gates: Array | None) -> Array:
    """Returns the hidden units `[B..., T, F]` times their gates.

    Args:
      hidden: `[B..., T, F]`.
      gates: `[F]` or `[B..., F]`; None: all are open.

    Raises:
      ValueError: If shapes do not fit.
    """
    if gates is None:
        return hidden
    gates = _aligned("unit_gates", "F", gates, (*hidden.shape[:-2], hidden.shape[-1]))
    return hidden * gates.astype(hidden.dtype)[..., None, :]


def _aligned(name: str, letter: str, gates: Array, shape: tuple[int, ...]) -> Array:
    """Returns gates `[X]` or `[B..., X]` with as many axes as `shape`, `[B..., X]`."""
    gates = jnp.asarray(gates)
    if gates.shape not in (shape, shape[-1:]):
        raise ValueError(
            f"{name} must be [{letter}] or [B..., {letter}] with {letter} = "
            f"{shape[-1]}, got shape {gates.shape}."
        )
    return gates.reshape(*(1,) * (len(shape) - gates.ndim), *gates.shape)
