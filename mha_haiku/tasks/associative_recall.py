"""Look up values by their keys, among pairs given before."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mha_haiku import checks, fields
from mha_haiku.tasks import base as task_lib
from mha_haiku.tasks import sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssociativeRecall(task_lib.Task):
    """First key-value pairs with keys that are all different, then keys alone.

    The target of a query is the value that stood behind its key. Keys and values of the
    pairs, and which of the keys are asked for, are uniform; a key may be asked for more
    than once. Example, T = 8 with 3 pairs:

        inputs   k4 v1 k0 v5 k7 v1 k0 k7
        targets  . . . . . . v5 v1
        weights  0 0 0 0 0 0 1 1

    Metric: accuracy over the queries. Chance: a guess among all values, one in
    `num_values` and its logarithm in nats. A model that sees which values were given,
    but not to which key, gets to about one in `num_pairs`: that is no recall yet.

    Attributes:
      sequence_length: T; all that the pairs leave are queries, T - 2 num_pairs.
      num_pairs: Number of pairs.
      num_keys: Tokens 0 to num_keys - 1 are keys, at least as many as pairs.
      num_values: The tokens after them are values; class c is the value c.

    Source: Arora et al. 2023, https://arxiv.org/abs/2312.04927.
    """

    name: ClassVar[str] = "associative_recall"
    sequence_length: int = fields.option(
        16, "tokens in an example", fields.integer(3, sampling.LARGEST)
    )
    num_pairs: int = fields.option(
        6, "the rest of the tokens are queries", fields.integer(1, sampling.LARGEST)
    )
    num_keys: int = fields.option(
        16, "tokens that can be keys", fields.integer(1, sampling.LARGEST)
    )
    num_values: int = fields.option(
        16, "tokens that can be values", fields.integer(2, sampling.LARGEST)
    )

    def __post_init__(self):
        super().__post_init__()
        most = (self.sequence_length - 1) // 2
        checks.integer_in("num_pairs", self.num_pairs, 1, most)
        checks.integer_in("num_keys", self.num_keys, self.num_pairs, sampling.LARGEST)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, keys and values."""
        return self.num_keys + self.num_values

    @property
    def num_classes(self) -> int:
        """Number of classes, one per value."""
        return self.num_values

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """Chance level: values are uniform."""
        return {"accuracy": 1 / self.num_values, "loss": math.log(self.num_values)}

    def token_label(self, token: int) -> str:
        """Returns "k0", "k1", ... for keys and "v0", "v1", ... for values."""
        if token < self.num_keys:
            return f"k{token}"
        return self.class_label(token - self.num_keys)

    def class_label(self, c: int) -> str:
        """Returns "v0", "v1", ..."""
        return f"v{c}"

    def example(self, key: jax.Array, data: Any) -> task_lib.Example:
        """Returns one example; `data` is unused."""
        del data
        num_queries = self.sequence_length - 2 * self.num_pairs
        random = sampling.words(key, self.num_keys + self.num_pairs + num_queries)
        for_keys, for_values, for_queries = jnp.split(
            random, [self.num_keys, self.num_keys + self.num_pairs]
        )
        keys = sampling.distinct(for_keys, self.num_pairs)
        values = sampling.integers(for_values, self.num_values)
        asked = sampling.integers(for_queries, self.num_pairs)
        pairs = jnp.stack([keys, values + self.num_keys], axis=1).reshape(-1)
        unasked = jnp.zeros_like(pairs)
        return task_lib.Example(
            inputs=jnp.concatenate([pairs, keys[asked]]),
            targets=jnp.concatenate([unasked, values[asked]]),
            weights=jnp.concatenate(
                [unasked.astype(jnp.float32), task_lib.all_count(asked)]
            ),
        )
