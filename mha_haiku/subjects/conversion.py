"""Converts a user's inputs to batches, and finds the texts along their maps.

B batch, T positions, D width of features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mha_haiku.core import arguments, checks
from mha_haiku.lab.heads import metrics, model_runs
from mha_haiku.subjects import encoding, example_rows
from mha_haiku.subjects.subject import Subject
from mha_haiku.training import tasks
from mha_haiku.training.tasks import tokenization

_NO_LABEL = -100  # in transformers, where no target counts


def batch_of(subject: Subject, inputs: Any) -> tuple[tasks.Example, bool]:
    """Makes a batch of inputs; also returns whether they were one example.

    They are a text or a list of texts, token ids `[T]` or `[B, T]`, features
    `[B, T, D]`, pixels `[B, C, H, W]`, a mapping of a wrapped function's keywords, a
    pair of source and target for a model with a decoder, or a batch of examples, which
    is not changed.

    Raises:
      TypeError: If the inputs are anything else.
      ValueError: If the model has no row for a token, or also needs a target.
    """
    needs_target = subject.task is not None and subject.task.target_length is not None
    if needs_target and not isinstance(inputs, tasks.Example):
        raise ValueError(
            "inputs must be a batch of examples for a model with a decoder, which "
            "reads a target too; examples(count) gives some."
        )
    codec, is_one = subject.codec, False
    if isinstance(inputs, tasks.Example):
        batch = inputs
    elif isinstance(inputs, Mapping):
        config = subject.model.config
        if config is not None:
            codec = codec._replace(predicts_next=config.family == "causal")
        batch = _of_mapping(codec, inputs)
    elif codec.has_decoder:
        batch, is_one = _of_pair(codec, inputs)
    else:
        batch, is_one = _batch(codec, inputs)
    model_runs.check_tokens(subject.model, subject.params, batch)
    codec.check(batch)
    batch = codec.bound(batch)
    compared_with_torch(subject, batch)
    return batch, is_one


def compared_with_torch(
    subject: Subject, batch: tasks.Example, *, always: bool = False
) -> Any:
    """Compares a PyTorch module with its trace on a batch; None of other subjects.

    Raises:
      ValueError: If they differ.
    """
    if subject.certifier is None:
        return None
    sides = {"": batch.inputs, "decoder_": batch.decoder_inputs}
    counted = [
        model_runs.counted(np.shape(inputs)[1], batch, side)
        for side, inputs in sides.items()
        if np.ndim(inputs) > 1
    ]
    return subject.certifier.see(batch.model_inputs(), counted, always=always)


def batches(
    subject: Subject, inputs: Any, *, targets: bool, required: bool = True
) -> list[tasks.Example]:
    """Makes batches of inputs, with the next tokens as targets if `targets`.

    Without `required`, inputs that have no next tokens stay without targets. Batches of
    examples are not changed, and labels stay targets. Only models that know
    lengths get padding: another function gets one text at a time if lengths differ.
    """
    if not (hasattr(inputs, "shape") or isinstance(inputs, Mapping | Sequence)):
        inputs = list(inputs)  # it may be gone through only once
    kinds = (Mapping, tasks.Example, *([tuple] if subject.codec.has_decoder else []))
    first: Any = inputs[0] if isinstance(inputs, list) and inputs else None
    if isinstance(first, kinds) or np.ndim(first) > 1:
        rows = (batches(subject, x, targets=targets, required=required) for x in inputs)
        return [batch for each in rows for batch in each]
    batch, _ = batch_of(subject, inputs)
    if isinstance(inputs, tasks.Example):
        return [batch]
    has_labels = isinstance(inputs, Mapping) and (
        _has_labels(subject.codec, inputs)
        or ("labels" in inputs and subject.codec.takes_labels)
    )
    if targets and batch.decoder_inputs is None and not has_labels:
        hides = subject.codec.mask_probability > 0
        try:
            batch = (_with_hidden_tokens if hides else _with_next_tokens)(
                subject, batch
            )
        except ValueError:
            are_tokens = np.issubdtype(np.asarray(batch.inputs).dtype, np.integer)
            if required or (are_tokens and subject.metric is metrics.loss):
                raise
    knows_lengths = subject.model.config is not None or subject.codec.knows_lengths
    is_padded = batch.lengths is not None or batch.decoder_lengths is not None
    if knows_lengths or not is_padded:
        return [batch]
    return [_alone(batch, i) for i in range(len(batch.inputs))]


def _alone(batch: tasks.Example, i: int) -> tasks.Example:
    """Makes a batch of one example of a batch, without its padding."""
    count, size = np.shape(batch.inputs)[:2]
    end = size if batch.lengths is None else int(batch.lengths[i])
    of_inputs = {size: end}  # where axes of this size end
    of_targets = of_inputs
    if batch.decoder_inputs is not None:
        longest = np.shape(batch.decoder_inputs)[1]
        of_rows = batch.decoder_lengths
        of_targets = {longest: longest if of_rows is None else int(of_rows[i])}

    def cut(x: Any, ends: Mapping[int, int]) -> Any:
        if not np.ndim(x) or len(x) != count:
            return x  # arrays without an axis of examples stay
        return x[i : i + 1, : ends.get(x.shape[1])] if x.ndim > 1 else x[i : i + 1]

    others = {
        x: cut(y, of_targets | of_inputs) for x, y in (batch.others or {}).items()
    }
    return tasks.Example(
        cut(batch.inputs, of_inputs),
        cut(batch.targets, of_targets),
        cut(batch.weights, of_targets),
        decoder_inputs=cut(batch.decoder_inputs, of_targets),
        others=others or None,
    )


def _with_next_tokens(subject: Subject, batch: tasks.Example) -> tasks.Example:
    tokens = np.asarray(batch.inputs)
    config = subject.model.config
    are_tokens = tokens.ndim == 2 and np.issubdtype(tokens.dtype, np.integer)
    if not are_tokens or (config is not None and config.family != "causal"):
        raise ValueError(
            f"examples must be a batch of examples, with targets: {subject.name!r} "
            "does not predict the next token."
        )
    valid = np.asarray(model_runs.valid(tokens.shape[1], batch, ""))
    weights = valid & np.pad(valid, [(0, 0), (0, 1)])[:, 1:]
    if not weights.any(1).all():
        raise ValueError("examples must have at least two tokens, to predict the next.")
    next_tokens = np.roll(tokens, -1, 1)
    weights &= ~np.isin(next_tokens, subject.codec.image_tokens)
    return batch._replace(targets=next_tokens, weights=weights.astype(np.float32))


def _with_hidden_tokens(subject: Subject, batch: tasks.Example) -> tasks.Example:
    """Hides a share of the tokens, at least one of a text, which become the targets."""
    codec, tokens = subject.codec, np.array(batch.inputs)
    are_hidden = np.array(model_runs.valid(tokens.shape[1], batch, ""))
    can_hide = are_hidden & ~np.isin(tokens, codec.special)
    for row, marks, free in zip(tokens, are_hidden, can_hide, strict=True):
        # The text is the seed: its hidden tokens are the same in every batch.
        draws = np.random.default_rng(row[marks]).random(np.sum(free))
        marks[:] = False
        marks[free] = draws <= max(codec.mask_probability, draws.min(initial=1))
    return batch._replace(
        inputs=np.where(are_hidden, np.int32(codec.mask or 0), tokens),
        targets=tokens.astype(np.int32),
        weights=are_hidden.astype(np.float32),
    )


def one(subject: Subject, inputs: Any) -> tasks.Example:
    """Makes a batch of one example."""
    batch = batch_of(subject, inputs)[0]
    if len(batch.inputs) != 1:
        raise ValueError(
            f"inputs must be one text or one row, got {len(batch.inputs)}."
        )
    return batch


def labels(
    subject: Subject, batch: tasks.Example, kind: str | None = None
) -> tuple[tuple, tuple]:
    """Lists the texts at queries and keys of maps of a kind, () if unknown.

    In an encoder-decoder, cross-attention has the texts of both sides, as have all maps
    together (None).
    """
    task, label = subject.task, subject.codec.label
    if batch.decoder_inputs is None or task is None:
        inputs_of_sides = batch.inputs, batch.decoder_inputs
        sources, targets = (
            tuple(tuple(map(label, row)) for row in np.asarray(x).tolist())
            if x is not None and np.ndim(x) == 2
            else ()
            for x in inputs_of_sides
        )
        if batch.decoder_inputs is None:
            return sources, sources
    else:
        sources, targets = (
            tuple(tuple(of(row)) for row in rows_of(batch))
            for of in (task.labels, task.decoder_labels)
        )
    sides = {"encoder": (sources, sources), "decoder": (targets, targets)}
    sides |= dict.fromkeys(("cross", None), (targets, sources))
    return sides.get(kind, ((), ()))


def _of_mapping(codec: encoding.Codec, inputs: Mapping[str, Any]) -> tasks.Example:
    """Makes a batch of a function's keywords.

    A mask of padding at the end becomes lengths, unless the function names the mask.
    Labels become targets, whose loss the function itself should not compute; a decoder
    reads them if its inputs are not given.
    """
    others = {name: np.asarray(x) for name, x in inputs.items()}
    labels = others["labels"] if _has_labels(codec, inputs) else None
    if labels is not None and not codec.takes_labels:
        del others["labels"]
    name = next((name for name in codec.names if name in others), None)
    if name is None:
        names = " or ".join(codec.names)
        raise ValueError(f"inputs must have {names}, got {checks.listed([*others])}.")
    batch = example_rows.example(
        others.pop(name), _lengths(codec, others, "attention_mask")
    )
    decoder_inputs = others.pop("decoder_input_ids", None)
    if labels is not None:
        batch = _with_labels(codec, batch, labels, reads=decoder_inputs is None)
    if decoder_inputs is not None:
        batch = batch._replace(decoder_inputs=decoder_inputs)
    mask = "decoder_attention_mask"
    if mask in others and batch.decoder_inputs is not None:
        batch = batch._replace(decoder_lengths=_lengths(codec, others, mask))
    batch = batch._replace(others=others)
    if labels is None or labels.ndim != 2:
        return batch
    # A query at padding has nothing to predict from, whatever its label.
    counted = model_runs.valid(labels.shape[1], batch, "decoder")
    return batch._replace(weights=batch.weights * np.asarray(counted))


def _has_labels(codec: encoding.Codec, inputs: Mapping[str, Any]) -> bool:
    """Checks whether a mapping has classes `[B, T]` or `[B]` that no input is."""
    labels = np.asarray(inputs.get("labels"))
    are_classes = labels.ndim in (1, 2) and np.issubdtype(labels.dtype, np.integer)
    return are_classes and "labels" not in codec.parameters


def _with_labels(
    codec: encoding.Codec, batch: tasks.Example, labels: np.ndarray, *, reads: bool
) -> tasks.Example:
    """Makes labels the targets, and if `reads` what a decoder reads."""
    counted = labels != _NO_LABEL
    targets = np.where(counted, labels, 0).astype(np.int32)
    if codec.has_decoder and reads and labels.ndim == 2:
        if codec.start is None:
            raise ValueError(
                "inputs must have decoder_input_ids, got labels alone: the model's "
                "config names no start token to put in front."
            )
        padding = codec.start if codec.padding is None else codec.padding
        ends = None if counted.all() else _ends(counted)
        read = np.where(counted, labels, padding).astype(np.int32)
        batch = batch._replace(
            decoder_inputs=_after_start(codec, read),
            decoder_lengths=None if ends is None else np.maximum(ends, 1),
        )
    elif codec.predicts_next and not codec.has_decoder and labels.ndim == 2:
        targets, counted = (np.roll(x, -1, 1) for x in (targets, counted))
        counted[:, -1] = False
    return batch._replace(targets=targets, weights=counted.astype(np.float32))


def _after_start(codec: encoding.Codec, tokens: Any) -> np.ndarray:
    """Makes what a decoder reads to write tokens `[B, T]`."""
    starts = np.full_like(tokens[:, :1], codec.start)
    return np.concatenate([starts, tokens[:, :-1]], 1)


def _lengths(
    codec: encoding.Codec, others: dict[str, np.ndarray], name: str
) -> np.ndarray | None:
    """Takes a mask of padding at the end out of a mapping, and returns lengths."""
    mask = others.get(name)
    if mask is None or mask.ndim != 2 or name in codec.parameters:
        return None
    lengths = _ends(mask != 0)
    if lengths is not None:
        del others[name]
    return lengths


def _ends(valid: np.ndarray) -> np.ndarray | None:
    """Returns lengths `[B]` if only the ends of rows `[B, T]` are not valid."""
    lengths = valid.sum(1, dtype=np.int32)
    is_padding = np.array_equal(valid, np.arange(valid.shape[1]) < lengths[:, None])
    return lengths if is_padding else None


def _of_pair(codec: encoding.Codec, inputs: Any) -> tuple[tasks.Example, bool]:
    """Makes a batch of a source and the target that a decoder should write."""
    if not isinstance(inputs, tuple) or len(inputs) != 2 or codec.start is None:
        raise ValueError(
            "inputs must be a tuple of source and target, or a mapping with "
            "decoder_input_ids, for a model with a decoder."
        )
    (source, is_one), (target, _) = (_batch(codec, each) for each in inputs)
    tokens, lengths = target.inputs, target.lengths
    if tokens.ndim != 2 or len(tokens) != len(source.inputs):
        raise ValueError(
            "a target must be a text or tokens for each source, got shapes "
            f"{tokens.shape} for {source.inputs.shape}."
        )
    valid = np.ones(tokens.shape, np.float32)
    if lengths is not None:
        valid *= np.arange(tokens.shape[1]) < lengths[:, None]
    return source._replace(
        targets=tokens.astype(np.int32),
        weights=valid,
        decoder_inputs=_after_start(codec, tokens),
        decoder_lengths=lengths,
    ), is_one


def _batch(codec: encoding.Codec, inputs: Any) -> tuple[tasks.Example, bool]:
    if isinstance(inputs, str):
        return _of_rows([codec.encode(inputs)]), True
    is_list = isinstance(inputs, list | tuple)
    if is_list and any(isinstance(x, str) for x in inputs):
        arguments.check("inputs", inputs, Sequence[str])
        return _of_rows([codec.encode(text) for text in inputs]), False
    if is_list and inputs and np.ndim(inputs[0]) == 1:
        return _of_rows(inputs), False
    array = np.asarray(inputs)
    if (
        array.dtype.kind not in "iuf"
        or array.ndim not in (1, 2, 3, 4)
        or not array.size
    ):
        raise TypeError(
            "inputs must be a text, a list of texts, tokens [T] or [B, T], features "
            "[B, T, D], pixels [B, C, H, W] or a batch of examples, got "
            f"{type(inputs).__name__} of {array.dtype}, shape {array.shape}."
        )
    is_one = array.ndim == 1
    return example_rows.example(array[None] if is_one else array), is_one


def _of_rows(rows: Sequence[Any]) -> tasks.Example:
    rows = [np.asarray(row) for row in rows]
    if not all(map(len, rows)):
        raise ValueError("inputs must not be empty.")
    other = next((row.dtype for row in rows if row.dtype.kind not in "iu"), None)
    if other is not None:
        raise TypeError(
            "inputs must be an array [B, T, D] if they are features; rows of lists are "
            f"tokens, which are integers, got {other}."
        )
    tokens, lengths = tokenization.padded(rows, dtype=np.int32)
    return example_rows.example(
        tokens, None if (lengths == tokens.shape[1]).all() else lengths
    )


def lengths(batch: tasks.Example) -> list[int]:
    """Lists the number of valid inputs of each example."""
    if batch.lengths is not None:
        return np.asarray(batch.lengths).tolist()
    size = np.shape(batch.inputs)[1]
    return np.asarray(model_runs.valid(size, batch, "")).sum(1).tolist()


def rows_of(batch: tasks.Example) -> list[tasks.Example]:
    """Splits a batch on the host into its examples."""
    return [example_rows.taken(batch, i) for i in range(len(batch.inputs))]
