"""The sizes that all contenders share."""

from typing import NamedTuple

from mha_haiku import runs
from mha_haiku.commands import config_files

# A source of 63 tokens to a target of as many and an end token; no length varies.
TRANSLATION = [
    ("config.task.name", "reverse_seq2seq"),
    ("config.task.min_length", "63"),
    ("config.task.max_length", "63"),
    ("config.model.family", "encoder_decoder"),
    ("config.model.embedding.max_length", "64"),
    ("config.model.num_layers", "3"),
    ("config.model.model_size", "256"),
    ("config.model.attention.num_heads", "8"),
    ("config.model.feed_forward.hidden_size", "1024"),
    ("config.training.batch_size", "16"),
]


class AttentionSize(NamedTuple):
    """Of self-attention: B examples of T positions, width D, H heads."""

    batch: int
    length: int
    width: int
    heads: int
    is_causal: bool = False

    @property
    def head_width(self) -> int:
        """Query, key and value size of a head."""
        return self.width // self.heads


class CoreSize(NamedTuple):
    """Of attention without projections, of arrays `[B, T, H, K]`."""

    length: int
    heads: int
    head_width: int = 64
    batch: int = 1
    is_causal: bool = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a query, key or value."""
        return (self.batch, self.length, self.heads, self.head_width)


def training_config() -> runs.RunConfig:
    """Returns the config of an encoder-decoder that reverses sequences."""
    return config_files.override(config_files.load("configs/reverse.py"), TRANSLATION)
