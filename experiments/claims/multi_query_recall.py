"""A fixed state must grow with the pairs that it recalls; attention need not."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims import base

_PAIRS = (4, 8, 16)
_SIZES = (2, 4, 8, 16, 32)  # of keys and values
_KEYS, _VALUES, _QUERIES = 64, 16, 8
_BATCH, _RATE = 32, 0.03
_FEWEST_STEPS, _MOST_STEPS = 500, 4000
_STILL = 0.02  # how far doubling the steps may move an accuracy
_SOLVED = 0.9  # the accuracy from which on a size is large enough
_TESTED = 1024  # examples


class MultiQueryRecall(base.Claim):
    """One head recalls 4, 8 or 16 pairs of a key and a value, by linear attention.

    Keys are 64 tokens, all different in an example, values are 16 tokens; eight keys of
    the example are then queried. The head has vectors for the keys, for the queried
    keys and for the values, and a matrix to logits; a value is paired with its key, as
    after a layer that attends to the previous token. Linear attention (features
    elu + 1) keeps only a sum of products of key and value: a state of as many numbers
    as the square of the head size. Models of five head sizes from 2 to 32 are trained
    by Adam. The number of steps is doubled from 500 on until no accuracy changes by
    more than 0.02, up to 4,000 steps.

    The size that a number of pairs needs is the one at which the held-out accuracy
    reaches 0.9, interpolated between the logs of two sizes; a number of pairs for which
    32 is too small counts as needing 64. The exponent is the slope of the log of the
    state on the log of the number of pairs. The control has softmax attention instead
    of linear attention. The planted failure is linear attention in the control.
    """

    sentence = "The state of linear attention must grow with the pairs to recall"
    source = base.Source(
        paper="Arora et al. 2023",
        place=(
            "section 4; the lower bound of the state is of Arora et al. 2024, "
            "https://arxiv.org/abs/2402.18668"
        ),
        published=(
            "to recall more pairs, models of a fixed state need more width, attention "
            "does not; a state needs bits in proportion to the pairs, or more (the "
            "lower bound from memory)"
        ),
        arxiv="2312.04927",
    )
    control = "softmax attention"
    planted = "linear attention in the control"
    effect = (
        "the state that linear attention needs grows as the number of pairs to the "
        "power of {0}"
    )
    would_change = (
        "A way to train linear attention that packs more pairs into a state; gated "
        "convolutions, which the paper measured, instead of linear attention."
    )
    version = 2
    before = base.Before(
        "reproduced",
        "A window of 2 in two layers sees 4 of 24 answers, so it was wrong in 78 % by "
        "construction, and the control asked for the values of another example. Now "
        "the state that linear attention needs is measured by the number of pairs.",
    )
    tried = (
        "With linear attention all accuracies had settled by 4,000 steps. With softmax "
        "attention head size 2 had not settled, and still rose by up to 0.1, so the "
        "control may need even smaller heads than we measured."
    )
    criteria = (
        base.Criterion(
            "exponent of the number of pairs in the state that is needed",
            "exponent",
            at_least=0.5,
            bound_from=base.HALF,
            published={"lower bound: in proportion": 1.0},
        ),
    )
    curves = (
        base.Curve(
            title="Recall of the values of queried keys",
            across="head size",
            up="held-out accuracy",
            points=_SIZES,
            lines={
                f"{pairs} pairs": f"accuracy, {pairs} pairs, size {{:.0f}}"
                for pairs in _PAIRS
            },
            logarithmic=True,
            level=1 / _VALUES,
            level_name="chance",
        ),
    )

    def measure(self, desk, seed, arm):
        is_linear = arm != "control"
        run = desk.once(
            is_linear,
            lambda: jax.jit(functools.partial(_accuracies, is_linear=is_linear)),
        )
        steps, moved, found = _FEWEST_STEPS, np.inf, np.inf
        while moved > _STILL and steps <= _MOST_STEPS:
            before, found = found, np.asarray(run(np.uint32(seed), steps))
            moved, steps = np.abs(found - before).max(), 2 * steps
        needed = [size_needed(_SIZES, row) for row in found]
        numbers = {
            f"accuracy, {pairs} pairs, size {size}": found[i, j]
            for i, pairs in enumerate(_PAIRS)
            for j, size in enumerate(_SIZES)
        }
        slope, _ = np.polyfit(np.log(_PAIRS), np.log(np.square(needed)), 1)
        return {
            "exponent": slope,
            **{f"size for {x} pairs": y for x, y in zip(_PAIRS, needed, strict=True)},
            **numbers,
            "moved at last": moved,
            "steps": steps / 2,
        }


def size_needed(sizes: Sequence[float], accuracies: Sequence[float]) -> float:
    """Returns the size at which the accuracy reaches 0.9, by the log of sizes.

    It is the first size if that is enough, and twice the last one if that is not.
    """
    enough = np.flatnonzero(np.asarray(accuracies) >= _SOLVED)
    if not len(enough):
        return 2.0 * sizes[-1]
    last = enough[0]
    if last == 0:
        return float(sizes[0])
    between = accuracies[last - 1 : last + 1]
    return float(
        np.exp(np.interp(_SOLVED, between, np.log(sizes[last - 1 : last + 1])))
    )


def drawn(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys and values of the most pairs `[B, N]`, and random words `[B, Q]`."""
    for_keys, for_values, for_queries = jax.random.split(key, 3)
    most = _PAIRS[-1]
    keys = jnp.argsort(jax.random.uniform(for_keys, (count, _KEYS)))[:, :most]
    values = jax.random.randint(for_values, (count, most), 0, _VALUES)
    return keys, values, jax.random.bits(for_queries, (count, _QUERIES), jnp.uint32)


def recall(
    params: dict[str, jax.Array],
    keys: jax.Array,
    values: jax.Array,
    queried: jax.Array,
    pairs: jax.Array,
    channels: jax.Array,
    *,
    is_linear: bool,
) -> jax.Array:
    """Returns the logits `[B, Q, C]` of the values of queried keys.

    Args:
      params: "query" and "key" `[keys, K]`, "value" `[C, K]`, "output" `[K, C]`.
      keys: `[B, N]` tokens.
      values: `[B, N]` tokens.
      queried: `[B, Q]` tokens.
      pairs: How many of the N there are.
      channels: `[K]`, 1 where the head has a channel, 0 elsewhere.
      is_linear: Whether attention is linear, or softmax.
    """
    size, channels = channels.sum(), channels[None, None]
    query, key = params["query"][queried], params["key"][keys]
    value = params["value"][values] * channels
    is_there = (jnp.arange(keys.shape[1]) < pairs)[None, None]
    if is_linear:
        query, key = ((jax.nn.elu(x) + 1) * channels for x in (query, key))
        weights = jnp.einsum("bqk,bnk->bqn", query, key) * is_there
        weights = weights / weights.sum(-1, keepdims=True)
    else:
        scores = jnp.einsum("bqk,bnk->bqn", query * channels, key)
        scores = scores / jnp.sqrt(size)
        weights = jax.nn.softmax(jnp.where(is_there, scores, -jnp.inf))
    return jnp.einsum("bqn,bnk,kc->bqc", weights, value, params["output"])


def _accuracies(seed, steps, *, is_linear):
    """Returns the held-out accuracy after some steps, `[pairs, size]`."""
    for_start, for_data, for_test = jax.random.split(jax.random.key(seed), 3)
    channels = jnp.arange(_SIZES[-1]) < jnp.array(_SIZES)[:, None]
    channels = channels.astype(jnp.float32)
    pairs = jnp.array(_PAIRS)
    grid = len(_PAIRS), len(_SIZES)
    shapes = {
        "query": (_KEYS, _SIZES[-1]),
        "key": (_KEYS, _SIZES[-1]),
        "value": (_VALUES, _SIZES[-1]),
        "output": (_SIZES[-1], _VALUES),
    }
    starts = jax.random.split(for_start, len(shapes))
    params = {
        name: jax.random.normal(start, (*grid, *shape))
        for start, (name, shape) in zip(starts, shapes.items(), strict=True)
    }

    def of_one(params, batch, pairs, channels):
        keys, values, words = batch
        places = (words % pairs.astype(jnp.uint32)).astype(jnp.int32)
        queried, right = (
            jnp.take_along_axis(x, places, axis=1) for x in (keys, values)
        )
        logits = recall(
            params, keys, values, queried, pairs, channels, is_linear=is_linear
        )
        logs = jax.nn.log_softmax(logits)
        loss = -jnp.take_along_axis(logs, right[..., None], axis=-1).mean()
        return loss, (logits.argmax(-1) == right).mean()

    of_sizes = jax.vmap(of_one, (0, None, None, 0))
    of_all = jax.vmap(of_sizes, (0, None, 0, None))

    def loss(params, batch):
        return of_all(params, batch, pairs, channels)[0].sum()

    optimizer = optax.scale_by_adam()

    def step(i, carry):
        params, state = carry
        batch = drawn(jax.random.fold_in(for_data, i), _BATCH)
        changes, state = optimizer.update(jax.grad(loss)(params, batch), state)
        rate = _RATE * 0.5 * (1 + jnp.cos(jnp.pi * i / steps))
        return jax.tree.map(lambda x, change: x - rate * change, params, changes), state

    params, _ = jax.lax.fori_loop(0, steps, step, (params, optimizer.init(params)))
    return of_all(params, drawn(for_test, _TESTED), pairs, channels)[1]
