"""A head smaller than the input cannot represent every attention matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims import base

_LENGTH = 16  # n, of the input
_WIDTH = 24  # of the model, and the largest head size
_SIZES = tuple(range(1, _WIDTH + 1))
_MATRICES = 8
_FEW = 4  # the head size that made the control's matrices
_FITTED = 1e-3  # the largest error of a weight
_RATE, _FEWEST_STEPS, _MOST_STEPS = 0.03, 1000, 16_000
_STILL = 0.01  # by how much doubling the steps may change an error
_KINDS = ("width = head size", f"width {_WIDTH}")


class HeadSizes(base.Claim):
    """A single head is fitted to random matrices of attention weights.

    The input has 16 positions, whose vectors are linearly independent where the width
    allows it. Eight matrices have positive rows that sum to 1, the softmax of
    independent normal scores. For every head size from 1 to 24 the projections to
    queries and keys are trained by Adam, from the same start, until the softmax of
    scaled dot products gives the matrix. The number of steps is doubled until no error
    changes by more than 0.01. A head size fits if no weight of the eight matrices is
    off by more than 0.001. This is done twice: with vectors as wide as the head, as in
    the theorem, and with vectors of width 24 for all head sizes, as in a model of many
    heads. In the control the matrices come from a random head of size 4. In the planted
    failure one of the control's eight matrices does not.
    """

    sentence = "A head smaller than the input cannot represent every attention matrix"
    source = base.Source(
        paper="Bhojanapalli et al. 2020",
        place="theorem 1",
        published=(
            "with a head size of at least the length n of the input any positive "
            "stochastic matrix can be represented, below n there are inputs and "
            "matrices that cannot"
        ),
        arxiv="2002.07028",
    )
    control = f"matrices made by a head of size {_FEW}"
    planted = "one matrix in eight is random, not made by a small head"
    effect = (
        "share of the head sizes from 1 to 24 for which the theorem holds: {0}; head "
        "sizes below the length that fail to fit a matrix, in a model of width 24: {1} "
        "of 15"
    )
    would_change = (
        "A head smaller than the input that fits random matrices, or one as large as "
        "the input that does not. The theorem is about what a head can represent, not "
        "about what a trained model needs; trained models were not compared here."
    )
    version = 2
    before = base.Before(
        "partly",
        "It compared the loss of sorting after 300 steps, which measures speed, and "
        "counted operations, which is arithmetic; its control was one model four "
        "times. Now the theorem itself is measured.",
    )
    tried = (
        "In a model that is wider than its heads, heads of size n - 1 fit all "
        "matrices: softmax ignores a constant in a row of scores, so rank n - 1 is "
        "enough. Heads of size n - 1 fail if the width of the model is n - 1 as well, "
        "as in the proof of the theorem."
    )
    criteria = (
        base.Criterion(
            "share of head sizes for which the theorem holds, width = head size",
            lambda x: np.mean(
                [_fits(x, _KINDS[0], size) == (size >= _LENGTH) for size in _SIZES]
            ),
            at_least=1.0,
            bound_from=base.PAPER,
            published={"theorem 1": 1.0},
        ),
        base.Criterion(
            f"head sizes below {_LENGTH} that do not fit, width {_WIDTH}",
            lambda x: sum(not _fits(x, _KINDS[1], size) for size in range(1, _LENGTH)),
            at_least=(_LENGTH - 1) / 2,
            bound_from=base.HALF,
            published={"theorem 1": _LENGTH - 1},
        ),
    )
    curves = (
        base.Curve(
            title=f"Fitting matrices of {_LENGTH} x {_LENGTH} attention weights",
            across="head size",
            up="largest error of a weight",
            points=_SIZES,
            lines={kind: f"error, {kind}, {{:.0f}}" for kind in _KINDS},
            level=0.0,
            level_name="fitted",
        ),
    )

    def measure(self, desk, seed, arm):
        generator = np.random.default_rng(seed)
        inputs, weights = _drawn(generator, arm)
        start = generator.normal(0, 0.1, (2, 2, len(_SIZES), _MATRICES, _WIDTH, _WIDTH))
        fit = desk.once("fit", lambda: jax.jit(_fit))
        arguments = [np.asarray(x, np.float32) for x in (start, inputs, weights)]
        steps, moved, errors = _FEWEST_STEPS, np.inf, np.inf
        while moved > _STILL and steps <= _MOST_STEPS:
            before, errors = errors, np.asarray(fit(*arguments, steps))
            moved, steps = np.abs(errors - before).max(), 2 * steps
        numbers = {
            f"error, {kind}, {size}": errors[i, j]
            for i, kind in enumerate(_KINDS)
            for j, size in enumerate(_SIZES)
        }
        return {**numbers, "moved at last": moved, "steps": steps / 2}


def _fits(numbers, kind, size):
    return numbers[f"error, {kind}, {size}"] <= _FITTED


def _drawn(generator, arm):
    """Returns the inputs `[kind, size, matrix, n, width]` and weights `[matrix, n, n]`.

    Of both kinds the positions of an input span the same space at a head size.
    """
    square = generator.normal(size=(_MATRICES, _LENGTH, _LENGTH))
    basis, _ = np.linalg.qr(square)
    whole = np.zeros((_MATRICES, _LENGTH, _WIDTH))
    whole[..., :_LENGTH] = 4 * basis
    narrow = whole * head_channels()[:, None, None]
    inputs = np.stack([narrow, np.broadcast_to(whole, narrow.shape)])
    scores = generator.normal(size=(_MATRICES, _LENGTH, _LENGTH))
    if arm != "claim":
        few = basis[..., :_FEW]  # orthonormal, and as much spread as all scores have
        small = few @ generator.normal(size=(_MATRICES, _FEW, _FEW)) @ few.mT
        small *= _LENGTH / _FEW
        is_small = np.arange(_MATRICES) >= (arm == base.PLANTED)
        scores = np.where(is_small[:, None, None], small, scores)
    weights = np.exp(scores)
    return inputs, weights / weights.sum(-1, keepdims=True)


def head_channels():
    """Returns `[size, channel]`, 1 where a head of a size has a channel."""
    return (np.arange(_WIDTH) < np.array(_SIZES)[:, None]).astype(np.float32)


def scores_of(projections, inputs):
    """Returns the scaled dot products of heads of all sizes.

    Args:
      projections: `[2, kind, size, matrix, width, channel]`, of queries and of keys.
      inputs: `[kind, size, matrix, n, width]`.

    Returns:
      `[kind, size, matrix, n, n]`.
    """
    query, key = (inputs @ projection for projection in projections)
    query = query * head_channels()[None, :, None, None]
    sizes = np.array(_SIZES, np.float32)[None, :, None, None, None]
    return query @ key.mT / jnp.sqrt(sizes)


def _fit(start, inputs, weights, steps):
    """Returns `[kind, size]`, the largest error of a weight after some steps."""

    def loss(projections):
        logs = jax.nn.log_softmax(scores_of(projections, inputs))
        return -(weights * logs).sum((-1, -2)).sum()

    optimizer = optax.scale_by_adam(b2=0.99)

    def step(i, carry):
        projections, state = carry
        changes, state = optimizer.update(jax.grad(loss)(projections), state)
        rate = _RATE * 0.5 * (1 + jnp.cos(jnp.pi * i / steps))
        return projections - rate * changes, state

    start = jnp.asarray(start)
    fitted, _ = jax.lax.fori_loop(0, steps, step, (start, optimizer.init(start)))
    found = jax.nn.softmax(scores_of(fitted, inputs))
    return jnp.abs(found - weights).max((-1, -2, -3))
