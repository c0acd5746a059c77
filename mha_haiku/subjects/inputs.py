"""From what a user has to a batch: texts, token ids, arrays, examples.

B batch, T positions, D width of features.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.subjects.studies import generation, workbench
from mha_haiku.training import tasks


def _refuse(wanted: str, given: Any) -> Any:
    raise ValueError(
        f"{wanted}, got {given!r}: the model has no tokenizer.\n"
        "mh.wrap(function, params, tokenizer=...) gives it one."
    )


_no_encode = functools.partial(_refuse, "inputs must be arrays")
_no_decode = functools.partial(_refuse, "tokens cannot be decoded")
_no_answer = functools.partial(_refuse, "an answer must be the number of a token")


class Codec(NamedTuple):
    """Text to tokens and back; without a tokenizer there are arrays alone."""

    encode: Callable[[str], Any] = _no_encode  # to `[T]` integers
    decode: Callable[[Sequence[int]], str] = _no_decode
    label: Callable[[int], str] = str  # of one token
    prompt: Callable[[str], Any] = _no_answer  # without special tokens that end a text


def of_task(task: tasks.Task) -> Codec:
    """Makes the codec of a task."""
    if task.num_tokens is None:
        return Codec()

    def decode(tokens):
        return generation.text_of(task, tokens).removeprefix(" ")

    return Codec(task.encode, decode, task.token_label, task.prompt)


def of_tokenizer(tokenizer: Any) -> Codec:
    """Makes the codec of a tokenizer of `tokenizers`, `transformers`, ...; or None."""
    if tokenizer is None:
        return Codec()
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


def batch(codec: Codec, inputs: Any) -> tuple[tasks.Example, bool]:
    """Makes a batch without targets; also returns whether inputs were one example.

    They are a text or a list of texts, token ids `[T]` or `[B, T]`, features
    `[B, T, D]`, or a batch of examples, which stays as it is.
    """
    if isinstance(inputs, tasks.Example):
        return inputs, False
    if isinstance(inputs, str):
        return _of_rows([codec.encode(inputs)]), True
    is_list = isinstance(inputs, list | tuple)
    if is_list and any(isinstance(x, str) for x in inputs):
        return _of_rows([codec.encode(text) for text in inputs]), False
    if is_list and inputs and np.ndim(inputs[0]) == 1:
        return _of_rows(inputs), False
    array = np.asarray(inputs)
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2, 3) or not array.size:
        raise TypeError(
            "inputs must be a text, a list of texts, tokens [T] or [B, T], features "
            f"[B, T, D] or a batch of examples, got {type(inputs).__name__} of "
            f"{array.dtype}, shape {array.shape}."
        )
    is_one = array.ndim == 1
    return _example(array[None] if is_one else array), is_one


def _of_rows(rows) -> tasks.Example:
    rows = [np.asarray(row, np.int32) for row in rows]
    if not all(map(len, rows)):
        raise ValueError("inputs must not be empty.")
    tokens, lengths = workbench.padded(rows)
    return _example(tokens, None if (lengths == tokens.shape[1]).all() else lengths)


def _example(tokens, lengths=None) -> tasks.Example:
    targets = np.zeros(tokens.shape[:2], np.int32)
    return tasks.Example(tokens, targets, np.zeros(targets.shape, np.float32), lengths)


def labels(codec: Codec, batch: tasks.Example) -> tuple[tuple[str, ...], ...]:
    """Lists the text of each token of each example; () for features."""
    tokens = np.asarray(batch.inputs)
    if tokens.ndim != 2:
        return ()
    return tuple(tuple(map(codec.label, row)) for row in tokens.tolist())


def one_token(codec: Codec, token: Any) -> int:
    """Reads a token, given by its number or by a text of one token."""
    if not isinstance(token, str):
        return int(token)
    tokens = np.asarray(codec.prompt(token)).tolist()
    if len(tokens) != 1:
        raise ValueError(
            f"an answer must be a text of one token, got {token!r}, which has "
            f"{len(tokens)}: {[codec.label(x) for x in tokens]}."
        )
    return tokens[0]
