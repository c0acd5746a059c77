"""Predict the next token of a text, or restore hidden ones."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.training.tasks import base, sampling, text

_MASK = "[MASK]"
# 15 percent of the tokens are chosen: 80 percent of these become the mask, 10 percent a
# random token, 10 percent stay. Thresholds for uniform uint32 words.
_MASKED = np.uint32(round(0.15 * 0.8 * 2**32))
_REPLACED = np.uint32(round(0.15 * 0.9 * 2**32))
_CHOSEN = np.uint32(round(0.15 * 2**32))


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLanguageModel(text.TextTask):
    """The target is the original token; only chosen positions count.

    Each position is chosen with probability 0.15, independently. A chosen token
    becomes `[MASK]` (80 percent), a random token (10) or stays (10), as in BERT.
    Example, T = 8 characters of "to be or not"; positions 1, 4 and 6 are chosen and
    become the mask, a random token, and the same token:

        inputs   t [MASK] ␣ b x ␣ o r
        targets  . o . . e . o .
        weights  0 1 0 0 1 0 1 0

    Special tokens, which the file of a tokenizer may put around the window, are never
    chosen. Metric: accuracy over the chosen positions. Chance is the unigram predictor,
    see `TextTask.baseline`. The mask is the tokenizer's; where it has none, the last
    token, `num_tokens - 1`, which is no class. A user's text may contain `[MASK]`.

    Source: Devlin et al. 2018, https://arxiv.org/abs/1810.04805.
    """

    name: ClassVar[str] = "masked_language_model"

    @property
    def num_tokens(self) -> int:
        """Number of the tokenizer's tokens, plus one for the mask if it has none."""
        return self.num_classes + (self.encoder.mask is None)

    @property
    def mask_token(self) -> int:
        mask = self.encoder.mask
        return self.num_classes if mask is None else mask[0]

    def token_label(self, token: int) -> str:
        return _MASK if token == self.mask_token else self.class_label(token)

    def example(self, key: jax.Array, data: np.ndarray) -> base.Example:
        random = sampling.words(key, 2 * self.sequence_length + 1)
        choice, replacement = random[1:].reshape(2, self.sequence_length)
        targets, is_text = self.window(random[0], data, self.sequence_length)
        other = sampling.integers(replacement, self.num_classes)
        inputs = jnp.where(choice < _REPLACED, other, targets)
        inputs = jnp.where(choice < _MASKED, jnp.int32(self.mask_token), inputs)
        inputs = jnp.where(is_text, inputs, targets)
        weights = (is_text & (choice < _CHOSEN)).astype(jnp.float32)
        return base.Example(inputs, targets, weights)

    def _tokens(self, text: str) -> np.ndarray:
        if self.encoder.mask is not None:  # the tokenizer knows it
            return super()._tokens(text.replace(_MASK, self.encoder.mask[1]))
        mask = np.array([self.mask_token], np.int32)
        pieces = []
        for piece in map(super()._tokens, text.split(_MASK)):
            pieces += [mask, piece]
        return np.concatenate(pieces[1:])
