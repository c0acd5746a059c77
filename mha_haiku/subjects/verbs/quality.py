"""Measures a model's loss and accuracy on held-out examples.

N examples, D width of the vectors of sentences.
"""

from typing import Any

import jax
import numpy as np

from mha_haiku.lab import heads
from mha_haiku.subjects import computation
from mha_haiku.subjects.subject import (
    EXAMPLES,
    RunSubject,
    Subject,
    check_task,
    has_task,
    verb,
)
from mha_haiku.training import devices, evaluation, losses, tasks, train_step


@verb
def metrics(
    subject: Subject, whole: Subject | None = None, *, examples: Any = None
) -> dict[str, float]:
    """Measures loss and accuracy on held-out or other examples, over all queries.

    If the task has no targets: the drift from the `whole` subject and `neighbours`,
    the share of examples whose nearest other example stays the same. A wrapped model
    has its metric, the loss that its module computes, or the loss of the targets, and
    without targets no accuracy.

    Args:
      subject: The model.
      whole: The model to measure the drift from; by default this one.
      examples: Examples as in `importance`; default: a task's held-out ones, or all
        examples of a wrapped model.
    """
    if not has_task(subject) or examples is not None:
        default = subject.batches or EXAMPLES
        return _on(subject, default if examples is None else examples)
    vectors = None if whole is None else vectors_of(check_task(whole, "metrics"))
    return held_out(subject, vectors)


def _on(subject: Subject, examples: Any) -> dict[str, float]:
    """Measures a subject on batches."""
    batches = computation.batches_of(subject, examples)
    model, task = subject.model, subject.task or tasks.Wrapped
    if not has_task(subject):
        model = computation.with_loss(subject, next(iter(batches)))

    @jax.jit
    def sums(params: Any, batch: tasks.Example) -> losses.Sums:
        given: Any = model, task, params, None, batch
        return train_step.loss_sums(*given, is_training=False)

    if not (has_targets := any(np.any(batch.weights) for batch in batches)):
        batches = [tasks.without_targets(batch) for batch in batches]
    parts = [sums(subject.params, batch) for batch in batches]
    found = evaluation.means(jax.tree.map(lambda *x: sum(x), *parts))
    return found if has_targets else {"loss": found["loss"]}


def held_out(
    subject: RunSubject, vectors: np.ndarray | None = None
) -> dict[str, float]:
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
        return {"drift": float(drifts.mean()), "neighbours": same}
    training = subject.config.training
    placement = devices.Replicas(jax.local_devices()[:1])
    program = evaluation.make_evaluation(
        subject.model,
        subject.task,
        num_examples=training.evaluation_examples,
        batch_size=training.batch_size,
        placement=placement,
    )
    params, data = placement.put((subject.params, subject.task.held_out_data))
    sums = program(params, data, np.uint32(subject.config.seed))
    return evaluation.means(placement.fetch(sums))


def vectors_of(subject: RunSubject) -> np.ndarray | None:
    """Returns mean-pooled outputs of held-out examples, `[N, D]`; None with targets."""
    if "loss" in subject.task.metrics:
        return None
    training = subject.config.training
    count = training.evaluation_examples
    batches = computation.Batches(subject, count, training.batch_size)
    return heads.drift.vectors(subject.model, subject.params, batches)[:count]
