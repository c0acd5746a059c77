"""The shapes in annotations of the core hold when its functions are called."""

import beartype
import haiku as hk
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from mha_haiku.core import masks, modules
from mha_haiku.core.attention import (
    attention_map,
    implementations,
    inputs,
    reference,
    scores,
)

B, T, S, H, G, K, V = 2, 3, 5, 6, 2, 4, 7


def checked(function):
    return jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)


@pytest.fixture
def everything_checked(monkeypatch):
    """Checks the annotations of the core's public functions at each call."""
    for owner, names in {
        reference: ["attention"],
        implementations: ["attend", "attend_within"],
        scores: ["repeat_heads"],
        scores.Score: ["gradients"],
        inputs.Weighting: ["aligned", "scores", "finished"],
        inputs.Nonfinite: ["pairs"],
        attention_map.AttentionMap: [
            *("weights", "scores", "tile", "row_sums", "pooled", "apply"),
            *("outputs", "apply_transposed", "divergence"),
        ],
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, checked(getattr(owner, name)))
    for kind in (scores.DotProduct, scores.Sigmoid):
        # Annotated where they are declared, in the base class.
        function = kind.__call__
        annotations = scores.Score.__call__.__annotations__
        monkeypatch.setattr(function, "__annotations__", annotations)
        monkeypatch.setattr(kind, "__call__", checked(function))


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, H, K), (B, S, G, K), (B, S, G, V)
    return [jax.random.normal(*each) for each in zip(keys, shapes, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "score"),
    [("dense", "dot_product"), ("blockwise", "sigmoid")],
)
def test_attention_and_its_map_have_the_shapes_that_they_say(
    implementation, score, arrays, everything_checked
):
    score = getattr(scores, score)()
    mask = masks.causal() & masks.padding(np.array([3, 5]))

    def loss(*arrays):
        values, found = implementations.attend(
            *arrays,
            mask=mask,
            score=score,
            gates=jnp.ones((B, T, H, 1)),
            implementation=implementation,
        )
        return values.sum(), found

    _, found = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    found.weights(), found.scores(), found.row_sums(), found.outputs()
    found.tile(np.array([0, 2]), slice(1, 4)), found.pooled(2, 3), found.divergence()
    found.apply(jnp.ones((B, S, 1, V))), found.apply_transposed(jnp.ones((B, T, H, V)))
    reference.attention(*arrays, allowed=mask.array(T, S)[:, None])


@pytest.mark.slow
def test_modules_have_the_shapes_that_they_say(monkeypatch):
    kind = modules.MultiHeadAttention
    monkeypatch.setattr(kind, "__call__", checked(kind.__call__))

    def apply(x, source):
        return kind(H, K, num_key_value_heads=G, value_size=V)(x, source, source)[0]

    x, source = jnp.ones((B, T, 8)), jnp.ones((B, S, 9))
    transformed = hk.transform(apply)
    params = transformed.init(jax.random.key(0), x, source)
    assert transformed.apply(params, None, x, source).shape == (B, T, H * K)


def test_masks_give_booleans():
    for mask in (masks.causal(), masks.padding(np.array([3, 5])), ~masks.full()):
        tile = mask.aligned_tile(np.arange(T), np.arange(S))
        assert isinstance(tile, jaxtyping.Bool[jax.Array, "..."])


def test_an_array_of_another_shape_is_noticed(arrays, everything_checked):
    query, key, _ = arrays
    with pytest.raises(jaxtyping.TypeCheckError):
        reference.attention(query, key, key[:, 1:])
