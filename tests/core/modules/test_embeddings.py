"""Embeddings of tokens and positions, and their gradients."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import modules

B, T, C, D, H = 2, 3, 11, 7, 5

assert_equal = np.testing.assert_array_equal


def test_a_row_of_the_table_gathers_the_gradients_of_its_tokens(
    normal, random_parameters
):
    tokens = np.array([[0, 10, 3], [3, 3, 1]])
    model = hk.transform(lambda x: modules.TokenEmbedding(C, D, name="tokens")(x))
    params = random_parameters(model, tokens)
    cotangent = normal(B, T, D)

    @jax.jit
    @jax.grad
    def gradient(params):
        return (model.apply(params, None, tokens) * cotangent).sum()

    wanted = np.zeros((C, D))
    np.add.at(wanted, tokens, cotangent)
    found = gradient(params)["tokens"]["embeddings"]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_embeddings_start_as_standard_normal_numbers():
    model = hk.transform(lambda x: modules.TokenEmbedding(100, 90)(x))
    params = model.init(jax.random.key(0), np.array([1]))
    table = np.asarray(params["token_embedding"]["embeddings"])
    assert abs(table.mean()) < 0.05
    assert abs(table.std() - 1) < 0.05


def test_more_tokens_than_learned_positions_are_refused(normal):
    model = hk.transform(lambda x: modules.LearnedPositions(2)(x))
    with pytest.raises(ValueError, match="positions for 2 tokens, got 3"):
        model.init(jax.random.key(0), normal(B, T, D))


@pytest.mark.parametrize("kind", [int, np.int64, jnp.int32])
def test_learned_positions_start_at_the_first_and_end_with_the_table(kind, normal):
    model = hk.transform(lambda x, first: modules.LearnedPositions(5)(x, first))
    params, x = {"learned_positions": {"positions": normal(5, D)}}, normal(B, T, D)
    wanted = x + params["learned_positions"]["positions"][2:]
    assert_equal(model.apply(params, None, x, kind(2)), wanted)
    for first, message in (
        (3, "positions for 5 tokens, got 3 from first = 3"),
        (-1, "first must be an integer of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            model.apply(params, None, x, kind(first))
