"""Random integers from raw random words, at the cost of one draw per example.

`jax.random.randint` splits its key and draws twice, and `jax.random.choice` without
replacement sorts several times, which costs much in a training step of a few
milliseconds. A task draws all the words it needs at once and passes them to these
functions. This module also decides which examples are held out.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import fields

# Vocabularies, lengths and moduli stay below this, so that the remainder of a 32-bit
# word is uniform to one part in 4,096.
LARGEST = 2**20

# Up to this many comparisons, ranks take less time than a sort on the CPU.
_FEW_COMPARISONS = 2**12


def count(fewest: int) -> fields.Check:
    """Makes the check of a vocabulary, length or modulus, at least `fewest`."""
    return fields.integer(fewest, LARGEST)


def words(key: jax.Array, *shape: int) -> jax.Array:
    """Draws uniform uint32 words of a shape."""
    return jax.random.bits(key, shape, jnp.uint32)


def integers(random: jax.Array, count: int | jax.Array) -> jax.Array:
    """Maps `random` words to int32 integers, uniform in [0, count)."""
    return (random % jnp.asarray(count, jnp.uint32)).astype(jnp.int32)


def row(key: jax.Array, data: Any) -> Any:
    """Draws the same row of all arrays `[N, ...]` in a tree, on the host or not."""
    index = integers(words(key), len(jax.tree.leaves(data)[0]))
    return jax.tree.map(lambda x: jnp.asarray(x)[index], data)


def distinct(
    random: jax.Array, num_drawn: int, count: int | jax.Array | None = None
) -> jax.Array:
    """Draws integers without replacement, in random order.

    From `[N]` uint32 words `[num_drawn]` int32, no two alike, from 0 to count - 1;
    `count` is at most N, the default. Every ordered choice is equally likely.
    """
    (size,) = random.shape
    index_bits = np.uint32((size - 1).bit_length())
    index = jnp.arange(size, dtype=jnp.uint32)
    # The low bits of a word are replaced by its index, so that no two are equal; the
    # order of the words is then a random permutation. A word outside of `count` sorts
    # last. The integers drawn are the ranks of the first words, or the indices of the
    # smallest.
    tickets = (random >> index_bits << index_bits) | index
    if count is not None:
        is_drawn_from = index < jnp.asarray(count, jnp.uint32)
        tickets = jnp.where(is_drawn_from, tickets, np.uint32(2**32 - 1))
    if num_drawn * size <= _FEW_COMPARISONS:
        lower = tickets[None, :] < tickets[:num_drawn, None]
        return jnp.sum(lower, axis=-1, dtype=jnp.int32)
    position = np.uint32((1 << int(index_bits)) - 1)
    return (jnp.sort(tickets)[:num_drawn] & position).astype(jnp.int32)


def is_held_out(what: str, fraction: float) -> bool:
    """Checks whether a text is in a held-out part of this share, in [0, 1).

    Its hash decides, so texts stay in their part if data is added.
    """
    return place(what.encode(errors="surrogatepass")) < fraction


def place(what: bytes) -> float:
    """Hashes bytes to a number in [0, 1): uniform, the same for equal bytes."""
    digest = hashlib.sha256(what).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # what a float can hold
