"""The two extension points of attention modules: patterns, and transforms of heads.

A `Pattern` is a score, a normalizer and gates, which configs name. To add one, write
its function, name it in `SCORES`, `NORMALIZERS` or `GATES`, and add its parameters to
`anatomy.py`. From elsewhere, `register` does the latter two.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from mha_haiku.core import attention
from mha_haiku.core.fields import Section
from mha_haiku.core.modules import anatomy, norms


class Pattern(NamedTuple):
    """Functions that make the score, normalizer and gates, with learned parameters."""

    # A function from H and K to the score. Defaults to the scaled dot product.
    score: Callable[[int, int], attention.Score] | None = None
    # A function from H to a normalizer, or to None for softmax. Defaults to softmax.
    normalizer: Callable[[int], attention.Normalizer | None] | None = None
    # A function from the query's input `[B..., T, D]`, H and V to gates that multiply
    # the heads' outputs, `[B..., T, H, V]` or `[B..., T, H, 1]`. Defaults to no gates.
    gates: Callable[[Array, int, int], Array] | None = None

    @classmethod
    def of(cls, config: Section) -> "Pattern":
        """Builds the pattern that `config.model.attention` names."""
        made = []
        for field, choices in CHOICES.items():
            make, fields, _ = choices[getattr(config, field)]
            options = {name: getattr(config, name) for name in fields}
            made.append(make and functools.partial(make, **options))
        return cls(*made)


class HeadTransforms(NamedTuple):
    """Transforms of queries and keys between projection and scores, in order."""

    # Whether both are normalized by their root mean square, with learned scales
    # (Dehghani et al. 2023, https://arxiv.org/abs/2302.05442); or a function that makes
    # these norms from a `name`, such as `functools.partial(modules.RMSNorm, 1e-6)`.
    qk_norm: bool | Callable[..., Callable[[Array], Array]] = False
    # Mixes keys `[B..., S, G, K]` along S, as `modules.smeared_keys` does.
    smear: Callable[[Array], Array] | None = None
    # Rotates `[B..., T, H, K]` queries and keys by their positions `[T]`, as
    # `positions.rotary` does.
    rotary: Callable[[Array, Array], Array] | None = None

    def of_query(self, query: Array, first: int | Array) -> Array:
        """Transforms queries `[B..., T, H, K]`, the first at position `first`."""
        query = self._norm("query_norm")(query)
        if self.rotary is None:
            return query
        return self.rotary(query, first + jnp.arange(query.shape[-3]))

    def of_key(self, key: Array, first: int | Array) -> Array:
        """Transforms keys `[B..., S, G, K]`, the first at position `first`."""
        key = self._norm("key_norm")(key)
        key = key if self.smear is None else self.smear(key)
        if self.rotary is None:
            return key
        return self.rotary(key, first + jnp.arange(key.shape[-3]))

    def _norm(self, name: str) -> Callable[[Array], Array]:
        if not self.qk_norm:
            return norms.no_norm()
        make = norms.RMSNorm if self.qk_norm is True else self.qk_norm
        return make(name=name)


class Choice(NamedTuple):
    """A score, a normalizer or gates that `config.model.attention` can name."""

    # See `Pattern`; takes the fields by keyword, and creates its parameters.
    make: Callable[..., Any] | None
    fields: tuple[str, ...] = ()  # the fields of `config.model.attention` that it reads
    # For a score: whether its exponentials stay small, so that weights need not be
    # divided by their sum.
    stays_small: bool = False


def register(
    choices: dict[str, Choice],
    name: str,
    make: Callable[..., Any] | None,
    *,
    fields: tuple[str, ...] = (),
    axes: Mapping[str, anatomy.Axis] | None = None,
) -> None:
    """Registers a choice for configs, and the axes of its parameters.

    `choices` are `SCORES`, `NORMALIZERS` or `GATES`; `axes` maps its parameters to the
    axis that belongs to heads; for the others see `Choice`.
    """
    choices[name] = Choice(make, fields)
    anatomy.register(axes or {})


def _dot_product(*_: int, scale: float | None) -> attention.Score:
    return attention.dot_product(scale)


def _sigmoid(*_: int, scale: float | None, offset: float) -> attention.Score:
    return attention.sigmoid(scale, offset)


def learned_sinks(num_heads: int) -> attention.Normalizer:
    """Makes a softmax with a sink per head, whose logits "sinks" `[H]` start at 0.

    Source: OpenAI 2025 (gpt-oss), https://arxiv.org/abs/2508.10925.

    Example:
      >>> pattern = mh.modules.Pattern(normalizer=mh.modules.learned_sinks)
      >>> make = lambda x: mh.MultiHeadAttention(2, 4, pattern=pattern)(x, x, x)[0]
      >>> params = hk.transform(make).init(jax.random.key(0), jnp.ones((1, 5, 8)))
      >>> params["multi_head_attention"]["sinks"]
      Array([0., 0.], dtype=float32)
    """
    return attention.sink(hk.get_parameter("sinks", (num_heads,), init=jnp.zeros))


def _softmax(
    num_heads: int, *, sinks: float | str | None
) -> attention.Normalizer | None:
    if sinks is None:
        return None
    if sinks == "learned":
        return learned_sinks(num_heads)
    return attention.sink(float(sinks))


def head_gates(query: Array, num_heads: int, value_size: int) -> Array:
    """Computes a gate in [0, 1] per position and head: `[B..., T, H, 1]`.

    It is the sigmoid of a linear map without bias, named "head_gate", of the query's
    input `[B..., T, D]`.

    Source: Qiu et al. 2025, section 2.2 (headwise), https://arxiv.org/abs/2505.06708.
    """
    del value_size
    gates = hk.Linear(num_heads, with_bias=False, name="head_gate")(query)
    return jax.nn.sigmoid(gates)[..., None]


def smeared_keys(key: Array) -> Array:
    """Mixes each key `[B..., S, G, K]` with the one before it.

    Position s gets `a k[s] + (1 - a) k[s - 1]`, and the first is unchanged; `a` is the
    sigmoid of a parameter "smear" `[G]`, which starts at 0.

    Source: Olsson et al. 2022, argument 2, https://arxiv.org/abs/2209.11895.
    """
    logits = hk.get_parameter("smear", key.shape[-2:-1], key.dtype, init=jnp.zeros)
    share = jax.nn.sigmoid(logits).reshape(*(1,) * (key.ndim - 2), -1, 1)
    before = jnp.concatenate([key[..., :1, :, :], key[..., :-1, :, :]], axis=-3)
    return share * key + (1 - share) * before


SCORES = {
    "dot_product": Choice(_dot_product, ("scale",)),
    "sigmoid": Choice(_sigmoid, ("scale", "offset"), stays_small=True),
}
NORMALIZERS = {
    "softmax": Choice(_softmax, ("sinks",)),
    "none": Choice(lambda _: attention.unnormalized()),
}
GATES = {"none": Choice(None), "head": Choice(head_gates)}
CHOICES = {"score": SCORES, "normalizer": NORMALIZERS, "gate": GATES}  # by their field
