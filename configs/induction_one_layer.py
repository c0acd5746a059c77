"""Continues a repeated random sequence with one layer, which cannot do it.

Run: python -m experiments.train --config=configs/induction_one_layer.py
Expect: 12 percent held-out accuracy, loss 2.84 (chance 3.12 percent, 3.466); 42 s on 2
CPU cores. It learns which tokens have not been repeated yet, not which is next.
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("induction").replace(
        model=dict(
            model_size=64,
            embedding=dict(max_length=32),
            attention=dict(num_heads=4),
            feed_forward=dict(hidden_size=128),
        ),
        optimizer=dict(learning_rate=3e-3, warmup_steps=100),
        training=dict(
            steps=1000,
            batch_size=64,
            report_every=100,
            evaluate_every=500,
            checkpoint_every=500,
        ),
    )
