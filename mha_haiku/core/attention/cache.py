"""The key/value cache, with which a new query costs one row of the map.

P positions of a prompt, W slots.

`Prompt` computes attention as usual and returns a `Cache`; `Cache` takes one new query
at a time. Both have the same method, so that a module can call either in place of
`attend`. A slot is an absolute position.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mha_haiku.core import tiles
from mha_haiku.core.attention import (
    attention_map,
    implementations,
    map_sites,
    products,
)
from mha_haiku.core.attention.inputs import Weighting
from mha_haiku.core.attention.normalizers import LogSum


@tiles.pytree
class Cache:
    """The keys and values of the tokens so far, laid out for matrix products."""

    key: Array  # `[B..., G, K, W]`, zeros in slots not written yet
    value: Array  # `[B..., G, W, V]`, zeros in slots not written yet
    # Whether keys and values come from a source and are complete from the start:
    # `[B..., G, K, S]` and `[B..., G, S, V]`.
    is_source: bool = tiles.static(default=False)

    def attend(
        self,
        query: Float[Array, "*B 1 H K"],
        key: Float[Array, "*B 1 G K"] | None,
        value: Float[Array, "*B 1 G V"] | None,
        weighting: Weighting,
        *,
        implementation: str | Callable = "auto",
    ) -> tuple[Float[Array, "*B 1 H V"], attention_map.AttentionMap, "Cache"]:
        """Attends from one new query to all keys so far, including the new one.

        The new key, None with a source, is added to the cache first. Without a source
        the mask must hide positions later than the query's, as causal masks do: their
        slots may hold any finite number. `first_query` is at most one after the last
        position written, and below W; use `jax.vmap` for examples at different
        positions. While it is traced, also by `jax.vmap`, it is not checked: from W on
        the new key overwrites the last slot, so that neither the results nor the cache
        are right. `implementation` is ignored: one row of scores is always computed
        whole.

        Returns:
          Values, the map of shape `(B..., H, 1, W)` (of a source `(B..., H, 1, S)`),
          and the cache.

        Raises:
          ValueError: If there are several queries, shapes do not fit, or `first_query`
            is known to be beyond the slots.
        """
        del implementation
        if query.shape[-3] != 1:
            raise ValueError(
                f"a cache takes one query at a time, got {query.shape[-3]} queries."
            )
        num_slots, value_size = self.key.shape[-1], self.value.shape[-1]
        weighting = weighting.aligned(query, num_slots, value_size)
        position = tiles.checked_first(weighting.origin.query)
        is_known = isinstance(position, int)
        if is_known and position >= num_slots and not self.is_source:
            raise ValueError(
                f"first_query must be below {num_slots}, the size of the cache, got "
                f"{position}."
            )
        rows, slots = tiles.Span(position, 1), tiles.Span(0, num_slots)
        old_keys, old_values = self._positions_first()
        tile = weighting.scores(query, old_keys, rows, slots)
        is_own = jnp.arange(num_slots) == position
        mixed = functools.partial(products.mix, value=old_values)
        cache = self
        if self.is_source:
            attended, log_sum = _attended([(tile, mixed)])
        elif key is None or value is None:
            raise ValueError("a cache without a source needs the new key and value.")
        else:
            # The new key is not read from the cache: the cache is written after all
            # reads, so that XLA writes in place. Otherwise it copies the whole for each
            # reader.
            new_scores = weighting.scores(query, key, rows, rows)
            tile = jnp.where(is_own, -jnp.inf, tile)
            mixed_new = functools.partial(products.mix, value=value)
            attended, log_sum = _attended([(tile, mixed), (new_scores, mixed_new)])
            # Adds 0, but XLA cannot tell, so that the write waits for all reads.
            slot = position + jnp.minimum(jnp.isnan(attended).sum(), 0)
            cache = dataclasses.replace(
                self,
                key=_written(self.key, jnp.moveaxis(key, -3, -1), slot, -1),
                value=_written(self.value, jnp.moveaxis(value, -3, -2), slot, -2),
            )
        attended = attended.astype(self.value.dtype)
        attended, log_sum = weighting.finished(attended, log_sum)
        keys, values = cache._positions_first()
        row = attention_map.AttentionMap(
            query,
            keys,
            log_sum,
            weighting._replace(origin=tiles.Origin(position)),
            values,
        )
        return *map_sites.sited(attended, row), cache

    def _positions_first(self) -> tuple[Array, Array]:
        """Lays out keys and values as `[B..., W, G, K]`."""
        return jnp.moveaxis(self.key, -1, -3), jnp.moveaxis(self.value, -2, -3)


@tiles.pytree
class Prompt:
    """Attention among the tokens of prompts; also returns their cache."""

    # `[B...]`, at least 1: the lengths of the prompts; later positions are padding.
    # At most `size`; not checked while traced.
    lengths: Array
    size: int = tiles.static()  # the positions that the text may grow to
    # Whether the prompts attend to a source, see `Cache`.
    is_source: bool = tiles.static(default=False)

    def attend(
        self,
        query: Float[Array, "*B P H K"],
        key: Float[Array, "*B S G K"],
        value: Float[Array, "*B S G V"],
        weighting: Weighting,
        *,
        implementation: str | Callable = "auto",
    ) -> tuple[Array, attention_map.AttentionMap, Cache]:
        """Attends as `attention.attend`, padding masked; also returns the cache.

        Padding may be wider than the cache. Lengths are not checked while they are
        traced: a prompt that does not fit then gives a cache that is not right.

        Raises:
          ValueError: If lengths are known not to be from 1 to P, or to the size of the
            cache.
        """
        if not self.is_source:
            most = min(key.shape[-3], self.size)
            tiles.integers("lengths", self.lengths, 1, most)
        values, whole = implementations.attend_within(
            query, key, value, weighting, implementation=implementation
        )
        if self.is_source:
            key, value = jnp.moveaxis(key, -3, -1), jnp.moveaxis(value, -3, -2)
            cache = Cache(key, value, is_source=True)
        else:
            key, value = self._in_slots(key), self._in_slots(value)
            cache = Cache(jnp.swapaxes(key, -2, -1), value)
        return values, whole, cache

    def _in_slots(self, x: Array) -> Array:
        """Moves `[B..., P, H, K]` to slots `[B..., H, W, K]`, 0 beyond the prompt."""
        x, lengths = jnp.moveaxis(x, -3, -2), jnp.asarray(self.lengths)
        x = x[..., : self.size, :]
        pad = [(0, 0)] * (x.ndim - 2) + [(0, self.size - x.shape[-2]), (0, 0)]
        slots = tiles.lifted(jnp.arange(self.size), lengths.ndim + 1)
        is_written = slots < lengths[..., None]
        return jnp.where(is_written[..., None, :, None], jnp.pad(x, pad), 0)


def _attended(
    parts: list[tuple[Array, Callable[[Array], Array]]],
) -> tuple[Float[Array, "*B 1 H V"], LogSum]:
    """Merges disjoint sets of keys: their scores, and a function that mixes values."""
    largest = functools.reduce(
        jnp.maximum, [tile.max(-1, keepdims=True) for tile, _ in parts]
    )
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = [jnp.exp(tile - largest) for tile, _ in parts]
    total = functools.reduce(jnp.add, [x.sum(-1, keepdims=True) for x in weights])
    log_sum = LogSum.of(largest[..., 0], total[..., 0])
    total = jnp.moveaxis(jnp.where(total == 0, 1, total), -3, -2)
    mixed = [mix(part) for part, (_, mix) in zip(weights, parts, strict=True)]
    return sum(mixed) / total, log_sum


def _written(x: Array, new: Array, slot: int | Array, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), slot, axis)
