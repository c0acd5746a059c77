"""Adds modulo 47 and generalizes, late, to sums that are not in training.

Run: python -m experiments.train --config=configs/modular_addition.py
Expect: 100 percent held-out accuracy, loss 0.0005 (chance 2.13 percent, 3.850); 48 s on
2 CPU cores. It learns the training sums by step 300, and the held-out ones by 1000.
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("modular_addition").replace(
        model=dict(
            model_size=128,
            embedding=dict(max_length=4),
            attention=dict(num_heads=4),
            feed_forward=dict(hidden_size=256, activation="relu"),
        ),
        optimizer=dict(learning_rate=3e-3, warmup_steps=100, weight_decay=1.0),
        training=dict(
            steps=1500,
            batch_size=256,
            report_every=100,
            evaluate_every=250,
            checkpoint_every=500,
        ),
    )
