"""Reverses a sequence of tokens: the map of its only head is the anti-diagonal.

Run: python -m experiments.train --config=configs/reverse.py
Expect: 100 percent held-out accuracy, loss 0.0001 (chance 10 percent, 2.303); 10 s on 2
CPU cores.

All of these are the defaults, set here as an example; other configs set only changes.
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("reverse").replace(
        task=dict(sequence_length=16, num_tokens=10),
        model=dict(
            family="encoder", num_layers=1, model_size=32, attention=dict(num_heads=1)
        ),
        optimizer=dict(learning_rate=1e-2),
        training=dict(steps=400),
    )
