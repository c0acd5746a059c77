"""Predicts the next character of Python's documentation: a causal language model.

Run: python -m experiments.train --config=configs/text_lm.py
Expect: 67 percent held-out accuracy, loss 1.26 (unigram 24.7 percent, 3.238); 207 s on
2 CPU cores.
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("language_model").replace(
        model=dict(
            num_layers=3,
            model_size=128,
            embedding=dict(positions="rotary", max_length=64),
            attention=dict(num_heads=4),
            feed_forward=dict(hidden_size=512),
        ),
        optimizer=dict(learning_rate=2e-3, warmup_steps=100, weight_decay=0.01),
        training=dict(
            steps=1500,
            batch_size=32,
            report_every=100,
            evaluate_every=500,
            checkpoint_every=500,
        ),
    )
