"""Measures a model's loss and accuracy on held-out examples.

N examples, D width of the vectors of sentences.
"""

import jax
import numpy as np

from mha_haiku.lab import heads
from mha_haiku.subjects import computation
from mha_haiku.subjects.subject import RunSubject, Subject, check_task, verb
from mha_haiku.training import devices, evaluation, tasks


@verb
def metrics(subject: Subject, whole: Subject | None = None) -> dict[str, float]:
    """Measures loss and accuracy on held-out examples, over all queries.

    If the task has no targets: the drift from the `whole` subject and `neighbours`,
    the share of examples whose nearest other example stays the same.
    """
    subject = check_task(subject, "metrics")
    vectors = None if whole is None else vectors_of(check_task(whole, "metrics"))
    return held_out(subject, vectors)


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
