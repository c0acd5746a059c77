"""Walks over an attention map: head by head, rows by rows, tile by tile.

Everything that reads a whole map without storing it is made of these loops:
`over_heads` takes one head of one example at a time (on the CPU, where two-dimensional
tiles are the fastest) or several, `over_rows` a block of its queries, `over_keys` a
tile of the keys that the block may see. All tiles have the same size, so that one body
is compiled for all: the last tile of a row or column starts earlier, and ignores its
overlap with the one before.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mha_haiku.core import tiles
from mha_haiku.core.attention.factors import Start
from mha_haiku.core.attention.inputs import Weighting

_Integer = int | Array  # which may be traced

_MULTIPLE = 16  # tile sizes are multiples of it, to fill vector registers

# Rows and columns of tiles to choose from; accelerators take the first. On a CPU large
# tiles give the fastest products, and small tiles skip more of what a mask rules out.
_TILES = ((512, 1024), (512, 512))
# Scores in the tiles of heads that are taken together, about what a cache holds.
_SCORES = {"cpu": 2**19}
_SCORES_ON_ACCELERATORS = 2**25
# The overhead of a step, in scores; and the relative time of heads taken together over
# heads one by one. Measured on 2 cores (AMD EPYC): a step of 2^18 and 2^19 scores of 64
# channels takes 2.03 and 1.82 ns a score; with gradients a pair of small tiles is
# slower than one large tile at 8,192 positions and faster at 2,048.
_SCORES_OF_A_STEP = 60_000
_COST_OF_TOGETHER = 1.07


class Sizes(NamedTuple):
    """The sizes of a tile: how many scores are computed at once."""

    rows: int  # queries in a tile
    columns: int  # keys in a tile
    heads: int  # heads, of any examples, that are taken together

    def fitted(self, num_queries: int, num_keys: int) -> "Sizes":
        """Adjusts the sizes to divide a map of T x S about evenly."""
        rows = _even(num_queries, self.rows)
        columns = _even(num_keys, self.columns)
        return Sizes(rows, columns, self.heads)


def default_sizes(
    map_shape: tuple[int, ...],
    weighting: Weighting,
    platform: str,
    largest: int = 2**19,
) -> Sizes:
    """Chooses the fastest tile sizes for a map, of at most `largest` scores."""
    num_heads, shape = math.prod(map_shape[:-2]), map_shape[-2:]
    most = _SCORES.get(platform, _SCORES_ON_ACCELERATORS)

    def fitted(tile: tuple[int, int]) -> Sizes:
        rows, columns, _ = Sizes(*tile, 1).fitted(*shape)
        # `lax.map` cannot batch empty results.
        together = max(most // (rows * columns), 1) if math.prod(shape) else 1
        return Sizes(rows, columns, _divisor((num_heads,), together))

    def cost(sizes: Sizes) -> float:
        rows, columns, together = sizes
        step = rows * columns + _SCORES_OF_A_STEP / together
        step *= _COST_OF_TOGETHER if together > 1 else 1
        return step * _num_steps(shape, weighting, rows, columns)

    candidates = [fitted(tile) for tile in _TILES if math.prod(tile) <= largest]
    return min(candidates, key=cost) if platform == "cpu" else candidates[0]


def _num_steps(shape: tuple, weighting: Weighting, rows: int, columns: int) -> int:
    """Counts the tiles of a head that are visited; assumes causal if unknown."""
    (num_queries, num_keys), total, is_static = shape, 0, True
    for start in range(0, num_queries, rows):
        block = tiles.Span(min(start, num_queries - rows), rows)
        ends = 0, num_keys * block.stop // num_queries
        if is_static:
            bounds = _keys(weighting.mask.key_range, weighting.origin, block, num_keys)
            is_static = all(isinstance(end, int) for end in bounds)
            ends = bounds if is_static else ends
        first, last = ends
        total += -(-last // columns) - first // columns
    return total


def over_heads(
    function: Callable[[tuple, Array], Any],
    batch_shape: Sequence[int],
    num_heads: int,
    together: int,
) -> Any:
    """Calls `function(example, head)` for all heads, and stacks to `[B..., H, ...]`.

    At most `together` heads are computed at once.
    """
    shape = (*batch_shape, num_heads)

    def at_head(n: Array) -> Any:
        *example, head = jnp.unravel_index(n, shape)
        return function(tuple(example), head)

    together = _divisor(shape, together)
    # No axis for a single head, which would keep the CPU compiler from its best code.
    batch_size = together if together > 1 else None
    stacked = lax.map(at_head, jnp.arange(math.prod(shape)), batch_size=batch_size)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), stacked)


def summed_over_heads(
    function: Callable[[tuple, Array, tuple], Any],
    totals: tuple,
    axes: tuple[int, ...],
    batch_shape: Sequence[int],
    num_heads: int,
    together: int,
) -> tuple:
    """Calls `function(example, head, totals)` for all heads, and adds up the results.

    The function also takes the totals so far, and returns a tuple of pytrees like
    `totals`, without the axes of batch and heads. In the totals, batch axes may have
    size 1, and the axis of heads (number `axes` after B...) size 1 or G. Heads that
    share a place are summed, starting from zeros; a place of one head is overwritten.
    """
    shape = (*batch_shape, num_heads)
    if _divisor(shape, together) > 1:  # small arrays: stacking before summing is faster
        sizes = batch_shape, num_heads, together
        stacked = over_heads(lambda *at: function(at[0], at[1], totals), *sizes)
        return tuple(
            jax.tree.map(
                lambda x, y, axis=axis: placed(y, x.shape, axis, len(batch_shape)),
                *pair,
            )
            for axis, *pair in zip(axes, totals, stacked, strict=True)
        )

    def add(total: Array, part: Array, axis: int, example: list, head: Any) -> Array:
        axis += len(example)
        part = jnp.expand_dims(part, (*range(len(example)), axis))
        at = [0] * total.ndim
        for i, index in enumerate(example):
            at[i] = index * (total.shape[i] > 1)
        at[axis] = head * total.shape[axis] // num_heads
        at = tiles.starts(at)
        if total.size != part.size * math.prod(shape):  # shared by heads
            part += lax.dynamic_slice(total, at, part.shape)
        return lax.dynamic_update_slice(total, part, at)

    def step(totals: tuple, n: Array) -> tuple[tuple, None]:
        *example, head = jnp.unravel_index(n, shape)
        parts = function(tuple(example), head, totals)
        totals = tuple(
            jax.tree.map(lambda x, y, axis=axis: add(x, y, axis, example, head), *pair)
            for axis, *pair in zip(axes, totals, parts, strict=True)
        )
        return totals, None

    return lax.scan(step, totals, jnp.arange(math.prod(shape)))[0]


def placed(stacked: Array, shape: tuple, axis: int, batch_ndim: int) -> Array:
    """Sums `[B..., H, ...]` to `shape`, its heads at `axis` after B...."""
    size = shape[batch_ndim + axis]
    *batch_shape, heads = stacked.shape[: batch_ndim + 1]
    rest = stacked.shape[batch_ndim + 1 :]
    stacked = stacked.reshape(*batch_shape, size, heads // size, *rest)
    stacked = stacked.sum(batch_ndim + 1)
    shared = [i for i in range(batch_ndim) if shape[i] == 1]
    stacked = stacked.sum(shared, keepdims=True) if shared else stacked
    return jnp.moveaxis(stacked, batch_ndim, batch_ndim + axis)


def over_rows(
    body: Callable[[tiles.Span, _Integer, Any], Any], carry: Any, size: int, height: int
) -> Any:
    """Calls `body(rows, fresh_from, carry)` for each block of rows.

    A block has `height` of the `size` rows; rows before `fresh_from` are not new.
    """

    def block(i: _Integer, carry: Any) -> Any:
        start = i * height
        rows = tiles.Span(tiles.smallest(start, size - height), height)
        return body(rows, start, carry)

    return _loop(0, -(-size // height), block, carry)


def over_keys(
    body: Callable[[tiles.Span, Start, Any], Any],
    carry: Any,
    weighting: Weighting,
    rows: tiles.Span,
    num_keys: int,
    width: int,
    is_split: bool = True,
) -> Any:
    """Calls `body(columns, seen_from, carry)` for the tiles of a row.

    Tiles that no query of the block can see are skipped. `seen_from` is as for
    `Factors.scores`; `width` is the width of a tile, at most S. Unless it `is_split`
    all tiles are masked: a body that is large is compiled once.
    """
    count = -(-num_keys // width)
    mask = weighting.mask
    start, stop = _keys(mask.key_range, weighting.origin, rows, num_keys)
    open_start, open_stop = _keys(mask.open_range, weighting.origin, rows, num_keys)
    first, last = start // width, tiles.smallest(-(-stop // width), count)
    last = tiles.largest(first, last)
    open_first = tiles.smallest(tiles.largest(-(-open_start // width), first), last)
    open_last = tiles.smallest(tiles.largest(open_stop // width, open_first), last)
    num_open = open_last - open_first if is_split else 0

    def at(j: _Integer, seen_from: Start, carry: Any) -> Any:
        columns = tiles.Span(tiles.smallest(j * width, num_keys - width), width)
        return body(columns, seen_from, carry)

    # Open tiles come first, in a separate loop whose body has no mask. Tiles before and
    # after them share a second loop, which skips them (`+ num_open`), so that one body
    # is compiled for both. So the carry must not depend on the order of the keys. The
    # last tile starts earlier, and hides the keys before `j * width`.
    def masked(i: _Integer, carry: Any) -> Any:
        j = i + first
        if isinstance(j, int) and isinstance(open_first, int):
            j = j + num_open if j >= open_first else j
        else:
            j = jnp.where(j >= open_first, j + num_open, j)
        return at(j, j * width if num_keys % width else 0, carry)

    if is_split:
        carry = _loop(open_first, open_last, lambda j, x: at(j, None, x), carry)
    return _loop(0, last - first - num_open, masked, carry)


def _keys(
    range_of: Callable, origin: tiles.Origin, rows: tiles.Span, num_keys: int
) -> tuple:
    """Finds (start, stop) of keys by a method of the mask, which takes positions."""
    spans = origin.at(rows, tiles.Span(0, num_keys))
    positions = range_of(*((span.start, span.stop) for span in spans))
    return tuple(x - origin.key for x in positions)


def _divisor(shape: tuple[int, ...], most: int) -> int:
    """Finds the largest divisor of the number of heads that is at most `most`."""
    count = math.prod(shape) or 1  # a map of no heads
    return max(n for n in range(1, min(most, count) + 1) if count % n == 0)


def _even(size: int, most: int) -> int:
    """Computes the width, at most `most`, of about equal parts."""
    size = max(size, 1)  # tiles of an empty map still have a size
    parts = -(-size // min(most, size))
    width = -(-size // parts)
    return min(size, most, -(-width // _MULTIPLE) * _MULTIPLE)


def _loop(start: _Integer, stop: _Integer, body: Callable, carry: Any) -> Any:
    """`lax.fori_loop`, but unrolled where it is known to run once or never."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 1:
        return body(start, carry) if stop > start else carry
    return lax.fori_loop(start, stop, body, carry)
