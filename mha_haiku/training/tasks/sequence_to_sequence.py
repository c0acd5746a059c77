"""Base classes of tasks that map a source sequence to a target of another length.

Dimensions: `S` positions of the source, `T` of the target, `N` pairs, `V` tokens of the
target.
"""

import abc
import functools
import json
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks
from mha_haiku.training.tasks import base, sampling, tokenization

LARGEST_VOCABULARY = 2**14  # tokens of a text; rows are int16


class Pairs(NamedTuple):
    """Sources and targets on the host, filled up to the longest."""

    sources: np.ndarray  # [N, S] integers
    source_lengths: np.ndarray  # [N] int32
    targets: np.ndarray  # [N, T] integers, without end tokens
    target_lengths: np.ndarray  # [N] int32, at most T - 1

    @classmethod
    def of(
        cls,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        longest: int | None = None,
    ) -> "Pairs":
        """Pads tokens to the longest, with room for the end token of a target."""
        length = 1 + (longest or max(map(len, targets)))
        padded = tokenization.padded
        return cls(*padded(sources, longest), *padded(targets, length))


class SequenceToSequence(base.Task):
    """A task for encoder-decoder models: a source goes in, a target comes out.

    A target's V tokens are the classes 0 to V - 1; V is the start token, V + 1 the end
    token. A decoder reads the start token and the target, and predicts the target and
    the end token, which is the last that counts. After it come end tokens of weight 0.
    Example, S = 6, T = 5, a source of 4 tokens and a target of 3:

        inputs          7 2 9 4 0 0
        lengths         4
        decoder_inputs  start a b c end
        targets         a b c end end
        weights         1 1 1 1 0
        decoder_lengths 4
    """

    counts_exact: ClassVar[bool] = True
    model_defaults = {"family": "encoder_decoder", "embedding.max_length": 64}
    target_length: int
    """T: the longest target and its end token."""

    @property
    @abc.abstractmethod
    def num_target_tokens(self) -> int:
        """V, number of tokens of targets, without start and end."""

    @property
    def num_classes(self) -> int:
        return self.num_target_tokens + 2

    @property
    def start_token(self) -> int:
        return self.num_target_tokens

    @property
    def end_token(self) -> int:
        return self.num_target_tokens + 1

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return (self.end_token,)

    def class_label(self, c: int) -> str:
        special = {self.start_token: "<start>", self.end_token: "<end>"}
        return special.get(c) or self.target_label(c)

    def target_label(self, token: int) -> str:
        return str(token)

    def encode(self, text: str) -> np.ndarray:
        return self.fitting(super().encode(text))

    def fitting(self, tokens: np.ndarray) -> np.ndarray:
        """Checks and returns the tokens of a user's source; ConfigError if over S."""
        if len(tokens) > self.sequence_length:
            raise checks.ConfigError(
                f"text must have at most {self.sequence_length} tokens, as the longest "
                f"source of {self.name}, got {len(tokens)}."
            )
        return tokens

    def labels(self, example: base.Example) -> list[str]:
        return _padded(super().labels(example), example.lengths)

    def decoder_labels(self, example: base.Example) -> list[str]:
        return _padded(super().decoder_labels(example), example.decoder_lengths)

    def pair(
        self,
        source: jax.Array,
        source_length: jax.Array,
        target: jax.Array,
        target_length: jax.Array,
    ) -> base.Example:
        """Makes the example of a source `[S]` and a target `[T]`, without end token.

        Lengths are `[]` integers; tokens past them are ignored.
        """
        position = jnp.arange(self.target_length)
        in_source = jnp.arange(self.sequence_length) < source_length
        target = jnp.where(position < target_length, target, self.end_token)
        target = target.astype(jnp.int32)
        start = jnp.full(1, self.start_token, jnp.int32)
        return base.Example(
            inputs=jnp.where(in_source, source, 0).astype(jnp.int32),
            targets=target,
            weights=(position <= target_length).astype(jnp.float32),
            lengths=jnp.asarray(source_length, jnp.int32),
            decoder_inputs=jnp.concatenate([start, target[:-1]]),
            decoder_lengths=jnp.asarray(target_length + 1, jnp.int32),
        )


class PairsTask(base.DataTask, SequenceToSequence):
    """Draws examples from `Pairs`, uniformly."""

    def _counts(self, part: Pairs) -> np.ndarray:
        counted = np.arange(part.targets.shape[1]) < part.target_lengths[:, None]
        tokens = np.bincount(part.targets[counted], minlength=self.num_classes)
        tokens[self.end_token] += len(part.targets)
        return tokens

    def example(self, key: jax.Array, data: Pairs) -> base.Example:
        return self.pair(*sampling.row(key, data))


class TextPairsTask(PairsTask):
    """`PairsTask` of texts: each side has a tokenizer."""

    @functools.cached_property
    def _tokenizers(self) -> tuple[tokenization.Tokenizer, tokenization.Tokenizer]:
        """The tokenizers of sources and of targets, as the run has stored them."""
        with tokenization.errors_named("tokenizer.json"):
            source, target = json.loads(self._kept.tokenizer)["tokenizers"]
        return tokenization.from_json(source), tokenization.from_json(target)

    def encode(self, text: str) -> np.ndarray:
        return self.fitting(tokenization.encoded(self._tokenizers[0], text))

    @property
    def num_tokens(self) -> int:
        return self._tokenizers[0].num_tokens

    @property
    def num_target_tokens(self) -> int:
        return self._tokenizers[1].num_tokens

    def token_label(self, token: int) -> str:
        return self._tokenizers[0].label(token)

    def target_label(self, token: int) -> str:
        return self._tokenizers[1].label(token)

    def piece(self, token: int) -> bytes:
        if token >= self.num_target_tokens:
            return self.class_label(token).encode()
        return self._tokenizers[1].piece(token)

    def question(self, example: base.Example) -> str:
        tokens = np.asarray(example.inputs)[: example.lengths].tolist()
        return self._tokenizers[0].decode(tokens)


def _padded(labels: list[str], length: jax.Array | np.ndarray | None) -> list[str]:
    if length is None:
        return labels
    return labels[:length] + ["<pad>"] * (len(labels) - int(length))
