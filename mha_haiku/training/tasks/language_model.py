"""Predict the next token of a text."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.training.tasks import base, sampling, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(text.TextTask):
    r"""The target at position t is the token at position t + 1 of the text.

    Example, T = 5 characters of "to be or":

        inputs   t o ␣ b e
        targets  o ␣ b e ␣
        weights  1 1 1 1 1

    Metric: accuracy over all positions except special tokens, which the file of a
    tokenizer may put around the window. Chance is the unigram predictor, see
    `TextTask.baseline`.
    """

    name: ClassVar[str] = "language_model"
    continues: ClassVar[bool] = True

    def example(self, key: jax.Array, data: np.ndarray) -> base.Example:
        window, is_text = self.window(
            sampling.words(key), data, self.sequence_length + 1
        )
        weights = jnp.asarray(is_text[1:], jnp.float32)
        return base.Example(window[:-1], window[1:], weights)
