"""A few Fourier frequencies carry modular addition."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

from experiments.claims import base
from mha_haiku.core.attention import statistics

_MODULUS = 113
_FEW = 5  # key frequencies, as many as in the paper
_WIDTH, _HEADS, _HIDDEN = 64, 4, 256
_SHARE, _PLANTED_SHARE = 0.3, 0.8  # of all sums, to train on
_LEARNING_RATE = 5e-3
_EVERY = 25  # steps between two looks
_MOST = 3_000  # steps
_ENOUGH = 1e-3  # nats, on held-out sums
_LOOKS = (25, 50, 100, 200, 400, 800, 1600)  # steps, for the figure
_CHANCE = math.log(_MODULUS)

_optimizer = optax.adamw(
    optax.linear_schedule(0.0, _LEARNING_RATE, 10), b1=0.9, b2=0.98, weight_decay=1.0
)


class ModularFrequencies(base.Claim):
    """A layer of attention and ReLU units learns a + b mod 113.

    The model reads two numbers and an equals sign, and has no layer norm, as in the
    paper; it is half as wide (64, with four heads and 256 units). It is trained on 30 %
    of the 12,769 sums, on all of them in each step, by AdamW with weight decay of 1 and
    a learning rate of 0.005, five times the paper's, so that it takes minutes. Training
    ends when the loss on the other sums has fallen to 0.001 nats; a model that has not
    learned them after 3,000 steps is measured as it is.

    In the Fourier transform of the embedding, over numbers on a circle, the five
    frequencies of the most power are the key frequencies. The logits of all sums are
    split into waves over a + b - c with these frequencies and the rest. We measure the
    waves' share of the logits' variance, and the loss on the training sums without the
    waves (the paper's excluded loss). The figure also shows the held-out loss with only
    the waves (the paper's restricted loss): as in the paper it falls before the
    held-out loss does, so that it is low in the control as well and decides nothing.

    The control takes the same model earlier: when it first has all training sums right,
    which it has memorized. In the planted failure that model was trained on 80 % of the
    sums, which by the paper generalizes at once.
    """

    sentence = "A few Fourier frequencies carry modular addition"
    source = base.Source(
        paper="Nanda et al. 2023",
        place="section 4.2, appendix C.2.1",
        published=(
            "modulo 113, waves of five of 56 frequencies have 95 % of the variance of "
            "the logits; without the key frequencies the loss is 6.5 to 11 nats"
        ),
        arxiv="2301.05217",
    )
    control = "the model when it has memorized the training sums"
    planted = "80 % of the sums to train on, instead of 30 %"
    effect = (
        "five of 56 frequencies have a share of {0} of the logits' variance; without "
        "them the loss on the training sums is {1} nats (chance: 4.73)"
    )
    would_change = (
        "A model that has learned the sums, and whose logits are spread over many "
        "frequencies. By the paper's appendix, dropout instead of weight decay gives "
        "one."
    )
    before = base.Before(
        verdict="partly",
        why=(
            "The task was a + b mod 47, in small batches, and training stopped before "
            "the clean-up of the embedding, whose share of power at the key "
            "frequencies was a criterion. Now it is the paper's task, in full batches, "
            "until the held-out loss has fallen, and the excluded loss decides."
        ),
    )
    version = 2
    tried = (
        "Other learning rates, on seed 0: with 0.003 the held-out loss falls after "
        "2,500 steps, with 0.01 after 600, where the waves have 0.16 of the variance "
        "when the sums have been memorized. With the paper's width and its learning "
        "rate of 0.001 it had not fallen after 1,200 steps, which took as long as a "
        "whole run here. A pilot seed had 0.07 nats after 5,000 steps."
    )
    criteria = (
        base.Criterion(
            "share of the logits' variance at five of 56 frequencies",
            "logits' variance",
            at_least=0.475,
            bound_from=base.HALF,
            published={"section 4.2": 0.95},
        ),
        base.Criterion(
            "loss on training sums without them",
            "loss excluded",
            at_least=_CHANCE,
            unit="nats",
            bound_from=base.PAPER,
            null=_CHANCE,
            published={"C.2.1, least": 6.5, "C.2.1, most": 11.0},
        ),
    )
    curves = (
        base.Curve(
            title="Losses in training (an ended run keeps its last number)",
            across="steps",
            up="nats",
            points=_LOOKS,
            lines={
                "training sums": "loss at {}",
                "held-out sums": "loss held out at {}",
                "held-out sums, only key frequencies": "loss restricted at {}",
                "training sums, without them": "loss excluded at {}",
            },
            logarithmic=True,
            level=_CHANCE,
            level_name="chance",
        ),
        base.Curve(
            title="Concentration on few frequencies",
            across="steps",
            up="share",
            points=_LOOKS,
            lines={
                "logits' variance at the key frequencies": "logits' variance at {}",
                "Gini coefficient of the embedding's spectrum": "Gini at {}",
            },
            logarithmic=True,
        ),
    )

    def measure(self, desk, seed, arm):
        share = _PLANTED_SHARE if arm == base.PLANTED else _SHARE
        is_training = split(seed, share)
        looks = desk.once(("sums", seed, share), lambda: learn(seed, is_training))
        last = looks[-1]
        if arm == "claim":
            look = last
        else:
            look = next((x for x in looks if x.accuracy == 1), last)
        measured = numbers(*seen(look.params), is_training)
        measured |= {"steps": look.step, "loss held out": look.held_out_loss}
        if arm != "claim":
            return measured
        keys = key_frequencies(last.params["embedding"][:_MODULUS])
        for step in _LOOKS:
            then = max((x for x in looks if x.step <= step), key=lambda x: x.step)
            found = numbers(*seen(then.params), is_training, keys)
            measured |= {f"{name} at {step}": found[name] for name in found}
            measured[f"loss held out at {step}"] = then.held_out_loss
        return measured


class Look(NamedTuple):
    """A model in training.

    Attributes:
      step: After which step.
      params: Its parameters.
      accuracy: On the training sums.
      held_out_loss: In nats.
    """

    step: int
    params: dict[str, np.ndarray]
    accuracy: float
    held_out_loss: float


def split(seed: int, share: float) -> np.ndarray:
    """Returns which sums a + b are trained on, `[p, p]`; they are drawn at random."""
    order = np.random.default_rng(seed).permutation(_MODULUS**2)
    return (order < share * _MODULUS**2).reshape(_MODULUS, _MODULUS)


def learn(seed: int, is_training: np.ndarray) -> list[Look]:
    """Trains until the held-out loss has fallen; returns looks at the model."""
    is_training = is_training.ravel()
    sums = np.stack(np.divmod(np.arange(_MODULUS**2), _MODULUS))
    params = _initial(jax.random.key(seed))
    state = _optimizer.init(params)
    looks = []
    for step in range(_EVERY, _MOST + 1, _EVERY):
        params, state = _train(params, state, sums[:, is_training])
        losses, is_right = jax.device_get(_evaluate(params, sums))
        look = Look(
            step,
            jax.device_get(params),
            is_right[is_training].mean(),
            losses[~is_training].mean(),
        )
        looks.append(look)
        if look.held_out_loss <= _ENOUGH:
            break
    return looks


def seen(params) -> tuple[np.ndarray, np.ndarray]:
    """Returns the embedding of the numbers, `[p, D]`, and all logits, `[p, p, p]`."""
    sums = np.stack(np.divmod(np.arange(_MODULUS**2), _MODULUS))
    logits = np.float64(_all_logits(params, sums))
    return params["embedding"][:_MODULUS], logits.reshape([_MODULUS] * 3)


def key_frequencies(embedding: np.ndarray) -> np.ndarray:
    """Returns the frequencies at which the embedding, `[p, D]`, has the most power."""
    return np.argsort(_power(embedding))[-_FEW:] + 1


def numbers(
    embedding: np.ndarray,
    logits: np.ndarray,
    is_training: np.ndarray,
    keys: np.ndarray | None = None,
) -> dict[str, float]:
    """Returns what the claim measures.

    Args:
      embedding: `[p, D]`, of the numbers.
      logits: `[p, p, p]`, of a, b and the answer c.
      is_training: `[p, p]`, which sums were trained on.
      keys: The key frequencies. Default to the embedding's.
    """
    p = len(embedding)
    keys = key_frequencies(embedding) if keys is None else keys
    logits = logits - logits.mean(-1, keepdims=True)
    a, b, c = np.indices((p, p, p))
    around = (a + b - c) % p
    wave = np.bincount(around.ravel(), logits.ravel()) / p**2  # mean at each a + b - c
    spectrum = np.fft.rfft(wave)
    spectrum[np.setdiff1d(np.arange(len(spectrum)), keys)] = 0
    of_keys = np.fft.irfft(spectrum, p)[around]
    return {
        "logits' variance": (of_keys**2).sum() / (logits**2).sum(),
        "loss": _losses(logits)[is_training].mean(),
        "loss restricted": _losses(of_keys)[~is_training].mean(),
        "loss excluded": _losses(logits - of_keys)[is_training].mean(),
        "Gini": float(statistics.gini(jnp.asarray(np.sqrt(_power(embedding))))),
    }


def _power(embedding):
    """Returns the power of `[p, D]` at the frequencies 1 to (p - 1) / 2."""
    return (np.abs(np.fft.rfft(embedding, axis=0)[1:]) ** 2).sum(-1)


def _losses(logits):
    """Returns the loss of each sum, `[p, p]`, from `[p, p, p]` logits."""
    p = len(logits)
    a, b = np.indices((p, p))
    return special.logsumexp(logits, axis=-1) - logits[a, b, (a + b) % p]


def _initial(key):
    """Returns parameters, normal numbers over the square root of the width."""
    shapes = {
        "embedding": (_MODULUS + 1, _WIDTH),  # the numbers, and the equals sign
        "positions": (3, _WIDTH),
        "query": (_WIDTH, _WIDTH),
        "key": (_WIDTH, _WIDTH),
        "value": (_WIDTH, _WIDTH),
        "output": (_WIDTH, _WIDTH),
        "into": (_WIDTH, _HIDDEN),
        "out of": (_HIDDEN, _WIDTH),
        "logits": (_WIDTH, _MODULUS),
    }
    keys = jax.random.split(key, len(shapes))
    params = {
        name: jax.random.normal(key, shape) / math.sqrt(_WIDTH)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"bias": jnp.zeros(_HIDDEN)}


def _logits(params, sums):
    """Returns the logits of `[2, N]` sums at the equals sign, `[N, p]`.

    A key or value depends only on the number and its place, so there are only p per
    place; the query of the equals sign is the same for all sums.
    """
    tokens, places = params["embedding"], params["positions"]
    last = tokens[_MODULUS] + places[2]
    each = tokens[None, :_MODULUS] + places[:2, None], last[None, None]  # [2, p, D]
    query = (last @ params["query"]).reshape(_HEADS, -1)
    chosen = jax.nn.one_hot(sums, _MODULUS)  # products are faster than scattering
    scores, values = [], []
    for inputs, pick in zip(each, (chosen, None), strict=True):
        keys = (inputs @ params["key"]).reshape(*inputs.shape[:2], *query.shape)
        score = jnp.einsum("hk,tphk->tph", query, keys) / math.sqrt(query.shape[-1])
        value = inputs @ params["value"]
        if pick is None:
            pick = jnp.ones((1, sums.shape[1], 1))
        scores.append(jnp.einsum("tnp,tph->tnh", pick, score))
        values.append(jnp.einsum("tnp,tpd->tnd", pick, value))
    weights = jax.nn.softmax(jnp.concatenate(scores), axis=0)
    weights = jnp.repeat(weights, _WIDTH // _HEADS, axis=-1)
    mixed = (weights * jnp.concatenate(values)).sum(0)
    stream = last[None] + mixed @ params["output"]
    units = jax.nn.relu(stream @ params["into"] + params["bias"][None])
    return (stream + units @ params["out of"]) @ params["logits"]


def _each_loss(params, sums):
    logits = _logits(params, sums)
    answers = sums.sum(0) % _MODULUS
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
    return losses, logits.argmax(-1) == answers


@jax.jit
def _train(params, state, sums):
    """Takes `_EVERY` steps on all sums `[2, N]`."""

    def step(_, carry):
        params, state = carry
        gradient = jax.grad(lambda x: _each_loss(x, sums)[0].mean())(params)
        updates, state = _optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, _EVERY, step, (params, state))


_evaluate = jax.jit(_each_loss)
_all_logits = jax.jit(_logits)
