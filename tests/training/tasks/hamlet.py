"""A small text, and tasks over it."""

import pathlib
from typing import Any

import numpy as np

TEXT = "to be or not to be, that is the question"


def task_of(kind: type, folder: pathlib.Path, sequence_length: int) -> Any:
    """Returns a task of a kind over the text, a token per character."""
    path = folder / "hamlet.txt"
    path.write_text(TEXT)
    return kind(
        sequence_length=sequence_length,
        path=str(path),
        tokenizer="characters",
        vocabulary_size=256,
        held_out_fraction=0.4,
    )


def windows(tokens: np.ndarray, size: int) -> set[tuple[int, ...]]:
    """Returns all that stands in a window of a size."""
    return {tuple(tokens[i : i + size].tolist()) for i in range(len(tokens) - size + 1)}
