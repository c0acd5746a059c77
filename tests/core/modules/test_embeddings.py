"""Embeddings of tokens and positions, and their gradients."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import modules, positions

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


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_positions_learn_from_the_distances_that_occur(
    bidirectional, normal, random_parameters
):
    x, cotangent = normal(B, T, D), normal(B, T, H * 4)

    def forward(x):
        bias = modules.RelativePositions(
            H, bidirectional=bidirectional, num_buckets=8, name="relative"
        )()
        return modules.MultiHeadAttention(H, 4, name="mha")(x, x, x, bias=bias)[0]

    model = hk.transform(forward)
    params = random_parameters(model, x)
    assert params["relative"]["table"].shape == (8, H)

    @jax.jit
    @jax.grad
    def gradient(params):
        return (model.apply(params, None, x) * cotangent).sum()

    found = np.asarray(gradient(params)["relative"]["table"])
    # Distances are -2..2. Later keys share bucket 0, or have a half of their own whose
    # second bucket is for a distance of 1.
    occurring = {0, 1, 2, 5, 6} if bidirectional else {0, 1, 2}
    assert set(np.flatnonzero(np.abs(found).max(axis=1))) == occurring
    # A softmax does not feel a number that is added to all of a row.
    np.testing.assert_allclose(found.sum(axis=0), 0, atol=1e-5)


@pytest.mark.slow
def test_relative_positions_are_the_relative_bias_of_their_table(random_parameters):
    def forward():
        bias = modules.RelativePositions(
            H, bidirectional=True, num_buckets=8, max_distance=6, name="relative"
        )()
        return bias.aligned(0).aligned_tile(jnp.arange(T), jnp.arange(12))

    model = hk.transform(forward)
    params = random_parameters(model)
    bias = positions.relative_bias(
        params["relative"]["table"], bidirectional=True, max_distance=6
    )
    found = model.apply(params, None)
    assert found.shape == (H, T, 12)
    assert_equal(found, bias.aligned(0).aligned_tile(jnp.arange(T), jnp.arange(12)))
