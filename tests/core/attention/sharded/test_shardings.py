"""How arrays are shared is told by what their axes are, never by their sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks, positions
from mha_haiku.core.attention import Score, Weighting, dot_product
from mha_haiku.core.attention.sharded import shardings
from tests.core.attention.rated_score import Rated

N = 4  # B, T, S, H, K and buckets alike
ONE = np.ones([N], np.int32)
TWO = np.ones([N, N], np.int32)
SPECS = {
    "padding": (masks.padding(ONE, ONE), [("data",), ("data",)]),
    "segments": (masks.segments(TWO), [("data", None)] * 2),
    "one for all examples": (masks.segments(TWO[:1]), [(None, None)] * 2),
    "array": (masks.dense(np.ones([N, N, N], bool)), [("data", None, None, None)]),
    "array of heads": (
        ~masks.dense(np.ones([N, N, N, N], bool)),
        [("data", "heads", None, None)],
    ),
    "array of queries": (
        masks.dense(np.ones([1, 1, N, N], bool)),
        [(None, None, None, None)],
    ),
    "both": (
        masks.window(None, 1) & masks.padding(ONE) | masks.window(0, 0),
        [("data",)],
    ),
    "slopes": (positions.alibi(N).aligned(1), [(None, "heads")]),
    "buckets": (
        positions.relative_bias(TWO.astype(float), bidirectional=True).aligned(1),
        [(None, "heads", None)],
    ),
    "bias": (
        positions.as_bias(np.ones([N, N, N])).aligned(1),
        [("data", None, None, None)],
    ),
    "dot product": (dot_product(), []),
    "rates": (Rated(ONE.astype(float)).aligned(1), [(None, "heads")]),
}


def _specs_of(part, batch_ndim):
    """Returns how the arrays of a mask, a bias or a score are shared."""
    kinds = {"mask": masks.Mask, "bias": positions.ScoreBias, "score": Score}
    (name,) = (name for name, kind in kinds.items() if isinstance(part, kind))
    part = part.aligned(batch_ndim) if name == "mask" else part
    weighting = Weighting(**{name: part})
    return getattr(shardings.weighting_specs(weighting), name)


@pytest.mark.parametrize("name", SPECS)
def test_arrays_are_shared_by_the_meaning_of_their_axes(name):
    part, expected = SPECS[name]
    found = jax.tree.leaves(
        _specs_of(part, 1), is_leaf=lambda x: isinstance(x, shardings.Spec)
    )
    assert found == [shardings.Spec(*axes) for axes in expected]


def test_without_batch_axes_nothing_is_shared_by_examples():
    spec = _specs_of(masks.segments(ONE), 0)
    assert (spec.query_ids, spec.key_ids) == (
        shardings.Spec(None),
        shardings.Spec(None),
    )


def test_a_mask_that_does_not_say_its_axes_is_refused():
    class Silent(masks.Mask):
        def aligned_tile(self, rows, columns):
            return jnp.ones((len(rows), len(columns)), bool)

    with pytest.raises(TypeError, match="Silent must define axes"):
        _specs_of(Silent(), 1)
