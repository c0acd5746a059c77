"""Which implementation suits which call, as a table."""

import jax
import jax.numpy as jnp
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend, dot_product, implementations
from mha_haiku.core.attention.inputs import Inputs, Weighting


def inputs(batch, T, S, dtype=jnp.float32, mask=None, H=4, K=64):
    """Returns inputs that are shapes only."""
    query, key = (jax.ShapeDtypeStruct((batch, n, H, K), dtype) for n in (T, S))
    mask = masks.full() if mask is None else mask
    score = dot_product()
    return Inputs(query, key, key, Weighting(mask, score=score))


HALF = jnp.bfloat16
CALLS = [
    # On the CPU by the number of scores, whatever else.
    (inputs(1, 512, 512), 0.0, "cpu", "dense"),
    (inputs(1, 512, 513), 0.0, "cpu", "blockwise"),
    (inputs(512, 16, 16), 0.0, "cpu", "dense"),
    (inputs(2048, 16, 16), 0.0, "cpu", "blockwise"),
    (inputs(1, 8192, 8192, HALF, masks.causal()), 0.0, "cpu", "blockwise"),
    (inputs(0, 8192, 8192), 0.0, "cpu", "dense"),
    # Kernels where they can do it.
    (inputs(1, 8192, 8192, HALF, masks.causal()), 0.0, "cuda", "fused"),
    (inputs(1, 128, 128, HALF), 0.0, "cuda", "fused"),
    (inputs(1, 8192, 8192, HALF), 0.1, "cuda", "blockwise"),
    (inputs(1, 8192, 8192, HALF, ~masks.causal()), 0.0, "cuda", "blockwise"),
    (inputs(1, 8192, 8192), 0.0, "cuda", "blockwise"),
    (inputs(1, 2048, 2048), 0.0, "cuda", "dense"),
    (inputs(1, 8192, 8192, HALF, masks.causal()), 0.0, "rocm", "blockwise"),
    (inputs(1, 8192, 8192, mask=masks.causal()), 0.0, "tpu", "fused"),
    (inputs(1, 8192, 8192, mask=masks.window(9, 9)), 0.0, "tpu", "blockwise"),
]


@pytest.mark.parametrize(("call", "dropout_rate", "platform", "expected"), CALLS)
def test_implementation_is_chosen_by_what_is_asked(
    call, dropout_rate, platform, expected
):
    assert implementations.chosen(call, dropout_rate, platform) == expected


@pytest.mark.slow
def test_automatic_choice_is_the_default_and_gives_the_same(arrays):
    query, key, value = arrays((1,), 600, 700, 4, 2, 6, 7)  # many enough for tiles
    values, found = jax.jit(attend)(query, key, value)
    text = jax.jit(attend).lower(query, key, value).as_text()
    assert "while" in text
    expected, other = jax.jit(lambda *x: attend(*x, implementation="dense"))(
        query, key, value
    )
    assert jnp.allclose(values, expected, atol=1e-5)
    assert jnp.allclose(found.logsumexp, other.logsumexp, atol=1e-5)


def test_naming_what_cannot_do_the_call_says_why(arrays):
    with pytest.raises(ValueError, match="'fused' cannot do this call: there is no"):
        attend(*arrays(), implementation="fused")
