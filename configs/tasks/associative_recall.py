"""Recall the values of keys."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssociativeRecall(base.UniformTask):
    """Key-value pairs with distinct keys, then queries, which are keys only.

    The target of a query is the value that followed its key. Keys, values and queries
    are uniform; a key may be queried more than once. Example, T = 8 with 3 pairs:

        inputs   k4 v1 k0 v5 k7 v1 k0 k7
        targets  . . . . . . v5 v1
        weights  0 0 0 0 0 0 1 1

    Metric: accuracy over the queries. Chance: a uniform guess among all
    values, accuracy 1 / num_values and loss log(num_values) nats. A model that knows
    which values occurred, but not with which key, reaches about 1 / num_pairs.

    Tokens 0 to num_keys - 1 are keys, at least as many as pairs; the tokens after them
    are values, and class c is the value c.

    Source: Arora et al. 2023, https://arxiv.org/abs/2312.04927.
    """

    name: ClassVar[str] = "associative_recall"
    sequence_length: int = fields.field(16, "tokens in an example", sampling.count(3))
    num_pairs: int = fields.field(
        6, "key-value pairs; the remaining tokens are queries", sampling.count(1)
    )
    num_keys: int = fields.field(16, "tokens that can be keys", sampling.count(1))
    num_values: int = fields.field(16, "tokens that can be values", sampling.count(2))

    def __post_init__(self):
        super().__post_init__()
        most = (self.sequence_length - 1) // 2
        checks.integer_in("num_pairs", self.num_pairs, 1, most)
        checks.integer_in("num_keys", self.num_keys, self.num_pairs, sampling.LARGEST)

    @property
    def num_tokens(self) -> int:
        return self.num_keys + self.num_values

    @property
    def num_classes(self) -> int:
        return self.num_values

    def token_label(self, token: int) -> str:
        if token < self.num_keys:
            return f"k{token}"
        return self.class_label(token - self.num_keys)

    def class_label(self, c: int) -> str:
        return f"v{c}"

    def example(self, key: jax.Array, data: Any) -> base.Example:
        num_queries = self.sequence_length - 2 * self.num_pairs
        random = sampling.words(key, self.num_keys + self.num_pairs + num_queries)
        for_keys, for_values, for_queries = jnp.split(
            random, [self.num_keys, self.num_keys + self.num_pairs]
        )
        keys = sampling.distinct(for_keys, self.num_pairs)
        values = sampling.integers(for_values, self.num_values)
        queried = sampling.integers(for_queries, self.num_pairs)
        pairs = jnp.stack([keys, values + self.num_keys], axis=1).reshape(-1)
        unasked = jnp.zeros_like(pairs)
        weights = [unasked.astype(jnp.float32), base.all_count(queried)]
        return base.Example(
            inputs=jnp.concatenate([pairs, keys[queried]]),
            targets=jnp.concatenate([unasked, values[queried]]),
            weights=jnp.concatenate(weights),
        )
