"""From what a user has at hand to a batch: texts, token ids, arrays, examples.

B batch, T positions, D width of features.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import checks
from mha_haiku.training import tasks


class Codec(NamedTuple):
    """Text to tokens and back.

    Attributes:
      encode: From a text to its tokens, `[T]` integers.
      decode: From tokens to their text.
      label: From a token to its text.
      prompt: As `encode`, without the special tokens that end a text.
    """

    encode: Callable[[str], Any]
    decode: Callable[[Sequence[int]], str]
    label: Callable[[int], str]
    prompt: Callable[[str], Any]


def of_task(task: tasks.Task) -> Codec:
    """Returns the codec of a task."""

    def decode(tokens):
        pieces = b"".join(task.piece(int(token)) for token in tokens)
        return pieces.decode("utf-8", errors="replace").removeprefix(" ")

    return Codec(task.encode, decode, task.token_label, task.prompt)


def of_tokenizer(tokenizer: Any) -> Codec:
    """Returns the codec of a tokenizer: of `tokenizers`, `transformers` or similar.

    Raises:
      TypeError: If it has no `encode`, or no `decode`.
    """
    for name in ("encode", "decode"):
        if not callable(getattr(tokenizer, name, None)):
            raise TypeError(
                "tokenizer must have encode(text) and decode(tokens), got "
                f"{type(tokenizer).__name__}, which has no {name}."
            )

    def encode(text):
        tokens = tokenizer.encode(text)
        return np.asarray(getattr(tokens, "ids", tokens), np.int32)

    def decode(tokens):
        return tokenizer.decode([int(token) for token in tokens])

    return Codec(encode, decode, lambda token: decode([token]), encode)


def batch(codec: Codec | None, inputs: Any) -> tuple[tasks.Example, bool]:
    """Returns inputs as a batch without targets, and whether they were one example.

    Args:
      codec: What encodes a text; None: there is no tokenizer.
      inputs: A text or a list of texts, token ids `[T]` or `[B, T]`, features
        `[B, T, D]`, or a batch of examples, which stays as it is.

    Raises:
      TypeError: If inputs are something else.
      ValueError: If they are empty, or a text without a tokenizer.
    """
    if isinstance(inputs, tasks.Example):
        return inputs, False
    is_texts = isinstance(inputs, list | tuple) and any(
        isinstance(x, str) for x in inputs
    )
    if isinstance(inputs, str) or is_texts:
        if codec is None:
            raise ValueError(
                "inputs must be arrays: the model has no tokenizer.\n"
                "mh.wrap(function, params, tokenizer=...) gives it one."
            )
        texts = [inputs] if isinstance(inputs, str) else inputs
        inputs = [np.asarray(codec.encode(text), np.int32) for text in texts]
        tokens, lengths = padded(inputs)
        return example(tokens, lengths), not is_texts
    if isinstance(inputs, list | tuple) and inputs and np.ndim(inputs[0]) == 1:
        tokens, lengths = padded([np.asarray(row) for row in inputs])
        return example(tokens, lengths), False
    array = np.asarray(inputs)
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2, 3) or not array.size:
        raise TypeError(
            "inputs must be a text, a list of texts, tokens [T] or [B, T], features "
            f"[B, T, D] or a batch of examples, got {type(inputs).__name__} of "
            f"{array.dtype}, shape {array.shape}."
        )
    is_one = array.ndim == 1
    return example(array[None] if is_one else array, None), is_one


def example(tokens: np.ndarray, lengths: np.ndarray | None = None) -> tasks.Example:
    """Returns a batch without targets."""
    if lengths is not None and (lengths == tokens.shape[1]).all():
        lengths = None
    targets = np.zeros(tokens.shape[:2], np.int32)
    return tasks.Example(tokens, targets, np.zeros(targets.shape, np.float32), lengths)


def padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of tokens as `[B, T]`, and the length of each, `[B]`."""
    lengths = np.array([len(row) for row in rows], np.int32)
    if not lengths.all():
        raise ValueError("inputs must not be empty.")
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, own in zip(tokens, rows, strict=True):
        row[: len(own)] = own
    return tokens, lengths


def labels(codec: Codec | None, batch: tasks.Example) -> tuple[tuple[str, ...], ...]:
    """Returns the text of each token of each example; () of features."""
    tokens = np.asarray(batch.inputs)
    if tokens.ndim != 2:
        return ()
    label = str if codec is None else codec.label
    return tuple(tuple(label(token) for token in row) for row in tokens.tolist())


def one_token(codec: Codec | None, token: Any) -> int:
    """Returns a token, given by its number or by a text of one token.

    Raises:
      ValueError: If the text is of several tokens.
    """
    if not isinstance(token, str):
        return int(token)
    with checks.user_mistakes():
        if codec is None:
            raise ValueError(
                f"{token!r} must be a token's number: there is no tokenizer."
            )
    tokens = np.asarray(codec.prompt(token)).tolist()
    if len(tokens) != 1:
        raise ValueError(
            f"an answer must be a text of one token, got {token!r}, which has "
            f"{len(tokens)}: {[codec.label(x) for x in tokens]}."
        )
    return tokens[0]
