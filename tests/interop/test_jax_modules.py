"""Modules of Flax and Equinox as subjects, next to their own results."""

import jax
import numpy as np
import pytest

import mha_haiku as mh

WHY = "needs flax and equinox"
eqx = pytest.importorskip("equinox", reason=WHY)
linen = pytest.importorskip("flax.linen", reason=WHY)
nnx = pytest.importorskip("flax.nnx", reason=WHY)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # theirs

B, T, D, H, V = 2, 5, 8, 2, 11
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        attention = dict(decode=False, rngs=rngs)
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.layers = nnx.List([nnx.MultiHeadAttention(H, D, **attention)] * 1)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.dropout(layer(x))
        return self.embed.attend(x)


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


def _of_equinox():
    keys = jax.random.split(jax.random.key(0))
    embed = eqx.nn.Embedding(V, D, key=keys[0])
    layers = [eqx.nn.MultiheadAttention(H, D, key=keys[1])]
    module = OfEquinox(embed, layers, eqx.nn.Dropout(0.5))
    return module, jax.vmap(eqx.nn.inference_mode(module))


def _cases():
    of_nnx, of_linen, (of_equinox, by_equinox) = (
        OfNnx(nnx.Rngs(0)),
        OfLinen(),
        _of_equinox(),
    )
    variables = of_linen.init(jax.random.key(0), TOKENS)
    by_nnx = nnx.clone(of_nnx)
    by_nnx.eval()
    bound = of_linen.bind(variables)
    yield "nnx", (of_nnx,), by_nnx, "layers_0"
    yield "linen", (bound,), bound, "OfLinen/layers_0"
    path = "layers_0/eqx.nn.MultiheadAttention"
    yield "equinox", (of_equinox,), by_equinox, path
    yield "vmap", (jax.vmap(of_equinox),), by_equinox, path


CASES = {name: case for name, *case in _cases()}


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_wrapped_as_it_is_with_parameters_and_paths(name):
    arguments, by_hand, path = CASES[name]
    subject = mh.wrap(*arguments)
    np.testing.assert_allclose(subject.logits(TOKENS), by_hand(TOKENS), 1e-5, 1e-6)
    assert {x.rpartition("/")[0] for x in subject.sites(TOKENS)} == {path}
    count = sum(x.size for x in jax.tree.leaves(subject.params))
    assert count > V * D and subject.name.startswith("Of")
    zeros = jax.tree.map(
        lambda x: 0 * x if x.dtype == np.float32 else x, subject.params
    )
    zeros = subject.replace(params=zeros)
    np.testing.assert_array_equal(zeros.logits(TOKENS), 0)
    # In training mode, dropout follows the key.
    keys = map(jax.random.key, (1, 1, 2))
    runs = (
        subject.model.apply(subject.params, x, TOKENS, is_training=True) for x in keys
    )
    one, again, other = (x.logits for x in runs)
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3


def test_a_module_that_has_no_parameters_yet_or_others_is_refused():
    with pytest.raises(ValueError, match="must be a bound OfLinen"):
        mh.wrap(OfLinen())
    with pytest.raises(ValueError, match="params must be None for a OfEquinox"):
        mh.wrap(_of_equinox()[0], {})
