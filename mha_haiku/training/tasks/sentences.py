"""Sentences of a text, without targets, to study encoders of sentences."""

import dataclasses
import functools
import re
from typing import ClassVar

import numpy as np

from mha_haiku.core import checks
from mha_haiku.training.tasks import base, text

_PARAGRAPHS = re.compile(r"\n\s*\n")
_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_FEWEST_WORDS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentences(text.TextTask):
    """Inputs are single sentences, padded to T; there is nothing to predict.

    Example, T = 8, with a tokenizer that puts [CLS] and [SEP] around a text:

        inputs   [CLS] the cat sat . [SEP] 0 0
        weights    0    0   0   0  0   0   0 0
        lengths  6

    Metric: drift, the change in the direction of the mean of a model's outputs by an
    intervention; see `heads.measured_by_drift`. A sentence ends with a period, question
    mark or exclamation mark and has at least 4 words; longer ones are cut. No sentence
    is twice in a part.
    """

    name: ClassVar[str] = "sentences"
    metrics: ClassVar[tuple[str, ...]] = ("drift",)

    @property
    def baseline(self) -> dict[str, float]:
        return {"accuracy": float("nan"), "loss": float("nan")}

    @functools.cached_property
    def train_data(self) -> base.Example:
        return self._encoded(0, "training")

    @functools.cached_property
    def held_out_data(self) -> base.Example:
        return self._encoded(1, "held-out")

    def _encoded(self, part, name) -> base.Example:
        _ = self._split  # checks that the text is the run's
        texts = sentences(self.texts[part])
        if not texts:
            raise checks.ConfigError(
                f"path must have sentences in its {name} part, got none from "
                f"{self.path!r}."
            )
        tokens, lengths = self.padded(texts)
        return base.Example(tokens, tokens, np.zeros(tokens.shape, "f4"), lengths)


def sentences(whole: str) -> list[str]:
    """Lists the sentences of a text, each once, with single spaces between words."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in _PARAGRAPHS.split(whole))
    pieces = (piece for paragraph in paragraphs for piece in _ENDS.split(paragraph))
    return [
        piece
        for piece in dict.fromkeys(pieces)
        if piece.endswith((".", "!", "?")) and piece.count(" ") >= _FEWEST_WORDS - 1
    ]
