"""Attention with its map ignored or used, compared with the plain formula.

All hold the whole matrix of scores, as the compiler cannot count the work of tiles.
"""

import jax
import jax.numpy as jnp

import mha_haiku as mh
from mha_haiku.core.attention import dense
from mha_haiku.core.attention.inputs import Inputs
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(
    case: str, size: int, use: str, num_queries: int | None = None
) -> worker.Program:
    """Prepares calls of attention.

    Args:
      use: "formula" as in a textbook; "mapless" for the package's arithmetic without a
        map; or the use of the map: "ignored", "returned" in factored form, or "weights"
        for all its numbers.
      num_queries: T, of cross-attention. Defaults to the number of keys.
    """
    attention = sizes.ATTENTION
    arrays = tuple(
        jax_programs.normal(
            seed, (attention.batch, length, attention.heads, attention.head_width)
        )
        for seed, length in (
            (2, num_queries or attention.length),
            (3, attention.length),
            (4, attention.length),
        )
    )
    function = _USES[use]
    return jax_programs.calls_of(function, arrays, case=case, calls=size)


def _formula(query, key, value):
    scores = jnp.einsum("bthk,bshk->bhts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), value)


def _mapless(query, key, value):
    score = mh.attention.dot_product().aligned(1)
    inputs = Inputs(query, key, value, mh.attention.Weighting(score=score))
    return dense.attend(inputs, 0.0)[0]


def _ignored(query, key, value):
    return mh.attend(query, key, value, implementation="dense")[0]


def _returned(query, key, value):
    return mh.attend(query, key, value, implementation="dense")


def _weights(query, key, value):
    values, attention_map = mh.attend(query, key, value, implementation="dense")
    return values, attention_map.weights()


_USES = {
    "formula": _formula,
    "mapless": _mapless,
    "ignored": _ignored,
    "returned": _returned,
    "weights": _weights,
}
