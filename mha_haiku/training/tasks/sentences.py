"""Sentences of a text, without targets: what encoders of sentences are studied on."""

import dataclasses
import functools
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks
from mha_haiku.training.tasks import base, sampling, text

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

    Metric: drift, how far an intervention turns the mean of a model's outputs; see
    `heads.measured_by_drift`. A sentence ends with a full stop, a question or an
    exclamation mark and has at least 4 words; longer ones are cut. No sentence is twice
    in a part.
    """

    name: ClassVar[str] = "sentences"
    metrics: ClassVar[tuple[str, ...]] = ("drift",)

    @property
    def baseline(self) -> dict[str, float]:
        return {"accuracy": float("nan"), "loss": float("nan")}

    def example(
        self, key: jax.Array, data: tuple[np.ndarray, np.ndarray]
    ) -> base.Example:
        tokens, length = sampling.row(key, data)
        weights = jnp.zeros(self.sequence_length, jnp.float32)
        return base.Example(tokens, tokens, weights, length)

    @functools.cached_property
    def train_data(self) -> tuple[np.ndarray, np.ndarray]:
        """Sentences `[N, T]` int32 to train on, and their lengths `[N]` int32."""
        return self._encoded(0, "training")

    @functools.cached_property
    def held_out_data(self) -> tuple[np.ndarray, np.ndarray]:
        return self._encoded(1, "held-out")

    def _encoded(self, part, name) -> tuple[np.ndarray, np.ndarray]:
        _ = self._split  # checks that the text is the run's
        texts = sentences(self.texts[part])
        if not texts:
            raise checks.ConfigError(
                f"path must have sentences in its {name} part, got none from "
                f"{self.path!r}."
            )
        return self.padded(texts)


def sentences(whole: str) -> list[str]:
    """Lists the sentences of a text, each once, with single spaces between words."""
    paragraphs = (" ".join(each.split()) for each in _PARAGRAPHS.split(whole))
    pieces = (piece for each in paragraphs for piece in _ENDS.split(each))
    return [
        piece
        for piece in dict.fromkeys(pieces)
        if piece.endswith((".", "!", "?")) and piece.count(" ") >= _FEWEST_WORDS - 1
    ]
