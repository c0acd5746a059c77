"""Name the class of the item with the largest priority."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxRetrieval(base.UniformTask):
    """A query and items with priorities; the target is the class of the largest.

    One target for the whole example, which a model reads from the first position, the
    query. Features are [is query, priority, class as one-hot], so D = 2 + num_classes.
    The number of items, priorities (in [0, 1)) and classes are uniform. Example with 3
    of at most 4 items:

        inputs   query, 0.3 of class 7, 0.9 of class 2, 0.1 of class 7
        target   2

    Metric: accuracy. Chance: 1 / num_classes, loss log(num_classes) nats.

    Source: Velickovic et al. 2024, https://arxiv.org/abs/2410.01104.
    """

    name: ClassVar[str] = "max_retrieval"
    num_tokens: ClassVar[None] = None
    labels_whole: ClassVar[bool] = True
    model_defaults = {"embedding.max_length": 17}
    min_items: int = fields.field(8, "fewest items of an example", sampling.count(1))
    max_items: int = fields.field(16, "most items of an example", sampling.count(1))
    num_classes: int = fields.field(10, "classes of items", sampling.count(2))

    def __post_init__(self):
        super().__post_init__()
        checks.integer_in("min_items", self.min_items, 1, self.max_items)

    @property
    def sequence_length(self) -> int:
        return self.max_items + 1

    @property
    def feature_size(self) -> int:
        return 2 + self.num_classes

    def labels(self, example: base.Example) -> list[str]:
        items = np.asarray(example.inputs)[1:]
        classes = items[:, 2:].argmax(-1)
        pairs = zip(classes, items[:, 1], strict=True)
        return ["query", *(f"{c}: {priority:.3f}" for c, priority in pairs)]

    def example(self, key: jax.Array, data: Any) -> base.Example:
        random = sampling.words(key, 2 * self.max_items + 1)
        choices = self.max_items - self.min_items + 1
        count = self.min_items + sampling.integers(random[0], choices)
        classes = sampling.integers(random[1 : 1 + self.max_items], self.num_classes)
        # 24 bits are what a float32 in [0, 1) holds exactly.
        bits = random[1 + self.max_items :] >> 8
        priorities = bits.astype(jnp.float32) / 2**24
        is_item = jnp.arange(self.max_items) < count
        largest = jnp.argmax(jnp.where(is_item, priorities, -1.0))
        one_hot = jax.nn.one_hot(classes, self.num_classes)
        none = jnp.zeros((self.max_items, 1), jnp.float32)
        items = jnp.concatenate([none, priorities[:, None], one_hot], axis=1)
        query = jax.nn.one_hot(0, self.feature_size)[None]
        return base.Example(
            inputs=jnp.concatenate([query, jnp.where(is_item[:, None], items, 0.0)]),
            targets=classes[largest],
            weights=jnp.ones((), jnp.float32),
            lengths=count + 1,
        )
