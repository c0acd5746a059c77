"""Predict the next token of a Markov chain, in which some tokens repeat the past."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class BigramBackcopy(base.Task):
    """A start token, then a Markov chain in which triggers repeat the symbol before.

    After any other symbol the next one is drawn by its row of a table that is the same
    in all examples. So a head that serves the triggers has nothing to do at other
    symbols. The target is the next symbol. Example, T = 8, with the triggers t0 and t1:

        inputs   start 4 2 t0 2 7 t1 7
        targets  4     2 t0 2 7 t1 7 5
        weights  0     1 1  1 1 1  1 1

    Metric: accuracy over all positions except the first, whose target is uniform.
    Chance: the accuracy of the most frequent symbol at each position. `table` is the
    best possible prediction of a symbol that follows no trigger.

    Symbols are the classes, of which 0 to num_triggers - 1 are triggers; the start
    token is one more token. Without triggers it is only a chain.

    Source: Guo et al. 2024, section 2, https://arxiv.org/abs/2410.13835.
    """

    name: ClassVar[str] = "bigram_backcopy"
    continues: ClassVar[bool] = True
    model_defaults = {"embedding.max_length": 32}
    sequence_length: int = fields.field(32, "tokens in an example", sampling.count(3))
    num_symbols: int = fields.field(
        16, "number of different symbols", fields.integer(2, 256)
    )
    num_triggers: int = fields.field(
        3,
        "trigger symbols, which repeat the symbol before them",
        fields.integer(0, 255),
    )

    def __post_init__(self):
        super().__post_init__()
        checks.integer_in("num_triggers", self.num_triggers, 0, self.num_symbols - 1)

    @property
    def num_tokens(self) -> int:
        return self.num_symbols + 1

    @property
    def num_classes(self) -> int:
        return self.num_symbols

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        # Pairs of a symbol and the one before it are also a Markov chain.
        is_trigger = np.arange(self.num_symbols) < self.num_triggers
        pairs = np.diag(~is_trigger / (~is_trigger).sum())
        accuracies, losses = [], []
        for _ in range(self.sequence_length - 1):
            drawn = pairs.sum(0)[:, None] * self.table
            pairs = np.where(is_trigger[:, None], pairs.T, drawn)
            shares = pairs.sum(0)
            accuracies.append(shares.max())
            losses.append(-(shares * np.log(np.where(shares > 0, shares, 1))).sum())
        return {"accuracy": np.mean(accuracies).item(), "loss": np.mean(losses).item()}

    @functools.cached_property
    def table(self) -> np.ndarray:
        """`[C, C]`: the probabilities of the next symbol after each other symbol.

        They are softmaxes of normal numbers times 1.5, always the same.
        """
        generator = np.random.default_rng(0)
        masses = np.exp(1.5 * generator.normal(size=[self.num_symbols] * 2))
        return masses / masses.sum(-1, keepdims=True)

    def token_label(self, token: int) -> str:
        return "start" if token == self.num_symbols else self.class_label(token)

    def class_label(self, c: int) -> str:
        return f"t{c}" if c < self.num_triggers else f"{c}"

    def example(self, key: jax.Array, data: Any) -> base.Example:
        random = sampling.words(key, self.sequence_length)
        not_triggers = self.num_symbols - self.num_triggers
        first = self.num_triggers + sampling.integers(random[0], not_triggers)
        ends = jnp.asarray(np.cumsum(self.table, -1)[:, :-1], jnp.float32)

        def step(last_two, word):
            before, last = last_two
            share = (word >> 8).astype(jnp.float32) / 2**24  # exact, and below 1
            drawn = (share >= ends[last]).sum(dtype=jnp.int32)
            new = jnp.where(last < self.num_triggers, before, drawn)
            return (last, new), new

        _, rest = jax.lax.scan(step, (first, first), random[1:])
        targets = jnp.concatenate([first[None], rest])
        start = jnp.full(1, self.num_symbols, jnp.int32)
        weights = base.all_count(targets).at[0].set(0)
        return base.Example(jnp.concatenate([start, targets[:-1]]), targets, weights)
