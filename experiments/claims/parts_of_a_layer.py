"""Dot products that are not scaled learn later, the more so the larger heads are."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims import base

_SIZES = (4, 16, 64, 256)  # d_k
_RATES = (1e-3, 3e-3, 1e-2)
_LENGTH, _TOKENS = 8, 10
_WIDTH = 32
_BATCH, _WARM_UP, _HELD_OUT = 32, 50, 512
_PART = 10  # steps between two evaluations
_LEARNED, _MOST_STEPS = 0.99, 200


class PartsOfALayer(base.Claim):
    """A layer of attention learns to reverse with and without the scale 1 / sqrt(d_k).

    It has one head, of size d_k = 4, 16, 64 or 256, a width of 32 and no feed-forward
    part; it writes 8 tokens of 10 in reverse order, which takes attention. Scaled and
    unscaled models start from the same parameters and see the same examples, each with
    three learning rates, of which the best one counts. The two are compared at the step
    at which the scaled model is first right at 99 % of the held-out positions; if it
    never is within 200 steps, the lag counts as 0. In the control dot products are half
    the scaled ones, whatever d_k is, instead of unscaled. The planted failure leaves
    them unscaled.
    """

    sentence = "Without scaling attention learns more slowly the larger its heads are"
    source = base.Source(
        paper="Vaswani et al. 2017",
        place="section 3.2.1",
        published=(
            "for small d_k dot-product and additive attention are alike, for larger "
            "d_k dot products without scaling are worse; large ones are suspected to "
            "push softmax into regions of extremely small gradients (no number)"
        ),
        arxiv="1706.03762",
    )
    control = "dot products are half the scaled ones"
    planted = "dot products are left unscaled"
    effect = (
        "when the scaled model has learned, the lag in accuracy of the unscaled one "
        "grows by {0} with each fourfold d_k from 4 to 256"
    )
    would_change = (
        "Learning rates, warm-up or an initialization that let unscaled heads of 256 "
        "channels learn as well as scaled ones."
    )
    version = 2
    before = base.Before(
        "partly",
        "It asked for scaling at one d_k with one learning rate, and for layer norm, "
        "residual connections and the feed-forward part, of which the paper claims "
        "nothing. Now the gap is measured over d_k, with the best of three learning "
        "rates.",
    )
    tried = (
        "The gap is one of speed: on the pilot seeds 11 of 12 unscaled models are "
        "right at 99 % of the positions after 200 steps, where scaled ones take 30 to "
        "80. The control was first planned with twice the scaled dot products instead "
        "of half; these lag slightly for large d_k, too, by 0.004, 0.000 and 0.019 per "
        "fourfold d_k on the pilot seeds."
    )
    criteria = (
        base.Criterion(
            "lag in accuracy without scaling, per fourfold d_k",
            lambda x: slope([x[f"lost at {size}"] for size in _SIZES]),
            at_least=0.0,
            bound_from=base.PAPER,
        ),
    )
    curves = (
        base.Curve(
            title=f"Reversing {_LENGTH} tokens, when the scaled model has learned",
            across="d_k",
            up="held-out accuracy",
            points=_SIZES,
            lines={
                "scaled": "scaled at {}",
                "unscaled (in the control: half the scaled)": "other at {}",
            },
            logarithmic=True,
        ),
        base.Curve(
            title="Slope of softmax at the start",
            across="d_k",
            up="mean sum of p (1 - p) of a row",
            points=_SIZES,
            lines={
                "scaled": "gradient, scaled at {}",
                "unscaled (in the control: half the scaled)": "gradient, other at {}",
            },
            logarithmic=True,
        ),
    )

    def measure(self, desk, seed, arm):
        numbers = {}
        for size in _SIZES:
            scaled = 1 / math.sqrt(size)
            other = scaled / 2 if arm == "control" else 1.0
            history, gradient = _trained(desk, seed, size, scaled)
            others, its_gradient = _trained(desk, seed, size, other)
            before, after, steps = compared(history, others)
            numbers |= {
                f"scaled at {size}": before,
                f"other at {size}": after,
                f"lost at {size}": before - after if steps else 0.0,
                f"other at {size}, last": others[:, -1].max(),
                f"gradient, scaled at {size}": gradient,
                f"gradient, other at {size}": its_gradient,
                f"steps at {size}": steps,
            }
        return numbers


def slope(values):
    """Returns the slope of the least-squares line through equally spaced values."""
    return np.polyfit(np.arange(len(values)), values, 1)[0]


def compared(scaled, other):
    """Returns two accuracies when the scaled model has learned, and at which step.

    Args:
      scaled: `[rates, evaluations]`, accuracies of the scaled model.
      other: The same for the other model.

    Returns:
      The best accuracies over the learning rates, and the step; 0 if the scaled model
      has not learned, and accuracies are the last ones.
    """
    scaled, other = scaled.max(0), other.max(0)
    learned = np.flatnonzero(scaled >= _LEARNED)
    first = learned[0] if learned.size else -1
    return scaled[first], other[first], _PART * (first + 1)


def _trained(desk, seed, size, scale):
    """Returns accuracies `[rate, evaluation]` in training, and the first gradient."""
    train = desk.once(("train", size), lambda: jax.jit(_program(size)))

    def each(rate):
        return jax.device_get(train(jax.random.key(seed), np.float32(scale), rate))

    found = desk.once(
        ("trained", seed, size, scale), lambda: [each(np.float32(x)) for x in _RATES]
    )
    return np.array([accuracies for accuracies, _ in found]), float(found[0][1])


def _program(size):
    """Returns the function that trains a model with heads of a size."""

    def train(key, scale, rate):
        held_out = _drawn(jax.random.fold_in(key, 2), _HELD_OUT)
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b2=0.98),
            optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, _WARM_UP)),
            optax.scale(-rate),
        )

        def step(carry, i):
            params, state = carry
            tokens = _drawn(jax.random.fold_in(jax.random.fold_in(key, 1), i), _BATCH)
            gradients = jax.grad(loss)(params, tokens, scale)
            changes, state = optimizer.update(gradients, state)
            return (optax.apply_updates(params, changes), state), None

        def part(carry, first):
            carry, _ = jax.lax.scan(step, carry, first + jnp.arange(_PART))
            logits, _ = forward(carry[0], held_out, scale)
            return carry, (logits.argmax(-1) == held_out[:, ::-1]).mean()

        params = initial(jax.random.fold_in(key, 0), size)
        _, weights = forward(params, held_out, scale)
        carry = params, optimizer.init(params)
        _, accuracies = jax.lax.scan(part, carry, jnp.arange(0, _MOST_STEPS, _PART))
        return accuracies, (weights * (1 - weights)).sum(-1).mean()

    return train


def _drawn(key, count):
    return jax.random.randint(key, (count, _LENGTH), 0, _TOKENS)


def initial(key, size):
    """Returns the parameters of a model whose head has a size."""
    shapes = {"tokens": (_TOKENS, _WIDTH), "positions": (_LENGTH, _WIDTH)}
    shapes |= {name: (_WIDTH, size) for name in ("query", "key", "value")}
    shapes |= {"output": (size, _WIDTH), "logits": (_WIDTH, _TOKENS)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape)
        / (1 if name in ("tokens", "positions") else math.sqrt(shape[0]))
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def forward(params, tokens, scale):
    """Returns logits `[B, T, C]` and attention weights `[B, T, T]`.

    Args:
      params: Parameters as of `initial`.
      tokens: `[B, T]` int32.
      scale: The factor of the dot products.
    """
    x = params["tokens"][tokens] + params["positions"][None]
    query, key, value = (_norm(x) @ params[name] for name in ("query", "key", "value"))
    weights = jax.nn.softmax(scale * (query @ key.mT))
    x = x + weights @ value @ params["output"]
    return _norm(x) @ params["logits"], weights


def loss(params, tokens, scale):
    """Returns the mean cross-entropy of the reversed tokens, in nats."""
    logits, _ = forward(params, tokens, scale)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, ::-1]
    ).mean()


def _norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
