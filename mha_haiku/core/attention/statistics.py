"""The registry of head statistics; add new entries here."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from mha_haiku.core import display, tiles
from mha_haiku.core.attention.observation import RowSum, Statistic, Tile, weighted_sum


def gini(
    amounts: Float[Array, "*B S"], left_out: Bool[Array, "*#B #S"] | None = None
) -> Float[Array, "*B"]:
    """Computes the Gini coefficient of amounts of at least 0; 0 if all are 0.

    Source: Sen 1973, On Economic Inequality, section 2.3.
    """
    if left_out is None:
        left_out = jnp.zeros(amounts.shape, bool)
    left_out = jnp.broadcast_to(left_out, amounts.shape)
    counted = (~left_out).sum(-1)
    ordered = jnp.sort(jnp.where(left_out, 0, amounts), axis=-1)  # those come first
    rank = jnp.cumsum(jnp.ones_like(ordered), -1) - left_out.sum(-1, keepdims=True)
    total = ordered.sum(-1)
    weighted = (jnp.maximum(rank, 0) * ordered).sum(-1)
    has_some = total != 0  # true for NaN, so that it propagates
    count = jnp.maximum(counted, 1)
    unequal = 2 * weighted / (count * jnp.where(has_some, total, 1))
    unequal -= (count + 1) / count
    unequal = jnp.where((amounts < 0).any(-1), jnp.nan, jnp.maximum(unequal, 0))
    return jnp.where(has_some, unequal, 0)


def _ones(tile: Tile) -> Array:
    return jnp.ones(tile.columns.size, tile.weights.dtype)


def _inward(tile: Tile) -> Array:
    """Computes the distance of each key from the tile edge nearest to the queries."""
    at = tile.columns.array()
    return jnp.where(
        _is_left(tile), tile.columns.stop - 1 - at, at - tile.columns.start
    )


def _inward_squared(tile: Tile) -> Array:
    return _inward(tile).astype(tile.weights.dtype) ** 2


def _is_left(tile: Tile) -> Array:
    return tile.columns.stop <= tile.arrays.queries["position"][0]


def _moments(
    tile: Tile, mass: Array, first: Array, second: Array
) -> tuple[Array, Array]:
    # The sums of weight times |t - s| and (t - s)^2. In a tile off the diagonal |t - s|
    # is the distance from the query to the nearest edge plus the distance from there to
    # the key: both sums follow from products with powers of the latter, which are exact
    # in float32 where powers of positions would not be.
    at_rows, columns = tile.arrays.queries["position"], tile.columns

    def aside():
        edge = jnp.where(_is_left(tile), columns.stop - 1, columns.start)
        outward = jnp.abs(at_rows - edge).astype(mass.dtype)
        return (
            outward * mass + first,
            outward * (outward * mass + 2 * first) + second,
        )

    def on_the_diagonal():
        distance = jnp.abs(at_rows[:, None] - columns.array()[None, :])
        distance = distance.astype(mass.dtype)
        # Replacing 0 by 0 keeps XLA from fusing these sums with factors shared by all
        # heads into a form that takes five times as long on the CPU (jax 0.10).
        first, second = tile.weights * distance, tile.weights * distance**2
        first, second = (jnp.where(tile.weights == 0, 0, x) for x in (first, second))
        return first.sum(-1), second.sum(-1)

    is_aside = _is_left(tile) | (columns.start >= at_rows[-1])
    return lax.cond(is_aside, aside, on_the_diagonal)


def _at_offsets(tile: Tile) -> tuple[Array, ...]:
    """Reads weights at the previous, same and next position; 0 outside the tile."""
    at_rows = tile.arrays.queries["position"][:, None]
    places = at_rows + jnp.arange(-1, 2)[None, :] - tile.columns.start
    inside = (places >= 0) & (places < tile.columns.size)
    at = jnp.clip(places, 0, tile.columns.size - 1)
    weights = jnp.where(inside, jnp.take_along_axis(tile.weights, at, 1), 0)
    return tuple(weights[:, i] for i in range(3))


def _same_token(tile: Tile) -> Array:
    query_tokens, key_tokens = tile.arrays.queries["tokens"], tile.arrays.keys["tokens"]
    is_same = query_tokens[:, None] == key_tokens[None, :]
    return jnp.where(is_same, tile.weights, 0).sum(-1)


def _induction(tile: Tile) -> Array:
    tokens, before = tile.arrays.queries["tokens"], tile.arrays.keys["preceding"]
    at_rows, at_columns = tile.arrays.queries["position"], tile.columns.array()
    followed = (tokens[:, None] == before[None, :]) & (at_columns > 0)[None, :]
    followed &= at_columns[None, :] <= at_rows[:, None]
    return jnp.where(followed, tile.weights, 0).sum(-1)


def _root(x: Array) -> Array:
    """Takes the square root, with derivative 0 at 0; NaN of negative numbers."""
    root = jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)
    return jnp.where(x >= 0, root, jnp.nan)


ENTROPY = RowSum(lambda tile: -(tile.weights * tile.log_weights).sum(-1))
LARGEST = RowSum(lambda tile: lax.stop_gradient(tile.weights).max(-1), is_largest=True)
MOMENTS = RowSum(_moments, (_ones, _inward, _inward_squared), size=2)
AT_OFFSETS = RowSum(_at_offsets, size=3)
_NEAR = {  # the positions that `_at_offsets` reads, in its order
    "previous_token": "the previous position",
    "own_position": "the query's own position",
    "next_token": "the next position",
}

STATISTICS: dict[str, Statistic] = {
    entry.name: entry
    for entry in (
        Statistic(
            "entropy",
            "nats",
            "entropy of a query's weights",
            (ENTROPY,),
            lambda x: jnp.maximum(x, 0),  # rounding may go below
            source="Clark et al. 2019, section 3.2, https://arxiv.org/abs/1906.04341",
        ),
        Statistic(
            "perplexity",
            "keys",
            "keys attended to: exp(entropy)",
            (ENTROPY,),
            lambda x: jnp.exp(jnp.maximum(x, 0)),
        ),
        Statistic(
            "squared_weights",
            "weight²",
            "sum of squared weights",
            (RowSum(lambda tile: (tile.weights * tile.weights).sum(-1)),),
        ),
        Statistic(
            "largest_weight",
            "weight",
            "largest weight of a query",
            (LARGEST,),
            source="its mean is the head's confidence: Voita et al. 2019, section 4, "
            "https://arxiv.org/abs/1905.09418",
        ),
        Statistic(
            "max_score",
            "nats",
            "largest score of a query and a key",
            is_largest=True,
            needs="scores",
            source="Kimi Team 2025, section 2.1, https://arxiv.org/abs/2507.20534",
        ),
        Statistic(
            "distance",
            "positions",
            "mean distance from query to key",
            (MOMENTS,),
            lambda moments: moments[0],
        ),
        Statistic(
            "rms_distance",
            "positions",
            "root mean square distance from query to key",
            (MOMENTS,),
            lambda moments: moments[1],
            from_mean=_root,
        ),
        *(
            Statistic(
                name,
                "share of attention",
                f"attention on {position}",
                (AT_OFFSETS,),
                lambda at, i=i: at[i],
            )
            for i, (name, position) in enumerate(_NEAR.items())
        ),
        Statistic(
            "first_token",
            "share of attention",
            "attention on the first position",
            (weighted_sum(lambda tile: tile.arrays.keys["is_first"]),),
        ),
        *(
            Statistic(
                f"largest_at_{name.partition('_')[0]}",
                "share of queries",
                f"largest weight on {position}",
                (AT_OFFSETS, LARGEST),
                # Both come from the same numbers, after the barrier: equal to the last
                # bit.
                lambda at, largest, i=i: at[i] >= largest,
                source="a head for which it is 0.9 or more is positional: Voita et al. "
                "2019, section 5.1, https://arxiv.org/abs/1905.09418",
            )
            for i, (name, position) in enumerate(_NEAR.items())
        ),
        Statistic(
            "chosen_positions",
            "share of attention",
            "attention on the chosen positions",
            (weighted_sum(lambda tile: tile.arrays.keys["positions"]),),
            needs="positions",
        ),
        Statistic(
            "same_token",
            "share of attention",
            "attention on keys of the query's own token",
            (RowSum(_same_token),),
            needs="tokens",
        ),
        Statistic(
            "after_same_token",
            "share of attention",
            "attention on what followed the same token before",
            (RowSum(_induction),),
            needs="tokens",
            source="Olsson et al. 2022, https://arxiv.org/abs/2209.11895",
        ),
        Statistic(
            "received_gini",
            "Gini coefficient",
            "inequality of what the keys that may be seen receive",
            from_head=lambda sums: gini(sums.received, sums.unseen),
        ),
        Statistic(
            "num_queries",
            "queries",
            "queries that count",
            from_head=lambda sums: sums.counts.sum(-1),
        ),
    )
}


@tiles.pytree
class Statistics:
    """The statistics of a head: means, or largest numbers, of queries that see a key.

    Each entry of `STATISTICS`, which has its unit and meaning, is an attribute:
    `[B..., H]`, or `[B..., H, T]` with `per_query` (0 where the query is fully masked);
    None if what it needs is missing. A counted query that sees NaN makes
    its head NaN. Positions, distances and tokens refer to the inputs.


    `values` maps names to the statistics that are not None; `received`, `[B..., H, S]`,
    is the mass that each key receives from all queries; `pooled`, `[B..., H, P, Q]`, is
    the map at a coarse grain.
    """

    values: dict[str, Array]
    received: Array
    pooled: Array | None = None

    def __getattr__(self, name: str) -> Array | None:
        if name not in STATISTICS:
            raise AttributeError(f"Statistics has no {name!r}; it has {[*STATISTICS]}.")
        return self.values.get(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *STATISTICS]

    def __repr__(self) -> str:
        missing = [name for name in STATISTICS if name not in self.values]
        shape = ",".join(map(str, getattr(self.num_queries, "shape", ())))
        dtype = getattr(self.entropy, "dtype", "values")
        parts = [
            f"{len(self.values)} of {dtype}[{shape}]",
            f"received {display.value(self.received)}",
        ]
        if getattr(self.entropy, "ndim", 0) > getattr(self.num_queries, "ndim", 0):
            parts.append(f"per query {display.value(self.entropy)}")
        if self.pooled is not None:
            parts.append(f"pooled {display.value(self.pooled)}")
        if missing:
            parts.append(f"without {', '.join(missing)}")
        return f"Statistics({'; '.join(parts)})"

    _repr_html_, show, plot = display.html, display.show, display.plot
