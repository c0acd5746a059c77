"""Decides at each position whether the number of ones so far is odd.

Run: python -m experiments.train --config=configs/parity.py
Expect: 99.99 percent held-out accuracy, loss 0.0007 (chance 50 percent, 0.693); 85 s on
2 CPU cores.
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("parity").replace(
        model=dict(
            family="causal",
            num_layers=2,
            model_size=64,
            attention=dict(num_heads=4),
            feed_forward=dict(hidden_size=128),
        ),
        optimizer=dict(learning_rate=2e-3, warmup_steps=100),
        training=dict(
            steps=2000, report_every=100, evaluate_every=500, checkpoint_every=500
        ),
    )
