"""What tasks share that turn a source sequence into a target sequence of other length.

Dimensions: `S` positions of the source, `T` of the target, `N` pairs, `V` tokens of the
target.
"""

import abc
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks
from mha_haiku.training.tasks import base, sampling, tokenization

# What a source is filled up with; masked as its length says, so any token would do.
_PADDING = 0
LARGEST_VOCABULARY = 2**14  # tokens of a text; rows are int16


class Pairs(NamedTuple):
    """Sources and targets on the host, filled up to the longest."""

    sources: np.ndarray  # [N, S] integers
    source_lengths: np.ndarray  # [N] int32
    targets: np.ndarray  # [N, T] integers, without end tokens
    target_lengths: np.ndarray  # [N] int32, at most T - 1

    def at(self, chosen: np.ndarray) -> "Pairs":
        """Returns some of the pairs, by index or as booleans `[N]`."""
        return Pairs(*(each[chosen] for each in self))


class SequenceToSequence(base.Task):
    """A task for encoder-decoder models: a source goes in, a target comes out.

    A target's V tokens are the classes 0 to V - 1; V is the start token, V + 1 the end
    token. A decoder reads the start token and the target, and predicts the target and
    the end token, which is the last that counts. Behind it come end tokens of weight 0.
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
        """Number of tokens of targets, start and end included."""
        return self.num_target_tokens + 2

    @property
    def start_token(self) -> int:
        return self.num_target_tokens

    @property
    def end_token(self) -> int:
        return self.num_target_tokens + 1

    def class_label(self, c: int) -> str:
        return {self.start_token: "<start>", self.end_token: "<end>"}.get(
            c
        ) or self.target_label(c)

    def target_label(self, token: int) -> str:
        """Returns the text of a target's token, in [0, V)."""
        return str(token)

    def encode(self, text: str) -> np.ndarray:
        return self.fitting(super().encode(text))

    def fitting(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens of a user's source, which are at most S.

        Raises:
          ConfigError: If they are more.
        """
        if len(tokens) > self.sequence_length:
            raise checks.ConfigError(
                f"text must have at most {self.sequence_length} tokens, as the longest "
                f"source of {self.name}, got {len(tokens)}."
            )
        return tokens

    def labels(self, example: base.Example) -> list[str]:
        return _padded_labels(super().labels(example), example.lengths)

    def decoder_labels(self, example: base.Example) -> list[str]:
        return _padded_labels(super().decoder_labels(example), example.decoder_lengths)

    def pair(
        self,
        source: jax.Array,
        source_length: jax.Array,
        target: jax.Array,
        target_length: jax.Array,
    ) -> base.Example:
        """Returns the example of a source and a target.

        Args:
          source: `[S]` integers; what stands behind its length is ignored.
          source_length: `[]` integer, 0 to S.
          target: `[T]` integers; what stands behind its length is ignored.
          target_length: `[]` integer, 0 to T - 1: without the end token.
        """
        position = jnp.arange(self.target_length)
        in_source = jnp.arange(self.sequence_length) < source_length
        target = jnp.where(position < target_length, target, self.end_token)
        target = target.astype(jnp.int32)
        start = jnp.full(1, self.start_token, jnp.int32)
        return base.Example(
            inputs=jnp.where(in_source, source, _PADDING).astype(jnp.int32),
            targets=target,
            weights=(position <= target_length).astype(jnp.float32),
            lengths=jnp.asarray(source_length, jnp.int32),
            decoder_inputs=jnp.concatenate([start, target[:-1]]),
            decoder_lengths=jnp.asarray(target_length + 1, jnp.int32),
        )


class PairsTask(SequenceToSequence):
    """Draws examples from `Pairs`, uniformly."""

    baseline_name = "unigram"

    @property
    @abc.abstractmethod
    def _split(self) -> tuple[Pairs, Pairs]:
        """The pairs to train on, and those to evaluate on."""

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """The unigram predictor; see `unigram_baseline`."""
        return unigram_baseline(*self._split, self.num_classes)

    def example(self, key: jax.Array, data: Pairs) -> base.Example:
        index = sampling.integers(sampling.words(key), len(data.sources))
        return self.row(index, data)

    def row(self, index: jax.Array | int, data: Pairs) -> base.Example:
        """Returns pair `index` of `data`: for going over all of them, each once."""
        return self.pair(*(jnp.asarray(each)[index] for each in data))

    @property
    def data_shapes(self) -> Pairs:
        source, target = (1, self.sequence_length), (1, self.target_length)
        return Pairs(
            jax.ShapeDtypeStruct(source, np.int16),
            jax.ShapeDtypeStruct((1,), np.int32),
            jax.ShapeDtypeStruct(target, np.int16),
            jax.ShapeDtypeStruct((1,), np.int32),
        )


class TextPairsTask(PairsTask):
    """`PairsTask` of texts: each side has a tokenizer."""

    @property
    @abc.abstractmethod
    def _tokenizers(self) -> tuple[tokenization.Tokenizer, tokenization.Tokenizer]:
        """Those of sources and of targets."""

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
        pieces = b"".join(map(self._tokenizers[0].piece, tokens))
        return pieces.decode(errors="replace")


def padded(tokens: np.ndarray, lengths: np.ndarray, length: int) -> np.ndarray:
    """Returns rows of tokens as one array, `[N, length]` int16.

    Args:
      tokens: The tokens of all rows on end.
      lengths: `[N]`, how many of them each row has.
      length: That of what is returned, at least the longest.
    """
    rows = np.full((len(lengths), length), _PADDING, np.int16)
    rows[np.arange(length) < lengths[:, None]] = tokens
    return rows


def unigram_baseline(
    train: Pairs, held_out: Pairs, num_classes: int
) -> dict[str, float]:
    """Returns `base.unigram` of the targets of pairs, end tokens included.

    Args:
      train: The pairs whose targets are counted.
      held_out: Those on which it is measured.
      num_classes: C, with the end token as the last class.
    """

    def counts(pairs):
        counted = np.arange(pairs.targets.shape[1]) < pairs.target_lengths[:, None]
        tokens = np.bincount(pairs.targets[counted], minlength=num_classes)
        tokens[-1] += len(pairs.targets)
        return tokens

    return base.unigram(counts(train), counts(held_out))


def _padded_labels(labels: list[str], length: jax.Array | None) -> list[str]:
    return [
        label if length is None or position < length else "<pad>"
        for position, label in enumerate(labels)
    ]
