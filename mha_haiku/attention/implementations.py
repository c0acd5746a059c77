"""The implementations of attention by their names.

`B...` batch axes, T query positions, S key positions, H query heads, V value size.
"""

from collections.abc import Callable

import jax

from mha_haiku import checks
from mha_haiku.attention import blockwise, choice, dense, fused, gradients

Array = jax.Array

# From the inputs and the rate of dropout to values `[B..., T, H, V]` and the logsumexp
# `[B..., H, T]`.
Implementation = Callable[[gradients.Inputs, float], tuple[Array, Array]]


def _automatic(inputs, dropout_rate):
    name = choice.automatic(inputs, dropout_rate, fused.platform())
    return _NAMED[name](inputs, dropout_rate)


def _fused(inputs, dropout_rate):
    refusal = fused.refusal(inputs, dropout_rate, fused.platform())
    if refusal is not None:
        raise ValueError(
            f"implementation='fused' cannot do this call: {refusal}; 'auto' takes what "
            "can."
        )
    return fused.attend(inputs, dropout_rate)


def _formula(inputs, dropout_rate):
    return dense.formula(inputs, dropout_rate)[:2]


_NAMED: dict[str, Implementation] = {
    "auto": _automatic,
    "dense": dense.attend,
    "blockwise": blockwise.Blockwise(),
    "fused": _fused,
    "formula": _formula,
}
IMPLEMENTATIONS = tuple(_NAMED)


def of(implementation: str | Implementation) -> Implementation:
    """Returns an implementation that is given, or that has this name.

    Raises:
      ValueError: If there is no such name.
    """
    if callable(implementation):
        return implementation
    return _NAMED[checks.choice("implementation", implementation, IMPLEMENTATIONS)]
