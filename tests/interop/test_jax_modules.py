"""Modules of Flax and Equinox as subjects, next to their own results."""

import jax
import numpy as np
import pytest

import mha_haiku as mh

eqx, linen, nnx = map(pytest.importorskip, ("equinox", "flax.linen", "flax.nnx"))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # theirs

B, T, D, H, V = 2, 5, 8, 2, 11
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        layer = nnx.MultiHeadAttention(H, D, decode=False, rngs=rngs)
        self.layers, self.dropout = nnx.List([layer]), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        x = self.layers[0](self.embed(tokens))
        return self.embed.attend(self.dropout(x))


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, tokens, train=False):
        x = linen.Embed(V, D)(tokens)
        x = linen.MultiHeadDotProductAttention(H, name="layers_0")(x, x)
        return linen.Dense(V)(linen.Dropout(0.5, deterministic=not train)(x))


class OfEquinox(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list
    dropout: eqx.nn.Dropout

    def __call__(self, tokens, *, key=None):
        x = jax.vmap(self.embed)(tokens)
        x = self.dropout(self.layers[0](x, x, x), key=key)
        return x @ self.embed.weight.T


def _cases():
    of_nnx, key = OfNnx(nnx.Rngs(0)), jax.random.key(0)
    by_nnx = nnx.clone(of_nnx)
    by_nnx.eval()
    yield "nnx", of_nnx, by_nnx, "layers_0"
    bound = OfLinen().bind(OfLinen().init(key, TOKENS))
    yield "linen", bound, bound, "OfLinen/layers_0"
    embed, path = eqx.nn.Embedding(V, D, key=key), "eqx.nn.MultiheadAttention"
    layers = [eqx.nn.MultiheadAttention(H, D, key=key)]
    of_equinox = OfEquinox(embed, layers, eqx.nn.Dropout(0.5))
    same = jax.vmap(eqx.nn.inference_mode(of_equinox))
    yield "equinox", of_equinox, same, f"layers_0/{path}"
    yield "vmap", jax.vmap(of_equinox), same, f"layers_0/{path}"


CASES = {name: case for name, *case in _cases()}


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_wrapped_as_it_is_with_parameters_and_paths(name):
    module, by_hand, path = CASES[name]
    subject = mh.wrap(module)
    np.testing.assert_allclose(subject.logits(TOKENS), by_hand(TOKENS), 1e-5, 1e-6)
    assert {x.rpartition("/")[0] for x in subject.sites(TOKENS)} == {path}
    zero = lambda x: 0 * x if x.dtype == np.float32 else x  # noqa: E731
    zeros = subject.replace(params=jax.tree.map(zero, subject.params))
    np.testing.assert_array_equal(zeros.logits(TOKENS), 0)
    # In training mode, dropout follows the key.
    run = lambda i: subject.model.apply(  # noqa: E731
        subject.params, jax.random.key(i), TOKENS, is_training=True
    )
    np.testing.assert_array_equal(run(1).logits, run(1).logits)
    assert np.abs(run(1).logits - run(2).logits).max() > 1e-3


def test_a_module_that_has_no_parameters_yet_or_others_is_refused():
    with pytest.raises(ValueError, match="must be a bound OfLinen"):
        mh.wrap(OfLinen())
    with pytest.raises(ValueError, match="params must be None for a OfNnx"):
        mh.wrap(OfNnx(nnx.Rngs(0)), {})
