"""Measures a model's loss and accuracy on held-out examples.

N examples, D width of the vectors of sentences.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from mha_haiku.lab import heads
from mha_haiku.subjects import computation, example_rows
from mha_haiku.subjects.subject import (
    EXAMPLES,
    RunSubject,
    Subject,
    check_task,
    has_task,
    verb,
)
from mha_haiku.training import evaluation, losses, tasks, train_step
from mha_haiku.training.tasks import own_data


class Metrics(dict[str, float]):
    """Metrics by name, which are printed with what the loss is of."""

    def __init__(self, values: Any, of: str = ""):
        super().__init__(values)
        self.of = of  # such as "loss of the next token, nats"

    def __repr__(self) -> str:
        return super().__repr__() + (f"  # {self.of}" if self.of else "")


jax.tree_util.register_pytree_node(
    Metrics,
    lambda x: (tuple(x.values()), (tuple(x), x.of)),
    lambda kind, values: Metrics(zip(kind[0], values, strict=True), kind[1]),
)


@verb
def metrics(
    subject: Subject, whole: Subject | None = None, *, examples: Any = None
) -> Metrics:
    """Measures loss and accuracy on held-out or other examples, over all queries.

    If the task has no targets: the drift from the `whole` subject and `neighbours`,
    the share of examples whose nearest other example stays the same. A wrapped model
    has its metric, the loss that its module computes, or the loss of the targets.

    Other examples are as in `importance`; a wrapped model may have its own.
    """
    if has_task(subject) and examples is None:
        vectors = None if whole is None else vectors_of(check_task(whole, "metrics"))
        return held_out(subject, vectors)
    examples = (subject.batches or EXAMPLES) if examples is None else examples
    batches = computation.batches_of(subject, examples)
    if has_task(subject):
        return _means(subject, batches)
    model, name = computation.with_loss(subject, next(iter(batches)))
    batches = map(own_data.with_weights, batches)
    return _means(subject.replace(model=model, task=tasks.Wrapped), batches, name)


def _means(subject: Any, batches: Iterable[tasks.Example], name: str = "") -> Metrics:
    @jax.jit
    def sums(params: Any, batch: tasks.Example) -> losses.Sums:
        arguments = subject.model, subject.task, params, None, batch
        return train_step.loss_sums(*arguments, is_training=False)

    parts = [sums(subject.params, batch) for batch in batches]
    total = jax.tree.map(lambda *x: sum(x), *parts)
    name = name or f"loss of {computation.targets_of(subject, None)}, nats"
    return Metrics(evaluation.means(total), name)


def held_out(subject: RunSubject, vectors: np.ndarray | None = None) -> Metrics:
    """Measures what `metrics` does, with the vectors of the whole model.

    They are the result of `vectors_of`, by default this model's.
    """
    vectors_now = vectors_of(subject)
    if vectors_now is not None:
        before = vectors_now if vectors is None else vectors
        ones = np.ones(len(vectors_now))
        example = tasks.Example(vectors_now, before, ones)
        drifts = heads.metrics.drift(vectors_now, example)
        # Examples that were drawn twice count once: their neighbors are copies.
        _, once = np.unique(before.round(3), axis=0, return_index=True)
        same = heads.drift.same_neighbours(before[once], vectors_now[once])
        return Metrics({"drift": float(drifts.mean()), "neighbours": same})
    return _means(subject, example_rows.first(*_batches(subject)))


def vectors_of(subject: RunSubject) -> np.ndarray | None:
    """Returns mean-pooled outputs of held-out examples, `[N, D]`; None with targets."""
    if "loss" in subject.task.metrics:
        return None
    batches, count = _batches(subject)
    return heads.drift.vectors(subject.model, subject.params, batches)[:count]


def _batches(subject: RunSubject) -> tuple[list[tasks.Example], int]:
    training = subject.config.training
    count = training.evaluation_examples
    return list(computation.Batches(subject, count, training.batch_size)), count
