"""Attention rollout of a text, against products of whole matrices."""

import jax
import numpy as np
import pytest

import mha_haiku as mh
from tests import pretrained

TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return mh.load(pretrained.llama(folder, text=pretrained.text()))


@pytest.mark.slow
@pytest.mark.parametrize("query", [-1, 2])
def test_shares_are_rows_of_the_product_of_layers(llama, query):
    found = llama.rollout(TEXT, query=query, residual=0.25)
    maps = [np.asarray(x.weights())[0].mean(0) for x in llama.maps(TEXT)]
    product = np.eye(len(found.tokens))
    for i, matrix in enumerate(maps):
        product = (0.25 * np.eye(len(matrix)) + 0.75 * matrix) @ product
        np.testing.assert_allclose(found.shares[i], product[query], atol=1e-6)
    assert found.tokens == tuple(llama.maps(TEXT).tokens[0])
    assert [row["token"] for row in found.rows()] == list(found.tokens)
    assert found.plot() is not None and "rollout" in found.show().html


@pytest.mark.slow
def test_a_function_and_a_text_with_padding(llama):
    def logits_of(params, x):
        return llama.model.apply(params, None, x, is_training=False).logits

    wrapped = mh.wrap(logits_of, llama.params).replace(codec=llama.codec)
    wanted = llama.rollout(TEXT).shares
    np.testing.assert_allclose(wrapped.rollout(TEXT).shares, wanted, atol=1e-6)
    batch = mh.tasks.Example(llama.encode(TEXT)[None], None, None)
    padded = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 3))), batch)
    padded = padded._replace(lengths=np.array([batch.inputs.shape[1]]))
    np.testing.assert_allclose(llama.rollout(padded).shares, wanted, atol=1e-6)


def test_a_position_that_is_not_there_is_refused(llama):
    with pytest.raises(ValueError, match="got 99"):
        llama.rollout(TEXT, query=99)
