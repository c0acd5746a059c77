"""Softmax loses its sharpness with the number of items."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import base

_TRAINED = 16  # most items of a training example
_SIZES = (16, 64, 256, 1024)
_LARGER = _SIZES[1:]  # that the slope is fitted to
_LARGEST, _OTHERS = 0.95, 0.9  # priorities where one item stands out
_EXAMPLES, _BATCH = 128, 32
_MEASURED = ("weight", "accuracy", "accuracy with temperature")
_KEYS = "encoder/layer_0/attention/key"
_LEARNED, _MOST_STEPS = 0.95, 8000
# The inverse temperature by the entropy of a row (nats), figure 4 of the paper.
_POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)
_LOWEST_ENTROPY = 0.5


class MaxRetrieval(base.Claim):
    """A query finds the class of the item with the largest priority, by one head.

    The model is trained on 8 to 16 items until it names 95 % of the classes. The number
    of steps is doubled until it does, up to 8,000 steps; a model that has not learned
    it by then counts as one whose weight does not fall. The trained model is then given
    16 to 1,024 items, of which one has priority 0.95 and all others 0.9. The slope of
    the log of the largest weight on the log of the number of items is fitted from 64
    items on: -1 where the weight is spread over all items, and 0 where it stays.

    The control is the same trained model with its scores multiplied by log n / log 16
    for n items, as in scalable softmax (Nakanishi 2025,
    https://arxiv.org/abs/2501.19399), which must not disperse: with 16 items nothing
    changes. The planted failure has log 16 instead of log n.

    The figure also shows the accuracy on items with uniform priorities, without and
    with the paper's adaptive temperature, which multiplies the scores of a query by a
    polynomial of the entropy of its attention. It decides nothing here, since the paper
    gives the gain only in a table that we have not seen.
    """

    sentence = "The largest weight of softmax falls with the number of items"
    source = base.Source(
        paper="Velickovic et al. 2024",
        place="lemma 2.1, figure 2",
        published=(
            "attention weights are in proportion to 1 / n for n items, for any bounded "
            "scores; focus is sharp only at the sizes of training (16 items)"
        ),
        arxiv="2410.01104",
    )
    control = "the same model, its scores times log n / log 16"
    planted = "log 16 instead of log n"
    effect = "the largest weight scales as the number of items to the power of {0}"
    would_change = (
        "A trained head whose largest weight does not fall from 64 to 1,024 items. The "
        "lemma is about the limit of many items: with larger gaps of priority the fall "
        "begins at more items."
    )
    version = 2
    before = base.Before(
        "reproduced",
        "Bounded scores disperse by theorem, and the control only had fewer items, so "
        "that nothing could fail. Now the slope is measured, and the control has "
        "scores that need not disperse. The gain by adaptive temperature, whose bound "
        "was ours, is shown but does not decide.",
    )
    criteria = (
        base.Criterion(
            "slope of log of the largest weight on log of the number of items",
            "slope",
            at_most=-0.5,
            bound_from=base.HALF,
            published={"lemma 2.1": -1.0},
        ),
    )
    curves = (
        base.Curve(
            "Weight on the item that stands out",
            "items (training: 8 to 16)",
            "attention weight",
            _SIZES,
            {"largest weight": "weight at {}"},
            logarithmic=True,
        ),
        base.Curve(
            "Class of the largest of uniform priorities",
            "items (training: 8 to 16)",
            "held-out accuracy",
            _SIZES,
            {
                "as trained": "accuracy at {}",
                "adaptive temperature": "accuracy with temperature at {}",
            },
            logarithmic=True,
            level=0.1,
            level_name="chance",
        ),
    )

    def configs(self, arm):
        config = base.config(
            "max_retrieval", 1000, report_every=1000, steps_per_dispatch=200
        ).replace(
            task=dict(max_items=_TRAINED),
            model=dict(
                embedding=dict(positions="none", max_length=16),
                feed_forward=dict(hidden_size=128),
                output=dict(pool="first"),
            ),
            optimizer=dict(learning_rate=3e-3),
        )
        return {"one head": config}

    def measure(self, desk, seed, arm):
        (config,) = self.configs(arm).values()
        trained, is_enough = desk.train_until(
            config,
            seed,
            lambda x: x.held_out["accuracy"] >= _LEARNED,
            most=_MOST_STEPS,
        )
        numbers = {}
        for size in _SIZES:
            other = desk.changed(trained, task__min_items=size, task__max_items=size)
            examples = desk.examples(other, _EXAMPLES)
            factor = np.float32(factor_of(arm, size))
            found = [
                desk.apply(
                    other,
                    _weight_and_right,
                    jax.tree.map(lambda x, i=i: x[i : i + _BATCH], examples),
                    factor,
                )
                for i in range(0, _EXAMPLES, _BATCH)
            ]
            for quantity, value in zip(
                _MEASURED, np.mean(found, axis=(0, 2)), strict=True
            ):
                numbers[f"{quantity} at {size}"] = value
        slope = slope_of(_LARGER, [numbers[f"weight at {size}"] for size in _LARGER])
        numbers["slope"] = slope if is_enough else 0.0
        numbers["accuracy after training"] = trained.held_out["accuracy"]
        return numbers


def factor_of(arm: str, size: int) -> float:
    """Returns the factor of the scores of an arm, for a number of items."""
    known = {"claim": _TRAINED, "control": size, base.PLANTED: _TRAINED}[arm]
    return math.log(known) / math.log(_TRAINED)


def slope_of(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the slope of a line fitted to log values over log sizes."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def inverse_temperature(entropy: jax.Array) -> jax.Array:
    """Returns the factor of scores, at least 1.

    Args:
      entropy: Of rows of attention, nats, any shape.
    """
    coefficients = jnp.array(_POLYNOMIAL, entropy.dtype)
    sharper = jnp.maximum(jnp.polyval(coefficients, entropy), 1.0)
    return jnp.where(entropy > _LOWEST_ENTROPY, sharper, 1.0)


def _weight_and_right(model, params, examples, factor):
    """Returns `[3, B]`: largest weight; right as trained; right with temperature.

    The weight is of inputs in which one item stands out, the rest is of uniform
    priorities. Scores are multiplied by the factor.
    """

    def one(inputs, factor):
        keys = jax.tree.map(lambda x: x * factor, params[_KEYS])
        output = model.apply(
            {**params, _KEYS: keys}, None, inputs[None], is_training=False
        )
        row = output.maps[0].tile(slice(0, 1), slice(None))[0, 0, 0]
        return row, jnp.argmax(output.logits[0])

    inputs = examples.inputs
    is_largest = jnp.argmax(inputs[:, 1:, 1], axis=1)[:, None] + 1
    is_largest = is_largest == jnp.arange(inputs.shape[1])
    priorities = jnp.where(is_largest, _LARGEST, _OTHERS).at[:, 0].set(0.0)
    standing_out = inputs.at[:, :, 1].set(priorities)
    weights, _ = jax.vmap(lambda x: one(x, factor))(standing_out)
    row, plain = jax.vmap(lambda x: one(x, factor))(inputs)
    # weights of 0 add nothing
    entropy = -jnp.sum(jnp.where(row > 0, row * jnp.log(row + 1e-30), 0.0), axis=-1)
    _, sharp = jax.vmap(one)(inputs, factor * inverse_temperature(entropy))
    right = (plain == examples.targets, sharp == examples.targets)
    return jnp.stack(
        [jnp.max(weights, axis=-1), *(x.astype(jnp.float32) for x in right)]
    )
