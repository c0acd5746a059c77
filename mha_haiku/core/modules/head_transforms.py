"""Transforms of queries and keys after projection: norms, smearing, rotation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from mha_haiku.core import checks, positions
from mha_haiku.core.modules import norms


class HeadTransforms(NamedTuple):
    """Transforms of queries and keys between projection and scores, in order.

    Example:
      >>> transforms = mh.modules.HeadTransforms(rotary=mh.positions.rotary)
      >>> make = lambda x: mh.MultiHeadAttention(2, 4, transforms=transforms)(x, x, x)
      >>> f = hk.without_apply_rng(hk.transform(make))
      >>> x = jnp.ones((1, 5, 8))
      >>> f.apply(f.init(jax.random.key(0), x), x)[0].shape
      (1, 5, 8)
    """

    # Whether both are normalized by their root mean square, with learned scales
    # (Dehghani et al. 2023, https://arxiv.org/abs/2302.05442); or a function that makes
    # these norms from a `name`, such as `functools.partial(modules.RMSNorm, 1e-6)`.
    qk_norm: bool | Callable[..., Callable[[Array], Array]] = False
    # Mixes keys `[B..., S, G, K]` along S, as `modules.smeared_keys` does.
    smear: Callable[[Array], Array] | None = None
    # Rotates `[B..., T, H, K]` queries and keys by their positions `[T]`, as
    # `positions.rotary` does.
    rotary: Callable[[Array, Array], Array] | None = None

    def checked(self) -> "HeadTransforms":
        """Checks the fields and returns itself; raises TypeError for an invalid one."""
        checks.maker("transforms.smear", self.smear, smeared_keys)
        checks.maker("transforms.rotary", self.rotary, positions.rotary)
        return self

    def of_query(self, query: Array, first: int | Array) -> Array:
        """Transforms queries `[B..., T, H, K]`, the first at position `first`."""
        query = self._norm("query_norm")(query)
        if self.rotary is None:
            return query
        return self.rotary(query, first + jnp.arange(query.shape[-3]))

    def of_key(self, key: Array, first: int | Array, cache: Any) -> tuple[Array, Any]:
        """Transforms keys `[B..., S, G, K]`; also returns the cache, if any."""
        key = self._norm("key_norm")(key)
        if self.smear is not None:
            if cache is None:
                key = self.smear(key)
            else:
                key, cache = cache.mixed(key, self.smear)
        if self.rotary is not None:
            key = self.rotary(key, first + jnp.arange(key.shape[-3]))
        return key, cache

    def _norm(self, name) -> Callable[[Array], Array]:
        if not self.qk_norm:
            return norms.no_norm()
        make = norms.RMSNorm if self.qk_norm is True else self.qk_norm
        return make(name=name)


def smeared_keys(key: Array) -> Array:
    """Mixes each key `[B..., S, G, K]` with the one before it.

    Position s gets `a k[s] + (1 - a) k[s - 1]`, and the first is unchanged; `a` is the
    sigmoid of a parameter "smear" `[G]`, which starts at 0.

    Source: Olsson et al. 2022, argument 2, https://arxiv.org/abs/2209.11895.

    Example:
      >>> x = jnp.ones((1, 5, 2, 4))
      >>> f = hk.without_apply_rng(hk.transform(lambda x: mh.modules.smeared_keys(x)))
      >>> params = f.init(jax.random.key(0), x)
      >>> f.apply(params, x).shape
      (1, 5, 2, 4)
    """
    logits = hk.get_parameter("smear", key.shape[-2:-1], key.dtype, init=jnp.zeros)
    share = jax.nn.sigmoid(logits).reshape(*(1,) * (key.ndim - 2), -1, 1)
    before = jnp.concatenate([key[..., :1, :, :], key[..., :-1, :, :]], axis=-3)
    return share * key + (1 - share) * before
