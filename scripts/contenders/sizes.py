"""The sizes that all contenders share."""

from typing import NamedTuple

import ml_collections

from experiments import config_files

# What length_64 changes in configs/reverse.py.
_LENGTH_64 = [
    ("config.task.sequence_length", "64"),
    ("config.model.max_length", "64"),
    ("config.model.model_size", "128"),
    ("config.model.num_heads", "4"),
    ("config.model.num_layers", "2"),
    ("config.model.hidden_size", "256"),
]
_OVERRIDES = {"reverse": [], "length_64": _LENGTH_64}

TRAINING_CASES = tuple(_OVERRIDES)


class AttentionSize(NamedTuple):
    """Of self-attention: B examples of T positions, width D, H heads."""

    batch: int = 32
    length: int = 128
    width: int = 256
    heads: int = 8

    @property
    def head_width(self) -> int:
        """Query, key and value size of a head."""
        return self.width // self.heads


ATTENTION = AttentionSize()


def training_config(case: str) -> ml_collections.ConfigDict:
    """Returns the config of a run for one of `TRAINING_CASES`."""
    config = config_files.load("configs/reverse.py")
    config_files.override(config, _OVERRIDES[case])
    return config
