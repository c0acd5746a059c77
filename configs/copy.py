"""Copies a sequence of tokens, which needs no head: the residual stream is enough.

Run: python -m experiments.train --config=configs/copy.py
Expect: 100 percent held-out accuracy, loss 0.0008 (chance 10 percent, 2.303); 20 s on 2
CPU cores. The maps show no pattern.
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("copy").replace(
        model=dict(
            num_layers=2,
            model_size=64,
            attention=dict(num_heads=4),
            feed_forward=dict(hidden_size=128),
        ),
        optimizer=dict(learning_rate=3e-3),
        training=dict(steps=200, evaluate_every=100, checkpoint_every=100),
    )
