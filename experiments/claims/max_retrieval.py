"""Softmax loses its sharpness with the number of items; temperature helps."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import base

_TRAINED = 16  # most items of a training example
_SIZES = (8, 16, 64, 256, 1024)
_LARGER = {"claim": (16, 1024), "control": (8, 16)}  # the two sizes compared
_EXAMPLES, _BATCH = 512, 32
_MEASURED = ("weight", "accuracy", "accuracy with temperature")
_KEYS = "encoder/layer_0/attention/key"
# The inverse temperature by the entropy of a row (nats), figure 4 of the paper.
_POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)
_LOWEST_ENTROPY = 0.5


class MaxRetrieval(base.Claim):
    """A query finds the class of the item with the largest priority, by one head.

    Trained on 8 to 16 items, asked for up to 1,024, without and with the paper's
    adaptive temperature: each query's scores are multiplied by a polynomial of the
    entropy of its attention. The control stays within training: 16 against 8 items.
    """

    sentence = "The largest weight falls as items outgrow training; temperature helps"
    source = base.Source(
        paper="Velickovic et al. 2024",
        place="lemma 2.1, figures 2 and 4; its table 1 was not seen",
        published=(
            "focus is sharp only at the sizes of training (16 items), any circuit "
            "disperses; an adaptive temperature improves accuracy beyond"
        ),
        arxiv="2410.01104",
    )
    control = "8 and 16 items, both within training"
    minutes = 2.1
    criteria = (
        base.Criterion(
            "largest weight at 1,024 items over that at 16 (control: 16 over 8)",
            lambda x: x["weight, larger"] / x["weight, smaller"],
            at_most=0.5,
        ),
        base.Criterion(
            "accuracy gained by temperature at 1,024 items (control: 16)",
            lambda x: x["accuracy with temperature, larger"] - x["accuracy, larger"],
            at_least=0.01,
        ),
    )
    curves = (
        base.Curve(
            "Weight on the item that has most of it",
            "items (training: 8 to 16)",
            "attention weight",
            _SIZES,
            {"as trained": "weight at {}"},
            logarithmic=True,
        ),
        base.Curve(
            "Class of the item with the largest priority",
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
            "max_retrieval", 2000, report_every=1000, steps_per_dispatch=200
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

    def of_trained(self, desk, trained, name, arm):
        numbers = {}
        for size in _SIZES if arm == "claim" else _LARGER[arm]:
            other = desk.changed(trained, task__min_items=size, task__max_items=size)
            examples = desk.examples(other, _EXAMPLES)
            parts = [
                desk.apply(other, _weight_and_right, jax.tree.map(cut, examples))
                for cut in (
                    lambda x, i=i: x[i : i + _BATCH]
                    for i in range(0, _EXAMPLES, _BATCH)
                )
            ]
            for each, value in zip(_MEASURED, np.mean(parts, axis=(0, 2)), strict=True):
                numbers[f"{each} at {size}"] = value
        for word, size in zip(("smaller", "larger"), _LARGER[arm], strict=True):
            for each in _MEASURED:
                numbers[f"{each}, {word}"] = numbers[f"{each} at {size}"]
        return numbers


def inverse_temperature(entropy: jax.Array) -> jax.Array:
    """Returns what scores are multiplied by, at least 1.

    Args:
      entropy: Of rows of attention, nats, any shape.
    """
    coefficients = jnp.array(_POLYNOMIAL, entropy.dtype)
    sharper = jnp.maximum(jnp.polyval(coefficients, entropy), 1.0)
    return jnp.where(entropy > _LOWEST_ENTROPY, sharper, 1.0)


def _weight_and_right(model, params, examples):
    """Returns `[3, B]`: largest weight; right as trained; right with temperature."""

    def one(inputs, factor):
        keys = jax.tree.map(lambda x: x * factor, params[_KEYS])
        output = model.apply(
            {**params, _KEYS: keys}, None, inputs[None], is_training=False
        )
        row = output.maps[0].tile(slice(0, 1), slice(None))[0, 0, 0]
        return row, jnp.argmax(output.logits[0])

    row, plain = jax.vmap(lambda x: one(x, 1.0))(examples.inputs)
    # weights of 0 add nothing
    entropy = -jnp.sum(jnp.where(row > 0, row * jnp.log(row + 1e-30), 0.0), axis=-1)
    _, sharp = jax.vmap(one)(examples.inputs, inverse_temperature(entropy))
    right = (plain == examples.targets, sharp == examples.targets)
    return jnp.stack([jnp.max(row, axis=-1), *(x.astype(jnp.float32) for x in right)])
