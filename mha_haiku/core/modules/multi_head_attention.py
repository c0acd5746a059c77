"""Multi-head attention as a Haiku module, a drop-in for `hk.MultiHeadAttention`.

Two objects of `pattern.py` define variants of attention: a `Pattern` makes scores,
weights and gates, and `HeadTransforms` change heads after their projection.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mha_haiku.core import attention, checks, masks, positions, site_primitive, tiles
from mha_haiku.core.attention import implementations, scores
from mha_haiku.core.attention.inputs import Weighting
from mha_haiku.core.modules import pattern as patterns

Initializer = hk.initializers.Initializer


class Step(NamedTuple):
    """The arguments that make a call a step; see `CachedModule.step`."""

    cache: Any
    first_query: int | Array = 0


class CachedModule(hk.Module):
    """A module whose call also returns a cache if it gets a `Step`."""

    __call__: Callable[..., Any]
    has_training: ClassVar[bool] = False  # whether a call takes `is_training`

    # Haiku puts the name of a method into the names of parameters and scopes, and so of
    # sites, unless the method is `__call__` or transparent.
    @hk.transparent
    def step(
        self, *args, cache: Any, first_query: int | Array = 0, **options
    ) -> tuple[Any, ...]:
        """Runs one step without dropout; returns the output and the next cache.

        `cache` computes attention, and keeps keys and values: an `attention.Prompt` for
        the tokens of prompts, then the returned `attention.Cache` for one new token at
        a time. A decoder layer takes a pair, for self-attention and cross-attention; a
        stack takes one per layer. Once the cache has the keys of a source, the source
        is not read. The first token is at `first_query`. Other arguments and sites are
        as in a call; masks are passed by keyword.

        Raises:
          ValueError: If `is_training` or a `dropout_rate` is given, or the token or the
            prompts are known not to fit into the cache; see `attention.Cache.attend`
            for what is traced.
        """
        for name in ("is_training", "dropout_rate"):
            if options.get(name):
                raise ValueError(
                    f"{name} must be omitted in a step, which has no dropout, got "
                    f"{options[name]!r}."
                )
        if self.has_training:
            options["is_training"] = False
        return self(*args, step=Step(cache, first_query), **options)


class MultiHeadAttention(CachedModule):
    """Multi-head attention that also returns its attention map.

    It projects queries, keys and values to heads, normalizes and rotates the first two,
    attends (`attention/reference.py` shows this in a few lines), and projects the
    heads' concatenated values to the output.

    The constructor and the parameters (`query`, `key`, `value`, `linear`) match
    `hk.MultiHeadAttention`: its checkpoints load and give the same numbers.

    Source: Vaswani et al. 2017, section 3.2.2, https://arxiv.org/abs/1706.03762.

    Example:
      >>> def f(x):
      ...     return mh.MultiHeadAttention(num_heads=4, key_size=8)(x, x, x)
      ...
      >>> f = hk.without_apply_rng(hk.transform(f))
      >>> x = jnp.ones((2, 5, 32))
      >>> output, attention_map = f.apply(f.init(jax.random.key(0), x), x)
      >>> output.shape, attention_map.shape
      ((2, 5, 32), (2, 4, 5, 5))
    """

    def __init__(
        self,
        num_heads: int,
        key_size: int,
        w_init_scale: float | None = None,
        *,
        w_init: Initializer | None = None,
        with_bias: bool = True,
        output_bias: bool | None = None,
        b_init: Initializer | None = None,
        value_size: int | None = None,
        model_size: int | None = None,
        num_key_value_heads: int | None = None,
        groups: Sequence[int] | None = None,
        transforms: patterns.HeadTransforms | None = None,
        pattern: patterns.Pattern | None = None,
        implementation: str | Callable = "auto",
        name: str | None = None,
    ):
        """Initializes the module.

        Args:
          num_heads: H.
          key_size: K.
          w_init_scale: Scale of the variance-scaling initializer. Defaults to 1.
          w_init: Initializer of all weights, instead of `w_init_scale`.
          with_bias: Whether the projections of queries, keys and values have biases.
          output_bias: Whether the output projection has a bias. Defaults to
            `with_bias`.
          b_init: Initializer of the biases. Defaults to zeros.
          value_size: V. Defaults to K.
          model_size: Width of the output. Defaults to H K.
          num_key_value_heads: G, which divides H. Defaults to H.
          groups: `[H]`, the key/value head that each query head reads, if key/value
            heads serve different numbers of heads, as after pruning; then G need not
            divide H.
          transforms: Norms, smearing and rotation of projected queries and keys.
          pattern: Makes the score, the normalizer and the gates. Defaults to scaled dot
            products, softmax and no gates.
          implementation: The implementation of `attend`.
          name: The module's name.

        Raises:
          ValueError: If a size is not positive, G does not divide H, `groups` omits a
            key/value head, or both `w_init` and `w_init_scale` are given.
        """
        super().__init__(name=name)
        if w_init is not None and w_init_scale is not None:
            raise ValueError("give w_init or w_init_scale, not both.")
        if w_init is None:
            scale = 1.0 if w_init_scale is None else w_init_scale
            w_init = hk.initializers.VarianceScaling(scale)
        self.num_heads = checks.positive_integer("num_heads", num_heads)
        self.key_size = checks.positive_integer("key_size", key_size)
        size = _size("num_key_value_heads", num_key_value_heads, num_heads)
        self.num_key_value_heads = size
        self.groups = None if groups is None else np.asarray(groups, np.int32)
        if self.groups is not None:
            of_all = set(range(self.num_key_value_heads))
            if self.groups.shape != (num_heads,) or set(self.groups) != of_all:
                raise ValueError(
                    f"groups must list, for each of the {num_heads} heads, one of the "
                    f"{len(of_all)} key/value heads, and omit none, got "
                    f"{self.groups.tolist()}."
                )
        elif num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_heads = {num_heads}, got "
                f"{num_key_value_heads}."
            )
        self.value_size = _size("value_size", value_size, key_size)
        self.model_size = _size("model_size", model_size, key_size * num_heads)
        self.w_init = w_init
        self.with_bias = with_bias
        self.output_bias = with_bias if output_bias is None else output_bias
        self.b_init = b_init
        self.transforms = transforms or patterns.HeadTransforms()
        self.pattern = pattern or patterns.Pattern()
        self.implementation = implementation

    def __call__(
        self,
        query: Float[Array, "*B T D"],
        key: Float[Array, "*B S D_of_keys"],
        value: Float[Array, "*B S D_of_values"],
        mask: masks.Mask | Array | None = None,
        *,
        bias: positions.ScoreBias | Array | None = None,
        first_query: int | Array = 0,
        dropout_rate: float = 0.0,
        step: Step | None = None,
    ) -> tuple[Array, attention.AttentionMap, *tuple[Any, ...]]:
        """Returns the output `[B..., T, D]` and the attention map `(B..., H, T, S)`.

        Its sites are "query", "key" and "value" (projected, normalized and rotated, as
        the score gets them), "gates" if there are any, "map", "weights", "heads"
        (`[B..., T, H, V]`, before the output projection) and "output".

        Positions that no query may see (padding) are set to zero before projection, so
        that NaN there reaches neither results nor gradients.

        Args:
          mask: A mask; or booleans or 0/1 integers, `[B..., T, S]` or `[B..., H, T, S]`
            (axes may have size 1). By default everything is seen.
          bias: Added to the scores; see `attend`.
          first_query: The position of the first query, for rotation, mask and bias.
          dropout_rate: Dropout rate of the weights, in [0, 1); needs an rng.
          step: Set by the method `step`; the next cache is then returned too.

        Raises:
          ValueError: If query, key, value, mask and bias do not fit each other.
        """
        mask = masks.as_mask(mask)
        if step is not None:
            return self._cached_step(query, key, value, mask, bias, step)
        first = tiles.checked_first(first_query)
        query, key, value = self._with_unseen_blanked(query, key, value, mask, first)

        # Projections, in the order in which Haiku draws their parameters.
        gates_BxTxHxV = self._gates(query)
        query_BxTxHxK = self._query_heads(query, first)
        key_BxSxGxK, value_BxSxGxV = self._key_and_value_heads(key, value)

        # Scores, softmax over S, and values averaged by these weights: the lines of
        # `attention/reference.py`. No array [B, H, T, S] is made unless it is faster.
        values_BxTxHxV, map_BxHxTxS = implementations.attend_within(
            query_BxTxHxK,
            key_BxSxGxK,
            value_BxSxGxV,
            self._weighting(mask, bias, gates_BxTxHxV, first),
            dropout_rate=dropout_rate,
            rng=hk.next_rng_key() if dropout_rate else None,
            implementation=self.implementation,
        )
        return self._output(values_BxTxHxV), map_BxHxTxS

    @hk.transparent
    def _cached_step(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: masks.Mask,
        bias: positions.ScoreBias | Array | None,
        step: Step,
    ) -> tuple[Array, attention.AttentionMap, Any]:
        """Attends by a cache, which it also returns; see `CachedModule.step`."""
        if self.transforms.smear is not None:
            raise ValueError("smeared keys need the key before, which no cache has.")
        cache, first = step.cache, tiles.checked_first(step.first_query)
        # After the first step, a cache has the keys of the source.
        has_keys = isinstance(cache, attention.Cache) and cache.is_source
        if cache.is_source and not has_keys:
            query, key, value = self._with_unseen_blanked(
                query, key, value, mask, first
            )
        gates = self._gates(query)
        query_heads = self._query_heads(query, first)
        key_heads = value_heads = None
        if not has_keys:
            key_heads, value_heads = self._key_and_value_heads(key, value, first)
        values, attention_map, cache = cache.attend(
            query_heads,
            key_heads,
            value_heads,
            self._weighting(mask, bias, gates, first),
            implementation=self.implementation,
        )
        return self._output(values), attention_map, cache

    @hk.transparent
    def _gates(self, query: Array) -> Array | None:
        """Computes gates from queries `[B..., T, D]` before their projection."""
        if self.pattern.gates is None:
            return None
        gates = self.pattern.gates(query, self.num_heads, self.value_size)
        return site_primitive.site("gates", gates)

    @hk.transparent
    def _query_heads(self, query: Array, first: int | Array) -> Array:
        """Projects `[B..., T, D]` to `[B..., T, H, K]`, normalizes and rotates."""
        query = self._heads(query, self.num_heads, self.key_size, "query")
        return site_primitive.site("query", self.transforms.of_query(query, first))

    @hk.transparent
    def _key_and_value_heads(
        self, key: Array, value: Array, first: int | Array = 0
    ) -> tuple[Array, Array]:
        """Projects to `[B..., S, G, K]` and `[B..., S, G, V]`, the first at `first`."""
        num_heads = self.num_key_value_heads
        key = self._heads(key, num_heads, self.key_size, "key")
        value = self._heads(value, num_heads, self.value_size, "value")
        key = self.transforms.of_key(key, first)
        key, value = (
            site_primitive.site("key", key),
            site_primitive.site("value", value),
        )
        if self.groups is not None:
            key, value = key[..., self.groups, :], value[..., self.groups, :]
        return key, value

    @hk.transparent
    def _weighting(
        self,
        mask: masks.Mask,
        bias: positions.ScoreBias | Array | None,
        gates: Array | None,
        first: int | Array,
    ) -> Weighting:
        """Makes the score and the normalizer, and joins all that weighs the values."""
        make_score, make_normalizer, _ = self.pattern
        score = make_score and make_score(self.num_heads, self.key_size)
        normalizer = make_normalizer and make_normalizer(self.num_heads)
        return Weighting(
            mask,
            positions.as_bias(bias),
            scores.as_score(score),
            normalizer,
            gates,
            tiles.Origin(first),
        )

    @hk.transparent
    def _output(self, values: Array) -> Array:
        """Projects the values `[B..., T, H, V]` of all heads to `[B..., T, D]`."""
        values = values.reshape(*values.shape[:-2], self.num_heads * self.value_size)
        output = self._linear(self.model_size, None, self.output_bias)(values)
        return site_primitive.site("output", output)

    @hk.transparent
    def _heads(self, x: Array, num_heads: int, size: int, name: str) -> Array:
        projected = self._linear(num_heads * size, name, self.with_bias)(x)
        return projected.reshape(*x.shape[:-1], num_heads, size)

    @hk.transparent
    def _linear(self, size: int, name: str | None, with_bias: bool) -> hk.Linear:
        return hk.Linear(size, with_bias, self.w_init, self.b_init, name)

    def _with_unseen_blanked(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: masks.Mask,
        first_query: int | Array,
    ) -> tuple[Array, Array, Array]:
        """Sets keys that no query sees, and queries that see no key, to zero."""
        if not query.ndim == key.ndim == value.ndim >= 2:
            raise ValueError(
                "query, key and value must be [B..., T, D] and [B..., S, D], got "
                f"shapes {query.shape}, {key.shape} and {value.shape}."
            )
        *batch_shape, num_queries, _ = query.shape
        num_keys = key.shape[-2]
        stop = first_query + num_queries if isinstance(first_query, int) else None
        mask.check(tuple(batch_shape), self.num_heads, stop, num_keys)
        aligned = mask.aligned(len(batch_shape))
        sizes = num_queries, num_keys, first_query
        query = _blanked(query, aligned.fully_masked(*sizes))
        unseen = aligned.unseen_keys(*sizes)
        return query, _blanked(key, unseen), _blanked(value, unseen)


def _size(name: str, value: int | None, default: int) -> int:
    return default if value is None else checks.positive_integer(name, value)


def _blanked(x: Array, blank: Array | np.ndarray | None) -> Array:
    """Zeroes `[B..., T, D]` where `[B..., H, T]` is true for all heads."""
    if blank is None:
        return x
    blank = tiles.lifted(blank, x.ndim).all(-2)[..., None]
    return jnp.where(blank, 0, x)
