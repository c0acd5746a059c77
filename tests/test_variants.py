"""Pure functions give the oracle's numbers wherever and however they run.

With jit and without, on a device and from the host, and on four devices at once.

B batch, T queries, S keys, H query heads, G key heads, K query/key and V value size.
"""

import chex
import jax.numpy as jnp
import numpy as np

import mha_haiku as mh
from tests import oracles

B, T, S, H, G, K, V = 2, 3, 5, 4, 2, 6, 7
LENGTHS = np.asarray([5, 3], np.int32)
ALLOWED = (np.arange(S) < LENGTHS[:, None])[:, None, None] & np.tri(T, S, 1, dtype=bool)


def _normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _attended(query, key, value, lengths):
    mask = mh.masks.padding(lengths) & mh.masks.window(None, 1)
    return mh.attend(query, key, value, mask=mask)


INPUTS = _normal(B, T, H, K), _normal(B, S, G, K), _normal(B, S, G, V), LENGTHS


class VariantsTest(chex.TestCase):
    """Each test runs once per variant."""

    @chex.all_variants
    def test_values_and_weights_of_attention(self):
        def attended(*inputs):
            values, attention_map = _attended(*inputs)
            return values, attention_map.logsumexp, attention_map.weights()

        found = self.variant(attended)(*INPUTS)
        expected = oracles.attention(*INPUTS[:3], allowed=ALLOWED)
        chex.assert_shape(found, [(B, T, H, V), (B, H, T), (B, H, T, S)])
        chex.assert_trees_all_close(found, tuple(expected), rtol=1e-5, atol=1e-6)

    @chex.variants(with_jit=True, with_pmap=True)
    def test_statistics_of_a_map(self):
        def statistics(*inputs):
            found = _attended(*inputs)[1].statistics()
            return {"entropy": found.entropy, "distance": found.distance}

        found = self.variant(statistics)(*INPUTS)
        weights = oracles.attention(*INPUTS[:3], allowed=ALLOWED).weights
        expected = oracles.map_statistics(weights, query_offset=0)
        chex.assert_tree_shape_prefix(found, (B, H))
        for name, numbers in found.items():
            np.testing.assert_allclose(numbers, expected[name], 1e-5, 1e-6)

    @chex.all_variants
    def test_mask_as_an_array(self):
        def array(lengths):
            mask = mh.masks.padding(lengths) & mh.masks.window(None, 1)
            return mask.array(T, S)

        found = self.variant(array)(LENGTHS)
        np.testing.assert_array_equal(np.squeeze(found), np.squeeze(ALLOWED))

    @chex.all_variants
    def test_rotary_keeps_products_of_a_distance(self):
        def product(query, key, positions):
            turned = (mh.positions.rotary(x, positions) for x in (query, key))
            left, right = turned
            return jnp.einsum("thk,thk->th", left, right)

        query, key = _normal(T, H, K), _normal(T, H, K)
        found = self.variant(product)(query, key, np.asarray([4, 0, 9], np.int32))
        # Query and key stand at the same position, so that nothing is turned in all.
        np.testing.assert_allclose(found, (query * key).sum(-1), rtol=1e-4, atol=1e-5)
