"""Adds modulo 47 and generalizes, late, to sums that are not in training.

Run: python -m experiments.train --config=configs/modular_addition.py
Expect: 100 percent held-out accuracy, loss 0.0005 (chance 2.13 percent, 3.850); 48 s on
2 CPU cores. It has learnt the training sums at step 300, and the held-out ones at 1000.
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("modular_addition")

    config.model.model_size = 128
    config.model.embedding.max_length = 4
    config.model.attention.num_heads = 4
    config.model.feed_forward.hidden_size = 256
    config.model.feed_forward.activation = "relu"

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 1.0

    config.training.steps = 1500
    config.training.batch_size = 256
    config.training.report_every = 100
    config.training.evaluate_every = 250
    config.training.checkpoint_every = 500

    return config
