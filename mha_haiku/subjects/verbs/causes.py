"""Traces an answer to its causes: patched activations, paths, circuits of edges."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mha_haiku.core import arguments
from mha_haiku.lab import heads
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects import answers as answered
from mha_haiku.subjects import computation, conversion, encoding, example_rows
from mha_haiku.subjects.subject import (
    Part,
    Subject,
    check_parameters,
    part_index,
    parts_of,
    refuse,
    verb,
)
from mha_haiku.training import tasks

_LOGITS = "logit of the wrong answer - of the right one"
_EXAMPLES = 32  # of a circuit without texts, by default


@verb
def patch(
    subject: Subject,
    clean: Any,
    corrupted: Any,
    *,
    answers: tuple[Any, Any] | None = None,
    into: str = "corrupted",
    **options: Any,
) -> heads.Patched:
    """Measures the effect of replacing an activation by the other text's.

    The metric is the logit of the wrong answer minus the logit of the right one, at the
    last position: patching activations that carry the answer makes it fall.

    Args:
      subject: The model.
      clean: A text, or several.
      corrupted: Texts of the same numbers of tokens.
      answers: The right and the wrong answer: tokens, or texts of one token. Default to
        the model's answers to the clean and to the corrupted text.
      into: The run that is patched, "clean" or "corrupted".
      **options: `what` and `per_position` of `heads.activation_patching`.

    Raises:
      ValueError: If the texts differ in their numbers of tokens, or the model
        answers the same to both and no answers are given.
    """
    pair, tokens = _pair(subject, clean, corrupted, answers)
    result = heads.activation_patching(*pair, into=into, **options)
    parts = _parts(subject, pair) if options.get("what", "heads") == "heads" else []
    numbers = tuple(x.layer for x in parts)
    return dataclasses.replace(result, tokens=tokens, numbers=numbers, unit=_LOGITS)


@verb
def paths(
    subject: Subject,
    clean: Any,
    corrupted: Any,
    *,
    answers: tuple[Any, Any] | None = None,
    **options: Any,
) -> heads.Edges:
    """Measures the effect when a head reads another head's output for the other text.

    Arguments are as in `patch`, and by keyword as in `heads.path_patching`.
    """
    pair, _ = _pair(subject, clean, corrupted, answers)
    parts = _parts(subject, pair)
    for name in {"senders", "receivers"} & options.keys():
        pairs = options[name]
        if parts and arguments.fits(pairs, Sequence[tuple[int, int]]):
            options[name] = [(part_index(parts, x), head) for x, head in pairs]
    result = heads.path_patching(*pair, **options)
    return dataclasses.replace(_numbered(result, parts), unit=_LOGITS)


def _parts(subject: Subject, pair: tuple[heads.Measured, Any]) -> list[Part]:
    """Lists the attention parts, by the model's numbers of layers; [] of kinds."""
    parts = parts_of(subject, next(iter(pair[0].batches)))
    return [] if any(part.kind for part in parts) else parts


def _numbered(edges: heads.Edges, parts: Sequence[Part]) -> heads.Edges:
    """Puts numbers of layers in place of the numbers of attention parts."""
    numbers = {i: part.layer for i, part in enumerate(parts)}
    senders, receivers = (
        np.array([(numbers.get(part, part), head) for part, head in ends.tolist()])
        for ends in (edges.senders, edges.receivers)
    )
    return dataclasses.replace(edges, senders=senders, receivers=receivers)


@verb(command="circuits", folder="heads")
def circuit(
    subject: Subject,
    text: str | Any = None,
    corrupted: str | Any = None,
    *,
    edges: int = 50,
    measure: str | None = None,
    answers: tuple[Any, Any] | None = None,
    examples: int | None = None,
    metric: str | None = None,
    **options: Any,
) -> heads.Circuit:
    """Finds the edges that carry the answer, and how much of it they carry.

    An edge goes from the embedding, a head or a feed-forward part to the queries, keys
    or values of a head, to a feed-forward part or to the logits. Without texts,
    held-out examples are paired with the next example of the same lengths, with padding
    in the same places; an example without a partner is left out.

    Args:
      subject: The model.
      text: A clean text, or several, instead of held-out examples.
      corrupted: Corrupted texts of as many tokens each.
      edges: Maximum number of edges in the circuit.
      measure: Measure that ranks edges, of mh.heads.EDGE_MEASURES; default:
        integrated_edge_attribution. Edges of a function are only between heads, and
        have one measure; see `heads.circuit_of_heads`.
      answers: The right and the wrong answer to the texts.
      examples: Number of held-out examples to average over, without texts; default: 32.
      metric: Metric of held-out examples, loss or drift; default: the run's.
      **options: As in `heads.circuit`.

    Raises:
      ValueError: If only one of the texts is given, or they differ in their numbers of
        tokens; if no two examples are of the same lengths; or if answers are given
        without texts, or examples or a metric with them.
    """
    if (text is None) != (corrupted is None):
        raise ValueError("text and corrupted must be given together.")
    if text is None and answers is not None:
        raise ValueError(f"answers must be None without texts, got {answers!r}.")
    if text is not None:
        if metric is not None or examples is not None:
            raise ValueError(
                "metric and examples must be None with texts, got "
                f"{metric!r} and {examples!r}."
            )
        pair, _ = _pair(subject, text, corrupted, answers)
        title = f"{subject.title}, {text!r} and {corrupted!r}"
    else:
        examples = _EXAMPLES if examples is None else examples
        of = computation.measured(subject, examples, metric=metric)
        pairs = [_of_examples(batch) for batch in of.batches]
        pairs = [pair for pair in pairs if len(pair[0].inputs)]
        if not pairs:
            raise ValueError(
                f"examples must have two of the same lengths, got {examples}."
            )
        batches, others = zip(*pairs, strict=True)
        pair = of._replace(batches=batches), others
        count = sum(len(batch.inputs) for batch in batches)
        title = f"{subject.title}, {count} pairs"
    if subject.model.config is None:
        for name, value in {"measure": measure, **options}.items():
            if value is not None:
                refuse(subject, f"{name}={value!r}", "has only edges between heads")
        result = heads.circuit_of_heads(*pair, edges=edges)
        numbered = _numbered(result.edges, _parts(subject, pair))
        result = dataclasses.replace(result, edges=numbered)
    else:
        measure = measure or "integrated_edge_attribution"
        result = heads.circuit(*pair, edges=edges, measure=measure, **options)
    return dataclasses.replace(result, title=title)


@verb
def compositions(subject: Subject, kind: str = "k") -> answered.Compositions:
    """Measures how much each head reads from every other head, by weights only.

    It reads by its queries, keys or values, as `kind` "q", "k" or "v" says.
    """
    check_parameters(subject, "compositions")
    scores = heads.circuits.compositions(subject.model, subject.params, kind)
    return answered.Compositions(kind, scores)


def _pair(
    subject: Subject, clean: Any, corrupted: Any, answers: tuple[Any, Any] | None
):
    texts = clean, corrupted
    batches = [conversion.batch_of(subject, text)[0] for text in texts]
    if len(batches[0].inputs) != len(batches[1].inputs):
        count, got = (len(x.inputs) for x in batches)
        raise ValueError(f"corrupted must be as many as clean, {count}, got {got}.")
    rows = zip(*map(conversion.lengths, batches), strict=True)
    for i, (length, got) in enumerate(rows):
        if length != got:
            labels = conversion.labels(subject, batches[1])[1]
            shorter = [list(row[:got]) for row in labels[i:][:1]]
            raise ValueError(
                f"corrupted must have as many tokens as clean, {length}, got "
                f"{got}: {shorter}."
            )
    config = subject.model.config
    if config is not None and not config.output.logits:
        refuse(subject, "an answer", "gives no logits")
    right, wrong = _answers(subject, batches, answers)
    targets = np.stack([right, wrong], -1).astype(np.int32)
    weights = np.ones(targets.shape, np.float32)
    # Positions of an encoder-decoder are of two texts.
    has_kinds = batches[0].decoder_inputs is not None
    labels = () if has_kinds else conversion.labels(subject, batches[0])[0]
    clean, corrupted = ([x._replace(targets=targets, weights=weights)] for x in batches)
    metric = heads.metrics.logit_difference
    of = heads.Measured(subject.model, metric, subject.params, clean)
    return (of, corrupted), labels[0] if len(labels) == 1 else ()


def _answers(
    subject: Subject, batches: Sequence[tasks.Example], answers: tuple[Any, Any] | None
):
    if answers is not None:
        classes = [encoding.one_token(subject.codec, x) for x in answers]
        model_and_batch = subject.model, subject.params, batches[0]
        model_runs.check_classes("answers", *model_and_batch, classes)
        return np.broadcast_to(classes, (len(batches[0].inputs), 2)).T
    right, wrong = (
        np.asarray(heads.metrics.at_last(subject.logits(x), x).argmax(-1))
        for x in batches
    )
    if (right == wrong).any():
        task = subject.task
        label = subject.codec.label if task is None else task.class_label
        same = label(int(right[right == wrong][0]))
        raise ValueError(
            f"answers must be given, (right, wrong): the model answers {same!r} to "
            "both."
        )
    return right, wrong


def _of_examples(batch: tasks.Example) -> list[tasks.Example]:
    """Returns the examples that have another with the same padding, and the others."""
    sides = {"": batch.inputs, "decoder_": batch.decoder_inputs}
    counted = [
        model_runs.counted(np.shape(inputs)[1], batch, side)
        for side, inputs in sides.items()
        if inputs is not None
    ]
    _, groups = np.unique(np.concatenate(counted, 1), axis=0, return_inverse=True)
    groups = groups.ravel()
    after = np.arange(len(groups))
    for group in range(groups.max() + 1):
        members = np.flatnonzero(groups == group)
        after[members] = np.roll(members, -1)
    clean = np.flatnonzero(after != np.arange(len(groups)))
    return [example_rows.taken(batch, i) for i in (clean, after[clean])]
