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


def taken(batch: tasks.Example, rows: Any) -> tasks.Example:
    """Takes examples of a batch by indices; arrays without an axis of them stay."""
    count = len(batch.inputs)

    def take(x: Any) -> Any:
        return x[rows] if np.ndim(x) and len(x) == count else x

    return jax.tree.map(take, batch)


def first(batches: Sequence[tasks.Example], count: int) -> list[tasks.Example]:
    """Takes the first examples of batches, or all if there are fewer."""
    ends = np.cumsum([len(batch.inputs) for batch in batches])
    last = min(int(np.searchsorted(ends, count)), len(batches) - 1)
    size = len(batches[last].inputs)
    kept = size - max(0, int(ends[last]) - count)
    return [*batches[:last], taken(batches[last], slice(kept))]


def joined(batches: Sequence[tasks.Example], *, fills: bool = False) -> tasks.Example:
    """Makes one batch of several, whose examples must be alike.

    Or it `fills` shorter ones with zeros, and labels with -100, which do not count.
    """
    counts = [len(batch.inputs) for batch in batches]
    unlike = ValueError(
        "examples must be of one length, with equal settings, to be in one batch; "
        "batches has each."
    )
    shapes = [jax.tree.map(lambda x: np.shape(x)[1:], batch) for batch in batches]
    if not fills and any(shape != shapes[0] for shape in shapes):
        raise unlike

    def join(path: tuple, *parts: Any) -> Any:
        pairs = zip(parts, counts, strict=True)
        if all(np.ndim(x) and len(x) == count for x, count in pairs):
            longest = np.max([np.array(x.shape[1:], int) for x in parts], 0)
            value = -100 if "labels" in str(path[-1]) else 0

            def filled(x: Any) -> np.ndarray:
                ends = np.append(0, longest - np.array(x.shape[1:], int))
                return np.pad(x, np.stack([0 * ends, ends], 1), constant_values=value)

            return np.concatenate(list(map(filled, parts)))
        # Without an axis of examples.
        if not all(np.array_equal(x, parts[0]) for x in parts):
            raise unlike
        return parts[0]

    return jax.tree_util.tree_map_with_path(join, *batches)
