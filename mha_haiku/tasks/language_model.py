"""Predict the next token of a text."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.tasks import base, sampling, text


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

    def example(self, key: jax.Array, data: np.ndarray) -> base.Example:
        """Returns a window of `data` from a random position."""
        num_starts = len(data) - self.sequence_length
        start = sampling.integers(sampling.words(key), num_starts)
        window = jax.lax.dynamic_slice_in_dim(
            jnp.asarray(data), start, self.sequence_length + 1
        )
        targets = window[1:]
        return base.Example(window[:-1], targets, base.all_count(targets))
