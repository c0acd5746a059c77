"""Every order of two of JAX's transformations, on values and on statistics.

N and M examples, T positions, H heads, K size per head.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import Blockwise, attend

N, M, T, H, K = 2, 3, 4, 1, 2


def attended(x, implementation):
    """Returns values and map of self-attention among `[T, H, K]`."""
    length = 2 + (x[0, 0, 0] > 0).astype(int)  # each example has its own
    mask = masks.causal() & masks.padding(length)
    return attend(x, x, x, mask=mask, implementation=implementation)


def values(x):
    return (attended(x, "dense")[0] ** 2).sum()


def statistics(x):
    values, found = attended(x, Blockwise(rows=2, columns=2))
    return found.statistics().entropy.sum() + (values**2).sum()


def grad(function):
    return jax.grad(lambda x: function(x).sum())


def scan(function):
    return lambda x: jax.lax.scan(lambda _, row: (None, function(row)), None, x)[1]


OVER_EXAMPLES = {"vmap": jax.vmap, "scan": scan, "pmap": jax.pmap}
TRANSFORMATIONS = {"grad": grad, "jit": jax.jit, "checkpoint": jax.checkpoint}
TRANSFORMATIONS |= OVER_EXAMPLES
PAIRS = set(itertools.product(TRANSFORMATIONS, repeat=2))
PAIRS -= {("pmap", "pmap")}  # JAX itself refuses it
# A checkpoint is nothing where nothing is differentiated.
PAIRS -= {names for names in PAIRS if "checkpoint" in names and "grad" not in names}
EVERY_DAY = {
    values: {("jit", "grad"), ("scan", "grad"), ("pmap", "grad")},
    statistics: set(),
}
CASES = [
    pytest.param(
        *(names, function),
        id=f"{' of '.join(names)} of {function.__name__}",
        marks=() if names in EVERY_DAY[function] else pytest.mark.slow,
    )
    for names in sorted(PAIRS)
    for function in (values, statistics)
]


@pytest.mark.parametrize(("names", "function"), CASES)
def test_transformations_compose_in_every_order(names, function):
    leading = [
        size for name, size in zip(names, (N, M), strict=True) if name in OVER_EXAMPLES
    ]
    x = np.random.default_rng(0).normal(size=(*leading, T, H, K))
    x = jnp.asarray(x, jnp.float32)
    outer, inner = (TRANSFORMATIONS[name] for name in names)
    composed = outer(inner(function))
    if names == ("grad", "grad") and function is statistics:
        with pytest.raises(ValueError, match="Reverse-mode differentiation"):
            composed(x)
        return
    alone = function
    for _ in range(names.count("grad")):
        alone = grad(alone)
    expected = [alone(example) for example in x.reshape(-1, T, H, K)]
    found = composed(x)
    np.testing.assert_allclose(
        found, jnp.stack(expected).reshape(found.shape), rtol=1e-5, atol=1e-6
    )
