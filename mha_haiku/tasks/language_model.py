"""Predict the next token of a text."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.tasks import base as task_lib
from mha_haiku.tasks import sampling, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(text.TextTask):
    r"""The target at position t is the token at position t + 1 of the text.

    Example, T = 5 characters of "to be or":

        inputs   t o ␣ b e
        targets  o ␣ b e ␣
        weights  1 1 1 1 1

    Metric: accuracy over all positions. Chance is the unigram predictor, see
    `TextTask.baseline`. Attributes are those of `TextTask`.
    """

    name: ClassVar[str] = "language_model"

    def example(self, key: jax.Array, data: np.ndarray) -> task_lib.Example:
        """Returns the window of `data` at a random place."""
        num_places = len(data) - self.sequence_length
        start = sampling.integers(sampling.words(key), num_places)
        window = jax.lax.dynamic_slice_in_dim(
            jnp.asarray(data), start, self.sequence_length + 1
        )
        targets = window[1:]
        return task_lib.Example(window[:-1], targets, task_lib.all_count(targets))
