"""The time until an induction head emerges grows with the square of the context."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import base

_PAIRS = (6, 12, 24)
_LENGTHS = tuple(2 * pairs + 1 for pairs in _PAIRS)
_ITEMS, _LABELS = 32, 4
_BATCH, _RATE, _SPREAD = 32, 4.0, 0.01
_EMERGED = 0.5  # the weight on the right label
_MOST_STEPS = 40_000
_KEPT = 0.95  # of the running mean, at each step
_SHARP = 20.0  # the score of the position before, where layer 1 is given


class InductionEmergence(base.Claim):
    """Two layers of one head learn to name the label that followed an item before.

    An example has 6, 12 or 24 pairs of an item and a label, and then one of the items
    again: a context of 13, 25 or 49 tokens. Items are 32 tokens, all different in an
    example; labels are 4 tokens, drawn anew in each example. The model has only
    attention: tokens and positions are one-hot vectors, a layer has one matrix of
    scores for pairs of positions, and its output is appended to its input, not added,
    so that no layer overwrites another. A last matrix gives the logits.
    All matrices start from normal numbers of standard deviation 0.01 and are trained by
    plain gradient descent, with the same learning rate and batch size for all contexts.

    The induction head counts as emerged when the second layer gives half of its weight
    to the right label, as a running mean over steps. The exponent is the slope of log
    steps on log context length. A context in which no head emerges within 40,000 steps
    counts as an exponent of 0. In the control the first layer attends to the previous
    token from the start, so that it has nothing to learn. The planted failure is a
    control whose first layer has to be learned.
    """

    sentence = "The time until induction emerges grows with the square of the context"
    source = base.Source(
        paper="Musat et al. 2025",
        place="abstract",
        published=(
            "the time until the emergence of an induction head follows a tight "
            "asymptotic bound that is quadratic in the length of the context"
        ),
        arxiv="2511.01033",
    )
    control = "a first layer that attends to the previous token from the start"
    planted = "a first layer that has to be learned"
    effect = (
        "the steps until the head emerges grow as the context length to the power of "
        "{0}"
    )
    would_change = (
        "Contexts long enough to tell a power of 2 from one slightly off it; Adam "
        "instead of gradient descent, to which the theorem does not apply."
    )
    criteria = (
        base.Criterion(
            "exponent of the context length in the steps until the head emerges",
            "exponent",
            at_least=1.5,
            bound_from=base.HALF,
            null=1.0,
            published={"abstract: quadratic": 2.0},
        ),
        base.Criterion(
            "distance of the exponent from 2",
            lambda x: abs(x["exponent"] - 2),
            at_most=0.5,
            bound_from=base.HALF,
            null=1.0,
            published={"abstract: quadratic": 0.0},
        ),
    )
    curves = (
        base.Curve(
            "Steps until the induction head emerges",
            "tokens of context",
            "log10 of steps",
            _LENGTHS,
            {"gradient descent": "log10 of steps at {:.0f}"},
            logarithmic=True,
        ),
    )

    def measure(self, desk, seed, arm):
        is_given = arm == "control"
        steps, weights = [], []
        for pairs in _PAIRS:
            train = desk.once(
                (pairs, is_given),
                lambda pairs=pairs: jax.jit(
                    functools.partial(_train, pairs=pairs, is_given=is_given)
                ),
            )
            count, weight = jax.device_get(train(np.uint32(seed)))
            steps.append(float(count))
            weights.append(float(weight))
        named = {
            f"log10 of steps at {length}": np.log10(count)
            for length, count in zip(_LENGTHS, steps, strict=True)
        }
        emerged = min(weights) >= _EMERGED
        return {
            "exponent": exponent_of(_LENGTHS, steps) if emerged else 0.0,
            "least weight at last": min(weights),
            **named,
        }


def exponent_of(lengths: Sequence[float], steps: Sequence[float]) -> float:
    """Returns the slope of the line that fits log steps to log lengths."""
    return float(np.polyfit(np.log(lengths), np.log(steps), 1)[0])


def drawn(key: jax.Array, pairs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens `[B, T]`, the right labels `[B]` and their positions `[B]`.

    Labels are the tokens after all items.
    """
    for_items, for_labels, for_query = jax.random.split(key, 3)
    order = jnp.argsort(jax.random.uniform(for_items, (_BATCH, _ITEMS)))
    items = order[:, :pairs]
    labels = jax.random.randint(for_labels, (_BATCH, pairs), 0, _LABELS)
    query = jax.random.randint(for_query, (_BATCH, 1), 0, pairs)
    of_pairs = jnp.stack([items, labels + _ITEMS], axis=-1).reshape(_BATCH, -1)
    asked, right = (jnp.take_along_axis(x, query, axis=1) for x in (items, labels))
    tokens = jnp.concatenate([of_pairs, asked], axis=1)
    return tokens, right[:, 0], 2 * query[:, 0] + 1


def answers(
    params: dict[str, jax.Array], tokens: jax.Array, *, is_given: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns logits `[B, C]` at the last token, and its weights `[B, T]` in layer 2.

    Args:
      params: "first" `[D, D]`, "second" `[2 D, 2 D]` and "output" `[2 D, C]`, where D
        is the number of tokens and positions.
      tokens: `[B, T]`.
      is_given: Whether layer 1 attends to the token before, whatever its matrix is.
    """
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.eye(length), (len(tokens), length, length))
    known = jax.nn.one_hot(tokens, _ITEMS + _LABELS)
    x = jnp.concatenate([known, positions], axis=-1)
    if is_given:
        scores = _SHARP * jnp.eye(length, k=-1)[None]
    else:
        scores = jnp.einsum("btd,de,bse->bts", x, params["first"], x)
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    first = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    before = jnp.einsum("bts,bsd->btd", jnp.broadcast_to(first, positions.shape), x)
    x = jnp.concatenate([x, before], axis=-1)
    second = jax.nn.softmax(jnp.einsum("bd,de,bse->bs", x[:, -1], params["second"], x))
    return jnp.einsum("bs,bsd,dc->bc", second, x, params["output"]), second


def _train(seed, *, pairs, is_given):
    """Returns the steps until the head has emerged, and the weight that it has then."""
    for_first, for_second, for_output, for_data = jax.random.split(
        jax.random.key(seed), 4
    )
    width = _ITEMS + _LABELS + 2 * pairs + 1
    params = {
        "first": jax.random.normal(for_first, (width, width)),
        "second": jax.random.normal(for_second, (2 * width, 2 * width)),
        "output": jax.random.normal(for_output, (2 * width, _LABELS)),
    }
    params = jax.tree.map(lambda x: _SPREAD * x, params)

    def loss(params, tokens, right, place):
        logits, weights = answers(params, tokens, is_given=is_given)
        logs = jax.nn.log_softmax(logits)
        on_right = jnp.take_along_axis(weights, place[:, None], axis=1)
        return -jnp.take_along_axis(
            logs, right[:, None], axis=1
        ).mean(), on_right.mean()

    def step(carry):
        params, count, mean = carry
        batch = drawn(jax.random.fold_in(for_data, count), pairs)
        slopes, weight = jax.grad(loss, has_aux=True)(params, *batch)
        params = jax.tree.map(lambda x, slope: x - _RATE * slope, params, slopes)
        return params, count + 1, _KEPT * mean + (1 - _KEPT) * weight

    def goes_on(carry):
        _, count, mean = carry
        return (count < _MOST_STEPS) & (mean < _EMERGED)

    _, count, mean = jax.lax.while_loop(goes_on, step, (params, 0, 0.0))
    return count, mean
