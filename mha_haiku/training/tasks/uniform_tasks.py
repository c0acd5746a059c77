"""Tasks of tokens drawn evenly, each with uniform classes unless it says otherwise."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling

_LARGEST_MODULUS = 1024  # a table of a million entries
_SPLIT_SEED = 0  # the split is part of the task: every run has the same


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformTokensTask(base.UniformTask):
    """A target at each position of a sequence of independent, uniform tokens.

    All positions count. Unless a subclass says otherwise, the targets are tokens, and
    each is uniform on its own. Metric: accuracy over all positions. Chance: accuracy
    1 / num_tokens, loss log(num_tokens) nats. Examples have T = 5 and 10 tokens.
    """

    sequence_length: int = fields.field(16, "tokens in an example", sampling.count(1))
    num_tokens: int = fields.field(10, "number of different tokens", sampling.count(2))

    @abc.abstractmethod
    def targets(self, inputs: jax.Array) -> jax.Array:
        """Computes the `[T]` int32 targets of `[T]` int32 tokens."""

    def example(self, key: jax.Array, data: Any) -> base.Example:
        random = sampling.words(key, self.sequence_length)
        inputs = sampling.integers(random, self.num_tokens)
        return base.Example(inputs, self.targets(inputs), base.all_count(inputs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(UniformTokensTask):
    """The target at position t is the token at position t.

        inputs   3 1 4 1 5
        targets  3 1 4 1 5
        weights  1 1 1 1 1

    A head that solves it attends along the diagonal; even a residual connection solves
    it too.
    """

    name: ClassVar[str] = "copy"

    def targets(self, inputs: jax.Array) -> jax.Array:
        return inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reverse(UniformTokensTask):
    """The target at position t is the token at position T - 1 - t.

        inputs   3 1 4 1 5
        targets  5 1 4 1 3
        weights  1 1 1 1 1

    A head that solves it attends along the anti-diagonal.
    """

    name: ClassVar[str] = "reverse"

    def targets(self, inputs: jax.Array) -> jax.Array:
        return inputs[::-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sort(UniformTokensTask):
    """The target at position t is the t-th smallest token, counted with repeats.

        inputs   3 1 4 1 5
        targets  1 1 3 4 5
        weights  1 1 1 1 1

    Chance: the likeliest token at each position, since small tokens come first. That is
    well above 1 / num_tokens; computed exactly, from the binomial distribution of the
    number of tokens that are at most c.
    """

    name: ClassVar[str] = "sort"

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        from scipy import special  # jax needs scipy; imported late as it is slow

        t = np.arange(self.sequence_length)[:, None]
        at_most = np.arange(1, self.num_tokens)[None, :] / self.num_tokens
        # The t-th smallest is at most c when more than t tokens are.
        cumulative = special.bdtrc(t, self.sequence_length, at_most)
        probabilities = np.diff(cumulative, axis=1, prepend=0.0, append=1.0)
        probabilities = np.maximum(probabilities, 0.0)
        return {
            "accuracy": float(probabilities.max(axis=1).mean()),
            "loss": float(special.entr(probabilities).sum(axis=1).mean()),
        }

    def targets(self, inputs: jax.Array) -> jax.Array:
        return jnp.sort(inputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram(UniformTokensTask):
    """The target at position t is how often the token at t occurs in the sequence.

        inputs   3 1 4 1 5
        targets  1 2 1 2 1
        weights  1 1 1 1 1

    Chance: the likeliest count, which is 1 plus a binomial variable of T - 1 trials
    with probability 1 / num_tokens. Class c is the count c (0 never occurs).

    Source: Weiss et al. 2021, https://arxiv.org/abs/2106.06981.
    """

    name: ClassVar[str] = "histogram"

    @property
    def num_classes(self) -> int:
        return self.sequence_length + 1

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        from scipy import special

        others = np.arange(self.sequence_length)
        at_most = special.bdtr(others, self.sequence_length - 1, 1 / self.num_tokens)
        probabilities = np.maximum(np.diff(at_most, prepend=0.0), 0.0)
        loss = special.entr(probabilities).sum()
        return {"accuracy": float(probabilities.max()), "loss": float(loss)}

    def targets(self, inputs: jax.Array) -> jax.Array:
        tokens = jnp.arange(self.num_tokens, dtype=jnp.int32)
        counts = jnp.sum(inputs[:, None] == tokens[None, :], axis=0, dtype=jnp.int32)
        return counts[inputs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity(base.UniformTask):
    """The target at position t is the parity of the ones at positions 0 to t.

    There is a target per position, as in the studies of state tracking below; the last
    one is the parity of the whole sequence. Bits are independent and uniform. Example,
    T = 6:

        inputs   1 0 1 1 0 1
        targets  1 1 0 1 1 0
        weights  1 1 1 1 1 1

    Metric: accuracy over all positions. Chance: accuracy 1 / 2, loss log 2 nats;
    without any one of the bits so far the parity is uniform.

    Without positions a model cannot tell 1 from 1 1, as the share of ones is the same.
    With a start token before the bits, it can count them. That position does not count.

    Sources: Bhattamishra et al. 2020, https://arxiv.org/abs/2009.11264; Liu et al.
    2023, https://arxiv.org/abs/2210.10749.
    """

    name: ClassVar[str] = "parity"
    num_classes: ClassVar[int] = 2
    sequence_length: int = fields.field(16, "tokens of an example", sampling.count(1))
    has_start: bool = fields.field(
        False, "whether a start token takes the first bit's place"
    )

    def __post_init__(self):
        super().__post_init__()
        fewest = 1 + self.has_start
        checks.integer_in(
            "sequence_length", self.sequence_length, fewest, sampling.LARGEST
        )

    @property
    def num_tokens(self) -> int:
        return 2 + self.has_start

    def token_label(self, token: int) -> str:
        return ("0", "1", "start")[token]

    def class_label(self, c: int) -> str:
        return ("even", "odd")[c]

    def example(self, key: jax.Array, data: Any) -> base.Example:
        # The parities of uniform bits are uniform and independent themselves. So these
        # are drawn, and a bit is 1 where they change: no cumulative sum is needed.
        targets = sampling.integers(sampling.words(key, self.sequence_length), 2)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), targets[:-1]])
        inputs, weights = targets ^ before, base.all_count(targets)
        if self.has_start:
            inputs = inputs.at[1].set(targets[1]).at[0].set(2)
            targets, weights = targets.at[0].set(0), weights.at[0].set(0)
        return base.Example(inputs, targets, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Induction(base.UniformTask):
    """T / 2 different random tokens, then the same tokens in a random rotation.

    The target is the next token, as for a causal language model. Targets count only in
    the second half, and only if the target followed the current token in the first
    half. So two positions of the second half do not count: the one whose token ended
    the first half, and the last position. Example, T = 10, rotated by 2:

        inputs   3 1 4 0 5 4 0 5 3 1
        targets  1 4 0 5 4 0 5 3 1 .
        weights  0 0 0 0 0 1 1 0 1 0

    As the rotation is random, no fixed offset leads to the answer. One layer must write
    to each position the token before it, and a second layer must look there for the
    current token: an induction head. One layer can at best exclude the tokens that have
    been repeated already, with an accuracy of (log(T / 2) + 0.6) / (T / 2).

    Metric: accuracy over the positions that count. Chance: accuracy 1 / num_tokens,
    loss log(num_tokens) nats.

    Source: Olsson et al. 2022, https://arxiv.org/abs/2209.11895.
    """

    name: ClassVar[str] = "induction"
    continues: ClassVar[bool] = True
    model_defaults = {"embedding.max_length": 32}
    sequence_length: int = fields.field(
        32, "tokens in an example, an even number", sampling.count(4)
    )
    num_tokens: int = fields.field(32, "number of different tokens", sampling.count(2))

    def __post_init__(self):
        super().__post_init__()
        if self.sequence_length % 2:
            raise checks.ConfigError(
                f"sequence_length must be even, got {self.sequence_length!r}."
            )
        half = self.sequence_length // 2
        checks.integer_in("num_tokens", self.num_tokens, half, sampling.LARGEST)

    def example(self, key: jax.Array, data: Any) -> base.Example:
        half = self.sequence_length // 2
        random = sampling.words(key, self.num_tokens + 1)
        first = sampling.distinct(random[1:], half)
        source = (sampling.integers(random[0], half) + jnp.arange(half)) % half
        inputs = jnp.concatenate([first, first[source]])
        targets = jnp.concatenate([inputs[1:], jnp.zeros(1, jnp.int32)])
        known = (source != half - 1) & (jnp.arange(half) != half - 1)
        weights = jnp.concatenate([jnp.zeros(half), known]).astype(jnp.float32)
        return base.Example(inputs, targets, weights)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModularAddition(base.UniformTask):
    """The inputs are `a + b =`; the target at the last position is a + b mod p.

    The p * p sums are split into a training and a held-out part, the same for every
    seed; a + b and b + a are in the same part, so no held-out sum is seen in training.
    Tokens 0 to p - 1 are numbers, p is "+" and p + 1 is "="; the classes are numbers.
    Example, p = 7:

        inputs   3 + 6 =
        targets  . . . 2
        weights  0 0 0 1

    Metric: accuracy at the last position. Chance: accuracy 1 / p, loss log p nats;
    every result is equally frequent in the whole table.

    Source: Power et al. 2022, https://arxiv.org/abs/2201.02177.
    """

    name: ClassVar[str] = "modular_addition"
    sequence_length: ClassVar[int] = 4
    modulus: int = fields.field(
        47, "p: numbers are 0 to p - 1", fields.integer(2, _LARGEST_MODULUS)
    )
    train_fraction: float = fields.field(
        0.8,
        "share of the addition table to train on; the rest is held out",
        checks.fraction,
    )

    def __post_init__(self):
        super().__post_init__()
        train, held_out = map(len, self._split)
        fraction = self.train_fraction
        base.check_parts("train_fraction", fraction, train, held_out, "sums")

    @property
    def num_tokens(self) -> int:
        return self.modulus + 2

    @property
    def num_classes(self) -> int:
        return self.modulus

    def token_label(self, token: int) -> str:
        signs = {self.modulus: "+", self.modulus + 1: "="}
        return signs.get(token, str(token))

    def example(self, key: jax.Array, data: Any) -> base.Example:
        a, b = sampling.row(key, data)
        inputs = jnp.stack([a, jnp.int32(self.modulus), b, jnp.int32(self.modulus + 1)])
        at_end = jnp.arange(self.sequence_length) == self.sequence_length - 1
        targets = jnp.where(at_end, (a + b) % self.modulus, 0).astype(jnp.int32)
        return base.Example(inputs, targets, at_end.astype(jnp.float32))

    @functools.cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.triu_indices(self.modulus)
        order = np.random.RandomState(_SPLIT_SEED).permutation(len(low))
        num_train = round(self.train_fraction * len(low))

        def both_ways(chosen: np.ndarray) -> np.ndarray:
            pairs = np.stack([low[chosen], high[chosen]], axis=1)
            mirrored = pairs[pairs[:, 0] != pairs[:, 1], ::-1]
            return np.concatenate([pairs, mirrored]).astype(np.int32)

        return both_ways(order[:num_train]), both_ways(order[num_train:])
