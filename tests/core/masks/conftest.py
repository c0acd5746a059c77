"""Random masks, each with a plain statement of what it allows.

`B...` batch axes, T query positions, S key positions, H query heads.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from mha_haiku import masks
from mha_haiku.core.masks import relative

# (batch shape, H, T, S); few, as each new shape compiles anew.
SIZES = [((2,), 3, 4, 5), ((), 2, 4, 5)]


class Described(NamedTuple):
    """A mask and what it should be: booleans `[B..., H, T, S]`."""

    mask: masks.Mask
    expected: np.ndarray

    @property
    def batch_ndim(self) -> int:
        """The number of batch axes."""
        return self.expected.ndim - 3

    @property
    def num_queries(self) -> int:
        """T."""
        return self.expected.shape[-2]

    @property
    def num_keys(self) -> int:
        """S."""
        return self.expected.shape[-1]


def described(sizes: tuple, mask: masks.Mask, allows: Callable) -> Described:
    """Returns the mask with the array of `allows(b, h, t, s)`, pair by pair."""
    batch_shape, num_heads, num_queries, num_keys = sizes
    expected = np.zeros((*batch_shape, num_heads, num_queries, num_keys), bool)
    for index in itertools.product(*map(range, expected.shape)):
        *b, h, t, s = index
        expected[index] = allows(tuple(b), h, t, s)
    return Described(mask, expected)


@st.composite
def relative_masks(draw, num_keys):
    """Returns a mask of only positions and its statement `(b, h, t, s)`."""
    kind = draw(st.sampled_from(["full", "causal", "window", "function"]))
    if kind == "full":
        return masks.full(), lambda b, h, t, s: True
    if kind == "causal":
        offset = draw(st.integers(-3, 3))
        mask = relative.Band(None, offset)
        return mask, lambda b, h, t, s: s <= t + offset
    if kind == "window":
        left, right = draw(st.tuples(*[st.none() | st.integers(0, 2)] * 2))
        offset = draw(st.integers(-2, 2))
        low = -100 if left is None else -left
        high = 100 if right is None else right
        mask = masks.full()
        if left is not None or right is not None:
            mask = relative.Band(
                None if left is None else left - offset,
                None if right is None else right + offset,
            )
        return mask, lambda b, h, t, s: low <= s - (t + offset) <= high
    rate = draw(st.integers(1, 3))

    def is_multiple(t, s):
        return (s - t) % rate == 0

    return masks.where(is_multiple), lambda b, h, t, s: is_multiple(t, s)


@st.composite
def array_masks(draw, batch_shape, num_heads, num_rows, num_keys):
    """Returns a mask that holds arrays and its statement `(b, h, t, s)`."""
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    to_array = draw(st.sampled_from([np.asarray, jnp.asarray]))
    kind = draw(
        st.sampled_from(
            ["padding", "query padding", "segments", "dense", "dense heads"]
        )
    )
    lengths = np.asarray(rng.integers(0, num_keys + 1, batch_shape))
    if kind == "padding":
        mask = masks.padding(to_array(lengths))
        return mask, lambda b, h, t, s: s < lengths[b]
    if kind == "query padding":
        query_lengths = np.asarray(rng.integers(0, num_rows + 1, batch_shape))
        mask = masks.padding(to_array(lengths), to_array(query_lengths))
        return mask, lambda b, h, t, s: s < lengths[b] and t < query_lengths[b]
    if kind == "segments":
        query_ids = rng.integers(-1, 2, (*batch_shape, num_rows))
        key_ids = rng.integers(-1, 2, (*batch_shape, num_keys))
        mask = masks.segments(to_array(query_ids), to_array(key_ids))
        return mask, lambda b, h, t, s: query_ids[*b, t] == key_ids[*b, s]
    heads = (num_heads,) if kind == "dense heads" else ()
    shape = [*batch_shape, *heads, num_rows, num_keys]
    for axis in range(len(shape)):
        shape[axis] = 1 if rng.random() < 0.2 else shape[axis]
    array = rng.random(shape) < 0.5
    spread = np.broadcast_to(array, (*batch_shape, *heads, num_rows, num_keys))
    mask = masks.dense(to_array(array))
    if heads:
        return mask, lambda b, h, t, s: spread[*b, h, t, s]
    return mask, lambda b, h, t, s: spread[*b, t, s]


@st.composite
def compositions(draw, depth, *sizes):
    """Returns a mask of up to 2^depth parts and its statement `(b, h, t, s)`."""
    kinds = ["leaf", "&", "|", "~"] if depth else ["leaf"]
    kind = draw(st.sampled_from(kinds))
    if kind == "leaf":
        return draw(relative_masks(sizes[-1]) | array_masks(*sizes))
    left, left_allows = draw(compositions(depth - 1, *sizes))
    if kind == "~":
        return ~left, lambda *index: not left_allows(*index)
    right, right_allows = draw(compositions(depth - 1, *sizes))
    if kind == "&":
        return left & right, lambda *i: left_allows(*i) and right_allows(*i)
    return left | right, lambda *i: left_allows(*i) or right_allows(*i)


@st.composite
def described_compositions(draw):
    """Returns a `Described` composition."""
    sizes = draw(st.sampled_from(SIZES))
    return described(sizes, *draw(compositions(2, *sizes)))


@pytest.fixture(scope="session")
def random_masks():
    """Returns the hypothesis strategy of masks with their statements."""
    return described_compositions()


@pytest.fixture(scope="session")
def describe():
    """Returns `describe(sizes, mask, allows)`, which states a mask pair by pair."""
    return described
