"""Makes, cuts and joins batches of examples.

B batch, T positions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku.subjects import encoding
from mha_haiku.training import tasks


def example(tokens: Any, lengths: Any = None) -> tasks.Example:
    """Makes a batch of inputs without targets."""
    targets = np.zeros(tokens.shape[:2], np.int32)
    return tasks.Example(tokens, targets, np.zeros(targets.shape, np.float32), lengths)


def some_tokens(codec: encoding.Codec) -> tasks.Example:
    """Makes a batch of one row of tokens, to trace a model on."""
    tokens = np.zeros((1, 8), np.int32)
    batch = example(tokens)
    return batch._replace(decoder_inputs=tokens) if codec.has_decoder else batch


def taken(batch: tasks.Example, chosen: Any) -> tasks.Example:
    """Takes examples of a batch by indices; arrays without an axis of them stay."""
    count = len(batch.inputs)

    def take(x: Any) -> Any:
        return x[chosen] if np.ndim(x) and len(x) == count else x

    return jax.tree.map(take, batch)


def first(batches: Sequence[tasks.Example], count: int) -> list[tasks.Example]:
    """Takes the first examples of batches, or all if there are fewer."""
    ends = np.cumsum([len(batch.inputs) for batch in batches])
    last = min(int(np.searchsorted(ends, count)), len(batches) - 1)
    size = len(batches[last].inputs)
    kept = size - max(0, int(ends[last]) - count)
    return [*batches[:last], taken(batches[last], slice(kept))]


def padded(
    batches: Sequence[tasks.Example], *, with_lengths: bool
) -> list[tasks.Example]:
    """Fills batches up to one length with zeros that do not count, and sets lengths."""
    of = [x._replace(decoder_inputs=x.inputs[:, :0]) for x in batches]
    of = [
        y if x.decoder_inputs is None else x for x, y in zip(batches, of, strict=True)
    ]
    sides = ("inputs", "decoder_inputs")
    longest = [max(np.shape(getattr(x, side))[1] for x in of) for side in sides]

    def filled(batch: tasks.Example) -> tasks.Example:
        has_decoder, found = batch.decoder_inputs is not None, {}
        arrays = {**batch._asdict(), **(batch.others or {})}
        for name, x in arrays.items():
            of_targets = name in ("targets", "weights", "labels")
            is_decoder = name.startswith("decoder_") or (of_targets and has_decoder)
            side = batch.decoder_inputs if is_decoder else batch.inputs
            own = 0 if side is None else np.shape(side)[1]
            if np.ndim(x) > 1 and np.shape(x)[:2] == (len(batch.inputs), own):
                widths = [(0, 0)] * np.ndim(x)
                widths[1] = 0, longest[is_decoder] - own
                x = np.pad(x, widths, constant_values=-100 if name == "labels" else 0)
            elif with_lengths and x is None and name.endswith("lengths"):
                x = np.full(len(batch.inputs), own, np.int32) if own else None
            found[name] = x
        others = {name: found.pop(name) for name in batch.others or {}}
        return tasks.Example(**found | {"others": others or None})

    same = (
        [np.shape(x.inputs)[1] for x in batches],
        [x.lengths is None for x in batches],
    )
    return (
        list(map(filled, batches)) if any(len({*x}) > 1 for x in same) else [*batches]
    )


def joined(batches: Sequence[tasks.Example]) -> tasks.Example:
    """Makes one batch of several, whose examples must be alike."""
    counts = [len(batch.inputs) for batch in batches]
    unlike = ValueError(
        "examples must be of one length, with equal settings, to be in one batch; "
        "batches has each."
    )
    shapes = [jax.tree.map(lambda x: np.shape(x)[1:], batch) for batch in batches]
    if any(shape != shapes[0] for shape in shapes):
        raise unlike

    def join(*parts: Any) -> Any:
        pairs = zip(parts, counts, strict=True)
        if all(np.ndim(x) and len(x) == count for x, count in pairs):
            return np.concatenate(parts)
        # Without an axis of examples.
        if not all(np.array_equal(x, parts[0]) for x in parts):
            raise unlike
        return parts[0]

    return jax.tree.map(join, *batches)
